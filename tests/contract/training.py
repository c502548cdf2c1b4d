"""Training at two ranks on the CPU, in processes that a fork server starts: what one rank runs."""

from __future__ import annotations

import contextlib
import os
import socket
import traceback
from pathlib import Path
from typing import Any

from tests.contract import ranks
from tests.trainers import runs

Told = dict[str, Any]


def train(requests: list[dict[str, Any]], world: int = ranks.WORLD) -> list[list[Told]]:
    """Runs requests one after another on all ranks; what each rank told of each."""
    context = ranks._fork_server()
    queue = context.Queue()
    arguments = (_ports(len(requests)), world, requests, os.environ["VPLAN_HOME"], queue)
    processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    answers = dict(queue.get(timeout=ranks.SECONDS) for _ in processes)
    for process in processes:
        process.join(ranks.SECONDS)
    failed = [answer for answer in answers.values() if isinstance(answer, str)]
    assert not failed, failed[0]
    return [answers[rank] for rank in range(world)]


def _ports(count: int) -> list[int]:
    """One for each run: who is first in the next one must not meet the last one's store."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [found.getsockname()[1] for found in sockets]


def _rank(rank: int, ports: list[int], world: int, requests: list[dict[str, Any]], home: str, queue: Any) -> None:
    os.environ.update(ranks.ENVIRONMENT, RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), VPLAN_HOME=home)
    if world == 1:  # as `vplan train` starts it, without a launcher
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            del os.environ[name]
    import torch

    from planner.launch import Request

    torch.set_num_threads(1)
    try:
        found = []
        for request, port in zip(requests, ports, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            found.append(runs.train(Request.read(request)))
            forget()
        queue.put((rank, found))
    except Exception as error:
        queue.put((rank, f"{error}\n{traceback.format_exc()[-3000:]}"))
        raise


def forget() -> None:
    """Lets accelerate and torch forget a run, so that another can begin in the same process."""
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def folder(output: Path) -> list[str]:
    """Names of all files of a run."""
    return sorted(path.name for path in output.rglob("*") if path.is_file())
