"""What a Run carries beside its training stages, one record per reader.

Transformations set their attributes; who reads them is said at each. The defaults are those of our own trainer: class
attributes that nothing can change, so that no `__init__` is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from planner.spec.plan import PhaseName
from planner.tape.program import Stage


class PhaseStages:
    """The stages of the phases around training. `Run.stages` puts them in order."""

    before_load: tuple[Stage, ...] = ()
    """what is on the GPU for a while before the model's weights come, the allocator's cache emptied behind each"""

    encode_once: Stage | None = None
    """text encoders and VAE work on the data set beside the model that is loaded"""

    unload: Stage | None = None
    """what was loaded beside the model goes, before the first step"""

    encode: Stage | None = None
    """text encoders and VAE work on each batch before the model does; of a run that only encodes, all it does"""

    validation: tuple[tuple[PhaseName, Stage], ...] = ()
    """denoising and decoding of a sample; where a job only samples, what comes behind its denoising"""

    one_step: bool = False
    """the run validates and ends behind its first step; no later one follows"""

    reload: Stage | None = None
    """the model comes back for the next samples, where it made room for the VAE"""

    save: Stage | None = None


class EmptyCache:
    """The points at which a trainer calls ``torch.cuda.empty_cache``. The replay reads it."""

    after_load: bool = False
    around_encode: bool = False
    before_validation: bool = True
    around_decode: bool = True
    """before the VAE comes to decode a validation sample, and once the sample is done"""

    after: tuple[Stage, ...] = ()
    """stages behind which it is called as well"""


class ZeroSettings(NamedTuple):
    """DeepSpeed's bucket and sub-group sizes, in elements; the defaults are DeepSpeed's."""

    reduce_bucket: int = 500_000_000
    """``reduce_bucket_size``: allocated whole, however small the model"""
    prefetch: int = 50_000_000
    """``stage3_prefetch_bucket_size``"""
    max_live: int = 1_000_000_000
    """``stage3_max_live_parameters``: no more are fetched ahead"""
    max_reuse: int = 1_000_000_000
    """``stage3_max_reuse_distance``: what is used again within it is not let go"""
    sub_group: int = 1_000_000_000
    """``sub_group_size``: how much of its share stage 3 steps at a time"""
    persistent: int = 100_000
    """``stage3_param_persistence_threshold``: smaller parameters stay whole on every rank"""
    overlap: bool = False
    """``overlap_comm`` in stages 1 and 2: a second bucket is filled while one is reduced"""


class DeviceTerms:
    """Device memory that is on no tape. Read by `planner.estimate.estimate`."""

    outside_bytes: int = 0
    """what a trainer takes outside torch's allocator, beside the context"""

    split_bytes: Mapping[PhaseName, int] = MappingProxyType({})
    """the most that a VAE's convolutions which work in parts take beyond what is counted, by phase"""

    encoders_together: bool = False
    """whether a trainer holds all encoders on the GPU while it caches"""

    text_encoders_together: bool = False
    """whether a trainer holds all text encoders on the GPU while it caches prompts, and the VAE apart from them"""

    encoders_in_16_bits: tuple[str, ...] = ()
    """the text encoders that a trainer never quantises"""

    encoder_bits: float = 0.0
    """of a number of a quantised text encoder's weights, where its format alone does not say"""

    encoder_cast: str = ""
    """the text encoder that comes in another format of 16 bits and is cast on the GPU"""

    encoders_whole: bool = False
    """whether a trainer puts a text encoder on the GPU whole, where ours brings one that is larger layer by layer"""

    encoders_by_layer: bool = False
    """whether text encoders that are cached wait in host RAM, of which a layer comes to the GPU for its turn"""

    prompts_cached_apart: bool = False
    """whether a command of its own caches prompts, so that this one needs no room for the text encoders"""

    vae_tile: tuple[int, ...] = ()
    """rows and columns of a tile of the VAE and of the stride between tiles, pixels, of a trainer whose tiles are not
    those of the recording"""

    encoders_on_cpu: bool = False
    """whether text encoders that are cached encode on the CPU"""

    kept_for_adapters: tuple[int, int] = (0, 0)
    """(the most that a step keeps in its recording for adapters that are not there, for those that it lacks)"""


class HostTerms:
    """How a trainer uses host RAM, where the strategy does not say. Read by `planner.estimate.host_ram`."""

    extra_bytes: int = 0
    """what each process keeps beyond what its strategy says"""

    copies_shared_inputs: bool = False
    """whether offloaded checkpoints hold copies of what all blocks are given alike"""

    swap_pins: Literal["exact", "rounded", "staging"] = "exact"
    """what block swap pins: its blocks as they lie, copies in torch's pinned memory, or two blocks on their way"""

    checkpoints_pin: Literal["exact", "rounded", "none"] = "exact"
    """the same of checkpoints in host RAM"""

    pinned_bytes: int = 0
    """what each process pins beyond what its strategy says"""

    loaded_bytes: float = 0
    """of each parameter in host RAM before the model goes to the GPU; 0: its files are mapped, and read weight by
    weight"""

    encoders_wait: bool = False
    """whether text encoders whose outputs are cached come back to host RAM, and wait there until training begins"""

    waits_for_latents: bool = False
    """whether the model and the text encoders are moved to host RAM while latents are cached"""

    loader_workers: int = 0
    """processes that load data, per GPU"""


class WorkTerms:
    """Work of a step that no tape counts, for its seconds. Read by `planner.estimate.work` and `.traffic`."""

    exchanged_bytes: int = 0
    """what a micro-batch's attentions exchange between the GPUs that share its tokens, as if all were sent"""

    optimizer_launches: int = 0
    """operators that a trainer's own optimizer launches beyond those recorded"""

    optimizer_bytes: int = 0
    """what these read and write"""

    forward_bytes: int = 0
    """what a trainer's own blocks read and write in one forward beyond those recorded; negative where it is less"""

    backward_bytes: int = 0
    """the same of a backward, without what it recomputes"""

    forward_launches: int = 0
    """operators that a trainer's own blocks launch in one forward beyond those recorded"""

    backward_launches: int = 0
    """the same of a backward, without what it recomputes"""

    attention_masked: bool = False
    """whether a trainer gives attention a mask where none is recorded"""

    attention_kernel: str = ""
    """the kernel that a trainer calls itself, as `planner.layout.attention_kernel.kernel` names it"""

    mask_bytes: int = 0
    """what all heads read of that mask in one forward, where it is a matrix of all pairs of tokens"""

    captured: bool = False
    """whether a trainer replays its whole step as one CUDA graph"""


class Handover:
    """Values that one transformation leaves for a later one."""

    gathered_bytes: int = 0
    """the most that an engine that splits weights gathers in a forward, with its buffers: validation takes it too"""

    workspaces: tuple[int, ...] = ()
    """buffers of cuBLAS's workspaces, of the thread that runs forward and of autograd's, put in last of all"""


class EncodingOnly(NamedTuple):
    """Of a run that only encodes (`planner.layout.phases.encoding_runs`): what it takes as a whole."""

    peak_bytes: int = 0
    """allocated; 0 of every other run"""

    waiting_bytes: int = 0
    """weights in host RAM, from which they come in turn"""

    by_layer: str = ""
    """the text encoder that is too large for the card as a whole"""
