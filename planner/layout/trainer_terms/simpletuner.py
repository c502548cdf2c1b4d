"""SimpleTuner (bghira), read at bc8e6ab."""

from __future__ import annotations

import itertools
import re

from planner.catalog.traits import TrainerTrait
from planner.layout.recordings import parameters
from planner.layout.run import Run, Transform
from planner.layout.sharding.zero import HALF
from planner.layout.single_gpu import onto_gradients
from planner.layout.trainer_terms.lora_layers import adapters_in_half, keep_by_block
from planner.layout.trainer_terms.lycoris.factors_in_turn import between_factors, nothing_between
from planner.layout.trainer_terms.lycoris.more_layers import kept_for_more_layers
from planner.layout.trainer_terms.lycoris.whole_changes import CHANGES_IN_16_BITS, whole_changes
from planner.layout.trainer_terms.shared import (
    cache_kept_while_sampling,
    last_encoder_in_model,
    passing,
    steps_by_itself,
    swap_in_place,
)
from planner.layout.trainer_terms.simpletuner_engines import (
    FSDP_WHOLE,
    UNDER_ENGINES,
    undecayed_apart,
    whole_weights_listed,
)
from planner.spec.job import QUANTISED
from planner.tape.program import Block
from planner.tape.variants.precision import trained_storage


def gradients_zeroed(run: Run) -> None:
    """Gradients are filled with zeros between steps and stay, so that from the second step on each new one is made
    beside an old one (simpletuner/helpers/training/trainer.py ``zero_grad(set_to_none=config.set_grads_to_none)``,
    which is off unless asked for)."""
    if not steps_by_itself(run):
        return
    run.first_step, run.step = run.step, onto_gradients(run)
    gradients = run.named("gradient").values()
    for stage in (run.optimizer_first, run.optimizer):
        run.drop(stage, gradients)


STEP_LAUNCHES, STEP_BYTES = 31, 220
"""Operators of its step over one parameter, counted: four roundings of six, two decays, addcmul, a root with its
epsilon, a copy and a difference (adamw_bfloat16 ``_make_step``, ``add_stochastic_``, ``addcdiv_stochastic_``). And what
they read and write of each of its numbers: 46 bytes a rounding, 48 the one that divides, the others 4 to 8."""


def shift(run: Run) -> None:
    """Its AdamW for 16-bit parameters has a third state, what rounding has withheld from each parameter, and steps one
    parameter after another (simpletuner/helpers/training/optimizers/adamw_bfloat16 ``AdamWBF16``)."""
    if trained_storage(run.job, run.strategy) == "half":
        _add_shift(run)


def _add_shift(run: Run) -> None:
    if run.strategy.optimizer != "adamw" or not steps_by_itself(run):
        return
    states = [run.sizes[buffer] for name, buffer in run.named("optimizer").items() if name.endswith(":exp_avg")]
    made = [run.new(nbytes, "optimizer", "shift") for nbytes in states]
    run.place(run.optimizer_first, made, "shift", at=0)
    run.work.optimizer_launches += STEP_LAUNCHES * len(states)
    run.work.optimizer_bytes += STEP_BYTES * sum(states) // HALF


BLOCK_FORWARD_BYTES, BLOCK_BACKWARD_BYTES = -66, 111
"""Bytes a number of the hidden states that a Wan block moves more than diffusers', in forward and in backward, counted
from both sources under one recorder (1.3B -67 and 110, 14B -66 and 111). It saves in modulating, gating and adding; its
norms of queries and keys are several operators where diffusers' are torch's fused one."""

BLOCK_FORWARD_LAUNCHES, BLOCK_BACKWARD_LAUNCHES = -7, 20
"""The operators of a block that it launches more."""


