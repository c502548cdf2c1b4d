"""NVIDIA's NeMo, as MLPerf Training v5.0's submissions of Stable Diffusion 2 run it
(prishajain1/training_results_v5.0 at ab57af8)."""

from __future__ import annotations

from planner.layout.run import Run, Transform

TERMS: tuple[Transform, ...] = ()

CAPTURED = "captured"
"""The version whose whole step is a CUDA graph."""


def captured(run: Run) -> None:
    """From the 16th step on, zeroing gradients, forward, backward and the optimizer's step are one CUDA graph that is
    replayed (NVIDIA/benchmarks/stable_diffusion/implementations/nyx_n1_ngc25.04_nemo/callbacks.py
    ``get_optimizer_step``, run_and_time.sh CAPTURE_CUDAGRAPH_ITERS, conf/sd2_mlperf_train_moments.yaml
    ``inductor_cudagraphs: False``). What its graph keeps in a pool of its own is not priced."""
    run.work.captured = True


BY_VERSION: dict[str, tuple[Transform, ...]] = {CAPTURED: (captured,)}
