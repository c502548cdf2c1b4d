"""Where studies are kept: a journal file, or a database that answers to a URL. What fails says so in one line."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.errors import VplanError, quoted
from planner.file_writing import lock_file

CONNECT_SECONDS = 10
"""How long a database may take to answer."""

CONNECT = {"postgresql": "connect_timeout", "mysql": "connect_timeout", "sqlite": "timeout"}
"""Kind of database -> what its drivers call that."""

FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
"""What a disk says that has no room, or none for this user."""

THERE_ALREADY = ("already exists", "duplicate key")
TRIES = 10
"""Seconds to wait for another worker that makes a new database's tables."""

DRIVERS = {"psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}
"""Package that has a module, where its name is another."""

BEGINNING = b'{"op_code":'
"""Of a journal (optuna/storages/journal/_storage.py). What begins otherwise is somebody's file, and stays as it is."""

TORN = "Invalid log format."
"""What Optuna says of a journal's last line that was not written to its end (optuna/storages/journal/_file.py)."""


def imported() -> Any:
    """Optuna, without its talk; a VplanError where it is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise VplanError("a search that measures needs optuna", "install it: pip install 'vplan[train]'")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def is_url(storage: str) -> bool:
    """Whether a storage is the URL of a database; otherwise it is the path of a journal file."""
    return "://" in storage


def shown(storage: str) -> str:
    """A storage as messages show it: quoted, and without a password."""
    return quoted(without_password(storage))


def without_password(text: str) -> str:
    """The text with the passwords of all URLs in it replaced by ***."""
    return re.sub(r"(://[^:/@\s]*):[^@\s]*@", r"\1:***@", text)


def opened(optuna: Any, storage: str) -> Any:
    """Optuna's storage object for a database URL or for the path of a journal file. Raises a VplanError for a file that
    is something else."""
    if is_url(storage):
        return _database(optuna, storage)
    journal = optuna.storages.journal
    path = Path(storage).expanduser().absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not BEGINNING.startswith(_head(path)):
        fix = "choose another with --storage; a database is named by its URL, as sqlite:///study.db"
        raise VplanError(f"{shown(storage)} is no study's journal", fix)
    lock = journal.JournalFileOpenLock(str(path)) if sys.platform == "win32" else _Lock(path)
    _mend(path, lock)
    return optuna.storages.JournalStorage(journal.JournalFileBackend(str(path), lock_obj=lock))


def _database(optuna: Any, url: str) -> Any:
    """A database, with its tables made. Two workers may begin to make those of a new one at once: the slower is told
    that they are there already, and looks again."""
    from sqlalchemy.exc import DBAPIError

    kind = url.partition("://")[0].partition("+")[0]
    arguments = {CONNECT[kind]: CONNECT_SECONDS} if kind in CONNECT else {}
    for _ in range(TRIES):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": arguments, "pool_pre_ping": True})
        except DBAPIError as error:
            if not any(words in str(error.orig) for words in THERE_ALREADY):
                raise
            time.sleep(1.0)
    raise VplanError(f"other workers make the tables of {shown(url)} still", "start this one again")


class _Lock:
    """A journal's lock that the system takes back when its process dies, however it dies.

    Optuna's own are files: one whose process was killed keeps everybody waiting for half a minute.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f"{path.name}.lock")
        self._descriptor = -1

    def acquire(self) -> bool:
        """Waits until nobody else has it."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        lock_file(self._descriptor)
        return True

    def release(self) -> None:
        """Gives it back."""
        os.close(self._descriptor)


def _mend(path: Path, lock: Any) -> None:
    """Takes away half a line that a dying process, or a full disk, left at a journal's end: the next one would be
    written behind it, and Optuna could read neither."""
    if not path.exists() or _is_whole(path):
        return
    lock.acquire()
    try:
        if not _is_whole(path):  # nobody was writing it just now
            whole, newline, _ = path.read_bytes().rpartition(b"\n")
            os.truncate(path, len(whole + newline))
    finally:
        lock.release()


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(BEGINNING))


def _is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


@contextlib.contextmanager
def said_plainly(storage: str) -> Iterator[None]:
    """Turns what a storage that fails raises into one line."""
    fix = "see that it runs and may be written, or choose another with --storage"
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            fix = "free some space there, or choose another with --storage: the same line goes on where it was stopped"
        raise VplanError(f"cannot use the storage {shown(storage)}: {error.strerror or error}", fix) from None
    except ImportError as error:
        cause = error.__cause__ or error.__context__  # Optuna's own error does not say which module
        name = error.name or getattr(cause, "name", None) or "a driver"
        raise VplanError(
            f"the storage {shown(storage)} needs {name}", f"install it: pip install {DRIVERS.get(name, name)}"
        ) from None
    except ValueError as error:
        if not isinstance(error, json.JSONDecodeError) and str(error) != TORN:
            raise
        raise _damaged(storage) from None
    except _refusals(storage) as error:
        raise VplanError(f"the storage {shown(storage)} does not respond: {_reason(error)}", fix) from None


def _refusals(storage: str) -> tuple[type[Exception], ...]:
    """What a database that does not do as it is told raises."""
    if not is_url(storage):
        return ()
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    return StorageInternalError, SQLAlchemyError


def _damaged(storage: str) -> VplanError:
    fix = "start another with --storage: what was measured is in the ledger too"
    return VplanError(f"the journal {shown(storage)} is damaged", fix)


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(getattr(error, "orig", None) or error).split("\n")[0].split())[:300] or type(error).__name__
