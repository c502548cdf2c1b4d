"""A diffusers model as it lies in a folder: its config files, read as data that nobody vouches for.

Nothing here imports what a config names, follows a path that stands in one, or reads weights. A config is refused
before it is built: too large a file, not JSON, a class we do not know, numbers no model has.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from planner.errors import VplanError, quoted

Config = dict[str, Any]

DENOISERS = ("transformer", "unet")
"""Folders of a pipeline that hold the part that is trained."""
SECOND_EXPERT = "transformer_2"
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder")
CONFIG = "config.json"

MAX_FILE_BYTES = 2**20
"""Published configs have 0.3 to 10 kB."""
MAX_INTEGER = 10_000_000
"""The largest number we know in a published config is Krea 2's rope_theta of 5,000,000."""
MAX_FLOAT = 1e12
MAX_BLOCKS = 512
"""Layers named by one key, and all of them together; published models have up to 60."""
MAX_PER_LEVEL = 16
"""Levels of a UNet, and layers inside each of its blocks (SDXL: 10): they multiply."""
MAX_UNET_BLOCKS = 256
"""SDXL has 60 by this count. A UNet's levels all differ, so none is left out when it is recorded."""
LEVELS = ("block_types", "block_out_channels", "_per_block")
"""How the lists are called that have an entry for every level of a UNet or VAE."""
MAX_VALUES = 10_000
MAX_DEPTH = 6
NOT_ARCHITECTURE = ("quantization_config",)
"""Known keys of a config.json that say how weights are stored, not what the model is."""


class Source(NamedTuple):
    """What a diffusers folder or config.json says of a model: its place, class and configs."""

    origin: str
    """absolute path of the transformer's or UNet's config.json"""
    folder: str
    """name of the model's folder, for a model that was given no other"""
    class_name: str
    config: Config
    vae: Config | None = None
    encoders: Mapping[str, Config] = {}
    """by folder, those that are there"""
    is_pipeline: bool = False
    has_second_expert: bool = False


@functools.cache
def installed_classes() -> frozenset[str]:
    """The transformers and UNets of the installed diffusers, read from its source and not imported; none where there is
    no diffusers."""
    spec = importlib.util.find_spec("diffusers")
    if spec is None or spec.origin is None:
        return frozenset()
    files = (Path(spec.origin).parent / "models" / room / "__init__.py" for room in ("transformers", "unets"))
    imports = (node for file in files if file.is_file() for node in ast.walk(ast.parse(file.read_text("utf-8"))))
    names = {alias.name for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names}
    return frozenset(name for name in names if name[:1].isupper())


def locate(text: str) -> tuple[Path, Path] | None:
    """(the folder that nothing may lead out of, the config.json in it) of a path; None when it is no model's.

    A pipeline's folder has `transformer/config.json` or `unet/config.json`, a component's its own config.json.
    """
    if not text or len(text) > 4096 or "\0" in text:
        return None
    path = Path(text).expanduser()
    try:
        if path.is_file():
            return (path.resolve().parent, path.resolve()) if path.suffix == ".json" else None
        if path.is_dir():
            root = path.resolve()
            places = (*(root / part / CONFIG for part in DENOISERS), root / CONFIG)
            return next(((root, place) for place in places if os.path.lexists(place)), None)
    except OSError as error:
        raise VplanError(f"cannot read {quoted(text)}: {error.strerror}", "choose a readable folder") from None
    return None


def is_path(text: str) -> bool:
    """Whether a text is rather a path than a name: it has a separator, a `~` in front or ends like a file."""
    return "/" in text or os.sep in text or text.startswith(("~", ".")) or text.endswith(".json")


def read_source(text: str, classes: Iterable[str], class_name: str | None = None) -> Source:
    """What the folder or config.json at a path says, checked; a VplanError for anything else.

    `classes` are the diffusers classes that can be recorded; `class_name` is one that the user named instead.
    """
    location = locate(text)
    if location is None:
        fix = "pass a diffusers folder (with transformer/ or unet/, or a config.json), or the config.json itself"
        raise VplanError(f"no model config.json at {quoted(text)}", fix)
    root, place = location
    config = read_config(place, root)
    class_name = class_name or _class_of(config, place, classes)
    check_values(config, _relative(place, root))
    if place.parent == root:
        return Source(str(place), _called(root), class_name, config)
    parts = {part: read_config(root / part / CONFIG, root) for part in ("vae", *ENCODERS) if _has(root, part)}
    for part, part_config in parts.items():
        check_values(part_config, f"{part}/{CONFIG}", may_be_negative=part != "vae")
    vae = parts.pop("vae", None)
    return Source(str(place), _called(root), class_name, config, vae, parts, True, _has(root, SECOND_EXPERT))


