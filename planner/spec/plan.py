"""Estimate (what will happen; docs/json.md shows its JSON) and Plan (everything about one run, in one TOML file)."""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from planner.errors import VplanError, quoted
from planner.file_writing import write_file
from planner.schema import Bytes, CountOrZero, Flag, NotNegative, Record
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.training import TrainingSettings
from planner.untrusted import parse, read_bytes

PhaseName = Literal["load", "encode", "first_step", "train", "optimizer", "denoise", "decode", "save"]
Verdict = Literal["fits", "tight", "no"]
Outcome = Literal["ok", "oom", "host-oom", "timeout", "crash", "nan"]


class PhasePeak(Record):
    """The highest of the three memory counters in one phase. allocated <= reserved <= device."""

    allocated_bytes: Bytes
    """tensors"""
    reserved_bytes: Bytes
    """the allocator's segments"""
    device_bytes: Bytes
    """what NVML shows for the process: reserved + CUDA context + libraries"""


class Peak(PhasePeak):
    """The phase of a plan that needs the most device memory, its peaks in bytes, and the moment within it, in words."""

    phase: PhaseName
    moment: str
    """as "recompute of block 17" """


class Breakdown(Record):
    """What fills device memory at the peak, bytes by category. Sums to the peak's `device_bytes`."""

    weights: Bytes = 0
    residents: Bytes = 0
    """text encoders, VAE and other models that stay on the GPU"""
    gradients: Bytes = 0
    optimizer: Bytes = 0
    """optimizer states and fp32 master weights"""
    ema: Bytes = 0
    buckets: Bytes = 0
    """communication and staging buffers of sharding, offload and swap"""
    activations: Bytes = 0
    """kept for backward"""
    temporary: Bytes = 0
    """used within one operation or between two"""
    workspace: Bytes = 0
    """of cuBLAS, cuDNN, NCCL and the attention kernel"""
    fragmentation: Bytes = 0
    """reserved but not allocated"""
    context: Bytes = 0
    """CUDA context and libraries"""

    @property
    def total(self) -> int:
        """The sum of all categories, bytes."""
        return sum(self.__dict__.values())


class HostBreakdown(Record):
    """What fills host RAM at its peak, bytes by category. Sums to `host_ram_bytes`."""

    process: Bytes = 0
    """Python, torch, CUDA's libraries"""
    weights: Bytes = 0
    """that wait for their turn; those in torch's pinned memory (group offload) in powers of two"""
    activations: Bytes = 0
    """checkpoints"""
    optimizer: Bytes = 0
    """with the weights and gradients it steps over"""
    ema: Bytes = 0
    data: Bytes = 0
    """batches that are loaded"""
    loading: Bytes = 0
    """copies on the way to the GPU"""
    saving: Bytes = 0
    """copies on the way to a file"""
    pinning: Bytes = 0
    """free RAM that must be there, because Windows and WSL pin only half of all"""

    @property
    def total(self) -> int:
        """The sum of all categories, bytes."""
        return sum(self.__dict__.values())


class HostPeak(Record):
    """Host RAM of all processes on one node: bytes by phase, the phase that needs most, and what fills it then."""

    phase: PhaseName
    """where most is needed"""
    phases: dict[PhaseName, Bytes]
    breakdown: HostBreakdown
    """at that phase"""
    pinned_bytes: Bytes = 0
    """pinned memory of all processes, while they train"""
    mapped_bytes: Bytes = 0
    """weight files that are mapped while the model is loaded, on Windows: it promises RAM or page file for them"""


Basis = Literal["recorded", "nearby", "rehearsed", "measured"]
"""What an estimate rests on, the surest last: recordings, measurements of other plans or cards, a run of this plan on
virtual cards, a run on such a card."""


