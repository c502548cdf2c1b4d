"""Hollow checkpoints put where a command looks for weights, and taken away after."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from planner.catalog.diffusers_folder import CONFIG, check_values, read_config
from planner.errors import VplanError, quoted
from planner.rehearsal.hollow import repositories as hub
from planner.rehearsal.hollow.hollow_data import HollowData, write_data
from planner.rehearsal.hollow.hollow_request import ARCHIVES, PIPELINE, WEIGHTS, HollowRequest, dtype_of
from planner.rehearsal.hollow.published_checkpoints import published_checkpoints
from planner.rehearsal.hollow.repositories import ModelClass
from planner.rehearsal.hollow.tensor_files import WIDTHS, TensorEntry, write_indexed, write_safetensors, write_shards
from planner.rehearsal.hollow.tokenizer_files import write_tokenizer

WORKER = Path(__file__).resolve().parents[3] / "trainers" / "hollow" / "meta_worker.py"
WORKER_SECONDS = 600.0
TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn", "int64": "int64"}
_OURS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int64": "int64", "bool": "bool"}

ONE_FILE = 2**50
"""In a cache no model is cut into shards: diffusers asks the hub for their list even when it is offline
(diffusers 0.42.1, utils/hub_utils.py, _get_checkpoint_shard_files)."""

Environment = Mapping[str, str]


class _ModelFolder(NamedTuple):
    """A model to be written: a folder in the layout of its library, or one file."""

    place: Path
    model: ModelClass
    dtype: str | None
    """None: as the index of its shards says, else bf16"""
    most_shard_bytes: int | None = None
    """None: as its library cuts"""


@dataclass
class _Work:
    """What is to be written."""

    models: list[_ModelFolder] = field(default_factory=list)
    files: list[tuple[Path, list[TensorEntry]]] = field(default_factory=list)
    folders: list[tuple[Path, ModelClass, list[TensorEntry]]] = field(default_factory=list)
    """models whose tensors are listed in our profiles; their configs come from the library"""


@contextlib.contextmanager
def hollow_files(
    requests: Sequence[HollowRequest],
    python: str,
    folder: Path,
    environment: Environment,
    data: HollowData | None = None,
) -> Iterator[dict[str, str]]:
    """The files that `requests` ask for, and those of `data`, as long as the context lasts; gives the variables that
    lead to them.

    ``python``: the command's own, which builds models on the meta device; ``folder``: the run's own, for the cache.
    """
    if not requests and data is None:
        yield {}
        return
    cache = folder / "hub"
    asked = [request.place for request in requests if request.place is not None]
    places = [_Place(path) for path in (*asked, *(data.places if data else ()))]
    try:
        try:
            work = _Work()
            for request in requests:
                _plan(request, cache, work)
            _write(work, python, folder, environment)
            if data is not None:
                write_data(data, python, folder, environment)
        finally:
            for place in places:
                place.note()
        in_cache = [request.name for request in requests if request.place is None]
        yield _cache_variables(cache, environment) if in_cache else {}
    finally:
        for place in places:
            place.clear()


def hollow_places(requests: Sequence[HollowRequest], folder: Path) -> str:
    """Under which paths the hollow files of a run lie, as a list for an environment variable."""
    return os.pathsep.join(str(request.place or folder / "hub") for request in requests)


# ---- what is asked for


def _plan(request: HollowRequest, cache: Path, work: _Work) -> None:
    if request.place is not None and request.is_file:
        request.place.parent.mkdir(parents=True, exist_ok=True)
        if request.name in published_checkpoints():
            tensors = published_checkpoints()[request.name].tensors(dtype_of(request.place))
            work.files.append((request.place, tensors))
        else:
            work.models.append(_ModelFolder(request.place, _local_model(Path(request.name)), dtype_of(request.place)))
    elif request.name in hub.repositories():
        root = request.place or _snapshot(cache, request.name)
        _plan_repository(root, hub.repositories()[request.name], work, most=None if request.place else ONE_FILE)
    else:
        assert request.place is not None
        _plan_folder(Path(request.name), request.place, work)


def _plan_repository(root: Path, repository: hub.HollowRepository, work: _Work, most: int | None) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for folder, model in hub.models_of(repository).items():
        (root / folder).mkdir(exist_ok=True)
        checkpoint = hub.published_encoder(repository.models[folder], model)
        if checkpoint:
            work.folders.append((root / folder, model, checkpoint.tensors(repository.dtype)))
        else:
            work.models.append(_ModelFolder(root / folder, model, repository.dtype, most))
    for file, name in repository.files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        work.files.append((root / file, published_checkpoints()[name].tensors()))
    for file, config in repository.configs.items():
        hub.write_json(root / file, config)
    for folder, kind in repository.tokenizers.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        write_tokenizer(root / folder, kind)
        if not repository.pipeline:  # AutoTokenizer of transformers 5 reads which model it is for
            (root / folder / CONFIG).write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    if repository.pipeline:
        hub.write_pipeline_files(root, repository)


def _plan_folder(source: Path, place: Path, work: _Work) -> None:
    """Models that a folder describes and has no weights of; where `place` is another folder, they go there."""
    parts = [source]
    if (source / PIPELINE).is_file():
        parts = sorted(path.parent for path in source.glob(f"*/{CONFIG}"))
    missing = [part for part in parts if not any(path.suffix in WEIGHTS for path in part.iterdir())]
    if not missing:
        raise VplanError(f"--hollow {quoted(str(source))}: no weights are missing there", "leave this --hollow out")
    for part in missing:
        target = place if part == source or part.is_file() else place / part.relative_to(source)
        target.mkdir(parents=True, exist_ok=True)
        work.models.append(_ModelFolder(target, _local_model(part), None))


def _local_model(path: Path) -> ModelClass:
    """The model that a config.json describes. Nothing that it names is imported here."""
    root = (path.parent if path.is_file() else path).resolve()
    place = root / (path.name if path.is_file() else CONFIG)
    config = read_config(place, root)
    check_values(config, place.name, may_be_negative=True)
    name, library = config.get("_class_name"), "diffusers"
    if name is None:
        name, library = (config.get("architectures") or [None])[0], "transformers"
    if not isinstance(name, str) or not name.isidentifier():
        fix = "pass the config.json of a diffusers or transformers model"
        raise VplanError(f"{quoted(str(place))} names no class (_class_name or architectures)", fix)
    return ModelClass(library, name, config)


# ---- writing


def _write(work: _Work, python: str, folder: Path, environment: Environment) -> None:
    models = [*(item.model for item in work.models), *(model for _place, model, _tensors in work.folders)]
    archives = [(path, tensors) for path, tensors in work.files if path.suffix in ARCHIVES]
    answer = _ask(python, folder, environment, models, archives) if models or archives else {}
    answers = [answer["models"][str(number)] for number in range(len(models))]
    late = []
    for item, described in zip(work.models, answers, strict=False):
        tensors = _entries(described, item)
        if item.place.suffix in ARCHIVES:
            late.append((item.place, tensors))
        elif item.place.suffix in WEIGHTS:
            write_safetensors(item.place, tensors)
        else:
            _write_model(item.place, item.model, tensors, described["config"], item.most_shard_bytes)
    if late:
        _ask(python, folder, environment, [], late)
    for (place, model, tensors), described in zip(work.folders, answers[len(work.models) :], strict=True):
        _write_model(place, model, tensors, described["config"])
    for path, tensors in work.files:
        if path.stem == "diffusion_pytorch_model":
            write_shards(path.parent, path.stem, tensors, 10**10)
        elif path.suffix not in ARCHIVES:
            write_safetensors(path, tensors)


def _write_model(
    place: Path, model: ModelClass, tensors: list[TensorEntry], config: dict[str, Any], most: int | None = None
) -> None:
    if not os.path.lexists(place / CONFIG):
        (place / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    index = _index(place, model)
    if not index:
        write_shards(place, model.stem, tensors, most or model.most_shard_bytes)
        return
    weight_map = index["weight_map"]
    unknown = set(weight_map) ^ {tensor.name for tensor in tensors}
    if unknown:
        fix = "use the index.json and config.json of one checkpoint, and the library's version that made it"
        raise VplanError(f"{place.name}: its index and its class differ in {len(unknown)} tensors", fix)
    if any(not isinstance(file, str) or Path(file).name != file for file in weight_map.values()):
        raise VplanError(f"{place.name}: its index names files elsewhere", "download the index.json again")
    write_indexed(place, model.stem, tensors, weight_map)


def _index(place: Path, model: ModelClass) -> dict[str, Any]:
    """The index of a model's shards, where its folder has one."""
    path = place / f"{model.stem}.safetensors.index.json"
    if place.suffix in WEIGHTS or not path.is_file():
        return {}
    index = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise VplanError(f"{quoted(str(path))} is no index of shards", "download it again")
    return index


