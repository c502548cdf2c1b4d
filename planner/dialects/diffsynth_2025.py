"""DiffSynth-Studio's first Wan script, of 2025-02-25 to 2025-06-13 (examples/wanvideo/train_wan_t2v.py, Lightning), read at
a25bd74d. It is gone, and the advice that names its flags still goes round.

Two commands of one script: ``--task data_process`` encodes, ``--task train`` reads tensors of whatever shape they have.
"""

from __future__ import annotations

from planner.dialects.diffsynth import (
    TERMS,
)

__all__ = ["DIALECT", "TERMS"]

NAME = "diffsynth@2025-03"
AT = "DiffSynth-Studio a25bd74d examples/wanvideo/train_wan_t2v.py"
