"""A worker that means harm: each function of `ATTEMPTS` tries one way out of the sandbox.

An attempt that is held back raises OSError (or MemoryError); one that returns has succeeded, but for those whose name
is in `REPORTS`: they return how far they got. `env` has paths, pids and call numbers of the machine that is attacked.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path

from workers import Response, WorkerEntrypoint, _runtime

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
ATTEMPTS = {}
REPORTS = set()
FATAL = set()
ABSTRACT = "\0edge-escape"


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        name = request.url.rpartition("/")[2]
        if name == "hello":
            return Response("hello")
        try:
            result = ATTEMPTS[name](self.env)
            if asyncio.iscoroutine(result):
                result = await result
        except (OSError, MemoryError, RuntimeError, ValueError) as error:
            return Response.json({"held": f"{type(error).__name__}: {error}"})
        return Response.json({"got": str(result)})


def attempt(function):
    """It escapes if it returns."""
    ATTEMPTS[function.__name__] = function
    return function


def reporting(function):
    """It returns a number or text that the test looks at."""
    REPORTS.add(function.__name__)
    return attempt(function)


def fatal(function):
    """The process must not survive it."""
    FATAL.add(function.__name__)
    return attempt(function)


def call(env, name, *arguments):
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = libc.syscall(ctypes.c_long(getattr(env.NR, name)), *converted)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def node_fd():
    return _runtime.runtime.channel._transport.get_extra_info("socket").fileno()


def write_all(fd, data):
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])


# -- files -------------------------------------------------------------------------------------------------


def reads(name, path_of):
    def read(env):
        with open(path_of(env), "rb") as file:
            return file.read(100)

    read.__name__ = name
    attempt(read)


for name, path_of in {
    "read_shadow": lambda env: "/etc/shadow",
    "read_passwd": lambda env: "/etc/passwd",
    "read_code_of_another_worker": lambda env: env.OTHER_FILE,
    "read_secrets_file_of_the_node": lambda env: env.SECRET_FILE,
    "read_dev_vars_beside_the_code": lambda env: Path(__file__).with_name(".dev.vars"),
    "read_state_beside_the_code": lambda env: Path(__file__).parent / ".edge/ledger.sqlite",
    "read_hidden_state_beside_the_code": lambda env: Path(__file__).parent / "state/ledger.sqlite",
    "read_environment_of_the_node": lambda env: f"/proc/{env.NODE}/environ",
    "read_environment_of_the_zygote": lambda env: f"/proc/{env.ZYGOTE}/environ",
    "read_environment_of_a_neighbour": lambda env: f"/proc/{env.NEIGHBOUR}/environ",
    "read_memory_of_the_zygote": lambda env: f"/proc/{env.ZYGOTE}/mem",
    "read_maps_of_a_neighbour": lambda env: f"/proc/{env.NEIGHBOUR}/maps",
    "read_own_maps": lambda env: "/proc/self/maps",
    "read_kernel_symbols": lambda env: "/proc/kallsyms",
    "read_cgroups": lambda env: "/proc/self/cgroup",
    "read_physical_memory": lambda env: "/dev/mem",
    "read_through_dot_dot": lambda env: Path(__file__).parent / ".." / Path(env.OTHER_FILE).parent.name / "other.py",
    "read_through_root_link": lambda env: f"/proc/self/root{env.OTHER_FILE}",
}.items():
    reads(name, path_of)


@attempt
def secret_in_the_environment(env):
    if "NODE_SECRET" not in os.environ:
        raise OSError("it is not there")


@attempt
def list_the_root(env):
    return os.listdir("/")


@attempt
def list_processes(env):
    return os.listdir("/proc")


@attempt
def reopen_a_descriptor(env):
    return open(f"/proc/self/fd/{node_fd()}", "wb")


@attempt
def read_after_chdir(env):
    os.chdir(Path(env.OTHER_FILE).parent)
    try:
        return Path("other.py").read_text()
    finally:
        os.chdir("/")


@attempt
def openat2(env):
    how = struct.pack("QQQ", os.O_RDONLY, 0, 0)
    return call(env, "openat2", -100, env.OTHER_FILE.encode(), how, len(how))


@attempt
def open_by_handle(env):
    return call(env, "open_by_handle_at", -100, struct.pack("IiQ", 8, 1, 2), os.O_RDONLY)


@attempt
def follow_a_symlink(env):
    link = Path(tempfile.mkdtemp(), "link")
    link.symlink_to(env.OTHER_FILE)
    return link.read_text()


@attempt
def hard_link(env):
    link = Path(tempfile.mkdtemp(), "link")
    os.link(env.OTHER_FILE, link)
    return link.read_text()


@attempt
def rename_into_the_temporary_folder(env):
    return os.rename(env.OTHER_FILE, Path(tempfile.mkdtemp(), "mine"))


@reporting
def race_with_a_symlink(env):
    """Swap a link between a file of its own and one of another worker while it is opened."""
    folder = Path(tempfile.mkdtemp())
    mine = folder / "mine"
    mine.write_text("mine")
    link, stop = folder / "link", threading.Event()

    def swap():
        targets = [mine, env.OTHER_FILE]
        for turn in range(1 << 30):
            if stop.is_set():
                return
            (folder / "new").symlink_to(targets[turn % 2])
            os.replace(folder / "new", link)

    thread = threading.Thread(target=swap)
    thread.start()
    leaked, deadline = 0, time.monotonic() + 0.2
    while time.monotonic() < deadline:
        try:
            leaked += link.read_text() != "mine"
        except OSError:
            continue
    stop.set()
    thread.join()
    return leaked


@attempt
def change_its_own_code(env):
    return open(__file__, "a")


@attempt
def overwrite_code_of_another_worker(env):
    return open(env.OTHER_FILE, "w")


@attempt
def delete_code_of_another_worker(env):
    return os.unlink(env.OTHER_FILE)


@attempt
def write_into_the_interpreter(env):
    return open(Path(os.__file__).with_name("sitecustomize.py"), "w")


@reporting
def change_modes_and_times(env):
    """Succeeds without effect, which the test sees from outside."""
    os.chmod(env.OTHER_FILE, 0o777)
    os.utime(env.OTHER_FILE, (1, 1))
    os.chown(env.OTHER_FILE, 1, 1)
    with open(os.__file__, "rb") as file:
        os.fchmod(file.fileno(), 0)


@attempt
def set_an_attribute(env):
    return os.setxattr(env.OTHER_FILE, "user.x", b"x")


@attempt
def watch_files_of_others(env):
    fd = call(env, "inotify_init1", 0)
    return libc.inotify_add_watch(fd, env.OTHER_FILE.encode(), 0xFFF)


@attempt
def set_core_pattern(env):
    return Path("/proc/sys/kernel/core_pattern").write_text("|/bin/true")


@attempt
def raise_its_own_oom_score(env):
    return Path("/proc/self/oom_score_adj").write_text("-1000")


@attempt
def leave_the_cgroup(env):
    return Path("/sys/fs/cgroup/memory/cgroup.procs").write_text("0")


@attempt
def write_shared_memory_file(env):
    return open("/dev/shm/edge-escape", "w")


@attempt
def make_shared_memory(env):
    return shared_memory.SharedMemory(create=True, size=4096)


@attempt
def make_a_device(env):
    return os.mknod(Path(tempfile.gettempdir(), "mem"), 0o020600, os.makedev(1, 1))


@attempt
def make_a_pipe_file(env):
    return os.mkfifo(Path(tempfile.gettempdir(), "pipe"))


# -- network -----------------------------------------------------------------------------------------------


def opens(name, family, kind, number=0):
    def open_socket(env):
        return socket.socket(family, kind, number)

    open_socket.__name__ = name
    attempt(open_socket)


for name, family, kind in (
    ("tcp_socket", socket.AF_INET, socket.SOCK_STREAM),
    ("tcp6_socket", socket.AF_INET6, socket.SOCK_STREAM),
    ("udp_socket", socket.AF_INET, socket.SOCK_DGRAM),
    ("raw_socket", socket.AF_INET, socket.SOCK_RAW),
    ("unix_socket", socket.AF_UNIX, socket.SOCK_STREAM),
    ("netlink_socket", socket.AF_NETLINK, socket.SOCK_RAW),
    ("packet_socket", socket.AF_PACKET, socket.SOCK_RAW),
    ("vsock_socket", socket.AF_VSOCK, socket.SOCK_STREAM),
    ("crypto_socket", socket.AF_ALG, socket.SOCK_SEQPACKET),
):
    opens(name, family, kind)


@attempt
def connect_to_the_node(env):
    return socket.create_connection(("127.0.0.1", int(env.PORT)), timeout=1)


@attempt
def resolve_a_name(env):
    return socket.getaddrinfo("example.com", 80)


@attempt
def connect_a_socket_pair_elsewhere(env):
    ours, _ = socket.socketpair()
    return ours.connect(env.SOCKET_PATH)


@attempt
def datagram_socket_pair(env):
    ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return ours.sendto(b"x", env.DATAGRAM_PATH)


@attempt
def datagram_to_an_abstract_socket(env):
    ours, _ = socket.socketpair()
    return ours.sendto(b"x", "\0" + env.ABSTRACT)


@attempt
def listen_on_a_socket_pair(env):
    ours, _ = socket.socketpair()
    return ours.bind("\0" + env.ABSTRACT + "-mine")


@attempt
def pass_a_descriptor_to_the_node(env):
    sock = socket.socket(fileno=os.dup(node_fd()))
    return socket.send_fds(sock, [b"\0\0\0\0"], [0])


@attempt
def receive_a_descriptor(env):
    ours, theirs = socket.socketpair()
    theirs.send(b"x")
    return socket.recv_fds(ours, 1, 1)


# -- processes ---------------------------------------------------------------------------------------------


def signals(name, pid_of, number=signal.SIGTERM):
    def send(env):
        return os.kill(pid_of(env), number)

    send.__name__ = name
    attempt(send)


for name, pid_of in {
    "signal_the_node": lambda env: int(env.NODE),
    "signal_the_zygote": lambda env: int(env.ZYGOTE),
    "signal_a_neighbour": lambda env: int(env.NEIGHBOUR),
    "signal_everybody": lambda env: -1,
    "signal_the_first_process": lambda env: 1,
}.items():
    signals(name, pid_of)
signals("probe_a_pid", lambda env: int(env.NEIGHBOUR), 0)


@attempt
def signal_a_thread_of_a_neighbour(env):
    return call(env, "tgkill", int(env.NEIGHBOUR), int(env.NEIGHBOUR), int(signal.SIGKILL))


@attempt
def signal_by_tkill(env):
    return call(env, "tkill", int(env.NEIGHBOUR), int(signal.SIGKILL))


@attempt
def signal_by_sigqueue(env):
    return call(env, "rt_sigqueueinfo", int(env.NEIGHBOUR), int(signal.SIGTERM), bytes(128))


@attempt
def signal_by_pidfd(env):
    return signal.pidfd_send_signal(os.pidfd_open(int(env.NEIGHBOUR)), signal.SIGKILL)


@attempt
def signal_by_descriptor_owner(env):
    return fcntl.fcntl(node_fd(), fcntl.F_SETOWN, int(env.NODE))


@attempt
def fork_bomb(env):
    while True:
        if os.fork() == 0:
            os._exit(0)


@attempt
def clone_a_process(env):
    return call(env, "clone", int(signal.SIGCHLD), 0, 0, 0, 0)


@attempt
def clone3(env):
    return call(env, "clone3", bytes(88), 88)


@attempt
def clone_a_namespace_thread(env):
    return call(env, "clone", 0x10000 | 0x40000000, 0, 0, 0, 0)


@attempt
def execute(env):
    return os.execv("/bin/true", ["true"])


@attempt
def execute_at(env):
    return call(env, "execveat", -100, b"/bin/true", None, None, 0)


@attempt
def run_a_program(env):
    return subprocess.run([sys.executable, "-c", "pass"], check=True)


@attempt
def spawn(env):
    return os.posix_spawn("/bin/true", ["true"], {})


@attempt
def execute_from_memory(env):
    return os.execv(f"/proc/self/fd/{os.memfd_create('x')}", ["x"])


@attempt
def trace_a_neighbour(env):
    return call(env, "ptrace", 16, int(env.NEIGHBOUR), 0, 0)


@attempt
def read_memory_of_a_neighbour(env):
    buffer = ctypes.create_string_buffer(8)
    iovec = struct.pack("QQ", ctypes.addressof(buffer), 8)
    return call(env, "process_vm_readv", int(env.NEIGHBOUR), iovec, 1, iovec, 1, 0)


@attempt
def write_memory_of_a_neighbour(env):
    buffer = ctypes.create_string_buffer(8)
    iovec = struct.pack("QQ", ctypes.addressof(buffer), 8)
    return call(env, "process_vm_writev", int(env.NEIGHBOUR), iovec, 1, iovec, 1, 0)


@attempt
def take_a_descriptor_of_a_neighbour(env):
    return call(env, "pidfd_getfd", call(env, "pidfd_open", int(env.NEIGHBOUR), 0), 0, 0)


@attempt
def slow_down_a_neighbour(env):
    return os.setpriority(os.PRIO_PROCESS, int(env.NEIGHBOUR), 19)


@attempt
def become_real_time(env):
    return os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


@attempt
def raise_limits_of_a_neighbour(env):
    return resource.prlimit(int(env.NEIGHBOUR), resource.RLIMIT_CPU, (1, 1))


@attempt
def raise_its_own_limits(env):
    return resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))


# -- privileges --------------------------------------------------------------------------------------------


@attempt
def become_root(env):
    return os.setuid(0)


@attempt
def become_root_by_setresuid(env):
    return os.setresuid(0, 0, 0)


@attempt
def take_groups(env):
    return os.setgroups([0])


@attempt
def take_capabilities(env):
    header, data = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0xFFFFFFFF] * 6)
    return call(env, "capset", header, data)


@attempt
def outlive_the_node(env):
    return call(env, "prctl", 1, 0, 0, 0, 0)


@attempt
def become_dumpable(env):
    return call(env, "prctl", 4, 1, 0, 0, 0)


@attempt
def replace_the_filter(env):
    return call(env, "prctl", 22, 0, 0, 0, 0)


@attempt
def add_a_filter(env):
    return call(env, "seccomp", 1, 8, struct.pack("QQ", 0, 0))


@attempt
def change_personality(env):
    return call(env, "personality", 0x0040000)


@attempt
def leave_the_session(env):
    return os.setsid()


@attempt
def push_terminal_input(env):
    return fcntl.ioctl(0, 0x5412, b"x")


@attempt
def take_a_terminal(env):
    return open("/dev/tty", "wb")


# -- the kernel --------------------------------------------------------------------------------------------


def calls(name, *arguments, of=None, mark=attempt):
    def make_call(env):
        return call(env, of or name, *arguments)

    make_call.__name__ = name
    mark(make_call)


for name, arguments in {
    "io_uring_setup": (8, bytes(120)),
    "io_uring_enter": (0, 1, 1, 0, None, 0),
    "unshare": (0x10000000,),
    "setns": (0, 0),
    "mount": (b"x", b"/", b"tmpfs", 0, None),
    "umount2": (b"/", 2),
    "pivot_root": (b"/", b"/"),
    "chroot": (b"/",),
    "open_tree": (-100, b"/", 1),
    "fsopen": (b"tmpfs", 0),
    "mount_setattr": (-100, b"/", 0x8000, bytes(32), 32),
    "keyctl": (0, -3, 1),
    "add_key": (b"user", b"x", b"x", 1, -3),
    "userfaultfd": (0,),
    "perf_event_open": (bytes(112), 0, -1, -1, 0),
    "quotactl": (0, b"/", 0, None),
    "fanotify_init": (0, 0),
    "sethostname": (b"x", 1),
    "settimeofday": (bytes(16), None),
    "syslog": (3, bytes(64), 64),
    "vhangup": (),
    "shmget": (0, 4096, 0o1600),
    "semget": (0, 1, 0o1600),
    "msgget": (0, 0o1600),
    "mlockall": (3,),
    "memfd_create": (b"x", 0),
    "memfd_secret": (0,),
    "process_madvise": (0, None, 0, 4, 0),
    "kcmp": (1, 1, 0, 0, 0),
    "landlock_create_ruleset": (None, 0, 1),
}.items():
    calls(name, *arguments)

for name, arguments in {
    "bpf": (5, bytes(72), 72),
    "init_module": (b"", 0, b""),
    "finit_module": (0, b"", 0),
    "delete_module": (b"x", 0),
    "kexec_load": (0, 0, None, 0),
    "reboot": (0, 0, 0, None),
    "swapon": (b"x", 0),
    "acct": (None,),
}.items():
    calls(name, *arguments, mark=fatal)

if os.uname().machine == "x86_64":

    @fatal
    def use_the_x32_abi(env):
        return libc.syscall(ctypes.c_long(0x40000000 | 39))

    @fatal
    def use_the_32_bit_abi(env):
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20; int 0x80; ret
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        return ctypes.CFUNCTYPE(ctypes.c_int)(address)()

    calls("iopl", 3, mark=fatal)
    calls("ioperm", 0, 1, 1, mark=fatal)


# -- using up what there is --------------------------------------------------------------------------------


@reporting
def thread_flood(env):
    """Threads that can be had. The smallest stacks, so that memory is not what ends it."""
    threading.stack_size(32768)
    done, threads = threading.Event(), []
    try:
        while len(threads) < 5000:
            thread = threading.Thread(target=done.wait)
            thread.start()
            threads.append(thread)
    except (RuntimeError, MemoryError):
        pass
    done.set()
    for thread in threads:
        thread.join()
    return len(threads)


@attempt
def memory_bomb(env):
    blocks = []
    while True:
        blocks.append(bytearray(16 << 20))


@attempt
def slow_memory_bomb(env):
    """Memory that is shared, which a process's heap does not count."""
    pages = []
    while True:
        page = mmap.mmap(-1, 16 << 20)
        for at in range(0, len(page), 4096):
            page[at] = 1
        pages.append(page)


