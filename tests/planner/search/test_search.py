"""The search: what it prefers, what it never trades, what it tells, and that its cheap look agrees with the replay."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

import vplan
from planner.catalog import card_lookup, lookup
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import check_shape, grid, job_for
from planner.commands import cli
from planner.errors import NotRecordedError, VplanError
from planner.estimate.estimate import Assessment, assess, estimate
from planner.estimate.stages import reused_replay
from planner.layout.recordings import load_facts
from planner.search.objectives.largest import largest, largest_by
from planner.search.objectives.objective import PREFERRED, frames, smaller_sizes
from planner.search.objectives.relaxed import relaxed
from planner.search.question import Question, Suggestion
from planner.search.screening import QuickEstimate, Screen
from planner.search.search import Search
from planner.search.space import baseline, strategies
from planner.search.suggester import Suggester
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan, plan_from_toml, plan_to_toml
from planner.tape.variants.variant import OPTIMIZERS
from planner.units import GIB
from tests.covering import in_turns

MODEL = lookup.model("cogvideox-2b")
SHORT = {"frames": 9, "height": 240, "width": 352}
SCREEN = Screen(load_facts)


def ask(gpu: str = "24GB", fixed: dict[str, Any] | None = None, lossy: bool = False, **job: Any) -> Search:
    return ask_of(MODEL, gpu, fixed, lossy, **{**SHORT, **job})


def ask_of(
    model: ModelProfile, gpu: str, fixed: dict[str, Any] | None = None, lossy: bool = False, **job: Any
) -> Search:
    card = card_lookup.gpu(gpu)
    machine = Machine(gpu=card.name, host_ram=32 * GIB)
    typed = fixed or {}
    job_record = lookup.job_for(model, job)
    return Search(Question(job_record, Strategy.read(typed), machine, model, card, frozenset(typed), lossy), SCREEN)


def best(search: Search) -> Suggestion:
    found = search.best(search.question.job)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("method", "checkpointing", "swap"),
    [("lora", "none", 0), ("lora", "full", 7), ("full", "none", 0), ("full", "full", 0)],
)
def test_a_look_says_what_the_replay_says_but_for_fragmentation(method: str, checkpointing: str, swap: int) -> None:
    machine = Machine(gpu="24GB", host_ram=32 * GIB)
    job = lookup.job_for(MODEL, {**SHORT, "method": method})
    configuration = Configuration.of(
        job, Strategy.read({"gradient_checkpointing": checkpointing, "swap_blocks": swap}), machine
    )
    look = SCREEN.quick_estimate(configuration)
    full = estimate(configuration, load_facts(configuration))
    assert look.allocated_bytes == full.peak.allocated_bytes
    assert look.host_ram_bytes == full.host_ram_bytes
    assert look.step_seconds == pytest.approx(full.step_seconds)
    assert look.device_bytes <= full.peak.device_bytes
    assert SCREEN.floor_seconds(configuration) <= look.step_seconds
    assert SCREEN.host_ram_bytes(configuration) == look.host_ram_bytes


def test_a_roomy_card_needs_no_switch() -> None:
    found = best(ask("80GB"))
    assert found.plan.verdict == "fits"
    assert found.plan.strategy.gradient_checkpointing == "none"
    assert found.plan.lossy == ()


def test_a_small_card_gets_what_it_takes_and_is_told_what_each_switch_did() -> None:
    found = best(ask("24GB", frames=49, height=480, width=720))
    assert found.plan.verdict == "fits"
    assert found.plan.lossy == ()
    first = found.switches[0]
    assert first.field == "gradient_checkpointing" and first.before == "none"
    assert first.device_bytes < 0 < first.step_seconds
    naive = SCREEN.quick_estimate(Configuration.of(found.plan.job, Strategy(), found.plan.machine))
    saved = sum(switch.device_bytes for switch in found.switches)
    assert found.plan.peak.device_bytes - saved >= naive.device_bytes
    assert set(first.to_json()) == {"field", "from", "to", "device_bytes", "step_seconds"}


def test_what_was_typed_is_never_traded() -> None:
    found = best(ask("80GB", {"gradient_checkpointing": "full", "optimizer_step": "fused"}))
    assert found.plan.strategy.gradient_checkpointing == "full"
    assert found.plan.strategy.optimizer_step == "fused"
    assert all(other.strategy.optimizer_step == "fused" for other in found.alternatives)


def test_what_is_typed_and_contradicts_itself_is_refused_by_name() -> None:
    with pytest.raises(VplanError, match="partial needs a number of blocks"):
        best(ask("80GB", {"gradient_checkpointing": "partial"}))


def test_nothing_is_switched_on_for_less_than_the_prediction_is_good_for() -> None:
    # Steps of speed have edges: at some shapes a gain of less than one is across one.
    found = best(ask("80GB", {"gradient_checkpointing": "full"}, frames=49))
    assert found.plan.strategy.optimizer_step == "foreach"
    assert found.switches == ()


def test_blocks_are_swapped_only_as_far_as_needed() -> None:
    search = ask("8GB", {"gradient_checkpointing": "full"}, frames=49, height=480, width=720)
    found = best(search).plan
    swapped = found.strategy.swap_blocks
    assert found.verdict == "fits" and 0 < swapped < MODEL.blocks - 1
    fewer = search.estimate(found.job, found.strategy.replace(swap_blocks=max(0, swapped - 2)))
    assert fewer.verdict != "fits"


def test_lossy_is_for_when_nothing_lossless_fits_and_the_other_kind_is_named() -> None:
    fixed = {"gradient_checkpointing": "full", "offload_optimizer": "none", "offload_params": "none"}
    found = best(ask("16GB", fixed, method="full"))
    assert "optimizer" in found.plan.lossy or "weights_dtype" in found.plan.lossy
    assert any(other.lossy == () for other in found.alternatives)


def test_runners_up_need_less_and_become_the_ladder() -> None:
    found = best(ask("80GB", frames=49, height=480, width=720))
    needs = [found.plan.peak.allocated_bytes, *(other.peak.allocated_bytes for other in found.alternatives)]
    assert len(needs) > 1 and needs == sorted(needs, reverse=True)
    assert all(other.step_seconds >= found.plan.step_seconds * 0.99 for other in found.alternatives)
    plan = found.to_plan()
    assert len(plan.ladder) == len(found.alternatives)
    assert plan_from_toml(plan_to_toml(plan)) == plan
    assert isinstance(plan, Plan)


def test_the_longest_clip_fits_and_one_step_more_does_not() -> None:
    search = ask("8GB", {"gradient_checkpointing": "full", "swap_blocks": 5})
    found = largest(search, frames(MODEL))
    assert found is not None and found.plan.verdict == "fits"
    assert (found.plan.job.frames - 1) % MODEL.shape.frame_step == 0
    longer = found.plan.job.replace(frames=found.plan.job.frames + MODEL.shape.frame_step)
    assert next(search.by_speed(longer, False), None) is None


@pytest.mark.parametrize("gpu", ["8GB", "16GB"])
@pytest.mark.parametrize("lossy", [False, True])
def test_the_longest_clip_is_as_long_where_any_plan_will_do(gpu: str, lossy: bool) -> None:
    by_any, by_fastest = (
        largest_by(search, search.question.job, frames(MODEL), lossy, fastest=fastest)
        for search, fastest in ((ask(gpu), False), (ask(gpu), True))
    )
    assert (by_any and by_any.job.frames) == (by_fastest and by_fastest.job.frames)


def test_no_length_is_asked_about_where_the_shortest_clip_lacks_host_ram() -> None:
    screen = Counting(load_facts)
    question = ask_of(lookup.model("easyanimate-v5.1-7b"), "24GB", method="full").question
    search = Search(question._replace(machine=question.machine.replace(gpus=4, host_ram=8 * GIB)), screen)
    assert largest_by(search, question.job, frames(question.model), False, fastest=False) is None
    assert screen.asked == 0
    rich = Search(question._replace(machine=question.machine.replace(gpus=4, host_ram=512 * GIB)), screen)
    assert largest_by(rich, question.job, frames(question.model), False, fastest=False) is not None
    assert screen.asked > 0


class Counting(Screen):
    asked = 0

    def quick_estimate(self, configuration: Configuration) -> QuickEstimate:
        self.asked += 1
        return super().quick_estimate(configuration)


def test_a_part_is_checkpointed_where_its_overhead_is_another_with_every_count() -> None:
    """Of 59 counts under FSDP a replay takes 21 to 26 % more than the quick estimate until 40 blocks, then ever less:
    the allocated peak is no longer the checkpoints', and what is reserved falls with every block as before."""
    model, card = lookup.model("sana1.5-4.8b"), card_lookup.gpu("48GB")
    job = lookup.job_for(model, {"method": "full", "height": 896, "width": 1152, "batch_size": 2})
    machine = Machine(gpu=card.name, gpus=2, host_ram=128 * GIB)
    search = Search(Question(job, Strategy(), machine, model, card), SCREEN)
    plan = best(search).plan
    count = plan.strategy.checkpointed_blocks
    assert plan.strategy.sharding == "fsdp" and count is not None
    fewer = plan.configuration.strategy.replace(checkpointed_blocks=count - 1)
    assert search.fresh_estimate(plan.job, fewer).verdict == "tight"


