"""Seconds of a training step: the work counted on the tape against what the card can do (a roofline; no measurement is
needed).

Every efficiency below is a published measurement of that kind of kernel on that kind of card: the sustained rate over
the data sheet's rate, which is at the boost clock. The only constant fitted to published step times is
`LAUNCH_SECONDS`. In a step, kernels are slower than when measured alone (`ROOFLINE_USUAL`, `IN_A_STEP`). A trainer's
data loading is not included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from planner.catalog.card_profiles import GpuProfile
from planner.estimate.links import Ring, gpu_rate, node_rate
from planner.estimate.work import KERNELS, Attention, Kind, StepWork, Work
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy

ROOFLINE_LEAST, ROOFLINE_USUAL = 0.79, 0.825
"""Roofline seconds of the kernels over the seconds of a real step, lowest and typical: 0.79 to 0.86 over the
configurations of torchtitan (pytorch/torchtitan#3828)."""

GH100 = (9, 0)
"""Compute capability of H100 and H200."""

IN_A_STEP = {"matmul": 1 / 1.05, "attention": 1 / 1.02, "pointwise": 1 / 1.70}
"""The same on a GH100 by kind of kernel in 16 bits; there were too few convolutions. Fitted to the kernels of 14 steps
of our trainer on an H200 under torch's profiler (profiles/measurements/own), without published step times:
tests/tools/step_times/kernels.py; docs/accuracy/seconds.md has the errors."""

PER_KERNEL_SECONDS = 1.0e-6
"""Additional time of each kernel on a GH100, independent of its size. Measured as 5.1 us per matrix product, and one
kernel in five is one (0.10 to 0.32). Fitted with `IN_A_STEP`; pointwise kernels and attention showed none."""

LAUNCH_SECONDS = 32e-6
"""CPU time of one operator in a model's forward or backward, including the Python code around it. Fitted to half of the
published step times (profiles/measurements/step_times, by hash of their id; docs/accuracy/seconds.md has both halves).
Our own steps at toy width take 22 to 25 us on one core (AMD EPYC) and 42 (2.5 GHz Xeon) (tests/benchmarks/launches.py).
"""

RECOMPUTED_LAUNCHES = 1.7
"""CPU time of an operator that a checkpoint recomputes over that of another one in backward: it runs from Python and
with autograd, while the others run from C++. 1.6 to 2.0 and 1.8 on the two machines (tests/benchmarks/launches.py)."""

SLOW_KERNELS = ROOFLINE_USUAL / ROOFLINE_LEAST
"""Seconds of the slowest kernels over typical ones."""

SLOW_LAUNCHES = 66 / 42
"""Launch time on a busy machine over that on an idle one (tests/benchmarks/launches.py, on the Xeon)."""

COMPILED_LAUNCH_SECONDS = 7e-6
"""Launch time after a compiler has removed the Python code: fitted to H100 steps (meta-pytorch/autoparallel#146)."""

BARE_LAUNCH_SECONDS = 5e-6
"""Launch time of an operator in an optimizer step: in a bare loop without autograd (pytorch#41383)."""

GAP_SECONDS, GRAPH_GAP_SECONDS = 2.1e-6, 1.3e-6
"""Time on the GPU between the end of one kernel and the start of the next, on a stream and in a CUDA graph, even if
both were launched long before. Measured with kernels that only sleep, on an H100 (Hazy Research, "Look Ma, No Bubbles",
May 2025)."""

MATMUL = {(8, 0): 0.859, (9, 0): 0.803, (10, 0): 0.776}
"""Best bf16 matmul rate over the data sheet's, by compute capability: A100 267.9 of 312, H100 794.5 of 989, B200 1745
of 2250 TFLOP/s (stas00/ml-engineering, "Maximum Achievable Matmul FLOPS comparison table")."""

MATMUL_GEFORCE = 0.96
"""GeForce cards run above their quoted clock: RTX 4090 159 to 167 of 165.2 TFLOP/s (mli/transformers-benchmarks#4)."""

MATMUL_LAPTOP = 0.79
"""The median of three measured laptop GeForce cards, 0.73 to 0.92, whose limit of 150 W keeps them below their nominal
clocks (RTX 4080, 5090 and 5080 in zzc0721/torch-performance-test-data@9d82737, over profiles/gpus.toml)."""

DEFAULT_EFFICIENCY = 0.75
"""For cards without a published value, and for convolutions: torch's own RuntimeEstimator assumes it for every operator
(torch/distributed/_tools/runtime_estimator.py, pytorch#134243)."""

COPY_EFFICIENCY = 0.9
"""Achieved memory bandwidth over the data sheet's: H100 copies 3.0 of 3.35 TB/s; RTX 4090 918 to 924 of 1008 GB/s
(tinygrad/open-gpu-kernel-modules#6)."""

SMALL_HEAD = 64
"""Attention heads up to this size use the second of the pairs below, larger ones the first."""

FLASH_2 = {9: ((0.374, 0.326), (0.328, 0.294)), 10: ((0.374, 0.326), (0.328, 0.294))}
"""(forward, backward) by major compute capability, for heads of 128 and of 64. H100: 370 and 322, 324 and 291 of 989
TFLOP/s at 16k tokens, no mask (FlashAttention-3 paper, arXiv 2407.08608, figures 5 and 6). B200 is not published and
assumed to be the same."""

FLASH_2_MMA = ((0.73, 0.63), (0.73, 0.63))
"""The same for cards whose only matrix instruction the kernel uses (8.x, 12.x): best of A100 in the FlashAttention-2
paper (arXiv 2307.08691, section 4.1). RTX A5000, heads of 64: 0.74 and 0.70 (gpu-mode/ring-attention#10)."""

FLASH_3 = ((0.655, 0.567), (0.503, 0.479))
"""H100: 648 and 561, 497 and 474 of 989 TFLOP/s, the same figures of arXiv 2407.08608."""

CUDNN = {9: ((0.60, 0.52), (0.418, 0.438)), 10: ((0.55, 0.47), (0.383, 0.396))}
"""H100: 595 and 516, 413 and 433 of 989 TFLOP/s, the same figures. B200: FlashAttention-4 reaches 0.71 and is up to 1.3
times faster than cuDNN 9.13 (its abstract); backward and small heads scaled as on H100."""

CUDNN_MASKED = (0.66, 0.58)
"""(forward, backward) of cuDNN with a mask over cuDNN without: 395 of 599 and 307 of 529 TFLOP/s on an H200, torch
2.11, heads of 128 (profiles/measurements/own: HunyuanVideo's 24 heads over 7,456 tokens take 1.73 and 5.56 ms; without
a mask as `vplan calibrate` measured there)."""

EFFICIENT = (0.82, 0.53)
"""Memory-efficient attention over FlashAttention-2: 43.4 of 53.1 and 27.4 of 51.9 TFLOP/s on one card
(Dao-AILab/flash-attention#416, 4096 tokens)."""

AOTRITON = (0.328, 0.294)
"""AMD's kernels for flash and memory-efficient attention. Not published for training; assumed to be those of
FlashAttention-2 on H100 with small heads, its worst case."""

EFFICIENT_KERNELS = ("efficient", "xformers")

MATH = (0.15, 0.18)
"""Standard attention: H100 0.14 and 0.18 (arXiv 2407.08608), RTX A5000 0.17 and 0.18 (gpu-mode/ring-attention#10)."""

HOST_ADAM_SECONDS = 0.26e-9
"""Per parameter, of DeepSpeed's CPU Adam: 1e9 take 0.22 s, 10e9 2.57 s (ZeRO-Offload, arXiv 2101.06840, table 4)."""

DISK_BYTES_PER_SECOND = 3.2e9
"""One NVMe drive on four lanes of PCIe 3: 3.94 GB/s on the wire, 3.2 to 3.5 on data sheets."""


class Traffic(NamedTuple):
    """What one whole step (all accumulated micro-batches) moves over links, in bytes per GPU."""

    host_forward_bytes: int = 0
    """over its link to host RAM during one micro-batch's forward, in the busier direction: each has its copy engine"""
    host_backward_bytes: int = 0
    """the same during its backward"""
    host_beside: float = 1.0
    """the part of a pass with which these copies can overlap: swapped blocks are copied while swapped blocks compute"""
    gpu_bytes: int = 0
    """sent to other GPUs while kernels run; in a ring (n-1)/n of a tensor per reduce-scatter or all-gather, twice that
    per all-reduce"""
    replica_bytes: int = 0
    """the same, to the GPUs with the same shard in other replicas of the model"""
    host_waiting_bytes: int = 0
    """over its link to host RAM while nothing else runs"""
    gpu_waiting_bytes: int = 0
    """sent to other GPUs while nothing else runs"""
    host_parameters: int = 0
    """parameters whose optimizer step runs on the CPU"""
    disk_bytes: int = 0
    """to and from an NVMe drive"""


class Seconds(NamedTuple):
    """Parts of a step. `total` is not their sum, because overlapping parts count once."""

    compute: float
    """GPU busy, usually"""
    launch: float
    """CPU busy launching kernels"""
    transfer: float
    """links busy"""
    total: float
    """kernels as usual, launches at their best"""
    host: float = 0.0
    """optimizer in host RAM, drive"""
    high: float = 0.0
    """the slowest kernels seen, every operator as slow to launch as ours, nothing hidden"""


def step_seconds(configuration: Configuration, work: StepWork, gpu: GpuProfile, traffic: Traffic) -> Seconds:
    """Seconds of one optimizer step: kernels, their launches and transfers.

    The CPU runs ahead of the GPU, so the GPU waits for launches only if they take longer than the kernels. It waits for
    copies from host RAM only if they take longer than the blocks of the same pass that run meanwhile.
    """
    job, strategy, machine = configuration.job, configuration.strategy, configuration.machine
    backward = {kind: item - work.forward.get(kind, Work(0, 0)) for kind, item in work.passes.items()}
    launch_seconds = host_launch_seconds(gpu) if strategy.compile == "none" else COMPILED_LAUNCH_SECONDS
    again = (RECOMPUTED_LAUNCHES - 1) * work.recomputed if strategy.compile == "none" else 0.0
    reached = attention_efficiency(gpu, strategy, job, work.attention)
    turns = []
    for part, extra, nbytes in (
        (work.forward, 0.0, traffic.host_forward_bytes),
        (backward, again, traffic.host_backward_bytes),
    ):
        kernels = _kernel_seconds(part, gpu, strategy, reached, work.attention.over_pairs)
        kernels /= strategy.context_parallel
        # Copies take the card's bandwidth too.
        kernels += nbytes / (COPY_EFFICIENCY * gpu.bandwidth_gbs * 1e9 * ROOFLINE_USUAL)
        turn = KernelBatch.of(part, strategy, kernels, launch_seconds, extra, work.captured)
        turns.append(turn._replace(copies=nbytes / host_rate(gpu, machine), beside=traffic.host_beside))
    if work.encoding:  # of what stays on the GPU or comes for each batch
        forward = {half: _attention_passes(gpu, work.attention, half)[0] for half in (0, 1)}
        encoding = _kernel_seconds(work.encoding, gpu, strategy, forward)
        turns.insert(0, KernelBatch.of(work.encoding, strategy, encoding, host_launch_seconds(gpu)))
    turns *= strategy.gradient_accumulation
    if strategy.offload_optimizer == "none":
        share = 1 if strategy.sharding in ("none", "ddp") else configuration.shards
        stepping = _kernel_seconds(work.optimizer, gpu, strategy, reached) / share
        turns.append(KernelBatch.of(work.optimizer, strategy, stepping, BARE_LAUNCH_SECONDS, captured=work.captured))
    copied = strategy.gradient_accumulation * (traffic.host_forward_bytes + traffic.host_backward_bytes)
    hidden = copied / host_rate(gpu, machine) + _exchange_seconds(configuration, traffic, gpu)
    waiting = traffic.host_waiting_bytes / host_rate(gpu, machine)
    if traffic.gpu_waiting_bytes:
        waiting += traffic.gpu_waiting_bytes / _waiting_rate(configuration, gpu)
    host = traffic.host_parameters * HOST_ADAM_SECONDS + traffic.disk_bytes / DISK_BYTES_PER_SECOND
    total = max(_busy_seconds(turns), hidden) + waiting + host
    slow = _busy_seconds([turn._replace(copies=0.0) for turn in turns], SLOW_KERNELS, SLOW_LAUNCHES)
    compute, launch = sum(turn.kernels for turn in turns), sum(turn.launches for turn in turns)
    return Seconds(compute, launch, hidden + waiting, total, host, slow + hidden + waiting + host)


def host_launch_seconds(gpu: GpuProfile) -> float:
    """CPU time of one operator of a forward or backward: as measured on this machine, or the usual value."""
    return LAUNCH_SECONDS if gpu.launch_us is None else gpu.launch_us * 1e-6


class Span(NamedTuple):
    """Seconds, or a quantity derived from them, in the usual case and in the longest."""

    low: float
    high: float

    def plus(self, other: Span) -> Span:
        """The sum, for one after the other."""
        return Span(self.low + other.low, self.high + other.high)

    def times(self, count: float) -> Span:
        """The span multiplied by ``count``."""
        return Span(self.low * count, self.high * count)


def forward_seconds(
    configuration: Configuration, work: Mapping[Kind, Work], gpu: GpuProfile, attention: Attention, nbytes: int = 0
) -> Span:
    """Seconds of work without gradients, such as one pass of an encoder. ``nbytes`` are copied from host RAM, at best
    during the work and at worst before it."""
    strategy = configuration.strategy
    reached = {half: _attention_passes(gpu, attention, half)[0] for half in (0, 1)}
    batch = KernelBatch.of(work, strategy, _kernel_seconds(work, gpu, strategy, reached), host_launch_seconds(gpu))
    copies = nbytes / host_rate(gpu, configuration.machine)
    usual = _busy_seconds([batch._replace(copies=copies)])
    return Span(usual, _busy_seconds([batch], SLOW_KERNELS, SLOW_LAUNCHES) + copies)


class KernelBatch(NamedTuple):
    """Kernels that are launched together, in seconds: running them, the gaps between them on the GPU, and launching
    them from the host."""

    kernels: float
    gaps: float
    """between them on the GPU"""
    launches: float
    copies: float = 0.0
    """over the link to host RAM"""
    beside: float = 1.0
    """part of the batch with which copies can overlap"""

    @classmethod
    def of(
        cls,
        work: Mapping[Kind, Work],
        strategy: Strategy,
        kernels: float,
        launch_seconds: float,
        extra: float = 0.0,
        captured: bool = False,
    ) -> KernelBatch:
        """The batch of some work. ``kernels``: seconds of all its kernels; ``launch_seconds``: CPU time of a launch;
        ``extra``: additional launches that stand for the time by which some are slower; ``captured``: replayed as a
        CUDA graph."""
        recorded = sum(amount.flops for (kind, _), amount in work.items() if kind == KERNELS)
        launches = recorded * _left_by_fusion(work, strategy)
        if captured or strategy.compile == "cudagraphs":  # one launch replays the whole graph
            return cls(kernels, GRAPH_GAP_SECONDS * launches, 0.0)
        return cls(kernels, GAP_SECONDS * launches, launch_seconds * (launches + extra))


def _busy_seconds(turns: Sequence[KernelBatch], kernels: float = 1.0, launches: float = 1.0) -> float:
    """Seconds of batches whose kernels and launches take ``kernels`` and ``launches`` times as long as usual. A batch's
    kernels begin when its launches begin and all earlier kernels are done, and end no sooner than its last launch."""
    launched = done = 0.0
    for turn in turns:
        begin = max(launched, done)
        launched += turn.launches * launches
        done = max(begin + turn.kernels * kernels + turn.gaps, launched)
        done += max(0.0, turn.copies - turn.beside * (done - begin))
    return done


def _exchange_seconds(configuration: Configuration, traffic: Traffic, gpu: GpuProfile) -> float:
    """Seconds that a GPU sends to others while kernels run. Traffic to other replicas has a stream of its own; it
    overlaps with traffic to other shards if it uses other links (network adapters instead of NVLink)."""
    machine, shards = configuration.machine, configuration.shards
    inner, outer = Ring(shards), Ring(configuration.strategy.fsdp_replicas, shards)
    if machine.world == 1:
        return 0.0
    within = traffic.gpu_bytes / inner.rate(gpu, machine)
    across = traffic.replica_bytes / outer.rate(gpu, machine)
    apart = gpu.nvlink_gbs and not inner.crosses(machine) and outer.crosses(machine)
    return max(within, across) if apart else within + across


def _waiting_rate(configuration: Configuration, gpu: GpuProfile) -> float:
    """Bytes per second of sending while nothing else runs. With context parallelism a GPU sends to each of the others,
    over the slower link if they are on several nodes."""
    machine, parts = configuration.machine, configuration.strategy.context_parallel
    if parts == 1:
        return Ring(configuration.shards).rate(gpu, machine)
    within = gpu_rate(gpu, machine)
    return min(within, node_rate(gpu, machine)) if Ring(parts).crosses(machine) else within


def _kernel_seconds(
    work: Mapping[Kind, Work],
    gpu: GpuProfile,
    strategy: Strategy,
    attention: Mapping[int, float],
    over_pairs: bool = False,
) -> float:
    """Typical seconds of kernels in a step. ``attention``: its efficiency, by whether it computes in 16 bits;
    ``over_pairs``: whether it has a mask over all pairs of tokens. The kernel loads a tile of that mask only after the
    product to which it is added, and waits for it, so reading the mask does not overlap with compute (PyTorch's
    memory-efficient kernel, mem_eff_attention/kernel_forward.h at 01b4eae: "apply attention bias if applicable").
    """
    bandwidth = COPY_EFFICIENCY * gpu.bandwidth_gbs * 1e9
    known = gpu.vendor == "nvidia" and gpu.capability == GH100
    seconds = 0.0
    for (kind, half), amount in work.items():
        if kind == KERNELS:
            seconds += PER_KERNEL_SECONDS * amount.flops if known else 0.0
            continue
        nbytes: float = amount.nbytes
        if kind == "pointwise":
            nbytes *= _left_by_fusion(work, strategy)
        reached = attention[half] if kind == "attention" else efficiency(gpu, kind, half)
        rate = peak_flops(gpu, strategy, kind, half) * reached
        in_a_step = IN_A_STEP.get(kind) if known and (half or kind == "pointwise") else None
        parts = amount.flops / rate, nbytes / bandwidth
        alone = sum(parts) if over_pairs and kind == "attention" else max(parts)
        seconds += alone / (in_a_step or ROOFLINE_USUAL)
    return seconds


def _left_by_fusion(work: Mapping[Kind, Work], strategy: Strategy) -> float:
    """The part of the pointwise bytes that remains when a compiler fuses the operators.

    A fused chain reads what one matrix product wrote and writes what the next one reads, and nothing in between: the
    same tensors that the matrix products move themselves.
    """
    pointwise = sum(amount.nbytes for (kind, _), amount in work.items() if kind == "pointwise")
    others = sum(amount.nbytes for (kind, _), amount in work.items() if kind not in ("pointwise", KERNELS))
    if strategy.compile == "none" or not others:  # an optimizer step has only pointwise work, fused by hand already
        return 1.0
    return min(1.0, others / max(pointwise, 1))


def peak_flops(gpu: GpuProfile, strategy: Strategy, kind: str, half: int) -> float:
    """The card's data-sheet rate for one kind of operator, FLOP/s."""
    fp32 = gpu.fp32_tflops
    if half:
        dtype = strategy.compute_dtype if strategy.autocast == "none" else strategy.autocast
        return (gpu.fp16_tflops if dtype == "fp16" else gpu.bf16_tflops or fp32) * 1e12
    if kind == "convolution":  # cuDNN uses TF32, matrices do not (trainers/step/backends.py); it has half the bf16 rate
        return max(fp32, gpu.bf16_tflops / 2) * 1e12
    return fp32 * 1e12


def efficiency(gpu: GpuProfile, kind: str, half: int = 1) -> float:
    """The part of the peak rate that kernels of a kind, other than attention, reach on a card, 0 to 1."""
    return matmul_efficiency(gpu) if kind == "matmul" and half else DEFAULT_EFFICIENCY


def attention_efficiency(gpu: GpuProfile, strategy: Strategy, job: Job, attention: Attention) -> Mapping[int, float]:
    """The part of the peak rate that attention reaches in 32 bits and in 16 (index 0 and 1). Forward and backward are
    mixed by their FLOPs: backward does five products, forward two."""
    runs = 1 if strategy.gradient_checkpointing == "none" else 3 if strategy.nested_checkpointing else 2
    reached = {}
    for half in (0, 1):
        forward, backward = _attention_passes(gpu, attention, half)
        mixed = (runs + 2.5) / (runs / forward + 2.5 / backward)
        reached[half] = forward if job.method == "sample" else mixed
    return reached


def _attention_passes(gpu: GpuProfile, attention: Attention, half: int) -> tuple[float, float]:
    """(forward, backward) efficiency of the kernel that runs; in 32 bits only the memory-efficient kernel does."""
    major, _ = gpu.capability
    size = int(attention.head_size <= SMALL_HEAD)
    flash = FLASH_2.get(major, FLASH_2_MMA)[size]
    if attention.kernel == "math":
        return MATH
    if gpu.vendor == "amd":
        return AOTRITON
    if not half or attention.kernel in EFFICIENT_KERNELS:
        return flash[0] * EFFICIENT[0], flash[1] * EFFICIENT[1]
    reached = flash
    if gpu.attention_tflops and attention.kernel == attention.plain:
        reached = (gpu.attention_tflops[0] / gpu.bf16_tflops, gpu.attention_tflops[1] / gpu.bf16_tflops)
    elif attention.kernel == "flash-3" and major == 9:
        reached = FLASH_3[size]
    elif attention.kernel == "cudnn" and major in CUDNN:
        reached = CUDNN[major][size]
    if attention.kernel == "cudnn" and attention.masked:
        return reached[0] * CUDNN_MASKED[0], reached[1] * CUDNN_MASKED[1]
    return reached


def matmul_efficiency(gpu: GpuProfile) -> float:
    """The part of the peak rate that the best matrix products in 16 bits reach."""
    if gpu.matmul_tflops:
        return gpu.matmul_tflops / (gpu.bf16_tflops or gpu.fp16_tflops)
    if "Laptop" in gpu.title:
        return MATMUL_LAPTOP
    if gpu.vendor == "amd":
        return DEFAULT_EFFICIENCY
    return MATMUL_GEFORCE if "GeForce" in gpu.title else MATMUL.get(gpu.capability, DEFAULT_EFFICIENCY)


def host_rate(gpu: GpuProfile, machine: Machine) -> float:
    """Bytes per second between a GPU and host RAM, one direction."""
    if machine.links and machine.links.host_gbs:
        return machine.links.host_gbs * 1e9
    if gpu.unified or machine.unified:  # the same memory reads and writes every byte
        return COPY_EFFICIENCY * gpu.bandwidth_gbs * 1e9 / 2
    return gpu.link_gbs * 1e9
