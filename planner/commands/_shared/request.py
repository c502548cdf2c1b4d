"""Turns typed flags into a complete question: looks names up, fills in defaults, and notes each default it took.

A command decorated with `@request_options(...)` receives one `TypedQuestion`. `asked.to_question()` returns the
`Question` to answer, or raises a VplanError. A command that answers for many models or cards calls it once for each:
`asked.to_question(gpu=...)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from planner import dialects
from planner.catalog import card_lookup, lookup
from planner.catalog.card_limits import BF16_ATTENTION_FROM
from planner.catalog.card_profiles import GpuProfile
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import check_blocks, how_read, job_for, parse_resolution
from planner.commands import USAGE
from planner.commands._shared.options import (
    AUTO_BUCKETS,
    MAX,
    complete_target,
    job_options,
    machine_options,
    strategy_options,
)
from planner.commands._shared.verb import Function
from planner.errors import VplanError
from planner.layout import trainer_terms
from planner.layout.experts import expert_assumption
from planner.schema import Record
from planner.search.question import Question
from planner.spec.job import Bucket, Job, Machine, Strategy
from planner.spec.plan import Plan, read_plan
from planner.spec.rules import left_behind
from planner.units import GIB, format_gib

if TYPE_CHECKING:
    from planner.evidence.this_machine import CardHere

SHAPE = frozenset({"frames", "height", "width"})
"""Fields of the job that buckets replace."""

AUTO = "auto"
"""`--gpu auto`: this machine's card."""

ALL = "all"
"""`--gpu all`: every class of card; the default on a machine without a card."""


Answer = TypeVar("Answer")

SAMPLING = {
    "on": "samples with the model on the GPU (--validation-mode on)",
    "offload": "samples decoded with the model in host RAM (--validation-mode offload)",
}
"""Ways to make validation samples, by preference -> description."""


