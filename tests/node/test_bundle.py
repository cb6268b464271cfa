from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.config import AiConfig, Config, LimitsConfig, VersionMetadataConfig
from edge.errors import ConfigError
from edge.isolates.base import Binding
from edge.node.bundle import bundle_of


def test_a_bundle_is_what_the_configuration_says(tmp_path: Path) -> None:
    main = tmp_path / "src" / "worker.py"
    main.parent.mkdir()
    main.write_text("")
    bundle = bundle_of(Config("shop", main, vars={"A": 1}, ai=AiConfig(binding="MODELS")))
    assert (bundle.worker, bundle.root, bundle.main) == ("shop", str(main.parent), "worker.py")
    assert (bundle.vars, bundle.bindings) == ({"A": 1}, {"MODELS": Binding("ai")})
    assert bundle_of(Config("shop", main)).bindings == {}


def test_what_the_version_covers_besides_the_code(tmp_path: Path) -> None:
    config = Config("shop", tmp_path / "worker.py", vars={"A": 1})
    config.main.write_text("a = 1")
    versions = [
        bundle_of(config).version,
        bundle_of(replace(config, vars={"A": 2})).version,
        bundle_of(config, secrets={"A": "2"}).version,
        bundle_of(config, search_paths=("/layer",)).version,
        bundle_of(replace(config, ai=AiConfig())).version,
        bundle_of(replace(config, limits=LimitsConfig(cpu_ms=1))).version,
    ]
    assert len(set(versions)) == len(versions)
    assert bundle_of(config).version == versions[0]
    assert bundle_of(config, secrets={"A": "2", "B": "3"}).vars == {"A": "2", "B": "3"}


def test_version_metadata_says_which_version_it_is(tmp_path: Path) -> None:
    config = Config("shop", tmp_path / "worker.py", version_metadata=VersionMetadataConfig("META"))
    bundle = bundle_of(config)
    assert bundle.bindings["META"].kind == "version_metadata"
    props = bundle.bindings["META"].props
    assert (props["id"], props["tag"]) == (bundle.version, "")
    assert datetime.fromisoformat(props["timestamp"]) <= datetime.now(UTC)
    assert bundle_of(config).version == bundle.version


def test_a_module_root_that_is_a_link_is_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "worker.py").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert bundle_of(Config("shop", tmp_path / "link" / "worker.py")).root == str(tmp_path / "real")


def test_a_module_root_may_not_leave_the_project_by_a_link(tmp_path: Path) -> None:
    project, outside = tmp_path / "project", tmp_path / "outside"
    for folder in (project / "lib", outside):
        folder.mkdir(parents=True)
        (folder / "worker.py").write_text("")
    (project / "src").symlink_to(outside)
    (project / "code").symlink_to("lib")
    config = Config("shop", project / "src" / "worker.py", project / "edge.toml")
    with pytest.raises(ConfigError, match=f"main: .*src leads out of .*project, to {outside}, by a link; name that"):
        bundle_of(config)
    for main in (project / "code" / "worker.py", outside / "worker.py"):
        assert bundle_of(replace(config, main=main)).root == str(main.parent.resolve())


def test_the_module_root_may_not_be_what_the_node_keeps_its_state_in(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("")
    (tmp_path / "state").symlink_to(".")
    for state_dir in (tmp_path, tmp_path / "state"):
        with pytest.raises(ConfigError, match="name another folder"):
            bundle_of(Config("shop", tmp_path / "worker.py", state_dir=state_dir))


def test_other_files_do_not_change_the_version(tmp_path: Path) -> None:
    config = Config("shop", tmp_path / "worker.py")
    config.main.write_text("a = 1")
    first = bundle_of(config).version
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.py").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "itself.py").symlink_to(tmp_path / "itself.py")
    (tmp_path / "folder.py").mkdir()
    assert bundle_of(config).version == first
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.py")).write_text("")  # a name that is no text
    assert bundle_of(config).version != first
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "helper.py").write_text("b = 2")
    second = bundle_of(config).version
    assert second != first
    (tmp_path / "pkg" / "helper.py").rename(tmp_path / "helper.py")
    assert bundle_of(config).version not in (first, second)
