"""`vplan record`: writes what `--check` accepts, says what differs in each tape, and says what is not installed."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import profiles
from planner.catalog import lookup, user_data
from planner.catalog.shapes import job_for
from planner.commands import cli, record
from planner.errors import NotRecordedError
from planner.launch.recorders import CHECKOUT
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.tape.format import Monomial, Section, Tape, Template
from planner.tape.packs import stored
from planner.tape.variants.trainer_models import OWN_CODE
from tests.shipped_tapes import shipped_tapes
from trainers.recording.comparison import first_difference, what_differs

pytestmark = pytest.mark.usefixtures("preloaded_python")

MODEL = "wan2.1-t2v-1.3b"
VARIANT = "optimizer-lora-fp32-adamw-fused"


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["record", *words], prog_name="vplan", standalone_mode=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tapes")
    done = run(MODEL, "--variant", VARIANT, "-o", str(made), "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    size = (made / MODEL / f"{VARIANT}.json.gz").stat().st_size
    assert answer["tapes"] == [{"model": MODEL, "variant": VARIANT, "bytes": size}]
    return made


def test_check_accepts_what_was_written(folder: Path) -> None:
    done = run("wan2.1-t2v-1.3B", "--variant", VARIANT, "--check", "-o", str(folder))
    assert done.exit_code == 0
    assert "tapes unchanged: 1, " in " ".join(done.stdout.split())


def test_what_is_recorded_among_the_shipped_tapes_goes_into_the_pack_and_a_check_leaves_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "TAPES", tmp_path / "tapes")
    shutil.copytree(folder, profiles.TAPES)
    path = profiles.TAPES / MODEL / f"{VARIANT}.json.gz"
    words = (MODEL, "--variant", VARIANT)
    assert run(*words, "--check").exit_code == 0 and path.is_file()
    assert run(*words).exit_code == 0 and not path.exists()
    assert stored(path.parent) == [path]


def changed(folder: Path, tmp_path: Path, change: Any) -> Result:
    data = json.loads(gzip.decompress((folder / MODEL / f"{VARIANT}.json.gz").read_bytes()))
    change(data)
    path = tmp_path / MODEL / f"{VARIANT}.json.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    return run(MODEL, "--variant", VARIANT, "--check", "-o", str(tmp_path))


def lines(done: Result) -> list[str]:
    """What it said on stderr, without the empty line that the progress bar leaves."""
    return [line for line in done.stderr.splitlines() if line]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: data["tape"]["sizes"].__setitem__(0, [7, [0] * 6]), "sizes of "),
        (lambda data: data["tape"]["ops"].__setitem__(0, "mm"), "operators, peak "),
        (lambda data: data["operators"].append("aten.mm"), "operators, peak "),
        (lambda data: data["tape"].update(names=[*data["tape"]["names"], "unused"]), "how it is written, peak "),
    ],
)
def test_check_says_what_differs_and_where_first_and_exits_1(
    folder: Path, tmp_path: Path, change: Any, what: str
) -> None:
    done = changed(folder, tmp_path, change)
    assert done.exit_code == 1
    difference, said, fix = lines(done)[-3:]
    assert difference.startswith(f"{MODEL} {VARIANT}: {what}") and " bytes" in difference
    assert ", recorded " in difference or " entries" in difference
    assert said == f"error: tape {VARIANT} of {MODEL} differs from a new recording"
    assert fix == f"fix: vplan record {MODEL} --variant {VARIANT}"


def test_check_names_every_tape_that_would_change(folder: Path, tmp_path: Path) -> None:
    home, names = tmp_path / MODEL, [VARIANT.replace("fused", "foreach"), VARIANT]
    home.mkdir()
    data = json.loads(gzip.decompress((folder / MODEL / f"{VARIANT}.json.gz").read_bytes()))
    data["tape"]["sizes"][0][0] += 512
    for name in names:
        (home / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps({**data, "variant": name}).encode()))
    words = [word for name in names for word in ("--variant", name)]
    done = run(MODEL, *words, "--check", "-o", str(tmp_path))
    assert done.exit_code == 1
    *differences, said, fix = lines(done)[-4:]
    assert [line.split(":")[0] for line in differences] == [f"{MODEL} {name}" for name in names]
    assert said == "error: 2 of 2 tapes differ from a new recording"
    assert fix == f"fix: vplan record {MODEL} " + " ".join(words)


def tape_of(events: list[list[int]], sizes: list[int], ops: list[str]) -> Tape:
    template = Template(events, [])
    monomials = tuple(Monomial(size, (0,)) for size in sizes)
    pieces = {"step": [Section("forward", None, [template])]}
    return Tape("m", "v", {}, {}, ("B",), {}, monomials, (), (), tuple(ops), pieces)


def test_the_same_allocations_in_another_order_move_a_peak() -> None:
    made, freed = [0, 5, 0, 0, 0], [0, 0, 0, 0]
    small = [1, 5, 0, 0, 0]
    first = tape_of([made, freed, small], [1000, 24], ["mm"])
    assert what_differs(first, tape_of([made, freed, small], [1000, 24], ["mm"]), {"B": 1}).startswith("how")
    behind = tape_of([made, small, [0, 0, 0, 1]], [1000, 24], ["mm"])
    assert what_differs(first, behind, {"B": 1}) == "order, peak 1,000 bytes, recorded 1,024 (+24)"
    more = tape_of([made, freed, small, small], [1000, 24], ["mm"])
    said = "sizes of 0 allocations, recorded of 1, peak 1,000 bytes in both"
    assert what_differs(first, more, {"B": 1}) == said


def test_a_check_compares_once_what_models_of_one_architecture_share() -> None:
    wanted = record._VariantSelection((VARIANT, "parameters"), everything=False, check=True)
    twins = dict.fromkeys(["wan2.1-i2v-14b-480p", "wan2.1-i2v-14b-720p", MODEL])
    tasks = record._tasks(twins, wanted, profiles.TAPES)
    assert len(tasks) == 6
    once = list(record._each_text_once(tasks))
    assert {task.model for task in once} == {"wan2.1-i2v-14b-480p", MODEL} and len(once) == 4


def test_check_accepts_a_shipped_table_of_parameters() -> None:
    assert run(MODEL, "--variant", "parameters", "--check").exit_code == 0


def test_another_torch_may_record_the_same(folder: Path, tmp_path: Path) -> None:
    assert changed(folder, tmp_path, lambda data: data["versions"].update(torch="2.11.0")).exit_code == 0


def test_check_of_a_missing_or_damaged_tape_says_so(tmp_path: Path) -> None:
    words = (MODEL, "--variant", VARIANT, "--check", "-o", str(tmp_path))
    assert "there is no" in run(*words).stderr
    path = tmp_path / MODEL / f"{VARIANT}.json.gz"
    path.parent.mkdir()
    path.write_bytes(b"\x1f\x8b no gzip")
    done = run(*words)
    assert done.exit_code == 1
    assert f"tape {VARIANT}.json.gz is damaged" in done.stderr


def test_check_is_of_every_tape_that_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = record._VariantSelection((), everything=False, check=True)

    def checked() -> set[Path]:
        return {task.path for task in record._tasks(dict.fromkeys(profiles.model_names()), wanted, profiles.TAPES)}

    shipped = set(shipped_tapes())
    ends = tuple(f"-{code.replace('@', '-')}.json.gz" for code in OWN_CODE)
    of_trainers = {path for path in shipped if path.name.startswith("step-") and path.name.endswith(ends)}
    monkeypatch.delenv(CHECKOUT, raising=False)
    assert of_trainers and checked() == shipped - of_trainers
    monkeypatch.setenv(CHECKOUT, "a folder")
    assert checked() == shipped


def test_where_nobody_may_write_tapes_go_to_the_user_s_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert record._default_folder(check=True) == profiles.TAPES
    assert record._default_folder(check=False) == user_data.tapes()


def test_one_command_records_all_that_a_question_lacks() -> None:
    strategy = Strategy(weights_dtype="int8", optimizer="adafactor")
    with pytest.raises(NotRecordedError) as caught:
        load_facts(Configuration.of(job_for(lookup.model("sdxl"), {}), strategy, Machine(gpu="h100-80gb")))
    words = caught.value.fix.partition("vplan record ")[2].split()
    names = words[2::2]
    assert words[0] == "sdxl" and len(names) == 2 and set(words[1::2]) == {"--variant"}
    wanted = record._VariantSelection(tuple(names), everything=False, check=False)
    assert [task.variant for task in record._tasks({"sdxl": None}, wanted, profiles.TAPES)] == names


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        (["wan2.1-t2v-1.4b"], "wan2.1-t2v-1.4b", "did you mean"),
        ([MODEL, "--variant", "nothing"], "no variant has 'nothing' in its name", "step-lora"),
        ([MODEL, "--jobs", "0"], "jobs", "--help"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_1(words: list[str], message: str, fix: str) -> None:
    done = run(*words)
    said, answer = done.stderr.splitlines()
    assert done.exit_code == 1
    assert message in said and fix in answer


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    absent = ("torch", "diffusers")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else found(name, *rest))
    done = run(MODEL)
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        "error: recording needs torch, diffusers: not installed",
        "fix: pip install 'vplan[train]'",
    ]


@pytest.mark.parametrize(
    ("there", "now", "expected"),
    [
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}, ""),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "a[1].b is 2, recorded 3"),
        ({"a": [1]}, {"a": [1, 2]}, "a has 1 entries, recorded 2"),
        ({"a": 1}, {"a": 1, "b": 2}, "b is recorded now only"),
        ({"a": 1, "b": 2}, {"a": 1}, "b is not recorded any more"),
        ({"a": 1}, {"a": [1]}, "a is 1, recorded [1]"),
        ({"a": 1, "b": 1}, {"a": 2, "b": 2}, "a is 1, recorded 2"),
    ],
)
def test_the_first_difference_is_named_by_its_path(there: Any, now: Any, expected: str) -> None:
    assert first_difference(there, now) == expected
