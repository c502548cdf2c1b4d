"""How names of models are compared."""

from __future__ import annotations

import re


def model_key(name: str) -> str:
    """`Wan-AI/Wan2.1-T2V-1.3B-Diffusers` and `wan2.1-t2v-1.3b` are one: owner and "-diffusers" say nothing.

    The point stays, unlike in cards' names: 1.3B is not 13B.
    """
    return re.sub(r"[^a-z0-9.]", "", name.rpartition("/")[2].lower()).removesuffix("diffusers")
