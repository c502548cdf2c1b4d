"""planner/layout/trainer_terms/onetrainer.py: what its layers in buffers and its adapters take, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.catalog.shapes import grid
from planner.dialects.base.script import from_file
from planner.estimate.host_ram import PROCESS_BYTES, HostRam, host_ram
from planner.estimate.stages import replay_stages
from planner.foreign.case import read_case
from planner.foreign.check import check_case
from planner.layout.encoders_vae.component_pass import encoders
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.layout.trainer_terms.onetrainer import _loaded_bytes

MIB = 2**20
FROZEN = {"train": False, "weight_dtype": "BFLOAT_16"}
CONFIG: dict[str, Any] = {
    "training_method": "LORA",
    "model_type": "FLUX_DEV_1",
    "base_model_name": "black-forest-labs/FLUX.1-dev",
    "resolution": "512",
    "train_dtype": "BFLOAT_16",
    "transformer": {"train": True, "weight_dtype": "BFLOAT_16"},
    "text_encoder": FROZEN,
    "text_encoder_2": FROZEN,
}


def run_of(folder: Path, **changes: Any) -> Run:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    dialect, given = dialects.read_script(from_file(folder / "config.json"))
    case = read_case(dialect, given, {}, {"gpu": "80GB"})
    facts = load_facts(case.configuration, case.model, case.gpu)
    return lay_out(case.configuration, facts, grid(case.model, case.job), case.trainer)


def added(run: Run, name: str) -> list[int]:
    events = [*run.load.ops, *run.optimizer_first.ops]
    return [run.sizes[event] for event in events if event >= 0 and run.program.op[event] == name]


def test_layers_lie_in_buffers_as_large_as_what_is_not_offloaded(tmp_path: Path) -> None:
    """FLUX.1's 57 blocks have 11.9 billion parameters; half of them in bf16, and a tenth of that at most on top."""
    whole = run_of(tmp_path)
    half = run_of(tmp_path, transformer={"weight_dtype": "BFLOAT_16", "offload_fraction": 0.5})
    blocks = sum(map(whole.total_bytes, whole.swappable_weights.values()))
    buffers = added(half, "buffer of layers")
    assert len(set(buffers)) == 1
    assert blocks * 29 / 57 * 0.95 < sum(buffers) < blocks * 29 / 57 * 1.1 + 4096 * len(buffers)
    there = {event for event in half.load.ops if event >= 0}
    assert not there & {weight for layer in half.swappable_weights.values() for weight in layer}
    assert not added(half, "swap ring")


@pytest.mark.parametrize(
    ("layers", "limit", "most"), [((4, 4, 4, 4), 9, 8), ((4, 4, 4, 4), 3, 8), ((1, 1, 6, 6), 8, 12), ((5,), 9, 5)]
)
def test_two_layers_are_there_at_the_least(layers: tuple[int, ...], limit: int, most: int) -> None:
    assert max(_loaded_bytes(layers, limit)) == most


def test_without_a_filter_every_linear_layer_has_an_adapter(tmp_path: Path) -> None:
    """Rank 16 of FLUX.1, by its layers: in the double blocks 8 of attention, 4 of feed-forward and 2 of modulation, in
    the single ones 3 of attention and proj_mlp, proj_out, norm.linear; and what is around them."""
    width = 3072
    double = 8 * 2 * width + 4 * 5 * width + 2 * 7 * width
    single = 3 * 2 * width + 5 * width + 6 * width + 4 * width
    around = (64 + width) + (4096 + width) + 2 * (256 + width) + 3 * 2 * width + (768 + width) + 3 * width + width + 64
    usual = 19 * (8 * 2 + 4 * 5) * width + 38 * 3 * 2 * width
    blocks = 19 * double + 38 * single
    for layer_filter, elements in (("", blocks + around), ("transformer_block", blocks)):
        run = run_of(tmp_path, layer_filter=layer_filter)
        (weights,) = added(run, "adapters on more layers")
        (states,) = added(run, "states of more adapters")
        assert weights == 4 * 16 * (elements - usual)
        assert states == pytest.approx(2 * weights, rel=0.001)
    assert not added(run_of(tmp_path, layer_filter="attn"), "adapters on more layers")


def test_the_text_keeps_what_offloading_sends_away_of_single_blocks(tmp_path: Path) -> None:
    part = {"weight_dtype": "BFLOAT_16", "activation_offloading": True}
    run = run_of(tmp_path, transformer=part, batch_size=2)
    tokens = 2 * (32 * 32 + 77)
    name = "text and image of a block"
    kept = [run.sizes[event] for event in run.step.ops if event >= 0 and run.program.op[event] == name]
    assert kept == [2 * 3072 * tokens] * 37


