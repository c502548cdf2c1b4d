"""The phases around training: encoding prompts and clips, denoising and decoding in validation, saving.

Each is laid out from recordings, like the step. What is cached before training is encoded first and leaves nothing
behind, so it is replayed separately, once for all strategies. What stays on the GPU or comes back shares the step's
allocator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from planner.catalog.components import samples_per_call
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import grid
from planner.garbage_collection import recording_cache
from planner.layout.cublas import kept_workspaces, workspace_bytes
from planner.layout.encoders_vae.component_layout import alive_after, load_component, run_component
from planner.layout.encoders_vae.component_pass import (
    BYTES_PER_PARAMETER,
    ComponentPass,
    components_host_bytes,
    decoder,
    encoders,
)
from planner.layout.encoders_vae.encoding_memory import component_levels, encoding_memory, lay_out_encoding
from planner.layout.group_offload import offload_model_groups
from planner.layout.run import STRATEGY_MOMENT, Run
from planner.layout.run_records import EncodingOnly
from planner.spec.job import QUANTISED, Bucket, Job
from planner.tape.format import Tape
from planner.tape.levels import Level, PartLevels
from planner.tape.program import Moment, Part, Stage, frees
from planner.tape.variants.precision import trained_storage
from planner.units import GIB

RGB = 3

# ---- encoding before training


BESIDE_WHOLE_BYTES = 2 * GIB
"""Room for a prompt's activations, without which a text encoder comes layer by layer: by our recordings, those that
have such layers take at most 1.7 GiB beside their weights (LTX-2's Gemma)."""


class Encoding(NamedTuple):
    """Components that are encoded together before training. Their memory is freed before the model is loaded."""

    components: tuple[ComponentPass, ...]
    workspace_bytes: int
    """of one of cuBLAS's workspaces"""
    workspaces: int
    """so many of them stay"""
    only: EncodingOnly
    split_bytes: int
    """the most that a VAE's convolution takes more in parts than whole"""


def encodings(run: Run, may_wait: bool = False) -> list[Encoding]:
    """What is encoded before training, and the memory that it takes.

    One sample at a time and each encoder alone, or all together if a trainer holds them so (`DeviceTerms`). A text
    encoder that is larger than the card is brought in layer by layer; if a separate command caches prompts, it is left
    out. ``may_wait``: only those encodings of which a part may wait in host RAM, which excludes the VAE. Empty on
    Apple's GPUs: what MPS takes to encode is not known.
    """
    if run.facts.gpu.backend == "mps":
        return []
    components = encoders(run, "cached", 1)
    if run.samples_only:  # the prompts of a batch go through each encoder together, whether it then waits or is gone
        components = [entry for place in ("cached", "swapped") for entry in encoders(run, place, batch_samples(run))]
    groups = _on_the_gpu_together(run, components)
    if may_wait:
        groups = [group for group in groups if any(each.piece_of_layers or each.offload != "none" for each in group)]
    found = []
    for group in filter(None, groups):
        largest = max(group, key=lambda each: each.weight_bytes)
        beside = sum(each.weight_bytes for each in group) - largest.weight_bytes
        larger = _is_larger_than_the_card(run, largest, beside)
        if larger and run.device.prompts_cached_apart:
            continue
        layers = larger and not run.device.encoders_whole
        if layers:
            group = tuple(each._replace(offload="layers") if each is largest else each for each in group)
        workspaces = workspace_bytes(run.facts.gpu), kept_workspaces(run.facts.gpu, run.machine.torch)
        memory = encoding_memory(group, *workspaces)
        by_layer = largest.name.partition("-")[0] if layers else ""
        only = EncodingOnly(memory.peak_bytes, memory.waiting_bytes, by_layer)
        found.append(Encoding(group, *workspaces, only, memory.split_bytes))
    return found


def decoding_alone(run: Run) -> list[Encoding]:
    """The VAE decoding a validation sample with nothing beside it. No run with such samples takes less. Empty if no
    samples are made."""
    if run.strategy.validation_mode == "off" or run.facts.gpu.backend == "mps":
        return []
    group = (decoder(run, validation_grid(run.job, run.facts.model), 1),)
    workspaces = workspace_bytes(run.facts.gpu), kept_workspaces(run.facts.gpu, run.machine.torch)
    memory = encoding_memory(group, *workspaces)
    only = EncodingOnly(memory.peak_bytes, memory.waiting_bytes, "")
    return [Encoding(group, *workspaces, only, memory.split_bytes)]


def _is_larger_than_the_card(run: Run, component: ComponentPass, beside: int = 0) -> bool:
    """Whether a text encoder as a whole does not fit on the card, ``beside`` bytes of others."""
    gpu = run.facts.gpu
    room = gpu.allocatable_bytes - run.machine.reserve - gpu.context_bytes
    return component.piece_of_layers and component.weight_bytes + beside + BESIDE_WHOLE_BYTES > room


def encoders_left_out(run: Run) -> list[str]:
    """Names of the text encoders that are larger than the card and that a separate command runs."""
    cached = encoders(run, "cached", 1) if run.device.prompts_cached_apart else []
    return [component.name for component in cached if _is_larger_than_the_card(run, component)]


def _on_the_gpu_together(run: Run, components: list[ComponentPass]) -> list[tuple[ComponentPass, ...]]:
    if run.device.encoders_together:
        return [tuple(components)]
    if not run.device.text_encoders_together:
        return [(component,) for component in components]
    vae = run.facts.model.vae.folder
    return [
        tuple(component for component in components if component.name != vae),
        *((component,) for component in components if component.name == vae),
    ]


def encoding_runs(run: Run) -> list[Run]:
    """What is encoded before training, laid out as runs of their own for the replay."""
    runs = []
    for encoding in encodings(run):
        layout = lay_out_encoding(encoding.components, encoding.workspace_bytes, encoding.workspaces)
        alone = Run(run.configuration, run.facts, program=layout.program, sizes=layout.sizes)
        alone.phases.encode = layout.stage
        alone.encoding_only = encoding.only
        alone.device.split_bytes = {"encode": encoding.split_bytes}
        runs.append(alone)
    return runs


def encoding_host_bytes(run: Run) -> int:
    """The most host RAM, in bytes, that a text encoder takes while it encodes before the model is loaded."""
    waiting = max((encoding.only.waiting_bytes for encoding in encodings(run, may_wait=True)), default=0)
    reads = run.host.encoders_read and run.strategy.text_encoder == "cached"
    return max(waiting, encoders_bytes(run)) if reads else waiting


def waiting_encoders_bytes(run: Run) -> int:
    """Host RAM, bytes, of the text encoders that come back from the GPU once their outputs are cached."""
    return encoders_bytes(run) if run.host.encoders_wait and run.strategy.text_encoder == "cached" else 0


def staying_parts_bytes(run: Run) -> int:
    """Host RAM, bytes, of the text encoders and the VAE that come back from the GPU and are kept to the end."""
    return sum(part.weight_bytes for part in encoders(run, "cached", 1)) if run.host.cached_parts_stay else 0


def loaded_encoders_bytes(run: Run) -> int:
    """Host RAM, bytes, of text encoders and the VAE while the model is loaded."""
    how = run.host.encoders_loaded
    if how == "fp32":
        return components_in_fp32(run)
    return 0 if how == "mapped" else encoders_bytes(run) if how == "read" else components_host_bytes(run)


def components_in_fp32(run: Run) -> int:
    """The weights of the text encoders and the VAE in fp32, bytes."""
    model = run.facts.model
    counts = (encoder.parameters for encoder in model.text_encoders)
    return int(BYTES_PER_PARAMETER["fp32"] * (sum(counts) + model.vae.parameters))


def encoders_bytes(run: Run) -> int:
    """The weights of the text encoders, bytes."""
    vae, components = run.facts.model.vae.folder, encoders(run, run.strategy.text_encoder, 1)
    return sum(component.weight_bytes for component in components if component.name != vae)


# ---- on the step's allocator


def residents(run: Run) -> None:
    """Text encoders and VAE that stay on the GPU, or come for each batch, and encode it before every step.

    Resident ones are loaded before the model. If the job only samples, they encode once, and swapped ones are freed
    before the model is loaded (see ``encoding_runs``).
    """
    batch, first = batch_samples(run), len(run.program.buffers)
    components = [*encoders(run, "resident", batch), *encoders(run, "swapped", batch)]
    run.device.split_bytes = {
        **run.device.split_bytes,
        "encode": max((entry.split_bytes for entry in components), default=0),
    }
    loads: list[tuple[Moment, list[int]]] = []
    stage = Stage("encode", [])
    for component in encoders(run, "resident", batch):
        loading, blocks = load_component(run.program, component)
        done = run_component(run.program, component, blocks)
        loads += loading.stretches
        stage.stretches += [*done.stretches, (STRATEGY_MOMENT, frees(alive_after(done)))]
    for component in encoders(run, "swapped", batch) if not run.samples_only else ():
        loading, blocks = load_component(run.program, component)
        done = run_component(run.program, component, blocks)
        gone = [*alive_after(done), *alive_after(loading)]
        stage.stretches += [*loading.stretches, *done.stretches, (STRATEGY_MOMENT, frees(gone))]
    if run.samples_only and run.strategy.vae == "resident":
        loads += load_component(run.program, decoder(run, run.grid, batch))[0].stretches
    run.load.stretches[:0] = loads
    take_sizes(run, first)
    run.phases.encode = stage if stage.ops else None


def validation(run: Run) -> None:
    """Validation after an optimizer step: gradients are freed, optimizer states are not (diffusers' examples call
    ``optimizer.zero_grad`` right after the step; a trainer's terms may move that). A VAE that was cached comes to the
    GPU to decode.

    With ``offload`` the model leaves the GPU while the VAE decodes. With group offload its weights leave before the
    denoising.
    """
    mode, facts = run.strategy.validation_mode, run.facts
    if mode == "off":
        return
    assert facts.sample is not None
    shape, first = validation_grid(run.job, facts.model), len(run.program.buffers)
    batch = samples_per_call(facts.model, run.job.guided)
    denoise = _denoise(run, facts.sample, Part("validation", {**shape, "B": batch}))
    if run.handover.gathered_bytes:
        denoise.stretches.insert(
            0, (STRATEGY_MOMENT, [run.program.buffer(run.handover.gathered_bytes, "buckets", "gathered weights")])
        )
    if run.strategy.weights_dtype in QUANTISED:
        whole = run.program.buffer(_dequantised_bytes(run), "temporary", "dequantised weight")
        denoise.stretches.insert(0, (STRATEGY_MOMENT, [whole]))
    if run.facts.model.inputs.get("control_channels"):
        clip = run.program.buffer(_steering_bytes(run, shape), "batch", "clip that steers")
        denoise.stretches.insert(0, (STRATEGY_MOMENT, [clip]))
    kept = alive_after(denoise)  # by the pipeline's call, whose variables they are, until it returns
    moved = weights_on_gpu(run)
    decode = decode_with(run, decoder(run, shape, 1))
    decode.stretches.append((STRATEGY_MOMENT, frees(kept)))
    leaving = (STRATEGY_MOMENT, frees(moved))
    if run.strategy.group_offload != "none":
        take_sizes(run, first)
        offload_model_groups(run, denoise)
        first = len(run.program.buffers)
        denoise.stretches.insert(0, leaving)
        decode.stretches.append((STRATEGY_MOMENT, moved))
    elif mode == "offload":
        denoise.stretches.append(leaving)  # and then the cache is emptied, before the VAE comes
        decode.stretches.append((STRATEGY_MOMENT, moved))
    take_sizes(run, first)
    run.phases.validation = (("denoise", denoise), ("decode", decode))


def _denoise(run: Run, tape: Tape, part: Part) -> Stage:
    """One call of the model without gradients, at the shape of the validation sample."""
    level = _denoise_level(tape, part) if run.peaks_only and run.strategy.group_offload == "none" else None
    if level is None:
        return run.program.unfold(tape, "denoise", None, part)
    left = run.program.buffer(level.rise, "activation", "denoise")
    gone = run.program.buffer(level.peak - level.rise, "activation", "denoise")
    return Stage("denoise", [(STRATEGY_MOMENT, [left, gone, ~gone])])


@recording_cache(maxsize=512)
def _denoise_level(tape: Tape, part: Part) -> Level | None:
    """None where it frees what was recorded elsewhere."""
    levels = PartLevels(tape, part)
    level = levels.piece("denoise")
    return None if levels.frees_by_name else level


def _steering_bytes(run: Run, shape: Mapping[str, int]) -> int:
    """A control video as a pipeline holds it beside the latents: pixels in fp32 (diffusers WanVACEPipeline
    ``preprocess_conditions``)."""
    model = run.facts.model
    frames, rows, columns = model.shape.patch
    length = model.vae.decoded(shape["F"] * frames)
    return 4 * RGB * length * shape["H"] * rows * shape["W"] * columns * model.vae.spatial**2


def _dequantised_bytes(run: Run) -> int:
    """The largest layer in 16 bits. Over a quantised base, whose forward is recorded in 16 bits, each layer is unpacked
    for its own product (diffusers layerwise casting, bitsandbytes ``dequantize_4bit``, torchao)."""
    trained = run.named("gradient")
    frozen = (run.sizes[buffer] for name, buffer in run.named("weight").items() if name not in trained)
    return int(max(frozen) * BYTES_PER_PARAMETER["bf16"] / BYTES_PER_PARAMETER[run.strategy.weights("lora")])


def batch_samples(run: Run) -> int:
    """Samples of one batch. If the job only samples, guidance may double them on their way through the model."""
    return run.grid["B"] // (samples_per_call(run.facts.model, run.job.guided) if run.samples_only else 1)


class UnrecordedPass(NamedTuple):
    """An encode or decode without a recording; only its weights are counted."""

    name: str
    piece: str
    elsewhere: bool
    """whether it happens outside of the run: its samples come encoded"""


def unrecorded_passes(run: Run) -> list[UnrecordedPass]:
    """The passes of a run's text encoders and VAE that were not recorded."""
    shape = run.grid if run.samples_only else validation_grid(run.job, run.facts.model)
    ours = run.trainer == "vplan" and not run.samples_only
    come_encoded = ours and bool(run.facts.model.traits.not_encoded)
    found = [(entry, come_encoded) for entry in encoders(run, "cached", 1)]
    found += [(entry, False) for residence in ("resident", "swapped") for entry in encoders(run, residence, 1)]
    if run.samples_only or run.phases.validation:
        found.append((decoder(run, shape, 1), False))
    return [UnrecordedPass(entry.name, entry.piece, elsewhere) for entry, elsewhere in found if entry.tape is None]


def weights_on_gpu(run: Run) -> list[int]:
    """Buffers of the model's weights that loading puts on the GPU and leaves there."""
    loaded = set(run.load.ops)
    return [buffer for buffer in run.named("weight").values() if buffer in loaded and ~buffer not in loaded]


def moved_host_bytes(run: Run) -> int:
    """Host RAM, in bytes, of the model's weights while they make room for the VAE of a validation sample."""
    if run.strategy.validation_mode != "offload" or run.strategy.group_offload != "none":
        return 0
    # Where nothing is transformed yet, what is swapped is still there.
    blocks = run.swapped_blocks.values() if run.strategy.swap_blocks else ()
    swapped = {buffer for buffers in blocks for buffer in buffers}
    return run.total_bytes(buffer for buffer in weights_on_gpu(run) if buffer not in swapped)


def decode_with(run: Run, component: ComponentPass) -> Stage:
    """The decode stage: the VAE's weights are loaded unless they are resident, it decodes, and everything is freed."""
    run.device.split_bytes = {**run.device.split_bytes, "decode": component.split_bytes}
    if run.peaks_only and (levels := component_levels(component)) is not None:
        peak = levels.running_peak if run.strategy.vae == "resident" else levels.peak
        whole = run.program.buffer(peak, "activation", "decode")
        return Stage("decode", [(STRATEGY_MOMENT, [whole, ~whole])])
    loading, blocks = load_component(run.program, component)
    if run.strategy.vae == "resident":
        loading = Stage("load", [])
    done = run_component(run.program, component, blocks)
    gone = [*alive_after(done), *alive_after(loading)]
    return Stage("decode", [*loading.stretches, *done.stretches, (STRATEGY_MOMENT, frees(gone))])


def validation_grid(job: Job, model: ModelProfile) -> dict[str, int]:
    """The shape of the validation sample: the one set in the job, or else the job's own shape."""
    requested = job.validation
    shape = (
        Bucket(frames=requested.frames, height=requested.height, width=requested.width) if requested else job.shapes[0]
    )
    return {**grid(model, job, shape), "B": 1}


def saving(run: Run) -> None:
    """A checkpoint. Under zero-3 and fsdp the weights are gathered one by one on their way to host RAM (DeepSpeed
    ``_zero3_consolidated_16bit_state_dict``, torch ``get_model_state_dict(full_state_dict=True)``); otherwise they are
    read where they are."""
    if run.samples_only:
        return
    run.phases.save = Stage("save", [(STRATEGY_MOMENT, [])])
    if run.strategy.sharding in ("zero-3", "fsdp"):
        largest = 2 * max(run.elements.values())
        if run.strategy.sharding == "fsdp" and trained_storage(run.job, run.strategy) == "fp32":
            largest *= 2
        run.free(run.phases.save, [run.add(run.phases.save, largest, "buckets", "gathered weight")])


def take_sizes(run: Run, first: int) -> None:
    """Appends to the run the sizes of the program's buffers from number ``first`` on, which are the same at every
    shape."""
    run.sizes += run.program.plain_from(first)
