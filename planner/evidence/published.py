"""Reads rows of measurements from files, published ones and our own, as Job, Strategy, Machine and intervals.

Published rows are other people's runs (`measured.counter` and an interval in GiB); our own rows have a probe's counters
in bytes. Fields that a published row does not give get the defaults of its own trainer, never ours.
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import ConfigDict, Field

import profiles
from planner.errors import VplanError, quoted
from planner.evidence.jsonl import is_last, lines_of
from planner.evidence.measurement import REHEARSED, ProbeRow, in_held_out_half, phases_of
from planner.schema import Positive, Record, choices
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import RAN, Measured, PhaseName
from planner.units import gib

Counter = Literal["allocated", "reserved", "device", "unknown", "allocated_after_step", "reserved_with_validation"]


class Default(NamedTuple):
    """A trainer's default for a field, and where it is documented."""

    implementation: str
    """of the rows that it applies to; empty: all published rows"""
    field: str
    value: object
    source: str
    models: str = ""
    """prefix of the models that it applies to"""


DEFAULTS = (
    Default("", "expandable_segments", False, "torch.cuda: off unless PYTORCH_CUDA_ALLOC_CONF asks; no row says so"),
    Default("", "grad_buckets", "copy", "torch DistributedDataParallel, accelerate: gradient_as_bucket_view=False"),
    Default("", "optimizer_step", "foreach", "torch.optim.AdamW on CUDA: foreach when nothing is said"),
    Default(
        "diffusers",
        "vae_tiling",
        True,
        "CogVideo finetune/schemas/args.py; --enable_tiling in the published "
        "commands of finetrainers (docs/training) and cogvideox-factory",
    ),
    Default("diffsynth", "weights_dtype", "bf16", "DiffSynth-Studio fed7b18: all models are loaded in bf16"),
    Default("diffsynth", "adapter_dtype", "bf16", "DiffSynth-Studio fed7b18: the peft adapters are cast to bf16"),
    Default("diffsynth", "lora_rank", 32, "DiffSynth-Studio fed7b18 diffsynth/diffusion/parsers.py"),
    Default(
        "diffsynth",
        "lora_targets",
        ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"),
        "DiffSynth-Studio fed7b18 diffsynth/diffusion/parsers.py: q,k,v,o,ffn.0,ffn.2",
        models="wan",
    ),
    Default("diffsynth", "gradient_checkpointing", "full", "DiffSynth-Studio fed7b18: forced on for Wan", models="wan"),
    Default("diffsynth", "text_encoder", "resident", "DiffSynth-Studio fed7b18: task sft keeps all on the GPU"),
    Default("diffsynth", "vae", "resident", "DiffSynth-Studio fed7b18: task sft keeps all on the GPU"),
    Default("easyanimate", "weights_dtype", "bf16", "EasyAnimate c2a70d1 from_pretrained_2d: bf16, in full as well"),
    Default("easyanimate", "batch_size", 16, "EasyAnimate c2a70d1 scripts/train.py --train_batch_size"),
    Default("easyanimate", "text_tokens", 256, "EasyAnimate c2a70d1 scripts/train.py --tokenizer_max_length"),
    Default("easyanimate", "text_encoder", "resident", "EasyAnimate c2a70d1 scripts/train.py: --low_vram is off"),
    Default("easyanimate", "vae", "resident", "EasyAnimate c2a70d1 scripts/train.py: --low_vram is off"),
    Default("latentsync", "weights_dtype", "fp32", "LatentSync a229c39 scripts/train_unet.py"),
    Default("latentsync", "autocast", "fp16", "LatentSync a229c39: run.mixed_precision_training, with GradScaler"),
    Default("latentsync", "gradient_checkpointing", "full", "LatentSync a229c39: run.enable_gradient_checkpointing"),
    Default("latentsync", "sharding", "ddp", "LatentSync a229c39: wraps the model in DDP on one GPU too"),
    Default("latentsync", "text_encoder", "resident", "LatentSync a229c39: Whisper tiny stays on the GPU"),
    Default("latentsync", "vae", "resident", "LatentSync a229c39: sd-vae-ft-mse stays on the GPU"),
    Default("latentsync", "vae_dtype", "fp16", "LatentSync a229c39: sd-vae-ft-mse in fp16"),
    Default("sd-scripts", "weights_dtype", "bf16", "sd-scripts 48d368f flux_train.py: the mixed-precision dtype"),
    Default("sd-scripts", "text_encoder", "resident", "sd-scripts 48d368f: --cache_text_encoder_outputs is off"),
    Default("sd-scripts", "vae", "resident", "sd-scripts 48d368f: --cache_latents is off"),
    Default("simpletuner", "lora_dropout", 0.1, "SimpleTuner bc8e6ab field_registry/sections/lora.py: --lora_dropout"),
    Default(
        "simpletuner",
        "text_tokens",
        77 + 154,
        "SimpleTuner bc8e6ab helpers/models/sd3/model.py check_user_config: T5 is cut at 154 tokens, behind CLIP's 77",
        models="sd3",
    ),
    Default("ai-toolkit", "gradient_checkpointing", "full", "ai-toolkit 27a03a9 train.gradient_checkpointing"),
)
"""Documented defaults that differ from our trainer's, or might in future; each is taken from the source it names."""


