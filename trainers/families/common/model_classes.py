"""Finds and builds the class of a profile's model: from diffusers, or from the user's own code if this process may run
it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from planner.catalog import own_code
from planner.errors import VplanError, quoted


def class_of(name: str) -> Any:
    """The class of this name. Raises a VplanError if it does not exist, or if it is the user's own code and this
    process was not started to run it."""
    if not own_code.is_own(name):
        import diffusers

        return getattr(diffusers, name)
    if not own_code.may_run(name):
        fault = f"{name} is code of your own, which only `vplan record --class` runs"
        raise VplanError(fault, "estimates and searches need no code")
    module_name, _, class_name = name.partition(":")
    if (folder := os.environ.get(own_code.FOLDER)) and folder not in sys.path:
        sys.path.append(folder)
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        fix = "pass the folder that holds the module: --path DIR"
        raise VplanError(f"{module_name} cannot be imported: {' '.join(str(error).split())[:160]}", fix) from None
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise VplanError(f"{quoted(class_name)} of {module_name} is no torch module", "name a class of torch.nn.Module")
    return found


def build(found: Any, config: Mapping[str, Any]) -> nn.Module:
    """A model of a class from its config: through diffusers or transformers, else by passing the config as keyword
    arguments."""
    from diffusers import ConfigMixin
    from transformers import PreTrainedModel

    model: nn.Module
    if issubclass(found, ConfigMixin):
        model = found.from_config(dict(config))
    elif issubclass(found, PreTrainedModel):
        settings = found.config_class(**config)
        settings._attn_implementation = "sdpa"
        model = found(settings)
    else:
        model = found(**config)
    return model
