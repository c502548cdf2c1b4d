"""planner/dialects: what each trainer holds beyond ours, its bytes worked by hand on the hand-made run."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from planner import dialects
from planner.allocator.implementation import alive, held
from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.estimate import host_ram
from planner.estimate.estimate import estimate
from planner.estimate.stages import replay_stages
from planner.estimate.traffic import traffic
from planner.estimate.work import step_work
from planner.layout import recordings as library
from planner.layout import trainer_terms
from planner.layout.checkpoints.block_inputs import block_inputs
from planner.layout.encoders_vae.component_pass import component_bytes
from planner.layout.experts import idle_weights
from planner.layout.phases import encodings
from planner.layout.pipeline import lay_out
from planner.layout.run import STRATEGY_MOMENT, Run
from planner.layout.trainer_terms import diffusers, easyanimate, latentsync, lora_layers, musubi_tuner
from planner.layout.trainer_terms.diffusers import sample_terms
from planner.layout.trainer_terms.shared import clip_pixels
from planner.layout.trainer_terms.simpletuner import QUANTO, TORCHAO_WHOLE
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.spec.plan import PhasePeak
from planner.spec.rules import resolve
from planner.tape.program import Stage
from planner.units import MIB, power_of_two
from tests.planner.hand_made import (
    ADAPTER,
    BLOCKS,
    CUBLAS,
    EIGHT,
    FACTS,
    GRID,
    JOB,
    LAST_FORWARD,
    LOADED,
    MODEL,
    ONE,
    STATES,
    STEM,
    WEIGHTS,
    after,
    laid_out,
    peaks,
    trained,
)

GRADIENTS = BLOCKS * ADAPTER
FILES = Path(trainer_terms.__file__).parent


def done_by(trainer: str, machine: Machine = ONE, **strategy: object) -> Run:
    return lay_out(Configuration.of(JOB, Strategy.read(strategy), machine), FACTS, GRID, trainer)


def steps(run: Run) -> tuple[int, int]:
    """Allocated peaks of the first forward and backward, and of a later one."""
    found = [entry.replayed.allocated_peak_bytes for entry in trained(run) if entry.stage.name == "step"]
    return found[0], found[-1]


# ---- which terms


def test_every_dialect_is_listed_and_has_something_to_say() -> None:
    packages = {path.parent: path for path in FILES.glob("*/__init__.py")}
    files = {path.with_suffix(""): path for path in FILES.glob("*.py")} | packages
    with_terms = {own.name.replace("_", "-") for own, path in files.items() if "\nTERMS" in path.read_text()}
    assert with_terms == set(trainer_terms.NAMES)
    for name in trainer_terms.NAMES:
        module = importlib.import_module(f"planner.layout.trainer_terms.{name.replace('-', '_')}")
        assert trainer_terms.terms(name) and all(term.__doc__ for term in trainer_terms.terms(name))
        assert module.__doc__
    packages = {path.parent.name.replace("_", "-") for path in Path(dialects.__file__).parent.glob("*/settings.py")}
    assert packages == {*dialects.TRAINERS, *dialects.FORMER, *dialects.FURTHER}
    assert all(dialects.module(name).__doc__ for name in packages)


@pytest.mark.parametrize("trainer", ["vplan", "somebody-else", "vplan@1234567"])
def test_other_trainers_are_priced_like_ours(trainer: str) -> None:
    assert trainer_terms.terms(trainer) == ()
    assert peaks(done_by(trainer)) == peaks(laid_out())


def test_a_version_adds_what_it_did_differently() -> None:
    today = trainer_terms.terms("musubi-tuner")
    assert trainer_terms.terms("musubi-tuner@0000000") == today
    assert trainer_terms.terms("musubi-tuner@36f3a98") == (*today, musubi_tuner.modulation_in_16_bits)


def test_a_step_of_nemo_s_that_is_one_cuda_graph_takes_the_memory_it_did() -> None:
    plain, captured = done_by("nemo"), done_by("nemo@captured")
    assert peaks(plain) == peaks(captured)
    assert step_work(captured) == step_work(plain)._replace(captured=True)


FIRST_FORWARD = LOADED + LAST_FORWARD - CUBLAS // 2
"""Before autograd has asked for cuBLAS."""


# ---- SimpleTuner


@pytest.mark.parametrize(
    ("model", "held", "second_bytes"), [("flux.1-dev", False, 2), ("flux.1-dev", True, 2), ("sdxl", False, 4)]
)
def test_a_lora_of_diffusers_loads_a_second_model_for_its_last_sample(
    model: str, held: bool, second_bytes: int
) -> None:
    """Beside the one that was trained, in fp32 by then if it is a U-Net, and text encoders that the script holds."""
    profile = lookup.model(model)
    kept = "resident" if held else "cached"
    strategy = Strategy.read({"validation_mode": "on", "gradient_checkpointing": "full", "text_encoder": kept})
    asked = Configuration.of(job_for(profile, {"method": "lora"}), strategy, Machine(gpu="b200"))
    facts = library.load_facts(asked)
    last, in_loop = (estimate(asked, facts, f"diffusers{end}").phases for end in ("", "@in-loop"))
    assert last["train"] == in_loop["train"]
    more = last["denoise"].allocated_bytes - in_loop["denoise"].allocated_bytes
    encoders = sum(2 * encoder.parameters for encoder in profile.text_encoders) if held else 0
    assert more == pytest.approx(second_bytes * profile.parameters + encoders, rel=1e-3)


def phases_of(model: str, trainer: str, validation: str) -> dict[str, PhasePeak]:
    """Those of a LoRA whose prompts and latents are encoded before training."""
    strategy = Strategy.read({"validation_mode": validation, "gradient_checkpointing": "full"})
    asked = Configuration.of(job_for(lookup.model(model), {"method": "lora"}), strategy, Machine(gpu="b200"))
    return dict(estimate(asked, library.load_facts(asked), trainer).phases)


def test_models_of_an_offloaded_pipeline_take_turns_beside_the_trained_one() -> None:
    """In the loop its transformer is the trained one, and at the end another, which the VAE never meets."""
    profile = lookup.model("z-image")
    last, in_loop = (phases_of("z-image", f"diffusers{end}", "offload") for end in ("", "@in-loop"))
    assert last["train"] == in_loop["train"]
    second = 2 * profile.parameters
    more = last["denoise"].allocated_bytes - in_loop["denoise"].allocated_bytes
    assert more == pytest.approx(second, rel=2e-2)
    assert second < last["decode"].allocated_bytes < last["denoise"].allocated_bytes - 0.8 * second
    whole = phases_of("z-image", "diffusers", "on")
    encoder = 2 * profile.text_encoders[0].parameters
    more = whole["denoise"].allocated_bytes - last["denoise"].allocated_bytes
    assert more == pytest.approx(encoder, rel=1e-2)
    assert last["denoise"].reserved_bytes < last["denoise"].allocated_bytes + (2 << 30)  # the encoder's are given back


def test_prompts_that_another_machine_encodes_need_no_text_encoder() -> None:
    here, elsewhere = (phases_of("flux.2-dev", f"diffusers{end}", "off")["encode"] for end in ("", "@remote-te"))
    encoder = lookup.model("flux.2-dev").text_encoders[0]
    assert here.allocated_bytes - elsewhere.allocated_bytes > 2 * encoder.parameters * 0.99


@pytest.mark.parametrize(("sharding", "seconds"), [("none", 0), ("zero-2", 1)])
def test_full_training_loads_a_second_transformer_instead_of_autocasts_copies(sharding: str, seconds: int) -> None:
    """Without autocast, as under DeepSpeed, there are none."""
    profile = lookup.model("flux.1-dev")
    strategy = Strategy.read({"validation_mode": "on", "gradient_checkpointing": "full", "sharding": sharding})
    gpus = 1 if sharding == "none" else 4
    asked = Configuration.of(job_for(profile, {"method": "full"}), strategy, Machine(gpu="b200", gpus=gpus))
    assert (asked.strategy.autocast != "none") == (sharding == "none")
    facts = library.load_facts(asked)
    last, in_loop = (estimate(asked, facts, f"diffusers{end}").phases for end in ("", "@in-loop"))
    more = last["denoise"].allocated_bytes - in_loop["denoise"].allocated_bytes
    assert more == pytest.approx(seconds * 2 * profile.parameters, rel=1e-3)


def encoded(trainer: str, swap_blocks: int = 0, validation: str = "off") -> tuple[int, int]:
    """(bytes while prompts are encoded on a card smaller than the text encoder, those of that encoder)."""
    profile = lookup.model("wan2.1-t2v-1.3b")
    job = job_for(profile, {"method": "lora", "frames": 1, "height": 512, "width": 512})
    strategy = Strategy(gradient_checkpointing="full", swap_blocks=swap_blocks, validation_mode=validation)
    asked = Configuration.of(job, strategy, Machine(gpu="rtx3070"))
    found = estimate(asked, library.load_facts(asked), trainer)
    return found.phases["encode"].allocated_bytes, 2 * profile.text_encoders[0].parameters


def test_a_text_encoder_comes_whole_in_every_trainer_but_ours() -> None:
    ours, whole = encoded("vplan")
    assert ours < whole // 3
    others = set(trainer_terms.NAMES) - {"ltx-trainer"}  # which reads a configuration of LTX-2
    apart = {trainer for trainer in others if encoded(trainer)[0] < whole}
    assert apart == {"musubi-tuner"}, "whose captions a script of its own has encoded before"
    assert encoded("musubi-tuner", validation="on")[0] > whole, "which prompts of samples are not"


@pytest.mark.parametrize(
    "trainer", ["onetrainer@encoders-offloaded", "onetrainer@loha-encoders-offloaded", "ai-toolkit"]
)
def test_layers_of_text_encoders_wait_in_host_ram_with_those_of_the_model(trainer: str) -> None:
    """OneTrainer's by a share of their own (util/config/TrainConfig.py at 23df383 ``__migration_10``); UMT5's table of
    256384 words, 1.96 GiB, is there twice in it."""
    nbytes, whole = encoded(trainer, swap_blocks=15)
    tables = 2 * 2 * 256384 * 4096 if "onetrainer" in trainer else 0
    assert nbytes - tables < whole // 3
    assert encoded("onetrainer", swap_blocks=15)[0] > whole


def test_simpletuner_zeroes_its_gradients_and_keeps_a_third_state() -> None:
    run = done_by("simpletuner", adapter_dtype="bf16")
    shift = STATES // 2
    assert steps(run) == (FIRST_FORWARD, LOADED + STATES + shift + GRADIENTS + LAST_FORWARD)
    assert after(run) == LOADED + STATES + shift + GRADIENTS


@pytest.mark.parametrize(("trainer", "times", "swapped", "come"), [
    ("vplan", 2, BLOCKS - 1, BLOCKS - 1),
    ("simpletuner", 2, BLOCKS - 1, BLOCKS - 1),
    ("simpletuner@ramtorch", 3, BLOCKS - 2, BLOCKS - 2),
    ("simpletuner@ramtorch", 3, BLOCKS - 1, BLOCKS),  # its layers come one by one, and none stays
])  # fmt: skip
def test_ramtorch_brings_its_weights_for_the_recomputation_too(
    trainer: str, times: int, swapped: int, come: int
) -> None:
    run = done_by(trainer, gradient_checkpointing="full", swap_blocks=swapped)
    moved = traffic(run)
    assert moved.host_forward_bytes == come * WEIGHTS
    assert moved.host_forward_bytes + moved.host_backward_bytes == times * come * WEIGHTS


def test_simpletuner_has_two_states_over_fp32_adapters_and_with_other_optimizers() -> None:
    assert after(done_by("simpletuner", adapter_dtype="fp32")) == LOADED + STATES + GRADIENTS
    assert after(done_by("simpletuner", adapter_dtype="bf16", optimizer="lion")) == LOADED + STATES + GRADIENTS


def test_under_zero_the_engine_frees_gradients_whoever_trains() -> None:
    plain = lay_out(Configuration.of(JOB, Strategy(sharding="zero-2"), EIGHT), FACTS, GRID)
    assert peaks(done_by("simpletuner", EIGHT, sharding="zero-2")) == peaks(plain)


# ---- LatentSync

HELPERS = -(-4 * latentsync.HELPERS // 512) * 512


def test_latentsync_clears_gradients_behind_the_forward() -> None:
    first, later = steps(done_by("latentsync"))
    assert first == HELPERS + FIRST_FORWARD
    assert later == LOADED + HELPERS + STATES + GRADIENTS + LAST_FORWARD
    assert after(done_by("latentsync")) == LOADED + HELPERS + STATES + GRADIENTS


def test_latentsync_has_a_communicator_on_one_gpu_too() -> None:
    configuration = Configuration.of(JOB, Strategy(), ONE)
    ours, theirs = (estimate(configuration, FACTS, name).breakdown.context for name in ("vplan", "latentsync"))
    assert theirs - ours == 600 * MIB  # a communicator, of one rank too (NVIDIA/nccl#2363)
    many = [estimate(Configuration.of(JOB, Strategy(), EIGHT), FACTS, name) for name in ("vplan", "latentsync")]
    assert many[0].breakdown.context == many[1].breakdown.context


def test_group_norms_of_a_decode_under_autocast_work_in_fp32() -> None:
    run = laid_out()
    norm, mean = (run.new(size, "activation", "native_group_norm") for size in (8 * MIB, 512))
    silu, convolution = run.new(8 * MIB, "activation", "silu"), run.new(4 * MIB, "activation", "convolution")
    decode = Stage("decode", [(STRATEGY_MOMENT, [norm, mean, silu, ~norm, convolution, ~silu])])
    run.phases.validation = (("decode", decode),)
    latentsync.decode_under_autocast(run)
    (_, events) = decode.stretches[0]
    upcast, downcast = events[0], events[6]
    assert events == [
        *(upcast, norm, ~upcast),
        *(mean, silu, ~norm),
        *(downcast, convolution, ~downcast, ~silu),
    ]
    sizes = [run.sizes[buffer] for buffer in (upcast, norm, mean, silu, downcast, convolution)]
    assert sizes == [16 * MIB, 16 * MIB, 512, 16 * MIB, 8 * MIB, 4 * MIB]


@pytest.mark.parametrize(("adapters", "nbytes"), [("bf16", 2), ("fp32", 4)])
def test_the_average_of_ai_toolkit_is_in_the_format_of_what_is_trained(adapters: str, nbytes: int) -> None:
    run = done_by("ai-toolkit", ema="gpu", adapter_dtype=adapters, master_weights="none")
    (average,) = (size for size, name in zip(run.sizes, run.program.op, strict=True) if name == "ema")
    assert average == nbytes * run.trained_parameters


# ---- EasyAnimate


def test_easyanimate_has_everything_on_the_gpu_at_the_start() -> None:
    run = done_by("easyanimate", text_encoder="swapped", vae="swapped")
    encoders = component_bytes(run, "swapped")
    assert encoders > 2 * MODEL.vae.parameters
    assert peaks(run)["load"] == LOADED - CUBLAS + -(-encoders // 512) * 512
    assert run.empty_cache.around_encode
    assert not done_by("easyanimate").empty_cache.around_encode


def test_easyanimate_validates_with_a_second_transformer() -> None:
    run = laid_out()
    run.phases.validation = (("denoise", Stage("denoise", [])), ("decode", Stage("decode", [])))
    easyanimate.second_transformer(run)
    found = {entry.phase: entry for entry in replay_stages(run)}
    weights = LOADED - CUBLAS
    more = found["denoise"].replayed.allocated_peak_bytes - LOADED - STATES - weights
    assert 0 <= more - component_bytes(run, "cached") < 512
    assert found["decode"].allocated_after_bytes == LOADED + STATES


def test_easyanimate_lists_gradients_until_the_next_backward_pass_is_over() -> None:
    plain, listed = laid_out(), laid_out()
    easyanimate.gradients_in_a_list(listed)
    before, behind = peaks(plain), peaks(listed)
    assert behind["step"] == before["step"] + GRADIENTS
    assert behind["optimizer_first"] == before["optimizer_first"]
    shared = laid_out(sharding="zero-2", optimizer_step="foreach")
    easyanimate.gradients_in_a_list(shared)
    assert peaks(shared) == peaks(laid_out(sharding="zero-2", optimizer_step="foreach"))


def test_easyanimate_keeps_clips_in_both_formats() -> None:
    run, cached = done_by("easyanimate", text_encoder="swapped", vae="swapped"), done_by("easyanimate")
    pixels = clip_pixels(run)
    batch = [run.sizes[buffer] for buffer in run.leftovers if buffer not in cached.leftovers]
    assert batch == [4 * 3 * pixels, 2 * 3 * pixels]
    assert all(~buffer in run.optimizer.ops for buffer in run.leftovers)


def test_a_lora_of_videox_fun_lists_no_gradients() -> None:
    assert peaks(done_by("videox-fun"))["step"] == peaks(laid_out())["step"]


# ---- cogvideox-factory


def test_encoders_leave_the_gpu_before_the_first_step_of_the_tables() -> None:
    plain, run = done_by("diffusers"), done_by("diffusers@2024-10")
    encoders = component_bytes(run, "cached")
    assert run.phases.unload is not None and encoders > 2 * MODEL.vae.parameters
    played = [entry for entry in replay_stages(run) if entry.run is run]
    leaving = next(at for at, entry in enumerate(played) if entry.stage is run.phases.unload)
    assert played[leaving].phase == "first_step"
    # Each of the two parts is rounded to 512 bytes.
    assert 0 <= played[leaving].replayed.allocated_peak_bytes - (LOADED - CUBLAS) - encoders < 1024
    assert played[leaving + 1].replayed.reserved_peak_bytes < encoders  # the cache was emptied behind them
    assert steps(plain) == (FIRST_FORWARD, LOADED + STATES + LAST_FORWARD)
    # Its loop holds noise, noisy latents and the next batch in fp32, each 2 MiB here.
    assert steps(run) == tuple(nbytes + 6 * MIB for nbytes in steps(plain))
    assert plain.phases.unload is None


def test_a_run_of_one_step_has_no_later_one() -> None:
    two, one = (done_by(f"diffusers@2024-10{end}") for end in ("", "-one-step"))
    later = {"train", "optimizer"}
    assert later <= {phase for phase, _ in two.stages}
    kept = [(phase, stage.name) for phase, stage in two.stages if phase not in later]
    assert [(phase, stage.name) for phase, stage in one.stages] == kept


@pytest.mark.parametrize("mode", ["on", "offload"])
def test_a_pipeline_brings_its_text_encoders_to_validation(mode: str) -> None:
    run = laid_out()
    strategy = run.strategy.replace(validation_mode=mode)
    run.configuration = replace(run.configuration, strategy=strategy)
    run.phases.validation = (("denoise", Stage("denoise", [])), ("decode", Stage("decode", [])))
    sample_terms.validation_prompts(run)
    found = {entry.phase: entry for entry in replay_stages(run)}
    encoders = component_bytes(run, "cached") - 2 * MODEL.vae.parameters
    weights = LOADED - CUBLAS
    before = LOADED + STATES - (weights if mode == "offload" else 0)
    assert found["denoise"].replayed.allocated_peak_bytes >= before + encoders > LOADED + STATES
    stay = encoders if mode == "on" else 0
    assert 0 <= found["denoise"].allocated_after_bytes - LOADED - STATES - stay < 512
    assert found["decode"].allocated_after_bytes == LOADED + STATES


def sampled(mode: str, **strategy: str) -> Run:
    """cogvideox-factory's run with an empty validation, and what its terms put around that."""
    run = done_by("diffusers@cogvideox-factory", **strategy)
    run.configuration = replace(run.configuration, strategy=run.strategy.replace(validation_mode=mode))
    run.phases.validation = (("denoise", Stage("denoise", [])), ("decode", Stage("decode", [])))
    sample_terms.validation_prompts(run)
    sample_terms.tested_beside_the_trained(run)
    return run


