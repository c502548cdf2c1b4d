"""Answers one file with another: `meta_worker.py QUESTION ANSWER`, both JSON.

`{"models": {KEY: {"library", "class", "config"}}, "archives": [{"path", "dtype"?, "tensors": [[NAME, DTYPE, SHAPE]]}]}`
is answered by `{"models": {KEY: {"config", "tensors": [[NAME, DTYPE, SHAPE]]}}}`, or `{"error"}`; the archives are
written, without data. DTYPE is torch's name, and null for floats: in which precision they lie is for the asker to say.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def main() -> None:
    """Read the question and write the answer."""
    with open(sys.argv[1], encoding="utf-8") as file:
        question = json.load(file)
    try:
        answer: dict[str, Any] = {"models": {key: describe(**model) for key, model in question["models"].items()}}
        for archive in question["archives"]:
            write_archive(**archive)
    except (ImportError, AttributeError, TypeError, ValueError, KeyError) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(answer, file)


def describe(library: str, config: dict[str, Any], **names: str) -> dict[str, Any]:
    """The tensors of a model that its library would save, and its whole config."""
    import torch

    model_class = getattr(importlib.import_module(library), names["class"])
    with torch.device("meta"):
        if library != "transformers":
            model = model_class.from_config(config)
            whole = json.loads(model.to_json_string())
        else:
            whole_config = model_class.config_class(**config)
            model = model_class(whole_config)
            whole_config.architectures = [names["class"]]
            whole = json.loads(whole_config.to_json_string(use_diff=False))
    return {"config": whole, "tensors": [[name, *_kind(tensor)] for name, tensor in _saved(model)]}


def _saved(model: Any) -> Any:
    """A state dict with tied tensors once: files have the first of their names."""
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _kind(tensor: Any) -> tuple[str | None, list[int]]:
    return None if tensor.is_floating_point() else str(tensor.dtype).rpartition(".")[2], list(tensor.shape)


def write_archive(path: str, tensors: list[list[Any]]) -> None:
    """A file as torch.save writes it, of these tensors, whose bytes are a hole."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not hasattr(torch.serialization, "skip_data"):
        raise ImportError(f"torch {torch.__version__} cannot write files without data; 2.6 and newer can")
    with FakeTensorMode():
        state = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in tensors}
        with open(path, "xb"), torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, path)


if __name__ == "__main__":
    main()
