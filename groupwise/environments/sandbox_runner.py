"""The process that takes rights away from itself and then runs code for `sandbox`. It imports nothing of groupwise.

Standard input has the request, one line of JSON, and stays open: when it ends, everything here is killed. Standard
output and error are those of the code. The descriptor ``status`` gets lines of JSON: ``{"started": true}``, then how
the code ended, ``{"exit": 0}``, or what could not be set up, ``{"error": …}``.

With mode "namespaces" the code sees a file system of its own, in which only the system's libraries and Python are, to
be read, and ``/tmp``, which is in memory; no process but its own; and no network. With "filter" a system-call filter
takes away sockets alone. With "plain" there are only limits of resources.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import random
import resource
import select
import signal
import struct
import sys
from contextlib import suppress
from typing import Any

NEW_MOUNTS, NEW_NAMES, NEW_IPC = 0x20000, 0x4000000, 0x8000000  # flags of unshare
NEW_USERS, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
BIND, RECURSIVE, PRIVATE, NO_SETUID, NO_DEVICES = 0x1000, 0x4000, 0x40000, 2, 4  # flags of mount
MOUNT_SETATTR, AT_RECURSIVE, ATTR_READ_ONLY, ATTR_NO_SETUID = 442, 0x8000, 1, 2
DEATH_SIGNAL, HAS_CAPABILITY, DROP_CAPABILITY, SUBREAPER, NO_NEW_RIGHTS, SECCOMP, FILTER = (
    1,
    23,
    24,
    36,
    38,
    22,
    2,
)  # of prctl
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime",
)  # fmt: skip
FOR_NETWORK = ("/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf", "/etc/ssl", "/etc/pki")
DEVICES = ("null", "zero", "full", "random", "urandom")
# By machine: the name of its calls in a filter, then the numbers of socket, ptrace, process_vm_writev; mount, umount2,
# pivot_root, unshare, setns.
CALLS = {
    "x86_64": (0xC000003E, 41, 101, 311, 165, 166, 155, 272, 308),
    "aarch64": (0xC00000B7, 198, 117, 271, 40, 39, 41, 97, 268),
}
# The same on all machines: io_uring_setup, which can make sockets, pidfd_getfd; open_tree, move_mount, fsopen, fsmount,
# mount_setattr.
OTHER_CALLS = (425, 438, 428, 429, 430, 432, 442)
STOP_CHECK = 0.05  # seconds between two counts of processes

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    request = json.loads(_read_line(0))
    status = request["status"]
    parent, name = os.path.split(request["folder"])
    place = os.open(parent, os.O_RDONLY)  # in namespaces the path leads elsewhere
    try:
        with open(os.devnull) as nothing:
            lifeline = os.dup(0)
            os.dup2(nothing.fileno(), 0)
        {"namespaces": in_namespaces, "filter": in_group, "plain": in_group}[request["mode"]](request, lifeline)
    except BaseException as error:
        report(status, error=f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
    finally:
        if request["mode"] == "namespaces":  # the files were in memory
            with suppress(OSError):
                os.rmdir(name, dir_fd=place)
        else:
            _remove(request["folder"])


def _remove(folder: str) -> None:
    """Remove the folder of the code, also if the process that made it has ended."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(descriptor, 1 << 16)
        if not part:
            raise SystemExit(1)
        line += part
    return line


def report(status: int, **facts: Any) -> None:
    """Tell the process that started this one."""
    with suppress(OSError):
        os.write(status, json.dumps(facts).encode() + b"\n")