def blocks_in_16_bits(run: Run) -> None:
    """Its Wan blocks modulate, gate and add in 16 bits where diffusers' do so in fp32, rotate in fp64 where those do in
    fp32, and norm queries and keys by diffusers' ``RMSNorm`` (simpletuner/helpers/models/wan/transformer.py
    ``WanTransformerBlock.forward``, ``_apply_rotary_emb_anyshape``; diffusers transformer_wan.py). Of a LoRA, whose
    modulation takes no gradients."""
    model = run.facts.model
    if not model.trained_with("simpletuner", "blocks-in-16-bits") or run.job.method != "lora":
        return
    width = model.config["num_attention_heads"] * model.config["attention_head_dim"]
    numbers = run.grid["B"] * run.grid["F"] * run.grid["H"] * run.grid["W"] * width * model.blocks
    run.work.forward_bytes += BLOCK_FORWARD_BYTES * numbers
    run.work.backward_bytes += BLOCK_BACKWARD_BYTES * numbers
    run.work.forward_launches += BLOCK_FORWARD_LAUNCHES * model.blocks
    run.work.backward_launches += BLOCK_BACKWARD_LAUNCHES * model.blocks


ROTATED_FORWARD_BYTES, ROTATED_BACKWARD_BYTES = 76, 64
"""Bytes a number of the hidden states that a Qwen-Image block moves more than diffusers' to rotate queries and keys,
counted from both sources under one recorder: diffusers multiplies complex numbers (20 bytes each of both in forward),
this one takes fp32 apart and puts it together again (58)."""

ROTATED_FORWARD_LAUNCHES, ROTATED_BACKWARD_LAUNCHES = 20, 16
"""The operators that it takes more, of both streams."""


def real_rotation(run: Run) -> None:
    """Its Qwen-Image rotates with real numbers (simpletuner/helpers/models/qwen_image/transformer.py
    ``apply_rotary_emb_qwen`` with ``precompute_real_rope_qwen``). It pads every prompt to 1024 tokens
    (helpers/training/diffusers_overrides.py ``_patched_qwen_prompt_embeds_from_tokenizer``), and masks the padding of
    one sample. Of several each attends by itself, to its own prompt without padding, which is timed as recorded: all
    together, with a mask."""
    model = run.facts.model
    if not model.trained_with("simpletuner", "rotates-real-numbers"):
        return
    grid, work = run.grid, run.work
    work.attention_masked = grid["B"] == 1
    width = model.config["num_attention_heads"] * model.config["attention_head_dim"]
    numbers = grid["B"] * (grid["F"] * grid["H"] * grid["W"] + grid["T"]) * width * model.blocks
    work.forward_bytes += ROTATED_FORWARD_BYTES * numbers
    work.backward_bytes += ROTATED_BACKWARD_BYTES * numbers
    work.forward_launches += ROTATED_FORWARD_LAUNCHES * model.blocks
    work.backward_launches += ROTATED_BACKWARD_LAUNCHES * model.blocks


TIMED_FORWARD_BYTES, TIMED_BACKWARD_BYTES = 34, -93
"""Bytes a number of the clip's hidden states that an LTX-2.3 block moves more than diffusers', counted from both
sources under one recorder (6160 and 3640 tokens): it makes and reads nine scales, shifts and gates for each token, and
five between the streams, where diffusers has one of each for all, and rotates in 16 bits, not in fp32."""

TIMED_FORWARD_LAUNCHES, TIMED_BACKWARD_LAUNCHES = -18, -24
"""The operators of a block that it launches more: rotations in 16 bits take fewer."""


def time_of_each_token(run: Run) -> None:
    """Its LTX-2.3 is given the noise level for each token of the clip (simpletuner/helpers/models/ltxvideo2/model.py
    ``model_predict``: ``target_timesteps[:, None].expand``), and rotates in the dtype of the hidden states
    (ltxvideo2/transformer.py ``_rope_to_dtype``). What embeds the levels, once a step, is not counted."""
    model, grid, work = run.facts.model, run.grid, run.work
    if not model.trained_with("simpletuner", "time-per-token"):
        return
    width = model.config["num_attention_heads"] * model.config["attention_head_dim"]
    numbers = grid["B"] * grid["F"] * grid["H"] * grid["W"] * width * model.blocks
    work.forward_bytes += TIMED_FORWARD_BYTES * numbers
    work.backward_bytes += TIMED_BACKWARD_BYTES * numbers
    work.forward_launches += TIMED_FORWARD_LAUNCHES * model.blocks
    work.backward_launches += TIMED_BACKWARD_LAUNCHES * model.blocks