def _entries(described: Mapping[str, Any], item: _ModelFolder) -> list[TensorEntry]:
    floats = item.dtype or _indexed_dtype(described, item)
    rows = described["tensors"]
    return [TensorEntry(name, floats if kind is None else _OURS[kind], tuple(shape)) for name, kind, shape in rows]


def _indexed_dtype(described: Mapping[str, Any], item: _ModelFolder) -> str:
    """From the total size that an index states."""
    total = _index(item.place, item.model).get("metadata", {}).get("total_size")
    count = sum(math.prod(shape) for _name, _kind, shape in described["tensors"])
    if not isinstance(total, int | float) or not count:
        return "bf16"
    return min(("fp32", "bf16", "fp8"), key=lambda dtype: abs(WIDTHS[dtype] - total / count))


def _ask(
    python: str,
    folder: Path,
    environment: Environment,
    models: Sequence[ModelClass],
    archives: Sequence[tuple[Path, list[TensorEntry]]],
) -> dict[str, Any]:
    """What the libraries of the command's own Python say of these models; writes the archives."""
    described = {
        str(number): {"library": model.library, "class": model.class_name, "config": model.config}
        for number, model in enumerate(models)
    }
    rows = [
        {"path": str(path), "tensors": [[tensor.name, TORCH_DTYPES[tensor.dtype], tensor.shape] for tensor in tensors]}
        for path, tensors in archives
    ]
    question, answer = folder / "hollow.json", folder / "hollow-answer.json"
    question.write_text(json.dumps({"models": described, "archives": rows}), encoding="utf-8")
    # Its use of the card is none of the command's.
    own = {name: value for name, value in environment.items() if name not in ("VPLAN_GPU_FOLDER", "PYTHONPATH")}
    command = [python, str(WORKER), str(question), str(answer)]
    try:
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=WORKER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise VplanError("building the hollow weights took over 10 minutes", "close other programs", 4) from None
    if not answer.is_file():
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise VplanError(f"building the hollow weights failed: {lines[-1]}", f"check that {python} imports torch", 4)
    result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in result:
        fix = f"install the libraries that have these models into {python}"
        raise VplanError(f"cannot build the hollow weights: {result['error']}", fix)
    answer.unlink()
    return result


