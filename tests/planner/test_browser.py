"""What the page of `vplan site` asks and shows: the command line's answer, to the letter, and sentences about it."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import profiles
from planner import browser
from planner.commands import cli
from planner.layout.recordings import tape

HOME = Path(__file__).parents[2]

COMMAND = """accelerate launch wan_train_network.py \\
  --task t2v-14B --dit wan.safetensors --sdpa --mixed_precision bf16 --blocks_to_swap 2 \\
  --gradient_checkpointing --network_module networks.lora_wan --network_dim 32
"""
CONFIG = """job: extension
config:
  process:
    - type: sd_trainer
      network: {type: lora, linear: 32}
      train: {batch_size: 1, gradient_checkpointing: true, optimizer: adamw8bit, dtype: bf16}
      model:
        name_or_path: black-forest-labs/FLUX.1-dev
        is_flux: true
"""
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.65 GiB "
    "of which 10.00 MiB is free. Of the allocated memory 22.90 GiB is allocated by PyTorch, and 300.00 MiB is reserved "
    "by PyTorch but unallocated."
)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ask(**form: Any) -> dict[str, Any]:
    *_, last = browser.answers(json.dumps(form))
    answer: dict[str, Any] = json.loads(last)
    return answer


def test_a_form_is_answered_as_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(model="sdxl", gpu="12GB", method="lora", steps="500")
    assert answer["command"] == "vplan suggest --model=sdxl --method=lora --gpu=12GB --steps=500"
    code = cli.main([*answer["command"].split()[1:], "--json"], standalone_mode=False)
    typed = json.loads(capsys.readouterr().out)
    asked = json.loads(answer["json"])
    assert code == answer["code"] == 0
    assert asked | {"seconds": 0} == typed | {"seconds": 0}
    shown = answer["shown"]
    need = asked["plan"]["peak"]["device_bytes"] / 2**30
    assert shown["verdict"] == "fits" and shown["sentence"].startswith(f"Fits: needs {need:.1f} GiB")
    assert dict(shown["facts"])["Whole run"].startswith("500 steps: ")
    assert shown["copies"][0]["text"].startswith(f"{answer['command']} -o plan.toml\n")


def test_of_one_model_nothing_stays_when_another_is_asked_about() -> None:
    """A page that stays open has no more memory than its browser gives it."""
    ask(model="sdxl", gpu="24GB", steps="10")
    read = weakref.ref(tape("sdxl", "optimizer-full-fp32-lion-foreach"))
    ask(model="sdxl", gpu="24GB", steps="20")
    assert read() is not None  # the next answer about it is the faster
    ask(model="sd1.5", gpu="24GB", steps="10")
    assert read() is None


def test_it_needs_no_package_that_the_page_has_not(tmp_path: Path) -> None:
    """In a process where nothing installed can be imported but what the site brings along."""
    lines = (HOME / "reports" / "site" / "files" / "requirements.txt").read_text().splitlines()
    brought = {line.partition("==")[0].replace("-", "_") for line in lines if "==" in line}
    names = metadata.packages_distributions()
    missing = sorted(
        name for name, of in names.items() if not brought & {each.lower().replace("-", "_") for each in of}
    )
    ours = {"planner", "profiles", "trainers", "reports", "vplan", "tests"}
    question = json.dumps({"model": "sdxl", "gpu": "12GB"})
    program = (
        f"import sys; sys.path.insert(0, {str(HOME)!r})\n"
        f"sys.modules.update(dict.fromkeys({[name for name in missing if name not in ours]!r}))\n"
        "from planner import browser\nsys.platform = 'emscripten'\n"
        f"print([*browser.answers({question!r})][-1])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["shown"]["verdict"] == "fits"


def test_where_no_change_is_enough_the_least_is_told_and_a_card_that_is() -> None:
    facts = dict(ask(model="wan2.1-t2v-1.3b", gpu="2GB")["shown"]["facts"])
    assert facts["All made smaller"].startswith("Wan2.1 T2V 1.3B, lora rank 16, 240x416, batch 1: does not fit, ")
    assert facts["Large enough"] == "a card of 8GB"


def test_a_plan_is_told_before_it_is_explained() -> None:
    told: list[dict[str, Any]] = []
    form = json.dumps({"model": "wan2.1-t2v-1.3b", "gpu": "24GB", "frames": "17", "steps": "500"})
    (last,) = map(json.loads, browser.answers(form, lambda text: told.append(json.loads(text))))
    (first,) = told
    early, late = (json.loads(answer["json"]) for answer in (first, last))
    assert first["more"] and not last["more"] and first["command"] == last["command"] and first["code"] == last["code"]
    assert early["plan"] == late["plan"] and early["whole_job"] == late["whole_job"]
    assert first["shown"]["table"] is None and last["shown"]["table"]["rows"]
    assert first["shown"] | {"table": None} == last["shown"] | {"table": None}


def test_a_trainer_gets_its_files_and_the_command_that_starts_them() -> None:
    shown = ask(model="wan2.1-t2v-1.3b", gpu="24GB", frames="17", trainer="musubi-tuner", steps="1000")["shown"]
    command, *files = shown["copies"]
    assert command["text"] == f"bash {files[0]['title']}" and "wan_train_network.py" in files[0]["text"]
    assert dict(shown["facts"])["Steps alone"].startswith("1000 steps: ")


def test_a_pasted_command_is_checked_and_its_changed_lines_are_marked() -> None:
    assert browser.tapes_of(json.dumps({"gpu": "24GB", "paste": COMMAND})) == "wan2.1-t2v-14b"
    first, last = map(json.loads, browser.answers(json.dumps({"gpu": "24GB", "paste": COMMAND})))
    assert first["more"] and first["shown"]["verdict"] == "no" and first["shown"]["changes"] == []
    answer = last
    assert answer["command"] == "vplan check --gpu=24GB pasted.sh" and answer["code"] == 3
    change = answer["shown"]["changes"][0]
    swap = next(line for line in change["lines"] if line.startswith("--blocks_to_swap"))
    old = COMMAND.splitlines()[1]
    assert ("-", old) in map(tuple, change["marked"])
    assert ("+", old.replace("--blocks_to_swap 2", swap)) in map(tuple, change["marked"])


def test_tapes_are_asked_for_where_reading_the_command_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VideoX-Fun names layers by parts of their names, which the model's table of parameters tells apart."""
    monkeypatch.setattr(profiles, "TAPES", tmp_path)
    words = "accelerate launch scripts/z_image/train_lora.py --pretrained_model_name_or_path=models/Z-Image --rank=6"
    assert browser.tapes_of(json.dumps({"gpu": "24GB", "paste": words})) == "z-image"