@pytest.mark.parametrize("passes", [1, 2])
def test_weights_that_are_cast_anew_lie_in_the_buffers_in_every_stage(tmp_path: Path, passes: int) -> None:
    """A further pass before the optimizer steps is a stage of its own."""
    part = {"weight_dtype": "FLOAT_8", "offload_fraction": 0.7, "activation_offloading": True}
    config = CONFIG | {"transformer": part, "gradient_accumulation_steps": passes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    dialect, given = dialects.read_script(from_file(tmp_path / "config.json"))
    found = check_case(read_case(dialect, given, {}, {"gpu": "80GB"}), search=False)
    assert found.outcome.estimate.phases["train"].allocated_bytes < 8 << 30


def test_what_nf4_scales_by_stays_on_the_gpu_beside_the_buffers(tmp_path: Path) -> None:
    """A byte for 64 numbers, fp32 for 256 of those, and tables of 272 values a layer: of FLUX.1's 11.9 billion numbers,
    and of T5's 24 layers without ``wo``, which transformers keeps in fp32."""
    part = {"train": False, "weight_dtype": "NFLOAT_4"}
    run = run_of(tmp_path, transformer={"weight_dtype": "NFLOAT_4"}, text_encoder_2=part)
    model, *encoders = added(run, "scales of nf4")
    assert model == pytest.approx(11.9e9 / 64 * (1 + 4 / 256), rel=0.01)
    t5 = 24 * (4 * 4096 * 4096 + 2 * 4096 * 10240) // 64
    assert encoders[-1] == t5 + 4 * (t5 // 256 + 24 * 6 * 272)
    assert not added(run_of(tmp_path), "scales of nf4")


def test_the_thread_that_caches_keeps_a_workspace(tmp_path: Path) -> None:
    assert added(run_of(tmp_path), "cublas of caching") == [32 * MIB]
    assert not added(run_of(tmp_path, latent_caching=False), "cublas of caching")


def test_an_adapters_products_come_and_go_beside_the_layers(tmp_path: Path) -> None:
    """FLUX.1's single blocks: proj_mlp gives, and proj_out reads, what is 4 and 5 times as wide as the model."""
    run = run_of(tmp_path)
    tokens, stretch = 32 * 32 + 77, []
    for moment, events in run.step.stretches:
        if (moment.module_list, moment.block, moment.passes) == ("single_transformer_blocks", 20, "backward"):
            stretch += events
    made = {run.program.op[event]: run.sizes[event] for event in stretch if event >= 0}
    assert made["adapter's output"] == made["scaled output"] == 2 * tokens * 4 * 3072
    assert made["adapter's gradient"] == made["sum of both"]
    assert made["sum of both"] in (2 * tokens * 5 * 3072, 4 * tokens * 5 * 3072)
    usual = run_of(tmp_path, layer_filter="attn.to_q,attn.to_k,attn.to_v")
    assert "sum of both" not in {usual.program.op[event] for event in usual.step.ops if event >= 0}


def test_a_convolutions_adapter_keeps_a_copy_of_what_it_reads(tmp_path: Path) -> None:
    """SD 1.5's 16 transformers begin with a convolution that reads an fp32 norm; its upsamplers read fp32 too."""
    sd15 = {"model_type": "STABLE_DIFFUSION_15", "base_model_name": "stable-diffusion-v1-5/stable-diffusion-v1-5"}
    half = {"weight_dtype": "FLOAT_16"}
    run = run_of(tmp_path, **sd15, unet={"train": True, **half}, text_encoder=half | {"train": False})
    name = "input of an adapter"
    copies = [run.sizes[event] for event in run.step.ops if event >= 0 and run.program.op[event] == name]
    assert copies.count(2 * 64 * 64 * 320) >= 5
    freed = [~event for event in run.step.ops if event < 0 and run.program.op[~event] == name]
    assert len(freed) == len(copies) >= 16


def test_what_fuses_the_states_of_a_prompt_is_checkpointed_too(tmp_path: Path) -> None:
    """Krea 2's four fusion blocks run on 12 states of 512 tokens of two prompts, and are kept through the step without
    checkpoints (util/checkpointing_util.py)."""
    krea = {"model_type": "KREA_2", "base_model_name": "krea/Krea-2-Raw", "batch_size": 2, "layer_filter": "attn,ff"}
    part = {"train": True, "weight_dtype": "BFLOAT_16"}
    checkpointed = run_of(tmp_path, **krea)
    plain = run_of(tmp_path, **krea, transformer={**part, "gradient_checkpointing": False})
    states = 2 * (2 * 512) * 12 * 2560

    def before_blocks(run: Run) -> int:
        """Bytes that the step holds when its first block begins."""
        first = next(at for at, (moment, _) in enumerate(run.step.stretches) if moment.block == 0)
        events = [event for _, events in run.step.stretches[:first] for event in events]
        return run.total_bytes({each for each in events if each >= 0} - {~each for each in events if each < 0})

    assert before_blocks(plain) - before_blocks(checkpointed) > 50 * states
    assert sizes_of(checkpointed, "inputs of checkpoints before the blocks") == [states + 2 * states // 12]
    assert not sizes_of(plain, "inputs of checkpoints before the blocks")
    steps = {entry.phase: entry for entry in replay_stages(checkpointed)}  # each is made and freed in turn
    assert steps["train"].allocated_after_bytes - steps["optimizer"].allocated_after_bytes < 2**30


def sizes_of(run: Run, name: str) -> list[int]:
    return [run.sizes[buffer] for buffer, op in enumerate(run.program.op) if op == name]


def host_of(run: Run) -> HostRam:
    return host_ram(run, run.machine)


def test_offloaded_layers_are_registered_in_buffers_with_room_for_one_more(tmp_path: Path) -> None:
    """What is not loaded, one more layer (a double block has the most), and a tenth for ten buffers at most."""
    run = run_of(tmp_path, transformer={"weight_dtype": "BFLOAT_16", "offload_fraction": 0.5})
    layers = [run.total_bytes(layer) for layer in run.swappable_weights.values()]
    loaded = _loaded_bytes(layers, sum(layers) * 29 // 57)
    waiting = sum(layers) - min(loaded) + max(layers)
    assert waiting < host_of(run).pinned_bytes < 1.1 * waiting + 10 * 4096


def test_what_encoded_stays_in_host_ram(tmp_path: Path) -> None:
    """CLIP, T5 with its table of 32128 words once more, and the VAE in bf16; beside the whole model as they encode."""
    run = run_of(tmp_path, vae={"weight_dtype": "BFLOAT_16"})
    parameters = sum(encoder.parameters for encoder in run.facts.model.text_encoders) + run.facts.model.vae.parameters
    stays = 2 * (parameters + 32128 * 4096)
    phases = host_of(run).phases
    assert phases["train"] - host_of(run_of(tmp_path, latent_caching=False)).phases["train"] == pytest.approx(
        stays, abs=MIB * 8
    )
    model = run.total_bytes(run.named("weight").values())
    assert phases["encode"] == pytest.approx(PROCESS_BYTES + stays + model, abs=MIB)


def test_a_model_in_the_format_of_its_files_stays_mapped(tmp_path: Path) -> None:
    """FLUX.1 is published in bf16; in 8 bits its 11.9 billion numbers are made in host RAM."""
    mapped, made = run_of(tmp_path), run_of(tmp_path, transformer={"weight_dtype": "FLOAT_8"})
    assert mapped.host.loaded_bytes == 0
    assert made.host.loaded_bytes == 1


def test_text_encoders_keep_one_format(tmp_path: Path) -> None:
    """T5's 24 layers ``wo`` of 4096 by 10240 are not quantised, nor its table of words, which is there twice."""
    words, kept = 32128 * 4096, 24 * 10240 * 4096
    quantised = run_of(tmp_path, text_encoder_2={"train": False, "weight_dtype": "FLOAT_8"})
    (encoder,) = [each for each in encoders(quantised, "cached", 1) if each.second_table]
    assert encoder.weight_bytes == encoder.parameters - words - kept + 2 * (words + kept) + 2 * words


def test_a_unet_s_convolutions_have_adapters_where_blocks_are_computed_again(tmp_path: Path) -> None:
    """SDXL's last residual blocks join 960 channels of 128x128: an adapter keeps its own copy of that in 16 bits, and
    the input of the shortcut has a gradient from both."""
    run = run_of(
        tmp_path,
        model_type="STABLE_DIFFUSION_XL_10_BASE",
        resolution="1024",
        unet={"weight_dtype": "FLOAT_16"},
        train_dtype="FLOAT_16",
    )
    joined = 960 * 128 * 128
    last = [events for moment, events in run.step.stretches if (moment.passes, moment.block) == ("backward", 2)]
    made = [(run.program.op[event], run.sizes[event]) for events in last for event in events if event >= 0]
    assert ("input of an adapter", 2 * joined) in made
    assert {nbytes for op, nbytes in made if op == "sum of both"} >= {2 * joined, 4 * joined}
    assert run.job.lora_targets == run.facts.model.lora.wide
