"""`--hollow data`: the files that a command's reader of data wants, where it names a data set that is not here.

One function a trainer, each as its reader was read in its source. Samples have the shape that the command trains at, so
that no reader cuts or enlarges them into another, and there are as many as one step takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from planner import dialects
from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import job_for
from planner.dialects.base.bindings import Settings
from planner.dialects.base.dialect import Dialect, Invocation, translate
from planner.dialects.base.script import PythonCommand, Script
from planner.dialects.base.values import as_list
from planner.dialects.musubi_tuner.datasets import bucket_of
from planner.dialects.musubi_tuner.models import caches_text_and_latents_only
from planner.errors import VplanError, quoted
from planner.foreign.rehearsed_command import script_of
from planner.rehearsal.hollow.hollow_data import CAPTION, HollowData, Medium, check_absent
from planner.rehearsal.hollow.tensor_files import TensorEntry
from planner.spec.job import Job
from planner.spec.plan import read_plan

FEWEST = 2
"""Samples of a set; more where one step takes more."""

LEAVE_OUT = "name a data set that is here, and leave --hollow data out"


class _Case(NamedTuple):
    """What a command trains, as far as its data goes."""

    settings: Settings
    job: Job
    model: ModelProfile
    ranks: int


def _case_of(dialect: Dialect, invocation: Invocation, gpus: int) -> _Case:
    """A command's job with its model's usual shape where it says none. Whether it can be estimated does not matter."""
    ranks = max(gpus, int(invocation.settings.get("gpus") or 1))
    settings = {**invocation.settings, "gpus": ranks, "nodes": 1}
    try:
        fields = translate(dialect, replace(invocation, settings=settings)).job
    except VplanError as error:  # its fix is for `vplan check`, which can be told the rest
        fix = "leave out --hollow data, and put clips or pictures of your own where the command reads them"
        raise VplanError(f"--hollow data: {error.message}", fix, error.exit_code) from None
    model = lookup.model(fields["model"])
    job = job_for(model, {name: value for name, value in fields.items() if value is not None})
    return _Case(settings, job, model, ranks)


def data_of(command: tuple[str, ...], gpus: int) -> HollowData:
    """The data set that a command names and that is not here. Raises a VplanError for a command or layout that is not
    known, and where something lies at a place that it names."""
    script = script_of(command)
    caching = next((program for program in script.programs if _caches(program)), None)
    own = next((program for program in script.programs if _is_our_training(program)), None)
    if caching is not None:
        data = _musubi_media(script.document(_word(caching, "--dataset_config")), FEWEST)
    elif own is not None:
        data = _own(own)
    else:
        dialect, invocation = dialects.read_script(script)
        if dialect.name not in LAYOUTS:
            raise VplanError(f"--hollow data: the layout of {dialect.title}'s data is not known", LEAVE_OUT)
        data = LAYOUTS[dialect.name](_case_of(dialect, invocation, gpus), script)
    if not data.media:
        raise VplanError("--hollow data: the command names no data set", LEAVE_OUT)
    check_absent(data)
    return data


@dataclass
class _Files:
    """What has been put together."""

    places: list[Path] = field(default_factory=list)
    media: list[Medium] = field(default_factory=list)
    texts: dict[Path, str] = field(default_factory=dict)
    tensors: dict[Path, list[TensorEntry]] = field(default_factory=dict)

    def add(self, folder: Path, shape: tuple[int, int, int], count: int, captions: str = "") -> list[Path]:
        """Samples of `shape` (frames, height, width) in a folder, with captions of that ending beside them."""
        ending = ".mp4" if shape[0] > 1 else ".png"
        paths = [folder / f"sample{number}{ending}" for number in range(count)]
        self.media += [Medium(path, *shape) for path in paths]
        if captions:
            self.texts |= {path.with_suffix(captions): CAPTION for path in paths}
        return paths

    def done(self) -> HollowData:
        return HollowData(tuple(dict.fromkeys(self.places)), tuple(self.media), self.texts, self.tensors)


def _absolute(path: object) -> Path:
    return Path(os.path.abspath(Path(str(path)).expanduser()))


def _shape(case: _Case) -> tuple[int, int, int]:
    job = case.job
    return job.frames, job.height, job.width


def _count(case: _Case) -> int:
    """Samples of one step on all ranks, of the shape that has most."""
    return max(FEWEST, max(shape.batch_size or 1 for shape in case.job.shapes) * case.ranks)


def _refuse(what: str) -> VplanError:
    return VplanError(f"--hollow data: {what}", LEAVE_OUT)


# ---- ours


def _is_our_training(program: PythonCommand) -> bool:
    return program.script.rpartition("/")[2] in ("vplan", "vplan.py") and program.arguments[:1] == ("train",)


def _own(program: PythonCommand) -> HollowData:
    """The folder of `vplan train PLAN --data FOLDER`, with a caption beside each sample (`planner.dataset.scan`)."""
    plans = [word for word in program.arguments if word.endswith(".toml") and Path(word).is_file()]
    folder, files = _word(program, "--data"), _Files()
    if not plans or not folder or folder.endswith(".toml"):
        raise _refuse("the command names no plan that is here, or no folder with --data")
    plan = read_plan(plans[0])
    files.places.append(_absolute(folder))
    shapes = {(shape.frames, shape.height, shape.width) for shape in plan.job.shapes}
    for number, shape in enumerate(sorted(shapes)):
        count = max(FEWEST, plan.job.batch_size * plan.machine.world)
        files.add(files.places[0] / f"shape{number}" if len(shapes) > 1 else files.places[0], shape, count, ".txt")
    return files.done()


# ---- diffusers' examples


def _diffusers(case: _Case, script: Script) -> HollowData:
    """Folders of pictures (`DreamBoothDataset` opens every file of its folder), of pictures with metadata.jsonl as
    `datasets` reads them, and CogVideoX's lists of clips and captions (cogvideo/train_cogvideox_lora.py)."""
    settings, files = case.settings, _Files()
    name = (
        settings.get("--instance_data_root") or settings.get("--instance_data_dir") or settings.get("--train_data_dir")
    )
    if settings.get("--dataset_name"):
        raise _refuse(f"--dataset_name {quoted(str(settings['--dataset_name']))} names no folder")
    if not name:
        return files.done()
    folder = _absolute(name)
    files.places.append(folder)
    if "--instance_data_root" in settings:
        paths = files.add(folder / "videos", _shape(case), _count(case))
        clips = "\n".join(str(path.relative_to(folder)) for path in paths)
        files.texts[folder / str(settings.get("--video_column", "video"))] = clips
        files.texts[folder / str(settings.get("--caption_column", "text"))] = "\n".join([CAPTION] * len(paths))
        return files.done()
    paths = files.add(folder, _shape(case), _count(case))
    if "--instance_data_dir" not in settings:
        if settings.get("--image_column", "image") != "image":
            raise _refuse("a folder's pictures are in the column image")
        column = str(settings.get("--caption_column", "text"))
        files.texts[folder / "metadata.jsonl"] = _json_lines(
            {"file_name": path.name, column: CAPTION} for path in paths
        )
    return files.done()


