"""The system calls that an isolate may make, as a seccomp filter: an allow-list, compiled to a binary search.

Unknown calls fail with ENOSYS, so that libraries take their fallbacks; well-known forbidden ones with EPERM, so that
people see why; calls that no program makes by mistake, other architectures and x32 end the process. Changing modes,
times and owners of files succeeds without effect: they mean nothing in a private folder, and no others may be changed.

It cannot look behind pointers: which file is opened is Landlock's affair.
"""

from __future__ import annotations

import errno
import struct
import sys
from collections.abc import Sequence

from edge.isolates.sandbox import linux

_NONE = -1
# Name: number on x86-64, number on aarch64.
_ALLOWED = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67), "pwrite64": (18, 68),
    "readv": (19, 65), "writev": (20, 66), "sched_yield": (24, 124), "mremap": (25, 216), "msync": (26, 227),
    "mincore": (27, 232), "madvise": (28, 233), "dup": (32, 23), "nanosleep": (35, 101), "getitimer": (36, 102),
    "setitimer": (38, 103), "getpid": (39, 172), "recvfrom": (45, 207), "shutdown": (48, 210),
    "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209), "exit": (60, 93),
    "uname": (63, 160), "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83), "truncate": (76, 45),
    "ftruncate": (77, 46), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "gettimeofday": (96, 169),
    "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174),
    "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173), "umask": (95, 166),
    "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150), "getpgid": (121, 155),
    "getsid": (124, 156), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "statfs": (137, 43), "fstatfs": (138, 44), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "gettid": (186, 178), "readahead": (187, 213), "futex": (202, 98), "sched_getaffinity": (204, 123),
    "getdents64": (217, 61), "set_tid_address": (218, 96), "restart_syscall": (219, 128), "fadvise64": (221, 223),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94),
    "epoll_ctl": (233, 21), "openat": (257, 56), "mkdirat": (258, 34), "newfstatat": (262, 79), "unlinkat": (263, 35),
    "linkat": (265, 37), "symlinkat": (266, 36), "readlinkat": (267, 78), "faccessat": (269, 48),
    "pselect6": (270, 72), "ppoll": (271, 73), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
    "fallocate": (285, 47), "eventfd2": (290, 19), "epoll_create1": (291, 20), "dup3": (292, 24), "pipe2": (293, 59),
    "preadv": (295, 69), "pwritev": (296, 70), "timerfd_create": (283, 85), "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87), "sendfile": (40, 71), "renameat": (264, 38), "getcpu": (309, 168),
    "renameat2": (316, 276), "getrandom": (318, 278), "membarrier": (324, 283), "copy_file_range": (326, 285),
    "preadv2": (327, 286), "pwritev2": (328, 287), "statx": (332, 291), "rseq": (334, 293), "epoll_pwait": (281, 22),
    "close_range": (436, 436), "faccessat2": (439, 439), "epoll_pwait2": (441, 441), "getpriority": (140, 141),
    # These are on x86-64 only.
    "open": (2, _NONE), "stat": (4, _NONE), "lstat": (6, _NONE), "poll": (7, _NONE), "access": (21, _NONE),
    "pipe": (22, _NONE), "select": (23, _NONE), "dup2": (33, _NONE), "pause": (34, _NONE), "alarm": (37, _NONE),
    "getdents": (78, _NONE), "rename": (82, _NONE), "mkdir": (83, _NONE), "rmdir": (84, _NONE), "creat": (85, _NONE),
    "link": (86, _NONE), "unlink": (87, _NONE), "symlink": (88, _NONE), "readlink": (89, _NONE),
    "getpgrp": (111, _NONE),
    "time": (201, _NONE), "epoll_create": (213, _NONE), "epoll_wait": (232, _NONE), "eventfd": (284, _NONE),
}  # fmt: skip
_REFUSED = {  # with EPERM
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242), "bind": (49, 200),
    "listen": (50, 201), "setsockopt": (54, 208), "sendmsg": (46, 211), "recvmsg": (47, 212), "sendmmsg": (307, 269),
    "recvmmsg": (299, 243), "fork": (57, _NONE), "vfork": (58, _NONE), "execve": (59, 221), "execveat": (322, 281),
    "wait4": (61, 260), "waitid": (247, 95), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268), "setuid": (105, 146), "setgid": (106, 144),
    "setreuid": (113, 145), "setregid": (114, 143), "setresuid": (117, 147), "setresgid": (119, 149),
    "setgroups": (116, 159), "setfsuid": (122, 151), "setfsgid": (123, 152), "capset": (126, 91),
    "setrlimit": (160, 164), "setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "setsid": (112, 157), "setpgid": (109, 154),
    "mknod": (133, _NONE), "mknodat": (259, 33), "mlock": (149, 228), "mlockall": (151, 230), "mlock2": (325, 284),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "sethostname": (170, 161), "seccomp": (317, 277),
}  # fmt: skip
_UNSUPPORTED = {  # ENOTSUP: as on file systems without extended attributes, which libraries take for granted
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "getxattr": (191, 8), "lgetxattr": (192, 9),
    "fgetxattr": (193, 10), "listxattr": (194, 11), "llistxattr": (195, 12), "flistxattr": (196, 13),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
_WITHOUT_EFFECT = {
    "chmod": (90, _NONE), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "utime": (132, _NONE),
    "utimes": (235, _NONE), "utimensat": (280, 88), "futimesat": (261, _NONE),
    "chown": (92, _NONE), "fchown": (93, 55), "lchown": (94, _NONE), "fchownat": (260, 54),
}  # fmt: skip
_FATAL = {
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "iopl": (172, _NONE), "ioperm": (173, _NONE), "acct": (163, 89), "bpf": (321, 280),
}  # fmt: skip
_CHECKED = {
    "clone": (56, 220), "kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261), "ioctl": (16, 29),
    "fcntl": (72, 25), "prctl": (157, 167), "socketpair": (53, 199), "sendto": (44, 206),
    "personality": (135, 92),
}  # fmt: skip
TABLES = (_ALLOWED, _REFUSED, _UNSUPPORTED, _WITHOUT_EFFECT, _FATAL, _CHECKED)

_COLUMN = {"x86_64": 0, "aarch64": 1}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020080
_IOCTLS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Is it a terminal and how wide (TCGETS, TCGETS2, TIOCGWINSZ), FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""Duplicates, flags, locks and F_GETPIPE_SZ; no owner and no signal of asynchronous input."""
_PRCTLS = (2, 3, 15, 16, 23, 39, 0x53564D41)
"""Reading the parent-death signal, dumpable, bounding set and no_new_privs; names of threads and of memory."""

_LOAD, _AND, _JUMP, _RETURN = 0x20, 0x54, 0x05, 0x06
_JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT = 0x15, 0x35, 0x45
_NR, _ARCH = 0, 4
_KILL, _ALLOW = 0x80000000, 0x7FFF0000
_OWN_PID = 0xFEEDFACE
"""Stands for the process's own number."""

_Instruction = tuple[int, int, int, int]
_Block = list[_Instruction]


def _error(number: int) -> int:
    return 0x00050000 | number


_EPERM, _ENOSYS, _ENOTSUP, _SUCCESS = map(_error, (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, 0))


def is_supported(machine: str = linux.MACHINE) -> bool:
    """Whether there is a table of system calls for this architecture."""
    return machine in _COLUMN


class Filter:
    """The filter for processes of this machine, compiled once; each may signal only itself.

    Raises:
        KeyError: there is no table for this architecture.
    """

    def __init__(self, machine: str = linux.MACHINE) -> None:
        instructions = _compile(machine)
        self._program = b"".join(struct.pack("=HBBI", *each) for each in instructions)
        self._pid_offsets = [8 * at + 4 for at, each in enumerate(instructions) if each[3] == _OWN_PID]

    def for_process(self, pid: int) -> bytes:
        """It as `struct sock_filter[]` for the process `pid`."""
        program = bytearray(self._program)
        for offset in self._pid_offsets:
            program[offset : offset + 4] = pid.to_bytes(4, sys.byteorder)
        return bytes(program)


def _compile(machine: str) -> _Block:
    column = _COLUMN[machine]
    blocks = _blocks()
    actions: dict[int, int | str] = {}
    for table, action in (
        (_ALLOWED, _ALLOW),
        (_REFUSED, _EPERM),
        (_UNSUPPORTED, _ENOTSUP),
        (_WITHOUT_EFFECT, _SUCCESS),
        (_FATAL, _KILL),
    ):
        actions |= {numbers[column]: action for numbers in table.values()}
    actions |= {numbers[column]: name for name, numbers in _CHECKED.items()}
    actions.pop(_NONE, None)
    actions[_X32_BIT] = _KILL

    tree = _search(_intervals(actions))
    offsets, length = {}, len(tree)
    for name, block in blocks.items():
        offsets[name] = length
        length += len(block)
    head: _Block = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
    ]
    resolved = [
        (_JUMP, 0, 0, offsets[target] - at - 1) if isinstance(target, str) else (code, yes, no, target)
        for at, (code, yes, no, target) in enumerate(tree)
    ]
    return [*head, *resolved, *(each for block in blocks.values() for each in block)]