def checked(result: int, what: str) -> None:
    """Raise the error of a C function that returned below 0."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: Any, other: Any = 0) -> int:
    return int(libc.prctl(option, ctypes.c_ulong(value), other, 0, 0))


# --- with namespaces


def in_namespaces(request: dict[str, Any], lifeline: int) -> None:
    """Run the code in namespaces of its own; the first process in them is ours, and with it all others end."""
    is_root = _leave(NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_PROCESSES | (0 if request["network"] else NEW_NETWORK))
    child = os.fork()
    if child == 0:
        try:
            prctl(DEATH_SIGNAL, signal.SIGKILL)
            os.close(lifeline)
            _make_root(request)
            user = random.SystemRandom().randrange(1 << 28, 1 << 29) if is_root else None
            _write_files("/tmp", request, user)
            code = _fork_code(request, "/tmp", user)
            _wait_for(code, request["status"])
        except BaseException as error:
            report(request["status"], error=f"{type(error).__name__}: {error}")
        os._exit(0)
    process = os.pidfd_open(child)
    select.select([process, lifeline], [], [])
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _leave(flags: int) -> bool:
    """Leave the namespaces of this process. Return whether that needed no new namespace of users, as for root."""
    if os.geteuid() == 0 and libc.unshare(flags) == 0:
        return True
    user, group = os.geteuid(), os.getegid()
    checked(libc.unshare(flags | NEW_USERS), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return False


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    checked(libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _make_root(request: dict[str, Any]) -> None:
    """A root folder in memory with what may be read; all else is gone."""
    root = request["folder"]
    mount("none", "/", None, RECURSIVE | PRIVATE)
    mount("tmpfs", root, "tmpfs", NO_SETUID | NO_DEVICES, "size=1m,mode=755")
    for name in ("tmp", "dev", "proc"):
        os.mkdir(f"{root}/{name}")
    mount("tmpfs", f"{root}/tmp", "tmpfs", NO_SETUID | NO_DEVICES, f"size={request['files']},nr_inodes=10000,mode=777")
    shown: list[str] = []
    for path in (*SYSTEM, *(FOR_NETWORK if request["network"] else ()), *request["readable"]):
        _show(path, root, shown)
    _set_attributes(root, AT_RECURSIVE, ATTR_READ_ONLY | ATTR_NO_SETUID, 0)
    _set_attributes(f"{root}/tmp", 0, 0, ATTR_READ_ONLY)
    mount("tmpfs", f"{root}/dev", "tmpfs", NO_SETUID, "size=16m,mode=755")
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}")
    os.mkdir(f"{root}/dev/shm", 0o1777)
    os.chmod(f"{root}/dev/shm", 0o1777)
    with suppress(OSError):  # not in a container that hides parts of its own /proc
        mount("proc", f"{root}/proc", "proc", NO_SETUID | NO_DEVICES)
    os.chdir(root)
    checked(libc.pivot_root(b".", b"."), "pivot_root")
    checked(libc.umount2(b".", 2), "umount2")
    os.chdir("/")


def _set_attributes(path: str, flags: int, on: int, off: int) -> None:
    attributes = struct.pack("QQQQ", on, off, 0, 0)
    result = libc.syscall(MOUNT_SETATTR, -100, os.fsencode(path), flags, attributes, ctypes.c_size_t(len(attributes)))
    checked(int(result), "making files read-only")


def _show(path: str, root: str, shown: list[str]) -> None:
    """Make a path readable in the new root, and the folder that it is a link to."""
    if not os.path.lexists(path) or any(path == other or path.startswith(f"{other}/") for other in shown):
        return
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        if not os.path.lexists(target):
            os.symlink(os.readlink(path), target)
        _show(os.path.realpath(path), root, shown)
    else:
        shown.append(path)
        _bind(path, target)


def _bind(path: str, target: str) -> None:
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(path, target, None, BIND | RECURSIVE)


# --- without


def in_group(request: dict[str, Any], lifeline: int) -> None:
    """Run the code as a process like any other, and end all that come from it."""
    if sys.platform == "linux":  # processes that lose their parent become children of this one
        prctl(SUBREAPER, 1)
    _write_files(request["folder"], request, None)
    code = _fork_code(request, request["folder"], None)
    while True:
        ended, result = os.waitpid(code, os.WNOHANG)
        if ended:
            end_of(result, request["status"])
            break
        if len(_descendants()) > request["processes"]:
            report(request["status"], stopped="processes")
            break
        if select.select([lifeline], [], [], STOP_CHECK)[0]:
            break
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(code, signal.SIGKILL)
    while others := _descendants():
        for process in others:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _descendants() -> list[int]:
    """The processes that come from this one, on Linux."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdigit():
            with suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z" or int(parent) != os.getpid():
                    children.setdefault(int(parent), []).append(int(name))
    found = list(children.get(os.getpid(), ()))
    for process in found:  # grows
        found += children.get(process, ())
    return found


def forbid_sockets() -> None:
    """Let every later call fail that makes a socket, takes one from a process, or changes mounts or namespaces."""
    if platform.machine() not in CALLS:
        raise OSError(errno.ENOSYS, f"there is no filter for machines of the kind {platform.machine()}")
    name, *numbers = CALLS[platform.machine()]
    load, equal, at_least, result = 0x20, 0x15, 0x35, 0x06
    denied = [*numbers, *OTHER_CALLS]
    deny, allow, kill = 0x00050000 | errno.EACCES, 0x7FFF0000, 0x80000000
    program = [(load, 0, 0, 4), (equal, 1, 0, name), (result, 0, 0, kill), (load, 0, 0, 0)]
    program.append((at_least, len(denied) + 1, 0, 0x40000000))  # the other numbers that x86_64 has for its calls
    program += [(equal, len(denied) - place, 0, number) for place, number in enumerate(denied)]
    program += [(result, 0, 0, allow), (result, 0, 0, deny)]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    description = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    checked(libc.prctl(SECCOMP, ctypes.c_ulong(FILTER), description, 0, 0), "seccomp")


# --- the code


def _write_files(folder: str, request: dict[str, Any], user: int | None) -> None:
    for name, text in request["texts"].items():
        path = os.path.join(folder, name)
        with open(path, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
        if user is not None:
            os.chown(path, user, user)


def _fork_code(request: dict[str, Any], folder: str, user: int | None) -> int:
    """Start the code with its limits."""
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        os.chdir(folder)
        for kind, most in request["limits"].items():
            _limit(getattr(resource, kind), most)
        if sys.platform == "linux":
            _drop_capabilities()
            if user is not None:
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            checked(prctl(NO_NEW_RIGHTS, 1), "prctl")
            if request["mode"] == "filter" and not request["network"]:
                forbid_sockets()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and so would the code
            signal.signal(number, signal.SIG_DFL)
        report(request["status"], started=True)
        os.closerange(3, 1 << 16)
        os.execve(request["command"][0], request["command"], request["environment"])
    except BaseException as error:
        report(request["status"], error=f"{type(error).__name__}: {error}")
    os._exit(1)


def _drop_capabilities() -> None:
    """Give up the rights that root would have again in the program that is started."""
    for capability in range(64):
        prctl(DROP_CAPABILITY, capability)
        if os.geteuid() == 0 and prctl(HAS_CAPABILITY, capability) == 1:
            raise PermissionError(errno.EPERM, f"the capability {capability} of root cannot be given up")


def _limit(kind: int, most: int) -> None:
    """Set a limit, or keep a lower one that there is."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _wait_for(code: int, status: int) -> None:
    """Wait until the code has ended, and meanwhile for every process that lost its parent."""
    while True:
        process, result = os.wait()
        if process == code:
            end_of(result, status)
            return


def end_of(result: int, status: int) -> None:
    report(status, exit=os.waitstatus_to_exitcode(result))


if __name__ == "__main__":
    main()
