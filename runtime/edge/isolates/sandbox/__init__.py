"""What a forked handler process gives up before it sees any code or secret.

`Sandbox.enter` is the one place where layers are applied, in an order in which none undoes another: base layers,
mounts, limits, user, descriptors, no-new-privileges, Landlock, and seccomp last. What the kernel does not have is left
out and reported; whether that is good enough is for the node to say (`layers.refusal`), before it sends code.

It does NOT protect against bugs of the kernel in what stays allowed, against what processors leak between processes, or
against a handler that uses up what it is allowed to use: for CPU time there is the node's watch.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator

from edge.isolates.sandbox import linux, namespaces, seccomp, selftest
from edge.isolates.sandbox.landlock import READ, READ_WRITE_FILE, WRITE, Ruleset
from edge.isolates.sandbox.landlock import abi as landlock_abi
from edge.isolates.sandbox.layers import LAYERS, TMP_MB, ForkSpec, Plan, SandboxReport

__all__ = ["KEPT_VARIABLES", "ForkSpec", "Plan", "Sandbox", "SandboxReport", "die_with_parent"]

KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ")
LIBRARY_SETTINGS = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
"""A library that starts threads when it is imported could not be in a process that forks; arenas cost address space."""
NUM_DESCRIPTORS = 256
NUM_THREADS = 128
"""Of one isolate."""
ADDRESS_HEADROOM_BYTES = 1 << 30
"""Address space is reserved for threads and arenas long before it is used."""
MB = 1 << 20
NOT_BASE = [layer.name for layer in LAYERS if layer.level != "base"]

SYSTEM_PATHS = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/timezone", "/etc/mime.types"),
    *(
        "/etc/ssl/certs",
        "/etc/ssl/openssl.cnf",
        "/etc/ssl/cert.pem",
        "/etc/pki/tls/certs",
        "/etc/pki/ca-trust/extracted",
    ),
    *("/dev/zero", "/dev/urandom", "/dev/random"),
)
"""What libraries of the system read: code, time zones, certificates. Nothing else of /etc, no /proc and no /sys."""


class Sandbox:
    """What is the same for all children of a zygote, found out once, and applied in each of them."""

    def __init__(self, policy: str) -> None:
        self._is_confined = policy != "none"
        self._layers: list[str] = []
        self._missing = dict.fromkeys(NOT_BASE, "the policy is none")
        self._proc_fd = namespaces.open_proc()
        if self._is_confined:
            self._layers, self._missing = namespaces.enter_as_zygote()
        self._abi = landlock_abi()
        self._filter = seccomp.Filter() if seccomp.is_supported() else None
        self._address_bytes = _address_space_bytes() + ADDRESS_HEADROOM_BYTES
        self._system = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in _without_nested(_system_paths())]
        _clear_environment()

    @property
    def has_own_mounts(self) -> bool:
        """Whether isolates can have a temporary folder in memory, instead of one that the node makes."""
        return "mount-namespace" in self._layers

    @property
    def can_change_user(self) -> bool:
        """Whether an isolate can get a user of its own, and still read what Landlock lets it read."""
        return os.getuid() == 0 and "user-namespace" in self._layers and self._abi > 0

    def enter(self, sock_fd: int, parent_pid: int, plan: Plan, next_spec: Callable[[], ForkSpec]) -> SandboxReport:
        """Apply every layer to this process, which was just forked; only `sock_fd` and 0, 1, 2 stay open.

        Args:
            next_spec: says what the process is for, which most layers need not know; it may wait for that.

        Raises:
            OSError: a base layer cannot be applied; the process must end.
        """
        report = SandboxReport(list(self._layers), dict(self._missing))
        os.setsid()
        die_with_parent(parent_pid)
        os.umask(0o077)
        if plan.tmp_dir:
            os.environ["TMPDIR"] = os.environ["HOME"] = plan.tmp_dir
        random.seed()
        _reseed_numpy()
        report.layers += ["session", "parent-death-signal", "umask", "clean-environment", "reseeded-random"]
        has_tmp = self._mount_tmp(plan, report)
        self._limit(plan, report)
        if plan.why_no_cgroup:
            report.missing["cgroup"] = plan.why_no_cgroup
        else:
            report.layers.append("cgroup")
        ruleset = self._rules(plan.tmp_dir if has_tmp else "", report) if self._is_confined else None
        self._drop_privileges(plan.uid, parent_pid, report)
        _close_descriptors([sock_fd] if ruleset is None else [sock_fd, ruleset.fd])
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        # No ptrace and no /proc/PID/mem for other processes of the same user. Not earlier: it also hides /proc/self.
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        report.layers += ["closed-descriptors", "no-new-privileges", "not-dumpable"]
        spec = next_spec()
        if self._is_confined:
            _set_limit(resource.RLIMIT_AS, self._address_bytes + spec.memory_mb * MB)
        if ruleset is not None:
            _allow_worker(ruleset, spec)
            ruleset.restrict()
            report.layers.append("landlock-files")
        if self._is_confined:
            self._filter_calls(report)
        report.escapes = selftest.escapes(report.layers)
        return report

    def _mount_tmp(self, plan: Plan, report: SandboxReport) -> bool:
        """Give this process a temporary folder; without mounts of its own it is the one that the node made."""
        if "user-namespace" in report.layers and not plan.uid:
            try:
                namespaces.enter_own_user_namespace(self._proc_fd)
            except OSError as error:
                report.missing["thread-limit"] = str(error)
        if not self.has_own_mounts:
            return bool(plan.tmp_dir)
        try:
            namespaces.mount_tmp(plan.tmp_dir, TMP_MB * MB, plan.uid or os.getuid())
        except OSError as error:
            report.layers.remove("mount-namespace")
            report.missing["mount-namespace"] = str(error)
            return False
        return True

    def _limit(self, plan: Plan, report: SandboxReport) -> None:
        _set_limit(resource.RLIMIT_CORE, 0)
        report.layers.append("no-core-dump")
        if not self._is_confined:
            return
        _set_limit(resource.RLIMIT_NOFILE, NUM_DESCRIPTORS)
        _set_limit(resource.RLIMIT_FSIZE, TMP_MB * MB)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing too much is an error, not the end
        report.layers.append("limits")
        # The kernel exempts uid 0. Outside of a namespace of its own it counts all processes of a user, the node's and
        # those of a whole desktop included.
        is_user = os.getuid() != 0 and "user-namespace" in report.layers and "thread-limit" not in report.missing
        if plan.uid or is_user:
            _set_limit(resource.RLIMIT_NPROC, NUM_THREADS)
        if plan.uid or is_user or not plan.why_no_cgroup:
            report.layers.append("thread-limit")
            report.missing.pop("thread-limit", None)
        else:
            report.missing.setdefault(
                "thread-limit", "it needs a control group, or user namespaces and a user that is not root"
            )

    def _rules(self, tmp_dir: str, report: SandboxReport) -> Ruleset | None:
        """What every process may open, and `tmp_dir`."""
        if self._abi == 0:
            why = "the kernel has no Landlock, or it is not among lsm= at boot"
            report.missing |= dict.fromkeys(("landlock-files", "landlock-network", "landlock-scopes"), why)
            return None
        ruleset = Ruleset(self._abi)
        for fd in self._system:
            ruleset.allow_open(fd, READ)
        ruleset.allow("/dev/null", READ_WRITE_FILE)
        if tmp_dir:
            ruleset.allow(tmp_dir, WRITE)
        for layer, since in (("landlock-network", 4), ("landlock-scopes", 6)):
            if self._abi >= since:
                report.layers.append(layer)
            else:
                report.missing[layer] = f"the kernel's Landlock has ABI {self._abi}, this needs {since}"
        return ruleset

    def _drop_privileges(self, uid: int, parent_pid: int, report: SandboxReport) -> None:
        """Become `uid`. What it may read Landlock says, not the modes of files: the interpreter may be a user's own."""
        kept = 0
        if uid:
            kept = 1 << linux.CAP_DAC_READ_SEARCH
            linux.prctl(linux.PR_SET_KEEPCAPS, 1)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            report.layers.append("own-uid")
        else:
            report.missing["own-uid"] = (
                "the node does not run as root" if os.getuid() else "it needs the layers of files"
            )
        linux.set_capabilities(kept)
        die_with_parent(parent_pid)  # the kernel forgets it when the user changes
        report.layers.append("no-capabilities")

    def _filter_calls(self, report: SandboxReport) -> None:
        if self._filter is None:
            report.missing["seccomp"] = f"there is no table of system calls for {linux.MACHINE}"
            return
        try:
            linux.set_seccomp_filter(self._filter.for_process(os.getpid()))
        except OSError as error:
            report.missing["seccomp"] = str(error)
            return
        report.layers.append("seccomp")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent's thread ends; exit now if that has happened already."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def _set_limit(limit: int, value: int) -> None:
    resource.setrlimit(limit, (value, value))