ORIGIN_BY_RUNNER: Mapping[str, Literal["measured", "rehearsed"]] = {"real": "measured", REHEARSED: "rehearsed"}
"""Runner of one of our rows -> how it was taken; with any other runner it is simulated."""

SHORT_RUNS = (("cogvideox-factory", "metrics.sh"),)
"""Publishers whose runs were one or two steps long, and whose peak was reset between loading and training.

cogvideox-factory trained MAX_TRAIN_STEPS=2 (metrics.sh) and printed the peak at the end of the first epoch. An epoch
has only whole batches (training/dataset.py ``BucketSampler``), so it has fewer steps with a larger batch. At batch 4,
adapters of rank 256 have the same peak with 0, 0.2 and 0.9 GiB of states, so there was no second step; at batch 1 the
peaks differ, so there was one. Full fine-tuning in fp16 begins with a loss scale of 65536, and a step whose gradients
overflow creates no states (torch/amp/grad_scaler.py ``_maybe_opt_step``): for one shape the peaks are within 14 MiB
(2B) and 41 MiB (5B) whether the optimizer keeps nothing or 3.2 and 10.4 GiB on the GPU, so the step that created the
states was the last one.
"""


WHOLE_RUNS = (("zai-org/CogVideo", "finetune"),)
"""Publishers whose process itself caches latents and prompts and does not reset the peak before training (CogVideo
finetune/trainer.py: ``prepare_dataset``, then ``get_memory_statistics``; the first reset is after a validation)."""


HALF_ADAPTERS = (("finetrainers", "docs/training/ltx_video.md"),)
"""Publishers whose LoRA adapters were in 16 bits, whatever the row says.

finetrainers' page prints the bytes allocated before training: 13.486 GiB with the encoders (13.49 with adapters in
bf16, 13.71 in fp32). For its cached run it prints 3.809 GiB before and 4.260 after the steps: the difference is two
states of 117,440,512 parameters with 2 bytes each.
"""


class CardSize(NamedTuple):
    """A publisher who prints the memory of a card that the run fits in, instead of what the run took."""

    publisher: tuple[str, ...]
    cards: Mapping[float, str]
    """GB -> the card named next to it"""
    source: str

    def reason(self, size: float) -> str:
        """Why a printed number of GB is the size of a card and not a measured peak, in words."""
        card = self.cards[size]
        return f"not a measured peak but the memory of the card it fits in: {size:g} GB, {card} ({self.source})"


CARD_SIZES = (
    CardSize(
        ("zai-org/CogVideo", "finetune/README.md"),
        {16.0: "NVIDIA 4080", 24.0: "NVIDIA 4090"},
        'finetune/README.md @f516938, column "Hardware Requirements"',
    ),
)
"""Such rows are estimated and shown like all others, and their errors count; statistics without them are given too."""


class Interval(NamedTuple):
    """The interval in GiB that contains the true value of a counter: printed numbers are rounded, ours are exact."""

    counter: Counter
    low_gib: float
    high_gib: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured run. ``unsupported``: why it cannot be estimated, as far as the row itself shows; else None."""

    id: str
    implementation: str
    job: Job
    strategy: Strategy
    machine: Machine
    outcome: str
    intervals: tuple[Interval, ...]
    """empty if only the outcome is known"""
    counter: Counter = "device"
    """the counter to show if there is no interval"""
    states_come_last: bool = False
    """whether the run ended with the optimizer step that created the states, see SHORT_RUNS"""
    reset_after_load: bool = False
    """whether the peak was reset between loading and training, see SHORT_RUNS"""
    whole_run: bool = False
    """whether the number includes caching before training, see WHOLE_RUNS"""
    unsupported: str | None = None
    phases: frozenset[str] = frozenset()
    """the phases that one of our probes went through"""
    version: str = ""
    """of the implementation, if its publisher gives one"""
    origin: Literal["published", "measured", "rehearsed", "simulated"] = "published"
    """by others; by our own trainer on a GPU or a virtual GPU; or on a simulated machine"""
    grid: str | None = None
    """the grid that it belongs to"""
    held_out: bool = False
    """whether it is in the grid's half that only judges"""
    step_seconds: float | None = None
    not_a_peak: str | None = None
    """why the number does not measure the run's peak, see CARD_SIZES"""

    @property
    def trainer(self) -> str:
        """The implementation with its version, as named in `planner.layout.trainer_terms`."""
        if not self.version:
            return self.implementation
        return f"{self.implementation}@{self.version}" + ("-one-step" if self.states_come_last else "")


