"""From typed flags to Job, Strategy and Machine: what is looked up, filled in, said and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from planner.catalog import lookup
from planner.commands import cli
from planner.commands._shared.data_options import FRAME_SAMPLING
from planner.commands._shared.request import TypedQuestion, request_options
from planner.commands._shared.training.pick_plan import weights_of
from planner.commands._shared.verb import Verb
from planner.dataset.sources import DataSource
from planner.errors import VplanError
from planner.schema import choices
from planner.search.question import Question
from planner.spec.job import Bucket, Job, Machine, Strategy
from planner.spec.plan import Plan, write_plan
from planner.units import GIB

WAN = "wan2.1-t2v-1.3b"


def ask(*words: str) -> TypedQuestion:
    """What a command gets for these words."""
    caught: list[TypedQuestion] = []

    @click.command(cls=Verb)
    @request_options()
    @click.option("--other")
    def command(asked: TypedQuestion, other: str | None) -> None:
        assert other is None
        caught.append(asked)

    result = CliRunner().invoke(command, list(words))
    if isinstance(result.exception, VplanError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return caught[0]


def resolved_question(*words: str) -> Question:
    question = ask(*words).to_question()
    return question._replace(strategy=question.configuration().strategy)


def test_defaults_are_taken_and_said() -> None:
    request = resolved_question(WAN, "--gpu", "24GB")
    job = request.job
    assert (job.frames, job.height, job.width, job.lora_rank, job.batch_size) == (81, 480, 832, 16, 1)
    assert request.machine == Machine(gpu="24GB", gpus=1, host_ram=26 * GIB)
    said = " | ".join(request.assumptions)
    assert all(word in said for word in ("81 frames", "480x832", "rank 16", "26 of 32 GiB"))
    assert request.strategy.weights_dtype == "bf16"


def test_an_option_over_a_plan_takes_what_said_more_about_the_old_value_with_it(tmp_path: Path) -> None:
    strategy = Strategy(gradient_checkpointing="partial", checkpointed_blocks=25, nested_checkpointing=True)
    path = tmp_path / "plan.toml"
    job = Job(model="wan2.1-t2v-1.3b", frames=17, height=480, width=832)
    write_plan(Plan(job=job, strategy=strategy, machine=Machine(gpu="24GB")), path)
    whole = ask(str(path), "--gradient-checkpointing", "full").strategy
    assert "checkpointed_blocks" not in whole and whole["nested_checkpointing"] is True
    assert "nested_checkpointing" not in ask(str(path), "--gradient-checkpointing", "none").strategy
    assert ask(str(path)).strategy["checkpointed_blocks"] == 25
    typed = ask(str(path), "--gradient-checkpointing", "full", "--checkpointed-blocks", "5").strategy
    assert typed["checkpointed_blocks"] == 5  # typed together they contradict each other, which is said


def test_nothing_is_assumed_that_was_typed() -> None:
    request = resolved_question(
        *(WAN, "--gpu", "h100-80gb", "--frames", "49", "--resolution", "480p", "--lora-rank", "8"),
        *("--host-ram", "64GiB"),
    )
    assert request.assumptions == ()
    assert request.fixed == {"model", "gpu", "frames", "height", "width", "lora_rank", "host_ram"}


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--swap-blocks", "0"], "swap_blocks", 0),
        (["--vae-tiling"], "vae_tiling", True),
        (["--no-expandable-segments"], "expandable_segments", False),
        (["--zero-stage", "2"], "sharding", "zero-2"),
        (["--zero-stage", "0"], "sharding", "none"),
        (["--zero-stage", "0", "--gpus", "2"], "sharding", "ddp"),
        (["--gradient-checkpointing", "partial", "--checkpointed-blocks", "9"], "checkpointed_blocks", 9),
    ],
)
def test_strategy_flags(words: list[str], field: str, value: Any) -> None:
    request = resolved_question(WAN, "--gpu", "24GB", *words)
    assert getattr(request.strategy, field) == value
    assert field in request.fixed


def test_every_strategy_field_has_a_flag() -> None:
    asked = ask(WAN, "--gpu", "24GB")
    assert (asked.strategy, asked.resolution) == ({}, None)
    help_page = (
        CliRunner().invoke(click.command(cls=Verb)(request_options()(lambda asked: None)), ["--help-all"]).output
    )
    flags = {f"--{field.replace('_', '-')}" for record in (Job, Strategy) for field in record.model_fields}
    assert [flag for flag in sorted(flags) if f"  {flag} " not in help_page] == []
    assert max(map(len, help_page.splitlines())) <= 80
    assert all(f"\n{section}:\n" in help_page for section in ("Job", "Machine", "Strategy", "Options"))


def test_lists_and_shapes() -> None:
    request = resolved_question(
        *(WAN, "--gpu", "24GB", "--lora-targets", "to_q, to_k", "--buckets", "81x480x832,1x720x1280x4"),
        *("--validation", "33x480x832", "--lora-dropout", "0.1"),
    )
    job = request.job
    assert (job.lora_targets, job.lora_dropout) == (("to_q", "to_k"), 0.1)
    assert job.buckets == (
        Bucket(frames=81, height=480, width=832),
        Bucket(frames=1, height=720, width=1280, batch_size=4),
    )
    assert job.validation is not None
    assert job.validation.frames == 33


def test_a_sample_may_be_without_guidance() -> None:
    shapes = [resolved_question(WAN, "--gpu", "24GB", "--validation", text).job.validation
              for text in ("33x480x832", "33x480x832, no-cfg")]  # fmt: skip
    assert [shape and (shape.frames, shape.cfg) for shape in shapes] == [(33, True), (33, False)]
    with pytest.raises(VplanError, match="no-cfg"):
        resolved_question(WAN, "--gpu", "24GB", "--validation", "33x480x832,cfg")


def test_two_cards_are_two_gpus() -> None:
    request = resolved_question(WAN, "--gpu", "2x4090", "--method", "full")
    assert (request.machine.gpu, request.machine.gpus) == ("rtx4090", 2)
    assert (request.strategy.sharding, request.strategy.weights_dtype) == ("ddp", "fp32")


def test_frames_max_and_open_strategies_are_for_a_search() -> None:
    asked = ask(WAN, "--gpu", "24GB", "--frames", "max", "--swap-blocks", "20")
    request = asked.to_question()
    assert request.frames_max
    assert request.strategy == Strategy(swap_blocks=20)
    # On its own, swap without checkpointing is a contradiction; a search may add the checkpointing.
    with pytest.raises(VplanError, match="swap_blocks"):
        request.configuration()


def test_one_question_for_many_models_and_cards() -> None:
    asked = ask("--frames", "81")
    assert (asked.model, asked.gpu) == (None, None)
    request = asked.to_question(model="wan2.1-t2v-14b", gpu="48GB")
    assert (request.model.name, request.machine.gpu) == ("wan2.1-t2v-14b", "48GB")


def test_long_clips_are_remarked() -> None:
    assert any("trained on" in note for note in resolved_question(WAN, "--gpu", "24GB", "--frames", "129").assumptions)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--gpu", "24GB"], 2, "no --model"),
        ([WAN], 2, "no --gpu"),
        ([WAN, "--gpu", "24GB", "--model", "flux.1-dev"], 2, "two values for the model"),
        ([WAN, "--gpu", "24GB", "--height", "480"], 2, "must be given together"),
        ([WAN, "--gpu", "24GB", "--height", "480", "--width", "832", "--resolution", "480p"], 2, "set the size"),
        ([WAN, "--gpu", "24GB", "--zero-stage", "2", "--sharding", "fsdp"], 2, "two values for the sharding"),
        ([WAN, "--gpu", "2x4090", "--gpus", "4"], 1, "2 cards"),
        ([WAN, "--gpu", "24GB", "--frames", "80"], 1, "4n+1"),
        ([WAN, "--gpu", "24GB", "--frames", "0"], 1, "--frames 0"),
        ([WAN, "--gpu", "24GB", "--frames", "nan"], 1, "not a whole number"),
        ([WAN, "--gpu", "24GB", "--frames", "10001"], 1, "--frames 10001 is too large"),
        ([WAN, "--gpu", "24GB", "--batch-size", "1000000000000"], 1, "--batch-size"),
        ([WAN, "--gpu", "24GB", "--zero-stage", "4"], 1, "--zero-stage 4"),
        ([WAN, "--gpu", "24GB", "--optimizer", "adamx"], 1, "'adamx'"),
        ([WAN, "--gpu", "24GB", "--swap-blocks", "99"], 1, "swap_blocks 99"),
        ([WAN, "--gpu", "24GB", "--host-ram", "64XB"], 1, "has an unknown unit"),
        ([WAN, "--gpu", "24GB", "--lora-dropout", "much"], 1, "not a number"),
        ([WAN, "--gpu", "24GB", "--frames", "5s"], 1, "--frames '5s' is a time"),
        ([WAN, "--gpu", "24GB", "--method", "QLoRA"], 1, "is a LoRA over a base in 4 bits"),
        (["wan 2.5", "--gpu", "24GB"], 1, "its weights are not published"),
        (["svd", "--gpu", "24GB"], 1, "Stable Video Diffusion"),
        ([WAN, "--gpu", "24GB", "--buckets", "81x480"], 1, "not a shape"),
        ([WAN, "--gpu", "24GB", "--buckets", "81x480x832", "--frames", "33"], 1, "so --frames has no effect"),
        ([WAN, "--gpu", "24GB", "--buckets", "81x480x832", "--resolution", "480p"], 1, "so --resolution has no effect"),
        ([WAN, "--gpu", "nothing-like-it"], 1, "nothing-like-it"),
        (["no-such-model-at-all", "--gpu", "24GB"], 1, "no-such-model-at-all"),
        (["missing.toml"], 1, "missing.toml"),
        (["", "--gpu", "24GB"], 1, "model '' is not known"),
    ],
)
def test_refusals_name_the_fault_and_the_fix(words: list[str], code: int, message: str) -> None:
    with pytest.raises(VplanError) as refused:
        resolved_question(*words)
    assert message in refused.value.message
    assert (refused.value.exit_code, bool(refused.value.fix)) == (code, True)


@pytest.fixture
def plan(tmp_path: Path) -> str:
    job = Job(model=WAN, frames=33, height=480, width=832, lora_rank=8)
    strategy = Strategy(weights_dtype="bf16", gradient_checkpointing="full", swap_blocks=10)
    machine = Machine(gpu="24GB", gpus=1, host_ram=64 * GIB)
    path = tmp_path / "plan.toml"
    write_plan(Plan(job=job, strategy=strategy, machine=machine), path)
    return str(path)


@pytest.mark.parametrize("flag", [[], ["--plan"]])
def test_a_plan_is_a_question(plan: str, flag: list[str]) -> None:
    request = resolved_question(*flag, plan)
    assert (request.job.frames, request.strategy.swap_blocks, request.machine.host_ram) == (33, 10, 64 * GIB)
    assert (request.assumptions, request.fixed) == ((), frozenset())


def test_flags_change_a_plan(plan: str) -> None:
    request = resolved_question(plan, "--frames", "49", "--swap-blocks", "0", "--gpu", "2x4090", "--sharding", "ddp")
    assert (request.job.frames, request.job.lora_rank, request.strategy.swap_blocks) == (49, 8, 0)
    assert request.strategy.gradient_checkpointing == "full"
    # Another card is another computer.
    assert request.machine == Machine(gpu="rtx4090", gpus=2, host_ram=58 * GIB)


def test_train_asks_for_weights_before_it_plans_or_writes(plan: str, tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    for target in (plan, WAN):
        said = ["--data", str(tmp_path / "clips"), "--output", str(tmp_path / "run"), "--gpu", "24GB"]
        assert "no --weights" in CliRunner().invoke(cli, ["train", target, *said]).output
    assert not (tmp_path / "run").exists(), "else the next try would have to be of the same plan"


@pytest.mark.parametrize(
    "folder",
    [
        "Z-Image-Turbo",
        "z_image_turbo-bf16/transformer",
        "models--Tongyi-MAI--Z-Image-Turbo/snapshots/04cc4abb7c5069926f75c9bfde9ef43d49423021",
    ],
)
def test_train_refuses_a_folder_of_distilled_weights(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "z-image").symlink_to(tmp_path / folder)
    said = ["--data", str(tmp_path), "--output", str(tmp_path / "run"), "--gpu", "24GB"]
    for place in (tmp_path / folder, tmp_path / "z-image"):
        found = CliRunner().invoke(cli, ["train", "z-image", "--weights", str(place), *said])
        output = " ".join(found.output.split())
        assert found.exit_code == 1 and "says z-image-turbo, a distilled model" in output, output
        assert "the folder of Z-Image itself" in output
    assert not (tmp_path / "run").exists()


def test_a_folder_of_other_weights_is_none_of_distilled_ones(tmp_path: Path) -> None:
    """A run's folder may be anywhere, and flux.1-dev has other distilled weights."""
    place = tmp_path / "z-image-turbo-lora" / "Z-Image"
    assert weights_of(lookup.model("z-image"), str(place)) == str(place)
    assert weights_of(lookup.model("flux.1-dev"), "Z-Image-Turbo") == "Z-Image-Turbo"


