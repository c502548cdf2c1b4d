"""VideoX-Fun, EasyAnimate's successor, read at 804a425 (scripts/<model>/train.py): its flags, and FSDP.

Encoders start in host RAM, and validation uses the live transformer.
"""

from __future__ import annotations

from planner.layout.run import Transform
from planner.layout.trainer_terms.easyanimate import cache_emptied_between_swaps

TERMS: tuple[Transform, ...] = (cache_emptied_between_swaps,)
