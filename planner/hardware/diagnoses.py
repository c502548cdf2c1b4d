"""What is wrong or missing for training on the machine that `planner.hardware.doctor` looked at, and what mends it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from planner.catalog import card_lookup
from planner.catalog.card_limits import NEW_ALLOC_CONF_FROM
from planner.schema import JsonObject
from planner.units import GIB, format_gib

ERROR, WARNING, NOTE = "error", "warning", "note"
"""No training here as it stands; it may fail or take more than it need; good to know."""

LEAST = {
    "torch": "2.9",
    "diffusers": "0.35",
    "transformers": "4.55",
    "accelerate": "1.10",
    "peft": "0.17",
    "bitsandbytes": "0.46",
    "safetensors": "0.5",
    "av": "15.0",
    "pillow": "10.0",
}
"""The oldest versions that training works with, as the extra `train` of pyproject.toml says."""
OPTIONAL = {"deepspeed": "ZeRO and offload across several GPUs", "optuna": "the search by probes"}
HELD_BYTES = round(0.3 * GIB)
"""In use by others on an idle card with a desktop or none: less is not worth a word (the reserve of `--gpu auto`)."""
DISK_BYTES = 60 * 10**9
"""The weights of a 14B model and its text encoder in bf16, and room for a checkpoint."""
TAPES_BYTES = 100 * 10**6
"""A model's tapes take less than 1 MB; a disk this full is trouble anyhow."""
SHARED_BYTES = GIB
"""Docker gives /dev/shm 64 MiB, which data loader workers fill with a few clips."""
INSTALL = "pip install 'vplan[train]'"
EXPANDABLE = "expandable_segments:True"


class Finding(NamedTuple):
    """One diagnosis: how bad it is (error, warning, note), what was found, and the command or action that fixes it."""

    level: str
    what: str
    fix: str


def findings(facts: JsonObject) -> list[Finding]:
    """All diagnoses of what `doctor.examine` found, the most severe first."""
    rows = [*_cards(facts), *_packages(facts), *_allocator(facts), *_host(facts)]
    return sorted(rows, key=lambda finding: (ERROR, WARNING, NOTE).index(finding.level))


def _cards(facts: JsonObject) -> Iterator[Finding]:
    system, driver = facts["system"], facts["driver"]
    if driver["error"]:
        fix = "install the NVIDIA driver, then run `nvidia-smi`"
        if system["wsl"]:
            fix = "install the NVIDIA driver on Windows (not inside WSL), then `wsl --shutdown`"
        elif system["container"]:
            fix = "start the container with GPUs, as in docker run --gpus all"
        yield Finding(ERROR, f"no NVIDIA driver responds: {driver['error']}", fix)
        return
    if not facts["gpus"]:
        yield Finding(ERROR, "the driver responds but shows no GPU", "see `nvidia-smi -L`; in a container: --gpus all")
    visible = facts["environment"].get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        yield Finding(ERROR, "CUDA_VISIBLE_DEVICES hides all GPUs", "unset CUDA_VISIBLE_DEVICES")
    for card in facts["gpus"]:
        yield from _card(card)


def _card(card: JsonObject) -> Iterator[Finding]:
    name = f"GPU {card['index']} ({card['name']})"
    if card["name"] is None:
        yield Finding(WARNING, f"GPU {card['index']} does not respond", "check `nvidia-smi`: it may be broken")
        return
    used_bytes, free = card["used_bytes"], card["free_bytes"]
    if used_bytes is not None and used_bytes > HELD_BYTES:
        holders = sorted({process["name"] or "an invisible process" for process in card["processes"]})
        by = f" by {', '.join(holders)}" if holders else ""
        reserve = f"end that process, or plan around it: --reserve {used_bytes / GIB:.1f}GiB"
        yield Finding(WARNING, f"{name}: {format_gib(used_bytes)} are already in use{by}", reserve)
    if card["mig"]:
        budget = f"--gpu {free / GIB:.1f}GiB" if free else "--gpu with its memory"
        yield Finding(NOTE, f"{name} is split into MIG slices", f"plan for the slice: {budget}")
    if card["known_as"] is None and card["total_bytes"]:
        budget = f"--gpu {(card['total_bytes'] - (card['reserved_bytes'] or 0)) / GIB:.2f}GiB"
        yield Finding(NOTE, f"{name}: this card is not known", f"pass its memory: {budget}")
    capability = card["compute_capability"]
    if capability and tuple(map(int, capability.split("."))) < (8, 0):
        fix = "plan with --compute-dtype fp16"
        yield Finding(WARNING, f"{name}: bf16 is emulated on compute capability {capability}", fix)


