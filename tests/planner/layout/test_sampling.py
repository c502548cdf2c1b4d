"""A job that only samples: its phases, guidance, where encoders and VAE are, group offload, and its search."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalog import card_lookup, lookup
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import grid, job_for
from planner.errors import VplanError
from planner.estimate.estimate import after_step_bytes, estimate
from planner.estimate.stages import replay_stages
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.search.objectives.relaxed import relaxed
from planner.search.question import Question
from planner.search.screening import Screen, allocated_peak
from planner.search.search import Search
from planner.search.space import strategies
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.configuration import Configuration
from planner.spec.job import Bucket, Job, Machine, Strategy, ValidationShape
from planner.spec.plan import Estimate, Plan, plan_from_toml, plan_to_toml
from planner.spec.wording import words
from planner.units import GIB, MIB

WAN = lookup.model("wan2.1-t2v-1.3b")
COG = lookup.model("cogvideox-2b")
LARGE = lookup.model("wan2.1-i2v-14b-480p")
MACHINE = Machine.read({"gpu": "h100-80gb", "host_ram": 256 * GIB})
SHORT = {"frames": 17, "height": 480, "width": 832}


def asked(model: ModelProfile, **fields: Any) -> Job:
    return job_for(model, {"method": "sample", **fields})


def priced(job: Job, machine: Machine = MACHINE, **strategy: Any) -> Estimate:
    known = Strategy.read(strategy)
    configuration = Configuration.of(job, known, machine)
    refuse_contradictions(configuration)
    return estimate(configuration, load_facts(configuration))


def laid_out(job: Job, **strategy: Any) -> Run:
    configuration = Configuration.of(job, Strategy.read(strategy), MACHINE)
    return lay_out(configuration, load_facts(configuration), grid(lookup.model(job.model), job))


def of_trainer(configuration: Configuration, trainer: str) -> Run:
    job = configuration.job
    return lay_out(configuration, load_facts(configuration), grid(lookup.model(job.model), job), trainer)


def unguided(job: Job) -> Job:
    shape = ValidationShape(frames=job.frames, height=job.height, width=job.width, cfg=False)
    return job.replace(validation=shape)


def most_weights(run: Run) -> int:
    """The most bytes of weights that are there at once in one call of the model."""
    held = most = 0
    for event in run.step.ops:
        buffer = event if event >= 0 else ~event
        if run.program.category[buffer] == "weight":
            held += run.sizes[buffer] if event >= 0 else -run.sizes[buffer]
            most = max(most, held)
    assert held == 0
    return most


def test_sampling_loads_encodes_denoises_and_decodes() -> None:
    found = priced(asked(WAN))
    assert list(found.phases) == ["encode", "load", "denoise", "decode"]
    weights = found.phases["load"].allocated_bytes
    assert weights == pytest.approx(2 * WAN.parameters, rel=0.03)  # the time embedder is kept in fp32, cuBLAS
    parts = found.breakdown
    assert parts.gradients == parts.optimizer == parts.ema == found.disk_bytes == 0
    assert found.strategy.autocast == "none"
    assert plan_from_toml(plan_to_toml(Plan.of(found))) == Plan.of(found)
    # Training runs the same forward, and keeps its activations.
    trained = Strategy(autocast="none", adapter_dtype="bf16")
    job = job_for(WAN, {})
    configuration = Configuration.of(job, trained, MACHINE)
    step = estimate(configuration, load_facts(configuration)).phases["train"]
    assert found.phases["denoise"].allocated_bytes < step.allocated_bytes / 5


def test_guidance_doubles_the_batch_or_the_calls() -> None:
    for model in (COG, WAN):
        job = asked(model, **({} if model is COG else SHORT))
        twice, once = priced(job), priced(unguided(job))
        assert twice.flops == 2 * once.flops
        beside = [
            found.phases["denoise"].allocated_bytes - found.phases["load"].allocated_bytes for found in (twice, once)
        ]
        if model is COG:
            assert beside[0] == pytest.approx(2 * beside[1], rel=0.05)
        else:
            assert beside[0] == beside[1]
            assert twice.step_seconds == pytest.approx(2 * once.step_seconds)
        assert twice.phases["decode"].allocated_bytes == once.phases["decode"].allocated_bytes
    flux = lookup.model("flux.1-dev")  # takes the guidance scale as an input
    assert priced(asked(flux)).flops == priced(unguided(asked(flux))).flops


def test_a_batch_is_denoised_and_decoded_together() -> None:
    # Tapes of one sample and of more are not the same, so 2 and 4.
    two, four = (priced(asked(COG, frames=9, batch_size=number)) for number in (2, 4))
    for phase in ("denoise", "decode"):
        beside = [found.phases[phase].allocated_bytes - found.phases["load"].allocated_bytes for found in (two, four)]
        assert beside[1] == pytest.approx(2 * beside[0], rel=0.1)
    sliced = [priced(asked(COG, frames=9, batch_size=number), vae_slicing=True) for number in (2, 4)]
    grown = sliced[1].phases["decode"].allocated_bytes - sliced[0].phases["decode"].allocated_bytes
    assert grown < 0.1 * (four.phases["decode"].allocated_bytes - two.phases["decode"].allocated_bytes)


def test_a_clip_of_one_chunk_is_decoded_as_one() -> None:
    """9 frames were once priced as five chunks of CogVideoX's VAE, which is 41."""
    cogvideox = lookup.model("cogvideox-5b")
    decode = [
        priced(asked(cogvideox, frames=frames, height=480, width=720), vae="swapped").phases["decode"].allocated_bytes
        for frames in (9, 17, 25, 33, 41, 49)
    ]
    assert decode == sorted(set(decode))


