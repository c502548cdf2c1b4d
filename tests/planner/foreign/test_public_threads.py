"""Reported runs of public threads: their rows, how they are scored, and what `check` says of a fixed sample of them."""

import hashlib
import re
from dataclasses import replace

import pytest

from planner.foreign.public_threads import PublicThread, ThreadScore, answer, bundled_threads, left_out, score, summary

ROWS = bundled_threads()

URL = r"https://github\.com/([\w.-]+/[\w.-]+)/(issues/\d+|blob/[\w.-]+/.+\.(md|json|toml|yaml|py|sh))"

USERS = {
    "Mercury114/simpletuner-notes",
    "SureShotUK/REACH",
    "ThaiLe1220/diffusion-pipe-eu",
    "The-CarL/likeness-lab",
    "VillAlfonso/AAAFlow",
    "YusakuNo1/kohya_ss",
    "alexsenden/configs-simpletuner-flux",
    "calculment0r/SHOWRUNNER_TOOLS",
    "dliu00/musubi-wan2.2-lora-notes",
    "ericyanpek/flux-lora-poc",
    "joeriben/ai4artsed_webserver",
    "kej83/wan22-loratrain",
    "layerplague867/lora-training-skill",
    "markgiller/ai-ofm-production-factory",
    "obsxrver/wan22-lora-training",
    "tiongkai/wan2.2-lora",
}
"""Repositories of people who use a trainer: a file there is a report, in a trainer's own it is documentation."""

SAMPLE = 45
"""One row of so many is priced here; all of them are by `vplan accuracy --threads`."""


def test_every_row_says_where_it_stands_and_what_was_completed():
    assert len({row.id for row in ROWS}) == len(ROWS) >= 100
    for row in ROWS:
        url = re.fullmatch(URL, row.url)
        assert url, row.id
        own = "/blob/" in row.url and url[1] not in USERS
        assert row.kind == ("documentation" if own else "report"), row.id
        assert set(row.completed) <= {*PublicThread.model_fields, *row.files}, row.id
        assert all(len(why) > 10 for why in row.completed.values() if why), row.id
        assert row.phase is None or row.outcome != "ran" or row.printed_gib, row.id


def test_a_row_says_when_it_was_collected():
    """All but the first were priced before anything was mended for them (docs/accuracy/threads.md)."""
    days = [row.collected for row in ROWS]
    assert {day: days.count(day) for day in sorted(set(days))} == {
        "2026-11-26": 122,
        "2026-11-27": 132,
        "2026-11-30": 47,
        "2026-11-30b": 40,
    }
    second = [row for row in ROWS if row.collected == "2026-11-27"]
    kinds = [row.kind for row in second]
    assert (kinds.count("report"), kinds.count("documentation")) == (23, 109)
    assert sum(row.outcome != "ran" for row in second) == 17
    assert sum(row.printed is not None for row in second) == 61
    third = [row for row in ROWS if row.collected == "2026-11-30"]
    kinds = [row.kind for row in third]
    assert (kinds.count("report"), kinds.count("documentation")) == (26, 21)
    assert sum(row.outcome != "ran" for row in third) == 8
    assert sum(row.printed is not None for row in third) == 8
    fourth = [row for row in ROWS if row.collected == "2026-11-30b"]
    assert {row.kind for row in fourth} == {"report"}
    assert sum(row.outcome != "ran" for row in fourth) == 20
    assert sum(row.outcome == "ran-out-of-host" for row in fourth) == 4


def test_no_thread_is_left_out_twice_and_none_that_is_worked_through_is_a_row():
    urls = [url for urls in left_out().values() for url in urls]
    assert len(set(urls)) == len(urls)
    assert not {row.url for row in ROWS} & set(left_out()["one of docs/stories already"])


def test_a_printed_number_is_as_precise_as_its_last_digit():
    row = ROWS[0]
    assert row.replace(printed_gib="12.2").printed == pytest.approx((12.15, 12.25))
    assert row.replace(printed_gib="35").printed == pytest.approx((34.5, 35.5))
    assert row.replace(printed_gib=None).printed is None


