"""The worker that makes a diffusers folder of a transformer in one file, as ComfyUI and models' authors publish them.

`planner.launch.single_file` starts it as ``vplan worker convert FOLDER``, with a `Conversion` in
``FOLDER/request.json``. The names of the tensors are translated by diffusers (``from_single_file``), with the bundled
config of the plan's model. Host RAM holds the model once.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError, quoted
from planner.launch.single_file import Conversion
from planner.worker_process import REQUEST, read_json, result_file
from trainers.worker import ResultFile, end_with_parent

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Formats of weights that can be trained from, as safetensors and torch call them."""

PREFIX = "model.diffusion_model."
"""How names begin in a checkpoint that once held encoders too."""


def main(arguments: list[str]) -> int:
    """Converts what the request in the folder named by the only argument asks for."""
    folder = Path(arguments[0])
    end_with_parent()
    request = Conversion.read(read_json(folder / REQUEST), REQUEST)
    report = ResultFile(folder / result_file(0))
    report.tell(rank=0, phase="convert")
    try:
        convert(Path(request.file), lookup.model(request.model), Path(request.folder))
    except VplanError as error:
        report.tell(outcome="refused", message=error.message, fix=error.fix, exit_code=error.exit_code)
        return error.exit_code
    report.tell(outcome="ok")
    return 0


def convert(file: Path, profile: ModelProfile, folder: Path) -> None:
    """Writes the model of a profile with a file's weights into a folder, which is whole or not there.

    Raises a VplanError for a file that is no safetensors, is quantised or of another model, and for models that
    diffusers reads from no single file.
    """
    import diffusers
    import torch

    kind: Any = getattr(diffusers, profile.diffusers_class)
    fix = "pass --weights DIR, the model's folder in diffusers format, and no --transformer"
    if not hasattr(kind, "from_single_file"):
        raise VplanError(f"diffusers reads {profile.title} from no single file", fix)
    dtype = getattr(torch, DTYPES[_dtype(file)])
    for rest in folder.parent.glob(".partial-*"):  # of a conversion that was killed: as large as the model
        shutil.rmtree(rest)
    partial = folder.with_name(f".partial-{folder.name}")
    partial.mkdir(parents=True)
    try:
        (partial / "config.json").write_text(json.dumps(profile.config), encoding="utf-8")
        try:
            source = _in_own_names(file, kind, profile) or str(file)
            model = kind.from_single_file(source, config=str(partial), torch_dtype=dtype, local_files_only=True)
            missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
        except (ValueError, KeyError, RuntimeError, AttributeError, IndexError, OSError) as error:
            reason = " ".join(str(error).split())[:160]
            raise VplanError(f"{quoted(file.name)} is no {profile.title}: {reason}", fix) from error
        if missing:
            raise VplanError(f"{quoted(file.name)} is no {profile.title}: it lacks {sorted(missing)[0]}", fix)
        needed = sum(tensor.nbytes for tensor in model.state_dict().values())
        if needed > shutil.disk_usage(partial).free:
            raise VplanError(f"no room for the converted weights in {folder.parent}", "free some space there", 4)
        model.save_pretrained(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _in_own_names(file: Path, kind: Any, profile: ModelProfile) -> dict[str, Any] | None:
    """The tensors of a file that has the model's own names behind a prefix; None for any other. diffusers looks for
    those names as they are (Qwen-Image, loaders/single_file_model.py), and ComfyUI takes the prefix away."""
    from accelerate import init_empty_weights
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(file, framework="pt") as opened:
        names = set(opened.keys())
    with init_empty_weights():
        own = kind.from_config(profile.config).state_dict().keys()
    if names != {PREFIX + name for name in own}:
        return None
    return {name.removeprefix(PREFIX): tensor for name, tensor in load_file(file).items()}


def _dtype(file: Path) -> str:
    """The format of most weights in a safetensors file, by its header alone."""
    from safetensors import SafetensorError, safe_open

    sizes: dict[str, int] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                part = opened.get_slice(name)
                count = 1
                for length in part.get_shape():
                    count *= length
                sizes[part.get_dtype()] = sizes.get(part.get_dtype(), 0) + count
    except (SafetensorError, OSError) as error:
        raise VplanError(f"{quoted(file.name)} is no safetensors file: {error}", "download it again") from None
    most = max(sizes, key=sizes.__getitem__, default="")
    if most not in DTYPES:
        fault = f"the weights in {quoted(file.name)} are stored as {most or 'nothing'}"
        raise VplanError(fault, f"pass the file in {', '.join(DTYPES.values())}; --weights-dtype fp8 makes them small")
    return most
