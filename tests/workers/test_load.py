from __future__ import annotations

import sys

import pytest

from workers._load import load
from workers.entrypoints import Context, Env

HANDLER = "from workers import WorkerEntrypoint, Response\nclass Default(WorkerEntrypoint):\n"


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Loads `source` as main file, and forgets its modules afterwards."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    modules = set(sys.modules)
    (tmp_path / "src").mkdir()

    def write(source: str, **siblings: str):
        for name, text in siblings.items():
            (tmp_path / "src" / f"{name}.py").write_text(text)
        (tmp_path / "src" / "entry_for_test.py").write_text(source)
        return load(str(tmp_path / "src"), "entry_for_test.py")

    yield write
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("signature", "result"),
    [("self", "[]"), ("self, request", "['r']"), ("self, request, env, ctx", "3"), ("self, *args", "3")],
)
def test_a_handler_gets_as_many_arguments_as_it_takes(worker, signature, result):
    names = signature.removeprefix("self").removeprefix(", ")
    body = f"str([{names}])" if result != "3" else ("len(args)" if "*" in names else f"len([{names}])")
    loaded = worker(HANDLER + f"    def fetch({signature}): return {body}\n")
    assert str(loaded.call("fetch", "r", Context(), Env())) == result


def test_a_fresh_instance_serves_each_event(worker):
    loaded = worker(HANDLER + "    n = 0\n    def fetch(self):\n        self.n += 1\n        return self.n\n")
    assert [loaded.call("fetch", None, Context(), Env()) for _ in range(2)] == [1, 1]


def test_own_constructor(worker):
    source = HANDLER + "    def __init__(self, ctx, env):\n        super().__init__(ctx, env)\n        self.x = env.X\n"
    loaded = worker(source + "    def fetch(self): return self.x\n")
    assert loaded.call("fetch", None, Context(), Env({"X": 5})) == 5


def test_global_handler(worker):
    loaded = worker("def on_fetch(request, env): return (request, env.X)\n")
    assert loaded.handlers == ["fetch"]
    assert loaded.call("fetch", "r", Context(), Env({"X": 5})) == ("r", 5)
    with pytest.raises(TypeError, match='does not export a handler named "on_queue"'):
        loaded.call("queue", None, Context(), Env())


def test_siblings_are_imported_from_the_module_root(worker):
    loaded = worker("import sibling_a\ndef on_fetch(): return sibling_a.X\n", sibling_a="X = 7\n")
    assert loaded.call("fetch", None, Context(), Env()) == 7


def test_importing_through_the_folder_is_explained(worker):
    with pytest.raises(ModuleNotFoundError) as caught:
        worker("from src.sibling_b import X\n", sibling_b="X = 7\n")
    assert "The module root is the folder of entry_for_test.py" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "has no handler. Define one"),
        ("Default = 5\n", "must be a class derived from workers.WorkerEntrypoint"),
        ("class Default: pass\n", "must be a class derived from workers.WorkerEntrypoint"),
        (HANDLER + "    pass\ndef on_fetch(): pass\n", "Cannot define multiple default entrypoints"),
    ],
)
def test_what_is_no_worker(worker, source, message):
    with pytest.raises(TypeError, match=message):
        worker(source)


def test_events_without_handler(worker):
    loaded = worker(HANDLER + "    async def scheduled(self, controller): pass\n")
    assert loaded.handlers == ["scheduled"]
    with pytest.raises(TypeError, match="Method fetch does not exist"):
        loaded.call("fetch", None, Context(), Env())


def test_files_that_cannot_be_main(tmp_path):
    with pytest.raises(ImportError, match="is not in"):
        load(str(tmp_path), "missing.py")
    (tmp_path / "logging.py").touch()
    with pytest.raises(ImportError, match="rename the file"):
        load(str(tmp_path), "logging.py")
    (tmp_path / "some_text.txt").touch()
    with pytest.raises(ImportError, match=r"must end in \.py"):
        load(str(tmp_path), "some_text.txt")