@reporting
def disk_fill(env):
    """Megabytes that can be written."""
    folder, block, written = tempfile.mkdtemp(), bytes(1 << 20), 0
    try:
        for number in range(1000):
            with open(os.path.join(folder, str(number)), "wb", buffering=0) as file:
                for _ in range(16):
                    written += file.write(block)
    except OSError:
        pass
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
    return written >> 20


@reporting
def inode_flood(env):
    """Empty files that can be made."""
    folder, number = tempfile.mkdtemp(), 0
    try:
        for number in range(100_000):
            os.close(os.open(os.path.join(folder, str(number)), os.O_CREAT | os.O_WRONLY))
    except OSError:
        pass
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
    return number


@attempt
def one_big_file(env):
    with open(Path(tempfile.gettempdir(), "big"), "wb") as file:
        file.truncate(1 << 40)


@reporting
def descriptor_exhaustion(env):
    fds = []
    try:
        while len(fds) < 100_000:
            fds.append(os.dup(0))
    except OSError:
        pass
    for fd in fds:
        os.close(fd)
    return len(fds)


@fatal
def infinite_loop(env):
    while True:
        pass


@fatal
def stop_itself(env):
    os.kill(os.getpid(), signal.SIGSTOP)


@fatal
def exit(env):
    os._exit(0)


