"""What a Run carries besides its training stages, one record per reader.

Transformations set the attributes; each record's docstring names its reader. The defaults are those of our own trainer.
They are immutable class attributes, so no `__init__` is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from planner.spec.plan import PhaseName
from planner.tape.program import Stage


class PhaseStages:
    """The stages of the phases around training. `Run.stages` puts them in order."""

    before_load: tuple[Stage, ...] = ()
    """what is on the GPU for a while before the model is loaded; the allocator's cache is emptied after each"""

    wrap: tuple[Stage, ...] = ()
    """what an engine does with the loaded model, as far as it empties the allocator's cache before"""

    encode_once: Stage | None = None
    """text encoders and VAE encode the data set while the model is loaded already"""

    unload: Stage | None = None
    """what was loaded beside the model is freed, before the first step"""

    encode: Stage | None = None
    """text encoders and VAE encode each batch before its step; in a run that only encodes, everything"""

    validation: tuple[tuple[PhaseName, Stage], ...] = ()
    """denoising and decoding of a sample; if the job only samples, what follows its denoising"""

    samples_leave: Stage | None = None
    """frees what a sample brought, where a trainer holds on to it: then the first sample comes before the later steps,
    which run beside it"""

    one_step: bool = False
    """the run validates and ends after its first step"""

    reload: Stage | None = None
    """the model returns to the GPU for the next samples, if it made room for the VAE"""

    save: Stage | None = None


class EmptyCache:
    """The points at which a trainer calls ``torch.cuda.empty_cache``. The replay reads it."""

    after_load: bool = False
    around_encode: bool = False
    before_validation: bool = True
    around_decode: bool = True
    """before the VAE is loaded to decode a validation sample, and after the sample"""

    after: tuple[Stage, ...] = ()
    """further stages after which it is called"""


class ZeroSettings(NamedTuple):
    """DeepSpeed's bucket and sub-group sizes, in elements, and what it pins; the defaults are DeepSpeed's."""

    reduce_bucket: int = 500_000_000
    """``reduce_bucket_size``: allocated whole, however small the model"""
    prefetch: int = 50_000_000
    """``stage3_prefetch_bucket_size``"""
    max_live: int = 1_000_000_000
    """``stage3_max_live_parameters``: the limit of fetching ahead"""
    max_reuse: int = 1_000_000_000
    """``stage3_max_reuse_distance``: what is reused within this distance is not released"""
    sub_group: int = 1_000_000_000
    """``sub_group_size``: how much of its share stage 3 steps at a time"""
    persistent: int = 100_000
    """``stage3_param_persistence_threshold``: smaller parameters stay whole on every rank"""
    overlap: bool = False
    """``overlap_comm`` in stages 1 and 2: a second bucket is filled while one is reduced"""
    pin_params: bool = True
    """``offload_param.pin_memory``"""
    pin_optimizer: bool = True
    """``offload_optimizer.pin_memory``"""


class DeviceTerms:
    """Device memory that is on no tape. Read by `planner.estimate.estimate`."""

    outside_bytes: int = 0
    """what a trainer takes outside torch's allocator, besides the CUDA context"""

    split_bytes: Mapping[PhaseName, int] = MappingProxyType({})
    """the most that a VAE's split convolutions take beyond what is counted, by phase"""

    encoders_together: bool = False
    """whether a trainer holds all encoders on the GPU while it caches"""

    text_encoders_together: bool = False
    """whether a trainer holds all text encoders on the GPU while it caches prompts, and the VAE apart from them"""

    encoders_in_16_bits: tuple[str, ...] = ()
    """the text encoders that a trainer never quantises"""

    encoder_head_untied: bool = False
    """whether a text encoder's head is a weight of its own once it is quantised"""

    encoders_in_one_format: bool = False
    """whether text encoders keep no layer in fp32: what they would keep has 16 bits, beside fewer too; and a table of
    words with two names is on the GPU twice"""

    encoder_bits: float = 0.0
    """bits per number of a quantised text encoder's weights, if the format does not determine them"""

    encoder_cast: str = ""
    """the text encoder that is loaded in another 16-bit format and cast on the GPU"""

    encoders_whole: bool = False
    """whether a trainer loads even a text encoder larger than the card whole, where ours goes layer by layer"""

    encoders_by_layer: bool = False
    """whether text encoders wait in host RAM while they cache prompts, and each layer comes to the GPU for its turn"""

    prompts_cached_apart: bool = False
    """whether a separate command caches prompts, so this one needs no room for the text encoders"""

    vae_tile: tuple[int, ...] = ()
    """rows and columns, in pixels, of a VAE tile and of the stride between tiles, if a trainer's tiles are not those of
    the recording"""

    encoders_on_cpu: bool = False
    """whether text encoders cache prompts on the CPU"""

    kept_for_adapters: tuple[int, int] = (0, 0)
    """the most that a step keeps (for recorded adapters that the job does not have, for those it has in addition)"""


