"""ai-toolkit (ostris), read at 27a03a9: one YAML file, `python run.py FILE`.

It keeps the text encoder on the GPU unless its embeddings are cached or it is unloaded, and samples with the model it
trains. Its adapters are fp32 (jobs/process/BaseSDTrainProcess.py ``network.force_to(..., dtype=torch.float32)``).
"""

from __future__ import annotations

import itertools

from planner.layout.encoders_vae.component_layout import alive_after, load_component
from planner.layout.encoders_vae.component_pass import BYTES_PER_PARAMETER, encoders
from planner.layout.phases import take_sizes
from planner.layout.run import STRATEGY_MOMENT, Run, Transform
from planner.layout.trainer_terms.attention_masks import masks_by_head
from planner.layout.trainer_terms.lora_layers import (
    WITHOUT_EXPERTS,
    adapters_on_blocks,
    experts_not_adapted,
    wider_adapters,
)
from planner.layout.trainer_terms.shared import (
    cache_emptied,
    cache_kept_while_sampling,
    encoder_in_model,
    from_pretrained,
    last_encoder_in_model,
    layers_of_encoders_offloaded,
    modulation_in_8_bits,
    passing,
    swap_in_place,
)
from planner.spec.job import QUANTISED
from planner.tape.program import Moment, Stage, frees

HALF = 2
MATRIX_BYTES = 64 << 20
"""About a text encoder's matrix in 16 bits (of T5-XXL 32 and 80 MiB): the allocator gives back none of a segment that
something else has come to lie in, so what comes and goes has segments of its size."""
SLOTS = 4
"""Layers that are fetched ahead (toolkit/memory_management/manager_modules.py ``PIPELINE_DEPTH``)."""


def encoders_as_quantised(run: Run) -> None:
    """It never quantises CLIP, whose configs alone have a projection (toolkit/stable_diffusion_model.py and
    extensions_built_in/diffusion_models: ``quantize`` of T5, UMT5 and language models); what takes the model's
    ``qtype`` has its bits. LTX-2's connectors stay in 16 bits, wherever they lie (diffusion_models/ltx2/ltx2.py)."""
    in_model = encoder_in_model(run, "ai-toolkit")
    run.device.encoders_in_16_bits = tuple(
        encoder.name
        for encoder in run.facts.model.text_encoders
        if "projection_dim" in encoder.config or encoder is in_model
    )
    qtype = UINTX.keys() & set(run.trainer.partition("@")[2].split("-"))
    if qtype and run.facts.model.trained_with("ai-toolkit", "text-encoder-by-qtype"):
        run.device.encoder_bits = UINTX[qtype.pop()] + GROUP_BITS


def encoder_head_untied(run: Run) -> None:
    """Qwen3 is loaded with its head, which optimum-quanto quantises as a layer of its own, beside the table of words
    that it was (27a03a9 extensions_built_in/diffusion_models/flux2/flux2_klein_model.py and z_image/z_image.py
    ``Qwen3ForCausalLM``). Seen in a rehearsal of FLUX.2 klein 4B: 6.33 GiB while it encodes, 0.36 and 1.45 of them."""
    run.device.encoder_head_untied = run.facts.model.trained_with("ai-toolkit", "encoder-head-untied")


FIRST: tuple[Transform, ...] = (encoders_as_quantised, encoder_head_untied)


def loaded_on_the_cpu(run: Run) -> None:
    """The model is loaded in 16 bits, and quantised behind that, a block at a time on the GPU (toolkit/util/quantize.py
    ``quantize_model``)."""
    weights = run.strategy.weights(run.job.method)
    from_pretrained(run, "bf16" if weights in QUANTISED else weights)


def moved_for_latents(run: Run) -> None:
    """While latents are cached all but the VAE is moved to the CPU, where it came from the GPU (27a03a9
    toolkit/stable_diffusion_model.py ``set_device_state_preset``, toolkit/dataloader_mixins.py ``cache_latents``)."""
    run.host.waits_for_latents = run.strategy.vae == "cached"