@fatal
def crash(env):
    ctypes.string_at(0)


# -- the node's socket -------------------------------------------------------------------------------------


@fatal
def close_the_socket(env):
    os.close(node_fd())


@fatal
async def send_garbage(env):
    write_all(node_fd(), struct.pack(">I", 4) + b"\xff\xff\xff\xff")
    await asyncio.sleep(60)


@fatal
async def send_an_oversized_frame(env):
    write_all(node_fd(), struct.pack(">I", 0xFFFFFFFF))
    await asyncio.sleep(60)


@fatal
async def send_a_deeply_nested_frame(env):
    body = b"\x91" * 100_000
    write_all(node_fd(), struct.pack(">I", len(body)) + body)
    await asyncio.sleep(60)


@reporting
async def answer_requests_that_there_are_not(env):
    from workers._wire import Chunk, End, Finished, ResponseHead

    for frame in (Finished(10**9), ResponseHead(10**9, 200, [], True), Chunk(10**9, b"x"), End(10**9)):
        _runtime.runtime.channel.send(frame)
    return "sent"


@reporting
async def send_a_frame_of_the_node(env):
    from workers._wire import Result

    _runtime.runtime.channel.send(Result(2, None))
    await asyncio.sleep(60)


@reporting
async def claim_other_layers(env):
    """After the start, nothing that it says of its sandbox counts."""
    from workers._wire import Ready, Sandboxed

    _runtime.runtime.channel.send(Sandboxed(["everything"]), Ready(["fetch"], 0))
    return "sent"


@reporting
def flood_the_log(env):
    for number in range(20_000):
        print(number, "x" * 80)


@reporting
def flood_the_error_stream(env):
    for _ in range(50):
        os.write(2, b"\x1b[2J flood" * 10_000)


@reporting
async def flood_with_calls(env):
    async def one():
        try:
            await env.AI.run("m", {})
        except Exception:
            return

    await asyncio.gather(*(one() for _ in range(3000)))
    return "done"