def test_what_fills_the_last_patch_is_not_decoded() -> None:
    """CogVideoX 1.5 takes two latent frames a patch, and its pipeline drops what it added: 5 of 17 frames, 6 of 21."""
    model = lookup.model("cogvideox1.5-5b")
    odd, even = (priced(asked(model, frames=frames, height=480, width=720), vae="swapped") for frames in (17, 21))
    assert odd.phases["denoise"] == even.phases["denoise"]
    assert odd.phases["decode"].allocated_bytes < even.phases["decode"].allocated_bytes


def test_where_the_encoders_and_the_vae_are() -> None:
    kinds = ("cached", "resident", "swapped")
    cached, resident, swapped = (priced(asked(WAN), text_encoder=kind, vae=kind) for kind in kinds)
    vae, encoder = 2 * WAN.vae.parameters, 2 * WAN.text_encoders[0].parameters
    model = cached.phases["load"].allocated_bytes
    assert resident.phases["load"].allocated_bytes == pytest.approx(model + vae + encoder, rel=0.001)
    assert swapped.phases["load"] == cached.phases["load"]
    # In turn: the encoder is gone before the model comes, the model before the VAE.
    assert swapped.phases["encode"] == cached.phases["encode"]
    assert cached.phases["decode"].allocated_bytes - swapped.phases["decode"].allocated_bytes == pytest.approx(
        2 * WAN.parameters, rel=0.03
    )
    assert resident.phases["decode"].allocated_bytes == pytest.approx(
        cached.phases["decode"].allocated_bytes + encoder, rel=0.001
    )


def test_a_set_of_shapes_needs_what_its_worst_needs_and_its_parts_are_all_there() -> None:
    shapes = (Bucket(frames=17, height=480, width=832), Bucket(frames=49, height=480, width=832))
    for vae in ("cached", "swapped"):
        mixed = priced(asked(WAN, buckets=shapes), vae=vae, text_encoder_dtype="nf4")
        worst = priced(asked(WAN, frames=49), vae=vae, text_encoder_dtype="nf4")
        assert mixed.peak.allocated_bytes == worst.peak.allocated_bytes
        assert mixed.breakdown.weights == worst.breakdown.weights
        assert mixed.breakdown.fragmentation < 3 * GIB


