"""Other trainers whose own models are recorded, because they are not diffusers' and allocate in another order."""

from __future__ import annotations

from typing import NamedTuple

from planner.catalog.traits import TrainerTrait
from planner.tape.variants.precision import Precision
from planner.tape.variants.recorded_methods import WIDE
from planner.tape.variants.torch_and_card import BOTH

CHECKPOINTING = ("none", "full")


class OwnCode(NamedTuple):
    """What is recorded of a trainer that has its own model classes. Their tensors, in their order, leave other holes in
    the allocator than those of diffusers' classes."""

    recorded: tuple[tuple[str, Precision], ...]
    """methods, each with a precision"""
    checkpointing: tuple[str, ...]
    one_sample: tuple[bool, ...]
    trait: TrainerTrait = "own-code"
    """the trait of the models that it is recorded of"""
    on_all_linear: bool = False
    """whether adapters over a quantised base are on every layer of a block too"""
    unpacked: frozenset[str] = frozenset()
    """formats of a base whose weights the trainer unpacks for one product. Their step is recorded over a base in 16
    bits, and `planner.layout.trainer_terms` adds the rest"""
    with_gradient: tuple[str, ...] = ()
    """the layers whose adapters get a gradient, where not all of them do"""


_KOHYA = ((WIDE, Precision("half", "fp32", True)),)
_MUSUBI = (*_KOHYA, ("lora", Precision("fp8", "fp32", True)))
_LTX = (("lora", Precision("half", "fp32", True)),)
_QUANTO = frozenset({"int8"})
_VIDEO_LAYERS = tuple(f"attn{at}.{layer}" for at in (1, 2) for layer in ("to_q", "to_k", "to_v", "to_out.0"))
OWN_CODE = {
    "diffsynth": OwnCode(
        (
            (WIDE, Precision("half", "half", False)),
            (WIDE, Precision("half", "half", True)),
            ("full", Precision("half", "", False)),
        ),
        ("full",),
        (True,),
    ),
    "sd-scripts": OwnCode(_KOHYA, CHECKPOINTING, BOTH),
    "musubi-tuner": OwnCode(_MUSUBI, CHECKPOINTING, (True,), on_all_linear=True),
    "musubi-tuner@2.1-time-embedding": OwnCode(_MUSUBI, CHECKPOINTING, (True,), "time-per-token", True),
    "ltx-trainer": OwnCode(_LTX, CHECKPOINTING, BOTH, unpacked=_QUANTO),
    "ltx-trainer@video": OwnCode(_LTX, CHECKPOINTING, BOTH, unpacked=_QUANTO, with_gradient=_VIDEO_LAYERS),
}
"""Trainer, or a version of it as `planner.layout.trainer_terms` names it, to what is recorded of its own models
(trainers/recording/trainer_code). diffusers' models stand for everything else.

- DiffSynth-Studio has no batch size, and always checkpoints Wan's blocks.
- musubi-tuner rotates positions one sample at a time. Its adapters are on every layer of a block, over an fp8 base too.
- ltx-trainer has a time step for each token and, depending on the version, no sound.
"""