# ---- DiffSynth-Studio

DERIVED = frozenset({"input_image", "end_image"})
"""Extra inputs that are taken from the clip itself (examples/wanvideo/model_training/train.py, parse_extra_inputs)."""


def _diffsynth(case: _Case, script: Script) -> HollowData:
    """A table with a column for every key of files, and one with prompts (core/data/unified_dataset.py)."""
    settings, files = case.settings, _Files()
    base, table = settings.get("--dataset_base_path"), settings.get("--dataset_metadata_path")
    if not base:
        return files.done()
    if not table:
        raise _refuse("without --dataset_metadata_path the folder holds caches, which another command writes")
    usual = "video" if case.model.kind == "video" else "image"
    keys = str(settings.get("--data_file_keys") or usual).split(",")
    keys = [usual] if set(keys) == {"image", "video"} else keys
    extra = str(settings.get("--extra_inputs") or "")
    missing = [name for name in extra.split(",") if name and name not in DERIVED and name not in keys]
    if missing:
        raise _refuse(f"what --extra_inputs {', '.join(missing)} reads is not known")
    folder, metadata = _absolute(base), _absolute(table)
    files.places += [folder] if metadata.is_relative_to(folder) else [folder, metadata]
    rows: list[dict[str, str]] = [{"prompt": CAPTION} for _ in range(_count(case))]
    for key in keys:
        shape = _shape(case) if "video" in key else (1, *_shape(case)[1:])
        for row, path in zip(rows, files.add(folder / key, shape, len(rows)), strict=True):
            row[key] = str(path.relative_to(folder))
    files.texts[metadata] = _table(metadata, rows)
    return files.done()


def _table(path: Path, rows: list[dict[str, str]]) -> str:
    if path.suffix == ".json":
        return json.dumps(rows)
    if path.suffix == ".jsonl":
        return _json_lines(rows)
    return "\n".join(",".join(line) for line in ([*rows[0]], *([*row.values()] for row in rows))) + "\n"


