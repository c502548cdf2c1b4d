"""What this machine has that training needs: cards, driver, packages, memory, disk. Looked at, never touched.

Nothing here imports torch or makes a CUDA context: cards are asked through NVML, packages through their metadata. What
is found holds no host name, no user's name and no path, and of the environment only the four variables in `VARIABLES`:
it is meant to be pasted into a bug report.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pynvml

import planner
import profiles
from planner.catalog import card_lookup, user_data
from planner.errors import VplanError
from planner.hardware import nvml
from planner.schema import JsonObject
from planner.tape.packs import Pack
from planner.units import GIB

PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "deepspeed",
    "optuna",
    "safetensors",
    "av",
    "pillow",
    "xformers",
    "flash-attn",
    "triton",
)
TAPE_LIBRARIES = ("torch", "diffusers", "peft")
"""What a tape was recorded with, by its own account."""
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")
"""The environment variables that change how much memory a run takes, or which card it runs on."""


def examine() -> JsonObject:
    """Everything about this machine, as JSON values under stable keys; a value that cannot be read is None."""
    driver, cards = gpus()
    return {
        "vplan": planner.__version__,
        "system": system(),
        "host_ram": host_ram(),
        "disks": disks(),
        "driver": driver,
        "gpus": cards,
        "packages": {name: package_version(name) for name in PACKAGES},
        "torch_build": torch_build(),
        "expandable_segments": sys.platform == "linux",
        "environment": {name: os.environ[name][:200] for name in VARIABLES if name in os.environ},
        "tapes": tapes(),
    }


def gpus() -> tuple[JsonObject, list[JsonObject]]:
    """(driver, cards) by NVML. ``driver`` has versions, or `error` when NVML does not answer; each card has name, sizes
    in bytes, ECC, MIG, power limit and processes."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"version": None, "cuda": None, "error": str(error)}, []
    try:
        cuda = _ask(pynvml.nvmlSystemGetCudaDriverVersion)
        driver = {
            "version": _text(_ask(pynvml.nvmlSystemGetDriverVersion)),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            "error": None,
        }
        return driver, [_card(index) for index in range(_ask(pynvml.nvmlDeviceGetCount) or 0)]
    finally:
        pynvml.nvmlShutdown()


SCHEDULERS = {"sbatch": "SLURM_JOB_ID", "qsub": "PBS_JOBID", "bsub": "LSB_JOBID"}
"""Commands that submit a job (Slurm, PBS, LSF), and the variable that each sets inside one."""


def submits_with() -> str | None:
    """The command that submits jobs from here; None where there is none, and inside a job."""
    if any(os.environ.get(variable) for variable in SCHEDULERS.values()):
        return None
    return next((command for command in SCHEDULERS if shutil.which(command)), None)


def visible() -> tuple[JsonObject, list[JsonObject]]:
    """The same of the cards that CUDA shows a process started here, in its order: `CUDA_VISIBLE_DEVICES` may name some,
    by number or by UUID, MIG slices too. What stands behind one that is not there does not count, as CUDA has it.

    NVML counts from the bus; so do our own processes (`planner.launch.launch.environment`), and CUDA among like cards.
    """
    driver, cards = gpus()
    wanted_cards = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted_cards is None or driver["error"]:
        return driver, cards
    shown: list[JsonObject] = []
    pynvml.nvmlInit()
    try:
        for word in filter(None, (word.strip() for word in wanted_cards.split(","))):
            handle = _handle_of(word) if word[:4] in ("GPU-", "MIG-") else None
            if word.isascii() and word.isdigit() and int(word) < len(cards):
                shown.append(cards[int(word)])
            elif handle is not None:
                shown.append(_card(len(shown), handle))
            else:
                break
    finally:
        pynvml.nvmlShutdown()
    return driver, shown


