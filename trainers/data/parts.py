"""The parts of a diffusers model in its folder: all are checked before any is loaded, and they are loaded one by one.

Only safetensors are read, because a pickle can run code. Only classes that our families name are used, never one that a
file asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.catalog.diffusers_folder import CONFIG, read_config
from planner.errors import VplanError, quoted
from planner.launch import weight_files

INDEX = "model_index.json"
FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files of a part that are fetched from the hub: configs, weights, vocabularies, chat templates."""

MASK = "mask"
"""Folder of the image that marks which part of a face is covered."""
WHERE_FROM = {
    MASK: "put mask.png there (bytedance/LatentSync, latentsync/utils/mask.png)",
    "feature_extractor": "put preprocessor_config.json of openai/whisper-tiny there",
}
"""Where to get the parts that no folder saved by diffusers has."""


def locate(source: str, parts: Iterable[str]) -> Path:
    """The folder of a model: ``source`` itself, or a hub id's snapshot, which is downloaded if needed.

    Raises a VplanError if ``source`` is neither, or the download fails.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.is_file():
        fix = "pass the model's folder in diffusers format as --weights, and this file as --transformer"
        raise VplanError(f"{quoted(source)} is a file, not the folder of a model", fix)
    try:
        patterns = [f"{part}/{name}" for part in parts for name in FILES]
        return Path(snapshot_download(source, allow_patterns=[INDEX, *patterns]))
    except HFValidationError:
        fault = f"model {quoted(source)} is neither a folder nor the id of a repository"
        raise VplanError(fault, "pass a diffusers folder, or OWNER/NAME") from None
    except GatedRepoError:
        fix = "accept its licence on huggingface.co and log in (`hf auth login`), or pass a folder"
        raise VplanError(f"{source} is given only to those who accepted its licence", fix) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        fix = "pass a folder written by save_pretrained, or download the model first (`hf download`)"
        raise VplanError(f"{source} is not in this machine's cache, and the Hub cannot be reached", fix) from None
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        fix = "pass a folder written by save_pretrained, or download the model first"
        raise VplanError(f"cannot get {source}: {reason}", fix) from None


def check(root: Path, part: str, class_name: str) -> list[Path]:
    """The files that a part's weights depend on: config and shards.

    Raises a VplanError for a part that could not be loaded safely: no config, another class than the family's, no
    safetensors, a missing or incomplete shard.
    """
    folder = root / part
    if not folder.is_dir():
        raise VplanError(f"{root.name} has no {part}/", f"pass a complete diffusers model: it needs a {class_name}")
    classes = _classes(root, part)
    if class_name not in classes and class_name.removesuffix("Model") + "ForConditionalGeneration" not in classes:
        names = " or ".join(map(quoted, classes)) or "something unnamed"
        fault = f"{part}/ of {root.name} is {names}, but this model is trained with a {class_name}"
        raise VplanError(fault, "pass the model of the plan, or plan for this one")
    files = list(weight_files.part_files(root, part))
    weight_files.check_files(files)
    return [folder / CONFIG, *files]


def check_helper(root: Path, part: str) -> list[Path]:
    """The files of a tokenizer or image processor. Raises a VplanError if there are none."""
    files = sorted(path for path in (root / part).glob("*") if path.is_file())
    if not files:
        raise VplanError(f"{root.name} has no {part}/", WHERE_FROM.get(part, "pass a complete diffusers model"))
    return files


def _classes(root: Path, part: str) -> list[object]:
    """The class names that a part's config and the pipeline's index give for it.

    The index names the class that the part is loaded as. The config may name another: an encoder may be the body of a
    language model, whose config names the whole model.
    """
    config = read_config(root / part / CONFIG, root)
    classes = [config.get("_class_name"), *(config.get("architectures") or ())]
    if (root / INDEX).exists():
        entry = read_config(root / INDEX, root).get(part)
        classes += entry[1:2] if isinstance(entry, list) else []
    return list(dict.fromkeys(name for name in classes if isinstance(name, str)))


def load(root: Path, part: str, class_name: str, dtype: torch.dtype) -> nn.Module:
    """A checked part on the CPU, frozen, with its weights in `dtype` (except those that its class keeps in fp32)."""
    from safetensors import SafetensorError

    try:
        model: nn.Module = _class(class_name).from_pretrained(
            str(root / part),
            torch_dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            variant=weight_files.variant(root / part),
        )
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise VplanError(f"{part}/ of {root.name} cannot be loaded: {reason}", "download the model again") from error
    return model.requires_grad_(False).eval()


def load_helper(root: Path, part: str) -> Any:
    """The tokenizer, image processor or feature extractor in a folder, or the mask."""
    import transformers

    if part == MASK:
        return _mask(root / part)
    autos = {"tokenizer": transformers.AutoTokenizer, "feature_extractor": transformers.AutoFeatureExtractor}
    auto = next((auto for kind, auto in autos.items() if kind in part), transformers.AutoImageProcessor)
    if part == "processor":  # it reads prompts and images; the tokenizer is in the same folder
        auto = transformers.AutoTokenizer
    try:
        return auto.from_pretrained(str(root / part), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:160]
        raise VplanError(f"{part}/ of {root.name} cannot be loaded: {reason}", "download the model again") from error


def _mask(folder: Path) -> Any:
    """The one image in a folder."""
    from PIL import Image

    try:
        with Image.open(folder / "mask.png") as image:
            return image.convert("L")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise VplanError(f"{folder / 'mask.png'} cannot be read: {error}", WHERE_FROM[MASK]) from None


def _class(name: str) -> Any:
    """The class of this name in diffusers, or else in transformers; it is one that our families name."""
    diffusers, transformers = import_module("diffusers"), import_module("transformers")
    kind = getattr(diffusers, name, None) or getattr(transformers, name, None)
    if kind is None:
        raise VplanError(
            f"neither diffusers nor transformers has {name}", "update both: pip install -U diffusers transformers"
        )
    return kind
