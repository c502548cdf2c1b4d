"""The one way a file gets new contents: written aside and renamed, so it holds the old or the new, never a part; and
the lock of a file that several processes write."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from pathlib import Path

NAMED = 100
"""Characters of a file's name that its temporary one repeats; file systems take 255 bytes."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What locking says on a file system that has none: NFS without its lock daemon, Lustre without ``-o flock``."""


def write_file(path: Path, content: str | bytes, *, executable: bool = False) -> None:
    """Writes a file and syncs it to the disk. Raises an OSError when it cannot, and then leaves nothing behind.

    The content goes to a temporary file with an unpredictable name, created exclusively, so that a planted link is
    never followed. That file then replaces ``path``, link or file, and keeps the old file's permissions. A device or a
    pipe (/dev/stdout) is written to directly.
    """
    data = content.encode() if isinstance(content, str) else content
    mode = _mode(path)
    if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name[:NAMED]}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(temporary, flags, 0o777 if executable else 0o666)  # less the umask
    try:
        with open(descriptor, "wb") as file:
            if mode is not None and stat.S_ISREG(mode):
                os.chmod(temporary, stat.S_IMODE(mode) | (0o100 if executable else 0))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # Ctrl-C as well
        temporary.unlink(missing_ok=True)
        raise


def _mode(path: Path) -> int | None:
    """What a path is; None where nothing is. A link is one, but for those that lead to a device or a pipe."""
    try:
        found = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    return found if not stat.S_ISREG(found) else os.lstat(path).st_mode


def lock_file(descriptor: int, *, wait: bool = True) -> bool:
    """Takes a file's lock (flock), which goes with the process, however it ends; False where the file system has none,
    and on Windows. Without ``wait`` a BlockingIOError says that another process has it."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True
