"""Runs work on two or more ranks on the CPU; and measures engines there: a tiny model, built by our step, is trained by
the real engine, and its bytes are read.

What runs in a rank is at module level, because a fork server starts it. Nothing of the engines is replaced; where they
free a buffer within a step, a wrapper around their method reads it first.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any, NamedTuple

WORLD = 2
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "DEEPSPEED_LOG_LEVEL": "error",
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "WORLD_SIZE": str(WORLD),
}
PRELOADED = [
    "accelerate",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "diffusers.models.transformers.cogvideox_transformer_3d",
    "diffusers.models.transformers.transformer_wan",
    "peft",
    "planner.catalog.card_lookup",
    "planner.catalog.lookup",
    "setuptools",
    "tests.contract.ranks",
    "tests.contract.training",
    "torch.distributed.fsdp",
    "trainers.data.loader",
    "trainers.families.cogvideox",
    "trainers.families.wan",
    "trainers.parallel.checkpoint",
    "trainers.parallel.engines",
    "trainers.parallel.lora_start",
    "trainers.sampling.samples",
    "trainers.train",
]
"""Imported by the fork server, because every rank would take seconds to import them again."""

SECONDS = 300
"""Time limit: a rank that waits for a dead one would wait for ever."""

Bytes = dict[str, int]


class Case(NamedTuple):
    """What all ranks build: fields of the records, and DeepSpeed's sizes."""

    model: str
    config: dict[str, Any]
    job: dict[str, Any]
    strategy: dict[str, Any]
    settings: dict[str, int]
    grid: dict[str, int]
    world: int = WORLD


@functools.cache
def _fork_server() -> Any:
    """The fork server, started with the ranks' environment; this process must not keep it, or it would wait for other
    ranks itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = os.environ.copy()
    os.environ.update(ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        for name in ENVIRONMENT.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
    return context


def run(work: Callable[[], Any], world: int = WORLD, launched: bool = True) -> list[Any]:
    """Runs some work on ``world`` new ranks; returns the result of each, by rank. ``launched``: with the variables of
    torch's launcher, which `vplan train` uses for all but a plain run on one GPU."""
    processes, queue = _start(work, world, launched)
    answers = dict(queue.get(timeout=SECONDS) for _ in processes)
    for process in processes:
        process.join(SECONDS)
    failed = [answer for answer in answers.values() if isinstance(answer, str)]
    assert not failed, failed[0]
    assert [process.exitcode for process in processes] == [0] * world
    return [answers[rank] for rank in range(world)]


def exit_codes(work: Callable[[], Any], world: int = WORLD) -> list[int | None]:
    """Runs some work on new ranks, of which some do not come to its end; returns the exit code of each, by rank."""
    processes, _queue = _start(work, world, launched=True)
    for process in processes:
        process.join(SECONDS)
    return [process.exitcode for process in processes]


def _start(work: Callable[[], Any], world: int, launched: bool) -> tuple[list[Any], Any]:
    """New ranks that run some work, and the queue for the result of each."""
    context = _fork_server()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    queue = context.Queue()
    arguments = (port, world, work, os.environ["VPLAN_HOME"], queue, launched)
    processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    return processes, queue


def _rank(rank: int, port: int, world: int, work: Callable[[], Any], home: str, queue: Any, launched: bool) -> None:
    os.environ.update(ENVIRONMENT, RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), VPLAN_HOME=home)
    if not launched:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            del os.environ[name]
    import torch

    torch.set_num_threads(1)
    try:
        queue.put((rank, work()))
    except Exception as error:  # told to the test, which has no other sight of this process
        queue.put((rank, f"{error}\n{traceback.format_exc()[-3000:]}"))
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def measure(case: Case) -> list[Bytes]:
    """Runs all ranks of a case; returns what each measured, by rank."""
    return run(functools.partial(_measured, case), case.world)


