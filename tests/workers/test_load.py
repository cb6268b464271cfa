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


NAMED = """
class Admin(WorkerEntrypoint):
    kind = "admin"
    def fetch(self): return "admin fetch"
    def add(self, a, b=1): return a + b
    async def later(self): return 5
    def _private(self): return 1
    @staticmethod
    def static(): return 1
    @classmethod
    def of_class(cls): return 1
"""


def test_named_entrypoints(worker):
    loaded = worker(HANDLER + "    def fetch(self): return 'default'\n" + NAMED)
    assert sorted(loaded.entrypoints) == ["Admin", "Default"]
    assert loaded.call("fetch", None, Context(), Env()) == "default"
    assert loaded.call("fetch", None, Context(), Env(), "Admin") == "admin fetch"
    assert loaded.name_of("fetch", "Admin") == "fetch() of class Admin in entry_for_test.py"
    with pytest.raises(TypeError, match=r"no 'Other' class defined in .*; its entrypoints are: "):
        loaded.call("fetch", None, Context(), Env(), "Other")


def test_public_methods(worker):
    source = "from workers import WorkerEntrypoint\nclass Mixin:\n    def mixed(self): return self.env.X\n"
    loaded = worker(source + NAMED.replace("(WorkerEntrypoint)", "(Mixin, WorkerEntrypoint)"))
    assert loaded.handlers == []
    assert loaded.call_method("add", [1], Context(), Env(), "Admin") == 2
    assert loaded.call_method("mixed", [], Context(), Env({"X": 7}), "Admin") == 7
    for name in ("_private", "__init__", "static", "of_class", "kind", "missing", "env"):
        with pytest.raises(TypeError, match=f"Method {name} does not exist"):
            loaded.call_method(name, [], Context(), Env(), "Admin")
    with pytest.raises(TypeError, match="no 'Default' class"):
        loaded.call_method("add", [1], Context(), Env())


def test_global_handlers_have_no_methods(worker):
    loaded = worker("def on_fetch(): return 1\ndef helper(): return 2\n")
    with pytest.raises(TypeError, match="Method helper does not exist"):
        loaded.call_method("helper", [], Context(), Env())


def test_only_exported_names_count(worker):
    source = HANDLER + "    def fetch(self): return 1\nclass Other(WorkerEntrypoint): pass\n__all__ = ['Default']\n"
    assert worker(source).entrypoints == ["Default"]


def test_imported_classes_count_too(worker):
    loaded = worker(
        "from sibling_c import Default\n",
        sibling_c=HANDLER + "    def scheduled(self, controller, env, ctx): return env.X\n",
    )
    assert loaded.handlers == ["scheduled"]
    assert loaded.call("scheduled", None, Context(), Env({"X": 3})) == 3


def test_durable_objects_and_workflows_are_refused_when_used(worker):
    source = (
        "from workers import DurableObject\nclass Room(DurableObject): pass\n"
        + HANDLER
        + "    def fetch(self): return 1\n"
    )
    with pytest.raises(TypeError, match=r"Room in entry_for_test\.py is a Durable Object or workflow"):
        worker(source).call("fetch", None, Context(), Env(), "Room")


def test_all_handlers_get_what_they_take(worker):
    loaded = worker(
        HANDLER
        + "    def scheduled(self): return ()\n"
        + "    def queue(self, batch, env=None): return (batch, env.X)\n"
        + "    def tail(self, events, env, ctx): return (events, env.X, ctx)\n"
    )
    ctx, env = Context(), Env({"X": 1})
    assert loaded.call("scheduled", "c", ctx, env) == ()
    assert loaded.call("queue", "b", ctx, env) == ("b", 1)
    assert loaded.call("tail", "e", ctx, env) == ("e", 1, ctx)


def test_a_handler_that_is_no_plain_function(worker):
    source = "import functools\n" + HANDLER + "    def real(self, prefix, request): return prefix + request\n"
    source += "    def __init__(self, ctx, env):\n        self.fetch = functools.partial(self.real, 'p')\n"
    assert worker(source).call("fetch", "r", Context(), Env()) == "pr"


def test_global_handlers_can_be_forbidden(worker, tmp_path):
    worker("def on_fetch(): return 1\n")
    (tmp_path / "src" / "entry_with_flag.py").write_text("def on_fetch(): return 1\n")
    with pytest.raises(TypeError, match="python_no_global_handlers forbids"):
        load(str(tmp_path / "src"), "entry_with_flag.py", ["python_no_global_handlers"])