@pytest.mark.parametrize(
    ("kind", "stream", "expected"),
    [("block", False, 1.2), ("block", True, 2.0), ("leaf", False, 300 / 1024), ("leaf", True, 400 / 1024)],
)
def test_group_offload_holds_what_the_reference_worked_out(kind: str, stream: bool, expected: float) -> None:
    """Wan I2V 14B: blocks of 0.75 GiB beside 0.5 of the rest (the time embedder is kept in fp32); by leaf the largest
    layer is condition_embedder.time_proj, and with a stream the one before it is still there."""
    run = laid_out(asked(LARGE), group_offload=kind, group_offload_stream=stream)
    assert most_weights(run) == pytest.approx(expected * GIB, rel=0.05)
    assert not set(run.load.ops) & set(run.named("weight").values())
    if kind == "block":
        block = sum(run.sizes[buffer] for name, buffer in run.named("weight").items() if name.startswith("blocks.7."))
        rest = sum(run.sizes[buffer] for name, buffer in run.named("weight").items() if not name.startswith("blocks."))
        assert block == pytest.approx(0.752 * GIB, rel=0.001)
        assert most_weights(run) == rest + (2 if stream else 1) * block


def test_all_ways_of_group_offload_meet_in_the_fp32_decode() -> None:
    """The fp32 VAE of Wan at 81 frames of 480x832: 7.6 GiB beside its weights."""
    for kind in ("block", "leaf"):
        for stream in (False, True):
            found = priced(asked(LARGE), vae_dtype="fp32", group_offload=kind, group_offload_stream=stream)
            vae = 4 * LARGE.vae.parameters
            assert found.phases["decode"].allocated_bytes - vae == pytest.approx(7.6 * GIB, rel=0.015)
            assert found.phases["denoise"].allocated_bytes < 6 * GIB
            # T5's layers are no direct children, so by block the whole encoder comes; by leaf its embedding is largest.
            whole = 2 * LARGE.text_encoders[0].parameters
            need = found.phases["encode"].allocated_bytes
            assert need > whole if kind == "block" else need < whole / 5


def test_streams_hide_transfers_that_otherwise_wait() -> None:
    job = asked(LARGE)
    plain, waits, hides = (
        priced(job, group_offload=kind, group_offload_stream=stream).step_seconds
        for kind, stream in (("none", False), ("block", False), ("block", True))
    )
    assert plain <= hides < waits


def test_validation_may_bring_the_model_group_by_group() -> None:
    strategy = {"gradient_checkpointing": "full", "validation_mode": "on"}
    job = job_for(WAN, SHORT)
    plain, offloaded = priced(job, **strategy), priced(job, **strategy, group_offload="block")
    assert plain.phases["train"] == offloaded.phases["train"]
    saved = plain.phases["decode"].allocated_bytes - offloaded.phases["decode"].allocated_bytes
    assert saved > 1.5 * WAN.parameters
    # Validation begins with the whole model there; what follows needs less.
    known = Strategy.read(strategy)
    configuration = Configuration.of(job, known, MACHINE)
    left = after_step_bytes(configuration, load_facts(configuration))
    assert offloaded.phases["denoise"].allocated_bytes == left
    assert plain.phases["denoise"].allocated_bytes > offloaded.phases["denoise"].allocated_bytes
    assert plain.phases["save"].allocated_bytes == offloaded.phases["save"].allocated_bytes
    with pytest.raises(VplanError, match="no gradients"):
        priced(job, gradient_checkpointing="full", group_offload="block")