def _measured(case: Case) -> Bytes:
    sharding = case.strategy.get("sharding")
    engine = _context_parallel if sharding is None else _fsdp if sharding == "fsdp" else _deepspeed
    return engine(case)


class Watch:
    """The highest bytes seen, by name."""

    def __init__(self) -> None:
        self.seen: Bytes = {}

    def note(self, name: str, nbytes: int) -> None:
        self.seen[name] = max(self.seen.get(name, 0), int(nbytes))


def _model(case: Case, watch: Watch) -> tuple[Any, ...]:
    """Profile, records, and the model in the formats of our step, sharded for FSDP2 and ZeRO-3, with its parameters
    filled. ``watch`` notes the bytes of those that are whole on the rank meanwhile."""
    import torch

    from planner.catalog import lookup
    from planner.spec.job import Job, Machine, Strategy
    from planner.spec.rules import resolve
    from trainers.parallel.parallel import split
    from trainers.step import placement, step
    from trainers.step.random_weights import randomise

    profile = lookup.model(case.model)
    profile = profile.model_copy(update={"config": {**profile.config, **case.config}})
    job = Job.read({"model": case.model, "lora_targets": profile.lora.targets, **case.job})
    machine = Machine(gpu="h100-80gb", gpus=case.world)
    strategy = resolve(job, Strategy.read(case.strategy), machine)
    model = step.build_model(profile, job, strategy)
    if strategy.sharding in ("fsdp", "zero-3"):
        split(model, profile, job, strategy, torch.device("cpu"))
    torch.manual_seed(0)

    def fill(name: str, weight: torch.Tensor) -> None:
        randomise(name, weight)
        loaded = [parameter for parameter in model.parameters() if not parameter.is_meta]
        whole = [weight, *(each for each in loaded if not hasattr(each, "device_mesh"))]
        watch.note("whole while loading", nbytes(*whole))

    placement.materialise(model, "cpu", fill)
    return profile, job, strategy, model


def nbytes(*tensors: Any) -> int:
    """Bytes of tensors, by their elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _states(optimizer: Any) -> int:
    """Bytes of an optimizer's states, without scalars."""
    import torch

    found = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                found += nbytes(value.to_local() if hasattr(value, "to_local") else value)
    return found


# ---- DeepSpeed


def _deepspeed(case: Case) -> Bytes:
    import deepspeed
    import torch

    from planner.layout.run_records import ZeroSettings
    from trainers.families import family
    from trainers.parallel.engines import deepspeed_config
    from trainers.step import step
    from trainers.step.optimizers import make_optimizer

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else every start compiles it
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    watch = Watch()
    profile, job, strategy, model = _model(case, watch)
    trainable = step.trainable_parameters(model)
    optimizer = make_optimizer(trainable, strategy)
    config = deepspeed_config(job, strategy, ZeroSettings(**case.settings))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    watched = _watch_stage_3 if strategy.sharding == "zero-3" else _watch_stages_1_and_2
    finish = watched(engine, watch)
    kind = family(profile)
    batch = kind.batch(case.grid, "cpu", torch.bfloat16)
    for _ in range(3):  # stage 3 fetches ahead once it has seen a whole step
        loss = step.forward(step.Trainee(engine, trainable), kind, batch, strategy)
        engine.backward(loss)
        engine.step()
    assert torch.isfinite(loss)
    finish()
    return watch.seen