def _intervals(actions: dict[int, int | str]) -> list[tuple[int, int | str]]:
    """First number and action of each run of system calls with one action, from 0 on; those between have ENOSYS."""
    runs: list[tuple[int, int | str]] = [(0, _ENOSYS)]
    expected = 0
    for number in sorted(actions):
        if number > expected and runs[-1][1] != _ENOSYS:
            runs.append((expected, _ENOSYS))
        if runs[-1][1] != actions[number]:
            runs.append((number, actions[number]))
        expected = number + 1
    return [run for run, after in zip(runs, [*runs[1:], (-1, 0)], strict=True) if run[0] != after[0]]


def _search(runs: Sequence[tuple[int, int | str]]) -> list[tuple[int, int, int, int | str]]:
    """A binary search for the number loaded last; actions that are names are jumps to the block of that name."""
    if len(runs) == 1:
        return [(_RETURN, 0, 0, runs[0][1])]
    middle = len(runs) // 2
    left, right = _search(runs[:middle]), _search(runs[middle:])
    return [(_JUMP_GREATER_EQUAL, len(left), 0, runs[middle][0]), *left, *right]


def _blocks() -> dict[str, _Block]:
    """What decides about calls whose arguments matter."""
    return {
        "clone": [
            *_argument(0),
            (_JUMP_ANY_BIT, 1, 0, _CLONE_NAMESPACES),
            (_JUMP_ANY_BIT, 1, 0, _CLONE_THREAD),
            (_RETURN, 0, 0, _EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ],
        "kill": _one_of(0, (_OWN_PID,)),
        "tgkill": _one_of(0, (_OWN_PID,)),
        # Reading limits of itself; new limits (the third argument) would be set.
        "prlimit64": [
            *_argument(2),
            (_JUMP_EQUAL, 0, 6, 0),
            (_LOAD, 0, 0, _offset(2) + 4),
            (_JUMP_EQUAL, 0, 4, 0),
            *_argument(0),
            (_JUMP_EQUAL, 1, 0, 0),
            (_JUMP_EQUAL, 0, 1, _OWN_PID),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _EPERM),
        ],
        "ioctl": _one_of(1, _IOCTLS),
        "fcntl": _one_of(1, _FCNTLS),
        "prctl": _one_of(0, _PRCTLS),
        # Unix streams only; datagrams could be sent to the sockets of others.
        "socketpair": [
            *_argument(0),
            (_JUMP_EQUAL, 0, 3, 1),
            *_argument(1),
            (_AND, 0, 0, 0xF),
            (_JUMP_EQUAL, 1, 0, 1),
            (_RETURN, 0, 0, _EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ],
        "sendto": [  # to the peer, not to an address
            *_argument(4),
            (_JUMP_EQUAL, 0, 2, 0),
            (_LOAD, 0, 0, _offset(4) + 4),
            (_JUMP_EQUAL, 1, 0, 0),
            (_RETURN, 0, 0, _EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ],
        "personality": _one_of(0, (0xFFFFFFFF,)),
    }


def _offset(index: int) -> int:
    return 16 + 8 * index


def _argument(index: int) -> _Block:
    """Load the lower half of an argument, where the kernel looks at no more than an int."""
    return [(_LOAD, 0, 0, _offset(index))]


def _one_of(index: int, values: Sequence[int]) -> _Block:
    checks = [(_JUMP_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [*_argument(index), *checks, (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