class TypedQuestion(NamedTuple):
    """The options as typed, completed by the plan file; no model or card is looked up yet."""

    job: Mapping[str, Any]
    strategy: Mapping[str, Any]
    machine: Mapping[str, Any]
    resolution: str | None
    typed: frozenset[str]
    plan: Plan | None
    here: CardHere | None = None
    """the card of `--gpu auto`, whose name is in `machine`"""
    notes: tuple[str, ...] = ()
    """defaults taken so far"""

    @property
    def model(self) -> str | None:
        """The model's name as typed; None when there is none."""
        return self.job.get("model")

    @property
    def trainer(self) -> str:
        """The trainer whose memory terms apply: the plan file's, else `vplan`."""
        return self.plan.trainer if self.plan else "vplan"

    @property
    def gpu(self) -> str | None:
        """The card as typed, such as `2x4090`; None when there is none."""
        return self.machine.get("gpu")

    @property
    def wants_shapes(self) -> bool:
        """Whether the shapes are to be derived from the data."""
        return self.job.get("buckets") == AUTO_BUCKETS

    def with_shapes(self, buckets: tuple[Bucket, ...]) -> TypedQuestion:
        """The question with these shapes, instead of `--buckets auto` and the limits typed with it."""
        job = {name: value for name, value in self.job.items() if name not in SHAPE}
        return self._replace(job={**job, "buckets": buckets}, resolution=None, typed=self.typed - SHAPE)

    def asks_for_samples(self, options: Mapping[str, Any]) -> str | None:
        """The first flag that asks for validation samples, in this question or in its command's ``options``.

        None if there is no such flag, if the question itself says how samples are made, or if another trainer makes
        them its own way.
        """
        if "validation_mode" in self.typed or self.trainer != "vplan" or self.job.get("method") == "sample":
            return None
        if self.plan and self.plan.strategy.validation_mode != "off":
            return None
        return "--validation" if "validation" in self.typed else flag_of_samples(options)

    def with_samples(self, mode: str = "on") -> TypedQuestion:
        """The same question with validation samples, made in one of the ways of `SAMPLING`."""
        strategy, typed = {**self.strategy, "validation_mode": mode}, self.typed | {"validation_mode"}
        return self._replace(strategy=strategy, typed=typed, notes=(*self.notes, SAMPLING[mode]))

    def to_question(self, *, model: str | None = None, gpu: str | None = None) -> Question:
        """The complete question, for one model and card out of several if those are passed.

        The strategy stays as typed: open fields are left open and nothing is checked. A search fills them in, or
        `Question.configuration` does.
        """
        typed_model = _needed(model or self.model, "model", "wan2.1-t2v-1.3b", "models")
        profile = lookup.model(typed_model)
        typed_gpu = _needed(gpu or self.gpu, "gpu", "24GB", "gpus")
        count, card = card_lookup.parse_gpus(typed_gpu)
        taken = lookup.taken_for(typed_model, profile), card_lookup.card_taken_for(typed_gpu, card)
        notes = [*filter(None, taken), *self.notes]
        if self.here and gpu is None:
            card = self.here.card
            notes += self.here.notes
        job = self._job(profile, notes)
        machine = self._machine(count, card, notes)
        if self.trainer != "vplan":
            trainer = self.trainer.partition("@")[0]
            known = trainer in (*dialects.TRAINERS, *dialects.FURTHER, *trainer_terms.NAMES)
            notes.append(f"as {trainer} trains" if known else f"{trainer} is priced like vplan's own trainer")
        of_the_card = _of_the_card(card, self.strategy, notes)
        strategy = Strategy.read({**of_the_card, **self.strategy})
        check_blocks(profile, strategy)
        if machine.reserve >= card.allocatable_bytes:
            fault = f"--reserve {format_gib(machine.reserve)} leaves no memory on {card.title}"
            raise VplanError(fault, f"it gives {format_gib(card.allocatable_bytes)} in total; reserve less")
        return Question(
            job=job,
            strategy=strategy,
            machine=machine,
            model=profile,
            gpu=card,
            assumptions=tuple(notes),
            fixed=self.typed | (of_the_card.keys() if card.backend == "mps" else frozenset()),
            frames_max=self.job.get("frames") == MAX,
        )

    def _job(self, model: ModelProfile, notes: list[str]) -> Job:
        """The job, with the model's default shape if none was typed."""
        said = dict(self.job)
        if said.get("buckets") == AUTO_BUCKETS:
            fix = "pass --data DIR to vplan train, suggest or estimate; the last two write a plan with its shapes (-o)"
            raise VplanError("--buckets auto needs the clips it is to propose shapes for", fix)
        if said.get("buckets") and (beside := self.typed & SHAPE):
            flag = "--frames" if "frames" in beside else "--resolution" if self.resolution else "--height"
            fault = f"--buckets sets every shape, so {flag} has no effect"
            raise VplanError(fault, "leave it out, or change --buckets")
        if said.get("frames") == MAX:
            del said["frames"]
        if self.resolution:
            said["height"], said["width"] = parse_resolution(model, self.resolution)
            notes += [note for note in (how_read(self.resolution, said["height"], said["width"]),) if note]
        job = job_for(model, said)
        if "frames" not in self.job and not job.buckets and model.kind == "video":
            notes.append(f"{job.frames} frames (the model's default)")
        if "height" not in said and not job.buckets:
            notes.append(f"{job.height}x{job.width} pixels (height x width, the model's default)")
        if "lora_rank" not in said and job.trains in ("lora", "dora"):
            notes.append(f"LoRA rank {job.lora_rank}")
        if note := expert_assumption(model, job):
            notes.append(note)
        if model.traits.caution:
            notes.append(model.traits.caution)
        if model.traits.few_steps and job.method != "sample":
            notes.append(f"{model.title} {FEW_STEPS}")
        longest = max(shape.frames for shape in job.shapes)
        if longest > model.shape.max_frames:
            notes.append(f"{longest} frames is longer than the model was trained on ({model.shape.max_frames})")
        return job

    def _machine(self, count: int, card: GpuProfile, notes: list[str]) -> Machine:
        """The machine, with the usual host RAM for such cards if none was typed."""
        said = {**self.machine, "gpu": card.name}
        if "gpus" in self.typed and count not in (1, said["gpus"]):
            raise VplanError(f"--gpu means {count} cards, but --gpus is {said['gpus']}", "leave one of them out")
        if count > 1:
            said["gpus"] = count
        said.setdefault("unified", card.unified)
        machine = Machine.read(said)
        if machine.os != "linux" and "reserve" not in said:
            machine = machine.replace(reserve=card_lookup.DESKTOP_BYTES)
            notes.append("a desktop on the card (--reserve)")
        elif "reserve" not in said and self.plan is None and card.class_gb < 40 and not card.unified:
            notes.append(f"no desktop on the card (else --reserve {card_lookup.DESKTOP_BYTES / GIB:.0f}GiB)")
        if machine.host_ram is None and self.plan is not None and self.plan.trainer != "vplan":
            notes.append("host RAM not checked; pass --host-ram 64GiB")
        elif machine.host_ram is None:
            usable, installed = (
                card_lookup.default_host_ram(card, machine.gpus, machine.os),
                card_lookup.installed_host_ram(card, machine.gpus),
            )
            machine = machine.replace(host_ram=usable)
            of_all = f" of {installed / GIB:.0f}" if usable < installed else ""
            notes.append(f"{usable / GIB:.0f}{of_all} GiB of host RAM usable (--host-ram)")
        return machine