MASK_BYTES, MASK_LAUNCHES = 19, 5
"""Bytes a pair of tokens and operators a block that a mask over all pairs takes to be made in a Chroma block's forward,
and made numbers of for attention: the class's own, counted with two samples, which it masks everywhere."""


def one_sample_masked(run: Run) -> None:
    """Its Chroma masks the padding of one sample's prompt too, over all pairs of tokens
    (simpletuner/helpers/models/chroma/model.py ``model_predict``, chroma/transformer.py ``forward`` of both blocks)."""
    model, grid = run.facts.model, run.grid
    if not model.trained_with("simpletuner", "masks-one-sample") or grid["B"] > 1:
        return
    tokens = grid["F"] * grid["H"] * grid["W"] + grid["T"]
    run.work.attention_masked = True
    run.work.mask_bytes += HALF * model.config["num_attention_heads"] * tokens**2 * model.blocks
    run.work.forward_bytes += MASK_BYTES * tokens**2 * model.blocks
    run.work.forward_launches += MASK_LAUNCHES * model.blocks


def encoders_together(run: Run) -> None:
    """All text encoders and the VAE are loaded to the GPU before anything is encoded, and leave when everything is
    (simpletuner/helpers/training/trainer.py ``init_preprocessing_models``, ``init_unload_text_encoder`` and
    ``init_unload_vae``, helpers/models/common.py ``load_text_encoder``, at 6a43fd4)."""
    run.device.encoders_together = True


FEED_FORWARD_ADAPTER = re.compile(r"\.ff(_context)?\..*\.lora_")
"""Of diffusers' FLUX.1, whose training script adapts the double blocks' feed-forward too."""


OUTPUT_ADAPTER = re.compile(r"\.to_out\.lora_")
"""Of diffusers' HiDream, whose training script adapts what goes out of attention too."""


def attention_adapted(run: Run) -> None:
    """Adapters of FLUX.1 are on attention alone, where the recorded ones are on feed-forward too
    (simpletuner/helpers/models/flux/model.py ``get_lora_target_layers``, ``flux_lora_target`` "all"); those of HiDream
    on what goes into attention: it has no ``to_out.0`` (helpers/models/hidream/model.py DEFAULT_LORA_TARGET)."""
    if run.job.method != "lora" or run.job.lora_targets is not None:
        return
    without: tuple[tuple[TrainerTrait, re.Pattern[str]], ...] = (
        ("feed-forward-not-adapted", FEED_FORWARD_ADAPTER),
        ("attention-output-not-adapted", OUTPUT_ADAPTER),
    )
    patterns = [pattern for trait, pattern in without if run.facts.model.trained_with("simpletuner", trait)]
    for category in ("weight", "gradient", "optimizer"):
        for name, buffer in run.named(category).items():
            if any(pattern.search(name) for pattern in patterns):
                run.resize(buffer, 0)


QUANTISED_LAYER = re.compile(r"visual_transformer_blocks\.0\.self_attention\.to_query\.(base_layer\.)?weight")
"""The weight of a layer of Kandinsky 5.0 that is quantised where any is, and what belongs to it."""


def nothing_in_fp32(run: Run) -> None:
    """Its own Kandinsky 5.0 keeps no layers in fp32, and none of a quantised base in 16 bits
    (simpletuner/helpers/models/kandinsky5_video/transformer_kandinsky5.py has no ``_keep_in_fp32_modules``)."""
    model = run.facts.model
    if not model.trained_with("simpletuner", "nothing-in-fp32") or run.job.method != "lora":
        return
    table, weights = parameters(model.name), run.named("weight")
    layer = sum(run.sizes[buffer] for name, buffer in weights.items() if QUANTISED_LAYER.match(name))
    for name, buffer in weights.items():
        if name in table.fp32:
            numbers = table.elements(name, run.sizes[buffer])
            by_number = layer / model.config["model_dim"] ** 2 if name.endswith(".weight") else HALF
            run.resize(buffer, int(numbers * by_number))


