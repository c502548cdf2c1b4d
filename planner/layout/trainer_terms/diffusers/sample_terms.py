"""Samples of training scripts around diffusers: whose text encoders they bring, and what lies beside them."""

from __future__ import annotations

from planner.layout.encoders_vae.component_layout import alive_after, load_component, run_component
from planner.layout.encoders_vae.component_pass import ComponentPass, component_bytes, encoders
from planner.layout.phases import take_sizes, weights_on_gpu
from planner.layout.run import STRATEGY_MOMENT, Run
from planner.spec.plan import PhaseName
from planner.tape.program import Moment, Stage

HALF, FP32 = 2, 4
FACTORY = "cogvideox-factory"
"""The version of cogvideox-factory's scripts for CogVideoX as they are since December 2024."""


def is_vae(run: Run, component: ComponentPass) -> bool:
    """Whether a component is the model's VAE."""
    vae = run.facts.model.vae
    return component.name == vae.folder


def validation_prompts(run: Run) -> None:
    """Validation encodes its prompts anew. The pipeline brings its text encoders, which stay beside the model until the
    sample is decoded; offloaded, they have the GPU for themselves before the model denoises (``log_validation`` of
    cogvideox-factory and of diffusers' examples: ``pipe.to(accelerator.device)``, ``enable_model_cpu_offload``).

    cogvideox-factory's pipeline has encoders of its own beside those that train (``from_pretrained(...,
    transformer=...)``), and is put on the GPU whole even where it is offloaded: the model stays until they leave.

    In some scripts they do not leave: ``main`` deletes its names for the encoders and not ``pipeline``, which has them
    until the next samples' one takes its place, so that all steps after the first samples run beside them (58eb52c
    examples/dreambooth/train_dreambooth_sd3.py:1725 to 1747, train_dreambooth_lora_sd3.py:1911,
    train_dreambooth_lora_flux_kontext.py:2211)."""
    whole = run.trainer.endswith(f"@{FACTORY}")
    if not run.phases.validation or (run.strategy.text_encoder != "cached" and not whole):
        return
    if _sampled_without_encoders(run):
        return
    first, denoise, decode = len(run.program.buffers), run.phases.validation[0][1], run.phases.validation[-1][1]
    apart = run.strategy.validation_mode == "offload"
    moved = weights_on_gpu(run) if apart and not whole else []
    coming: list[tuple[Moment, list[int]]] = [(STRATEGY_MOMENT, [~buffer for buffer in moved])]
    run.phases.samples_leave = Stage("pipeline leaves", []) if _keeps_pipeline(run) else None
    last = (run.phases.samples_leave or decode).stretches
    if whole:
        coming += _vae_of_the_pipeline(run, denoise if run.strategy.vae == "cached" else decode)
    for component in encoders(run, run.strategy.text_encoder, 1):
        if is_vae(run, component):  # a cached one comes for the decode
            continue
        loading, blocks = load_component(run.program, component)
        done = run_component(run.program, component, blocks)
        leaving = (STRATEGY_MOMENT, [~buffer for buffer in alive_after(loading)])
        coming += [*loading.stretches, *done.stretches, (STRATEGY_MOMENT, [~buffer for buffer in alive_after(done)])]
        (coming if apart else last).append(leaving)
    denoise.stretches[:0] = [*coming, (STRATEGY_MOMENT, moved)]
    take_sizes(run, first)


def _keeps_pipeline(run: Run) -> bool:
    """Whether what made the first samples stays on the GPU while training goes on."""
    return run.facts.model.trained_with("diffusers", "pipeline-kept") and run.strategy.validation_mode == "on"


def _vae_of_the_pipeline(run: Run, last: Stage) -> list[tuple[Moment, list[int]]]:
    """A VAE that is put on the GPU with the pipeline and stays until the end of ``last``."""
    (vae,) = (entry for entry in encoders(run, run.strategy.vae, 1) if is_vae(run, entry))
    loading, _ = load_component(run.program, vae)
    last.stretches.append((STRATEGY_MOMENT, [~buffer for buffer in alive_after(loading)]))
    return loading.stretches


def tested_beside_the_trained(run: Run) -> None:
    """The last samples are a pipeline's with a transformer of its own. ``del transformer, text_encoder, vae`` takes the
    encoders off the GPU, and not the trained transformer, which the optimizer and accelerate hold on to; an offloaded
    one is in host RAM by then (cogvideox-factory 223add1, training/cogvideox/cogvideox_text_to_video_sft.py, "Final
    test inference", behind ``empty_cache``)."""
    if not run.phases.validation or run.strategy.validation_mode != "on":
        return
    halves = 2 if run.job.method == "full" and run.strategy.weights_dtype == "fp32" else 1
    more = run.total_bytes(run.named("weight").values()) // halves - component_bytes(run, "resident")
    if more > 0:
        run.empty_cache.after = (*run.empty_cache.after, run.phases.validation[-1][1])
        _sample_beside(run, more)