def _json_lines(rows: Iterable[Mapping[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# ---- musubi-tuner

CACHES = ("cache_latents.py", "cache_text_encoder_outputs.py")


def _caches(program: PythonCommand) -> bool:
    """Whether it is a script of musubi-tuner's that writes caches."""
    return program.script.endswith(CACHES) and bool(_word(program, "--dataset_config"))


def _word(program: PythonCommand, flag: str) -> str:
    """The value of a flag of a command that no dialect reads."""
    words = list(program.arguments)
    joined = [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    return next((words[at + 1] for at, word in enumerate(words[:-1]) if word == flag), *joined[:1] or [""])


def _musubi(case: _Case, script: Script) -> HollowData:
    """The data set of a training command, with what it reads of it: caches (dataset/cache_io.py)."""
    path, count = case.settings.get("--dataset_config"), _count(case)
    if not path:
        return _Files().done()
    config, files = script.document(str(path)), _Files()
    if config is None:
        frames, height, width = _shape(case)
        kind = "video" if frames > 1 else "image"
        beside = _absolute(path).with_suffix("")
        config = {"general": {"resolution": [width, height], "batch_size": case.job.batch_size}}
        config["datasets"] = [{f"{kind}_directory": f"{beside}_data", "cache_directory": f"{beside}_cache"}]
        config["datasets"][0] |= {"target_frames": [frames]} if frames > 1 else {}
        files.places.append(_absolute(path))
        files.texts[_absolute(path)] = _toml(config)
    made = _musubi_media(config, count)
    if not caches_text_and_latents_only(case.model.name):
        what = f"what musubi-tuner caches for {case.model.title} is not known: rehearse its two caching commands first"
        raise VplanError(f"--hollow data: {what}", "with --hollow data and --steps 0; the caches stay")
    for table, lengths, height, width in _musubi_tables(config):
        folder = _absolute(table[_directory_key(table)])
        cache = _absolute(table.get("cache_directory") or folder)
        files.places.append(cache)
        size = f"{width:04d}x{height:04d}"
        for path in [medium.path for medium in made.media if medium.path.parent == folder]:
            files.tensors[cache / f"{path.stem}_wan_te.safetensors"] = _wan_prompt(case)
            for length in lengths:
                clip = f"{path.stem}_00000-{length:03d}" if path.suffix == ".mp4" else path.stem
                latents = _wan_latents(case, length, height, width)
                files.tensors[cache / f"{clip}_{size}_wan.safetensors"] = latents
    files.places += made.places
    files.media += made.media
    files.texts |= made.texts
    return files.done()


def _wan_latents(case: _Case, frames: int, height: int, width: int) -> list[TensorEntry]:
    """`save_latent_cache_wan` (dataset/cache_io.py:51)."""
    vae = case.model.vae
    sizes = (1 + (frames - 1) // vae.temporal, height // vae.spatial, width // vae.spatial)
    return [TensorEntry(f"latents_{'x'.join(map(str, sizes))}_bfloat16", "bf16", (vae.latent_channels, *sizes))]


def _wan_prompt(case: _Case) -> list[TensorEntry]:
    """`save_text_encoder_output_cache_wan`; of the longest prompt, as an estimate counts it."""
    encoder = case.model.text_encoders[0]
    return [TensorEntry("varlen_t5_bfloat16", "bf16", (encoder.max_tokens, encoder.config["d_model"]))]


def _musubi_media(config: dict[str, Any] | None, count: int) -> HollowData:
    """The folders of clips or pictures of a data set's file, with captions (dataset/config_utils.py)."""
    files = _Files()
    if config is None:
        raise _refuse("the data set's file is not here, which says the shape")
    ending = str(config.get("general", {}).get("caption_extension") or ".txt")
    for table, frames, height, width in _musubi_tables(config):
        folder = _absolute(table[_directory_key(table)])
        files.places.append(folder)
        captions = str(table.get("caption_extension") or ending)
        files.add(folder, (max(frames), height, width), max(count, int(table.get("batch_size") or 1)), captions)
    return files.done()


def _directory_key(table: Mapping[str, Any]) -> str:
    keys = [key for key in ("video_directory", "image_directory") if table.get(key)]
    if not keys or table.get("control_directory"):
        raise _refuse("of musubi-tuner's data sets those with video_directory or image_directory alone are made")
    return keys[0]


class _MusubiTable(NamedTuple):
    """One data set of musubi-tuner's file."""

    table: dict[str, Any]
    lengths: list[int]
    """in frames"""
    height: int
    """in pixels, as the width"""
    width: int


def _musubi_tables(config: dict[str, Any]) -> Iterator[_MusubiTable]:
    """Each data set with what is made of its clips. Raises a VplanError for one that is not of videos or images."""
    for table in config.get("datasets") or []:
        size = as_list(table.get("resolution") or config.get("general", {}).get("resolution") or [960, 544])
        clips = _directory_key(table) == "video_directory"
        lengths = [int(length) for length in as_list(table.get("target_frames") or [1])] if clips else [1]
        bucketed = clips or bool(table.get("enable_bucket", config.get("general", {}).get("enable_bucket")))
        width, height = bucket_of(int(size[0]), int(size[-1]), bucketed)
        yield _MusubiTable(table, lengths, height, width)


# ---- sd-scripts, diffusion-pipe, ai-toolkit


def _sd_scripts(case: _Case, script: Script) -> HollowData:
    """Folders of a data set's file, or one named REPEATS_WORDS in --train_data_dir (library/config_util.py)."""
    settings, files = case.settings, _Files()
    path, ending = settings.get("--dataset_config"), str(settings.get("--caption_extension") or ".caption")
    if not path:
        if settings.get("--in_json"):
            raise _refuse("--in_json is not made")
        if settings.get("--train_data_dir"):
            files.places.append(_absolute(settings["--train_data_dir"]))
            files.add(files.places[0] / f"1_{CAPTION}", _shape(case), _count(case), ending)
        return files.done()
    config = script.document(str(path))
    if config is None:
        _, height, width = _shape(case)
        subset = {"image_dir": f"{_absolute(path).with_suffix('')}_data", "caption_extension": ".txt"}
        config = {"general": {"resolution": [width, height]}, "datasets": [{"subsets": [subset]}]}
        config["datasets"][0]["batch_size"] = case.job.batch_size
        files.places.append(_absolute(path))
        files.texts[_absolute(path)] = _toml(config)
    general = config.get("general", {})
    for table in config.get("datasets") or []:
        size = as_list(table.get("resolution") or general.get("resolution") or [case.job.width, case.job.height])
        for subset in table.get("subsets") or []:
            if "image_dir" not in subset or "metadata_file" in subset or "conditioning_data_dir" in subset:
                raise _refuse("of sd-scripts' subsets those with image_dir and captions are made")
            folder = _absolute(subset["image_dir"])
            captions = [each.get("caption_extension") for each in (subset, table, general)]
            files.places.append(folder)
            shape = (1, int(size[-1]), int(size[0]))
            files.add(folder, shape, _count(case), next(filter(None, captions), ending))
    return files.done()


def _diffusion_pipe(case: _Case, script: Script) -> HollowData:
    """The directories of the data set's file, which its config names (utils/dataset.py)."""
    files, settings = _Files(), case.settings
    path = str(settings.get("config:dataset") or "")
    config = script.document(path) if path else None
    if config is None and path:
        frames, height, width = _shape(case)
        config = {
            "size_buckets": [[width, height, frames]],
            "directory": [{"path": f"{_absolute(path).with_suffix('')}_data"}],
        }
        config["directory"][0]["num_repeats"] = 1
        files.places.append(_absolute(path))
        files.texts[_absolute(path)] = _toml(config)
    for table in (config or {}).get("directory") or []:
        files.places.append(_absolute(table["path"]))
        files.add(files.places[-1], _shape(case), _count(case), ".txt")
    return files.done()


def _ai_toolkit(case: _Case, script: Script) -> HollowData:
    """The folders of its config (toolkit/data_loader.py)."""
    files, settings = _Files(), case.settings
    for key in [key for key in settings if key.endswith(".folder_path")]:
        files.places.append(_absolute(settings[key]))
        ending = str(settings.get(f"{key.removesuffix('folder_path')}caption_ext") or "txt")
        files.add(files.places[-1], _shape(case), _count(case), f".{ending.removeprefix('.')}")
    return files.done()


def _toml(config: Mapping[str, Any]) -> str:
    import tomli_w  # only writers need it

    return tomli_w.dumps(config)


LAYOUTS: dict[str, Callable[[_Case, Script], HollowData]] = {
    "ai-toolkit": _ai_toolkit,
    "diffsynth": _diffsynth,
    "diffusers": _diffusers,
    "diffusion-pipe": _diffusion_pipe,
    "musubi-tuner": _musubi,
    "sd-scripts": _sd_scripts,
}
"""Trainer -> its layout."""