def flag_of_samples(options: Mapping[str, Any]) -> str | None:
    """The first typed option that is about validation samples; None if there is none."""
    typed = (name for name, value in options.items() if name.startswith("validat") and value)
    return next((f"--{name.replace('_', '-')}" for name in typed), None)


def answer_with_samples(
    asked: TypedQuestion, answer: Callable[[TypedQuestion], Answer], fits: Callable[[Answer], bool]
) -> Answer:
    """The answer to a question with validation samples, made in the first way for which there is room."""
    answers = (answer(asked.with_samples(mode)) for mode in SAMPLING)
    first = next(answers)
    return first if fits(first) else next(filter(fits, answers), first)


def _of_the_card(card: GpuProfile, said: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The strategy fields that depend on the card, unless the user set them: 16-bit means fp16 before Ampere; AMD has
    no expandable segments; Apple's GPUs have neither those nor foreach optimizer steps, and no separate memory to swap
    blocks to."""
    if card.backend == "mps":
        fields = {"expandable_segments": False, "optimizer_step": "loop", "swap_blocks": 0}
        return {field: value for field, value in fields.items() if field not in said}
    if card.vendor == "amd":
        notes.append("no run on AMD was compared with an estimate: the range is wider")
        notes.append("the VAE without MIOpen's workspaces")
        return {} if "expandable_segments" in said else {"expandable_segments": False}
    if card.capability >= BF16_ATTENTION_FROM or {"autocast", "compute_dtype"} & said.keys():
        return {}
    notes.append(f"fp16, because {card.title} has no bf16")
    return {"compute_dtype": "fp16"}


def refuse_without_cuda(card: GpuProfile, asked: Mapping[str, bool]) -> None:
    """Raises a VplanError for an Apple GPU if the question is about vplan's own trainer or about seconds. ``asked``:
    option -> whether it was typed."""
    option = next((name for name, typed in asked.items() if typed), None)
    if card.backend == "mps" and option:
        fault = f"vplan's own trainer needs CUDA, and no seconds are known of {card.title}"
        raise VplanError(fault, f"leave out {option}", USAGE)


def request_options(*, searched: bool = False, own_card: bool = False) -> Callable[[Function], Function]:
    """Adds everything a question can contain: a model or a plan, and the flags of Job, Machine and Strategy.

    The command receives them as `asked: TypedQuestion`. `searched`: the command chooses the strategy fields that were
    not typed. `own_card`: without --gpu the question is about this machine's card, if it has one.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(*, target: str | None, plan_path: str | None, **values: Any) -> Any:
            said = {"target": target, "plan_path": plan_path, **values}
            return function(**question_of(said, own_card=own_card))

        flags = job_options(machine_options(strategy_options(searched=searched)(command)))
        plan = click.option("--plan", "plan_path", metavar="FILE", help="Start from a plan.toml; options override it.")
        metavar = "[MODEL|PLAN.toml]"
        target = click.argument("target", metavar=metavar, required=False, shell_complete=complete_target)
        return target(plan(flags))  # type: ignore[return-value]  # click calls what it gets by its own names

    return decorate


_RECORDS: dict[str, type[Record]] = {"job": Job, "strategy": Strategy, "machine": Machine}
FEW_STEPS = "was distilled to few steps, which training undoes; an adapter against that (ai-toolkit) is not priced"
"""The assumption about a model with `planner.catalog.traits.Traits.few_steps`."""

FIELDS = frozenset({"images", "resolution", "zero_stage"}.union(*(record.model_fields for record in _RECORDS.values())))


def question_of(values: Mapping[str, Any], *, own_card: bool = False) -> dict[str, Any]:
    """A command's values with `asked` in place of those that belong to the question. ``own_card``: without ``gpu`` the
    question is about this machine's card, if it has one."""
    asked = _typed_question(values["target"], values["plan_path"], dict(values), own_card)
    own = FIELDS | {"target", "plan_path"}
    return {"asked": asked, **{name: value for name, value in values.items() if name not in own}}


def _typed_question(target: str | None, plan_path: str | None, values: dict[str, Any], own_card: bool) -> TypedQuestion:
    """Sorts the typed flags into the three records, on top of those in the plan file."""
    typed = {name: value for name, value in values.items() if name in FIELDS and value is not None}
    if target and target.endswith(".toml"):
        plan_path = _once(plan_path, target, "the plan")
    elif target is not None:  # an empty one comes from an unset shell variable; it must not mean every model
        typed["model"] = _once(typed.get("model"), target, "the model")
    _write_out_shorthands(typed)
    resolution = typed.pop("resolution", None)
    if "height" in typed or "width" in typed:
        _check_size(typed, resolution)
    plan = read_plan(plan_path) if plan_path else None
    records = _on_top_of_plan(plan, typed)
    here = _card_here(typed, records["machine"], own_card)
    fixed = frozenset(typed) | ({"height", "width"} if resolution else frozenset())
    return TypedQuestion(
        job=records["job"],
        strategy=records["strategy"],
        machine=records["machine"],
        resolution=resolution,
        typed=fixed,
        plan=plan,
        here=here,
    )


def _write_out_shorthands(typed: dict[str, Any]) -> None:
    """Replaces `--images` and `--zero-stage` by the fields that they stand for."""
    if typed.pop("images", False) and typed.setdefault("frames", 1) != 1:
        raise VplanError(f"--images are of 1 frame, not {typed['frames']}", "leave out --frames", USAGE)
    if "zero_stage" in typed:
        number = typed.pop("zero_stage")
        stage = f"zero-{number}" if number else "ddp" if _several(typed) else "none"
        typed["sharding"] = _once(typed.get("sharding"), stage, "the sharding")


def _on_top_of_plan(plan: Plan | None, typed: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields of each record: the plan's, and over them the typed ones."""
    records = {}
    for name, record in _RECORDS.items():
        planned = getattr(plan, name) if plan else None
        said = {field: getattr(planned, field) for field in planned.model_fields_set} if planned else {}
        records[name] = {**said, **{field: value for field, value in typed.items() if field in record.model_fields}}
    for field in left_behind(records["strategy"]).keys() - typed.keys():  # the plan set it for what was replaced
        del records["strategy"][field]
    if "gpu" in typed:
        # Another card means another computer: the plan's values for these applied to its own.
        for field in {"host_ram", "unified", "torch"} - typed.keys():
            records["machine"].pop(field, None)
    return records


def _card_here(typed: dict[str, Any], machine: dict[str, Any], own_card: bool) -> CardHere | None:
    """This machine's card, if the question is about it; then it is put into the fields of ``machine``. `--gpu all`
    takes the card out of both. ``own_card``: as in `question_of`."""
    if str(typed.get("gpu", "")).lower() == ALL:
        del typed["gpu"], machine["gpu"]
        return None
    if str(typed.get("gpu", "")).lower() != AUTO and not (own_card and "gpu" not in machine and _has_card()):
        return None
    from planner.evidence.this_machine import card_here  # loads NVML, which no other question needs

    here = card_here(Machine(gpu=AUTO, **{name: typed[name] for name in typed.keys() & {"reserve", "torch"}}))
    machine |= {"gpu": here.card.name, "reserve": here.reserve_bytes}
    for field, value in (("host_ram", here.host_ram), ("torch", here.torch)):
        machine.setdefault(field, value)
    return here


def _has_card() -> bool:
    from planner.hardware import doctor

    driver, cards = doctor.visible()
    return not driver["error"] and bool(cards) and cards[0]["name"] is not None


def _several(typed: Mapping[str, Any]) -> bool:
    """Whether more than one GPU was requested."""
    count = card_lookup.parse_gpus(typed["gpu"])[0] if str(typed.get("gpu", AUTO)).lower() != AUTO else 1
    return bool(max(count, typed.get("gpus", 1)) * typed.get("nodes", 1) > 1)


def _check_size(typed: Mapping[str, Any], resolution: str | None) -> None:
    if resolution:
        raise VplanError("both --resolution and --height/--width set the size", "leave one of them out", USAGE)
    if not {"height", "width"} <= typed.keys():
        raise VplanError("--height and --width must be given together", "pass both, or --resolution 480p", USAGE)


def _once(one: str | None, other: str, what: str) -> str:
    """The value from either of two places; if both have one, they must agree."""
    if one is not None and one != other:
        raise VplanError(f"two values for {what}: {one!r} and {other!r}", "leave one of them out", USAGE)
    return other


def _needed(name: str | None, option: str, example: str, verb: str) -> str:
    if name is None:
        raise VplanError(f"no --{option}", f"add one, as --{option} {example}; `vplan {verb}` lists them", USAGE)
    return name