def _clear_environment() -> None:
    """Of the zygote, and so of what it forks."""
    for name in set(os.environ) - {*KEPT_VARIABLES, *LIBRARY_SETTINGS}:
        del os.environ[name]


def _reseed_numpy() -> None:
    """Its global generator would draw the same numbers in every fork."""
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(None)


def _close_descriptors(kept: list[int]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    linux.close_all_but(kept)


def _allow_worker(ruleset: Ruleset, spec: ForkSpec) -> None:
    for path in spec.search_paths:
        ruleset.allow(path, READ)
    if spec.root:
        _allow_root(ruleset, spec.root, spec.hidden_paths)


def _allow_root(ruleset: Ruleset, root: str, hidden_paths: tuple[str, ...]) -> None:
    """Let the worker's folder be read, but for what is not code: the node's state and hidden files beside it."""
    hidden = {os.path.relpath(path, root).split(os.sep)[0] for path in hidden_paths}
    try:
        names = os.listdir(root)
    except OSError:
        return
    shown = [name for name in names if not name.startswith(".") and name not in hidden]
    if len(shown) == len(names):
        ruleset.allow(root, READ)
    else:
        ruleset.allow_entries(root, shown)


def _system_paths() -> Iterator[str]:
    yield from SYSTEM_PATHS
    yield from {path for path in sys.path if os.path.isabs(path) and path != "/"}
    # The interpreter's own libraries; a virtual environment has those of the installation that it was made with.
    yield from {os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix, sys.base_exec_prefix)}
    yield os.path.join(sys.prefix, "pyvenv.cfg")


def _without_nested(paths: Iterable[str]) -> list[str]:
    """Those that exist and are not within another one: each costs every fork some microseconds."""
    real = {os.path.realpath(path) for path in paths if os.path.exists(path)}
    return [path for path in sorted(real) if not any(path.startswith(other + os.sep) for other in real)]


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
