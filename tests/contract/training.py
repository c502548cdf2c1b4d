"""Training and probing at two ranks on the CPU, in processes that a fork server starts: what one rank runs."""

from __future__ import annotations

import functools
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

from tests.contract import ranks
from tests.trainers import runs

Told = dict[str, Any]


def train(request: dict[str, Any], world: int = ranks.WORLD) -> list[Told]:
    """Runs a request on so many ranks, all of them new; what each told."""
    return run(_train, request, world, launched=world > 1 or request["plan"]["strategy"]["sharding"] != "none")


def probe(folder: str, world: int = ranks.WORLD) -> list[Told]:
    """Runs the probe's worker on the request in a folder, on so many ranks; the exit code of each."""
    return run(_probe, {"folder": folder}, world)


def run(work: Callable[[Any], Told], request: Any, world: int, launched: bool = True) -> list[Told]:
    """Does some work on so many ranks, all of them new; what each told. ``launched``: by torch's launcher, as `vplan
    train` starts all but a plain run on one GPU."""
    context = ranks._fork_server()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    queue = context.Queue()
    arguments = (port, world, functools.partial(work, request), os.environ["VPLAN_HOME"], queue, launched)
    processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    answers = dict(queue.get(timeout=ranks.SECONDS) for _ in processes)
    for process in processes:
        process.join(ranks.SECONDS)
    failed = [answer for answer in answers.values() if isinstance(answer, str)]
    assert not failed, failed[0]
    return [answers[rank] for rank in range(world)]


def _train(request: dict[str, Any]) -> Told:
    from planner.launch.launch import RunRequest

    return runs.train(RunRequest.read(request))


def _probe(request: dict[str, Any]) -> Told:
    from trainers import probe

    probe.end_with_parent = lambda: None  # nobody holds the other end of a test's standard input
    return {"code": probe.main([request["folder"]])}


def _rank(rank: int, port: int, world: int, work: Callable[[], Told], home: str, queue: Any, launched: bool) -> None:
    os.environ.update(ranks.ENVIRONMENT, RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), VPLAN_HOME=home)
    if not launched:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            del os.environ[name]
    import torch

    torch.set_num_threads(1)
    try:
        queue.put((rank, work()))
    except Exception as error:
        queue.put((rank, f"{error}\n{traceback.format_exc()[-3000:]}"))
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