def test_cogvideox_factory_tests_with_a_second_transformer() -> None:
    run = sampled("on")
    played = [entry for entry in replay_stages(run) if entry.phase in ("denoise", "decode")]
    assert [entry.phase for entry in played] == ["denoise", "decode"] * 2
    model = run.total_bytes(run.named("weight").values())
    first, _, second, last = (entry.replayed.allocated_peak_bytes for entry in played)
    assert second - first == model
    assert last - second <= 0 and played[-1].allocated_after_bytes == LOADED + STATES
    assert len(sampled("offload").phases.validation) == 2


def test_cogvideox_factory_puts_the_whole_pipeline_on_the_gpu_before_it_is_offloaded() -> None:
    run = sampled("offload")
    encoders = component_bytes(run, "cached")
    denoise = next(entry for entry in replay_stages(run) if entry.phase == "denoise")
    assert denoise.replayed.allocated_peak_bytes >= LOADED + STATES + encoders
    # Text encoders leave before the model denoises, and the VAE behind that.
    assert denoise.allocated_after_bytes == LOADED + STATES


def test_cogvideox_factory_makes_ddp_while_encoders_are_there() -> None:
    """Two copies of the weights, where those are less than DDP broadcasts together."""
    alone, together = (done_by("diffusers@cogvideox-factory", EIGHT, sharding=how) for how in ("none", "ddp"))
    weights = together.total_bytes(together.named("weight").values())
    assert weights < diffusers.BROADCAST_BYTES
    made = [
        [run.sizes[event] for event in run.load.ops if event >= 0 and run.program.op[event] == "broadcast weights"]
        for run in (alone, together)
    ]
    assert made == [[], [weights] * 2]


