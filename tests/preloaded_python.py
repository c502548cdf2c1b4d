"""Forks vplan's processes from a Python that has imported torch, instead of starting new Pythons: a worker's imports
take ten seconds of a core, and what most tests examine takes a tenth of one.

The fixture `preloaded_python` replaces `subprocess.Popen` by one that forks where a new Python would run one of our
scripts or torch's launcher. All other commands are started normally, as are those whose Python would start under other
conditions. A fork has its own process ID, session, standard streams, environment, folder, arguments and signals; it is
a child of the process that started it, and ends as any process does. It runs the same script from its first line; the
only difference is that modules are already loaded.

A server (``python -m tests.preloaded_python``) makes the first fork, so that the fork contains nothing of the tests;
processes started by that fork are forked from it. To rule out the forks as the cause of a failure,
`VPLAN_NEW_PYTHONS=1` starts new Pythons everywhere.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = "torch.distributed.run"
PRELOADED = (
    "accelerate",
    "av",
    "diffusers",
    "diffusers.loaders.lora_pipeline",
    "diffusers.models.autoencoders",
    "diffusers.models.transformers",
    "diffusers.pipelines.wan.pipeline_wan",
    "diffusers.schedulers",
    "optuna",
    "peft",
    "planner.commands",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.nn.parallel",
    "torch.utils.tensorboard",
    "trainers.convert",
    "trainers.data.cache",
    "trainers.data.loader",
    "trainers.data.parts",
    "trainers.families.wan",
    "trainers.parallel.checkpoint",
    "trainers.parallel.engines",
    "trainers.parallel.lora_files",
    "trainers.parallel.start",
    "trainers.prepare",
    "trainers.recording.tapes",
    "trainers.sampling.samples",
    "trainers.train",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.t5.modeling_t5",
    "transformers.models.umt5.modeling_umt5",
)
"""Modules that workers import, some only on demand."""

READ_AT_START = ("PYTHON", "OMP_NUM_THREADS", "TORCH", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DIFFUSERS_", "TZ")
"""Prefixes of variables that Python and libraries read at start. If they differ from the server's, the process is not
forked."""

OF_RANKS = ("TORCHELASTIC_", "TORCH_NCCL_")
"""Exceptions from these, set by torch's launcher for its ranks: read when processes connect, and not on import."""

HASH_SEED = ("PYTHONHASHSEED", "0")
"""Set for the server, unless the tests have one: recordings require it, and other code works with any."""

SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of linux/prctl.h: orphans below this process become its own children."""

PYTHON = sys.executable
"""This Python. A test that sets another for its workers means that program (`tests.planner.conftest.worker`)."""

_Popen = subprocess.Popen
_is_fork = False
"""Whether this is the server, or a process forked from it."""


class Start(NamedTuple):
    """A process to fork."""

    arguments: list[str]
    """its `sys.argv`, starting with the script or the module"""
    module: str | None
    """instead of a script"""
    is_unbuffered: bool
    puts_folder_first: bool
    """whether the script's folder comes first on `sys.path`"""
    folder: str
    environment: dict[str, str]
    leads_session: bool
    blocked: list[int]
    """signals blocked in the requesting thread, which the new process inherits"""


class ForkingPopen(_Popen):  # type: ignore[type-arg]
    """A `subprocess.Popen` that forks processes which would otherwise import torch again."""

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(_Popen._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        start = _start(asked)
        if start is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        inherited = (0, 1, 2)
        asked_for = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        streams = [own if own != -1 else usual for own, usual in zip(asked_for, inherited, strict=True)]
        if _is_fork:
            self.pid = os.fork()
            if not self.pid:
                atexit._clear()  # the parent's, which has them to run itself
                _become(start, streams)
        else:
            self.pid = _server(asked_environment(asked).get("LD_PRELOAD", "")).fork(start, streams)
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in names))  # type: ignore[attr-defined]


def asked_environment(asked: Mapping[str, Any]) -> Mapping[str, str]:
    """The environment of the requested process."""
    return os.environ if asked["env"] is None else {os.fsdecode(k): os.fsdecode(v) for k, v in asked["env"].items()}


def _start(asked: Mapping[str, Any]) -> Start | None:
    """The process to fork; None if a new one must be started."""
    words = [asked["args"]] if isinstance(asked["args"], str) else [os.fsdecode(word) for word in asked["args"]]
    untold = ("preexec_fn", "pass_fds", "shell", "gid", "gids", "uid")
    if words[0] != PYTHON or any(asked[name] for name in untold) or asked["process_group"] not in (None, -1):
        return None
    environment = asked_environment(asked)
    if _read_at_start(environment) != _read_at_start(os.environ):
        return None
    if _is_fork and environment.get("LD_PRELOAD") != os.environ.get("LD_PRELOAD"):
        return None
    options: set[str] = set()
    rest = words[1:]
    while rest and rest[0] in ("-P", "-u"):
        options.add(rest.pop(0))
    if rest[:2] == ["-m", LAUNCHER]:
        module, arguments = LAUNCHER, rest[1:]
    elif rest and rest[0].endswith(".py") and Path(rest[0]).is_relative_to(ROOT):
        module, arguments = None, rest
    else:
        return None
    return Start(
        arguments, module, "-u" in options, "-P" not in options, os.fspath(asked["cwd"] or os.getcwd()),
        dict(environment), bool(asked["start_new_session"]), sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    )  # fmt: skip


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    names = [name for name in environment if name.startswith(READ_AT_START) and not name.startswith(OF_RANKS)]
    read = {name: environment[name] for name in names}
    return dict(read.items() - {HASH_SEED})


