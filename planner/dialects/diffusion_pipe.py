"""diffusion-pipe (tdrussell), read at 8f83dbf.

Latents and prompts are always cached, and its evaluation is a loss on held-out samples: it decodes nothing.
"""

from __future__ import annotations

from planner.dialects.shared import checkpoints_saved_on_cpu, swap_in_place
from planner.run import Term

TERMS: tuple[Term, ...] = (swap_in_place, checkpoints_saved_on_cpu)
"""``swap_in_place``: utils/offloading.py. Checkpoints: ``activation_checkpointing = 'unsloth'`` copies what is larger
than 5 million numbers with ``x.to('cpu')`` (utils/unsloth_utils.py)."""