def test_the_largest_batch_fits() -> None:
    search = ask("8GB", {"gradient_checkpointing": "full", "swap_blocks": 0})
    found = largest(search, PREFERRED["batch"](MODEL))
    assert found is not None and found.plan.verdict == "fits" and found.plan.job.batch_size > 1


@pytest.mark.parametrize("name", lookup.model_names())
def test_every_value_of_a_wish_is_one_that_the_model_takes(name: str) -> None:
    model = lookup.model(name)
    job = lookup.job_for(model, {})
    wishes = [make(model) for make in PREFERRED.values()] + [smaller_sizes(model, job)]
    for wish in wishes:
        for value in (*wish.values[:3], *wish.values[-3:]):
            asked = wish.put(job, value)
            check_shape(model, asked.frames, asked.height, asked.width)
            load_facts(
                Configuration.of(asked, Strategy(gradient_checkpointing="full"), Machine(gpu="24GB"))
            ).step.values(grid(model, asked))


def test_when_nothing_fits_the_tightest_and_what_to_relax_are_told() -> None:
    search = ask("12GB", {"gradient_checkpointing": "none"}, frames=49, height=480, width=720)
    assert search.best(search.question.job) is None
    tightest = search.tightest(search.question.job)
    assert tightest is not None and tightest.verdict == "no"
    wishes = relaxed(search, search.question.job)
    assert {"frames", "gradient_checkpointing"} <= {wish.field for wish in wishes}
    for wish in wishes:
        assert wish.plan.verdict == "fits"
        if wish.field == "gradient_checkpointing":
            assert wish.plan.job == tightest.job and wish.after in ("full", "partial")
            assert (wish.after == "partial") == (wish.plan.strategy.checkpointed_blocks is not None)
            continue
        changed = [name for name in Job.model_fields if getattr(wish.plan.job, name) != getattr(tightest.job, name)]
        assert len(changed) == (2 if wish.field == "resolution" else 1)


