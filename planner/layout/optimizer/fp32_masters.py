"""fp32 masters of 16-bit weights that train outside ZeRO: the optimizer steps over copies, and copies them back.

As apex's FP16_Optimizer does it (apex/fp16_utils: ``prep_param_lists``, ``model_grads_to_master_grads``,
``master_params_to_model_params``): masters are cloned once the model is loaded; at the step every gradient is cast to
fp32 and its 16-bit one let go; states and step are those of fp32 parameters. `trainers.step.optimizers.OverMasters` is
the same in code.
"""

from __future__ import annotations

from planner.layout.run import Run

FULL, HALF = 4, 2


def keeps_masters(run: Run) -> bool:
    """Whether the run keeps masters. DeepSpeed keeps its own, see `planner.layout.sharding.zero`."""
    return run.strategy.master_weights == "fp32" and not run.strategy.sharding.startswith("zero")


def masters(run: Run) -> None:
    """A master per trained 16-bit parameter, and at each step its fp32 gradient in place of the 16-bit one."""
    if not keeps_masters(run):
        return
    gradients = _cast_gradients(run)
    kept = [run.new(FULL // HALF * run.sizes[buffer], "optimizer", "fp32 master") for buffer in gradients]
    run.place(run.load, kept, "fp32 masters")
    if run.trained_experts == 2:
        run.add(run.load, run.total_bytes(kept), "optimizer", "other expert's fp32 masters")
    full = {buffer: run.new(FULL // HALF * run.sizes[buffer], "gradient", "fp32 gradient") for buffer in gradients}
    for stage in (run.optimizer_first, run.optimizer):
        stage.stretches = [
            (moment, [~full[~event] if event < 0 and ~event in full else event for event in events])
            for moment, events in stage.stretches
        ]
        cast = [event for buffer, copy in full.items() for event in (copy, ~buffer)]
        run.place(stage, cast, "fp32 gradients", at=0)


def _cast_gradients(run: Run) -> list[int]:
    """The gradients in 16 bits. What diffusers keeps in fp32 (``_keep_in_fp32_modules``) needs no master."""
    return [buffer for name, buffer in run.named("gradient").items() if run.sizes[buffer] == HALF * run.elements[name]]


def master_bytes(run: Run) -> int:
    """Bytes of all fp32 master weights of a run; 0 when it keeps none."""
    if not keeps_masters(run):
        return 0
    return run.trained_experts * FULL // HALF * run.total_bytes(_cast_gradients(run))
