"""Learns from the ledgers about one model on one card: compares their rows with what the recordings alone predict.

Estimating every row again would take longer than answering a question. So the predictions are cached in the user's
folder until something that they depend on changes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import planner
import profiles
from planner.catalog import card_lookup, lookup, user_data
from planner.catalog.card_profiles import GpuProfile
from planner.errors import VplanError
from planner.estimate.estimate import estimate
from planner.evidence.ledger import OURS, Ledger, default_path
from planner.evidence.measurement import ProbeRow, held_out, is_of_a_gpu, peaks_of, phases_of
from planner.layout.correction import NO_MEASUREMENTS, SEPARATE_PHASES, MeasuredRun, ModelMeasurements, Proof, fit
from planner.layout.recordings import load_facts
from planner.layout.run import Facts
from planner.spec.plan import RAN_OUT, Environment, Measured, PhaseName, PhasePeak

NEWEST = 48
"""How many of the newest rows of one model on one class of card are used."""

KEPT = "predictions.json"
"""The file of cached predictions in the user's folder."""

_predictions_here: dict[str, dict[str, Any]] = {}
"""Fingerprint -> predictions, cached in this process too, because the user's folder need not exist."""


class InstalledSetup(NamedTuple):
    """This computer's card and software; None for what it does not have."""

    gpu: str | None
    driver: str | None
    torch: str | None
    diffusers: str | None

    def agrees(self, env: Environment) -> bool:
        """Whether a measurement in this environment would give the same result, as far as is known here: the libraries
        agree, and if the card is the same, its driver. (A computer without the card may plan for one with it.)"""
        libraries = self.torch in (None, env.torch) and self.diffusers in (None, env.diffusers)
        return libraries and (self.gpu != env.gpu or self.driver in (None, env.driver))


@functools.cache
def installed_setup() -> InstalledSetup:
    """The first card of this machine, its driver, and the installed torch and diffusers; None for what is missing."""
    in_browser = sys.platform == "emscripten"  # a variable, because mypy would consider the rest unreachable
    if in_browser:  # has none of them, and neither psutil nor NVML
        return InstalledSetup(None, None, None, None)
    from planner.hardware import doctor  # NVML is asked only where there are measurements

    driver, cards = doctor.gpus()
    gpu = next((card["name"] for card in cards), None)
    versions = [doctor.package_version(name) for name in ("torch", "diffusers")]
    return InstalledSetup(gpu, driver["version"], *versions)


def _newest(model: str, gpu: GpuProfile) -> list[ProbeRow]:
    """The newest of our own rows of a model on a card, oldest first; from the user's ledger, then bundled ones."""
    paths = [default_path(), *sorted(profiles.MEASUREMENTS.glob("*.jsonl"), reverse=True)]
    found: list[ProbeRow] = []
    for path in paths:
        if len(found) < NEWEST and path.exists():
            found += _read(path, path.stat().st_mtime_ns, model, gpu)
    return found[:NEWEST][::-1]


@functools.lru_cache(maxsize=256)
def _read(path: Path, written_ns: int, model: str, gpu: GpuProfile) -> tuple[ProbeRow, ...]:
    """A file's rows of a model on a card, newest first."""

    @functools.cache
    def is_of(card: str, planned: str | None, is_capped: bool) -> bool:
        return _stands_for(card, planned if is_capped else None, gpu) is not None

    def wanted(data: Mapping[str, Any]) -> bool:
        job, machine, env, details = (_table(data, name) for name in ("job", "machine", "env", "details"))
        card, planned, torch = machine.get("gpu"), data.get("planned_gpu"), env.get("torch")
        return (
            job.get("model") == model
            and data.get("runner", "real") == "real"
            and env.get("gpu") != "cpu"
            and "config" not in details
            and isinstance(torch, str)
            and isinstance(card, str)
            and isinstance(planned, str | None)
            and is_of(card, planned, data.get("capped_bytes") is not None)
            and _minor(installed_setup().torch or torch) == _minor(torch)  # last: it asks NVML
        )

    return tuple(itertools.islice(Ledger(path).newest(OURS, model, wanted=wanted), NEWEST))


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, dict) else {}