def test_partial_checkpointing_that_does_not_fit_may_become_another() -> None:
    typed = {"gradient_checkpointing": "partial", "checkpointed_blocks": 4}
    search = ask("12GB", typed, frames=49, height=480, width=720)
    assert search.best(search.question.job) is None
    tightest = search.tightest(search.question.job)
    assert tightest is not None
    refuse_contradictions(tightest.configuration)
    assert 0 < tightest.strategy.swap_blocks <= 4
    (wish,) = [wish for wish in relaxed(search, search.question.job) if wish.field == "checkpointed_blocks"]
    assert wish.before == 4 and wish.after == wish.plan.strategy.checkpointed_blocks
    assert 4 < wish.plan.strategy.checkpointed_blocks < MODEL.blocks


def test_as_few_blocks_are_checkpointed_as_fit() -> None:
    """On a card for which no checkpointing is a little too much; one block less would not fit, and all are slower."""
    typed = {"swap_blocks": 0}
    search = ask("24GB", typed, frames=25, height=480, width=720)
    plan = best(search).plan
    count = plan.strategy.checkpointed_blocks
    assert (plan.verdict, plan.strategy.gradient_checkpointing) == ("fits", "partial")
    assert count is not None and 1 < count < MODEL.blocks
    strategy = plan.configuration.strategy
    fewer = search.fresh_estimate(plan.job, strategy.replace(checkpointed_blocks=count - 1))
    assert fewer.verdict != "fits"
    every = strategy.replace(gradient_checkpointing="full", checkpointed_blocks=None)
    assert search.fresh_estimate(plan.job, every).step_seconds > plan.step_seconds
    told = {switch.field: switch.after for switch in best(search).switches}
    assert (told["gradient_checkpointing"], told["checkpointed_blocks"]) == ("partial", count)


