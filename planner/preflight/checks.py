"""The checks of a plan that are not about the GPUs: host RAM, pinned RAM, disk, versions, and the data's shapes."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import grid
from planner.dataset.sources import DataSource
from planner.errors import VplanError
from planner.hardware import doctor
from planner.schema import JsonObject
from planner.spec.job import Job
from planner.spec.plan import Estimate, Plan
from planner.units import format_gib, gib

Level = Literal["ok", "note", "warning", "error"]

WRONG, SHORT, FAILED = 1, 3, 4
"""Exit codes: the input is wrong; the plan does not fit; something failed."""
TEXT_WIDTHS = ("text_dim", "text_embed_dim", "joint_attention_dim", "caption_channels", "cross_attention_dim")
"""Keys of diffusers' transformer configs for the width of a text token."""


class Check(NamedTuple):
    """The result of one check: its level, a message, and the fix."""

    name: str
    level: Level
    what: str
    fix: str = ""
    exit_code: int = 0


class Need(NamedTuple):
    """Bytes a plan needs on each GPU."""

    low_bytes: int
    high_bytes: int
    phases: Mapping[str, int]
    basis: str
    """as `Estimate.basis`; `measured` if this very plan was probed on such a card"""


def on_host(plan: Plan, estimate: Estimate | None) -> Iterator[Check]:
    """Checks host RAM against what this process may use (with its cgroup limit), and pinned RAM against the limit for
    locked memory."""
    if estimate is None:
        return
    ram, need = doctor.host_ram(), estimate.host_ram_bytes
    most = min(ram["limit_bytes"] or ram["total_bytes"], ram["total_bytes"])
    limit = " (the limit of this container, service or job)" if ram["limit_bytes"] else ""
    if need > most:
        fault = f"the plan needs {format_gib(need)} of host RAM, but this machine gives {format_gib(most)}{limit}"
        fix = f"plan for it: `vplan suggest {plan.job.model} --gpu {plan.machine.gpu} --host-ram {gib(most):.0f}GiB`"
        yield Check("host RAM", "error", fault, fix, SHORT)
    elif need > ram["available_bytes"]:
        fault = f"{format_gib(ram['available_bytes'])} of host RAM are free, but the plan needs {format_gib(need)}"
        yield Check("host RAM", "warning", fault, "stop other programs, or use less memory")
    else:
        yield Check("host RAM", "ok", f"{format_gib(need)} needed, {format_gib(ram['available_bytes'])} available")
    pinned, limited = estimate.host.pinned_bytes if estimate.host else 0, memory_lock_bytes()
    if not plan.strategy.swap_blocks:  # what processes share, each of them pins
        pinned //= plan.machine.gpus
    if pinned and limited is not None and pinned > limited:
        # NVIDIA's driver does not count pinned memory towards this limit; RDMA drivers do.
        what = f"each process pins up to {format_gib(pinned)} but may lock only {format_gib(limited)}"
        fix = "nothing to do unless pinning fails; then: ulimit -l unlimited (docker: --ulimit memlock=-1)"
        yield Check("pinned RAM", "note", what, fix)


def memory_lock_bytes() -> int | None:
    """Bytes a process may lock (`ulimit -l`); None if unlimited."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _on_disk(nbytes: int) -> str:
    """A size in decimal units, as disks are sold; in MB below 10 MB, so that tiny models do not show 0.00 GB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**7 else f"{nbytes / 1e6:.2f} MB"


def on_disk(
    output: Path, estimate: Estimate | None, keep: int, cache_bytes: int, lora_files: int = 0
) -> Iterator[Check]:
    """Checks disk space for the kept checkpoints, the one being written, and the cache of encoded data; and warns if
    the LoRA files of all ``lora_files`` checkpoints may need more. The two LoRA files of a checkpoint take about as
    much as the adapter with its two optimizer states."""
    if estimate is None:
        return
    try:
        there = next(place for place in (output.absolute(), *output.absolute().parents) if place.exists())
        free = shutil.disk_usage(there).free
    except OSError as error:  # also for a parent folder without permission to enter
        yield Check("disk", "error", f"cannot access {output}: {error.strerror}", "choose another --output", WRONG)
        return
    need = (keep + 1) * estimate.disk_bytes + cache_bytes
    parts = f"{keep + 1} checkpoints of {_on_disk(estimate.disk_bytes)}"
    parts += f", {_on_disk(cache_bytes)} of encoded data" if cache_bytes else ""
    if need > free:
        fault = f"{_on_disk(free)} are free at {there}, but the run writes {_on_disk(need)} ({parts})"
        yield Check("disk", "error", fault, "free space, keep fewer checkpoints, or choose another --output", SHORT)
    elif need + lora_files * estimate.disk_bytes > free:
        most = _on_disk(lora_files * estimate.disk_bytes)
        fault = f"LoRA files of {lora_files} checkpoints take up to {most}; {_on_disk(free - need)} are left for them"
        yield Check("disk", "warning", fault, "free space, or write fewer checkpoints: --checkpoint-every")
    else:
        yield Check("disk", "ok", f"{_on_disk(need)} needed ({parts}), {_on_disk(free)} free")


