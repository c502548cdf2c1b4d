"""Starts the command of a rehearsal: without network and with a /dev/shm of its own, where the system allows it.

Run by its path, with the standard library alone: `launcher.py FOLDER NETWORK COMMAND...`. What it could shut off is
written to FOLDER/sandbox.json before the command takes its place.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from pathlib import Path

SANDBOX = "sandbox.json"
NO_NETWORK = "never"
"""In place of NETWORK: the command does not start where the network cannot be shut off."""

_NEW_MOUNTS, _NEW_USER, _NEW_NETWORK = 0x00020000, 0x10000000, 0x40000000
"""CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET (linux/sched.h)"""
_RECURSIVE, _PRIVATE = 0x4000, 0x40000
"""MS_REC, MS_PRIVATE (linux/mount.h)"""
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG (linux/prctl.h)"""
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1
"""SIOCGIFFLAGS, SIOCSIFFLAGS (linux/sockios.h), IFF_UP (linux/if.h)"""

_libc = ctypes.CDLL(None, use_errno=True)


def _unshare(flags: int) -> bool:
    return bool(_libc.unshare(flags) == 0)


def _separate(network: bool) -> bool:
    """New namespaces: as root directly, else in a user namespace with the same user in it."""
    flags = _NEW_MOUNTS | (0 if network else _NEW_NETWORK)
    user, group = os.getuid(), os.getgid()
    if user == 0 and _unshare(flags):
        return True
    if not _unshare(flags | _NEW_USER):
        return False
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    return True


def _loopback_up() -> None:
    """Ranks talk to each other over localhost, which is down in a new namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sH22x", b"lo", 0)
        flags = struct.unpack("16sH22x", fcntl.ioctl(handle, _GET_FLAGS, request))[1]
        fcntl.ioctl(handle, _SET_FLAGS, struct.pack("16sH22x", b"lo", flags | _UP))


def _own_shared_memory() -> bool:
    """An empty /dev/shm that goes with its last process."""
    if _libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None):
        return False
    return bool(_libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777") == 0)


def sandbox(network: bool) -> dict[str, bool]:
    """Shut off what can be: which of `network` and `shared_memory` are the process's own now."""
    try:
        if not _separate(network):
            return {"network": False, "shared_memory": False}
        if not network:
            _loopback_up()
        return {"network": not network, "shared_memory": _own_shared_memory()}
    except OSError:
        return {"network": False, "shared_memory": False}


def main() -> None:
    """Become the command."""
    folder, network, *command = sys.argv[1:]
    _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    own = sandbox(network == "1")
    Path(folder, SANDBOX).write_text(json.dumps(own), encoding="utf-8")
    if network == NO_NETWORK and not own["network"]:
        sys.exit("this system does not let a process be without network (user namespaces are off)")
    environment = json.loads(Path(folder, "environment.json").read_text(encoding="utf-8"))
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    main()