def test_cogvideox_factory_samples_with_encoders_beside_those_that_train() -> None:
    run = sampled("on", text_encoder="resident", vae="resident")
    resident = component_bytes(run, "resident")
    denoise = next(entry for entry in replay_stages(run) if entry.phase == "denoise")
    assert denoise.replayed.allocated_peak_bytes >= LOADED + STATES + 2 * resident


# ---- kohya's swap


PINNED = power_of_two(WEIGHTS)


@pytest.mark.parametrize(
    ("trainer", "nbytes"),
    [("sd-scripts", 2 * PINNED), ("musubi-tuner", 2 * WEIGHTS + 2 * PINNED), ("diffusion-pipe", 2 * PINNED)],
)
def test_swap_in_place_has_no_ring_and_takes_what_it_needs_of_the_host(trainer: str, nbytes: int) -> None:
    """Copies that torch pins are rounded up to powers of two; musubi-tuner has two buffers of that kind."""
    strategy = {"gradient_checkpointing": "full", "swap_blocks": 2}
    ours, theirs = laid_out(**strategy), done_by(trainer, **strategy)
    found, expected = peaks(theirs), {stage: nbytes - 2 * WEIGHTS for stage, nbytes in peaks(ours).items()}
    if trainer == "diffusion-pipe":  # its encoders come to the GPU before the model
        assert found.pop("load") > expected.pop("load")
    assert found == expected
    assert host_ram.host_ram(ours, ONE).parts["weights"] == 2 * WEIGHTS
    held = host_ram.host_ram(theirs, ONE)
    if trainer == "diffusion-pipe":  # whose worst phase comes before: its text encoder is read
        assert held.phases["train"] == pytest.approx(host_ram.PROCESS_BYTES + nbytes, rel=1e-3)
    else:
        assert held.parts["weights"] == nbytes