# ---- places


def _snapshot(cache: Path, repository: str) -> Path:
    """The folder of a repository's files in a Hugging Face cache, with what leads to it."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(hub.REVISION, encoding="ascii")
    return folder / "snapshots" / hub.REVISION


def _cache_variables(cache: Path, environment: Environment) -> dict[str, str]:
    """The variables that make a cache of the run's own the one in use. What the user's own has is linked into it."""
    home = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    real = Path(environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    if real.is_dir():
        for entry in real.iterdir():
            if not os.path.lexists(cache / entry.name):
                (cache / entry.name).symlink_to(entry)
    places = dict.fromkeys(("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"), str(cache))
    return places | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class _Place:
    """A path that hollow files are put at: knows which files are ours, and which folders."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = set(_files(path))
        self._folders = [folder for folder in (path, *path.parents) if not folder.exists()]
        self._ours: set[Path] = set()

    def note(self) -> None:
        """Everything is written, and the command has not begun: what is new is ours."""
        self._ours = set(_files(self._path)) - self._before

    def clear(self) -> None:
        """Take away our files, and our folders where the command has put nothing into them."""
        for path in self._ours:
            path.unlink(missing_ok=True)
        folders = {folder for path in self._ours for folder in path.parents if folder.is_relative_to(self._path)}
        for folder in sorted({*self._folders, *folders}, key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def _files(place: Path) -> Iterator[Path]:
    if place.is_dir():
        yield from (path for path in place.rglob("*") if not path.is_dir())
    elif os.path.lexists(place):
        yield place