class _Published(Record):
    """`measured` of a published row; its other fields (the printed text, its unit) are for human readers."""

    model_config = ConfigDict(extra="ignore")

    outcome: Literal["measured", "oom", "fits"]
    counter: Counter
    low_gib: Positive | None = None
    high_gib: Positive | None = None


class _Line(Record):
    """One line of a file of measurements."""

    model_config = ConfigDict(extra="ignore")

    id: Annotated[str, Field(min_length=1)]
    job: dict[str, Any]
    strategy: dict[str, Any] = {}
    machine: dict[str, Any]
    measured: dict[str, Any]
    implementation: Annotated[str, Field(min_length=1)] = "vplan"
    source: Any = None
    details: Any = None
    env: dict[str, Any] = {}
    runner: str = "real"
    grid: str | None = None


def published_files() -> list[Path]:
    """The bundled files of published measurements, sorted. Raises a VplanError if there are none."""
    files = sorted(profiles.MEASUREMENTS.glob("*.jsonl"))
    if not files:
        raise VplanError("this vplan has no bundled measurements", "reinstall vplan, or pass a .jsonl file")
    return files


def shipped_own() -> list[Path]:
    """The bundled files of our own trainer's rows on GPUs, sorted."""
    return sorted((profiles.MEASUREMENTS / "own").glob("*.jsonl"))


def shipped_rehearsals() -> list[Path]:
    """The bundled files of rehearsed rows, sorted; they are separate from measured ones."""
    return sorted(profiles.REHEARSALS.glob("*.jsonl"))


def shipped_rows() -> list[Row]:
    """The rows of all bundled published measurements."""
    return [row for path in published_files() for row in read_rows(path)[0]]


