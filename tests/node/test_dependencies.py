"""Layers built by the real pip from wheels that these tests make, without a network."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from local_wheels import make_wheel

from edge.config import Config
from edge.errors import ConfigError, DependenciesFailed
from edge.node import dependencies
from edge.node.dependencies import KEEP_DAYS, Requirements, prepare, prune, read_requirements


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project folder; pip finds two versions of `alpha` and one of `beta`, which needs `alpha`, and no index."""
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "alpha", "1.0")
    make_wheel(wheels, "alpha", "2.0")
    make_wheel(wheels, "beta", "1.0", requires="alpha")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    project = tmp_path / "project"
    project.mkdir()
    return project


class Said(list[str]):
    __call__ = list.append


async def prepared(project: Path, say=lambda _: None) -> tuple[str, ...]:
    config = Config("test", project / "src" / "worker.py", path=project / "edge.toml")
    return await prepare(config, project / ".edge", say)


def version_in(folder: str, module: str) -> str:
    code = f"import sys; sys.path.insert(0, {folder!r}); import {module}; print({module}.VERSION)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


async def test_dependencies_of_pyproject_with_what_they_need(project):
    (project / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["beta", "workers-runtime-sdk"]\n')
    (project / "requirements.txt").write_text("nonsense-that-is-not-read\n")
    said = Said()
    (folder,) = await prepared(project, said)
    assert (version_in(folder, "beta"), version_in(folder, "alpha")) == ("1.0", "2.0")
    assert said[0] == "Installing beta (pyproject.toml) …"


async def test_the_runtime_itself_is_no_dependency_of_the_worker_in_its_source_tree(project):
    (project / "pyproject.toml").write_text('[project]\nname = "edge-workers-ai"\ndependencies = ["beta"]\n')
    said = Said()
    assert await prepared(project, said) == ()
    assert said == []


@pytest.mark.slow
async def test_a_layer_is_used_again_without_pip(project, monkeypatch):
    (project / "requirements.txt").write_text("alpha<2  # why\n\n")
    first = await prepared(project)
    monkeypatch.setattr(dependencies, "_command", lambda _: ["false"])
    said = Said()
    assert await prepared(project, said) == first
    assert said == []
    assert version_in(first[0], "alpha") == "1.0"
    (project / "requirements.txt").write_text("alpha\n")
    with pytest.raises(DependenciesFailed):
        await prepared(project)


@pytest.mark.slow
async def test_other_files_constraints_and_hashes(project, tmp_path):
    (project / "more").mkdir()
    (project / "more" / "r.txt").write_text("beta\n-c c.txt\n")
    (project / "more" / "c.txt").write_text("alpha==1.0\n")
    (project / "requirements.txt").write_text("-r more/r.txt\n--find-links ../wheels\n")
    (folder,) = await prepared(project)
    assert version_in(folder, "alpha") == "1.0"
    (project / "requirements.txt").write_text(f"alpha==1.0 \\\n  --hash=sha256:{'0' * 64}\n")
    with pytest.raises(DependenciesFailed, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
        await prepared(project)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("uv.lock", '[[package]]\nname = "Alpha"\nversion = "1.0"\nsource = { registry = "https://x/simple" }\n'),
        (
            "uv.lock",
            '[[package]]\nname = "alpha"\nversion = "1.0"\n[[package]]\nname = "x"\nsource = {virtual = "."}\n',
        ),
        ("pylock.toml", 'lock-version = "1.0"\n[[packages]]\nname = "alpha"\nversion = "1.0"\n'),
    ],
)
async def test_versions_of_a_lock_file(project, name, text):
    (project / "requirements.txt").write_text("beta\n")
    (project / name).write_text(text)
    (folder,) = await prepared(project)
    assert version_in(folder, "alpha") == "1.0"


def test_a_lock_file_with_several_versions_is_said(project):
    package = '[[package]]\nname = "alpha"\nversion = "{}"\nsource = {{ registry = "https://x" }}\n'
    (project / "requirements.txt").write_text("alpha\n")
    (project / "uv.lock").write_text(package.format("1.0") + package.format("2.0"))
    said = Said()
    assert read_requirements(project, said).pins == ()
    assert said == ["uv.lock has several versions of alpha; pip chooses one of them by itself"]


@pytest.mark.slow
async def test_uv_where_there_is_no_pip(project, monkeypatch):
    if shutil.which("uv") is None:
        pytest.skip("there is no uv")
    monkeypatch.setattr(dependencies.importlib.util, "find_spec", lambda _: None)
    (project / "requirements.txt").write_text("beta\n--no-index\n")
    (folder,) = await prepared(project)
    assert version_in(folder, "alpha") == "2.0"
    (project / "requirements.txt").write_text("gamma\n--no-index\n")
    with pytest.raises(DependenciesFailed, match="PIP_NO_INDEX keeps"):
        await prepared(project)


def test_neither_pip_nor_uv(tmp_path, monkeypatch):
    monkeypatch.setattr(dependencies.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DependenciesFailed, match="has no pip, and there is no uv"):
        dependencies._command(tmp_path)


async def test_packages_that_are_not_to_be_had(project):
    (project / "requirements.txt").write_text("gamma==1\n")
    with pytest.raises(DependenciesFailed, match="could not be installed: PIP_NO_INDEX keeps pip from") as failure:
        await prepared(project)
    assert "No matching distribution found for gamma==1" in failure.value.message
    assert list((project / ".edge" / "layers").glob("*.unfinished")) == []