@pytest.fixture(scope="module")
def scored():
    """A row that is read, and called `fits`."""
    row = PublicThread(
        id="row",
        url="https://github.com/a/b/issues/1",
        trainer="latentsync",
        collected="2026-11-27",
        gpu="80GB",
        outcome="ran",
        command="torchrun --nproc_per_node=1 -m scripts.train_unet --unet_config_path configs/unet/stage1.yaml",
    )
    found = score(row)
    assert found.verdict == "fits"
    return found


def test_a_verdict_is_met_or_not_by_what_happened(scored):
    ran_out = replace(scored, thread=scored.thread.replace(outcome="ran-out", phase="train"))
    assert (scored.agrees, scored.false_fits) == (True, False)
    assert (ran_out.agrees, ran_out.false_fits, ran_out.phase_agrees) == (False, True, None)
    assert ran_out.explained == "not explained"
    tight = score(scored.thread.replace(gpu="rtx4090", outcome="ran-out", phase="decode"))
    assert (tight.verdict, tight.agrees, tight.phase_agrees) == ("tight", True, True)
    assert replace(tight, thread=tight.thread.replace(outcome="ran-out-of-host")).agrees is False


def test_a_number_is_met_inside_the_range(scored):
    low, peak, high = scored.predicted_gib
    inside = replace(scored, thread=scored.thread.replace(printed_gib=f"{peak:.2f}"))
    above = replace(scored, thread=scored.thread.replace(printed_gib=f"{2 * peak:.2f}"))
    assert low < peak < high
    assert (inside.number_agrees, above.number_agrees) == (True, False)
    assert above.error_pct == pytest.approx(-50, abs=0.1)


def test_what_an_older_version_explains_counts_apart(scored):
    wrong = replace(scored, thread=scored.thread.replace(outcome="ran-out"))
    older = replace(wrong, thread=wrong.thread.replace(older="it was another one then"))
    refused = ThreadScore(scored.thread, None, "no reader")
    found = summary([scored, wrong, older, refused])
    assert [found[key] for key in ("of", "read", "older", "agree", "agree_of", "false_fits", "not_explained")] == [
        *(4, 3, 1, 1, 2, 1, 1)
    ]
    told = answer([scored, wrong, older, refused])
    assert [row["agrees"] for row in told["threads"]] == [True, False, False, None]
    assert told["by_collection"].keys() == {"2026-11-27"}
    assert told["by_kind"]["report"]["of"] == 4


def test_a_model_that_is_quantised_on_the_card_is_there_in_16_bits_first():
    """The thread's two runs: `quantize_via` decides."""
    rows = {row.id: row for row in ROWS}
    default, on_cpu = (score(rows[f"simpletuner-1149-int8{end}"]) for end in ("-default", ""))
    assert (default.verdict, default.agrees, default.phase_agrees) == ("no", True, True)
    assert (on_cpu.verdict, on_cpu.agrees) == ("fits", True)


def sample():
    return [row for row in ROWS if int(hashlib.sha256(row.id.encode()).hexdigest(), 16) % SAMPLE == 0]


ANSWERS = {
    "aitk-wan21-1b-24gb": True,
    "cogvideo-731-v100": None,
    "dpipe-306-swap8": True,
    "diffsynth-563-h100": True,
    "dpipe-flux2-dev": True,
    "sds-1314-3090": True,
    "sds-827-3090ti": True,
    "simpletuner-chroma-int8": True,
    "simpletuner-seg-kandinsky5-layer": True,
    "simpletuner-seg-wan14-layer": True,
}
"""id -> whether `check` agrees; None where it does not read the row. A change here is a change of the score in
docs/accuracy/threads.md."""


def test_the_answers_to_a_fixed_sample():
    assert {row.id: score(row).agrees for row in sample()} == ANSWERS
