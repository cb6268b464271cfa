"""`edge kv`, `edge d1` and `edge r2` on a state directory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import click.testing
import pytest

from edge.bindings.kv import Kv
from edge.cli import cli
from edge.isolates.base import Binding, Bundle

Run = Callable[..., click.testing.Result]

CONFIG = """
name = "shop"
main = "main.py"
[[kv_namespaces]]
binding = "CACHE"
id = "cache-id"
[[d1_databases]]
binding = "DB"
database_name = "shop-db"
[[r2_buckets]]
binding = "PHOTOS"
bucket_name = "photos"
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "edge.toml").write_text(CONFIG)
    (tmp_path / "main.py").write_text("")
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str, stdin: bytes = b"", code: int = 0) -> click.testing.Result:
        result = click.testing.CliRunner().invoke(cli, list(arguments), input=stdin)
        assert result.exit_code == code, result.output
        return result

    return invoke


def test_kv(run: Run, tmp_path: Path) -> None:
    run("kv", "key", "put", "greeting", "héllo", "--binding", "CACHE", "--metadata", '{"a": 1}', "--ttl", "3600")
    assert run("kv", "key", "get", "greeting", "--local").stdout_bytes == "héllo".encode()
    (tmp_path / "file").write_bytes(b"\x00" * 100_000)
    run("kv", "key", "put", "long", "--path", "file", "--namespace-id", "cache-id")
    assert run("kv", "key", "get", "long").stdout_bytes == b"\x00" * 100_000
    rows = json.loads(run("kv", "key", "list", "--prefix", "gr", "--json").stdout)
    assert [(row["name"], row["metadata"]) for row in rows] == [("greeting", {"a": 1})]
    assert "greeting" in run("kv", "key", "list").stdout
    run("kv", "key", "delete", "greeting")
    assert "there is no key 'greeting'" in run("kv", "key", "get", "greeting", code=1).stderr


def test_kv_that_is_wrong(run: Run) -> None:
    assert "has no KV namespace 'NOPE'; it has: CACHE" in run("kv", "key", "list", "--binding", "NOPE", code=2).stderr
    assert "give the VALUE" in run("kv", "key", "put", "k", code=2).stderr
    assert "not JSON" in run("kv", "key", "put", "k", "v", "--metadata", "{", code=2).stderr
    assert "at least 60" in run("kv", "key", "put", "k", "v", "--ttl", "5", code=1).stderr
    assert "cannot read nope" in run("kv", "key", "put", "k", "--path", "nope", code=2).stderr


def test_the_state_directory_is_where_told(run: Run, tmp_path: Path) -> None:
    run("kv", "key", "put", "k", "v", "--state-dir", "elsewhere")
    assert (tmp_path / "elsewhere" / "kv" / "dev" / "cache-id").is_dir()
    assert not (tmp_path / ".edge").exists()


async def test_kv_beside_a_node_that_has_the_namespace_open(run: Run, tmp_path: Path) -> None:
    node, caller, binding = Kv(tmp_path / ".edge"), Bundle("w", "v", "/", "m.py"), Binding("kv", {"id": "cache-id"})
    await node.call(caller, binding, "put", ["k", b"from the node", {}], None)

    assert (await asyncio.to_thread(run, "kv", "key", "get", "k")).stdout == "from the node"
    await asyncio.to_thread(run, "kv", "key", "put", "k", "from the command line")
    found = await node.call(caller, binding, "get", ["k"], None)
    assert found.value["value"] == b"from the command line"
    await node.close()