class Estimate(Record):
    """What a job under a strategy on a machine will take: peaks by phase in bytes, host RAM, step seconds, the verdict
    and its range."""

    job: Job
    strategy: Strategy
    machine: Machine
    peak: Peak
    phases: dict[PhaseName, PhasePeak]
    """only the phases that the job has, in the order they run"""
    breakdown: Breakdown
    host_ram_bytes: Bytes
    """per node"""
    disk_bytes: Bytes
    step_seconds: NotNegative
    """one optimizer step, all its accumulation passes included, with everything at its best: the low end; where a job
    only samples, one noise level"""
    step_seconds_high: NotNegative | None = None
    """the same step where kernels, launches and links reach the least that was seen"""
    flops: Annotated[int, Field(strict=True, ge=0)]
    """of the same on one GPU"""
    budget_bytes: Bytes
    """what the card gives, less the reserve"""
    verdict: Verdict
    limit: Literal["gpu", "host", "disk"] | None = None
    """what is short, when the verdict is not "fits" """
    low_bytes: Bytes
    high_bytes: Bytes
    """the peak lies between the two"""
    basis: Basis
    lossy: tuple[str, ...] = ()
    """names of the strategy's fields that lose precision"""
    attention_kernel: str
    assumptions: tuple[str, ...] = ()
    host: HostPeak | None = None
    """of `host_ram_bytes`: the phase, and what it is for"""
    timed: Annotated[Flag, Field(exclude=True)] = True
    """whether the seconds say how long a step takes; else they only put plans in order, and JSON has null for them"""

    def to_json(self) -> dict[str, Any]:
        """The estimate as plain JSON values."""
        found = super().to_json()
        return found if self.timed else {**found, "step_seconds": None, "step_seconds_high": None}

    @property
    def configuration(self) -> Configuration:
        """What it is the estimate of, resolved anew at each call: a file may leave fields of the strategy open."""
        return Configuration.of(self.job, self.strategy, self.machine)

    @model_validator(mode="after")
    def _parts_are_the_whole(self) -> Self:
        if self.breakdown.total != self.peak.device_bytes:
            fault = f"sums to {self.breakdown.total}, not to the peak's device_bytes {self.peak.device_bytes}"
            raise VplanError(f"breakdown {fault}", "correct one of the two")
        if self.host is not None and self.host.breakdown.total != self.host_ram_bytes:
            fault = f"sums to {self.host.breakdown.total}, not to host_ram_bytes {self.host_ram_bytes}"
            raise VplanError(f"host's breakdown {fault}", "correct one of the two")
        if self.peak.phase not in self.phases:
            raise VplanError(f"phases lack the peak's own phase {self.peak.phase}", "add it")
        if not self.low_bytes <= self.high_bytes:
            raise VplanError(f"low_bytes {self.low_bytes} is above high_bytes {self.high_bytes}", "swap them")
        return self


RAN_OUT = frozenset({"oom", "host-oom"})
RAN = frozenset({"measured", "fits", "ok", "nan"})
"""Outcomes of runs that had memory enough. A crash or a timeout says nothing about memory."""


class Measured(Record):
    """What a probe measured. Running out of memory is a result like any other; what was not reached is None."""

    outcome: Outcome
    phase: PhaseName | None = None
    """where the peak was, or where it ended"""
    allocated_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    device_bytes: Bytes | None = None
    host_bytes: Bytes | None = None
    step_seconds: NotNegative | None = None
    retries: CountOrZero | None = None
    """times the allocator had to empty its cache to serve a request: above 0 the run is at the edge"""


VIRTUAL = "virtual"
"""The driver of a rehearsed run, and what stands before the name of its card."""


class Environment(Record):
    """The card, driver and library versions that a measurement was taken with."""

    gpu: str
    driver: str
    torch: str
    diffusers: str
    attention_kernel: str
    command: str
    time: str
    """ISO 8601, UTC"""

    @property
    def is_virtual(self) -> bool:
        """Whether its cards did not exist: such a run has no seconds, and counts as no measurement."""
        return self.driver == VIRTUAL


class Evidence(Record):
    """A measurement that supports a plan: its row's id, the measured numbers, and the environment."""

    id: str
    """of its row in the ledger"""
    measured: Measured
    env: Environment