# ---- DiffSynth-Studio


@pytest.mark.parametrize("mode", ["none", "full", "offload"])
def test_wan_in_diffsynth_turns_queries_and_keys_in_fp64(mode: str) -> None:
    job = job_for(MODEL, {"model": MODEL.name, "frames": 9, "height": 480, "width": 832})
    configuration = Configuration.of(job, Strategy(gradient_checkpointing=mode), ONE)
    known = library.load_facts(configuration)
    where = grid(MODEL, job)
    ours, theirs = (lay_out(configuration, known, where, name) for name in ("vplan", "diffsynth"))
    tokens, hidden = where["F"] * where["H"] * where["W"], 1536
    turned = {buffer for buffer, op in enumerate(theirs.program.op) if op.startswith("fp64")}
    assert [theirs.sizes[buffer] for buffer in turned] == [8 * tokens * hidden] * 2
    passes = 2 if mode == "none" else 3
    made = sum(event in turned for event in theirs.step.ops)
    assert made == sum(~event in turned for event in theirs.step.ops) == 2 * 2 * passes * MODEL.blocks
    assert len(theirs.step.ops) == len(ours.step.ops) + 2 * made
    if mode == "offload":
        pageable = host_ram.host_ram(theirs, ONE).parts["activations"]
        inputs = 2 * tokens * hidden * (MODEL.blocks - 1)  # the first is made outside the blocks
        assert pageable - theirs.host.pinned_bytes == inputs + MODEL.blocks * tokens * 64 * 16