def read_rows(path: str | Path, *, expandable_segments: bool | None = None) -> tuple[list[Row], list[str]]:
    """The rows of a file, and notes for the user. Raises a VplanError that names the file and line of a damaged line.

    An incomplete last line, left by a process that died, is skipped. ``expandable_segments``: the allocator's setting
    for published rows that do not give it.
    """
    path = Path(path)
    rows, notes = [], []
    for number, line in enumerate(lines_of(path, "pass a .jsonl file of measurements"), start=1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        data = _parse(line)
        if data is not None:
            rows.append(_row(data, where, expandable_segments))
        elif is_last(line):
            notes.append(f"{where} is incomplete and skipped")
        else:
            raise VplanError(f"{where} is damaged: it is not a JSON object", "delete that line, or restore it")
    return rows, notes


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _row(data: Mapping[str, Any], where: str, expandable_segments: bool | None) -> Row:
    line = _Line.read(data, where)
    published = not line.measured.keys().isdisjoint({"counter", "low_gib", "high_gib"})
    job, strategy, machine = (_said(fields) for fields in (line.job, line.strategy, line.machine))
    unsupported = _take_unknown(job, Job) or _take_unknown(strategy, Strategy) if published else None
    if published:
        fill_defaults(line.implementation, job, strategy)
        if expandable_segments is not None and line.strategy.get("expandable_segments") is None:
            strategy["expandable_segments"] = expandable_segments
        if "adapter_dtype" in strategy and _published_by(line.source, HALF_ADAPTERS):
            strategy["adapter_dtype"] = "bf16"
    outcome, counter, intervals = (_published if published else _own)(line.measured, where)
    if not published and (
        line.env.get("gpu") == "cpu" or (isinstance(line.details, dict) and line.details.get("config"))
    ):
        unsupported = "a rehearsal on the CPU, or of a shrunk model, says nothing about a GPU"
    job_of_row, short = Job.read(job, where), _published_by(line.source, SHORT_RUNS)
    return Row(
        id=line.id,
        implementation=line.implementation,
        job=job_of_row,
        strategy=Strategy.read(strategy, where),
        machine=Machine.read(machine, where),
        outcome=outcome,
        intervals=intervals,
        counter=counter,
        states_come_last=short and (job_of_row.method == "full" or job_of_row.batch_size > 1),
        reset_after_load=short,
        whole_run=_published_by(line.source, WHOLE_RUNS),
        unsupported=unsupported,
        phases=frozenset() if published else _phases(line),
        version=_version(line.source),
        origin="published" if published else ORIGIN_BY_RUNNER.get(line.runner, "simulated"),
        grid=line.grid,
        held_out=line.grid is not None and in_held_out_half(line.id),
        step_seconds=None if published else line.measured.get("step_seconds"),
        not_a_peak=_not_a_peak(line.source, intervals) if published else None,
    )


def own_row(row: ProbeRow) -> Row:
    """A row of the user's ledger in the form of the published rows."""
    return _row(row.to_json(), row.id, None)


def _phases(line: _Line) -> frozenset[str]:
    """The phases that a probe went through; all of them on a simulated machine."""
    if line.runner == "simulate":
        return frozenset(get_args(PhaseName))
    return phases_of(line.details) if isinstance(line.details, dict) else frozenset()


def _version(source: object) -> str:
    """The first word of a published row's version: a commit, which is followed by its date."""
    version = source.get("version") if isinstance(source, dict) else None
    return version.split()[0] if isinstance(version, str) and version.strip() else ""


def _published_by(source: object, publishers: tuple[tuple[str, ...], ...]) -> bool:
    text = json.dumps(source)
    return any(all(part in text for part in parts) for parts in publishers)


def _not_a_peak(source: object, intervals: tuple[Interval, ...]) -> str | None:
    """Why a published number does not measure the peak; None if it may."""
    for publisher in CARD_SIZES:
        for size in publisher.cards if _published_by(source, (publisher.publisher,)) else ():
            if any(interval.low_gib <= size <= interval.high_gib for interval in intervals):
                return publisher.reason(size)
    return None


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not null: null and absent mean the same, as in plans."""
    return {name: value for name, value in fields.items() if value is not None}


def _take_unknown(fields: dict[str, Any], record: type[Record]) -> str | None:
    """Removes fields whose values are not in our closed lists (another trainer's optimizer, say). If there were any,
    returns the reason why the row is unsupported."""
    listed = {name: choices(record, name) for name in fields if name in record.model_fields}
    taken = {name: fields.pop(name) for name, values in listed.items() if values and _unlisted(fields[name], values)}
    return ", ".join(f"{name} {quoted(value)} is not in the vocabulary" for name, value in taken.items()) or None


def _unlisted(value: object, values: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value not in values


def fill_defaults(implementation: str, job: dict[str, Any], strategy: dict[str, Any]) -> None:
    """Fills in the fields that a published row does not give with its trainer's defaults."""
    model, trainer = str(job.get("model", "")).lower(), implementation.partition("@")[0]
    for default in DEFAULTS:
        if default.implementation in ("", trainer) and model.startswith(default.models):
            fields = job if default.field in Job.model_fields else strategy
            fields.setdefault(default.field, default.value)
    # These trainers have one setting, "mixed precision": inputs have the dtype of the matrix products.
    computed = {"bf16", "fp16", "fp32"}.intersection([strategy.get("autocast"), strategy.get("weights_dtype")])
    if strategy.get("autocast") in computed:
        strategy.setdefault("compute_dtype", strategy["autocast"])
    elif computed:
        strategy.setdefault("compute_dtype", computed.pop())


class _Measured(NamedTuple):
    """What a row says was measured."""

    outcome: str
    counter: Counter
    intervals: tuple[Interval, ...]
    """empty where only the outcome counts"""


def _published(measured: Mapping[str, Any], where: str) -> _Measured:
    """Somebody else's row. Raises a VplanError for bounds that are no interval."""
    measurement = _Published.read(measured, f"{where}: measured")
    if measurement.outcome != "measured":
        return _Measured(measurement.outcome, measurement.counter, ())
    if measurement.low_gib is None or measurement.high_gib is None or measurement.low_gib > measurement.high_gib:
        fault = f"low_gib {measurement.low_gib} and high_gib {measurement.high_gib} are not an interval"
        raise VplanError(f"{where}: measured {fault}", "write the smaller one as low_gib, the larger as high_gib")
    interval = Interval(measurement.counter, measurement.low_gib, measurement.high_gib)
    return _Measured(measurement.outcome, measurement.counter, (interval,))


def _own(measured: Mapping[str, Any], where: str) -> _Measured:
    """A probe's outcome and counters. A run that ended early saw only part of its peak, so only its outcome counts."""
    measurement = Measured.read(measured, f"{where}: measured")
    seen: dict[Counter, int | None] = {
        "allocated": measurement.allocated_bytes,
        "reserved": measurement.reserved_bytes,
        "device": measurement.device_bytes,
    }
    exact = [Interval(counter, gib(size), gib(size)) for counter, size in seen.items() if size]
    return _Measured(measurement.outcome, "device", tuple(exact) if measurement.outcome in RAN else ())
