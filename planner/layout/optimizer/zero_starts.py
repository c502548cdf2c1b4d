"""What Prodigy does not keep of matrices that start at zero."""

from __future__ import annotations

import re

from planner.layout.run import Run

KEPT_START = ":p0"
ZERO_MATRIX = re.compile(r"lora_B|lokr_w1\b")
"""peft starts the second matrix of every adapter at zero (peft/tuners/lora/layer.py, reset_lora_parameters), and the
first of a LoKr (tuners/lokr/layer.py, reset_adapter_parameters)."""


def zero_starts(run: Run) -> None:
    """Prodigy measures how far it has come from where it began, and keeps a copy of that; of a parameter that is all
    zero it keeps one number instead (prodigyopt/prodigy.py: ``if p.any()``). A new adapter's second matrices are in the
    first step, which makes the states. Recordings, whose tensors have no values, hold a copy of everything."""
    if run.strategy.optimizer != "prodigy":
        return
    states = run.named("optimizer").items()
    zero = {buffer for name, buffer in states if ZERO_MATRIX.search(name) and name.endswith(KEPT_START)}
    for stage in (run.optimizer_first, run.optimizer):
        run.drop(stage, zero)