def test_a_saved_checkpoint_comes_back_when_it_is_wanted_and_ours_one_block_sooner() -> None:
    strategy = Strategy(gradient_checkpointing="offload")
    job = job_for(MODEL, {"model": MODEL.name, "frames": 9, "height": 480, "width": 832})
    configuration = Configuration.of(job, strategy, ONE)
    known = library.load_facts(configuration)
    ours, theirs = (lay_out(configuration, known, grid(MODEL, job), name) for name in ("vplan", "diffusion-pipe"))
    inputs = {buffer for buffers in block_inputs(ours).values() for buffer in buffers}

    def brought(run: Run) -> dict[int, set[int]]:
        """Index of a block -> the inputs that are on the GPU behind its backward."""
        there: set[int] = set()
        found = {}
        for moment, events in run.step.stretches:
            there |= {event for event in events if event in inputs}
            there -= {~event for event in events if ~event in inputs}
            if moment.passes == "backward" and moment.block > 1:
                found[moment.block] = there.copy()
        return found

    assert sorted(ours.step.ops) == sorted(theirs.step.ops)
    ahead, none = brought(ours), brought(theirs)
    assert len(ahead) == MODEL.blocks - 2 and ahead.keys() == none.keys()
    for block, inputs_there in ahead.items():
        assert inputs_there == set(block_inputs(ours)["blocks", block - 1]) and none[block] == set()


def test_other_models_in_diffsynth_have_no_such_table() -> None:
    run = done_by("diffsynth")
    assert run.host.extra_bytes == run.host.pinned_bytes and not run.host.copies_shared_inputs


# ---- diffusion-pipe and ai-toolkit


def test_wan_s_text_encoder_is_read_into_host_ram_before_the_model() -> None:
    """UMT5-XXL in bf16, 2 bytes of each of its 5.68 billion numbers, and gone when the model is loaded."""
    phases = host_ram.host_ram(done_by("diffusion-pipe"), ONE).phases
    assert phases["encode"] == host_ram.PROCESS_BYTES + 2 * MODEL.text_encoders[0].parameters
    assert phases["load"] < phases["encode"] // 2


def test_diffusion_pipe_keeps_what_rounding_withheld_from_16_bit_weights() -> None:
    """A third state as large as the trained weights; none over fp32 adapters, and none for other optimizers."""
    plain = laid_out(adapter_dtype="bf16")
    kept = done_by("diffusion-pipe", adapter_dtype="bf16")
    trained_bytes = sum(kept.sizes[buffer] for buffer in kept.named("gradient").values())
    assert after(kept) - after(plain) == trained_bytes > 0
    assert after(done_by("diffusion-pipe")) == after(laid_out())
    assert after(done_by("diffusion-pipe", adapter_dtype="bf16", optimizer="lion")) == after(
        laid_out(adapter_dtype="bf16", optimizer="lion")
    )


def test_ai_toolkit_reads_weights_into_host_ram_first() -> None:
    """Wan 2.1 is published in fp32 and cast there; what lies in its files as it is loaded stays mapped."""
    run = done_by("ai-toolkit")
    assert run.host.loaded_bytes == 2 and run.host.waits_for_latents and run.empty_cache.after_load
    assert done_by("ai-toolkit", weights_dtype="fp32").host.loaded_bytes == 0
    assert not laid_out().host.loaded_bytes


def come_before(run: Run) -> list[int]:
    """Bytes of what comes and goes before the weights are as they stay."""
    return [sum(run.sizes[event] for event in stage.ops if event >= 0) for stage in run.phases.before_load]


def test_ai_toolkit_holds_a_model_whole_that_it_quantises_on_the_gpu() -> None:
    """Two bytes of each parameter before the model is there, unless `low_vram` is on; Kontext always."""
    quantised = {"weights_dtype": "fp8", "text_encoder": "resident"}
    plain, whole = (done_by(name, **quantised) for name in ("ai-toolkit", "ai-toolkit@quantised-whole"))
    assert plain.phases.before_load == ()
    assert come_before(whole) == [2 * MODEL.parameters]
    assert whole.stages[0] == ("load", whole.phases.before_load[0]) and whole.stages[1][1] is whole.load
    assert done_by("ai-toolkit@quantised-whole", text_encoder="resident").phases.before_load == ()
    assert host_ram.host_ram(plain, ONE).phases["load"] - 3 * 2**30 >= 2 * MODEL.parameters