def _called(folder: Path) -> str:
    """The name of a model's folder, also where its transformer's is given; a snapshot in a Hugging Face cache is called
    by a number, its repository is not."""
    if folder.name in (*DENOISERS, SECOND_EXPERT):
        folder = folder.parent
    return folder.parent.parent.name.rpartition("--")[2] if folder.parent.name == "snapshots" else folder.name


def has_name(folder: Path, model: str) -> bool:
    """Whether a folder's own name, that of its repository, or of what it links to has a model's name in it."""
    wanted, *keys = (
        re.sub(r"[^a-z0-9.]", "", text.lower()) for text in (model, _called(folder), _called(folder.resolve()))
    )
    return any(wanted in key for key in keys)


def _has(root: Path, part: str) -> bool:
    return os.path.lexists(root / part / CONFIG)


def _relative(place: Path, root: Path) -> str:
    return place.relative_to(root).as_posix()


def read_config(place: Path, root: Path) -> Config:
    """The JSON object in a config file that lies under `root` (links included). Raises a VplanError that says what the
    file is otherwise."""
    name = _relative(place, root)
    try:
        real = Path(os.path.realpath(place, strict=True))  # `resolve` ends a loop with an error of its own
        if not any(real.is_relative_to(allowed) for allowed in allowed_roots(root)):
            raise VplanError(f"{name} points outside its folder", "replace it with a copy of the file it points to")
        if not real.is_file():
            raise VplanError(f"{name} is not a file", "pass the config.json of a diffusers model")
        with real.open("rb") as file:
            # Never more than the limit, whatever size the file claims; one byte more shows that it is larger.
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise VplanError(f"cannot read {name}: {error.strerror}", "check that it exists and is readable") from None
    if len(raw) > MAX_FILE_BYTES:
        raise VplanError(f"{name} is larger than any config (over 1 MiB)", "pass the config.json, not the weights")
    try:
        config = json.loads(raw.decode("utf-8-sig"), parse_constant=_not_finite)
    except VplanError as error:
        raise VplanError(f"{name}: {error.message}", error.fix) from None
    except UnicodeDecodeError:
        raise VplanError(f"{name} is not text", "pass the config.json of a diffusers model") from None
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f" (line {line})" if line else ""
        raise VplanError(f"{name} is not JSON, or is incomplete{where}", "download the file again") from None
    if not isinstance(config, dict):
        raise VplanError(f"{name} does not hold a JSON object", "name the config.json of a diffusers model")
    return config


def allowed_roots(root: Path) -> Iterator[Path]:
    """Folders a file of `root` may lie in: its own; in a Hugging Face cache the blobs its snapshots are links to."""
    yield root
    for parent in (root, *root.parents):
        if parent.name == "snapshots" and parent.parent.name.startswith(("models--", "datasets--")):
            yield parent.parent / "blobs"


def _not_finite(text: str) -> NoReturn:
    raise VplanError(f"{text} is not a number", "write a finite number")


def _class_of(config: Config, place: Path, classes: Iterable[str]) -> str:
    """The config's class, which must be one of those: a name from a file is never looked up anywhere else."""
    name = config.get("_class_name")
    # `auto_map` names Python files that diffusers would import.
    if "auto_map" in config:
        fix = "if the model is one of diffusers' own classes, remove auto_map from a copy of the file"
        raise VplanError(f"{place.name} refers to custom code (auto_map), which is never run", fix)
    if not isinstance(name, str):
        fix = "pass the config.json of a transformer or UNet of diffusers"
        raise VplanError(f"{place.name} has no _class_name: not the config of a diffusers model", fix)
    if name not in classes:
        # The nearest name would be of another model: of Wan's own WanModel it is a UNet.
        fix = "pass the model in diffusers format (often named -Diffusers); a newer diffusers may have the class"
        fault = f"class {quoted(name)} cannot be recorded: the installed diffusers has no such transformer or UNet"
        raise VplanError(fault, fix)
    return name


def architecture(config: Config) -> Config:
    """A config without the keys that do not describe the architecture: diffusers' private ones, which also hold paths
    and versions, and how weights are stored."""
    return {key: value for key, value in config.items() if not key.startswith("_") and key not in NOT_ARCHITECTURE}