def measurements_of(
    model: str, gpu: GpuProfile, trainer: str = "vplan", probes: Sequence[ProbeRow] | None = None
) -> ModelMeasurements:
    """What measurements say about a bundled or own model on a card; nothing for other trainers.

    ``probes`` replaces the ledgers' rows. Simulated rows and rows without numbers from a GPU are ignored. Rows of the
    held-out half of a grid are only used as the outcome of exactly their plan.
    """
    if trainer != "vplan":
        return NO_MEASUREMENTS
    name = lookup.model(model).name
    given = _newest(name, gpu) if probes is None else probes
    own_rows = [row for row in given if row.job.model == name and is_of_a_gpu(row)]
    own_rows = [row for row in own_rows if _minor(installed_setup().torch or row.env.torch) == _minor(row.env.torch)]
    newest = [(row, own) for row in own_rows if (own := stands_for(row, gpu)) is not None][-NEWEST:]
    if not newest:
        return NO_MEASUREMENTS
    predictions = _Predictions()
    runs = [part for row, own in newest if not held_out(row) for part in _runs(row, gpu, own, predictions)]
    predictions.keep()
    proofs: dict[str, tuple[Proof, ...]] = {}
    for row, own in newest:
        if installed_setup().agrees(row.env):
            proofs[row.id] = (*proofs.get(row.id, ()), Proof(row.measured, phases_of(row.details), own))
    encoded = [each for part, each in runs if part == "encode"]
    encoding = fit(encoded, gpu.title, "its encoders") if encoded else None
    correction = fit([each for part, each in runs if part == "step"], gpu.title)
    return ModelMeasurements(correction._replace(encoding=encoding), proofs)


def _minor(version: str) -> list[str]:
    """The major and minor version: 2.13.0+cu130 gives 2, 13. The allocator and kernels are assumed to change only with
    these."""
    return version.split("+")[0].split(".")[:2]


def stands_for(row: ProbeRow, gpu: GpuProfile) -> bool | None:
    """True if a row is from such a card, False if it is from a larger one that was capped to its memory, None for other
    cards. A class of cards is represented by each of its reference cards."""
    return _stands_for(row.machine.gpu, row.planned_gpu if row.capped_bytes is not None else None, gpu)


def _stands_for(measured: str, planned: str | None, gpu: GpuProfile) -> bool | None:
    """As `stands_for`. ``planned``: the plan's card if the run was capped to its memory."""
    with contextlib.suppress(VplanError):
        card, group = card_lookup.gpu(measured), card_lookup.gpu_class(gpu.name)
        if card.name == gpu.name or (group and card.name in group.reference):
            return True
        if planned is not None and card_lookup.parse_gpus(planned)[1].name == gpu.name:
            return card.architecture == gpu.architecture
    return None


def _runs(
    row: ProbeRow, gpu: GpuProfile, own_card: bool, predictions: _Predictions
) -> Iterator[tuple[str, MeasuredRun]]:
    """The measured runs in a row: of the `step`, and of what came before it (`encode`)."""
    if row.measured.outcome not in ("ok", "nan", *RAN_OUT) or row.measured.outcome == "host-oom":
        return
    card = card_lookup.gpu(row.machine.gpu)
    # Use the calibrated card if there is one: its differences from the listed card must not count as errors too.
    if (prediction := predictions.of(row, gpu if gpu.name == card.name else card)) is None:
        return
    others = row.details.get("others_bytes") or 0
    for part, measured in _parts(row):
        if prediction[part] is not None:
            yield (
                part,
                MeasuredRun(
                    measured=measured,
                    predicted=PhasePeak(**prediction[part]),
                    predicted_seconds=prediction["seconds"],
                    budget_bytes=row.capped_bytes or card.allocatable_bytes - others,
                    own_card=own_card,
                ),
            )