def _sample_beside(run: Run, nbytes: int) -> None:
    """Samples with so many bytes of a second model on the GPU, from before its first step until the decode is over."""
    (_, denoise), (_, decode) = run.phases.validation
    second, at = run.new(nbytes, "weight", "second transformer"), STRATEGY_MOMENT._replace(passes="second transformer")
    left = run.phases.samples_leave.stretches if run.phases.samples_leave else []
    run.phases.validation = (
        *run.phases.validation,
        ("denoise", Stage(denoise.name, [*left, (at, [second]), *denoise.stretches])),
        ("decode", Stage(decode.name, [*decode.stretches, *left, (at, [~second])])),
    )


def _turns(run: Run) -> list[tuple[PhaseName, Stage]]:
    """An offloaded sample in parts: text encoders, where they encode, the denoising, and the decode, without what moves
    the model. Behind each the allocator's cache is emptied (accelerate hooks.py ``CpuOffload.pre_forward``, diffusers
    pipelines/pipeline_utils.py ``enable_model_cpu_offload``)."""
    (_, denoise), (_, decode) = run.phases.validation
    moved = weights_on_gpu(run)
    moves = (moved, [~buffer for buffer in moved])
    back = [at for at, (_, events) in enumerate(denoise.stretches) if events == moved]
    parts = [denoise.stretches[: back[0]], denoise.stretches[back[0] :]] if back else [denoise.stretches]
    kept = [[stretch for stretch in part if stretch[1] not in moves] for part in (*parts, decode.stretches)]
    *before, decoded = kept
    return [*(("denoise", Stage(denoise.name, part)) for part in before), ("decode", Stage(decode.name, decoded))]


def _offloaded_samples(run: Run, nbytes: int, last: bool) -> None:
    """Samples of a pipeline whose models take turns on the GPU: of the trained one, and at the end of one of so many
    bytes that was loaded anew, beside the trained one, which is then not the pipeline's and stays."""
    own, new, moved = _turns(run), _turns(run), weights_on_gpu(run)
    leaving, second = [~buffer for buffer in moved], run.new(nbytes, "weight", "second transformer")
    if len(own) > 2:  # text encoders come first
        own[0][1].stretches.insert(0, (STRATEGY_MOMENT, leaving))
        own[1][1].stretches.insert(0, (STRATEGY_MOMENT, moved))
    own[-2][1].stretches.append((STRATEGY_MOMENT, leaving))
    own[-1][1].stretches.append((STRATEGY_MOMENT, moved))
    new[-2][1].stretches.insert(0, (STRATEGY_MOMENT, [second]))
    new[-2][1].stretches.append((STRATEGY_MOMENT, [~second]))
    run.phases.validation = (*own, *(new if last else ()))
    run.empty_cache.after = (*run.empty_cache.after, *(stage for _, stage in run.phases.validation))


IN_LOOP = "in-loop"
"""In the version of a script that takes no last sample at its end (``--skip_final_inference``)."""

OTHER_LOOPS = ("2024-10", FACTORY)
"""The beginnings of versions that are other scripts'."""


def last_sample(run: Run) -> None:
    """When training is over, a pipeline is loaded for a last sample, transformer included, and put on the GPU beside
    the trained one, which the script's variable, the optimizer and accelerate hold on to, and beside the text encoders
    and the VAE that the script holds on to. A U-Net is cast to fp32 before its adapters are saved (58eb52c
    examples/dreambooth/train_dreambooth_lora_{flux,qwen_image,sdxl}.py and the other LoRA scripts, "Final
    inference"); one that is trained in full samples itself. In full training the second transformer is in the
    format that autocast computes in, and takes what autocast's copies of the trained one take in samples before
    (train_dreambooth_{flux,sd3}.py, ``torch_dtype=weight_dtype``; ``nullcontext`` of the last sample). The models of an
    offloaded pipeline take turns (train_dreambooth_lora_{flux2,flux2_klein,z_image}.py ``log_validation``)."""
    version, strategy, model = run.trainer.partition("@")[2], run.strategy, run.facts.model
    if not run.phases.validation or version.startswith(OTHER_LOOPS):
        return
    unet, full = "UNet" in model.diffusers_class, run.job.method == "full"
    whole = unet or strategy.weights_dtype == "fp32"
    second = (FP32 if whole else HALF) * model.parameters
    if strategy.validation_mode == "offload":
        _offloaded_samples(run, second, IN_LOOP not in version)
        return
    if IN_LOOP in version or (full and (unet or strategy.autocast != "none")):
        return
    _sample_beside(run, second + (0 if _sampled_without_encoders(run) else component_bytes(run, "resident")))


def _sampled_without_encoders(run: Run) -> bool:
    """Whether the pipeline that samples has no text encoder: prompts were encoded before training
    (``text_encoder=None`` in train_dreambooth_lora_{qwen_image,hidream,krea2}.py)."""
    return run.facts.model.trained_with("diffusers", "sampled-without-encoders")
