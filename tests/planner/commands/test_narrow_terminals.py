"""What is printed on a terminal of 80 columns: no line is longer, and what continues a line stands beneath it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import typed

WIDTH = 80
FLUX = """accelerate launch flux_train_network.py --pretrained_model_name_or_path flux1-dev.safetensors \\
  --network_module networks.lora_flux --network_dim 16 --sdpa --resolution 1024 --mixed_precision bf16 \\
  --gradient_checkpointing --network_train_unet_only --optimizer_type AdamW8bit --cache_latents \\
  --cache_text_encoder_outputs
"""


@pytest.fixture(autouse=True)
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.chdir(tmp_path)


def test_the_effect_of_a_change_stands_beneath_it() -> None:
    Path("a.sh").write_text(FLUX)
    lines = typed("check", "a.sh", "--gpu", "16GB", code=3).stdout.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("smallest change"))
    changes = lines[first + 1 : lines.index("as read:") - 1]
    assert any(len(line) > WIDTH - 15 for line in changes)  # some go on in a second line
    assert all(len(line) <= WIDTH and line.startswith(("  ", "or:", "helps, ")) for line in changes)


AI_TOOLKIT = """job: extension
config:
  process:
    - network: {type: lora, linear: 32}
      datasets: [{folder_path: data, num_frames: 41, resolution: [512, 768]}]
      train: {cache_text_embeddings: true, gradient_checkpointing: true, optimizer: adamw8bit, dtype: bf16}
      model:
        {name_or_path: ai-toolkit/Wan2.2-T2V-A14B-Diffusers-bf16, arch: wan22_14b, quantize: true, qtype: uint4,
         low_vram: true}
"""


def test_the_cost_of_one_of_several_changes_stands_beneath_it_alone() -> None:
    Path("a.yaml").write_text(AI_TOOLKIT)
    out = typed("check", "a.yaml", "--gpu", "5090", code=3).stdout
    part = out[out.index("smallest change:") :].split("or:")[0].split("as read:")[0]
    assert "export PYTORCH_CUDA_ALLOC_CONF" in part and part.count("layer_offloading: true") == 1
    assert "\n      host RAM for the layers\n" in part and "lossless\n" in part


def test_checks_of_preflight_are_no_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    typed("suggest", "sdxl", "--gpu", "12GB", "-o", "plan.toml")
    Path("data").mkdir()
    for name in ("a quite long name of a picture.png", "another quite long name of a picture.png"):
        Path("data", name).write_bytes(b"no picture")
        Path("data", name).with_suffix(".txt").write_text("a caption")
    out = typed("preflight", "plan.toml", "--device", "cpu", "--data", "data", code=1).stdout
    assert max(map(len, out.splitlines())) <= WIDTH
    said = out[out.index("error: data:") :].splitlines()
    assert said[1].startswith("  ")


def test_what_doctor_lists_stays_in_its_column() -> None:
    lines = typed("doctor").stdout.split("\n\n")[0].splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert all(line[9] == " " and line[10] != " " for line in lines)


def test_a_plan_that_lacks_host_ram_says_so_and_not_what_it_needs_of_the_card() -> None:
    question = ("flux.1-dev", "--gpu", "rtx4060ti-16gb", "--host-ram", "32GiB", "--for", "ai-toolkit")
    _, said = typed("suggest", *question).stdout.split("\npeak:")[0].split("\nlossy: ")
    words = " ".join(said.split())
    assert words.endswith("GiB of host RAM)"), words


def test_where_no_model_fits_the_column_is_of_what_was_asked() -> None:
    question = ("Wan 2.2 14B", "--gpu", "8GB", "--host-ram", "16GiB")
    heads = next(line for line in typed("suggest", *question, code=3).stdout.splitlines() if line.startswith("model "))
    assert "clip" in heads.split()


def test_an_unknown_folder_is_named_and_not_the_option_beside_it() -> None:
    assert "there is no 'nowhere'" in typed("record", "nowhere", "--name", "mine", code=1).stderr


def test_rows_that_nothing_is_said_of_have_no_empty_table() -> None:
    typed("suggest", "sdxl", "--gpu", "12GB", "-o", "plan.toml")
    Path("rows.jsonl").write_text("")
    assert "implementation" not in typed("accuracy", "rows.jsonl").stdout


@pytest.mark.parametrize("verb", ["suggest", "train", "check", "record", "demo"])
def test_help_lists_no_argument_without_a_word(verb: str) -> None:
    lines = typed(verb, "--help").stdout.splitlines()
    assert lines[lines.index("Options:") + 1].startswith("  -")
    assert max(map(len, lines)) <= WIDTH
