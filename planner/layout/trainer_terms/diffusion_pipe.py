"""diffusion-pipe (tdrussell), read at 8f83dbf.

Latents and prompts are always cached, and its evaluation is a loss on held-out samples: it decodes nothing.
"""

from __future__ import annotations

from planner.layout.adapters import MORE_ADAPTERS
from planner.layout.encoders_vae.component_layout import alive_after, load_component, run_component
from planner.layout.encoders_vae.component_pass import BYTES_PER_PARAMETER, encoders
from planner.layout.phases import take_sizes
from planner.layout.run import STRATEGY_MOMENT, Run, Transform
from planner.layout.trainer_terms.attention_masks import masks_by_head
from planner.layout.trainer_terms.lora_layers import (
    HALF_ADAPTERS,
    adapters_in_half,
    adapters_on_blocks,
    wider_adapters,
)
from planner.layout.trainer_terms.lycoris.factors_in_turn import nothing_between
from planner.layout.trainer_terms.lycoris.whole_changes import (
    HALF,
    KRONECKER,
    KRONECKER_IN_16_BITS,
    LOKR,
    whole_changes,
)
from planner.layout.trainer_terms.shared import (
    checkpoints_saved_on_cpu,
    from_pretrained,
    last_encoder_in_model,
    modulation_in_8_bits,
    swap_in_place,
    swapped_to_pinned_memory,
)
from planner.layout.trainer_terms.trained_text_encoders import (
    adapters_on_text_encoders,
    keep_of_conditioner,
    text_encoders_whole,
)
from planner.tape.program import Moment, frees
from planner.tape.variants.precision import trained_storage


def kahan_buffer(run: Run) -> None:
    """Its AdamW for 16-bit weights keeps what rounding withheld from each: a third state, in the weights' own format
    (optimi ``AdamW``, `kahan_sum` of low precision; optimizers/adamw_8bit.py ``AdamW8bitKahan``)."""
    strategy = run.strategy
    half = HALF_ADAPTERS in run.trainer or trained_storage(run.job, strategy) == "half"
    if strategy.optimizer not in ("adamw", "adamw-8bit") or not half:
        return
    if strategy.offload_optimizer != "none":
        return
    trained = run.total_bytes(run.named("gradient").values())
    trained //= 2 if HALF_ADAPTERS in run.trainer else 1  # which are made smaller behind this
    trained += sum(run.sizes[buffer] for buffer, op in enumerate(run.program.op) if op == MORE_ADAPTERS)
    run.place(run.optimizer_first, [run.new(trained, "optimizer", "Kahan buffer")], "Kahan buffer", at=0)


def checkpoints_in_pinned_memory(run: Run) -> None:
    """``x.to('cpu', non_blocking=True)`` (utils/unsloth_utils.py), which torch pins."""
    run.host.checkpoints_pin = "rounded"


LLAMA_IN_4_BITS = "llama-4bit"
"""The version of memory terms with ``llama3_4bit``."""


def last_encoder_stays(run: Run) -> None:
    """HiDream's Llama encodes the captions of every batch, as its states of all layers would fill a disk, and lies
    beside the model (models/hidream.py ``LlamaLayer``, first of ``to_layers``; docs/supported_models.md). In 4 bits,
    its embedding and last layer stay in 16 (transformers ``BitsAndBytesConfig`` skips ``lm_head``). What it takes while
    it encodes is gone before the first block, and not added."""
    if not run.facts.model.trained_with("diffusion-pipe", "last-encoder-stays"):
        return
    encoder = run.facts.model.text_encoders[-1]
    outside = encoder.config["vocab_size"] * encoder.config["hidden_size"]
    outside *= 1 if encoder.config["tie_word_embeddings"] else 2
    layers = BYTES_PER_PARAMETER["nf4" if LLAMA_IN_4_BITS in run.trainer else "bf16"]
    nbytes = BYTES_PER_PARAMETER["bf16"] * outside + layers * (encoder.parameters - outside)
    run.add(run.load, int(nbytes), "residents", encoder.name)


def loaded_on_the_cpu(run: Run) -> None:
    """The model is loaded and cast on the CPU, in 8 bits too, before DeepSpeed moves it (models/*.py
    ``load_diffusion_model``: ``p.data.to(self.model_config['transformer_dtype'])``)."""
    weights = run.strategy.weights(run.job.method)
    if weights == "fp8":
        run.host.loaded_bytes = BYTES_PER_PARAMETER[weights]
    else:
        from_pretrained(run, weights)