def test_ai_toolkit_loads_encoders_beside_the_model_that_leave_once_prompts_are_cached() -> None:
    run = done_by("ai-toolkit", text_encoder_dtype="fp8")
    parameters = sum(encoder.parameters for encoder in MODEL.text_encoders)
    assert come_before(run) == [2 * parameters]
    found = {entry.stage.name: entry for entry in trained(run)}
    assert found["load"].allocated_after_bytes == pytest.approx(LOADED + parameters, rel=0.01)
    assert found["encoders leave"].allocated_after_bytes == LOADED - CUBLAS
    away = done_by("ai-toolkit", swap_blocks=2, gradient_checkpointing="full")
    assert away.phases.unload is None and away.phases.before_load == ()


def test_layers_that_ai_toolkit_fetches_lie_in_two_rings_of_four() -> None:
    strategy = {"gradient_checkpointing": "full", "swap_blocks": 2, "text_encoder": "resident"}
    run = done_by("ai-toolkit", **strategy)
    rings = [run.sizes[buffer] for buffer, op in enumerate(run.program.op) if op.startswith("layers ahead")]
    assert rings == [WEIGHTS] * 2  # the hand-made block is one weight
    assert "swap ring" not in {run.program.op[event] for event in run.load.ops if event >= 0}


def test_both_experts_swap_the_same_blocks() -> None:
    """Of the expert that does not run the same blocks wait in host RAM (musubi-tuner)."""
    job = JOB.replace(experts="both")
    model = FACTS.model.model_copy(update={"experts": 2})
    known = FACTS._replace(model=model)
    configuration = Configuration.of(
        job, Strategy(gradient_checkpointing="full", swap_blocks=2, inactive_expert="gpu"), ONE
    )
    run = lay_out(configuration, known, GRID, "musubi-tuner")
    other = next(run.sizes[buffer] for buffer, op in enumerate(run.program.op) if op == "other expert")
    assert other == (BLOCKS - 2) * WEIGHTS + idle_weights(run)[0] - BLOCKS * WEIGHTS
    assert host_ram.host_ram(run, ONE).parts["weights"] == 2 * 2 * WEIGHTS + 2 * PINNED


def test_fp8_trainers_cast_the_modulation_that_a_recording_leaves_in_16_bits() -> None:
    job = job_for(lookup.model("flux.1-dev"), {"height": 512, "width": 512})
    configuration = Configuration.of(job, Strategy(weights_dtype="fp8", gradient_checkpointing="full"), ONE)
    known = library.load_facts(configuration)
    where = grid(known.model, job)
    ours, theirs = (lay_out(configuration, known, where, name) for name in ("vplan", "sd-scripts"))
    weights = [sum(run.sizes[buffer] for buffer in run.named("weight").values()) for run in (ours, theirs)]
    width = known.model.config["num_attention_heads"] * known.model.config["attention_head_dim"]
    assert weights[0] - weights[1] == (19 * 2 * 6 + 38 * 3) * width * width  # shifts, scales and gates of both streams


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_quanto_leaves_wan_s_feed_forward_in_16_bits(dtype: str) -> None:
    """Beside it what embeds texts, makes the modulation of a step and the output, which float8 as recorded leaves."""
    job = job_for(MODEL, {"model": MODEL.name, "frames": 9, "height": 480, "width": 832})
    configuration = Configuration.of(job, Strategy(weights_dtype=dtype, gradient_checkpointing="full"), ONE)
    known = library.load_facts(configuration)
    whole, left = (
        lay_out(configuration, known, grid(MODEL, job), name) for name in ("simpletuner", f"simpletuner@{QUANTO}")
    )
    more = left.total_bytes(left.named("weight").values()) - whole.total_bytes(whole.named("weight").values())
    width, wider, text, patch = 1536, 8960, 4096, 64
    embedded = text * width + width * width + 6 * width * width + width * patch
    biases = width + wider
    expected = {"int8": 2 * width * wider * 30 + embedded, "fp8": (2 * width * wider + biases) * 30}
    assert more == expected[dtype]


def test_ai_toolkit_adapts_every_linear_layer_of_flux_s_blocks() -> None:
    """Rank 16 in fp32: 1,032,192 parameters in each of 38 single blocks and 2,457,600 in each of 19 double ones."""
    job = job_for(lookup.model("flux.1-dev"), {"height": 512, "width": 512})
    configuration = Configuration.of(job, Strategy(gradient_checkpointing="full"), ONE)
    known = library.load_facts(configuration)
    ours, theirs = (lay_out(configuration, known, grid(known.model, job), name) for name in ("vplan", "ai-toolkit"))
    added = sum(theirs.sizes[at] for at, op in enumerate(theirs.program.op) if op == "adapters on more layers")
    usual = ours.total_bytes(ours.named("gradient").values())
    assert usual + added == 4 * (38 * 1_032_192 + 19 * 2_457_600)


def test_simpletuner_adapts_flux_s_attention_alone() -> None:
    """Rank 16: q, k, v of all blocks, of both streams in the 19 double ones, whose outputs are adapted too."""
    job = job_for(lookup.model("flux.1-dev"), {"height": 512, "width": 512})
    configuration = Configuration.of(job, Strategy(gradient_checkpointing="full"), ONE)
    known = library.load_facts(configuration)
    run = lay_out(configuration, known, grid(known.model, job), "simpletuner")
    assert run.total_bytes(run.named("gradient").values()) == 4 * 16 * 2 * 3072 * (38 * 3 + 19 * 8)


def test_torchao_rounds_a_layer_beside_simpletuner_s_whole_model() -> None:
    """Nine bytes a number of FLUX.1's largest layer: the modulation of a double block."""
    job = job_for(lookup.model("flux.1-dev"), {"height": 512, "width": 512})
    configuration = Configuration.of(job, Strategy(weights_dtype="int8", gradient_checkpointing="full"), ONE)
    known = library.load_facts(configuration)
    run = lay_out(configuration, known, grid(known.model, job), f"simpletuner@{TORCHAO_WHOLE}")
    assert come_before(run) == [2 * known.model.parameters + 9 * 6 * 3072 * 3072]