def test_checkpointing_that_was_typed_covers_all_blocks() -> None:
    search = ask("24GB", {"gradient_checkpointing": "full"}, frames=25, height=480, width=720)
    plans = list(itertools.islice(search.by_speed(search.question.job, None), 5))
    assert plans and all(plan.strategy.gradient_checkpointing == "full" for plan in plans)


def test_engines_compete_on_seconds() -> None:
    """DDP keeps the optimizer in host RAM here; FSDP and ZeRO-2 need not, and all of them are lossless."""
    model, card = lookup.model("easyanimate-v5.1-7b"), card_lookup.gpu("h100-80gb")
    job = lookup.job_for(model, {"method": "full", "frames": 49, "height": 512, "width": 512})
    machine = Machine(gpu=card.name, gpus=4, host_ram=512 * GIB)
    search = Search(Question(job, Strategy(), machine, model, card, frozenset()), SCREEN)
    plan = best(search).plan
    assert not plan.lossy and plan.strategy.sharding in ("fsdp", "zero-2")
    ddp = Search(Question(job, Strategy(sharding="ddp"), machine, model, card, frozenset({"sharding"})), SCREEN)
    assert best(ddp).plan.step_seconds > 2 * plan.step_seconds


def test_one_gpu_of_two_is_offered_where_it_fits_without_lossy_options() -> None:
    """They share swapped blocks, but each has a process and its checkpoints in the same host RAM."""
    model, card = lookup.model("wan2.1-t2v-14b"), card_lookup.gpu("rtx4090")
    job = lookup.job_for(model, {"frames": 49})
    question = Question(job, Strategy(), Machine(gpu=card.name, gpus=2, host_ram=26 * GIB), model, card, frozenset())
    found = Suggester().suggest(question)
    assert found.plan.lossy
    wish, shorter = found.relaxed
    assert (wish.field, wish.before, wish.after) == ("gpus", 2, 1)
    assert wish.plan.verdict == "fits" and not wish.plan.lossy
    assert shorter.field == "frames" and shorter.plan.job.frames < 49 and not shorter.plan.lossy


def test_one_gpu_of_two_is_offered_first_where_nothing_fits_both() -> None:
    """DDP has buckets, and on Windows each process holds swapped blocks in the RAM of both: one alone has room for what
    both have not."""
    model, card = lookup.model("wan2.1-t2v-14b"), card_lookup.gpu("rtx3090")
    job = lookup.job_for(model, {"frames": 81})
    both = Machine(gpu=card.name, gpus=2, host_ram=52 * GIB, os="windows")
    found, alone = (
        Suggester().suggest(Question(job, Strategy(), machine, model, card, frozenset()))
        for machine in (both, both.replace(gpus=1))
    )
    assert found.plan.verdict == "no" and alone.plan.verdict == "fits"
    wish = found.relaxed[0]
    assert (wish.field, wish.before, wish.after) == ("gpus", 2, 1)
    assert wish.plan.strategy == alone.plan.strategy and wish.plan.lossy


def test_gpus_that_share_a_sample_are_offered_where_that_keeps_the_clip() -> None:
    model, card = lookup.model("wan2.1-t2v-14b"), card_lookup.gpu("rtx4090")
    job = lookup.job_for(model, {"frames": 81, "height": 720, "width": 1280})
    machine = Machine(gpu=card.name, gpus=4, host_ram=64 * GIB)
    question = Question(job, Strategy(), machine, model, card, frozenset())
    search = Search(question, SCREEN)
    (wish,) = [wish for wish in relaxed(search, job) if wish.field == "context_parallel"]
    assert (wish.before, wish.after, wish.plan.verdict, wish.plan.lossy) == (1, 4, "fits", ())
    assert wish.plan.job == job
    typed = question._replace(fixed=frozenset({"context_parallel"}))
    assert "context_parallel" not in {wish.field for wish in relaxed(Search(typed, SCREEN), job)}