class EngineTerms:
    """What a trainer hands to an engine that splits its training. Read by `planner.layout.sharding`."""

    second_group: re.Pattern[str] | None = None
    """names of the trained parameters that the optimizer has in a group of their own, behind the others"""


class HostTerms:
    """How a trainer uses host RAM, as far as the strategy does not say. Read by `planner.estimate.host_ram`."""

    extra_bytes: int = 0
    """what each process keeps beyond what its strategy says"""

    copies_shared_inputs: bool = False
    """whether offloaded checkpoints hold copies of the inputs that all blocks share"""

    swap_pins: Literal["exact", "rounded", "staging"] = "exact"
    """what block swap pins: its blocks in place, copies in torch's pinned memory, or two blocks in transit"""

    checkpoints_pin: Literal["exact", "rounded", "none"] = "exact"
    """the same for checkpoints in host RAM"""

    pinned_bytes: int = 0
    """what each process pins beyond what its strategy says"""

    loaded_bytes: float = 0
    """of each parameter in host RAM before the model goes to the GPU; 0: its files are mapped, and read weight by
    weight"""

    loaded_for_swapping: bool = False
    """whether that is so only where blocks are swapped"""

    encoders_loaded: Literal["held", "mapped", "read", "fp32"] = "held"
    """text encoders and the VAE in host RAM while the model is loaded: as training holds them there, still mapped, read
    whole wherever training has them, or the same in fp32 with the VAE"""

    maps_files: bool = True
    """whether weight files are mapped while the model is loaded, not read"""

    encoders_wait: bool = False
    """whether text encoders whose outputs are cached come back to host RAM, and wait there until training begins"""

    waits_for_latents: bool = False
    """whether the model and the text encoders are moved to host RAM while latents are cached"""

    encoders_read: bool = False
    """whether text encoders are read into host RAM whole, each in a file of its own, before they cache prompts"""

    cached_parts_stay: bool = False
    """whether text encoders and a VAE whose outputs are cached come back to host RAM, and stay to the end"""

    loader_workers: int = 0
    """processes that load data, per GPU"""


class WorkTerms:
    """Work of a step that no tape counts, for its seconds. Read by `planner.estimate.work` and `.traffic`."""

    exchanged_bytes: int = 0
    """what the attentions of a micro-batch exchange between the GPUs that share its tokens, as if all were sent"""

    optimizer_launches: int = 0
    """operators that a trainer's own optimizer launches beyond those recorded"""

    optimizer_bytes: int = 0
    """bytes that these read and write"""

    forward_bytes: int = 0
    """what a trainer's own blocks read and write in one forward beyond what is recorded; negative if it is less"""

    backward_bytes: int = 0
    """the same for a backward, without what it recomputes"""

    forward_launches: int = 0
    """operators that a trainer's own blocks launch in one forward beyond those recorded"""

    backward_launches: int = 0
    """the same for a backward, without what it recomputes"""

    attention_masked: bool = False
    """whether a trainer passes attention a mask that the recording does not have"""

    attention_kernel: str = ""
    """the kernel that a trainer calls itself, as `planner.layout.attention_kernel.kernel` names it"""

    mask_bytes: int = 0
    """what all heads read of that mask in one forward, if it is a matrix over all pairs of tokens"""

    captured: bool = False
    """whether a trainer replays its whole step as one CUDA graph"""


class Handover:
    """Values that one transformation leaves for a later one."""

    gathered_bytes: int = 0
    """the most that a sharding engine gathers in a forward, with its buffers; validation needs it too"""

    workspaces: tuple[int, ...] = ()
    """buffers of cuBLAS's workspaces, for the thread that runs forward and autograd's; inserted last"""


class EncodingOnly(NamedTuple):
    """What a run that only encodes takes as a whole (`planner.layout.phases.encoding_runs`)."""

    peak_bytes: int = 0
    """allocated; 0 for every other run"""

    waiting_bytes: int = 0
    """weights that wait in host RAM for their turn"""

    by_layer: str = ""
    """the text encoder that is too large for the card as a whole"""