FIRST: tuple[Transform, ...] = (undecayed_apart,)

TERMS: tuple[Transform, ...] = (
    nothing_in_fp32,
    attention_adapted,
    gradients_zeroed,
    shift,
    blocks_in_16_bits,
    real_rotation,
    time_of_each_token,
    one_sample_masked,
    encoders_together,
    cache_kept_while_sampling,
    last_encoder_in_model("simpletuner"),
    *UNDER_ENGINES,
)

QUANTISED_WHOLE = "quantised-whole"
"""The version of memory terms of a model that goes to the GPU in 16 bits to be quantised there."""


def quantised_whole(run: Run) -> None:
    """The model is moved to the GPU in 16 bits, whole, and quantised behind that, unless `quantize_via` is "cpu"
    (simpletuner/helpers/training/trainer.py ``init_precision``, at 6a43fd4: ``self.model.model.to(quantization_device,
    dtype=self.config.base_weight_dtype)``)."""
    passing(run, HALF * run.facts.model.parameters, "model in 16 bits")


TORCHAO_WHOLE = "torchao-quantised-whole"
"""The version of memory terms of a model that goes to the GPU in 16 bits and torchao rounds to 8-bit integers there."""

ROUNDING_BYTES = 9
"""Bytes a number of a layer that is rounded, beside it: its rounded numbers and those clipped, both in fp32, and the
8-bit ones (torchao prototype/quantized_training/int8.py ``quantize_int8_rowwise``, at 0.17.0)."""


def rounded_by_torchao(run: Run) -> None:
    """As `quantised_whole`, and beside the model the largest layer while it is rounded: its modulation is among the
    first (helpers/training/quantisation/__init__.py ``int8_weight_only_quantized_training``)."""
    rounded = [run.sizes[buffer] for name, buffer in run.named("weight").items() if name.endswith(".qdata")]
    passing(run, HALF * run.facts.model.parameters + ROUNDING_BYTES * max(rounded, default=0), "model in 16 bits")


QUANTO, QUANTO_WHOLE = "quanto", "quanto-quantised-whole"
"""The versions of memory terms of a model of which Quanto leaves layers in 16 bits: quantised in host RAM, and on the
GPU."""

LEFT_BY_QUANTO = re.compile(
    "norm|proj_out|pos_embed|patch_embedding|ffn|scale_shift_table|context_embedder|time_text_embed|time_proj|"
    "condition_embedder"
)
"""What Quanto leaves alone in the families of `QUANTO`, in diffusers' names too
(simpletuner/helpers/training/quantisation/__init__.py ``_quanto_model``, ``extra_quanto_args["exclude"]``)."""


def left_in_16_bits(run: Run) -> None:
    """Quanto leaves Wan's feed-forward and the modulation of SD 3 in 16 bits. In 8-bit integers, which are recorded
    with every linear layer quantised, a layer's numbers take twice their bytes; in float8 diffusers' casting, which is
    recorded, leaves the large ones alone but the feed-forward. What unpacks a layer for its product stays priced."""
    for name, buffer in run.named("weight").items():
        packed = name.endswith(".qdata") and LEFT_BY_QUANTO.search(name)
        if packed or (run.strategy.weights_dtype == "fp8" and ".ffn." in name and name not in run.named("gradient")):
            run.resize(buffer, HALF * run.sizes[buffer])


RAMTORCH = "ramtorch"
"""The version of memory terms of linear layers that wait in host RAM."""

RINGS = ("layers in turn, forward", "layers in turn, backward")
SLOTS = 2