def text_encoder_read(run: Run) -> None:
    """Wan's text encoder is read from a ``.pth`` before latents and prompts are cached (models/wan/t5.py
    ``T5EncoderModel``: ``torch.load`` without ``mmap``), and gone before the model is loaded (utils/dataset.py
    ``cache``: ``to("meta")``). One that ``llm_path`` names as safetensors is mapped, which is not told."""
    run.host.encoders_read = run.facts.model.trained_with("diffusion-pipe", "text-encoder-read")


def encoders_before_the_model(run: Run) -> None:
    """Latents and prompts are cached by the process that trains, the VAE on the GPU and then one text encoder after
    another, and the allocator's cache is emptied only once the model is there (utils/dataset.py ``_cache_fn``,
    ``_handle_task``; train.py before its loop). So text encoders and the model come to lie in segments that what went
    before them left."""
    if run.strategy.text_encoder != "cached":
        return
    first = len(run.program.buffers)
    turns: list[tuple[Moment, list[int]]] = []
    for component in sorted(encoders(run, "cached", 1), key=lambda each: each.name != run.facts.model.vae.folder):
        loading, blocks = load_component(run.program, component)
        done = run_component(run.program, component, blocks)
        gone = [*alive_after(done), *alive_after(loading)]
        turns += [*loading.stretches, *done.stretches, (STRATEGY_MOMENT, frees(gone))]
    take_sizes(run, first)
    run.load.stretches = [*turns, *run.load.stretches]
    run.empty_cache.after_load = True


def encoders_trained(run: Run) -> None:
    """SDXL's text encoders are layers of what is trained: adapters on every linear layer of theirs, or all of them
    (models/sdxl.py ``InitialLayer``, ``configure_adapter``)."""
    if run.facts.model.trained_with("diffusion-pipe", "text-encoders-trained"):
        term = adapters_on_text_encoders if run.job.method == "lora" else text_encoders_whole
        term(run)


def conditioner_kept(run: Run) -> None:
    """What goes into Anima's first layer is made to require gradients, which pass through the conditioner, and that is
    no layer of those that are checkpointed (models/cosmos_predict2.py ``InitialLayer``, ``LLMAdapterLayer``,
    ``checkpointable_layers``)."""
    keep_of_conditioner("diffusion-pipe", run)


TERMS: tuple[Transform, ...] = (
    *(
        loaded_on_the_cpu,
        text_encoder_read,
        encoders_before_the_model,
        last_encoder_stays,
        modulation_in_8_bits("diffusion-pipe"),
        wider_adapters,
        adapters_on_blocks,
        swap_in_place,
        checkpoints_saved_on_cpu,
        kahan_buffer,
    ),
    *(swapped_to_pinned_memory, checkpoints_in_pinned_memory),
    *(
        encoders_trained,
        masks_by_head("diffusion-pipe"),
        last_encoder_in_model("diffusion-pipe"),
        conditioner_kept,
    ),
)
"""``swap_in_place``: utils/offloading.py. Checkpoints: ``activation_checkpointing = 'unsloth'`` copies what is larger
than 5 million numbers."""

LOKR_IN_FP32 = f"{LOKR}-fp32"
"""The version with ``adapter.type`` lokr in fp32."""

LOKRS: dict[str, tuple[Transform, ...]] = {
    LOKR: (nothing_between, whole_changes(KRONECKER_IN_16_BITS._replace(forward_bytes=HALF), lets_go=True)),
    LOKR_IN_FP32: (nothing_between, whole_changes(KRONECKER, lets_go=True)),
}
"""peft's forward holds the product until it was multiplied (tuners/lokr/layer.py ``_get_delta_activations``)."""

BY_VERSION: dict[str, tuple[Transform, ...]] = {
    HALF_ADAPTERS: (adapters_in_half,),
    LLAMA_IN_4_BITS: (),
    f"{HALF_ADAPTERS}-{LLAMA_IN_4_BITS}": (adapters_in_half,),
    **LOKRS,
    f"{HALF_ADAPTERS}-{LOKR}": (adapters_in_half, *LOKRS[LOKR]),
}
"""Not older: what no field of a plan says."""