def _handle_of(uuid: str) -> Any:
    """The handle of a card or slice by its UUID. As CUDA has it, the beginning of a card's is enough where no other
    begins so (CUDA Programming Guide, environment variables); None when there is none, or more than one."""
    handle = _ask(pynvml.nvmlDeviceGetHandleByUUID, uuid)
    if handle is not None or not uuid.startswith("GPU-"):
        return handle
    cards = [_ask(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(_ask(pynvml.nvmlDeviceGetCount) or 0)]
    matches = [card for card in cards if (_text(_ask(pynvml.nvmlDeviceGetUUID, card)) or "").startswith(uuid)]
    return matches[0] if len(matches) == 1 else None


def _card(index: int, handle: Any = None) -> JsonObject:
    """One card. A number that this card or driver does not tell is null."""
    handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index) if handle is None else handle
    if handle is None:
        return {"index": index, "name": None}
    memory = _memory(handle)
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    ecc, mig = _ask(pynvml.nvmlDeviceGetEccMode, handle), _ask(pynvml.nvmlDeviceGetMigMode, handle)
    limit = _ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    name = _text(_ask(pynvml.nvmlDeviceGetName, handle))
    return {
        "index": index,
        "name": name,
        "known_as": _catalog_name(name or "", memory.get("total"), ecc and bool(ecc[0])),
        "compute_capability": ".".join(map(str, capability)) if capability else None,
        "total_bytes": memory.get("total"),
        "reserved_bytes": memory.get("reserved"),
        "used_bytes": memory.get("used"),
        "free_bytes": memory.get("free"),
        "ecc": None if ecc is None else bool(ecc[0]),
        "mig": None if mig is None else bool(mig[0]),
        "power_limit_watts": None if limit is None else limit / 1000,
        "processes": _processes(handle),
    }


def _memory(handle: Any) -> dict[str, int]:
    """Version 2 tells the driver's reserve apart from what is in use; old drivers know only version 1."""
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, version=pynvml.nvmlMemory_v2)
    memory = memory or _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    names = ("total", "reserved", "used", "free")
    return {name: int(getattr(memory, name)) for name in names if memory is not None and hasattr(memory, name)}


def _catalog_name(name: str, total_bytes: int | None, ecc: bool | None) -> str | None:
    """Our name for the card that NVML calls so; None when we have no figures for it.

    NVML's name leaves the memory out where a card is sold with two sizes, and error correction always.
    """
    with_memory = f"{name} {round((total_bytes or 0) / GIB)}GB"
    for text in (with_memory, name):
        with contextlib.suppress(VplanError):
            name_of_ours = card_lookup.gpu(text).name
            with_ecc = f"{name_of_ours}-ecc"
            return with_ecc if ecc and with_ecc in card_lookup.gpu_names() else name_of_ours
    return None


def _processes(handle: Any) -> list[JsonObject]:
    """Who holds memory of a card, as far as it can be seen from here: containers and Windows hide some of it."""
    bytes_by_pid: dict[int, int | None] = _ask(nvml.processes, handle) or {}
    return [
        {"pid": pid, "name": _process_name(pid), "used_bytes": nbytes} for pid, nbytes in sorted(bytes_by_pid.items())
    ]


def _process_name(pid: int) -> str | None:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return None


def _ask(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """NVML's answer, or None where this card, driver or system has none."""
    try:
        return function(*arguments, **keywords)
    except pynvml.NVMLError:
        return None


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def package_version(name: str) -> str | None:
    """The installed version by the package's metadata; None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_release() -> str | None:
    """The installed torch as 2.11: what a step takes is another release's only when this is."""
    version = package_version("torch")
    return ".".join(version.split("+")[0].split(".")[:2]) if version else None


def torch_build() -> JsonObject | None:
    """The platform (`cuda`, `rocm`, `cpu`) and CUDA version of the installed torch, from its version file: importing
    torch takes seconds. None without torch."""
    try:
        path = importlib.metadata.distribution("torch").locate_file("torch/version.py")
        text = Path(str(path)).read_text(encoding="utf-8")
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    versions = dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *'([^']+)'", text, re.MULTILINE))
    return {
        "for": "cuda" if "cuda" in versions else "rocm" if "hip" in versions else "cpu",
        "cuda": versions.get("cuda"),
    }


