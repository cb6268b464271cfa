"""The sandbox of isolates: its layers, its policies, and that ordinary Python works in it. Attacks: `escape/`."""

from __future__ import annotations

import errno
import json
import struct
import textwrap

import pytest

from edge.config import IsolatesConfig
from edge.errors import WorkerStartFailed
from edge.isolates.dispatch import Bundle, InboundRequest, Isolates
from edge.isolates.probe import examine
from edge.isolates.sandbox import layers, seccomp
from edge.isolates.sandbox.layers import LAYERS, SandboxReport

from .conftest import running

ALL = [layer.name for layer in LAYERS]
ALLOWED, KILLED, IGNORED = 0x7FFF0000, 0x80000000, 0x50000
DENIED, UNKNOWN, UNSUPPORTED = (0x50000 | number for number in (errno.EPERM, errno.ENOSYS, errno.ENOTSUP))
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def run_filter(program: bytes, number: int, arch: int, *arguments: int) -> int:
    """What the kernel would do: a machine for the few instructions that the filter has."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    accumulator = at = 0
    while True:
        code, yes, no, value = struct.unpack_from("=HBBI", program, at * 8)
        at += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, value)
            case 0x54:
                accumulator &= value
            case 0x05:
                at += value
            case 0x15:
                at += yes if accumulator == value else no
            case 0x35:
                at += yes if accumulator >= value else no
            case 0x45:
                at += yes if accumulator & value else no
            case 0x06:
                return value
            case _:
                raise AssertionError(code)


# -- the filter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_system_call_gets_what_its_table_says(machine):
    column, arch = ARCHITECTURES[machine]
    program = seccomp.Filter(machine).for_process(77)
    allowed, refused, unsupported, without_effect, fatal, checked = (
        {numbers[column] for numbers in table.values()} - {-1} for table in seccomp.TABLES
    )
    for number in range(600):
        outcome = run_filter(program, number, arch)
        if number in allowed:
            assert outcome == ALLOWED, number
        elif number in refused:
            assert outcome == DENIED, number
        elif number in unsupported:
            assert outcome == UNSUPPORTED, number
        elif number in without_effect:
            assert outcome == IGNORED, number
        elif number in fatal:
            assert outcome == KILLED, number
        elif number not in checked:
            assert outcome == UNKNOWN, number
    tables = (allowed, refused, unsupported, without_effect, fatal, checked)
    assert sum(map(len, tables)) == len(set().union(*tables))


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_other_architectures_and_x32_end_the_process(machine):
    _, arch = ARCHITECTURES[machine]
    program = seccomp.Filter(machine).for_process(77)
    for other in (0x40000003, *(each for _, each in ARCHITECTURES.values() if each != arch)):
        assert run_filter(program, 39, other) == KILLED
    for number in (0x40000000, 0x40000000 | 39, 0xFFFFFFFF):
        assert run_filter(program, number, arch) == KILLED


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize(
    ("name", "arguments", "outcome"),
    [
        ("clone", (0x003D0F00,), ALLOWED),  # what pthread_create asks for
        ("clone", (17,), DENIED),
        ("clone", (0x00010000 | 0x10000000,), DENIED),
        ("clone", (0x00010000 | 0x40000000,), DENIED),
        ("kill", (77, 9), ALLOWED),
        ("kill", (78, 9), DENIED),
        ("kill", (0xFFFFFFFF, 9), DENIED),
        ("tgkill", (77, 78, 6), ALLOWED),
        ("tgkill", (78, 78, 6), DENIED),
        ("prlimit64", (0, 7, 0, 1), ALLOWED),
        ("prlimit64", (77, 7, 0, 1), ALLOWED),
        ("prlimit64", (78, 7, 0, 1), DENIED),
        ("prlimit64", (0, 7, 1, 0), DENIED),
        ("prlimit64", (0, 7, 1 << 32, 0), DENIED),
        ("ioctl", (0, 0x5401), ALLOWED),
        ("ioctl", (0, 0x5412), DENIED),
        ("fcntl", (0, 4), ALLOWED),
        ("fcntl", (0, 8), DENIED),
        ("prctl", (15,), ALLOWED),
        ("prctl", (4, 1), DENIED),
        ("socketpair", (1, 1 | 0o2000000 | 0o4000), ALLOWED),
        ("socketpair", (1, 2), DENIED),
        ("socketpair", (2, 1), DENIED),
        ("sendto", (3, 1, 1, 0, 0, 0), ALLOWED),
        ("sendto", (3, 1, 1, 0, 1, 0), DENIED),
        ("sendto", (3, 1, 1, 0, 1 << 32, 0), DENIED),
        ("personality", (0xFFFFFFFF,), ALLOWED),
        ("personality", (0x0040000,), DENIED),
    ],
)
def test_arguments_that_matter_are_looked_at(machine, name, arguments, outcome):
    column, arch = ARCHITECTURES[machine]
    (number,) = (table[name][column] for table in seccomp.TABLES if name in table)
    assert run_filter(seccomp.Filter(machine).for_process(77), number, arch, *arguments) == outcome


# -- layers and policies -----------------------------------------------------------------------------------


def test_bits_are_unique_and_stay_what_they_are():
    assert [layer.bit for layer in LAYERS] == list(range(len(LAYERS)))  # usage records have them: only append
    assert layers.bitmask(["session", "seccomp", "no such layer", "seccomp"]) == 1 | 1 << 11
    assert layers.names_of(1 | 1 << 11) == ["session", "seccomp"]
    assert layers.names_of(layers.bitmask(ALL)) == ALL


@pytest.mark.parametrize(
    ("policy", "needs"),
    [
        ("strict", {"base", "standard", "strict"}),
        ("standard", {"base", "standard"}),
        ("best-effort", {"base"}),
        ("none", set()),
    ],
)
def test_a_policy_refuses_exactly_without_what_it_demands(policy, needs):
    assert layers.refusal(policy, SandboxReport(ALL)) is None
    for layer in LAYERS:
        report = SandboxReport([name for name in ALL if name != layer.name], {layer.name: "the reason"})
        refused = layers.refusal(policy, report)
        assert (refused is not None) == (layer.level in needs), layer
        if refused is not None:
            assert f"{layer.name} (the reason)" in refused
            assert layer.fix in refused


def test_a_sandbox_that_does_not_hold_is_refused_whatever_it_claims():
    report = SandboxReport(ALL, {}, ["open a socket"])
    for policy in ("strict", "standard", "best-effort"):
        assert "its self-test could open a socket" in (layers.refusal(policy, report) or "")
    assert layers.refusal("none", report) is None


def test_what_is_off_is_said_in_one_line():
    assert layers.summary("standard", SandboxReport(ALL)) == "standard, all layers on"
    report = SandboxReport([name for name in ALL if name not in ("own-uid", "cgroup")])
    assert layers.summary("best-effort", report) == "best-effort; off: own-uid, cgroup (`edge doctor` says why)"
    assert "--insecure-no-sandbox" in layers.summary("none", SandboxReport())


async def test_a_real_process_reports_every_layer_as_on_or_off():
    answer = await examine("best-effort")
    assert set(answer["layers"]) | set(answer["missing"]) == set(ALL)
    assert set(answer["layers"]) & set(answer["missing"]) == set()
    assert answer["escapes"] == []
    assert answer["bitmask"] == layers.bitmask(answer["layers"])
    assert answer["spawn_ms"] > 0
    assert layers.refusal("standard", SandboxReport(answer["layers"])) is None


async def test_without_a_policy_only_the_process_itself_is_left():
    answer = await examine("none")
    on = set(answer["layers"])
    assert {"session", "no-new-privileges", "not-dumpable", "closed-descriptors"} <= on
    assert not on & {"seccomp", "landlock-files", "user-namespace", "mount-namespace", "limits"}


async def test_no_code_and_no_secret_goes_to_a_process_whose_sandbox_is_too_weak(tmp_path, monkeypatch):
    """The zygote cannot be made weaker from here, so the node is made to demand a layer that no kernel has."""
    monkeypatch.setattr(
        layers, "LAYERS", (*LAYERS, layers.Layer("unheard-of", 40, "standard", "", "wait for a new kernel"))
    )
    (tmp_path / "imported").mkdir()
    async with running(tmp_path, isolates=IsolatesConfig(sandbox="standard")) as worker:
        with pytest.raises(WorkerStartFailed, match=r"policy 'standard' demands: unheard-of .*wait for a new kernel"):
            await worker.deploy("print('imported')\ndef on_fetch():\n    pass", indented=False)
        assert worker.logs == []


# -- what works in it --------------------------------------------------------------------------------------


@pytest.fixture
async def strict(tmp_path):
    async with running(tmp_path, isolates=IsolatesConfig(sandbox="strict")) as harness:
        yield harness


WORKS = {
    "threads": "return Response(await asyncio.to_thread(lambda: 'ok'))",
    "pool": """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(20) as pool:
            return Response('ok' * (sum(pool.map(int, '1' * 40)) == 40))
        """,
    "numpy": """
        import numpy as np
        matrix = np.ones((300, 300))
        return Response('ok' * bool((matrix @ matrix)[0, 0] == 300))
        """,
    "sqlite": """
        import os, sqlite3, tempfile
        for path in (':memory:', os.path.join(tempfile.mkdtemp(), 'db')):
            with sqlite3.connect(path) as db:
                db.execute('create table t (x)')
                db.execute('insert into t values (?)', ('ok',))
                text = db.execute('select x from t').fetchone()[0]
        return Response(text)
        """,
    "files": """
        import os, pathlib, shutil, tempfile, zipfile
        folder = pathlib.Path(tempfile.mkdtemp())
        (folder / 'a').write_text('ok')
        shutil.copy2(folder / 'a', folder / 'b')
        (folder / 'sub').mkdir()
        os.replace(folder / 'b', folder / 'sub' / 'b')
        with zipfile.ZipFile(folder / 'z', 'w') as archive:
            archive.write(folder / 'sub' / 'b', 'b')
        shutil.unpack_archive(folder / 'z', folder / 'out', 'zip')
        text = (folder / 'out' / 'b').read_text()
        shutil.rmtree(folder)
        home = pathlib.Path.home()
        return Response(text * (str(home) == tempfile.gettempdir()))
        """,
    "zones": """
        import datetime, zoneinfo
        return Response('ok' * bool(datetime.datetime.now(zoneinfo.ZoneInfo('Europe/Berlin'))))
        """,
    "ssl": "import ssl\nssl.create_default_context()\nreturn Response('ok')",
    "random": "import os, secrets, uuid\nreturn Response('ok' * all((os.urandom(4), secrets.token_hex, uuid.uuid4())))",
    "mimetypes": "import mimetypes\nreturn Response('ok' * (mimetypes.guess_type('a.png')[0] == 'image/png'))",
    "host name": "import os\nreturn Response('ok' * (os.uname().nodename == 'edge'))",
    "timers": "await asyncio.sleep(0.001)\nreturn Response('ok')",
    "modules beside it": "import helper\nreturn Response(helper.TEXT)",
    "cpu count": "import os\nreturn Response('ok' * bool(os.cpu_count()))",
    "signals": "import os, signal\nos.kill(os.getpid(), 0)\nsignal.raise_signal(signal.SIGCHLD)\nreturn Response('ok')",
    "pydantic": """
        import pydantic
        class Item(pydantic.BaseModel):
            name: str
        return Response(Item(name='ok').name)
        """,
    "pillow": """
        import io
        from PIL import Image
        file = io.BytesIO()
        Image.new('RGB', (4, 4)).save(file, 'png')
        return Response('ok' * (Image.open(io.BytesIO(file.getvalue())).size == (4, 4)))
        """,
    "bindings": "return Response('ok' * (await self.env.AI.run('m', {}) == ['m', {}, {}]))",
}


@pytest.mark.parametrize("name", WORKS)
async def test_ordinary_python_works_under_the_strictest_policy(strict, name):
    (strict.root / "helper.py").write_text("TEXT = 'ok'\n")
    code = textwrap.indent(textwrap.dedent(WORKS[name]).strip(), "    ")
    await strict.deploy(f"async def fetch(self, request):\n{code}")
    assert await strict.get() == "ok"


@pytest.mark.parametrize(
    ("act", "error"),
    [
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("import os; os.fork()", "PermissionError"),
        ("open('/etc/passwd')", "PermissionError"),
        ("open('/made-by-a-worker', 'w')", "OSError"),  # the file system is read-only
    ],
)
async def test_what_is_refused_is_an_error_that_names_it(strict, act, error):
    await strict.deploy(
        f"""
        async def fetch(self, request):
            try:
                {act}
            except Exception as error:
                return Response(type(error).__name__)
        """
    )
    assert await strict.get() == error


async def test_two_processes_have_folders_and_random_numbers_of_their_own(strict):
    source = """
        async def fetch(self, request):
            import os, random, tempfile
            found = os.listdir(tempfile.gettempdir())
            open(os.path.join(tempfile.gettempdir(), "mine"), "w").close()
            return Response.json([found, random.random()])
    """
    await strict.deploy(source)
    await strict.deploy(source, worker="other")
    first = json.loads(await strict.get())
    second = json.loads(await strict.get(worker="other"))
    assert first[0] == second[0] == []
    assert first[1] != second[1]
    assert json.loads(await strict.get())[0] == ["mine"]


async def test_numpy_of_the_zygote_is_seeded_again_in_each_process(tmp_path):
    async with running(tmp_path, isolates=IsolatesConfig(preload=["numpy"])) as worker:
        source = """
            async def fetch(self, request):
                import sys
                return Response.json(sys.modules["numpy"].random.random())
        """
        await worker.deploy(source)
        await worker.deploy(source, worker="other")
        assert await worker.get() != await worker.get(worker="other")


@pytest.mark.parametrize("has_hidden_files", [False, True])
async def test_links_in_the_code_lead_nowhere(strict, tmp_path_factory, has_hidden_files):
    secret = tmp_path_factory.mktemp("outside") / "secret"
    secret.write_text("secret")
    (strict.root / "file").symlink_to(secret)
    (strict.root / "folder").symlink_to(secret.parent)
    if has_hidden_files:
        (strict.root / ".hidden").write_text("")
    await strict.deploy(
        """
        async def fetch(self, request):
            from pathlib import Path
            found = []
            for path in ("file", "folder/secret", "worker_main.py"):
                try:
                    found.append((Path(__file__).parent / path).read_text()[:6])
                except PermissionError:
                    found.append("")
            return Response.json(found)
        """
    )
    assert json.loads(await strict.get()) == ["", "", "\nimpor"]


async def test_a_root_and_packages_that_are_links_cannot_be_read(strict, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "packaged.py").write_text("def on_fetch(request): ...")
    link = outside.with_name("link-to-outside")
    link.symlink_to(outside)
    with pytest.raises(WorkerStartFailed, match="Permission denied"):
        await strict.isolates.deploy(Bundle("linked", "v1", str(link), "packaged.py"))
    await strict.deploy(
        """
        async def fetch(self, request):
            try:
                return Response(open(self.env.FILE).read())
            except PermissionError:
                return Response("held")
        """,
        search_paths=(str(link),),
        vars={"FILE": str(outside / "packaged.py")},
    )
    assert await strict.get() == "held"
    await strict.deploy(
        (strict.root / "worker_main.py").read_text(),
        indented=False,
        search_paths=(str(outside),),
        vars={"FILE": str(outside / "packaged.py")},
    )
    assert "on_fetch" in await strict.get()


async def test_the_node_s_state_is_hidden_by_whatever_path_it_is_named(tmp_path):
    root, link = tmp_path / "root", tmp_path / "link"
    (root / "state").mkdir(parents=True)
    (root / "state" / "ledger").write_text("secret")
    link.symlink_to(root)
    (root / "code.txt").write_text("code")
    (root / "main_file.py").write_text(
        "import os\nfrom workers import Response\n"
        "def on_fetch(request):\n"
        "    path = os.path.join(os.path.dirname(__file__), request.url[12:])\n"
        "    try:\n        return Response(open(path).read())\n"
        "    except PermissionError:\n        return Response('held')\n"
    )
    isolates = Isolates(None, lambda *_: None, IsolatesConfig(sandbox="standard"), hidden_paths=(str(link / "state"),))
    try:
        await isolates.deploy(Bundle("w", "v1", str(root), "main_file.py"))
        for path, text in (("code.txt", b"code"), ("state/ledger", b"held")):
            response = await isolates.fetch(("dev", "w"), InboundRequest("GET", f"http://test/{path}", []))
            assert b"".join([chunk async for chunk in response.body]) == text
    finally:
        await isolates.close()


async def test_files_beside_the_code_that_are_no_code_cannot_be_read(strict):
    (strict.root / ".dev.vars").write_text("SECRET=1")
    (strict.root / "data.txt").write_text("ok")
    await strict.deploy(
        """
        async def fetch(self, request):
            from pathlib import Path
            here = Path(__file__).parent
            try:
                return Response((here / ".dev.vars").read_text())
            except PermissionError:
                return Response((here / "data.txt").read_text())
        """
    )
    assert await strict.get() == "ok"