def moved_whole(run: Run) -> None:
    """FLUX.1 Kontext goes to the GPU whole before it is quantised, whatever `low_vram` says
    (extensions_built_in/diffusion_models/flux_kontext/flux_kontext.py ``transformer.to(self.quantize_device)``)."""
    if run.facts.model.trained_with("ai-toolkit", "moved-whole"):
        quantised_whole(run)


def quantised_whole(run: Run) -> None:
    """Without `low_vram` Wan and FLUX.1 are moved to the GPU in 16 bits, whole, and quantised behind that
    (toolkit/models/wan21/wan21.py ``load_wan_transformer``: ``transformer.to(self.device_torch)``, then
    ``quantize_model``; toolkit/stable_diffusion_model.py ``if not self.low_vram``). Of Wan 2.2's two experts the second
    comes beside the first, which is quantised by then (diffusion_models/wan22/wan22_14b_model.py)."""
    if run.strategy.weights_dtype not in QUANTISED:
        return
    nbytes = HALF * run.facts.model.parameters
    if run.job.experts is not None and run.strategy.inactive_expert == "gpu":
        nbytes += int(BYTES_PER_PARAMETER[run.strategy.weights_dtype] * run.facts.model.parameters)
    passing(run, nbytes, "model in 16 bits")


def average_as_trained(run: Run) -> None:
    """The average is a clone of what is trained, in its format (toolkit/ema.py ``shadow_params``)."""
    for buffer, name in enumerate(run.program.op):
        if name == "ema":
            run.resize(buffer, run.trained_bytes)


def encoders_at_start(run: Run) -> None:
    """Text encoders stand on the GPU beside the model when loading ends, those too that are unloaded once their
    embeddings are cached (``load_model`` of every model: ``text_encoder.to(self.device_torch)``; BaseSDTrainProcess.py
    ``unet.to(self.device_torch)``; SDTrainer.py ``unload_text_encoder`` in ``hook_before_train_loop``). One that is
    quantised lies there in 16 bits first, beside FLUX.1 and before any other model comes back from host RAM. With
    `layer_offloading` their layers stay in host RAM."""
    strategy, model = run.strategy, run.facts.model
    if strategy.swap_blocks:
        return
    behind = 1 + max(at for at, (moment, _) in enumerate(run.load.stretches) if moment.piece == "load")
    if strategy.text_encoder_dtype in QUANTISED:
        parts = [part for part in encoders(run, strategy.text_encoder, 1) if part.is_quantised]
        nbytes = HALF * sum(part.parameters for part in parts)
        if model.trained_with("ai-toolkit", "text-encoder-quantised-beside"):
            there = sum(part.weight_bytes for part in parts) if strategy.text_encoder == "resident" else 0
            whole, rest = divmod(nbytes - there, MATRIX_BYTES)
            sizes = [size for size in (*[MATRIX_BYTES] * whole, rest) if size]
            matrices = [run.new(size, "residents", "text encoder in 16 bits") for size in sizes]
            gone = frees(matrices)
            run.place(run.load, [*matrices, *gone], "quantising the text encoder", at=behind)
        else:
            passing(run, nbytes, "text encoder in 16 bits")
    if strategy.text_encoder != "cached":
        return
    first, gone = len(run.program.buffers), []
    coming: list[tuple[Moment, list[int]]] = []
    in_model = encoder_in_model(run, "ai-toolkit")
    others = {model.vae.folder, in_model.folder if in_model else ""}
    for component in encoders(run, "cached", 1):
        if component.name not in others:
            loading, _ = load_component(run.program, component)
            coming += loading.stretches
            gone += alive_after(loading)
    take_sizes(run, first)
    run.load.stretches += coming
    run.phases.unload = Stage("encoders leave", [(STRATEGY_MOMENT._replace(passes="encoders leaving"), frees(gone))])
    run.empty_cache.after = (*run.empty_cache.after, run.phases.unload)