def test_a_wish_that_contradicts_the_rest_of_what_was_typed_is_passed_over() -> None:
    typed = {"sharding": "zero-3", "offload_optimizer": "nvme", "offload_gradients": "none"}
    search = ask("12GB", typed, method="full", batch_size=60)
    assert search.best(search.question.job) is None
    assert "sharding" not in {wish.field for wish in relaxed(search, search.question.job)}


def test_more_host_ram_is_named_when_it_would_do() -> None:
    fixed = {"gradient_checkpointing": "full", "adapter_dtype": "fp32", "optimizer": "adamw", "weights_dtype": "bf16"}
    search = ask("8GB", fixed, frames=49, height=480, width=720)
    question = search.question._replace(machine=search.question.machine.replace(host_ram=3 * GIB))
    poor = Search(question, SCREEN)
    assert poor.best(question.job) is None
    (wish,) = [wish for wish in relaxed(poor, question.job) if wish.field == "host_ram"]
    assert wish.before == "3GiB" and wish.plan.machine.host_ram == int(str(wish.after).removesuffix("GiB")) * GIB


def test_what_is_short_is_named_and_so_are_the_computers() -> None:
    words = "suggest sd1.5 --gpu 2x8GB --nodes 2 --host-ram 1GiB --batch-size 400 --sharding ddp --weights-dtype bf16"
    words += " --gradient-checkpointing full --optimizer adamw --optimizer-step foreach --adapter-dtype fp32"
    page = CliRunner().invoke(cli, words.split(), env={"COLUMNS": "200"}).output
    assert "on 2 nodes of 2 x " in page and "not enough GPU memory and host RAM" in page


def test_full_training_that_does_not_fit_may_become_lora() -> None:
    fixed = {"gradient_checkpointing": "full", "offload_optimizer": "none", "offload_params": "none"}
    search = ask("8GB", fixed, method="full")
    assert search.best(search.question.job) is None
    assert ("method", "lora") in {(wish.field, wish.after) for wish in relaxed(search, search.question.job)}


def test_a_strategy_without_a_recording_is_left_out_and_a_damaged_one_is_refused() -> None:
    def getter(error: VplanError) -> Screen:
        def raises(*_: object) -> Any:
            raise error

        return Screen(raises)

    question = ask().question
    search = Search(question, getter(NotRecordedError("no tape", "record it")))
    assert search.best(question.job) is None and search.tightest(question.job) is None
    assert search.missing is not None and search.missing.message == "no tape"
    with pytest.raises(VplanError, match="damaged"):
        Search(question, getter(VplanError("tape x is damaged", "record it"))).best(question.job)


@pytest.mark.parametrize(("optimizer", "gpus"), in_turns(sorted({optimizer for optimizer, _ in OPTIMIZERS}), [1, 2]))
def test_every_optimizer_that_is_typed_is_searched_with_what_is_estimated_of_it(optimizer: str, gpus: int) -> None:
    # Some are not estimated over shares, or in host RAM: that says nothing of the rest.
    for card in ("8GB", "48GB"):
        search = ask(card, {"optimizer": optimizer}, method="full")
        machine = search.question.machine.replace(gpus=gpus, host_ram=256 * GIB)
        search = Search(search.question._replace(machine=machine), SCREEN)
        job = search.question.job
        found = search.best(job)
        plan = found.plan if found else search.tightest(job)
        assert plan is not None
        assert plan.strategy.optimizer == optimizer
        if card == "8GB":
            relaxed(search, job)


@pytest.mark.parametrize(
    ("typed", "fault"),
    [
        ({"optimizer": "muon", "sharding": "fsdp"}, "muon under fsdp is not estimated"),
        ({"optimizer": "muon", "offload_optimizer": "cpu"}, "muon is two optimizers"),
        ({"attention": "flash"}, "attention flash supports neither masks"),
        ({"context_parallel": 2, "sharding": "fsdp"}, "context_parallel is not supported by"),
    ],
)
def test_what_is_typed_and_not_estimated_is_named(typed: dict[str, Any], fault: str) -> None:
    search = ask_of(lookup.model("hunyuan-video"), "80GB", typed, method="full")
    search = Search(search.question._replace(machine=search.question.machine.replace(gpus=2)), SCREEN)
    assert search.best(search.question.job) is None
    assert fault in str(search.missing)


