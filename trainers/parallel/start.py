"""How ranks find each other: sets up accelerate's state for a plan, and checks that it is what the plan needs.

Without these checks each mistake would run silently, as several independent trainings (accelerate 1.15 on the CPU:
``--cpu`` starts one process; several without ``cpu=True`` do not know of each other; under DeepSpeed without an
explicit backend ``num_processes`` is 1; its own FSDP never engages).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from planner.errors import VplanError
from planner.file_writing import lock_file
from planner.layout.sharding.zero import DEEPSPEED
from planner.spec.job import Job, Machine, Strategy
from planner.spec.training import MAX_GRAD_NORM, TrainingSettings
from trainers.parallel.engines import deepspeed_config

if TYPE_CHECKING:
    from accelerate import Accelerator

    from planner.launch.launch import RunRequest

TIMEOUT = timedelta(hours=6)
"""How long ranks wait for each other in a collective; set here only.

While a rank writes a checkpoint or the finished weights, the others wait in a barrier. torch gives up after 10 minutes
with NCCL and 30 with gloo (torch/distributed/constants.py), and that ends the run. A 14B model in full training, at 20
bytes per weight with masters, states and average, is 280 GB: 4 hours to a drive of 20 MB/s. If a rank dies, the others
do not wait that long: torch's launcher ends them at once.
"""


def find_device(name: str) -> torch.device:
    """The device of this rank. Raises a VplanError if there is none of that kind."""
    if name == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.cuda.is_available():
        fix = "train on a machine with one; `--device cpu` is for tiny models"
        raise VplanError(f"training needs a GPU, but torch {torch.__version__} finds none on this machine", fix)
    if local >= torch.cuda.device_count():
        fault = f"the plan is for GPU {local + 1} of this machine, but torch sees {torch.cuda.device_count()}"
        raise VplanError(fault, "plan for fewer GPUs, or check CUDA_VISIBLE_DEVICES")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def start(
    job: Job, strategy: Strategy, machine: Machine, device: torch.device, drive: Path, request: RunRequest | None = None
) -> Accelerator:
    """Sets up and checks accelerate's state for a plan. It finds the ranks and runs a request's trackers; the training
    step is ours.

    ``drive``: the folder for what ``nvme`` offloads.
    """
    from accelerate import Accelerator, InitProcessGroupKwargs

    together = "WORLD_SIZE" in os.environ
    backend = backend_of(strategy, device)
    handlers = [InitProcessGroupKwargs(backend=backend, timeout=TIMEOUT)] if together else []
    settings: dict[str, Any] = {"kwargs_handlers": handlers}
    if request:
        settings |= {"log_with": request.log_with, "project_dir": request.output}
    zero = strategy.sharding.startswith("zero")
    if zero:
        settings["deepspeed_plugin"] = _plugin(job, strategy, drive, request.plan.training if request else None)
    else:
        settings["cpu"] = device.type == "cpu"
    accelerator = Accelerator(mixed_precision="bf16" if zero and strategy.compute_dtype == "bf16" else "no", **settings)
    check(accelerator, strategy, machine, backend)
    if request and request.log_with:
        config = {"model": job.model, "method": job.method, **request.settings()}
        accelerator.init_trackers("vplan", config, {"wandb": _wandb(request)})
    return accelerator


def _wandb(request: RunRequest) -> dict[str, str]:
    """Arguments for ``wandb.init``: its files are in the run's own folder, and a resumed run is the same one there,
    however it ended."""
    return {"dir": request.output, "name": Path(request.output).name, "id": request.run, "resume": "allow"}


def backend_of(strategy: Strategy, device: torch.device) -> str:
    """The backend that ranks communicate through. FSDP2's offload leaves weights and gradients in host RAM, where they
    are clipped and gathered, and NCCL cannot read host RAM (torch.distributed.fsdp.CPUOffloadPolicy; accelerate's
    state.py has the same pair)."""
    if device.type != "cuda":
        return "gloo"
    return "cuda:nccl,cpu:gloo" if strategy.sharding == "fsdp" and strategy.offload_params == "cpu" else "nccl"


def _plugin(job: Job, strategy: Strategy, drive: Path, training: TrainingSettings | None = None) -> Any:
    import deepspeed
    from accelerate import DeepSpeedPlugin

    if strategy.offload_optimizer == "nvme":
        _build_async_io()
    if not torch.cuda.is_available():  # else every start compiles it, which takes half a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    norm = training.max_grad_norm if training else None
    config = deepspeed_config(job, strategy, DEEPSPEED, drive, MAX_GRAD_NORM if norm is None else norm)
    return DeepSpeedPlugin(hf_ds_config=config)


def _build_async_io() -> None:
    """Builds DeepSpeed's async_io, which reads and writes the drive. The first build takes some minutes and is kept."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    fault, fix = "offload to nvme needs DeepSpeed's async_io", "or use cpu instead"
    if not AsyncIOBuilder().is_compatible():
        raise VplanError(f"{fault}, but libaio is missing to build it", f"install libaio-dev, {fix}")
    try:
        with _no_other_builds():
            AsyncIOBuilder().load(verbose=False)
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        need = "install ninja and a C++ compiler, see `ds_report`"
        raise VplanError(f"{fault}, which cannot be built: {reason}", f"{need}, {fix}") from error


@contextlib.contextmanager
def _no_other_builds() -> Iterator[None]:
    """A context that only one of our processes is in at a time. torch locks builds with a file (``FileBaton``), which
    stays if its process is killed, and later builds then wait forever. So any such file found here is stale, and
    deleted."""
    from torch.utils import cpp_extension

    folders = [Path(cpp_extension._get_build_directory(name, verbose=False)) for name in ("pin_memory", "async_io")]
    with (folders[0] / ".vplan-lock").open("w") as file:
        lock_file(file.fileno())
        for folder in folders:
            (folder / "lock").unlink(missing_ok=True)
        yield


def check(accelerator: Accelerator, strategy: Strategy, machine: Machine, backend: str) -> None:
    """Raises a VplanError if the number of ranks, the kind of distribution or the backend is not the plan's."""
    from accelerate.utils import DistributedType

    processes, world = accelerator.num_processes, machine.world
    if processes != world:
        fault = f"the plan is for {world} processes, but accelerate found {processes}"
        raise VplanError(fault, "start it with `vplan train`, or as --print-command says", 4)
    split = strategy.sharding in ("ddp", "fsdp") or world > 1
    expected = {DistributedType.MULTI_CPU, DistributedType.MULTI_GPU} if split else {DistributedType.NO}
    if strategy.sharding.startswith("zero"):
        expected = {DistributedType.DEEPSPEED}
    if accelerator.distributed_type not in expected:
        names = " or ".join(sorted(kind.value for kind in expected))
        fault = f"sharding {strategy.sharding} needs distributed type {names}, not {accelerator.distributed_type.value}"
        raise VplanError(fault, "start it with `vplan train`, or as --print-command says", 4)
    if expected == {DistributedType.NO}:
        return
    if not dist.is_initialized() or dist.get_world_size() != world:
        raise VplanError(f"there is no process group of {world} ranks", "start it with `vplan train`", 4)
    if dist.get_backend() != backend:
        fault = f"ranks talk through {dist.get_backend()}, and this device needs {backend}"
        raise VplanError(fault, "start it with `vplan train`", 4)
