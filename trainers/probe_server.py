"""Probe workers as forks of one process that has imported torch, diffusers and the trainers: imports take longer than
a few steps of many plans do.

`planner.probe.fork_server` starts it as ``vplan worker probe_server`` and writes a request to its standard input, a
line of JSON: ``folder`` (of the probe), ``log`` (a file for its output) and ``environment`` (its variables). The answer
is two lines on standard output: ``{"pid": N}``, then ``{"returncode": N}`` when that process has ended. One fork runs
at a time. Nothing may use CUDA before a fork: each has the cards of its own environment.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from typing import Any

from planner.hardware import doctor

IMPORTED = (
    "trainers.measuring.measure",
    "trainers.measuring.encoding_phase",
    "diffusers.models.autoencoders",
    "diffusers.models.transformers",
    "diffusers.models.unets",
    "diffusers.schedulers",
    "peft",
    "torch.distributed.fsdp",
)
"""What workers use, and some of them only when they need it."""


def main(_arguments: list[str]) -> int:
    """Serve requests until standard input ends, as it does when the parent dies."""
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries greet on standard output
    _import()
    for line in sys.stdin.buffer:
        if not _fork(answers):
            return _work(json.loads(line))
    return 0


def _import() -> None:
    """Import what workers need, and keep the collector off it: a page that it marks in a fork is copied."""
    import torch

    # bitsandbytes asks for it as it is imported; torch would initialise CUDA to answer.
    ask = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: _capability()
    for name in IMPORTED:
        importlib.import_module(name)

    torch.cuda.get_device_capability = ask
    assert not torch.cuda.is_initialized()
    gc.collect()
    gc.freeze()


def _capability() -> tuple[int, int]:
    """The card's, without CUDA: a virtual card's from its environment, a real one's from NVML."""
    if virtual := os.environ.get("VPLAN_GPU_CAPABILITY"):
        return divmod(int(virtual), 10)
    major, minor = doctor.visible()[1][0]["compute_capability"].split(".")
    return int(major), int(minor)


def _fork(answers: int) -> int:
    """The process id of a fork, to this process; 0 in the fork."""
    # Its write end is ours alone: it closes when we end, and the worker ends with it (`trainers.worker`).
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write_end)
        os.dup2(read_end, 0)
        os.close(answers)
        return 0
    os.close(read_end)
    _tell(answers, pid=pid)
    status = os.waitpid(pid, 0)[1]
    os.close(write_end)
    _tell(answers, returncode=os.waitstatus_to_exitcode(status))
    return pid


def _tell(answers: int, **facts: int) -> None:
    os.write(answers, json.dumps(facts).encode() + b"\n")


def _work(request: dict[str, Any]) -> int:
    """A probe worker with a session, a log and an environment of its own; its exit code."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    from trainers import probe

    return probe.main([request["folder"]])