def test_8_bit_states_over_more_numbers_than_bitsandbytes_counts_are_left_out() -> None:
    search = ask_of(lookup.model("wan2.1-t2v-14b"), "141GB", {"optimizer": "adamw-8bit"}, method="full")
    machine = search.question.machine.replace(gpus=4, host_ram=2**40)
    search = Search(search.question._replace(machine=machine), SCREEN)
    job, asked = search.question.job, {"optimizer": "adamw-8bit", "master_weights": "fp32", "optimizer_step": "foreach"}
    configuration = Configuration.of(job, Strategy.read({**asked, "sharding": "zero-2"}), machine)
    with pytest.raises(VplanError, match="bitsandbytes supports up to 2,147,483,647"):
        estimate(configuration, load_facts(configuration))
    assert best(search).plan.strategy.sharding in ("ddp", "zero-3")


def test_a_part_trained_in_16_bits_gets_masters_that_nobody_typed() -> None:
    search = ask_of(lookup.model("wan2.1-t2v-1.3b"), "24GB", method="full", trainable=("attn1",))
    plan = best(search).plan
    assert (plan.strategy.master_weights, plan.lossy) == ("fp32", ())
    split = [each for each in search.candidates(plan.job, False) if each.sharding == "zero-3"]
    fitting = [each for each in split if search.feasibility.has_ram(search.quick_estimate(plan.job, each))]
    assert fitting  # states of what is not trained wait nowhere
    assert not any(search.pruning.short_of_ram(plan.job, each) for each in fitting)


def test_what_is_refused_once_it_is_laid_out_is_passed_over() -> None:
    asked = {"method": "full", "trainable": ("blocks",)}
    search = ask_of(lookup.model("wan2.1-t2v-14b"), "h200", {"optimizer": "adamw-8bit"}, **asked)
    machine = search.question.machine.replace(gpus=4, host_ram=2**40)
    search = Search(search.question._replace(machine=machine), SCREEN)
    assert best(search).plan.strategy.sharding in ("ddp", "zero-3")
    assert search.tightest(search.question.job) is not None


def test_what_was_typed_for_full_training_is_no_fault_of_a_hint() -> None:
    typed = {"weights_dtype": "bf16", "master_weights": "fp32", "adapter_dtype": "fp32"}
    search = ask("8GB", typed, method="full", frames=49, height=480, width=720)
    assert "method" not in {wish.field for wish in relaxed(search, search.question.job)}


def test_batches_that_are_sampled_are_recorded_ones() -> None:
    model = lookup.model("z-image")
    search = ask_of(model, "80GB", method="sample")
    found = largest(search, PREFERRED["batch"](model))
    assert found is not None and found.plan.job.batch_size == 1  # two in the model, as it is guided in one batch


@pytest.mark.parametrize("trainer", ["musubi-tuner", "onetrainer", "simpletuner", "ai-toolkit", "diffusion-pipe"])
@pytest.mark.parametrize("validation", ["off", "offload"])
def test_host_ram_is_counted_alike_without_laying_each_number_of_swapped_blocks_out(
    trainer: str, validation: str
) -> None:
    screen = Screen(load_facts, trainer)
    for swap in (0, 20, 1, 0):
        typed: dict[str, Any] = {"gradient_checkpointing": "offload", "weights_dtype": "fp8"}
        typed |= {"validation_mode": validation, "swap_blocks": swap}
        question = ask_of(lookup.model("wan2.1-t2v-14b"), "24GB", typed, frames=33).question
        configuration = Configuration.of(question.job, question.strategy, question.machine)
        assert screen.host_ram_bytes(configuration) == screen.quick_estimate(configuration).host_ram_bytes


