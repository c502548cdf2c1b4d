"""What always goes together: job, resolved strategy and machine, as one record."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.spec.job import SPLIT, FloatDtype, Job, Machine, Strategy, WeightsDtype
from planner.spec.rules import ResolvedStrategy, resolve


@dataclass(frozen=True, slots=True)
class Configuration:
    """A job, a resolved strategy and a machine: what is trained, how it is made to fit, and on which machine.

    What a person or a file says becomes one by `of`, where it enters; behind that nothing resolves again.
    """

    job: Job
    strategy: ResolvedStrategy
    machine: Machine
    rank: int | None = field(default=None, kw_only=True)
    """whose memory is laid out, where an engine's ranks do not allocate alike; None: one of them"""

    @staticmethod
    def of(job: Job, strategy: Strategy, machine: Machine) -> Configuration:
        """With every field of the strategy filled in that the job and the machine decide (`rules.resolve`)."""
        return Configuration(job, resolve(job, strategy, machine), machine)

    @property
    def weights(self) -> WeightsDtype:
        """The storage format of the model's weights (`fp32`, `bf16`, `nf4`, ...), as the strategy and method give
        it."""
        return self.strategy.weights(self.job.method)

    @property
    def trained(self) -> WeightsDtype:
        """The storage format of what is trained: the weights in full training, the adapters with LoRA."""
        return self.weights if self.job.method == "full" else self.strategy.adapter_dtype

    @property
    def zero(self) -> bool:
        """Whether the sharding is one of DeepSpeed's ZeRO stages."""
        return self.strategy.sharding.startswith("zero")

    @property
    def splits(self) -> bool:
        """Whether an engine splits states, gradients or weights between GPUs."""
        return self.strategy.sharding in SPLIT

    @property
    def shards(self) -> int:
        """The number of GPUs over which an engine splits what it splits: all, or of FSDP2's copies the GPUs of one."""
        return self.machine.world // self.strategy.fsdp_replicas

    @property
    def autocasts(self) -> bool:
        """Whether autocast runs. Engines that split have 16 bits already: DeepSpeed's whole module is stored in them,
        and FSDP2 gathers its weights in them."""
        return self.strategy.autocast != "none" and not self.splits

    @property
    def computes_in(self) -> FloatDtype:
        """The dtype of the matrix products and of attention: autocast's, else that of the weights; 16 bits of the
        compute dtype where engines gather the weights or where they are quantised."""
        by_others = self._computes_in_without_compute_dtype()
        return self.strategy.compute_dtype if by_others is None else by_others

    @property
    def reads_compute_dtype(self) -> bool:
        """Whether `compute_dtype` decides it."""
        return self._computes_in_without_compute_dtype() is None

    def _computes_in_without_compute_dtype(self) -> FloatDtype | None:
        if self.strategy.autocast != "none" and not self.splits:
            return self.strategy.autocast
        if self.weights in ("fp32", "bf16", "fp16") and self.strategy.sharding != "fsdp":
            return self.weights
        return None

    @property
    def both_experts(self) -> bool:
        """Whether one run trains both experts of a model, in turns."""
        return self.job.experts == "both"

    @property
    def trained_flag(self) -> str:
        """The start of the flag that says how what is trained is stored."""
        return "adapter" if self.job.method == "lora" else "weights"

    @property
    def host_optimizers(self) -> str:
        """The optimizers that can step in host RAM with this engine, worded for a fix: "adamw or lion"."""
        return "adamw or lion" if self.zero else "adamw or adafactor"

    @property
    def divisor(self) -> int:
        """The largest number of GPUs for a sample, below the one asked for, that divides all GPUs."""
        return next(n for n in range(self.strategy.context_parallel - 1, 0, -1) if self.machine.world % n == 0)

    @property
    def fewer_replicas(self) -> int:
        """The largest number of copies, below the one asked for, that divides all GPUs."""
        return next(n for n in range(self.strategy.fsdp_replicas - 1, 0, -1) if self.machine.world % n == 0)

    @property
    def divisible_gpus(self) -> int:
        """The smallest number of GPUs per node, at least as many as there are, that is a multiple of those that share a
        sample."""
        parts = self.strategy.context_parallel
        return parts * -(-self.machine.gpus // parts)