async def test_an_index_that_cannot_be_reached(project, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    (project / "requirements.txt").write_text("gamma==1\n")
    with pytest.raises(DependenciesFailed, match=r"the package index cannot be reached\. Connect") as failure:
        await prepared(project)
    assert "PIP_INDEX_URL=URL" in failure.value.message
    assert "is the name right" not in failure.value.message
    assert "Retrying" not in failure.value.message


async def test_a_name_that_no_index_has(project, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "wheels").as_uri())
    (project / "requirements.txt").write_text("gamma==1\n")
    with pytest.raises(DependenciesFailed, match="is the name right, and is there a wheel"):
        await prepared(project)


async def test_sources_are_not_built(project, tmp_path):
    (tmp_path / "wheels" / "gamma-1.0.tar.gz").write_bytes(b"")
    (project / "requirements.txt").write_text("gamma\n")
    with pytest.raises(DependenciesFailed, match="Packages are not built from source"):
        await prepared(project)


@pytest.mark.parametrize(
    "line",
    [
        *("-e .", "--editable=.", "./alpha", "/alpha", "file:///alpha", "alpha @ file:///alpha", "alpha/beta"),
        *("alpha @ git+https://x/y", "git+https://x/y", "alpha @ https://x/alpha.tar.gz", "https://x/a.whl"),
        *("--no-binary=:all:", "--global-option=x", "--target /", "-t /", "a @ https://x/a.zip#a.whl"),
        "alpha --config-settings=x=y",
    ],
)
def test_what_would_run_code_or_depends_on_the_folder(project, line):
    (project / "requirements.txt").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match="cannot be installed"):
        read_requirements(project)


@pytest.mark.parametrize(
    "line",
    [
        *("alpha", "alpha[extra]>=1,<2; python_version >= '3.11'", "alpha @ https://x/alpha-1-py3-none-any.whl"),
        *("--pre", "--extra-index-url https://x/simple", "-i https://x", "a@https://x/a-1-py3-none-any.whl#sha256=0"),
    ],
)
def test_what_is_handed_to_pip(project, line):
    (project / "requirements.txt").write_text(f"{line}\nbeta\n")
    assert read_requirements(project).lines == (line, "beta")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", "[project"),
        ("pyproject.toml", "[project]\ndependencies = 1"),
        ("requirements.txt", "-r requirements.txt"),
        ("requirements.txt", "-r none.txt"),
        ("requirements.txt", "a\xff"),
    ],
)
def test_files_that_are_wrong(project, name, text):
    (project / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"pyproject\.toml|requirements\.txt|none\.txt"):
        read_requirements(project)


@pytest.mark.slow
async def test_builds_of_one_list_happen_once(project):
    (project / "requirements.txt").write_text("beta\n")
    said = Said()
    folders = await asyncio.gather(*(prepared(project, said) for _ in range(3)))
    assert len(set(folders)) == 1
    assert [text for text in said if text.startswith("Installing")] == ["Installing beta (requirements.txt) …"]
    # Another process finds it while this one holds it.
    code = (
        "import asyncio, sys; from pathlib import Path; from edge.node.dependencies import *;"
        f"p = Path({str(project)!r}); r = read_requirements(p);"
        "print(asyncio.run(layer(r, p / '.edge' / 'layers', print)))"
    )
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    output, _ = await run.communicate()
    assert output.decode().splitlines() == list(folders[0])


@pytest.mark.slow
async def test_what_a_killed_build_left_is_replaced(project):
    (project / "requirements.txt").write_text("alpha\n")
    key = read_requirements(project).key
    left = project / ".edge" / "layers" / f"{key}.unfinished"
    left.mkdir(parents=True)
    (left / "packages").mkdir()
    (folder,) = await prepared(project)
    assert version_in(folder, "alpha") == "2.0"
    assert not left.exists()


async def test_a_cancelled_build_leaves_nothing(project, monkeypatch):
    (project / "requirements.txt").write_text("alpha\n")
    monkeypatch.setattr(dependencies, "_command", lambda _: ["sleep", "3600"])
    building = asyncio.create_task(prepared(project))
    layers = project / ".edge" / "layers"
    async with asyncio.timeout(20):
        while not list(layers.glob("*.unfinished")):  # noqa: ASYNC110 - the file system
            await asyncio.sleep(0.005)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert [path.suffix for path in layers.iterdir()] == [".lock"]


def test_old_layers_are_removed_unless_somebody_has_them(tmp_path):
    old, held, young = (tmp_path / name for name in ("old", "held", "young"))
    for folder in (old, held, young):
        (folder / "packages").mkdir(parents=True)
    now_s = young.stat().st_mtime
    for folder in (old, held):
        os.utime(folder, (now_s, now_s - (KEEP_DAYS + 1) * 86_400))
    fcntl_holder = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_SH); print(flush=True); input()"
    )
    command = [sys.executable, "-c", fcntl_holder, str(tmp_path / "held.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        assert prune(tmp_path, now_s) == ["old"]
        holder.communicate(b"\n")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["held", "young"]


async def test_vendored_packages_may_not_be_a_link_out_of_the_project(project, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (project / "python_modules").symlink_to(outside)
    with pytest.raises(ConfigError, match=f"python_modules: .* leads out of .*, to {outside}, by a link"):
        await prepared(project)


@pytest.mark.slow
async def test_vendored_packages(project):
    (project / "src" / "python_modules").mkdir(parents=True)
    (project / "python_modules").mkdir()
    assert await prepared(project) == (str(project / "src" / "python_modules"), str(project / "python_modules"))
    (project / "python_modules" / ".synced").touch()  # by pywrangler, for another platform
    (project / "pyproject.toml").write_text('[project]\ndependencies = ["alpha"]\n')
    folders = await prepared(project)
    assert folders[1:] == (str(project / "src" / "python_modules"),)


def test_the_key_depends_on_everything():
    keys = {Requirements(None, *each).key for each in (((), ()), (("a",), ()), (("a", "b"), ()), (("a",), ("b==1",)))}
    assert len(keys) == 4