@pytest.mark.parametrize("checkpointing", ["full", "offload"])
def test_host_ram_is_divided_among_the_gpus_that_share_a_clip(checkpointing: str) -> None:
    model = lookup.model("wan2.1-t2v-1.3b")
    machine = Machine(gpu="h200", gpus=2, host_ram=2**40)
    job = lookup.job_for(model, {"frames": 81})
    typed = {"context_parallel": 2, "sharding": "fsdp", "gradient_checkpointing": checkpointing}
    configuration = Configuration.of(job, Strategy.read(typed), machine)
    assert SCREEN.host_ram_bytes(configuration) == SCREEN.quick_estimate(configuration).host_ram_bytes


def test_the_longest_clip_is_one_that_the_gpus_which_share_it_can_divide() -> None:
    model = lookup.model("wan2.1-t2v-1.3b")
    job = {"height": 480, "width": 848}  # 30 x 53 patches: an odd number of latent frames does not divide by four
    search = ask_of(model, "12GB", {"context_parallel": 4}, frames=81, **job)
    machine = search.question.machine.replace(gpus=4, host_ram=256 * GIB)
    search = Search(search.question._replace(machine=machine), SCREEN)
    found = largest(search, frames(model))
    assert found is not None
    latent = (found.plan.job.frames - 1) // 4 + 1
    assert latent * 30 * 53 % 4 == 0
    assert latent > 1


def test_what_a_search_skips_would_not_have_fitted() -> None:
    search = ask("8GB", frames=49, height=480, width=720, batch_size=8)
    job = search.question.job
    assert next(search.by_speed(job, None), None) is None
    considered = (strategy for _, strategy in search.feasibility.considered if strategy.swap_blocks)
    looked = {strategy.replace(swap_blocks=0) for strategy in considered}
    skipped = [strategy for strategy in search.candidates(job) if strategy not in looked]
    assert any(strategy.optimizer == "adamw-8bit" for strategy in skipped)
    assert all(search.swap_count.fewest(job, strategy) is None for strategy in skipped)


def test_what_one_way_of_stepping_loses_to_fragmentation_rules_no_other_out() -> None:
    typed = {"gradient_checkpointing": "full", "optimizer": "adamw"}
    question = ask_of(lookup.model("flux.1-dev"), "14.36GiB", typed, height=256, width=256).question
    search = Search(question._replace(machine=question.machine.replace(host_ram=int(13.7 * GIB))), SCREEN)
    found = best(search).plan.strategy
    assert (found.weights_dtype, found.optimizer_step) == ("bf16", "fused")


def test_blocks_that_wait_in_host_ram_are_counted_there_once() -> None:
    typed = {"gradient_checkpointing": "full", "swap_blocks": 20, "validation_mode": "offload"}
    question = ask_of(lookup.model("flux.1-dev"), "24GB", typed).question
    configuration = Configuration.of(question.job, question.strategy, question.machine)
    assert SCREEN.host_ram_bytes(configuration) == SCREEN.quick_estimate(configuration).host_ram_bytes


@pytest.mark.parametrize(
    ("name", "typed", "verdict"),
    [
        ("flux.1-dev", {"weights_dtype": "bf16"}, "fits"),
        ("flux.1-dev", {"weights_dtype": "nf4"}, "tight"),
        ("sd3.5-large", {}, "fits"),
        ("wan2.2-t2v-a14b", {"inactive_expert": "gpu"}, "tight"),
    ],
)
def test_what_is_known_without_a_look_is_what_looks_say(name: str, typed: dict[str, Any], verdict: str) -> None:
    model = lookup.model(name)
    ruled_out = no_smaller = 0
    for gib, ram in itertools.product((5.45, 7.2, 8.85, 14.36), (13.7, 200)):
        question = ask_of(model, f"{gib}GiB", typed, lossy=True, frames=1, height=256, width=256).question
        search = Search(question._replace(machine=question.machine.replace(host_ram=int(ram * GIB))), SCREEN)
        for strategy in search.candidates(question.job):
            known = question.job, strategy, verdict
            look = search.swap_count.fewest(*known)
            if search.pruning.never_fits(*known):
                ruled_out += 1
                assert look is None
            elif look is not None:
                assert look.strategy.swap_blocks or not search.pruning.must_swap(*known)
                assert not search.swap_count.needs_at_least(look.device_bytes + 1, *known)
                no_smaller += search.swap_count.needs_at_least(0.8 * look.device_bytes, *known)
    assert ruled_out and no_smaller