class Plan(Record):
    """One run in one file: job, strategy, machine, estimate, measurements as evidence, and the next plans to step down
    to."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    job: Job
    strategy: Strategy
    machine: Machine
    estimate: Estimate | None = None
    evidence: tuple[Evidence, ...] = ()
    ladder: tuple[Estimate, ...] = ()
    """the next plans by decreasing speed, for when this one runs out of memory after all"""
    trainer: Annotated[str, Field(min_length=1, max_length=100)] = "vplan"
    """ours, or the dialect whose memory terms apply"""
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    """how `vplan train` trains it; what is open is the model's preset"""

    @property
    def configuration(self) -> Configuration:
        """Its job, strategy and machine, resolved anew at each call: a file may leave fields of the strategy open."""
        return Configuration.of(self.job, self.strategy, self.machine)

    @classmethod
    def under(cls, configuration: Configuration, trainer: str = "vplan") -> Self:
        """The plan of a configuration, without an estimate."""
        job, strategy, machine = configuration.job, configuration.strategy, configuration.machine
        return cls(job=job, strategy=strategy, machine=machine, trainer=trainer)

    @model_validator(mode="after")
    def _estimate_is_of_this_plan(self) -> Self:
        if self.estimate is not None:
            for part in _PARTS:
                if getattr(self.estimate, part) != getattr(self, part):
                    raise VplanError(f"the estimate's {part} differs from the plan's", "estimate the plan again")
        return self

    @classmethod
    def of(cls, estimate: Estimate, ladder: tuple[Estimate, ...] = (), trainer: str = "vplan") -> Self:
        """The plan that an estimate is of, with the plans to step down to."""
        return cls(
            job=estimate.job,
            strategy=estimate.strategy,
            machine=estimate.machine,
            estimate=estimate,
            ladder=ladder,
            trainer=trainer,
        )


_PARTS = ("job", "strategy", "machine")


def plan_to_toml(plan: Plan) -> str:
    """A plan as the text of plan.toml. Fields that are None are left out; what the estimate shares with the plan is
    written once, at the top."""
    import tomli_w  # only writers need it, and readers start faster without

    whole = _without_nulls(plan.to_json())
    for estimate in (whole.get("estimate"), *whole["ladder"]):
        for part in _PARTS:
            if estimate and estimate[part] == whole[part]:
                del estimate[part]
    return tomli_w.dumps({name: value for name, value in whole.items() if value not in ([], {})})


def plan_from_toml(text: str, where: str = "plan") -> Plan:
    """The plan of a file's text; `where` names the file in the error."""
    whole = parse(text, "toml", where)
    if whole.get("schema") != 1:
        written = f"schema {quoted(whole['schema'])}" if "schema" in whole else "no schema"
        other = "it is from another version: update vplan, or create it again"  # its fields may mean other things
        fix = other if "schema" in whole else "add schema = 1 at the top"
        raise VplanError(f"{where} has {written}; this vplan reads schema 1", fix)
    ladder = whole.get("ladder")
    for estimate in (whole.get("estimate"), *(ladder if isinstance(ladder, list) else ())):
        if isinstance(estimate, dict):
            for part in _PARTS:
                if part in whole:
                    estimate.setdefault(part, whole[part])
    return Plan.read(whole, where=where)


def _without_nulls(value: Any) -> Any:
    """JSON values without the keys whose value is null, which TOML cannot say."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def read_plan(path: str | Path) -> Plan:
    """The plan in a file, or a VplanError that names the file and its fault."""
    path = Path(path)
    try:
        text = read_bytes(path).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = "it is not a text file" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", error)
        raise VplanError(f"cannot read plan {quoted(str(path))}: {reason}", "pass a plan.toml") from None
    return plan_from_toml(text, where=path.name)


def is_plan(path: str) -> bool:
    """Whether a file is a plan of any version: what may be replaced by another one unasked."""
    try:
        whole = parse(read_bytes(Path(path)).decode(), "toml", path)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(whole, dict) and {"schema", "job", "machine"} <= whole.keys()


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan so that, whatever dies meanwhile, the file holds the old plan or the new one, never a part.

    A link is followed, and what is no file (a device, a pipe) is written to, not replaced.
    """
    fault = f"cannot write plan {quoted(str(path))}"
    path = Path(path)
    try:
        special = path.exists() and not path.is_file()
        path = path if special else path.resolve()  # what /dev/stdout leads to need not have a name
        write_file(path, plan_to_toml(plan))
    except OSError as error:
        raise VplanError(f"{fault}: {error.strerror}", "choose another file") from None