@pytest.mark.parametrize(("mode", "blocks"), [("none", 57), ("full", 0)])
def test_adapted_modulation_keeps_the_factors_of_scales_and_gates(mode: str, blocks: int) -> None:
    """Behind each norm in fp32, and before each gate in 16 bits: twice for the tokens of both streams of a double
    block, once for those of a single one. With checkpoints they are left out (`lora_layers.adapters_on_modulation`)."""
    job = job_for(lookup.model("flux.1-dev"), {"height": 512, "width": 512})
    configuration = Configuration.of(job, Strategy(gradient_checkpointing=mode), ONE)
    known = library.load_facts(configuration)
    run = lay_out(configuration, known, grid(known.model, job), "sd-scripts")
    kept = {buffer for buffer, op in enumerate(run.program.op) if op == "factors of scales and gates"}
    tokens, width = 1024 + 512, 3072
    once = [event for _, events in run.step.stretches for event in events if event in kept]
    expected = (4 + 2) * tokens * width * (19 * 2 + 38) if blocks else 0
    assert sum(run.sizes[buffer] for buffer in once) == expected
    alive, most = set(), 0
    for event in run.step.ops:
        alive = alive | {event} if event in kept else alive - {~event} if ~event in kept else alive
        most = max(most, len(alive))
    assert not alive and most == blocks


def test_simpletuner_encodes_with_all_encoders_and_the_vae_there() -> None:
    job = job_for(lookup.model("sd3.5-medium"), {"height": 1024, "width": 1024})
    strategy = Strategy(gradient_checkpointing="full", text_encoder="cached", vae="cached")
    configuration = Configuration.of(job, strategy, ONE)
    known = library.load_facts(configuration)
    runs = [lay_out(configuration, known, grid(known.model, job), name) for name in ("vplan", "simpletuner")]
    apart, (together,) = map(encodings, runs)
    assert [part.name for part in together.components] == [entry.components[0].name for entry in apart]
    assert len(together.components) == 4
    weights = sum(part.weight_bytes for part in together.components)
    assert weights == pytest.approx(11_344_229_888, rel=0.002)  # rehearsed, when all are loaded
    assert together.only.peak_bytes == pytest.approx(12_794_487_296, rel=0.01)  # rehearsed, with the VAE at work


def test_diffusion_pipe_s_adapters_in_16_bits_over_fp8_take_half() -> None:
    """Weights, gradients and the two states of AdamW; and a third one, which fp32 ones have not."""
    job = job_for(MODEL, {"model": MODEL.name, "frames": 9, "height": 480, "width": 832})
    configuration = Configuration.of(job, Strategy(weights_dtype="fp8", gradient_checkpointing="full"), ONE)
    known = library.load_facts(configuration)
    names = ("diffusion-pipe", f"diffusion-pipe@{lora_layers.HALF_ADAPTERS}")
    fp32, half = (lay_out(configuration, known, grid(MODEL, job), name) for name in names)
    for kind in ("gradient", "optimizer"):
        whole, less = (run.total_bytes(run.named(kind).values()) for run in (fp32, half))
        assert less == pytest.approx(whole / 2, rel=0.001)
    added = [
        {op: run.sizes[buffer] for buffer, op in enumerate(run.program.op) if " more " in op or "Kahan" in op}
        for run in (fp32, half)
    ]
    assert added[1]["states of more adapters"] == pytest.approx(added[0]["states of more adapters"] / 2, rel=0.001)
    own = half.total_bytes(half.named("gradient").values())
    assert added[1]["Kahan buffer"] == own + added[1]["adapters on more layers"]
    assert "Kahan buffer" not in added[0]


def test_more_adapters_over_a_quantised_base_add_what_they_add_over_16_bits() -> None:
    """Weights, gradients and states of those that are not recorded, counted by hand, and what the step keeps."""
    job = job_for(MODEL, {"model": MODEL.name, "frames": 9, "height": 480, "width": 832})
    configuration = Configuration.of(job, Strategy(weights_dtype="fp8", gradient_checkpointing="full"), ONE)
    known = library.load_facts(configuration)
    ours, theirs = (lay_out(configuration, known, grid(MODEL, job), name) for name in ("vplan", "diffusion-pipe"))
    added = {op: theirs.sizes[buffer] for buffer, op in enumerate(theirs.program.op) if buffer >= len(ours.sizes)}
    width, wider, rank = 1536, 8960, 16
    feed_forward = 4 * rank * 2 * (width + wider) * MODEL.blocks  # two more fp32 adapters in each block
    assert added["adapters on more layers"] == feed_forward
    assert added["states of more adapters"] == pytest.approx(2 * feed_forward, rel=0.01)
    tokens = 3 * 30 * 52
    assert added["kept for more adapters"] * 16 > tokens * wider * 2  # at least the casted input of the second one
    bf16 = resolve(job, Strategy(gradient_checkpointing="full"), ONE)
    plain = library.load_facts(Configuration.of(job, bf16, ONE))
    over_16_bits = lay_out(Configuration.of(job, bf16, ONE), plain, grid(MODEL, job), "diffusion-pipe").program.op
    assert "adapters on more layers" not in over_16_bits


def test_diffsynth_s_model_offload_leaves_one_block_of_what_is_frozen() -> None:
    strategy = {"gradient_checkpointing": "full", "text_encoder": "resident", "vae": "resident"}
    plain, away = (done_by(name, **strategy) for name in ("diffsynth", "diffsynth@model-offload"))
    held = {stage: after.allocated_after_bytes for stage, after in ((e.stage.name, e) for e in trained(away))}
    assert held["load"] == LOADED - CUBLAS - STEM - BLOCKS * WEIGHTS
    assert next(away.sizes[buffer] for buffer, op in enumerate(away.program.op) if op == "layers in turn") == WEIGHTS
    more = host_ram.host_ram(away, ONE).parts["activations"] - host_ram.host_ram(plain, ONE).parts.get("activations", 0)
    assert more >= STEM + BLOCKS * WEIGHTS