@pytest.mark.parametrize("rate", ["nan", "inf", "-1", "0"])
def test_a_rate_that_is_none_is_refused_before_anything_runs(rate: str, plan: str, tmp_path: Path) -> None:
    said = ["--data", str(tmp_path), "--output", str(tmp_path / "run"), "--weights", "w", "--learning-rate", rate]
    found = CliRunner().invoke(cli, ["train", plan, *said])
    wanted = "a finite number" if rate in ("nan", "inf") else "greater than 0"
    assert found.exit_code == 1 and f"learning_rate {float(rate)} is wrong" in found.output and wanted in found.output
    assert not (tmp_path / "run").exists()


def test_the_option_of_frames_has_the_record_s_values() -> None:
    assert choices(DataSource, "frames") == FRAME_SAMPLING


@pytest.mark.parametrize("verb", ["suggest", "estimate", "check"])
def test_an_option_without_its_value_points_to_the_help_of_its_command(verb: str) -> None:
    told = CliRunner().invoke(cli, [verb, "wan2.1-t2v-1.3b", "--gpu"], prog_name="vplan")
    assert told.exit_code == 2 and told.stderr.splitlines()[1] == f"fix: see `vplan {verb} --help`"


def test_values_of_closed_lists_are_read_in_any_writing() -> None:
    words = ("--method", "LoRA", "--optimizer", "AdamW_8bit", "--os", "Windows", "--gradient-checkpointing", "FULL")
    request = resolved_question(WAN, "--gpu", "24GB", *words)
    assert (request.job.method, request.strategy.optimizer, request.machine.os) == ("lora", "adamw-8bit", "windows")
    assert request.strategy.gradient_checkpointing == "full"


@pytest.mark.parametrize(("word", "fix"), [("2x4090", "did you mean --gpu 2x4090?"), ("much", "see `")])
def test_a_card_without_its_option_is_offered_with_it(word: str, fix: str) -> None:
    answer = CliRunner().invoke(cli, ["suggest", WAN, word])
    assert answer.exit_code == 2 and f"fix: {fix}" in answer.stderr


def test_help_of_a_command_may_be_asked_for_as_a_command() -> None:
    for words, beside in ((["help", "check"], ["check", "--help"]), (["help"], ["--help"])):
        answers = [CliRunner().invoke(cli, each) for each in (words, beside)]
        assert answers[0].exit_code == 0 and answers[0].stdout == answers[1].stdout