def check_values(config: Config, where: str, *, may_be_negative: bool = False) -> None:
    """Raises a VplanError for a value that no model has, before anything is built from it.

    Time and memory of a build grow with what stands here, so numbers, layers and nesting have limits.
    """
    blocks = 0
    counts: Counter[str] = Counter()
    for key, value, depth in _leaves(architecture(config)):
        counts[key] += 1
        if counts.total() > MAX_VALUES or depth > MAX_DEPTH:
            raise VplanError(f"{where} holds more than any config", "pass the config.json of a diffusers model")
        if counts[key] > MAX_PER_LEVEL and key.endswith(LEVELS):
            raise VplanError(f"{where}: {key} has more levels than any model", "correct the file")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if isinstance(value, float) and not (math.isfinite(value) and abs(value) <= MAX_FLOAT):
            raise VplanError(f"{where}: {key} {quoted(value)} is out of range", "correct the file")
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            fault = f"{where}: {key} {quoted(value)} is larger than any model's"
            raise VplanError(fault, f"correct the file: {MAX_INTEGER} at most")
        if isinstance(value, int) and value < 0 and not may_be_negative:
            raise VplanError(f"{where}: {key} {value} is negative", "correct the file")
        most = _most(key)
        blocks += int(value) if most else 0
        if most and max(value, blocks if most == MAX_BLOCKS else 0) > most:
            fault = f"{where}: {key} {quoted(value)} is deeper than any model"
            raise VplanError(fault, f"correct the file: {most} at most")
    if _unet_blocks(config) > MAX_UNET_BLOCKS:
        fault = f"{where}: its levels, layers and transformer blocks multiply to more than {MAX_UNET_BLOCKS}"
        raise VplanError(fault, "correct the file")


def _most(key: str) -> int | None:
    """The most layers that a key may ask for; None for a key that counts no layers."""
    name = key.lower()
    if name.endswith("_per_block"):
        return MAX_PER_LEVEL
    counts = name.startswith(("num_", "n_", "depth")) or name in ("num_layers", "layers")
    return MAX_BLOCKS if counts and any(word in name for word in ("layer", "depth", "block")) else None


def _unet_blocks(config: Config) -> int:
    """How many blocks a UNet or VAE has at most: levels, times layers, times what each of them holds."""

    def numbers(key: str) -> list[int]:
        return [leaf for _, leaf, _ in _leaves(config.get(key)) if type(leaf) is int]

    lists = [value for key, value in config.items() if key.endswith(LEVELS) and isinstance(value, list)]
    levels = max(map(len, lists), default=1)
    return math.prod([levels, *(max(numbers(key), default=1) for key in config if key.endswith("_per_block"))])


def _leaves(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, Any, int]]:
    """(key, value, nesting) of every plain value."""
    if depth > MAX_DEPTH:
        yield key, None, depth
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, str(name)[:60], depth + 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, key, depth + 1)
    else:
        yield key, value, depth


def check_kinds(config: Config, configs: Iterable[Config], where: str, table: str = "") -> None:
    """Raises a VplanError for text where all `configs` of the class have numbers, and the like.

    Null is allowed everywhere, and lists where there are single values: diffusers takes both. A key that no known
    config has is not judged here, nor within a table (``vision_config``) whose other keys are known. ``table``: how the
    names of keys begin in messages.
    """
    known: dict[str, list[Any]] = {}
    for config_of_class in configs:
        for key, value in config_of_class.items():
            if value is not None:
                known.setdefault(key, []).append(value)
    for key, value in config.items():
        values = known.get(key, [])
        if isinstance(value, dict) and values and all(isinstance(one, dict) for one in values):
            check_kinds(value, values, where, f"{table}{key}.")
            continue
        allowed = set().union(*map(_kinds, values))
        if len(allowed) == 1 and not _kinds(_as_integer(value)) <= allowed | _ALSO_ALLOWED.get(min(allowed), set()):
            raise VplanError(f"{where}: {table}{key} {quoted(value)} is not {min(allowed)}", "correct the file")


_ALSO_ALLOWED = {"a number": {"a whole number"}, "a whole number": set(), "a text": set(), "true or false": {"a text"}}
"""What else may stand where all known values are of one kind: a switch that later became a choice has a name."""


def _kinds(value: Any) -> set[str]:
    """What kinds of plain values there are in a value."""
    names = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}
    return {names[type(leaf)] for _, leaf, _ in _leaves(value) if leaf is not None}


def _as_integer(value: Any) -> Any:
    """4.0 is as whole as 4: JSON written elsewhere has both."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
