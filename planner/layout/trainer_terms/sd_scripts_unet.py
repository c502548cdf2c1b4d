"""sd-scripts' LoRA of SDXL and SD 1.5, read at 48d368f: kohya's own U-Net and the text encoders that are trained too.

Held to rehearsals of its scripts (`profiles/rehearsals/published/sd_scripts.jsonl`).
"""

from __future__ import annotations

import re

from planner.catalog.profiles import TextEncoder
from planner.layout.run import Run, Transform

HALF, SINGLE = 2, 4


def checkpoints_reentrant(run: Run) -> None:
    """SDXL's blocks are checkpointed reentrantly (library/sdxl_original_unet.py ``USE_REENTRANT``): while a block's
    backward runs, its output, made again, and the gradient of that stay (torch/utils/checkpoint.py
    ``CheckpointFunction.backward``: ``outputs_with_grad``, ``args``). The largest are those of the first channels."""
    model, grid = run.facts.model, run.grid
    if run.strategy.gradient_checkpointing != "full" or not model.trained_with("sd-scripts", "reentrant-checkpoints"):
        return
    _, rows, columns = model.shape.patch
    positions = grid["B"] * grid["H"] * rows * grid["W"] * columns
    nbytes = HALF * positions * int(model.config["block_out_channels"][0])
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        kept = [run.new(nbytes, "activation", name) for name in ("checkpoint's output", "its gradient")]
        run.place(stage, kept, "reentrant checkpoint", at=0)
        run.free(stage, kept)


UNIT = re.compile(r"(.*\.(?:transformer_blocks|resnets)\.\d+)\.")
"""What is checkpointed at once, by the names of its weights."""


def base_in_fp8(run: Run) -> None:
    """``--fp8_base`` casts the whole U-Net, norms and biases as well (train_network.py ``unet.to(dtype=...)``), where
    16 bits are recorded. Autocast casts a weight for each product and caches only those that are trained
    (ATen/autocast_mode.cpp ``cached_cast``), so each product keeps the copy that its backward reads: those of one
    checkpointed block, or of all but those that read the text, which needs no gradient unless it is trained."""
    trained = run.named("gradient")
    frozen = {name: buffer for name, buffer in run.named("weight").items() if name not in trained}
    checkpointed = run.strategy.gradient_checkpointing == "full"
    untold = () if checkpointed or "@te" in run.trainer else (".attn2.to_k.", ".attn2.to_v.")
    units: dict[str, int] = {}
    for name, buffer in frozen.items():
        if any(part in name for part in untold):
            continue
        unit = match[1] if (match := UNIT.match(name)) else name
        units[unit] = units.get(unit, 0) + run.sizes[buffer]
    copies = max(units.values()) if checkpointed else sum(units.values())
    for buffer in frozen.values():
        run.resize(buffer, run.sizes[buffer] // HALF)
    _keep_beside(run, copies, "weights in 16 bits")


def text_encoders_trained(run: Run) -> None:
    """Adapters on every layer of the text encoders (networks/lora.py TEXT_ENCODER_TARGET_REPLACE_MODULE): their
    weights, gradients and states, and what autograd keeps of the encoders.

    With checkpointing that is each layer's input, and gradients of the embeddings, which are made to require them and
    whom no optimizer clears (train_network.py ``prepare_text_encoder_grad_ckpt_workaround``)."""
    encoders, rank = run.facts.model.text_encoders, run.job.lora_rank
    # Longer captions are encoded in chunks of 75 tokens, each between two marks (library/strategy_base.py).
    prompts = run.grid["B"] * -(-(run.grid["T"] - 2) // 75)
    each = SINGLE if run.strategy.adapter_dtype == "fp32" else HALF
    trained = each * rank * sum(_layer_elements(encoder) * _layers(encoder) for encoder in encoders)
    own = run.total_bytes(run.named("gradient").values())
    states = run.total_bytes(run.named("optimizer").values())
    run.add(run.load, trained, "weight", "adapters on text encoders")
    run.add(run.optimizer_first, states * trained // own, "optimizer", "states of the text encoders' adapters")
    gradient = run.new(trained, "gradient", "gradients of the text encoders' adapters")
    for stage in filter(None, (run.first_step, run.step)):
        run.place(stage, [gradient], "backward of the text encoders")
    for stage in (run.optimizer_first, run.optimizer):
        run.free(stage, [gradient])
    checkpointed = run.strategy.gradient_checkpointing == "full"
    if checkpointed:
        tables = sum(
            HALF * encoder.config["hidden_size"] * (encoder.config["vocab_size"] + encoder.max_tokens)
            for encoder in encoders
        )
        run.add(run.optimizer_first, tables, "gradient", "gradients of the embeddings", at=0)
    kept = sum(_kept_per_layer(encoder, checkpointed) * _used(encoder, run) for encoder in encoders)
    _keep_beside(run, prompts * kept, "kept of the text encoders")


def _layers(encoder: TextEncoder) -> int:
    return int(encoder.config["num_hidden_layers"])


def _used(encoder: TextEncoder, run: Run) -> int:
    """Layers through which the gradient goes: SDXL's CLIP-L gives what its last but one made (library/train_util.py
    ``get_hidden_states_sdxl``)."""
    pooled = encoder.class_name.endswith("Projection")
    return _layers(encoder) - (0 if pooled or len(run.facts.model.text_encoders) == 1 else 1)


def _layer_elements(encoder: TextEncoder) -> int:
    """Of a layer's adapters for each rank: queries, keys, values and output, and the two layers of its MLP."""
    width, inner = encoder.config["hidden_size"], encoder.config["intermediate_size"]
    return int(4 * (width + width) + 2 * (width + inner))


def _kept_per_layer(encoder: TextEncoder, checkpointed: bool) -> int:
    """Bytes that a CLIP layer keeps of one sample under autocast (transformers modeling_clip.py ``CLIPEncoderLayer``).

    Two norms' inputs in fp32; what the adapters of queries, keys, values and of the MLP read, each cast apart; queries,
    keys, values and the result of attention; what the activation reads and gives, and the sigmoid of ``quick_gelu``.
    """
    tokens, width, inner = encoder.max_tokens, encoder.config["hidden_size"], encoder.config["intermediate_size"]
    if checkpointed:
        return int(HALF * tokens * width)
    wide = 3 if encoder.config["hidden_act"] == "quick_gelu" else 2
    return int(tokens * (2 * SINGLE * width + (4 + 4) * HALF * width + wide * HALF * inner))


def _keep_beside(run: Run, nbytes: int, name: str) -> None:
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        kept = run.new(nbytes, "activation", name)
        run.place(stage, [kept], name, at=0)
        run.free(stage, [kept])


UNET: tuple[Transform, ...] = (checkpoints_reentrant,)

VERSIONS: dict[str, tuple[Transform, ...]] = {
    "unet": UNET,
    "unet@te": (*UNET, text_encoders_trained),
    "unet@fp8": (base_in_fp8, *UNET),
    "unet@te-fp8": (base_in_fp8, *UNET, text_encoders_trained),
}
"""What sd-scripts' terms are added to: for LoRA alone, with the text encoders, over a base in fp8."""