def _parts(row: ProbeRow) -> Iterator[tuple[str, Measured]]:
    """A row's numbers, with those of encoding separated from those of the steps. If the row ran out while encoding,
    there are no steps."""
    measured = row.measured
    if not SEPARATE_PHASES.intersection(phases_of(row.details)):
        yield "step", measured
        return
    early = measured.outcome in RAN_OUT and measured.phase in SEPARATE_PHASES
    if not early:
        yield "step", measured.replace(**peaks_of(row.details, SEPARATE_PHASES, apart=True))
    nothing = {"step_seconds": None, "outcome": measured.outcome if early else "ok"}
    yield "encode", measured.replace(**nothing, **peaks_of(row.details, SEPARATE_PHASES))


def with_learned(facts: Facts, trainer: str = "vplan", from_rows: Sequence[ProbeRow] | None = None) -> Facts:
    """The facts with what measurements say: those in the ledgers, or ``from_rows``."""
    return facts._replace(measurements=measurements_of(facts.model.name, facts.gpu, trainer, from_rows))


class _Predictions:
    """A cache of the recordings' predictions for rows."""

    def __init__(self) -> None:
        self._path = user_data.folder() / KEPT
        self._print = _fingerprint()
        self._by_row: dict[str, Any] = dict(_predictions_here.get(self._print, {}))
        with contextlib.suppress(OSError, ValueError):  # missing or damaged: it is made again
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            self._by_row |= kept["predictions"] if kept["of"] == self._print else {}
        self._before = len(self._by_row)

    def of(self, row: ProbeRow, card: GpuProfile) -> dict[str, Any] | None:
        """The predicted peaks over the phases that a row's run went through, and the seconds of a step; None if the
        plan is not recorded."""
        rates = card.context_mib, card.bf16_tflops, card.bandwidth_gbs, card.link_gbs
        machine = f"{row.machine.gpu} {row.machine.torch} {row.capped_bytes}"
        key = f"{row.id} {machine} {' '.join(sorted(phases_of(row.details)))} {rates}"
        if key not in self._by_row:
            self._by_row[key] = _predict(row, card)
        prediction: dict[str, Any] | None = self._by_row[key]
        return prediction

    def keep(self) -> None:
        """Saves new predictions in this process, and in the user's folder if that exists."""
        _predictions_here[self._print] = self._by_row
        if len(self._by_row) > self._before and self._path.parent.is_dir():
            from planner.worker_process import write_json  # slow to import

            with contextlib.suppress(OSError):  # the folder is not writable: they are estimated again next time
                write_json(self._path, {"of": self._print, "predictions": self._by_row})


def _predict(row: ProbeRow, card: GpuProfile) -> dict[str, Any] | None:
    try:
        configuration = row.configuration
        answer = estimate(configuration, load_facts(configuration, gpu=card))
    except VplanError:
        return None
    went = phases_of(row.details)
    through = {phase: peak for phase, peak in answer.phases.items() if phase in went} or answer.phases
    apart = {phase: peak for phase, peak in through.items() if phase in SEPARATE_PHASES and phase in went}
    step = {phase: peak for phase, peak in through.items() if phase not in apart}
    return {"step": _highest(step), "encode": _highest(apart), "seconds": answer.step_seconds}


def _highest(phases: Mapping[PhaseName, PhasePeak]) -> dict[str, int] | None:
    """The maximum of each counter; None without phases."""
    if not phases:
        return None
    return {name: max(getattr(peak, name) for peak in phases.values()) for name in PhasePeak.model_fields}


def _fingerprint() -> str:
    """A value that changes when anything changes on which an estimate without measurements depends."""
    import hashlib

    folders = (
        Path(planner.__file__).parent,
        profiles.GPUS.parent,
        user_data.folder() / "models",
        user_data.folder() / "tapes",
    )
    files = (
        path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".toml", ".gz", ".json")
    )
    marks = sorted(f"{path}:{(stat := path.stat()).st_size}:{stat.st_mtime_ns}" for path in files)
    return hashlib.sha256("\n".join(marks).encode()).hexdigest()