def system() -> JsonObject:
    """Operating system, Python and cores; whether it is WSL or a container."""
    release = platform.release()
    return {
        "os": _os_name(),
        "kernel": release,
        "machine": platform.machine(),
        "wsl": "microsoft" in release.lower(),
        "container": in_container(),
        "python": platform.python_version(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "threads_allowed": len(os.sched_getaffinity(0)) if sys.platform == "linux" else psutil.cpu_count(),
    }


def _os_name() -> str:
    if sys.platform != "linux":
        return f"{platform.system()} {platform.release()}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return "Linux"


def in_container() -> bool:
    """Whether this is a container, by the marks that Docker, Podman, LXC and Kubernetes leave."""
    if {"container", "KUBERNETES_SERVICE_HOST"} & os.environ.keys():
        return True
    if any(os.path.exists(mark) for mark in ("/.dockerenv", "/run/.containerenv")):
        return True
    return bool(re.search(r"docker|kubepods|containerd|lxc", _read("/proc/1/cgroup")))


def host_ram() -> JsonObject:
    """Host RAM and swap, bytes; `limit_bytes` is the container's, service's or job's own limit, where there is one.

    What is available is so under that limit too.
    """
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    groups = [group for group in _control_groups() if group["limit_bytes"] < memory.total]
    return {
        "total_bytes": memory.total,
        "available_bytes": max(0, min([memory.available, *(group["free_bytes"] for group in groups)])),
        "limit_bytes": min((group["limit_bytes"] for group in groups), default=None),
        "swap_total_bytes": swap.total,
        "swap_free_bytes": swap.free,
    }


GROUPS, OWN_GROUPS = "/sys/fs/cgroup", "/proc/self/cgroup"


def _control_groups() -> list[dict[str, int]]:
    """Limits of the control groups this process is in, from its own (a Slurm job's, a service's) to the root.

    Both versions (Linux Documentation: cgroup-v1/memory.rst, cgroup-v2.rst). Pages of files (`inactive_file`) are given
    back when memory is wanted, so they count as free.
    """
    groups = []
    for line in _read(OWN_GROUPS).splitlines():
        _, names, place = line.split(":", 2)
        if names in ("", "memory"):
            root, limit, use = (
                (GROUPS, "memory.max", "memory.current")
                if not names
                else (f"{GROUPS}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            )
            for group in (place, *map(str, Path(place).parents)):
                maximum, usage = _read(f"{root}{group}/{limit}").strip(), _read(f"{root}{group}/{use}").strip()
                if maximum.isdigit():
                    files = re.search(r"^(?:total_)?inactive_file (\d+)", _read(f"{root}{group}/memory.stat"), re.M)
                    in_use = int(usage or 0) - (int(files[1]) if files else 0)
                    groups.append({"limit_bytes": int(maximum), "free_bytes": int(maximum) - in_use})
    return groups


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def disks() -> dict[str, JsonObject]:
    """Room, bytes: where you are, where your own models are kept, and what data loaders share."""
    places = {"working": Path.cwd(), "data": user_data.folder(), "shared": Path("/dev/shm")}
    rooms = {}
    for name, path in places.items():
        existing = next((place for place in (path, *path.parents) if place.exists()), None)
        if existing is not None and (path.exists() or name == "data"):
            usage = psutil.disk_usage(str(existing))
            rooms[name] = {"free_bytes": usage.free, "total_bytes": usage.total}
    return rooms


def tapes() -> JsonObject:
    """The library versions that the bundled tapes were recorded with, and which libraries are installed here in another
    version."""
    recorded: dict[str, set[str]] = {name: set() for name in TAPE_LIBRARIES}
    for path in sorted(profiles.TAPES.glob("*.zip")):
        for versions in Pack.read(path).versions():
            for name in recorded.keys() & versions.keys():
                recorded[name].add(versions[name])
    installed = {name: (package_version(name) or "").split("+")[0] for name in TAPE_LIBRARIES}
    differs = [name for name in TAPE_LIBRARIES if installed[name] and recorded[name] - {installed[name]}]
    return {
        "recorded_with": {name: sorted(versions) for name, versions in recorded.items()},
        "differs": differs,
        "own_models": len(user_data.model_names()),
    }
