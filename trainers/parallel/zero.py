"""The engine for DeepSpeed's ZeRO, which splits its flat states by weight for a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.layout.run_records import ZeroSettings
from planner.spec.job import Job, Strategy
from trainers.parallel.engines import deepspeed_config
from trainers.parallel.local_engine import LocalEngine
from trainers.parallel.state_files import FlatRun, Own, SavedState, Share, SplitTensor
from trainers.step import placement, step

MASTER, RUNS = "master", "optimizer/runs"
"""Key of a weight's fp32 master among its states under DeepSpeed, and prefix of those states in a checkpoint."""


class FlatPiece(NamedTuple):
    """A run of a weight's elements in one of DeepSpeed's flat masters."""

    name: str
    """of the weight"""
    place: int
    """its first element in the flat master"""
    begin: int
    """its first element in the weight, which has ``whole`` elements"""
    elements: int
    whole: int


class _Splitter:
    """Splits parameters over the ranks as ``deepspeed.zero.Init`` does, one at a time. All ranks call it in the same
    order, because DeepSpeed broadcasts each from the first rank."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.first: Any = None
        """the first parameter that was split; through it DeepSpeed splits others alike"""

    def __call__(self, parameter: nn.Parameter) -> None:
        if self.first is not None:
            self.first.convert_to_zero_parameters([parameter])
            return
        from deepspeed.runtime.zero import Init

        holder = nn.Module()
        holder.weight = self.first = parameter
        Init(module=holder, config_dict_or_path=self.config)


def split_as_loaded(model: nn.Module, job: Job, strategy: Strategy, settings: ZeroSettings, drive: Path | None) -> None:
    """Makes a model on ``meta`` split each parameter as it is loaded, frozen ones and adapters too, in the 16 bits that
    stage 3 trains in. ``deepspeed.initialize`` then finds them split; else it puts the whole model on every GPU first
    (runtime/engine.py ``_configure_distributed_model``)."""
    splitter = _Splitter(deepspeed_config(job, strategy, settings, drive))
    placement.split_when_filled(model, splitter, step.DTYPES[strategy.compute_dtype])


class Zero(LocalEngine):
    """DeepSpeed, which averages, clips and steps itself, at the last of the micro-batches that its config asks for."""

    replicated = False

    def __init__(
        self,
        trainee: step.Trainee,
        job: Job,
        strategy: Strategy,
        settings: ZeroSettings,
        drive: Path | None,
        max_grad_norm: float,
    ) -> None:
        super().__init__(trainee)
        import deepspeed

        config = deepspeed_config(job, strategy, settings, drive, max_grad_norm)
        self.deepspeed, *_ = deepspeed.initialize(model=trainee.model, optimizer=trainee.optimizer, config=config)
        self.stage_3 = self.gathers = strategy.sharding == "zero-3"
        trainee.model = self.deepspeed
        self.inner = self.deepspeed.optimizer
        if self.stage_3 and self.inner.swap_optimizer:
            _keep_misplaced_gradients(self.inner.optimizer_swapper)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield
        if not last:
            self.deepspeed.step()  # counts the micro-batch; DeepSpeed steps only at the last

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed would divide by its accumulation steps; the step has divided the loss already.
        self.deepspeed.backward(loss, scale_wrt_gas=False)

    def step(self, trainee: step.Trainee) -> None:
        self.deepspeed.step()

    def full_tensor(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        if not self.stage_3:
            return parameter.detach()
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter]):
            return parameter.detach().clone()

    def release(self) -> None:
        if not self.stage_3:
            return
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self.inner.parameter_offload.get_param_coordinator().reset_step()  # waits for prefetched weights
        parameters: Iterable[Any] = self.plain.parameters()  # with DeepSpeed's own attributes
        for parameter in parameters:
            if parameter.ds_status == ZeroParamStatus.AVAILABLE and not parameter.ds_persist:
                parameter.ds_active_sub_modules.clear()
                parameter.partition()

    @property
    def masters(self) -> list[Tensor]:
        """This rank's shares of the fp32 master weights, in the order in which DeepSpeed steps them."""
        inner = self.inner
        return list(inner.fp32_partitioned_groups_flat if self.stage_3 else inner.single_partition_of_fp32_groups)

    def kept_weight(self, name: str, key: str) -> list[Share]:
        shares = super().kept_weight(name, key)
        # Stage 3 gathered it: moved to host RAM, so that the GPU never holds two.
        return [share._replace(values=share.values.cpu(), is_copy=True) for share in shares] if self.stage_3 else shares

    def state(self) -> dict[str, Any]:
        """Masters and states by weight, the parts that this rank has: DeepSpeed's own split depends on the number of
        ranks. States that are not one number per element (8 bits, with constants per block) are saved as they are, and
        can only be resumed on the same number of ranks."""
        runs: dict[str, dict[str, FlatRun]] = {name: {} for name in self.trainee.trainable}
        own: list[dict[str, Own]] = []
        keys: list[str] = []
        numbers: dict[str, Any] = {}
        for number, master in enumerate(self.masters):
            with self._in_host_ram(number, changed=False) as from_drive:
                state = self.inner.optimizer.state[master]
                numbers = {key: value for key, value in state.items() if not _has_shape(value)}
                split = {key: value for key, value in state.items() if _is_of_elements(value, master)}
                keys = list(split)
                flat = {MASTER: master.detach(), **split}
                flat = {key: value.clone() if from_drive else value for key, value in flat.items()}
                for piece in self._pieces(number):
                    for key, value in flat.items():
                        values = value.narrow(0, piece.place, piece.elements)
                        runs[piece.name][key] = FlatRun(values, piece.begin, from_drive)
                rest = state.keys() - numbers.keys() - split.keys()
                own.append({key: Own(state[key].clone() if from_drive else state[key], from_drive) for key in rest})
        return {"runs": runs, "own": own, "keys": keys, "numbers": numbers}

    def read_state(self, saved: SavedState) -> None:
        outline = dict(saved.outline["dict"])
        own = saved.read(self.room, outline["own"])
        keys, numbers = (saved.read(self.room, outline[name]) for name in ("keys", "numbers"))
        for number, master in enumerate(self.masters):
            with self._in_host_ram(number, changed=True) as from_drive:
                states = self.inner.optimizer.state[master]
                for key in keys:
                    if not (from_drive and key in states):  # else its buffer is filled and goes back to the drive
                        states[key] = torch.zeros_like(master)
                with torch.no_grad():
                    flat = {MASTER: master.detach(), **{key: states[key] for key in keys}}
                    saved.fill(
                        {
                            f"{RUNS}/{piece.name}/{key}": SplitTensor.of(
                                value.narrow(0, piece.place, piece.elements), piece.begin, piece.whole
                            )
                            for piece in self._pieces(number)
                            for key, value in flat.items()
                        }
                    )
                states |= {key: _clone(value) for key, value in numbers.items()}
                states |= {key: value.to(master.device) for key, value in own[number].items()} if any(own) else {}

    def _pieces(self, number: int) -> Iterator[FlatPiece]:
        """The pieces of weights in a flat master of this rank, without its padding."""
        names = {parameter: name for name, parameter in self.trainee.trainable.items()}
        if not self.stage_3:
            for parameter in self.inner.bit16_groups[number]:
                fragment = parameter._hp_mapping  # DeepSpeed's own; None where the rank has nothing of the weight
                if fragment is not None:
                    where, of_weight = fragment.hp_fragment_address, fragment.lp_fragment_address
                    whole = parameter.numel()
                    yield FlatPiece(names[parameter], where.start, of_weight.start, where.numel, whole)
            return
        place = 0
        for parameter in self.inner.fp16_groups[number]:
            room, begin = parameter.partition_numel(), dist.get_rank() * parameter.partition_numel()
            elements = min(room, parameter.ds_numel - begin)
            if elements > 0:
                yield FlatPiece(names[parameter], place, begin, elements, parameter.ds_numel)
            place += room

    @contextlib.contextmanager
    def _in_host_ram(self, number: int, changed: bool) -> Iterator[bool]:
        """Brings a sub-group's master and states into host RAM if DeepSpeed keeps them on a drive (as stage3.py does
        around its own step), and yields whether it does. ``changed``: whether they are written back afterwards."""
        if not self.stage_3 or not self.inner._swappable_optimizer_subgroup(number):
            yield False
            return
        self.inner._optimizer_states_and_gradient_swap_in(number)
        yield True
        if changed:
            self.inner._optimizer_states_and_gradient_swap_out(number)
        else:
            self.inner._release_swap_buffers(number)

    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.inner.optimizer.param_groups
        return groups


def _keep_misplaced_gradients(swapper: Any) -> None:
    """Keeps gradients in host RAM that could not be read back from a drive.

    DeepSpeed 0.19 reads each gradient straight into its place in a flat buffer (``_swap_in_pinned_gradients``), past
    the page cache (O_DIRECT), which only accepts places at multiples of 512 bytes. Any other place is left as it was,
    without an error (csrc/aio counts finished reads, not the bytes read), and the step would use wrong gradients.
    """
    adjust = swapper._adjust_for_misaligned_lengths

    def adjusted(tensors: list[Tensor], offsets: list[int]) -> Any:
        for tensor, offset in zip(tensors, offsets, strict=True):
            if offset % swapper.numel_alignment:
                tensor.swappable = False  # type: ignore[attr-defined]  # DeepSpeed's own mark
        return adjust(tensors, offsets)

    swapper._adjust_for_misaligned_lengths = adjusted


def _has_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _is_of_elements(value: Any, master: Tensor) -> bool:
    """Whether a state has one number for each element of its master."""
    return _has_shape(value) and value.shape == master.shape and value.is_floating_point()


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
