"""ltx-trainer, read at 400fd31 (packages/ltx-trainer/src/ltx_trainer/trainer.py): a step over cached clips and prompts.

Its own model is recorded (`planner.tape.variants.trainer_models.OWN_CODE`); what stands here is around it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from planner.catalog.profiles import ModelProfile
from planner.layout.recordings import parameters
from planner.layout.run import Run, Transform
from planner.layout.trainer_terms.lora_layers import keep_by_block
from planner.layout.trainer_terms.shared import prompts_cached_apart
from planner.spec.job import QUANTISED
from planner.tape.program import Stage, frees

HALF, FP32 = 2, 4
KEPT = 2_007_367
"""Bytes that the connectors of 2.3 and 2.5 keep of a prompt's token for backward: 490.08 MiB of 256, 3920.56 MiB of
2048, by torch's allocator on a virtual GPU. They are not checkpointed, and autocast is not around them."""

NARROW, WIDE = 12, 2
"""Tensors that a layer of the connectors keeps, of its width and of its feed-forward's."""

FEED_FORWARD = 4
"""How much wider than a stream its feed-forward is inside."""

VIDEO_ALONE = "video"
"""The version of a step without sound."""


def connectors(run: Run) -> None:
    """The layers that turn Gemma's states into prompts stay on the GPU in bf16 and run in every step, but for their
    projections (``_load_models``). They are loaded like the transformer and never frozen: a step keeps what their
    backward needs, the first backward makes their gradients, and as no optimizer has them, nothing frees those. The
    sound's have none where no sound is trained."""
    streams = {stream: connector_layers(run.facts.model, stream) for stream in ("video", "audio")}
    layers = [layer for stream in streams.values() for layer in stream]
    weights = [run.new(HALF * size, "residents", "text connectors") for layer in layers for size in layer]
    run.place(run.load, weights, "text connectors", at=0)
    if run.samples_only:
        return
    sound = not run.trainer.endswith(f"@{VIDEO_ALONE}")
    with_gradient = [sound or stream == "video" for stream, own in streams.items() for _ in own]
    run.first_step = run.first_step or Stage(run.step.name, list(run.step.stretches))
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        kept = _kept_by_layer(run, layers)
        run.place(stage, [piece for layer in kept for piece in layer], "text connectors", at=0)
        backward: list[int] = []
        for layer, inputs, has_gradient in reversed(list(zip(layers, kept, with_gradient, strict=True))):
            backward += frees(inputs)
            if stage is run.first_step and has_gradient:
                name = "gradients of the text connectors"
                backward += [run.new(HALF * size, "residents", name) for size in layer]
        run.place(stage, backward, "text connectors")


def _kept_by_layer(run: Run, layers: Sequence[Sequence[int]]) -> list[list[int]]:
    """What each layer of the connectors keeps for backward: tensors as wide as its stream, two as wide as its
    feed-forward is inside, and what is left of `KEPT`, which is of no width."""
    tokens, name = run.grid["B"] * run.grid["T"], "inputs of the text connectors"
    widths = [math.isqrt(max(layer) // FEED_FORWARD) for layer in layers]
    rest = KEPT // len(layers) - HALF * (NARROW + FEED_FORWARD * WIDE) * sum(widths) // len(widths)
    return [
        [
            run.new(nbytes * tokens, "activation", name)
            for nbytes in (*[HALF * width] * NARROW, *[HALF * FEED_FORWARD * width] * WIDE, rest)
        ]
        for width in widths
    ]


def connector_layers(model: ModelProfile, stream: str) -> list[list[int]]:
    """Numbers in the tensors of each layer of the connector of ``video`` or ``audio``: gated attention over the prompt
    and a feed-forward, the smaller ones together; the first layer with the learnt registers (ltx-core
    text_encoders/gemma/embeddings_connector.py)."""
    config = model.text_encoders[-1].config
    heads, layers, registers = (
        int(config[f"{stream}_connector_{name}"])
        for name in ("num_attention_heads", "num_layers", "num_learnable_registers")
    )
    width = heads * int(config[f"{stream}_connector_attention_head_dim"])
    small = 11 * width + (width + 1) * heads  # biases, both norms, and the layer of the gates
    layer = [width * width] * 4 + [FEED_FORWARD * width * width] * 2
    return [[*layer, small + registers * width], *([*layer, small] for _ in range(layers - 1))]


def rounded_by_quanto(run: Run) -> None:
    """Quanto keeps a layer's weight in 8 bits, with a scale for each row in bf16, and unpacks it for one product: the
    step is that over a base in 16 bits, which is recorded. But its layers keep their input for backward, as it is
    before autocast casts it, though their weight is not trained (optimum-quanto 0.2.7 tensor/weights/qbytes.py
    ``WeightQBytesLinearFunction``: ``ctx.save_for_backward(input, other)``)."""
    if run.strategy.weights_dtype not in QUANTISED:
        return
    table, rounded = parameters(run.facts.model.name), 0
    for name, buffer in run.named("weight").items():
        if ROUNDED.search(name):
            run.resize(buffer, table.elements(name, run.sizes[buffer]))
            rounded += table.rows_of(name, run.job.lora_rank)
    run.add(run.load, HALF * rounded, "weight", "scales of rounded rows")
    checkpointed = run.strategy.gradient_checkpointing != "none"
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        blocks = {(moment.module_list, moment.block) for moment, _ in stage.stretches if moment.block >= 0}
        keep_by_block(
            run, stage, dict.fromkeys(blocks, _inputs_of_a_block(run)), "inputs of frozen layers", checkpointed
        )


ROUNDED = re.compile(r"^(?!(audio_)?proj_(in|out)\.)(?!.*norm)(?!.*\.lora_).*\.weight$")
"""What is rounded, by diffusers' names: linear layers but those by which clips and sound come in and go out
(src/ltx_trainer/quantization.py ``SKIP_ROOT_MODULES``)."""


def _inputs_of_a_block(run: Run) -> int:
    """Bytes of the inputs of a block's layers, each once. Norms give fp32 under autocast: what goes into a stream's
    attentions, between the streams too, and its feed-forward. 16 bits: what comes out of attention, the inner width of
    the feed-forward, four times the stream's, and the prompt."""
    config, grid, sound = run.facts.model.config, run.grid, not run.trainer.endswith(f"@{VIDEO_ALONE}")
    video: int = config["num_attention_heads"] * config["attention_head_dim"]
    audio: int = config["audio_num_attention_heads"] * config["audio_attention_head_dim"]
    between = FP32 * 2 if sound else 0  # as queries, and as keys and values of the other stream
    token = (FP32 * 3 + HALF * 2 + HALF * 4) + between
    tokens, text = grid["B"] * grid["F"] * grid["H"] * grid["W"], grid["B"] * grid["T"]
    kept = (token * video + (HALF * audio if sound else 0)) * tokens + HALF * video * text
    return kept + ((token + HALF) * grid["B"] * grid["E"] + HALF * text) * audio if sound else kept


TERMS: tuple[Transform, ...] = (prompts_cached_apart, connectors, rounded_by_quanto)
BY_VERSION: dict[str, tuple[Transform, ...]] = {VIDEO_ALONE: ()}
