"""VideoX-Fun, EasyAnimate's successor, read at 804a425 (scripts/<model>/train.py): its flags, and FSDP.

Encoders start in host RAM, and validation uses the live transformer.
"""

from __future__ import annotations

from planner.layout.run import Transform
from planner.layout.sharding.zero import bucket_as_backward_begins
from planner.layout.trainer_terms.easyanimate import cache_emptied_between_swaps
from planner.layout.trainer_terms.shared import cache_kept_while_sampling

TERMS: tuple[Transform, ...] = (cache_emptied_between_swaps, cache_kept_while_sampling, bucket_as_backward_begins)
"""The last: scripts/*/README_TRAIN.md install DeepSpeed 0.17.0."""