def test_d1_execute(run: Run, tmp_path: Path) -> None:
    (tmp_path / "seed.sql").write_text(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT);\nINSERT INTO t (name) VALUES ('a;b');"
    )
    assert json.loads(run("d1", "execute", "shop-db", "--file", "seed.sql", "--json").stdout)[0]["statements"] == 2
    results = json.loads(
        run("d1", "execute", "DB", "--command", "INSERT INTO t (name) VALUES ('c'); SELECT * FROM t", "--json").stdout
    )
    assert [result["meta"]["changes"] for result in results] == [1, 0]
    assert results[1]["results"] == [{"id": 1, "name": "a;b"}, {"id": 2, "name": "c"}]
    table = run("d1", "execute", "--local", "--command", "SELECT * FROM t").stdout
    assert table.split("\n")[0].split() == ["id", "name"]
    assert "a;b" in table
    assert "2 rows changed" in run("d1", "execute", "--command", "DELETE FROM t").stderr
    assert "No rows" in run("d1", "execute", "--command", "SELECT * FROM t").stdout


def test_d1_that_is_wrong(run: Run, tmp_path: Path) -> None:
    assert "no such table: nope" in run("d1", "execute", "--command", "SELECT * FROM nope", code=1).stderr
    assert (
        "has no D1 database 'other'; it has: shop-db" in run("d1", "execute", "other", "--command", "x", code=2).stderr
    )
    assert "either --command" in run("d1", "execute", code=2).stderr
    (tmp_path / "bad.sql").write_text("CREATE TABLE a (x);\n\nCREATE TABLE a (x);")
    assert "Error in line 3: table a already exists" in run("d1", "execute", "--file", "bad.sql", code=1).stderr


def test_d1_migrations(run: Run, tmp_path: Path) -> None:
    assert "No migrations yet" in run("d1", "migrations", "list").stdout
    first = Path(run("d1", "migrations", "create", "shop-db", "make users").stdout.strip())
    assert first == tmp_path / "migrations" / "0001_make_users.sql"
    first.write_text("CREATE TABLE users (id INTEGER PRIMARY KEY);")
    second = Path(run("d1", "migrations", "create", "more").stdout.strip())
    assert second.name == "0002_more.sql"
    second.write_text("ALTER TABLE users ADD COLUMN name TEXT;\nDROP TABLE nope;")
    failed = run("d1", "migrations", "apply", "shop-db", "--local", code=1)
    assert "0001_make_users.sql is applied" in failed.stderr
    assert "Error in line 2: no such table: nope" in failed.stderr
    rows = json.loads(run("d1", "migrations", "list", "--json").stdout)
    assert [(row["name"], bool(row["applied_at"])) for row in rows] == [(first.name, True), (second.name, False)]
    second.write_text("ALTER TABLE users ADD COLUMN name TEXT;")
    assert "0002_more.sql is applied" in run("d1", "migrations", "apply").stderr
    assert "No migrations to apply" in run("d1", "migrations", "apply").stderr
    run("d1", "execute", "--command", "INSERT INTO users (name) VALUES ('x')")


def test_r2(run: Run, tmp_path: Path) -> None:
    photo = bytes(range(256)) * 1000
    (tmp_path / "cat.png").write_bytes(photo)
    run("r2", "object", "put", "photos/pets/cat.png", "--file", "cat.png")
    run("r2", "object", "put", "PHOTOS/note", "--pipe", stdin=b"short")
    assert run("r2", "object", "get", "photos/note", "--pipe").stdout_bytes == b"short"
    assert run("r2", "object", "get", "photos/pets/cat.png", "--pipe").stdout_bytes == photo
    (tmp_path / "cat.png").unlink()
    run("r2", "object", "get", "photos/pets/cat.png")
    assert (tmp_path / "cat.png").read_bytes() == photo
    rows = json.loads(run("r2", "object", "list", "--prefix", "pets/", "--json").stdout)
    assert [(row["key"], row["size"], row["httpMetadata"]) for row in rows] == [
        ("pets/cat.png", len(photo), {"contentType": "image/png"})
    ]
    assert "256.0 kB" in run("r2", "object", "list", "photos").stdout
    run("r2", "object", "delete", "photos/note", "--local")
    assert "there is no object 'note'" in run("r2", "object", "get", "photos/note", "--pipe", code=1).stderr
    assert "is no BUCKET/KEY" in run("r2", "object", "delete", "photos", code=2).stderr
    assert "has no R2 bucket 'x'; it has: photos" in run("r2", "object", "delete", "x/y", code=2).stderr