def _watch_stages_1_and_2(engine: Any, watch: Watch) -> Callable[[], None]:
    inner = engine.optimizer
    release, reduce, own_step = inner._release_ipg_buffers, inner.reduce_gradients, inner._optimizer_step
    allreduce = inner.allreduce_bucket

    def released() -> None:
        for bucket in inner.ipg_buckets.values():
            watch.note("reduce bucket", nbytes(*bucket.buffer))
        if inner.grads_in_partition is not None:
            watch.note("gradient partition", nbytes(inner.grads_in_partition))
        release()

    def reducing(*args: Any, **kwargs: Any) -> None:
        gradients = [p.grad for group in inner.bit16_groups for p in group if p.grad is not None]
        storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in gradients}
        watch.note("whole gradients", sum(storages.values()))
        reduce(*args, **kwargs)

    def reduced(*args: Any, **kwargs: Any) -> Any:
        found = allreduce(*args, **kwargs)
        if found.untyped_storage().data_ptr() != args[0][0].untyped_storage().data_ptr():  # one slice is flat already
            watch.note("reduced copy", nbytes(found))
        return found

    def stepping(group: int) -> None:
        watch.note("fp32 gradients", nbytes(inner.single_partition_of_fp32_groups[group].grad))
        own_step(group)

    inner._release_ipg_buffers, inner.allreduce_bucket, inner._optimizer_step = released, reduced, stepping
    if not inner.partition_gradients:
        inner.reduce_gradients = reducing

    def finish() -> None:
        frozen = [p for p in engine.module.parameters() if not p.requires_grad]
        watch.note("frozen weights", nbytes(*frozen))
        watch.note("flat weights", nbytes(*inner.bit16_groups_flat))
        watch.note("fp32 master", nbytes(*inner.single_partition_of_fp32_groups))
        watch.note("states", _states(inner.optimizer))
        watch.note("tables", nbytes(*engine.module.buffers()))
        if inner.cpu_offload:
            watch.note("gradient staging", nbytes(inner.temp_grad_buffer_for_gpu_offload))
            watch.note("new weights on the host", nbytes(*inner.param_buffer_of_bit16_for_cpu_offload_groups))

    return finish


def _watch_stage_3(engine: Any, watch: Watch) -> Callable[[], None]:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    inner = engine.optimizer
    parameters = list(engine.module.parameters())
    coordinator = inner.parameter_offload.get_param_coordinator()
    fetch, own_step = coordinator.fetch_sub_module, inner._optimizer_step

    def fetching(*args: Any, **kwargs: Any) -> Any:
        found = fetch(*args, **kwargs)
        live = [p for p in parameters if p.ds_status != ZeroParamStatus.NOT_AVAILABLE and not p.ds_persist]
        watch.note("gathered at once", sum(2 * p.ds_numel for p in live))
        return found

    def stepping(group: int) -> None:
        watch.note("fp32 gradients", nbytes(inner.fp32_partitioned_groups_flat[group].grad))
        own_step(group)

    coordinator.fetch_sub_module, inner._optimizer_step = fetching, stepping

    def finish() -> None:
        on_gpu = [p.ds_tensor for p in parameters if not p.requires_grad and (not inner.offload_param or p.ds_persist)]
        watch.note("frozen shares", nbytes(*on_gpu))
        trained = [p.ds_tensor for p in parameters if p.requires_grad]
        watch.note("trained shares", nbytes(*trained))
        watch.note("small weights", nbytes(*(p.data for p in parameters if p.ds_persist)))
        watch.note("gradient partition", nbytes(inner.grad_partitions_flat_buffer))
        watch.note("reduce bucket", nbytes(*(bucket.buffer for bucket in inner.ipg_buckets.values())))
        watch.note("fp32 master", nbytes(*inner.fp32_partitioned_groups_flat))
        watch.note("states", _states(inner.optimizer))
        watch.note("tables", nbytes(*engine.module.buffers()))

    return finish


# ---- Ulysses