@pytest.mark.parametrize(
    ("paste", "kind"),
    [
        (COMMAND, "sh"),
        (CONFIG, "yaml"),
        ('{"config": {}}', "json"),
        ("# mine\n[model]\ntype = 'wan'\n", "toml"),
        ("import torch\n", "py"),
        (MESSAGE, "log"),
        ("RuntimeError: CUDA out of memory", "log"),
    ],
)
def test_what_was_pasted_is_told_by_its_look(paste: str, kind: str) -> None:
    assert browser.PageQuestion(paste=paste).words()[-1] == f"pasted.{kind}"


def test_a_pasted_config_and_a_pasted_message() -> None:
    shown = ask(gpu="16GB", paste=CONFIG)["shown"]
    assert shown["verdict"] == "no" and "FLUX.1 dev" in shown["job"]
    assert browser.tapes_of(json.dumps({"paste": MESSAGE})) == ""
    answer = ask(gpu="16GB", paste=MESSAGE)
    assert answer["shown"]["sentence"].startswith("GPU 0: 20.00 MiB could not be allocated")
    assert json.loads(answer["json"])["schema"] == 1


def test_lines_of_a_config_are_marked_where_they_stand() -> None:
    lines = browser.marked("a:\n  swap: 1\n  swap_more: 2\n", ["config.a.swap: 20"])
    assert lines == [(" ", "a:"), ("-", "  swap: 1"), ("+", "  swap: 20"), (" ", "  swap_more: 2")]
    assert browser.marked("swap = 1", ["model.new = 'C:\\1'"])[-1] == ("+", "model.new = 'C:\\1'")


@pytest.mark.parametrize(
    "form",
    [
        {"model": "<img src=x onerror=alert(1)>", "gpu": "24GB"},
        {"model": "sdxl", "gpu": "--help"},
        {"model": "sdxl", "gpu": "24GB", "trainer": "nobody's"},
        {"gpu": "24GB", "paste": "echo $(rm -rf /)"},
        {"paste": COMMAND},
    ],
)
def test_what_is_wrong_is_an_answer_too(form: dict[str, str]) -> None:
    answer = ask(**form)
    assert answer["shown"]["verdict"] == "error" and answer["shown"]["sentence"] and answer["code"] in (1, 2)
