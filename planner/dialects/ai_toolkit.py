"""ai-toolkit (ostris), read at 27a03a9: one YAML file, `python run.py FILE`.

It keeps the text encoder on the GPU unless its embeddings are cached or it is unloaded, and samples with the model it
trains. Its adapters are fp32 (jobs/process/BaseSDTrainProcess.py ``network.force_to(..., dtype=torch.float32)``).
"""

from __future__ import annotations

from planner.dialects.ai_toolkit_words import CARRIES, DIALECT
from planner.dialects.shared import cache_emptied
from planner.run import Run, Term

__all__ = ["CARRIES", "DIALECT", "TERMS"]


def loaded_on_the_cpu(run: Run) -> None:
    """Weights are read into host RAM and moved to the GPU (toolkit/models/wan21/wan21.py ``load_wan_transformer`` at
    1bf2f2e: ``from_pretrained``, then ``to(device)``). Not priced: without `low_vram` they are quantised there behind
    that, so that the whole model lies on the GPU in 16 bits for a moment."""
    run.loads_on_cpu = True


TERMS: tuple[Term, ...] = (loaded_on_the_cpu, cache_emptied)
"""``cache_emptied``: ``flush`` behind every step of loading (the same; toolkit/basic.py at 0657f36)."""