def wan_lora(**strategy: object) -> Configuration:
    """LoRA of Wan 2.1 I2V 14B as DiffSynth-Studio's script trains it."""
    model = lookup.model("wan2.1-i2v-14b-480p")
    job = job_for(model, {"model": model.name, "lora_targets": list(model.lora.wide), "lora_rank": 32})
    fields = {"gradient_checkpointing": "full", "adapter_dtype": "bf16", "autocast": "none", **strategy}
    return Configuration.of(job, Strategy.read(fields), ONE)


def test_diffsynth_trains_the_model_that_is_recorded_from_its_own_code() -> None:
    """RMSNorm by hand in fp32 and positions in fp64 are in its recording, and not added to it once more."""
    configuration = wan_lora()
    known = library.load_facts(configuration)
    where = grid(known.model, configuration.job)
    ours, theirs = (lay_out(configuration, known, where, name) for name in ("vplan", "diffsynth"))
    assert ours.facts.step.variant == "step-lora-wide-half-half-full-one"
    assert theirs.facts.step.variant == "step-lora-wide-half-half-full-one-diffsynth"
    assert theirs.facts.step.versions["https://github.com/modelscope/DiffSynth-Studio"] == "fed7b18f"
    assert set(ours.named("gradient")) == set(theirs.named("gradient"))
    assert "fp64 copy" not in theirs.program.op
    tokens, width = 21 * 30 * 52, 5120
    assert 8 * tokens * width in {theirs.sizes[number] for number, op in enumerate(theirs.program.op) if op == "mul"}
    batches = Configuration.of(configuration.job.replace(batch_size=2), configuration.strategy, ONE)
    assert not library.load_facts(batches).own_code  # it has no batch size, and no tape


@pytest.mark.parametrize(
    ("trainer", "model", "checkpointing", "terms"),
    [
        ("musubi-tuner", "wan2.2-i2v-a14b", "full", {"fp64 copy", "time embedding of each token"}),
        ("musubi-tuner@2.1-time-embedding", "wan2.2-i2v-a14b", "full", {"fp64 copy"}),
        ("musubi-tuner", "wan2.1-t2v-1.3b", "none", {"fp64 copy"}),
        ("musubi-tuner", "wan2.1-t2v-1.3b", "full", {"fp64 copy"}),
        ("sd-scripts@unet", "sd1.5", "full", set()),
        ("sd-scripts@unet", "sd2.1", "full", set()),
    ],
)
def test_kohya_s_trainers_train_what_is_recorded_from_their_own_code(
    trainer: str, model: str, checkpointing: str, terms: set[str]
) -> None:
    """What makes their models others is in the recordings, and is not added once more. All is trained that diffusers'
    model trains with adapters on the same layers."""
    profile = lookup.model(model)
    job = job_for(profile, {"model": model, "lora_targets": list(profile.lora.wide)})
    configuration = Configuration.of(job, Strategy.read({"gradient_checkpointing": checkpointing}), ONE)
    known = library.load_facts(configuration)
    ours, theirs = (lay_out(configuration, known, grid(profile, job), name) for name in ("vplan", trainer))
    code = trainer.removesuffix("@unet").replace("@", "-")
    assert theirs.facts.step.variant == f"{ours.facts.step.variant}-{code}"
    assert theirs.in_own_code and not ours.in_own_code
    assert set(ours.named("gradient")) == set(theirs.named("gradient"))
    assert not terms & set(theirs.program.op)
    sizes = [{name: run.sizes[buffer] for name, buffer in run.named("gradient").items()} for run in (ours, theirs)]
    assert sizes[0] == sizes[1]
    partial = configuration.strategy.model_copy(update={"gradient_checkpointing": "partial", "checkpointed_blocks": 1})
    if not profile.traits.stages:  # which puts two recordings of one model together
        assert not library.load_facts(Configuration.of(job, partial, ONE)).own_code


def test_over_fp8_musubi_s_adapters_and_their_states_are_those_of_every_layer() -> None:
    model = lookup.model("wan2.1-t2v-1.3b")
    job = job_for(model, {"model": model.name})
    strategy = Strategy.read({"weights_dtype": "fp8", "gradient_checkpointing": "full"})
    configuration = Configuration.of(job, strategy, ONE)
    known = library.load_facts(configuration)
    ours, theirs = (lay_out(configuration, known, grid(model, job), name) for name in ("vplan", "musubi-tuner"))
    assert len(ours.named("gradient")) == 30 * 8 * 2 and len(theirs.named("gradient")) == 30 * 10 * 2
    trained = theirs.total_bytes(theirs.named("gradient").values())
    assert trained == 4 * 32 * 30 * (8 * 2 * 1536 + 2 * (1536 + 8960)) * job.lora_rank // 32
    assert theirs.total_bytes(theirs.named("optimizer").values()) == pytest.approx(2 * trained, rel=0.001)
    assert "adapters on more layers" not in theirs.program.op
    base = theirs.total_bytes(theirs.named("weight").values()) - trained
    assert base == pytest.approx(model.parameters, rel=0.001)  # a byte each, norms and embeddings too


def test_diffsynth_s_vae_keeps_the_frames_of_its_convolutions_through_the_step() -> None:
    """Two frames of the input of each causal convolution: of 96 channels in full size four times, and so on
    (diffsynth/models/wan_video_vae.py ``Encoder3d``); a rehearsal held 1.044 GiB of them at 480x832."""
    configuration = wan_lora(text_encoder="resident", vae="resident")
    known = library.load_facts(configuration)
    where = grid(known.model, configuration.job)
    ours, theirs = (lay_out(configuration, known, where, name) for name in ("vplan", "diffsynth"))
    assert ours.phases.encode and theirs.phases.encode
    assert held(ours.phases.encode.ops, ours.sizes)[0] == 0
    assert held(theirs.phases.encode.ops, theirs.sizes)[0] == pytest.approx(1.044 * 2**30, rel=0.001)
    for optimizer in (theirs.optimizer_first, theirs.optimizer):  # until the next clip
        assert {~event for event in optimizer.ops if event < 0} >= set(alive(theirs.phases.encode.ops, []))
