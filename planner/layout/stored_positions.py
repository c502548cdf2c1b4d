"""A table of sine positions, as CogVideoX 1.0 has: stored for the shape a model is made for, computed anew for any
other."""

from __future__ import annotations

from planner.catalog.profiles import ModelProfile
from planner.layout.phases import validation_grid
from planner.layout.run import Run
from planner.tape.program import Program, Stage


def stored_positions(run: Run) -> None:
    """At its own shape a CogVideoX 1.0 adds the stored table; tapes are recorded at other shapes, where each forward
    makes one in fp64, up to 0.5 GiB at once (diffusers models/embeddings.py ``CogVideoXPatchEmbed.forward``)."""
    if _has_table(run) and _made_for(run.facts.model, run.grid):
        run.drop(run.step, _making(run.program, run.step))


def stored_positions_in_validation(run: Run) -> None:
    """Applies stored position embeddings to validation's denoising: where the table was made for its grid, the events
    that compute them are dropped."""
    if run.samples_only or not run.phases.validation or not _has_table(run):
        return
    denoise = run.phases.validation[0][1]
    if _made_for(run.facts.model, validation_grid(run.job, run.facts.model)):
        run.drop(denoise, _making(run.program, denoise))


def table_in_half(run: Run) -> None:
    """A script that casts the whole model casts the table too, and adding it to what is embedded takes no copy then."""
    if not _has_table(run):
        return
    table = run.named("weight")[run.facts.model.traits.stored_positions]
    run.resize(table, run.sizes[table] // 2)
    if not _made_for(run.facts.model, run.grid):
        return
    stages = [run.step, run.first_step, run.accumulate, *(stage for _, stage in run.phases.validation[:1])]
    for stage in filter(None, stages):
        run.drop(stage, [copy for copy in _added(run.program, stage) if run.sizes[copy] == run.sizes[table]])


def _has_table(run: Run) -> bool:
    model = run.facts.model
    learned = model.config.get("use_learned_positional_embeddings")
    return model.traits.stored_positions in run.named("weight") and not learned


def _made_for(model: ModelProfile, grid: dict[str, int]) -> bool:
    """Whether a grid is that of the shape in the model's config."""
    config, (_, height, width) = model.config, model.shape.patch
    frames = model.vae.decoded(grid["F"])
    asked = (frames, grid["H"] * height, grid["W"] * width)
    return asked == tuple(config.get(name) for name in ("sample_frames", "sample_height", "sample_width"))


def _making(program: Program, stage: Stage) -> list[int]:
    """What making the table allocates: from the first ``arange`` behind the patches' convolution to the zeros that
    the result is written into. Nothing where a model was recorded at its own shape."""
    made = _behind_convolution(program, stage)
    ops = [program.op[buffer] for buffer in made]
    return made[ops.index("arange") : ops.index("new_zeros") + 1] if "new_zeros" in ops else []


def _added(program: Program, stage: Stage) -> list[int]:
    """Behind the convolution, the first copy in another format: of the table."""
    return [buffer for buffer in _behind_convolution(program, stage) if program.op[buffer] == "_to_copy"][:1]


def _behind_convolution(program: Program, stage: Stage) -> list[int]:
    """What is allocated behind the convolution of the patches and before the blocks, in order."""
    made: list[int] = []
    for moment, events in stage.stretches:
        if moment.block >= 0:
            break
        made += [event for event in events if event >= 0]
    ops = [program.op[buffer] for buffer in made]
    return made[ops.index("convolution") + 1 :]
