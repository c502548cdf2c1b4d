"""DiffSynth-Studio's first Wan script, of 2025-02-25 to 2025-06-13 (examples/wanvideo/train_wan_t2v.py, Lightning), read at
a25bd74d. It is gone, and the advice that names its flags still goes round.

Two commands of one script: ``--task data_process`` encodes, ``--task train`` reads tensors of whatever shape they have.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.dialects.diffsynth import (
    TERMS,
    _checkpointed_if_asked,
    _gather,
    _say_targets,
    _targets,
)
from planner.dialects.interface import Choice, Dialect, Fields, Fixed, Given, Move, Remark, Settings, Several, Value, When
from planner.dialects.parts import EXPANDABLE, GPUS, NODES, the_model, usual
from planner.errors import VplanError
from planner.script import Script

__all__ = ["DIALECT", "TERMS"]

NAME = "diffsynth@2025-03"
AT = "DiffSynth-Studio a25bd74d examples/wanvideo/train_wan_t2v.py"