def _context_parallel(case: Case) -> Bytes:
    """Bytes that autograd saves on a rank, counting each storage once and without weights; and the loss in millionths.

    "refused": 1 if backward does not accept what autocast made, by CUDA's list of operators that it casts.
    """
    import torch
    from diffusers import ContextParallelConfig

    from trainers.families import family
    from trainers.recording.cuda_ops import cuda_lists, install_autocast
    from trainers.step import step

    torch.distributed.init_process_group("gloo")
    torch.accelerator.device_count = lambda: 1  # diffusers places ranks on accelerators, and there is none
    profile, _, strategy, model = _model(case, Watch())
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=WORLD))
    kind = family(profile)
    torch.manual_seed(0)
    batch = kind.batch(case.grid, "cpu", torch.bfloat16)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # holds them, so that no address is used again

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    library = torch.library.Library("aten", "IMPL")
    if strategy.autocast != "none":
        install_autocast(library, cuda_lists())
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = step.forward(step.Trainee(model, step.trainable_parameters(model)), kind, batch, strategy)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "same dtype" in str(error)
        return {"refused": 1}
    finally:
        library._destroy()
    return {"saved": sum(storage.nbytes() for storage in saved.values()), "loss": round(1e6 * float(loss))}


# ---- FSDP2


def _fsdp(case: Case) -> Bytes:
    import torch

    from trainers.families import family
    from trainers.parallel.parallel import Fsdp
    from trainers.step import step
    from trainers.step.optimizers import make_optimizer

    torch.distributed.init_process_group("gloo")
    watch = Watch()
    profile, _, strategy, model = _model(case, watch)
    groups = _watch_groups(model, watch)
    trainable = step.trainable_parameters(model)
    trainee = step.Trainee(model, trainable, make_optimizer(trainable, strategy))
    engine = Fsdp(trainee)
    kind = family(profile)
    batch = kind.batch(case.grid, "cpu", torch.bfloat16)
    for turn in range(2 * strategy.gradient_accumulation):
        last = (turn + 1) % strategy.gradient_accumulation == 0
        with engine.micro_batch(last):
            loss = step.forward(trainee, kind, batch, strategy)
            loss.backward()
        partial = [group._partial_reduce_output for group in groups if group._partial_reduce_output is not None]
        watch.note("partial sums", nbytes(*partial))
        if not last:
            continue
        gradients = [p.grad.to_local().untyped_storage() for p in trainable.values() if p.grad is not None]
        watch.note("reduced gradients", sum({s.data_ptr(): s.nbytes() for s in gradients}.values()))
        trainee.engine.step(trainee)
    assert torch.isfinite(loss)
    params = [param for group in groups for param in group.fsdp_params]
    watch.note("shares", sum(param._sharded_param_data.untyped_storage().nbytes() for param in params))
    watch.note("states", _states(trainee.optimizer))
    watch.note("tables", nbytes(*model.buffers()))
    return watch.seen


def _watch_groups(model: Any, watch: Watch) -> list[Any]:
    """Records what every FSDP group gathers and reduces."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fully_shard

    groups = [module._get_fsdp_state()._fsdp_param_group for module in model.modules() if _is_sharded(module)]
    wait, reduce = fully_shard.FSDPParamGroup.wait_for_unshard, fully_shard.foreach_reduce

    def waiting(group: Any) -> None:
        result = group._all_gather_result
        wait(group)
        if result is None:
            return
        name = "outside" if "." not in group._module_fqn else "block"
        watch.note(f"all-gather {name}", nbytes(result.all_gather_output))
        whole = [out for param in group.fsdp_params for out in param.all_gather_outputs]
        watch.note(f"gathered {name}", sum(out.untyped_storage().nbytes() for out in whole))
        live = [out for other in groups for param in other.fsdp_params for out in param.all_gather_outputs]
        watch.note("gathered at once", sum(out.untyped_storage().nbytes() for out in live))

    def reducing(params: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        watch.note("unreduced gradients", nbytes(*gradients))
        found = reduce(params, gradients, *args, **kwargs)
        watch.note("reduce-scatter", nbytes(found[0]))
        summed = [group._all_reduce_state.all_reduce_input for group in groups if group._all_reduce_state]
        summed += [found[4]] if found[4] is not None else []
        watch.note("summed over copies", nbytes(*summed))
        return found

    fully_shard.FSDPParamGroup.wait_for_unshard = waiting
    fully_shard.foreach_reduce = reducing
    return groups


def _is_sharded(module: Any) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)
