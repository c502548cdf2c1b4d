"""What several trainers do alike."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from planner.catalog.profiles import TextEncoder
from planner.layout.checkpoints.offload import fetched_when_needed
from planner.layout.encoders_vae.component_pass import BYTES_PER_PARAMETER
from planner.layout.run import STRATEGY_MOMENT, Run, Transform
from planner.spec.job import QUANTISED, SPLIT, WeightsDtype
from planner.tape.program import Block, Stage


class HeldTensor(NamedTuple):
    """A tensor that the recording lacks, and the stretches of a step at whose start it comes and at whose end it
    goes."""

    size: int
    name: str
    first: int
    last: int


def hold(run: Run, stage: Stage, spans: Iterable[HeldTensor]) -> None:
    """Adds tensors to a stage."""
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for span in spans:
        buffer = run.new(span.size, "activation", span.name)
        begins.setdefault(span.first, []).append(buffer)
        ends.setdefault(span.last, []).append(~buffer)
    stage.stretches = [
        (moment, [*begins.get(at, ()), *events, *ends.get(at, ())])
        for at, (moment, events) in enumerate(stage.stretches)
    ]


def stretches_of_blocks(stage: Stage) -> tuple[dict[Block, list[int]], dict[Block, list[int]]]:
    """Where each block's forward is among a stage's stretches, and its backward."""
    found: dict[str, dict[Block, list[int]]] = {"forward": {}, "backward": {}}
    for at, (moment, _) in enumerate(stage.stretches):
        if moment.block >= 0 and moment.passes in found:
            found[moment.passes].setdefault((moment.module_list, moment.block), []).append(at)
    return found["forward"], found["backward"]


def encoders_whole(run: Run) -> None:
    """A text encoder is moved to the GPU whole to encode prompts, however small the card (read in ai-toolkit 27a03a9,
    CogVideo 129c375, diffusers' examples 58eb52c, diffusion-pipe 8f83dbf, EasyAnimate c2a70d1, musubi-tuner 30c658c,
    OneTrainer 23df383, sd-scripts 48d368f, SimpleTuner bc8e6ab, VideoX-Fun 804a425; in the others taken to be so)."""
    run.device.encoders_whole = True


def layers_of_encoders_offloaded(run: Run) -> None:
    """Where layers of the model wait in host RAM, those of its text encoders do too, and come one by one: ai-toolkit's
    ``layer_offloading`` (``layer_offloading_text_encoder_percent`` is 1 unless it is written)."""
    if run.strategy.swap_blocks:
        run.device.encoders_whole = False


def largest_encoder_quantised(run: Run) -> None:
    """Of several text encoders the largest alone is cast to fp8: T5 or the language model that the flag or the file
    names (musubi-tuner ``--fp8_t5``, ``--fp8_llm``, ``--fp8_vl``; sd-scripts ``--fp8_vl`` and T5's file)."""
    largest = max(run.facts.model.text_encoders, key=lambda encoder: encoder.parameters, default=None)
    run.device.encoders_in_16_bits = tuple(
        encoder.name for encoder in run.facts.model.text_encoders if encoder is not largest
    )


def prompts_cached_apart(run: Run) -> None:
    """Captions are encoded by a script of its own, whose flags a command that trains does not show (musubi-tuner's
    ``--fp8_t5`` and ``--device cpu``, ltx-trainer's process_captions.py): a text encoder larger than the card is no
    reason why that command does not fit. Prompts of samples are encoded where it trains (musubi-tuner
    wan_train_network.py ``process_sample_prompts``)."""
    run.device.prompts_cached_apart = run.strategy.validation_mode == "off"


def from_pretrained(run: Run, dtype: WeightsDtype) -> None:
    """The model is loaded on the CPU in a format. What the files have in that format stays mapped, and takes no RAM of
    its own; else all of it is cast, shard by shard (diffusers model_loading_utils.py ``load_model_dict_into_meta``). A
    quantised one goes to the GPU as it is made."""
    if dtype not in QUANTISED and dtype != run.facts.model.traits.published_dtype:
        run.host.loaded_bytes = BYTES_PER_PARAMETER[dtype]


def filled_in_fp32(run: Run) -> None:
    """The model is made on the CPU in fp32, filled from its mapped files, and cast at the end: whatever the files have,
    its fp32 weights take RAM (EasyAnimate and VideoX-Fun, ``from_pretrained`` of their own models: ``from_config``,
    ``load_state_dict``, ``to(torch_dtype)``)."""
    run.host.loaded_bytes = BYTES_PER_PARAMETER["fp32"]


def swap_in_place(run: Run) -> None:
    """Block swap exchanges the weights of two blocks where they lie, over host memory that is not pinned: the blocks
    that stay are all there is on the GPU, and there is no ring (kohya-ss library/custom_offloading_utils.py
    ``swap_weight_devices_cuda``, copied by musubi-tuner and diffusion-pipe). Two blocks' pinned buffers lie on the
    way, as in musubi-tuner."""
    run.host.swap_pins = "staging"
    if run.strategy.swap_blocks:
        run.drop(run.load, [buffer for buffer, op in enumerate(run.program.op) if op == "swap ring"])


def swapped_to_pinned_memory(run: Run) -> None:
    """Blocks go to the CPU by ``to("cpu", non_blocking=True)``, whose copies torch pins, each weight's in a power of
    two: sd-scripts 48d368f library/custom_offloading_utils.py, diffusion-pipe 8f83dbf utils/offloading.py."""
    run.host.swap_pins = "rounded"


def checkpoints_saved_on_cpu(run: Run) -> None:
    """All arguments of a checkpoint are copied to ordinary host memory, those too that all blocks are given alike, and
    come back when they are wanted (torch ``save_on_cpu`` without ``pin_memory``, ``tensor.to("cpu")``)."""
    outputs_sent_to_cpu(run)
    if run.strategy.gradient_checkpointing == "offload":
        run.host.copies_shared_inputs = True


def outputs_sent_to_cpu(run: Run) -> None:
    """A checkpointed block's outputs go to ordinary host memory, where the next block's checkpoint finds its inputs;
    what all blocks are given alike stays on the GPU, once (``to_cpu(outputs)``: musubi-tuner 30c658c
    utils/model_utils.py ``create_cpu_offloading_wrapper``, sd-scripts 48d368f library/flux_models.py
    ``DoubleStreamBlock.forward``)."""
    if run.strategy.gradient_checkpointing == "offload":
        run.host.checkpoints_pin = "none"
        fetched_when_needed(run)


def encoder_in_model(run: Run, trainer: str) -> TextEncoder | None:
    """The text encoder that runs in every step as a part of the model; None where there is none."""
    model = run.facts.model
    return model.text_encoders[-1] if model.trained_with(trainer, "last-encoder-in-model") else None


def last_encoder_in_model(trainer: str) -> Transform:
    """The term of a trainer whose model has the last text encoder in it, frozen: Anima's conditioner (ai-toolkit
    27a03a9 extensions_built_in/diffusion_models/anima/anima.py ``AnimaTrainableModel``; SimpleTuner bc8e6ab
    helpers/models/anima/transformer.py ``_LLMAdapter``; sd-scripts 48d368f library/anima_models.py; DiffSynth-Studio
    fed7b18 diffsynth/models/anima_dit.py; diffusion-pipe 8f83dbf models/cosmos_predict2.py), and LTX-2's
    connectors (SimpleTuner helpers/models/ltxvideo2/model.py ``model_predict``, ai-toolkit
    extensions_built_in/diffusion_models/ltx2/ltx2.py ``get_noise_prediction``). What it makes on the way is gone
    before the first block, and is not added. It is in 16 bits over a quantised base too, where ai-toolkit quantises
    Anima's."""

    def term(run: Run) -> None:
        """The encoder's weights lie beside the model's; where all encoders stay on the GPU they are there anyway."""
        encoder = encoder_in_model(run, trainer)
        if encoder is not None and run.strategy.text_encoder != "resident":
            run.add(run.load, int(BYTES_PER_PARAMETER["bf16"] * encoder.parameters), "residents", encoder.name)

    return term


MODULATION = re.compile(r"\.norm\w*\.linear(\.base_layer)?\.weight")
"""The layers of FLUX.1's and HunyuanVideo's blocks that make scales and shifts, by the ends of diffusers' names, under
an adapter or without one."""


def modulation_in_8_bits(trainer: str) -> Transform:
    """The term of a trainer that casts every linear layer of an fp8 base, where diffusers' layerwise casting, which is
    recorded, leaves what it calls a norm in 16 bits: in FLUX.1 and HunyuanVideo a fourth of the model. sd-scripts
    flux_train_network.py ``model.to(torch.float8_e4m3fn)`` at 48d368f; musubi-tuner hunyuan_model/models.py
    ``load_transformer`` at 30c658c; ai-toolkit toolkit/util/quantize.py ``quantize`` at 27a03a9; diffusion-pipe
    models/{flux,sd3,hunyuan_image}.py KEEP_IN_HIGH_PRECISION and hunyuan_video.py ``params_to_keep`` at 8f83dbf. Of
    which models, their profiles say."""

    def term(run: Run) -> None:
        """Modulation layers take half of what was recorded, where the trainer casts them too."""
        if run.strategy.weights_dtype != "fp8" or not run.facts.model.trained_with(trainer, "modulation-in-8-bits"):
            return
        for name, buffer in run.named("weight").items():
            if MODULATION.search(name) and name not in run.named("gradient"):
                run.resize(buffer, run.sizes[buffer] // 2)

    return term


FP64 = 8


def positions_in_fp64(trainer: str) -> Transform:
    """The term of a trainer that turns queries and keys by their positions in fp64, one after the other, before each
    block's self-attention and behind its backward: a copy, and the product (DiffSynth-Studio
    diffsynth/models/wan_video_dit.py ``rope_apply``, musubi-tuner wan/modules/model.py:110
    ``rope_apply_inplace_cached``). Of which models, their profiles say."""

    def term(run: Run) -> None:
        """Queries and keys in fp64 while they are turned."""
        if not run.facts.model.trained_with(trainer, "positions-in-fp64") or run.in_own_code:
            return  # its own code turns them in the recording itself
        config, grid = run.facts.model.config, run.grid
        tokens = grid["B"] * grid["F"] * grid["H"] * grid["W"]
        nbytes = FP64 * tokens * config["num_attention_heads"] * config["attention_head_dim"]
        copy, product = (run.new(nbytes, "temporary", name) for name in ("fp64 copy", "fp64 product"))
        turned = [copy, product, ~copy, ~product] * 2
        of_forward, of_backward = run.shared(_attention_outputs)
        for position, (moment, events) in enumerate(run.step.stretches):
            if moment.block < 0 or (of_forward | of_backward).isdisjoint(events):
                continue
            forward = [at for at, event in enumerate(events) if event in of_forward]
            backward = [at for at, event in enumerate(events) if event in of_backward]
            inserted = list(events)
            if backward:  # self-attention comes first in a block, so its backward comes last
                inserted[backward[-1] + 1 : backward[-1] + 1] = turned
            if forward:
                inserted[forward[0] : forward[0]] = turned
            run.step.stretches[position] = (moment, inserted)

    return term


def _attention_outputs(run: Run) -> tuple[frozenset[int], frozenset[int]]:
    """What attention's kernels make in forward, and in backward."""
    endings = ("_attention", "_attention_backward")
    forward, backward = (
        frozenset(buffer for buffer, op in enumerate(run.program.op) if op.endswith(ending)) for ending in endings
    )
    return forward, backward


def cache_emptied(run: Run) -> None:
    """The allocator's cache is emptied between loading and training."""
    run.empty_cache.after_load = True


def cache_kept_while_sampling(run: Run) -> None:
    """Nothing empties the allocator's cache between denoising and decoding (diffusers pipelines, ``__call__``;
    musubi-tuner wan_train_network.py ``do_inference``)."""
    run.empty_cache.around_decode = False


def steps_by_itself(run: Run) -> bool:
    """Whether the trainer's own loop frees or zeroes the gradients, and not an engine, a hook or DDP's buckets."""
    strategy = run.strategy
    return (
        strategy.sharding not in SPLIT
        and not (strategy.sharding == "ddp" and strategy.grad_buckets == "view")
        and strategy.optimizer_step != "backward"
        and strategy.offload_gradients == "none"
    )


def clip_pixels(run: Run) -> int:
    """Pixels in a batch of clips or images, as they are loaded: samples x frames x height x width."""
    grid, patch, vae = run.grid, run.facts.model.shape.patch, run.facts.model.vae
    frames = vae.decoded(grid["F"] * patch[0])
    return grid["B"] * frames * grid["H"] * patch[1] * grid["W"] * patch[2] * vae.spatial**2


def passing(run: Run, nbytes: int, name: str) -> None:
    """Something that is on the GPU before the weights are as they stay, and gone then: its segments are free for
    them."""
    whole = run.new(nbytes, "residents", name)
    run.phases.before_load = (
        *run.phases.before_load,
        Stage("load", [(STRATEGY_MOMENT._replace(passes=name), [whole, ~whole])]),
    )
