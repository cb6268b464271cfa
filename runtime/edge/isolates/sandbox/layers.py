"""The layers of the sandbox by name and bit, what each is for, and which of them a policy demands.

Plain data, which node, zygote and command line share: `Sandbox.enter` applies it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

POLICIES = ("strict", "standard", "best-effort", "none")


class Layer(msgspec.Struct, frozen=True):
    """One layer: `without` is the risk if it is off, `fix` how to get it; `bit` is its place in `bitmask`."""

    name: str
    bit: int
    level: str
    """`base`, `standard` or `strict`: the weakest policy that demands it; `extra`: none does."""
    without: str
    fix: str = ""


_NEW_KERNEL = "run on Linux {} or later"
_USER_NAMESPACES = (
    "allow user namespaces: sysctl -w user.max_user_namespaces=10000, on Ubuntu also "
    "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0; in Docker: --security-opt seccomp=unconfined"
)

LAYERS = (
    Layer("session", 0, "base", "it shares a session and its terminal with the node"),
    Layer("parent-death-signal", 1, "base", "it can outlive the node"),
    Layer("no-core-dump", 2, "base", "secrets can end up in a core file"),
    Layer("umask", 3, "base", "files that it makes can be read by others"),
    Layer("clean-environment", 4, "base", "it sees the node's environment"),
    Layer("closed-descriptors", 5, "base", "it can use files and sockets of the node"),
    Layer("no-new-privileges", 6, "base", "a set-uid program would give it privileges", _NEW_KERNEL.format("3.5")),
    Layer("not-dumpable", 7, "base", "other processes of this user can read its memory"),
    Layer("reseeded-random", 8, "base", "all isolates draw the same random numbers"),
    Layer("limits", 9, "base", "it can use all memory, descriptors and disk space"),
    Layer("no-capabilities", 10, "base", "it keeps privileges of the node's user"),
    Layer(
        "seccomp",
        11,
        "standard",
        "it can open sockets, start programs and reach most of the kernel",
        "run on a kernel with CONFIG_SECCOMP_FILTER, on x86-64 or aarch64",
    ),
    Layer(
        "landlock-files",
        12,
        "standard",
        "it can read every file that this user can read",
        "run on Linux 5.13 or later with landlock among the boot parameters lsm=…",
    ),
    Layer("landlock-network", 13, "extra", "TCP is held back by fewer layers", _NEW_KERNEL.format("6.7")),
    Layer("landlock-scopes", 14, "extra", "signals are held back by fewer layers", _NEW_KERNEL.format("6.12")),
    Layer("user-namespace", 15, "strict", "its privileges are checked by fewer layers", _USER_NAMESPACES),
    Layer("network-namespace", 16, "strict", "the network is held back by fewer layers", _USER_NAMESPACES),
    Layer("ipc-namespace", 17, "strict", "shared memory is held back by fewer layers", _USER_NAMESPACES),
    Layer("uts-namespace", 18, "strict", "it sees the machine's name", _USER_NAMESPACES),
    Layer(
        "mount-namespace",
        19,
        "strict",
        "files are protected from writes by fewer layers, and the size of its temporary folder is only watched",
        _USER_NAMESPACES,
    ),
    Layer(
        "thread-limit",
        20,
        "extra",
        "it can start threads until the machine has no more",
        "allow user namespaces, or run the node as an ordinary user",
    ),
    Layer(
        "own-uid",
        21,
        "extra",
        "all isolates run as the node's user",
        "run the node as root, with user namespaces and Landlock",
    ),
    Layer(
        "cgroup",
        22,
        "extra",
        "memory is limited by address space and by the node's watch only",
        "run the node as root with writable cgroups, or in a delegated cgroup (systemd: Delegate=yes)",
    ),
)

BY_NAME = {layer.name: layer for layer in LAYERS}
_DEMANDED = {
    "strict": ("base", "standard", "strict"),
    "standard": ("base", "standard"),
    "best-effort": ("base",),
    "none": (),
}


TMP_MB = 64
"""Of files in the temporary folder of a process."""


class ForkSpec(msgspec.Struct, frozen=True):
    """What the sandbox of a new process has to let through, and how much.

    `root` and `search_paths` may be read; of the top of `root`, no entry whose name begins with a dot and none that
    holds one of `hidden_paths` (the node's state, secrets).
    """

    memory_mb: int = 256
    root: str = ""
    search_paths: tuple[str, ...] = ()
    hidden_paths: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """What the node sets aside for a process, whatever it will be for: on the wire to the zygote."""

    tmp_dir: str = ""
    uid: int = 0
    """The user to become; 0: stay."""
    why_no_cgroup: str = ""
    """Empty: the node puts the process into a control group before it sends anything."""
    is_spare: bool = False
    """Whether it will have time before it learns what it is for."""


class SandboxReport(msgspec.Struct):
    """What a process says of its own sandbox."""

    layers: list[str] = []
    missing: dict[str, str] = {}
    """Layers that are off, and why."""
    escapes: list[str] = []
    """Forbidden acts that the self-test got away with although the layers are on."""


def bitmask(names: Iterable[str]) -> int:
    """The layers as one number, for usage records; unknown names count for nothing."""
    return sum(1 << BY_NAME[name].bit for name in set(names) if name in BY_NAME)


def names_of(mask: int) -> list[str]:
    """The layers of a bitmask."""
    return [layer.name for layer in LAYERS if mask >> layer.bit & 1]


def demanded(policy: str) -> list[Layer]:
    """The layers without which `policy` refuses a process."""
    return [layer for layer in LAYERS if layer.level in _DEMANDED[policy]]


def refusal(policy: str, report: SandboxReport) -> str | None:
    """Why a process with this report may get no code and no secrets under `policy`, and what to do; None if it may."""
    if policy == "none":
        return None
    if report.escapes:
        return (
            f"the sandbox does not hold: its self-test could {', '.join(report.escapes)}; "
            "`edge doctor` shows its layers"
        )
    lacking = [layer for layer in demanded(policy) if layer.name not in report.layers]
    if not lacking:
        return None
    why = "; ".join(f"{layer.name} ({report.missing.get(layer.name, 'not reported')})" for layer in lacking)
    fixes = "; ".join(dict.fromkeys(layer.fix for layer in lacking if layer.fix))
    weaker = {"strict": "standard", "standard": "best-effort"}.get(policy)
    choice = f', or set sandbox = "{weaker}" under [isolates] to run without' if weaker else ""
    return f"the sandbox lacks what policy {policy!r} demands: {why}. Fix: {fixes or '`edge doctor` says more'}{choice}"


def summary(policy: str, report: SandboxReport) -> str:
    """One line for people: the policy, and what is off."""
    if policy == "none":
        return "none: handlers can do whatever this user can (--insecure-no-sandbox)"
    off = [layer for layer in LAYERS if layer.name not in report.layers]
    if not off:
        return f"{policy}, all layers on"
    return f"{policy}; off: " + ", ".join(layer.name for layer in off) + " (`edge doctor` says why)"