def test_the_cache_is_emptied_around_the_decoding_of_a_validation_sample() -> None:
    """As trainers/sampling/validate.py does; a pipeline of cogvideox-factory's is not priced so."""
    job = job_for(WAN, SHORT)
    configuration = Configuration.of(job, Strategy(validation_mode="offload", gradient_checkpointing="full"), MACHINE)
    trainers = ("vplan", "diffusers@cogvideox-factory")
    stages = {trainer: replay_stages(of_trainer(configuration, trainer)) for trainer in trainers}
    ours, scripts = ({entry.phase: entry for entry in played} for played in stages.values())
    run = ours["decode"].run
    weights = run.total_bytes(run.named("weight").values())
    assert ours["denoise"].allocated_after_bytes < 0.2 * weights  # they have left, and what they lay in is gone too
    assert ours["decode"].replayed.reserved_peak_bytes < scripts["decode"].replayed.reserved_peak_bytes
    assert ours["save"].replayed.reserved_peak_bytes < ours["decode"].replayed.reserved_peak_bytes
    assert scripts["save"].replayed.reserved_peak_bytes == scripts["decode"].replayed.reserved_peak_bytes


def test_a_clip_that_steers_a_sample_lies_there_in_pixels() -> None:
    """WanVACEPipeline keeps it in fp32 until it returns: 41.1 MiB at 9 frames of 480x832, as rehearsed."""
    vace = lookup.model("wan2.1-vace-1.3b")
    run = laid_out(job_for(vace, {**SHORT, "frames": 9}), validation_mode="on", gradient_checkpointing="full")
    (clip,) = [buffer for buffer, name in enumerate(run.program.op) if name == "clip that steers"]
    assert run.sizes[clip] == 4 * 3 * 9 * 480 * 832
    (_, denoise), (_, decode) = run.phases.validation
    assert clip in denoise.ops and ~clip in decode.ops


def test_what_moves_the_weights_twice_is_refused() -> None:
    two = Machine.read({"gpu": "h100-80gb", "gpus": 2, "host_ram": 256 * GIB})
    with pytest.raises(VplanError, match="both move the weights"):
        priced(asked(WAN), group_offload="leaf", swap_blocks=3)
    with pytest.raises(VplanError, match="the engine holds the weights"):
        priced(job_for(WAN, SHORT), two, sharding="zero-3", validation_mode="on", group_offload="block")


def test_swapped_blocks_offload_nothing_twice_when_validation_moves_the_model() -> None:
    strategy = {"gradient_checkpointing": "full", "validation_mode": "offload", "swap_blocks": 20}
    found = priced(job_for(WAN, SHORT), **strategy)
    assert (
        found.phases["decode"].allocated_bytes
        < priced(job_for(WAN, SHORT), **{**strategy, "validation_mode": "on"}).phases["decode"].allocated_bytes
    )


@pytest.mark.parametrize(
    ("job", "strategy", "words"),
    [
        ({}, {"sharding": "ddp"}, "every GPU works alone"),
        ({}, {"sharding": "zero-3"}, "every GPU works alone"),
        ({"validation": {"frames": 5, "height": 480, "width": 832}}, {}, "sets another"),
        ({}, {"group_offload_stream": True}, "needs group_offload"),
    ],
)
def test_what_a_job_that_samples_cannot_have(job: dict[str, Any], strategy: dict[str, Any], words: str) -> None:
    with pytest.raises(VplanError, match=words):
        priced(asked(WAN, **job), **strategy)


def test_several_gpus_sample_alone() -> None:
    eight = Machine.read({"gpu": "h100-80gb", "gpus": 8, "host_ram": 512 * GIB})
    assert priced(asked(WAN, **SHORT), eight).peak == priced(asked(WAN, **SHORT)).peak


@pytest.mark.parametrize("method", ["sample", "lora"])
def test_a_decode_that_is_not_recorded_is_said_and_never_called_fits(method: str) -> None:
    job = job_for(WAN, {**SHORT, "method": method})
    known = Strategy(validation_mode="on") if method == "lora" else Strategy()
    configuration = Configuration.of(job, known, MACHINE)
    found = load_facts(configuration)
    assert estimate(configuration, found).verdict == "fits"
    unknown = found._replace(around={key: tape for key, tape in found.around.items() if "decode" not in key})
    told = estimate(configuration, unknown)
    assert told.verdict == "tight"
    assert any("AutoencoderKLWan has no recording to decode" in note for note in told.assumptions)