def versions(plan: Plan, cards: list[JsonObject]) -> Iterator[Check]:
    """Checks that torch, diffusers, the driver and the GPU are those the plan was measured with; a note if it was never
    measured."""
    if not plan.evidence:
        yield Check("versions", "note", "the plan has not been measured yet", "test it here: --probe")
        return
    env = plan.evidence[-1].env
    if env.is_virtual:
        words = f"proved in rehearsal with torch {env.torch} and diffusers {env.diffusers}, and not measured yet"
        yield Check("versions", "note", f"the plan was {words}", "test it here: --probe")
        return
    driver = doctor.gpus()[0]["version"] if cards else None
    now = {"torch": doctor.package_version("torch"), "diffusers": doctor.package_version("diffusers"), "driver": driver}
    now["gpu"] = cards[0]["name"] if cards else None
    differs = [
        f"{name} {getattr(env, name)}, here {here}" for name, here in now.items() if here and here != getattr(env, name)
    ]
    if differs:
        yield Check("versions", "warning", f"the plan was measured with {'; '.join(differs)}", "test it here: --probe")
    else:
        yield Check("versions", "ok", f"as measured: torch {env.torch}, diffusers {env.diffusers}, {env.gpu}")


def on_data(plan: Plan, sources: Sequence[DataSource], skip_bad: bool) -> tuple[JsonObject, list[Check]]:
    """Checks the clips of the data against the plan's shapes. Only headers and first frames are read."""
    profile = lookup.model(plan.job.model)
    for package in ("av", "PIL", "numpy"):
        if importlib.util.find_spec(package) is None:
            fix = "install it: pip install 'vplan[train]'"
            return {}, [Check("data", "error", f"reading clips needs {package}", fix, WRONG)]
    from planner.dataset.scan import read

    try:
        dataset = read(sources, profile, plan.job, skip_bad=skip_bad)
    except VplanError as error:
        return {}, [Check("data", "error", error.message, error.fix, error.exit_code)]
    shapes = [sample.bucket for sample in dataset.samples]
    largest = max(shapes, key=lambda shape: shape.pixels)
    most = max(plan.job.shapes, key=lambda shape: shape.pixels)
    cache = sum(sample_bytes(profile, plan.job.replace(**_size(shape))) for shape in shapes)
    words = f"{len(shapes)} samples; the largest trains at {largest.words}"
    checks = [Check("data", "ok", words)]
    if _size(largest) != _size(most):
        what = f"no sample fills the plan's largest shape {most.words}: the largest is {largest.words}"
        checks = [Check("data", "note", f"{len(shapes)} samples; {what}", "plan for that shape: it needs less")]
    checks += [Check("data", "note", note) for note in dataset.notes]
    checks += [Check("data", "warning", f"skipped: {fault}") for fault in dataset.skipped[:5]]
    return {"samples": len(shapes), "skipped": len(dataset.skipped), "cache_bytes": cache}, checks


def _size(shape: Any) -> dict[str, int]:
    return {"frames": shape.frames, "height": shape.height, "width": shape.width}


def sample_bytes(profile: ModelProfile, job: Job) -> int:
    """Approximate bytes of one encoded sample on disk: its latents, a condition of the same size, and its embedded
    caption or sound.

    Counts four bytes per number although most plans store two: better to overestimate than to fill the disk.
    """
    atoms = grid(profile, job.replace(buckets=()))
    latents = profile.vae.latent_channels
    for atom, patch in zip("FHW", profile.shape.patch, strict=True):
        latents *= atoms[atom] * patch
    width = max((profile.config.get(key) or 0 for key in TEXT_WIDTHS), default=0)
    prompts = atoms["F"] if profile.inputs.get("sound") else 1  # sound is embedded for each latent frame
    return 4 * (2 * latents + prompts * atoms["T"] * width)