def test_swap_takes_the_ram_that_another_phase_needs_anyway() -> None:
    search = ask_of(lookup.model("flux.2-dev"), "24GB")
    job = search.question.job
    bare = baseline(job, Strategy(), search.question.machine, ()).replace(gradient_checkpointing="full")
    swapped = search.most_in_ram(job, bare)
    before, after = search.quick_estimate(job, bare), search.quick_estimate(job, swapped)
    ram = search.question.machine.host_ram
    assert ram is not None and before.host_ram_bytes > ram  # its text encoder waits there
    assert after.host_ram_bytes == before.host_ram_bytes and after.device_bytes < before.device_bytes


def test_the_tightest_plan_is_one_that_the_host_can_hold() -> None:
    search = ask_of(lookup.model("wan2.2-animate-14b"), "24GB", frames=81)
    tightest = search.tightest(search.question.job)
    assert tightest is not None and tightest.limit == "gpu"
    assert tightest.host_ram_bytes <= (search.question.machine.host_ram or 0)


@pytest.mark.parametrize("name", ["flux.1-dev", "wan2.1-t2v-1.3b", "cogvideox-2b"])
def test_host_ram_is_known_without_a_look_and_is_the_same_for_fused_kernels(name: str) -> None:
    machine = Machine(gpu="80GB", gpus=2, host_ram=256 * GIB)
    job = lookup.job_for(lookup.model(name), {"method": "full"})
    stepped = [each for each in strategies(job, Strategy(), machine, frozenset()) if each.optimizer_step == "fused"]
    assert stepped
    for strategy in stepped[::7]:
        either = strategy, strategy.replace(optimizer_step="foreach")
        known = {SCREEN.host_ram_bytes(Configuration.of(job, each, machine)) for each in either}
        assert known == {SCREEN.quick_estimate(Configuration.of(job, strategy, machine)).host_ram_bytes}


def test_a_plan_on_another_card_of_its_class_is_told_from_one_replay_as_from_its_own() -> None:
    """Where the same is allocated; the clip that is longer is another matter."""
    job = lookup.job_for(MODEL, SHORT)
    fields = {"gradient_checkpointing": "full", "text_encoder": "cached", "vae": "resident"}
    first: Assessment | None = None
    for name in ("24GB", "l4", "a10"):
        machine = Machine(gpu=name, host_ram=32 * GIB)
        configuration = Configuration.of(job, Strategy.read(fields), machine)
        facts = load_facts(configuration)
        alone, like = assess(configuration, facts), assess(configuration, facts, like=first)
        assert like.estimate == alone.estimate
        assert first is None or reused_replay(like.run, first.played)
        first = like
    larger = job.replace(frames=job.frames + 8)
    configuration = replace(configuration, job=larger)
    other = assess(configuration, load_facts(configuration), like=first)
    assert first is not None and reused_replay(other.run, first.played) == []


def test_an_option_that_is_not_recorded_and_may_need_less_is_named() -> None:
    """Nested checkpoints are recorded over a base in 16 bits alone."""
    found = vplan.suggest("wan2.1-t2v-14b", gpu="RTX 4090 Laptop", host_ram="26GiB")._suggestion
    assert (found.plan.verdict, found.plan.strategy.weights_dtype) == ("no", "fp8")
    missing = found.unrecorded
    assert (missing.field, missing.value) == ("nested_checkpointing", True)
    assert missing.record == "vplan record wan2.1-t2v-14b --variant step-lora-fp8-fp32-autocast-nested-one"
    nested = vplan.suggest("wan2.1-t2v-14b", gpu="8GB", host_ram="26GiB", weights_dtype="bf16")._suggestion
    assert nested.plan.verdict == "no" and nested.unrecorded is None, "which is recorded, and was searched"


@pytest.mark.parametrize(("height", "width", "listed"), [(1088, 1920, (480, 832)), (1920, 1088, (832, 480))])
def test_smaller_sizes_are_upright_for_a_job_that_is(height: int, width: int, listed: tuple[int, int]) -> None:
    model = lookup.model("wan2.1-t2v-14b")
    sizes = smaller_sizes(model, job_for(model, {"model": model.name, "height": height, "width": width}))
    assert listed in sizes.values and listed[::-1] not in sizes.values