def layers_in_turn(run: Run) -> None:
    """`layer_offloading`: linear layers wait in pinned host RAM, and each comes for its forward, its recomputation and
    its backward, four fetched ahead in two rings, in the format it is multiplied in; a quantised one is there in both
    formats for a moment (toolkit/memory_management/manager_modules.py ``_BouncingLinearFn``). ``pin_memory`` rounds
    each up to a power of two."""
    swapped = [buffer for buffers in run.swapped_blocks.values() for buffer in buffers] if _swaps(run) else []
    if not swapped:
        return
    stored = BYTES_PER_PARAMETER[run.strategy.weights("lora")]
    last = max(run.swapped_blocks.values(), key=run.total_bytes)
    largest = sorted((run.sizes[buffer] for buffer in last), reverse=True)[:SLOTS]
    for name in ("layers ahead in forward", "layers ahead in backward"):
        run.add(run.load, int(sum(largest) * HALF / stored), "buckets", name)
    if run.strategy.weights_dtype in QUANTISED:
        run.add(run.load, largest[0], "buckets", "layer before it is turned into numbers")
    run.host.swap_pins = "rounded"


def _swaps(run: Run) -> bool:
    return run.strategy.swap_blocks > 0


TERMS: tuple[Transform, ...] = (
    *(
        loaded_on_the_cpu,
        moved_for_latents,
        modulation_in_8_bits("ai-toolkit"),
        wider_adapters,
        adapters_on_blocks,
        moved_whole,
    ),
    *(average_as_trained, encoders_at_start, layers_of_encoders_offloaded, masks_by_head("ai-toolkit")),
    *(swap_in_place, layers_in_turn, cache_emptied, cache_kept_while_sampling, last_encoder_in_model("ai-toolkit")),
)
"""``swap_in_place``: its rings are those of ``layers_in_turn``. ``cache_emptied``: ``flush`` behind every step of
loading (toolkit/basic.py at 0657f36)."""

QUANTISED_WHOLE = "quantised-whole"
"""The version of memory terms of a model that goes to the GPU in 16 bits to be quantised there."""

UINTX = {f"uint{bits}": bits for bits in range(2, 8)}
"""``qtype`` -> bits of a number (toolkit/util/uintx_quant.py ``UINTX_QTYPES``)."""

GROUP_BITS = (16 + 8) / 64
"""Of each number: a scale in 16 bits and a zero point of 8 for 64 numbers."""

SMALLEST_MATRIX = 1 << 16
"""Bytes: biases and norms' vectors are smaller, and stay in 16 bits."""


def uintx(bits: int) -> Transform:
    """The term of a base in so many bits (toolkit/util/uintx_quant.py ``UIntXQuantizer``), which is laid out as one of
    8. ``F.linear`` is given a layer's weights in 16 bits, and autograd keeps them until its backward, as those are kept
    that diffusers' layerwise casting makes of 8 bits in the recording."""

    def term(run: Run) -> None:
        """Matrices take so many bits a number."""
        for buffer in run.named("weight").values():
            if run.sizes[buffer] >= SMALLEST_MATRIX:
                run.resize(buffer, int(run.sizes[buffer] * (bits + GROUP_BITS) / 8))

    return term


VERSIONS: dict[str, Transform] = {
    QUANTISED_WHOLE: quantised_whole,
    **{qtype: uintx(bits) for qtype, bits in UINTX.items()},
    WITHOUT_EXPERTS: experts_not_adapted,
}
"""quantised-whole: without `low_vram`; files that are written have it. without-experts: where
``network_kwargs.ignore_if_contains`` names experts (toolkit/lora_special.py)."""

BY_VERSION: dict[str, tuple[Transform, ...]] = {
    "-".join(names): tuple(VERSIONS[name] for name in names)
    for count in range(1, 4)
    for names in itertools.combinations(VERSIONS, count)
    if len(UINTX.keys() & set(names)) <= 1
}
"""`VERSIONS` that apply together, in their order."""
