"""Storage of studies: a journal file or a database URL. Failures are reported as one-line VplanErrors."""

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
"""Timeout for connecting to a database."""

CONNECT = {"postgresql": "connect_timeout", "mysql": "connect_timeout", "sqlite": "timeout"}
"""Kind of database -> its drivers' name for that timeout."""

FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
"""Error numbers of a full disk or an exhausted quota."""

THERE_ALREADY = ("already exists", "duplicate key")
TRIES = 10
"""Attempts, one second apart, while another worker creates the tables of a new database."""

DRIVERS = {"psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}
"""Module -> PyPI package, where the names differ."""

BEGINNING = b'{"op_code":'
"""First bytes of a journal (optuna/storages/journal/_storage.py). A file that starts differently is not ours to
change."""

TORN = "Invalid log format."
"""Optuna's message for an incomplete last line of a journal (optuna/storages/journal/_file.py)."""


def import_optuna() -> Any:
    """Imports Optuna and silences its log. Raises a VplanError when it is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise VplanError("a search that measures needs optuna", "install it: pip install 'vplan[train]'")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def is_url(storage: str) -> bool:
    """Whether a storage is a database URL; otherwise it is the path of a journal file."""
    return "://" in storage


def quoted_storage(storage: str) -> str:
    """A storage as messages name it: quoted, and without its password."""
    return quoted(without_password(storage))


def without_password(text: str) -> str:
    """The text with the passwords of all URLs in it replaced by ***."""
    return re.sub(r"(://[^:/@\s]*):[^@\s]*@", r"\1:***@", text)


def open_storage(optuna: Any, storage: str) -> Any:
    """Optuna's storage object for a database URL or the path of a journal file. Raises a VplanError for a file that is
    not a journal."""
    if is_url(storage):
        return _database(optuna, storage)
    journal = optuna.storages.journal
    path = Path(storage).expanduser().absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not BEGINNING.startswith(_head(path)):
        fix = "choose another with --storage; a database is named by its URL, as sqlite:///study.db"
        raise VplanError(f"{quoted_storage(storage)} is no study's journal", fix)
    lock = journal.JournalFileOpenLock(str(path)) if sys.platform == "win32" else _Lock(path)
    _mend(path, lock)
    return optuna.storages.JournalStorage(journal.JournalFileBackend(str(path), lock_obj=lock))


def _database(optuna: Any, url: str) -> Any:
    """A database with its tables. When two workers create the tables of a new one at once, the slower gets an error
    that they exist, and tries again."""
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
    raise VplanError(f"other workers make the tables of {quoted_storage(url)} still", "start this one again")


class _Lock:
    """A journal's lock, which the operating system releases when the process dies, however it dies.

    Optuna's own locks are files: one left by a killed process blocks every worker for half a minute.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f"{path.name}.lock")
        self._descriptor = -1

    def acquire(self) -> bool:
        """Waits until the lock is free, and takes it."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        lock_file(self._descriptor)
        return True

    def release(self) -> None:
        """Releases the lock."""
        os.close(self._descriptor)


def _mend(path: Path, lock: Any) -> None:
    """Removes an incomplete last line, left by a killed process or a full disk: the next line would be appended to it,
    and Optuna could read neither."""
    if not path.exists() or _is_whole(path):
        return
    lock.acquire()
    try:
        if not _is_whole(path):  # and no worker was in the middle of writing it
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
def plain_errors(storage: str) -> Iterator[None]:
    """Turns the exceptions of a failing storage into one-line VplanErrors."""
    fix = "see that it runs and may be written, or choose another with --storage"
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            fix = "free some space there, or choose another with --storage: the same line goes on where it was stopped"
        raise VplanError(f"cannot use the storage {quoted_storage(storage)}: {error.strerror or error}", fix) from None
    except ImportError as error:
        cause = error.__cause__ or error.__context__  # Optuna's own error does not say which module
        name = error.name or getattr(cause, "name", None) or "a driver"
        raise VplanError(
            f"the storage {quoted_storage(storage)} needs {name}", f"install it: pip install {DRIVERS.get(name, name)}"
        ) from None
    except ValueError as error:
        if not isinstance(error, json.JSONDecodeError) and str(error) != TORN:
            raise
        raise _damaged(storage) from None
    except _refusals(storage) as error:
        raise VplanError(f"the storage {quoted_storage(storage)} does not respond: {_reason(error)}", fix) from None


def _refusals(storage: str) -> tuple[type[Exception], ...]:
    """The exceptions of a failing database; none for a journal file."""
    if not is_url(storage):
        return ()
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    return StorageInternalError, SQLAlchemyError


def _damaged(storage: str) -> VplanError:
    fix = "start another with --storage: what was measured is in the ledger too"
    return VplanError(f"the journal {quoted_storage(storage)} is damaged", fix)


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(getattr(error, "orig", None) or error).split("\n")[0].split())[:300] or type(error).__name__