# ---- the tests' side


@contextlib.contextmanager
def forked_processes() -> Iterator[None]:
    """A context in which `subprocess` forks vplan's processes, on systems that support it."""
    has_torch = importlib.util.find_spec("torch") and importlib.util.find_spec("diffusers")
    if sys.platform != "linux" or os.environ.get("VPLAN_NEW_PYTHONS") == "1" or not has_torch:
        yield
        return
    with _popen(ForkingPopen):
        yield


def new_processes() -> contextlib.AbstractContextManager[None]:
    """A context in which `subprocess` starts new Pythons, for tests of what only happens then."""
    return _popen(_Popen)


@contextlib.contextmanager
def _popen(kind: type[subprocess.Popen[Any]]) -> Iterator[None]:
    before, subprocess.Popen = subprocess.Popen, kind  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


class _Server:
    """The process with the imports; it ends when its socket is closed, or when this process ends for any reason."""

    def __init__(self, preload: str) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A command line with the word by which a worker is known (`planner.launch.run_history.is_worker`).
        command = [PYTHON, "-m", __name__, "worker"]
        # DeepSpeed looks for the device when it is imported.
        environment = dict([HASH_SEED]) | os.environ | {"DS_ACCELERATOR": "cpu"}
        environment |= {"LD_PRELOAD": preload} if preload else {}
        with theirs:
            self.process = _Popen(
                command, stdin=theirs, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment, start_new_session=True
            )

    def fork(self, start: Start, streams: list[int]) -> int:
        """Forks a process, which becomes a child of this one; returns its ID."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        try:
            socket.send_fds(self.socket, [json.dumps(start._asdict()).encode()], streams)
            answer = self.socket.recv(64)
        finally:
            libc.prctl(SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError(f"the Python with the imports ended with {self.process.wait()}")
        return int(answer)

    def close(self) -> None:
        """Ends the server and waits for it, so that its resource use counts among this process's children."""
        self.socket.close()
        self.process.wait()


_servers: dict[str, _Server] = {}


def _server(preload: str) -> _Server:
    """The server whose C library is preceded by the libraries in ``preload``."""
    server = _servers.get(preload)
    if server is None or server.process.poll() is not None:  # the RAM guard's tests end all processes below theirs
        server = _servers[preload] = _Server(preload)
        atexit.register(server.close)
    return server


# ---- the server's side


def main() -> None:
    """Forks processes for the other end of the socket on standard input, until it is closed."""
    global _is_fork
    _is_fork = True
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    connection = socket.socket(fileno=os.dup(0))
    with contextlib.redirect_stderr(io.StringIO()):  # what libraries say as they are imported
        for name in PRELOADED:
            importlib.import_module(name)
    dynamic_rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    # For a line of a log, it asks each of the thousands of modules here for its file: 3 s of CPU a launch.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    gc.collect()
    gc.freeze()  # a page that the collector marks in a fork is copied
    while True:
        message, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            return
        connection.send(str(_fork_orphan(Start(**json.loads(message)), streams)).encode())
        for each in streams:
            os.close(each)


def _fork_orphan(start: Start, streams: list[int]) -> int:
    """Forks a process whose parent ends, so that it becomes a child of the nearest subreaper; returns its ID."""
    read_end, write_end = os.pipe()
    between = os.fork()
    if not between:
        between = os.getpid()
        pid = os.fork()
        if pid:
            os.write(write_end, str(pid).encode())
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.0002)
        _become(start, streams)
    os.waitpid(between, 0)
    pid = int(os.read(read_end, 64))
    os.close(read_end)
    os.close(write_end)
    return pid


def _become(start: Start, streams: list[int]) -> NoReturn:
    """Turns this fork into the requested process, runs it and exits."""
    code = 1
    try:
        _forget_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, start.blocked)  # the server has those of whoever was first to ask
        if start.leads_session:
            os.setsid()
        above = [fcntl.fcntl(each, fcntl.F_DUPFD, 16) for each in streams]
        for number, each in enumerate(above):
            os.dup2(each, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.chdir(start.folder)
        os.environ.clear()
        os.environ.update(start.environment)
        tempfile.tempdir = None  # of TMPDIR
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = _stream(1, "strict", start.is_unbuffered)
        sys.stderr = _stream(2, "backslashreplace", unbuffered=True)
        code = _run(start)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _stream(number: int, errors: str, unbuffered: bool) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        open(number, "wb", closefd=False), errors=errors, line_buffering=os.isatty(number), write_through=unbuffered
    )


def _forget_signals() -> None:
    """Resets signals as in a new Python: handlers are removed, and ignored signals stay ignored, such as Ctrl-C in a
    command that a shell starts with &."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(start: Start) -> int:
    """Runs the script or the module; returns the exit code."""
    sys.argv = list(start.arguments)
    sys.path[0:1] = [os.path.dirname(start.arguments[0])] if start.puts_folder_first and not start.module else []
    try:
        if start.module:
            runpy.run_module(start.module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(start.arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 0


if __name__ == "__main__":
    # By the name by which the tests know it, so that there is one of each of its classes.
    importlib.import_module("tests.preloaded_python").main()
