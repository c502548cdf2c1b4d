"""`vplan suggest --max-hours` and `--max-step-seconds`: how many GPUs are needed to keep a time limit."""

from __future__ import annotations

import pytest

from tests.command_line import typed
from tests.e2e.test_whole_jobs import answer

WAN = ("suggest", "wan2.1-t2v-1.3b", "--frames", "81", "--gpu", "h100-80gb")
SHARDED = ("suggest", "wan2.1-t2v-14b", "--frames", "49", "--method", "full", "--gpu", "h100-80gb")


def test_the_fewest_gpus_that_keep_a_step_are_the_answer() -> None:
    """Full training of a 14B model needs the optimizer in host RAM on few cards, but not on many."""
    free = answer(*SHARDED, "--max-step-seconds", "1000")
    counts = {row["gpus"]: row for row in free["gpu_counts"]}
    assert list(counts) == [1, 2, 4, 8] and free["meets"]
    assert free["plan"]["machine"]["gpus"] == min(gpus for gpus, row in counts.items() if row["meets"])
    limit = 1.01 * counts[8]["step_seconds_high"]
    assert limit < counts[2]["step_seconds_high"]
    found = answer(*SHARDED, "--max-step-seconds", str(limit))
    fewest = min(row["gpus"] for row in found["gpu_counts"] if row["meets"])
    assert found["meets"] and found["plan"]["machine"]["gpus"] == fewest > 1
    assert found["plan"]["step_seconds_high"] <= limit


def test_hours_are_kept_by_the_fewest_gpu_hours() -> None:
    found = answer(*WAN, "--steps", "2000", "--max-hours", "3")
    rows = [row for row in found["gpu_counts"] if row["meets"]]
    assert found["whole_job"]["hours_high"] <= 3
    best = min(rows, key=lambda row: (row["gpu_hours"], row["gpus"]))
    assert found["plan"]["machine"]["gpus"] == best["gpus"]


def test_a_limit_that_nothing_keeps_is_said() -> None:
    found = answer(*WAN, "--max-step-seconds", "0.01", code=3)
    assert not found["meets"] and not any(row["meets"] for row in found["gpu_counts"])
    assert found["plan"]["step_seconds_high"] == min(row["step_seconds_high"] for row in found["gpu_counts"])
    assert "no number of GPUs tried (1, 2, 4, 8) keeps --max-step-seconds 0.01" in " ".join(
        typed(*WAN, "--max-step-seconds", "0.01", code=3).stdout.split()
    )


def test_steps_that_more_gpus_do_not_shorten_are_named() -> None:
    """Each of N GPUs adds samples to every step, so more GPUs shorten epochs but not steps."""
    shown = typed(*WAN, "--steps", "2000", "--max-hours", "0.5", code=3).stdout
    assert not shown.startswith("fits") and shown.startswith("too slow: nothing tried keeps --max-hours 0.5")
    last = " ".join(shown.split()).partition("no number of GPUs")[2]
    assert "N times the samples in as many steps" in last and "--epochs (with --data), or --steps 250 on 8" in last
    one = typed(*WAN, "--steps", "2000", "--max-hours", "0.5", "--gpus", "1", code=3).stdout
    assert "N times the samples" not in one and one.rstrip().endswith("keeps --max-hours 0.5")


def test_gpus_share_samples_where_a_step_is_too_long() -> None:
    long = ("suggest", "wan2.1-t2v-14b", "--frames", "81", "--gpu", "h100-80gb", "--host-ram", "512GiB")
    found = answer(*long, "--max-step-seconds", "13")
    assert found["meets"] and found["plan"]["step_seconds_high"] <= 13
    chosen = found["plan"]["strategy"]["context_parallel"]
    assert chosen == found["plan"]["machine"]["gpus"] > 1
    alone = [row["step_seconds"] for row in found["gpu_counts"] if row["context_parallel"] == 1]
    assert min(alone) > 13
    shown = " ".join(typed(*long, "--max-step-seconds", "13").stdout.split())
    assert f"--gpus {chosen} --context-parallel {chosen}" in shown and f"{chosen} to a sample" in shown


def test_nodes_are_counted_up_to_those_typed_and_the_cheapest_that_keeps_the_limit_is_the_answer() -> None:
    found = answer(*SHARDED, "--nodes", "3", "--max-step-seconds", "1000")
    counts = [(row["nodes"], row["gpus"]) for row in found["gpu_counts"]]
    assert counts == [(1, 1), (1, 2), (1, 4), (1, 8), (2, 16), (3, 24)]
    best = min((row for row in found["gpu_counts"] if row["meets"]), key=lambda row: row["gpus"])
    chosen = found["plan"]["machine"]
    assert found["meets"] and (chosen["nodes"], chosen["nodes"] * chosen["gpus"]) == (best["nodes"], best["gpus"])


def test_typed_gpus_are_the_only_ones_asked_about() -> None:
    found = answer(*WAN, "--gpus", "2", "--max-step-seconds", "60")
    assert [row["gpus"] for row in found["gpu_counts"]] == [2] and found["meets"]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ((*WAN, "--max-hours", "3"), "--max-hours is about a whole job"),
        ((*WAN, "--for", "musubi-tuner", "--max-step-seconds", "3"), "leave out --for"),
        (("suggest", "--gpu", "24GB", "--max-step-seconds", "3"), "name one of each"),
    ],
)
def test_limits_that_mean_nothing_are_refused(words: tuple[str, ...], fault: str) -> None:
    assert fault in typed(*words, code=2).stderr


def test_a_count_whose_plan_gives_up_quality_says_so() -> None:
    long = ("suggest", "wan2.1-t2v-14b", "--gpu", "24GB", "--steps", "2000", "--max-hours", "60")
    found = answer(*long)
    (one,) = (row for row in found["gpu_counts"] if row["gpus"] == 1)
    assert one["lossy"] == found["plan"]["lossy"] == ["weights_dtype"]
    rows = [line for line in typed(*long).stdout.splitlines() if line.lstrip().startswith("1 ") and " to " in line]
    assert rows and "fits (lossy)" in rows[0]
