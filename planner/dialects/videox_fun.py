"""VideoX-Fun, EasyAnimate's successor, read at 804a425 (scripts/<model>/train.py): its flags, and FSDP.

Encoders start in host RAM, and validation uses the live transformer.
"""

from __future__ import annotations

from planner.dialects.easyanimate import cache_emptied_between_swaps
from planner.dialects.easyanimate_words import VIDEOX_FUN as DIALECT
from planner.run import Term

__all__ = ["DIALECT", "TERMS"]

TERMS: tuple[Term, ...] = (cache_emptied_between_swaps,)