def layers_in_turn(run: Run) -> None:
    """RamTorch: a linear layer's weight waits in pinned host RAM and comes for its forward, its recomputation and its
    backward, into two buffers that take turns, and two others for backward (simpletuner/helpers/ramtorch/modules/
    linear.py ``_get_device_state``: ``w_buffers``, ``w_bwd_buffers``)."""
    swapped = run.swapped_blocks
    if not run.strategy.swap_blocks or not swapped:
        return
    swap_in_place(run)  # its rings are these, not whole blocks
    last = max(swapped.values(), key=run.total_bytes)
    largest = sorted((run.sizes[buffer] for buffer in last), reverse=True)[:SLOTS]
    for ring in RINGS:
        run.add(run.load, sum(largest), "buckets", ring)
    run.host.swap_pins = "rounded"


FEED_FORWARD = re.compile(r"(\w+)\.(\d+)\.ffn?(_context)?\.net\.(?:0\.proj|2)\.weight$")


def inputs_kept(run: Run) -> None:
    """A RamTorch layer keeps its input for backward though its weight is not trained, where torch's own linear layer
    keeps none (``BouncingLinearFn.forward``: ``ctx.save_for_backward(x, weight_cpu, bias_cpu)``). Those of attention
    are kept for its adapters already; of the feed-forward there are two. With checkpoints they are one block's and are
    not added."""
    if run.job.method != "lora" or run.strategy.gradient_checkpointing != "none":
        return
    grid, table = run.grid, parameters(run.facts.model.name)
    clip, text = grid["B"] * grid["F"] * grid["H"] * grid["W"], grid["B"] * grid["T"]
    kept: dict[Block, int] = {}
    swapped = set(itertools.chain.from_iterable(run.swapped_blocks.values()))
    for name, buffer in run.named("weight").items():
        if buffer in swapped and (layer := FEED_FORWARD.match(name)):
            width = table.elements(name, run.sizes[buffer]) // table.rows_of(name, run.job.lora_rank)
            block = layer[1], int(layer[2])
            kept[block] = kept.get(block, 0) + HALF * width * (text if layer[3] else clip)
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        keep_by_block(run, stage, kept, "inputs of frozen layers")


RAMTORCH_ENCODERS = "ramtorch-encoders"
"""The version of memory terms of linear layers of the model and of its text encoders that wait in host RAM."""


def encoders_in_turn(run: Run) -> None:
    """Linear layers of a text encoder come to the GPU in turn, the next one early, and what else it has stays there
    (simpletuner/helpers/models/common.py ``load_text_encoder``, ``_apply_ramtorch_layers``;
    helpers/ramtorch_extensions.py ``add_ramtorch_prefetch_hooks``). Priced are all linear layers of a block together,
    which is more than two; with ``ramtorch_disable_extensions`` off the table of words waits in host RAM too."""
    run.device.encoders_by_layer = True


UNPADDED = "unpadded"
"""The version of LTX-2.3 with ``attention_mechanism`` flash-attn-varlen-hub."""

UNPADDED_FORWARD_BYTES, UNPADDED_BACKWARD_BYTES = 8, 20
"""Bytes a number of the prompts' hidden states that taking padding out moves: keys and values are gathered (4 each);
behind them zeros are made, and filled (10 each). Counted under the recorder that makes our tapes."""

UNPADDED_FORWARD_LAUNCHES, UNPADDED_BACKWARD_LAUNCHES = 16, 8
"""The operators of a block that it takes more, in the two of its six attentions that have a mask."""