# ---- the search


def search(model: ModelProfile, gpu: str, **job: Any) -> Search:
    card = card_lookup.parse_gpus(gpu)[1]
    machine = Machine(gpu=card.name, host_ram=128 * GIB)
    return Search(Question(asked(model, **job), Strategy(), machine, model, card, frozenset()), Screen(load_facts))


def test_suggest_brings_the_model_group_by_group_where_it_does_not_fit() -> None:
    found = search(LARGE, "24GB")
    best = found.best(found.question.job)
    assert best is not None
    assert best.plan.verdict == "fits" and best.plan.lossy == ()
    assert best.plan.strategy.group_offload == "block"
    assert best.plan.strategy.group_offload_stream  # what waits for transfers is slower
    assert {switch.field for switch in best.switches} == {"group_offload", "group_offload_stream"}
    roomy = search(LARGE, "80GB")
    plain = roomy.best(roomy.question.job)
    assert plain is not None and plain.plan.strategy.group_offload == "none"


def test_suggest_decodes_in_tiles_only_when_nothing_lossless_fits() -> None:
    found = search(COG, "12GB")
    best = found.best(found.question.job)
    assert best is not None
    assert best.plan.lossy == ("vae_tiling",)


def test_too_little_host_ram_is_answered_with_the_least_that_does() -> None:
    found = search(LARGE, "24GB")
    poor = found.question._replace(machine=found.question.machine.replace(host_ram=32 * GIB))
    told = {wish.field: wish.after for wish in relaxed(Search(poor, Screen(load_facts)), found.question.job)}
    assert told["host_ram"] == "34GiB"  # the model pageable and one process, not 79 GiB of pinned copies


# ---- what holds for any shape

SHAPES = st.tuples(st.integers(0, 12), st.integers(4, 40), st.integers(4, 40))
WAYS: list[dict[str, Any]] = [
    {},
    {"vae": "swapped"},
    {"group_offload": "block"},
    {"group_offload": "block", "group_offload_stream": True},
    {"group_offload": "leaf"},
    {"group_offload": "leaf", "group_offload_stream": True},
]
BARE = {"text_encoder_dtype": "nf4"}


def need(shape: tuple[int, int, int], batch: int = 1, **strategy: Any) -> int:
    frames, rows, columns = shape
    return allocated_peak(
        laid_out(
            asked(WAN, frames=4 * frames + 1, height=16 * rows, width=16 * columns, batch_size=batch),
            **BARE,
            **strategy,
        )
    )[0]


@given(SHAPES, st.integers(0, 2), st.integers(1, 8), st.sampled_from(WAYS))
@settings(max_examples=15, deadline=None)
def test_more_of_anything_never_needs_less(
    shape: tuple[int, int, int], axis: int, more: int, way: dict[str, Any]
) -> None:
    if shape[0] == 0 and axis == 0:  # an image and a clip take other ways through the VAE
        return
    larger = tuple(size + more * (index == axis) for index, size in enumerate(shape))
    assert need(shape, **way) <= need(larger, **way)  # type: ignore[arg-type]
    assert need(shape, 2, **way) <= need(shape, 3, **way)


@given(SHAPES)
@settings(max_examples=10, deadline=None)
def test_smaller_groups_never_need_more(shape: tuple[int, int, int]) -> None:
    plain, _, block, block_stream, leaf, leaf_stream = (need(shape, **way) for way in WAYS)
    assert leaf <= block <= plain
    assert leaf_stream <= block_stream <= plain
    assert leaf <= leaf_stream <= leaf + 400 * MIB
    assert block <= block_stream


def test_every_way_to_sample_has_words_of_its_own() -> None:
    ways = [words(each, ()) for each in strategies(asked(COG), Strategy(), MACHINE, ())]
    assert len(ways) > 4 and len(set(ways)) == len(ways)