def _packages(facts: JsonObject) -> Iterator[Finding]:
    packages, build, driver = facts["packages"], facts["torch_build"], facts["driver"]
    missing = [name for name in LEAST if packages[name] is None]
    if missing:
        yield Finding(ERROR, f"not installed: {', '.join(missing)} (estimates need none of them)", INSTALL)
    for name, least in LEAST.items():
        if packages[name] and _numbers(packages[name]) < _numbers(least):
            fix = f"pip install -U '{name}>={least}'"
            yield Finding(
                WARNING,
                f"{name} {packages[name]} is older than training is tested with ({least})",
                fix,
            )
    for name, feature in OPTIONAL.items():
        if packages[name] is None and facts["system"]["os"][:7] != "Windows":
            yield Finding(NOTE, f"{name} is not installed: {feature} will not work", f"pip install {name}")
    if build and build["for"] != "cuda" and facts["gpus"]:
        fix = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
        yield Finding(ERROR, f"the installed torch was built for {build['for']}, but there is an NVIDIA GPU", fix)
    # Only the major version counts: within one, CUDA is compatible with older drivers (CUDA Compatibility, minor
    # version compatibility).
    if build and build["cuda"] and driver["cuda"] and _numbers(build["cuda"])[0] > _numbers(driver["cuda"])[0]:
        fault = f"torch was built for CUDA {build['cuda']}; this driver supports up to {driver['cuda']}"
        yield Finding(ERROR, fault, "update the driver, or install a torch for an older CUDA")
    differs = facts["tapes"]["differs"]
    if differs:
        recorded = facts["tapes"]["recorded_with"]
        versions = ", ".join(f"{name} {packages[name]} (recorded: {', '.join(recorded[name])})" for name in differs)
        fix = "if an estimate looks wrong: vplan record --check --variant step-lora-half-fp32-autocast-full-one"
        yield Finding(NOTE, f"installed versions differ from those the tapes were recorded with: {versions}", fix)


def _allocator(facts: JsonObject) -> Iterator[Finding]:
    environment = facts["environment"]
    old, new = environment.get("PYTORCH_CUDA_ALLOC_CONF"), environment.get("PYTORCH_ALLOC_CONF")
    torch = facts["packages"]["torch"]
    reads_new = torch is None or _numbers(torch) >= NEW_ALLOC_CONF_FROM
    values = [text for text in (new if reads_new else None, old) if text]
    if old is not None and new is not None and old != new:
        fix = "unset PYTORCH_CUDA_ALLOC_CONF"
        yield Finding(WARNING, "both allocator variables are set, to different values", fix)
    if not facts["expandable_segments"]:
        fix = "plan with --no-expandable-segments, or train on Linux or in WSL"
        yield Finding(NOTE, "this system's torch has no expandable segments: more memory is lost to fragmentation", fix)
    elif facts["gpus"] and not any(EXPANDABLE in text.replace(" ", "") for text in values):
        name = "PYTORCH_ALLOC_CONF" if new is not None and reads_new else "PYTORCH_CUDA_ALLOC_CONF"
        settings = ",".join([*values[:1], EXPANDABLE])
        fault = "expandable segments are off in this shell, but estimates assume them (--no-expandable-segments)"
        yield Finding(WARNING, fault, f"export {name}={settings}")


def _host(facts: JsonObject) -> Iterator[Finding]:
    memory, disks = facts["host_ram"], facts["disks"]
    names = [card["known_as"] for card in facts["gpus"] if card.get("known_as")]
    have = min(memory["limit_bytes"] or memory["total_bytes"], memory["total_bytes"])
    if names:
        assumed = card_lookup.installed_host_ram(card_lookup.gpu(names[0]), len(names))
        if have < assumed:
            fault = f"{format_gib(have)} of host RAM; plans assume {format_gib(assumed)} for such cards"
            yield Finding(NOTE, fault, f"pass --host-ram {have / GIB:.0f}GiB")
    if memory["limit_bytes"]:
        limit, total = format_gib(memory["limit_bytes"]), format_gib(memory["total_bytes"])
        fault = f"this process may use {limit} of the {total} of RAM"
        yield Finding(NOTE, fault, f"plan with it: --host-ram {memory['limit_bytes'] / GIB:.0f}GiB")
    if "working" in disks and (free := disks["working"]["free_bytes"]) < DISK_BYTES:
        fix = "train where there is space for weights and checkpoints"
        yield Finding(WARNING, f"{free / 1e9:.1f} GB are free on the disk of the current folder", fix)
    if "data" in disks and (free := disks["data"]["free_bytes"]) < TAPES_BYTES:
        fix = "free some space, or set VPLAN_HOME to another folder"
        yield Finding(WARNING, f"{free / 1e6:.0f} MB are free on the disk of your own models", fix)
    shared = disks.get("shared")
    if shared and facts["system"]["container"] and shared["total_bytes"] < SHARED_BYTES:
        fault = f"/dev/shm has {shared['total_bytes'] / 2**20:.0f} MiB: data loader workers will die with a bus error"
        yield Finding(WARNING, fault, "start the container with --shm-size 8g, or --ipc host")


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0): enough to say which is older."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