def padding_taken_out(run: Run) -> None:
    """Both attentions to a prompt have a mask, though it masks nothing: learnt registers are in the padding's place
    (simpletuner/helpers/models/ltxvideo2/connectors.py ``LTX2ConnectorTransformer1d``, model.py ``model_predict``).
    Their lengths, and the places of what is no padding, are made anew in each, and the host waits for both (diffusers
    attention_dispatch.py ``_flash_varlen_attention_hub``, ``.item()`` and ``nonzero``). The other four have none."""
    model, grid, work = run.facts.model, run.grid, run.work
    work.attention_kernel = "flash"
    text = (
        grid["B"] * grid["T"] * sum(model.config[key] for key in ("cross_attention_dim", "audio_cross_attention_dim"))
    )
    work.forward_bytes += UNPADDED_FORWARD_BYTES * text * model.blocks
    work.backward_bytes += UNPADDED_BACKWARD_BYTES * text * model.blocks
    work.forward_launches += UNPADDED_FORWARD_LAUNCHES * model.blocks
    work.backward_launches += UNPADDED_BACKWARD_LAUNCHES * model.blocks


LOKR_BYPASSED, LYCORIS_LORA = "lokr-bypassed", "lycoris-lora"
"""Those with ``bypass_mode``; a LoRA's is the recorded one."""

BASES: dict[str, tuple[Transform, ...]] = {
    QUANTISED_WHOLE: (quantised_whole,),
    TORCHAO_WHOLE: (rounded_by_torchao,),
    QUANTO: (left_in_16_bits,),
    QUANTO_WHOLE: (left_in_16_bits, quantised_whole),
}
"""The versions of a quantised base."""

WHOLE: dict[str, tuple[Transform, ...]] = {
    version: (nothing_between, kept_for_more_layers(between_factors=False), whole_changes(each, lets_go=True))
    for version, each in CHANGES_IN_16_BITS.items()
}


def lycoris_in_half(run: Run) -> None:
    """LyCORIS' adapters are cast to the mixed precision's format over a quantised base too, where fp32 is recorded
    (helpers/training/trainer.py ``move_models``: ``_lycoris_wrapped_network.to(dtype=weight_dtype)``)."""
    if run.strategy.weights_dtype in QUANTISED and run.strategy.adapter_dtype == "fp32":
        adapters_in_half(run)
        _add_shift(run)


BYPASSED: dict[str, tuple[Transform, ...]] = {
    LOKR_BYPASSED: (lycoris_in_half, between_factors, kept_for_more_layers(between_factors=True)),
    LYCORIS_LORA: (
        lycoris_in_half,
        kept_for_more_layers(between_factors=False),
    ),
}


def with_base(base: str, adapters: str) -> str:
    """The version of both: of `BASES`, or empty; and of `BYPASSED`, or empty."""
    return "-".join(filter(None, (base, adapters)))


FUSED = "fused-projections"
"""The version of memory terms of a model whose projections are fused (``fuse_qkv_projections``)."""

PROJECTION = re.compile(r"\.(to|add)_[qkv](_proj)?\.(base_layer\.)?(weight|bias)(\.|$)")
"""What is fused: queries, keys and values of the image, and of the text."""


def projections_twice(run: Run) -> None:
    """Queries, keys and values are made by one layer more, which holds the numbers of all three; the three stay
    (simpletuner/helpers/models/krea2/transformer.py ``Krea2Attention.fuse_projections``, diffusers models/attention.py
    ``AttentionModuleMixin.fuse_projections``). Its model of Krea 2 by itself on a virtual GPU: 27.05 GiB of weights and
    23.94 without."""
    weights = run.named("weight").items()
    run.add(run.load, sum(run.sizes[buffer] for name, buffer in weights if PROJECTION.search(name)), "weight", FUSED)


BY_VERSION: dict[str, tuple[Transform, ...]] = {
    FUSED: (projections_twice,),
    FSDP_WHOLE: (whole_weights_listed,),
    UNPADDED: (padding_taken_out,),
    **BASES,
    RAMTORCH: (layers_in_turn, inputs_kept),
    RAMTORCH_ENCODERS: (layers_in_turn, inputs_kept, encoders_in_turn),
    **WHOLE,
    **BYPASSED,
    **{
        with_base(base, adapters): (*terms, *more)
        for base, terms in BASES.items()
        for adapters, more in BYPASSED.items()
    },
}
