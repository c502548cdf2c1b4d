"""Step seconds: sums over a tape against its unfolded blocks, and the roofline's causes one at a time."""

from pathlib import Path

import pytest

import profiles
from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import grid, job_for
from planner.estimate.estimate import estimate
from planner.estimate.roofline import Traffic, attention_efficiency, efficiency, peak_flops, step_seconds
from planner.estimate.work import Attention, StepWork, Work, step_work, symbolic_work, total_flops, work_of
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Links, Machine, Strategy
from planner.tape.codec import read_tape
from planner.tape.format import KINDS, BlockRun, OperatorWork, Section, Tape, Template
from planner.tape.packs import stored
from planner.tape.parameter_table import FILE as PARAMETERS
from planner.tape.templates import kept_template
from tests.covering import covering

LAUNCH_SECONDS, RECOMPUTED, SLOW = (
    32e-6,
    1.7,
    66 / 42,
)  # one operator with its Python: fitted; tests/benchmarks/launches.py
COMPILED_LAUNCH_SECONDS = 7e-6  # meta-pytorch/autoparallel#146
BARE_LAUNCH_SECONDS = 5e-6  # pytorch#41383
GAP_SECONDS, GRAPH_GAP_SECONDS = 2.1e-6, 1.3e-6  # Hazy Research, "Look Ma, No Bubbles"
REACHED, USUAL = 0.79, 0.825  # pytorch/torchtitan#3828: 0.79 to 0.86
PRODUCTS, POINTWISE_KERNELS, PER_KERNEL = 1.05, 1.70, 1e-6  # an H200's kernels: docs/accuracy/seconds.md
COPY = 0.9  # H100: 3.0 of 3.35 TB/s
NVLINK = 0.8  # 20 % protocol overhead (NVIDIA/nccl-tests#212)
HOST_ADAM_SECONDS = 0.26e-9  # arXiv 2101.06840, table 4: 10e9 parameters in 2.57 s
DISK_BYTES_PER_SECOND = 3.2e9  # a drive on four lanes of PCIe 3

GRID = {"B": 1, "F": 21, "H": 30, "W": 52, "T": 512, "R": 16, "E": 0}
JOB = Job(model="wan2.1-t2v-1.3b", frames=81, height=480, width=832)
H100, RTX4090, T4 = (card_lookup.gpu(name) for name in ("h100-80gb", "rtx4090", "t4"))
ONE = Machine(gpu="h100-80gb")
STILL = Traffic()
MATMUL, POINTWISE, LAUNCHES = ("matmul", 1), ("pointwise", 0), ("kernels", 0)
WORK = StepWork(
    {MATMUL: Work(10**15, 10**9), POINTWISE: Work(0, 10**12), LAUNCHES: Work(1000, 0)},
    {POINTWISE: Work(0, 10**11), LAUNCHES: Work(100, 0)},
)
FOLDER = Path(__file__).parents[3] / "profiles" / "tapes"


def seconds(work=WORK, gpu=H100, machine=ONE, traffic=STILL, job=JOB, **strategy):
    return step_seconds(Configuration(job, Strategy(**strategy), machine), work, gpu, traffic)


def tiny_tape(depth, step=1):
    """One sweep whose templates differ, so that counting one of them wrongly shows."""
    templates = [
        Template(
            [],
            [
                OperatorWork(0, 1, 10**position, 2 * 10**position, (1, 0, 0, 0, 0, 0)),
                OperatorWork(4, 0, 1, 0, (0,) * 6),
            ],
        )
        for position in range(min(depth, 5))
    ]
    sweep = Section("forward", 0, templates, step)
    single = Section("backward", 0, templates[:1], block=-1)
    pieces = {"step": [sweep, single]}
    atoms = ("B", "F", "H", "W", "T", "R")
    return Tape("tiny", {}, {}, {}, atoms, {}, (), (BlockRun("blocks", 0, depth, depth),), (), (), pieces)


def test_each_kept_template_counts_once_per_block_that_uses_it():
    found = work_of(tiny_tape(30), "step", {**GRID, "B": 3})
    assert found[MATMUL] == Work(3 * (11_011 + 26 * 100 + 1), 6 * (11_011 + 26 * 100 + 1))
    assert found[LAUNCHES] == Work(31, 0)


@pytest.mark.parametrize("step", [1, -1])
def test_counts_replace_the_full_models_depth_in_either_direction(step):
    found = work_of(tiny_tape(30, step=step), "step", GRID, [6])
    assert found[MATMUL].flops == 11_011 + 2 * 100 + 1


def test_a_short_stack_uses_every_template_once():
    assert work_of(tiny_tape(3), "step", GRID)[MATMUL].flops == 111 + 1


@pytest.mark.parametrize("model", profiles.model_names())
def test_shipped_tapes_sum_to_what_their_blocks_do_one_by_one(model):
    """One test a model: a test a tape would be half the suite. And as many of its tapes as have each word of their
    names, at its place: what is summed does not depend on what an operator is."""
    tapes = sorted(path for path in stored(FOLDER / model) if path.name != PARAMETERS)
    for path in covering(tapes, lambda path: enumerate(path.name.split("-"))):
        tape = read_tape(path)
        grid = {**GRID, "B": 2, **tape.regime}
        for piece, sections in tape.pieces.items():
            assert work_of(tape, piece, grid) == block_by_block(tape, sections, grid), path.name


def block_by_block(tape, sections, grid):
    atoms = tape.values(grid)
    found = {}
    for section in sections:
        depth = tape.runs[section.run].count if section.step else 1
        for block in range(depth):
            for work in section.templates[kept_template(section, block, depth) if section.step else 0].work:
                factor = 1
                for atom, power in zip(atoms, work.exponents, strict=True):
                    factor *= atom**power
                cell = found.setdefault((KINDS[work.kind], work.half), [0, 0])
                cell[0] += work.flops * factor
                cell[1] += work.nbytes * factor
    return {kind: Work(*cell) for kind, cell in found.items()}


def test_wan_flops_are_those_of_the_architecture():
    """30 blocks of width 1536 and inner width 8960, 32,760 tokens: forward, recomputed forward, backward."""
    tape = read_tape(FOLDER / "wan2.1-t2v-1.3b" / "step-lora-half-fp32-autocast-full-one.json.gz")
    found = work_of(tape, "step", GRID)
    width, inner, tokens, text = 1536, 8960, 21 * 30 * 52, 512
    attention = 4 * width * tokens * (tokens + text) * 30
    linear = 2 * tokens * (6 * width**2 + 2 * width * inner) * 30
    assert found["attention", 1].flops == pytest.approx(4.5 * attention, rel=0.02)
    assert found[MATMUL].flops == pytest.approx(3 * linear, rel=0.02)


def test_symbolic_work_holds_for_every_shape():
    terms = symbolic_work(tiny_tape(30), "step")
    assert set(terms) == {("matmul", 1, (1, 0, 0, 0, 0, 0)), ("kernels", 0, (0,) * 6)}


def test_kernels_take_the_longer_of_arithmetic_and_memory():
    card = card_lookup.gpu("a100-80gb")
    expected = 10**15 / (0.859 * 312e12) + 1.1e12 / (COPY * card.bandwidth_gbs * 1e9)
    assert seconds(gpu=card).compute == pytest.approx(expected / USUAL)
    assert seconds(gpu=card).total == pytest.approx(expected / USUAL + 1100 * GAP_SECONDS)


def test_a_gh100s_kernels_are_slower_than_alone_by_what_they_are():
    products, pointwise = 10**15 / (0.803 * 989.4e12), 1.1e12 / (COPY * 3352e9)
    expected = PRODUCTS * products + POINTWISE_KERNELS * pointwise + 1100 * PER_KERNEL
    assert seconds().compute == pytest.approx(expected)
    assert seconds().total == pytest.approx(expected + 1100 * GAP_SECONDS)
    of_fp32 = StepWork({("matmul", 0): Work(10**15, 0)})
    assert seconds(of_fp32).compute == pytest.approx(10**15 / (0.75 * 66.9e12) / USUAL, rel=0.01)


def test_other_cards_are_not_taken_for_a_gh100():
    mi210 = card_lookup.gpu("mi210")  # gfx90a counts as 9.0, too
    pointwise = StepWork({POINTWISE: Work(0, 10**12), LAUNCHES: Work(1000, 0)})
    assert seconds(pointwise, gpu=mi210).compute == pytest.approx(1e12 / (COPY * mi210.bandwidth_gbs * 1e9) / USUAL)


def test_launches_count_only_where_the_gpu_waits_for_them():
    assert seconds().launch == pytest.approx(1000 * LAUNCH_SECONDS + 100 * BARE_LAUNCH_SECONDS)
    compiled = seconds(StepWork({MATMUL: Work(1, 1), LAUNCHES: Work(1000, 0)}), compile="blocks")
    assert compiled.launch == pytest.approx(1000 * COMPILED_LAUNCH_SECONDS)
    many = StepWork({**WORK.passes, LAUNCHES: Work(10**6, 0)})
    assert seconds(many).total == pytest.approx(10**6 * LAUNCH_SECONDS)
    assert seconds(many, compile="cudagraphs").launch == 0


def test_a_captured_step_waits_for_no_launches_and_its_kernels_stay_as_they_are():
    many = WORK._replace(passes={**WORK.passes, LAUNCHES: Work(10**6, 0)})
    captured = many._replace(captured=True)
    assert seconds(captured).launch == 0
    assert seconds(captured).compute == pytest.approx(seconds(many).compute)
    assert seconds(captured).total == pytest.approx(seconds(many).compute + (10**6 + 100) * GRAPH_GAP_SECONDS)


def test_launches_take_what_was_measured_on_this_machine():
    many = StepWork({**WORK.passes, LAUNCHES: Work(10**6, 0)})
    assert seconds(many, H100.replace(launch_us=20)).total == pytest.approx(20)
    assert seconds(many, H100.replace(launch_us=20), compile="blocks").launch < 20


@pytest.mark.parametrize(
    ("optimizer", "step", "grows"), [("adamw", "foreach", False), ("adamw", "loop", True), ("prodigy", "foreach", True)]
)
def test_what_steps_one_by_one_launches_for_every_parameter(optimizer, step, grows):
    configuration = Configuration.of(JOB, Strategy(optimizer=optimizer, optimizer_step=step), ONE)
    known = load_facts(configuration)
    run = lay_out(configuration, known, grid(known.model, JOB))
    recorded = work_of(known.optimizer, "optimizer", run.grid, [stack.recorded for stack in known.optimizer.runs])
    times = run.optimizer_scale if grows else 1
    assert times == 1 or times > 2
    assert step_work(run).optimizer[LAUNCHES].flops == round(times * recorded[LAUNCHES].flops)


def test_accumulation_repeats_the_passes_and_not_the_optimizer():
    once, optimizer = seconds(), seconds(StepWork({}, WORK.optimizer))
    four = seconds(gradient_accumulation=4)
    assert four.compute - optimizer.compute == pytest.approx(4 * (once.compute - optimizer.compute))
    assert total_flops(WORK, Strategy(gradient_accumulation=4)) == 4 * 10**15


def test_the_optimizer_step_is_shared_or_leaves_the_gpu():
    eight = Machine(gpu="h100-80gb", gpus=8)
    bare = seconds(StepWork(WORK.passes)).compute
    whole = seconds(machine=eight, sharding="ddp").compute - bare
    assert seconds(machine=eight, sharding="zero-1").compute - bare == pytest.approx(whole / 8)
    assert seconds(machine=eight, sharding="zero-2", offload_optimizer="cpu").compute == bare
    busy = seconds(traffic=Traffic(host_parameters=10**9))
    assert busy.total == pytest.approx(seconds().total + 1e9 * HOST_ADAM_SECONDS)
    swapped = seconds(traffic=Traffic(disk_bytes=10**11))
    assert swapped.total == pytest.approx(seconds().total + 1e11 / DISK_BYTES_PER_SECOND)


def test_transfers_hide_behind_kernels_or_add_to_them():
    nbytes = round(100 * 55e9)
    beside = seconds(traffic=Traffic(host_backward_bytes=nbytes))
    assert beside.total == pytest.approx(100, rel=1e-3)
    waiting = seconds(traffic=Traffic(host_waiting_bytes=nbytes))
    assert waiting.total == pytest.approx(100 + seconds().total)
    assert waiting.transfer == beside.transfer
    assert beside.high == pytest.approx(waiting.high, rel=0.03)


@pytest.mark.parametrize(("beside", "shown"), [(1.0, 0.0), (0.5, 0.3), (0.1, 0.7)])
def test_copies_hide_behind_the_blocks_of_their_own_pass(beside, shown):
    """Passes of 1 and 2 s. Copies of 0.8 s in the first hide behind the blocks that run meanwhile; the other pass has
    none to hide."""
    forward = {MATMUL: Work(round(0.803 * 989.4e12 / PRODUCTS), 0)}
    work = StepWork({MATMUL: Work(3 * forward[MATMUL].flops, 0)}, {}, forward)
    traffic = Traffic(host_forward_bytes=round(0.8 * 55e9), host_beside=beside)
    bandwidth = 0.8 * 55e9 / (COPY * 3352e9) / USUAL  # what is copied is written, too
    told = seconds(work, traffic=traffic).total
    assert told == pytest.approx(3 + bandwidth + max(0.0, shown - beside * bandwidth), abs=1e-3)
    assert told > seconds(work).total


def test_what_a_checkpoint_runs_again_is_slower_to_launch():
    """Backward launches its own operators from C++, and those of a checkpoint's forward from Python."""
    many = {LAUNCHES: Work(10**5, 0)}
    again = seconds(StepWork(many, recomputed=10**4))
    assert again.launch == pytest.approx((10**5 + (RECOMPUTED - 1) * 10**4) * LAUNCH_SECONDS)
    assert seconds(StepWork(many, recomputed=10**4), compile="blocks").launch == pytest.approx(
        10**5 * COMPILED_LAUNCH_SECONDS
    )


def test_each_checkpointed_block_runs_its_forward_again():
    def recomputed(**strategy):
        configuration = Configuration.of(JOB, Strategy(**strategy), Machine(gpu="h100-80gb", host_ram=2**37))
        known = load_facts(configuration)
        return step_work(lay_out(configuration, known, grid(known.model, JOB)))

    whole, half = (
        recomputed(**strategy)
        for strategy in (
            {"gradient_checkpointing": "full"},
            {"gradient_checkpointing": "partial", "checkpointed_blocks": 15},
        )
    )
    assert recomputed(gradient_checkpointing="none").recomputed == 0
    assert half.recomputed == pytest.approx(whole.recomputed / 2, abs=1)
    assert 0.9 < whole.recomputed / whole.forward[LAUNCHES].flops < 1


def test_the_high_end_is_slow_kernels_or_slow_launches_and_nothing_hidden():
    assert seconds().high == pytest.approx(seconds().compute * USUAL / REACHED + 1100 * GAP_SECONDS)
    many = StepWork({**WORK.passes, LAUNCHES: Work(10**6, 0)})
    assert seconds(many).high == pytest.approx(10**6 * LAUNCH_SECONDS * SLOW)
    graphs = seconds(many, compile="cudagraphs")
    fused = 10**6 // 1000  # the matrix products move a thousandth of what pointwise work moves unfused
    assert graphs.high == pytest.approx(graphs.compute * USUAL / REACHED + fused * GRAPH_GAP_SECONDS)


def test_the_cpu_runs_ahead_of_the_gpu_and_never_behind():
    """Kernels of 1 s in each pass; 100,000 launches, 3.2 s and gaps of 0.21 s, in one of them."""
    busy, many = {MATMUL: Work(round(0.803 * 989.4e12 / PRODUCTS), 0)}, {LAUNCHES: Work(10**5, 0)}
    launched = 10**5 * LAUNCH_SECONDS
    both = {MATMUL: Work(2 * busy[MATMUL].flops, 0), **many}
    assert seconds(StepWork(both, {}, {**busy, **many})).total == pytest.approx(launched + 1)
    assert seconds(StepWork(both, {}, busy)).total == pytest.approx(
        launched
    )  # backward's kernels wait for its last launch
    assert seconds(StepWork(both)).total == pytest.approx(launched)
    assert seconds(StepWork(both, {}, {**busy, **many}), gradient_accumulation=2).total == pytest.approx(
        2 * launched + 1
    )


def test_small_heads_are_slower_where_that_was_measured():
    for card, slower in ((H100, True), (RTX4090, False)):
        kernel = "cudnn" if card is H100 else "flash"
        of_64, of_128 = (attention_reaches(card, kernel, size) for size in (64, 128))
        assert (of_64 < 0.8 * of_128) is slower
    sizes = {name: lookup.model(name).head_size for name in ("sd3.5-medium", "wan2.1-t2v-14b", "sd1.5", "sdxl")}
    assert sizes == {"sd3.5-medium": 64, "wan2.1-t2v-14b": 128, "sd1.5": 40, "sdxl": 64}


def sent(gpu, traffic, strategy=None, **machine):
    """Seconds of a GPU's links."""
    strategy = strategy or {}
    return seconds(gpu=gpu, machine=Machine(gpu=gpu.name, **machine), traffic=traffic, **strategy).transfer


def test_collectives_take_the_slowest_link():
    def transfer(gpu, **machine):
        return sent(gpu, Traffic(gpu_bytes=10**9), **machine)

    assert transfer(H100) == 0
    assert transfer(H100, gpus=8) == pytest.approx(1 / (NVLINK * 450))
    assert transfer(RTX4090, gpus=2) == pytest.approx(1 / 12.5)
    assert transfer(RTX4090, gpus=2, links=Links(gpu_gbs=50.0)) == pytest.approx(1 / 50)


def test_a_ring_over_nodes_has_the_adapters_of_all_its_gpus():
    """8 adapters of 100 Gbit/s reach 75 GB/s (NVIDIA/nccl#495), 4 of 200 Gbit/s 95 (nccl-tests#252)."""

    def transfer(gpu, **machine):
        return sent(gpu, Traffic(gpu_bytes=10**9), **machine)

    assert transfer(H100, gpus=8, nodes=2) == pytest.approx(1 / 200)
    assert transfer(H100, gpus=8, nodes=2, links=Links(node_gbs=12.5)) == pytest.approx(1 / 100)
    assert transfer(H100, gpus=8, nodes=2, links=Links(node_gbs=50.0)) == pytest.approx(1 / (NVLINK * 450))
    assert transfer(H100, gpus=1, nodes=2) == pytest.approx(1 / 25)
    assert transfer(RTX4090, gpus=2, nodes=2) == pytest.approx(1 / 12.5)  # they have one adapter together


def test_copies_of_a_model_gather_inside_nodes_and_sum_between_them():
    copies = {"sharding": "fsdp", "fsdp_replicas": 2}
    both = Traffic(gpu_bytes=36 * 10**9, replica_bytes=5 * 10**9)
    # 36 GB over NVLink take 0.1 s, 5 GB through the GPU's own adapter 0.2 s, at the same time.
    assert sent(H100, both, copies, gpus=8, nodes=2) == pytest.approx(0.2)
    assert sent(H100, both._replace(replica_bytes=10**9), copies, gpus=8, nodes=2) == pytest.approx(0.1)
    # On one node all of it is NVLink's, and beside PCIe an adapter shares the GPU's only link.
    assert sent(H100, both, copies, gpus=8) == pytest.approx(41 / (NVLINK * 450))
    assert sent(RTX4090, both, copies, gpus=2, nodes=2) == pytest.approx(36 / 12.5 + 5 / 6.25)
    # Four copies on two nodes: two GPUs of a node are in one ring, and have two adapters.
    four = {"sharding": "fsdp", "fsdp_replicas": 4}
    assert sent(H100, Traffic(replica_bytes=10**9), four, gpus=8, nodes=2) == pytest.approx(1 / 50)


def test_gpus_that_share_a_sample_exchange_inside_their_node():
    waiting = Traffic(gpu_waiting_bytes=10**9)
    assert sent(H100, waiting, {"context_parallel": 8}, gpus=8, nodes=2) == pytest.approx(1 / (NVLINK * 450))
    assert sent(H100, waiting, {"context_parallel": 16}, gpus=8, nodes=2) == pytest.approx(1 / 25)


def test_host_link_is_memory_itself_when_unified():
    traffic = Traffic(10**9)
    assert seconds(machine=Machine(gpu="x", unified=True), traffic=traffic).transfer == pytest.approx(2 / (COPY * 3352))
    known = Machine(gpu="x", links=Links(host_gbs=10.0))
    assert seconds(machine=known, traffic=traffic).transfer == pytest.approx(0.1)


def test_peak_rates_follow_the_dtype_that_runs():
    assert peak_flops(H100, Strategy(), "matmul", 1) == pytest.approx(989.4e12)
    assert peak_flops(H100, Strategy(), "matmul", 0) == pytest.approx(66.9e12)
    assert peak_flops(T4, Strategy(), "matmul", 1) == pytest.approx(T4.fp32_tflops * 1e12)
    assert peak_flops(T4, Strategy(autocast="fp16"), "matmul", 1) == pytest.approx(T4.fp16_tflops * 1e12)
    half = Strategy(autocast="none", compute_dtype="fp16")
    assert peak_flops(T4, half, "matmul", 1) == pytest.approx(T4.fp16_tflops * 1e12)
    assert peak_flops(H100, Strategy(), "convolution", 0) == pytest.approx(989.4e12 / 2)


FORWARD_ONLY = Job(model="m", method="sample", frames=1, height=64, width=64)


def attention_reaches(card, kernel, head_size=128, job=JOB, half=1, **strategy):
    return attention_efficiency(card, Strategy(**strategy), job, Attention(head_size, kernel))[half]


@pytest.mark.parametrize(
    ("card", "attention", "of_128", "of_64"),
    [
        ("h100-80gb", "flash", 370 / 989, 324 / 989),  # TFLOP/s over the data sheet's: arXiv 2407.08608, figures 5, 6
        ("h100-80gb", "flash-3", 648 / 989, 497 / 989),
        ("h100-80gb", "cudnn", 595 / 989, 413 / 989),
        ("h100-80gb", "math", 0.15, 0.15),
        ("b200", "cudnn", 0.71 / 1.3, 0.71 / 1.3 * 413 / 595),  # FlashAttention-4 is up to 1.3 times faster
        ("a100-80gb", "flash", 0.73, 0.73),  # arXiv 2307.08691, section 4.1
        ("rtx4090", "efficient", 0.73 * 43.4 / 53.1, 0.73 * 43.4 / 53.1),  # Dao-AILab/flash-attention#416
    ],
)
def test_attention_reaches_in_forward_what_was_published(card, attention, of_128, of_64):
    rates = [attention_reaches(card_lookup.gpu(card), attention, size, FORWARD_ONLY) for size in (128, 64)]
    assert rates == pytest.approx([of_128, of_64], rel=0.015)


def test_backward_of_attention_is_five_products_to_forward_s_two():
    """H100's cuDNN: 0.60 forward and 0.52 backward of the peak rate; a checkpointed block runs forward twice."""
    assert attention_reaches(H100, "cudnn") == pytest.approx(3.5 / (1 / 0.60 + 2.5 / 0.52))
    full = attention_reaches(H100, "cudnn", gradient_checkpointing="full")
    assert full == pytest.approx(4.5 / (2 / 0.60 + 2.5 / 0.52))


def test_matmuls_reach_what_was_published():
    """Of stas00/ml-engineering's table; GeForce cards run above their quoted clock; else torch's own assumption."""
    cards = {
        "a100-80gb": 267.9 / 312,
        "h100-80gb": 794.5 / 989,
        "b200": 1745 / 2250,
        "rtx4090": 0.96,
        "l40s": 0.75,
    }
    reached = {name: efficiency(card_lookup.gpu(name), "matmul") for name in cards}
    assert reached == pytest.approx(cards, rel=0.002)
    assert efficiency(H100, "convolution") == 0.75


def test_attention_kernels_rank_as_published():
    order = [attention_reaches(H100, name) for name in ("flash-3", "cudnn", "flash", "efficient", "math")]
    assert order == sorted(order, reverse=True)
    assert attention_reaches(RTX4090, "flash") == attention_reaches(RTX4090, "flash-3")
    assert attention_reaches(H100, "cudnn", half=0) == attention_reaches(H100, "efficient")
    assert attention_reaches(H100, "cudnn", gradient_checkpointing="full") > attention_reaches(H100, "cudnn")
    assert attention_reaches(H100, "cudnn", job=FORWARD_ONLY) == pytest.approx(0.6)


def test_a_measured_rate_is_that_of_the_kernel_that_was_measured():
    """`vplan calibrate` measures attention without masks: cuDNN on an H100, which other kernels leave as it was."""
    card = H100.replace(attention_tflops=(500.0, 400.0))
    measured = attention_efficiency(card, Strategy(), FORWARD_ONLY, Attention(128, "cudnn", "cudnn"))[1]
    assert measured == pytest.approx(500 / H100.bf16_tflops)
    masked = attention_efficiency(card, Strategy(), FORWARD_ONLY, Attention(128, "efficient", "cudnn"))[1]
    assert masked == attention_reaches(H100, "efficient", job=FORWARD_ONLY)


MASKED = "hunyuan-video"
UNMASKED = "wan2.1-t2v-1.3b"


@pytest.mark.parametrize(("model", "os", "named"), [(MASKED, "linux", "efficient"), (UNMASKED, "windows", "efficient")])
def test_attention_is_timed_as_the_kernel_that_the_answer_names(model, os, named):
    """Masks and Windows leave the memory-efficient kernel, which is as slow unasked as when it is asked for."""
    job = job_for(lookup.model(model), {})

    def told(**strategy):
        machine = Machine(gpu="rtx4090", host_ram=2**37, os=os)
        configuration = Configuration.of(job, Strategy(gradient_checkpointing="full", **strategy), machine)
        return estimate(configuration, load_facts(configuration))

    unasked = told()
    assert unasked.attention_kernel == named
    assert unasked.step_seconds == told(attention=named).step_seconds


@pytest.mark.parametrize("name", card_lookup.gpu_names())
def test_every_card_has_a_finite_time(name):
    card = card_lookup.gpu(name)
    everything = StepWork({(kind, half): Work(10**15, 10**12) for kind in KINDS[:-1] for half in (0, 1)})
    assert 0 < seconds(everything, card).total < 3600
    for kind, half in everything.passes:
        # A measured rate may lie above the sheet's: cards run above the clock that they are rated at.
        assert 0 < efficiency(card, kind, half) < (1.1 if card.matmul_tflops else 1)
    for kernel in ("cudnn", "flash", "efficient", "math"):
        assert all(0 < attention_reaches(card, kernel, half=half) < 1 for half in (0, 1))


def test_a_compiler_removes_pointwise_traffic_and_never_adds_any():
    assert seconds(compile="blocks").compute < seconds().compute
    assert seconds(compile="blocks").launch < seconds().launch
    dense = StepWork({MATMUL: Work(10**15, 10**12), POINTWISE: Work(0, 10**9)})
    assert seconds(dense, compile="full").compute == seconds(dense).compute


def laid_out(configuration):
    known = load_facts(configuration)
    return lay_out(configuration, known, grid(known.model, configuration.job))


@pytest.mark.parametrize("optimizer, step, at_least, at_most", [
    ("adamw", "foreach", 88, 96),  # 80 of AdamW over lists, 8 to clip, 4 for the norm and 4 more of the root
    ("adamw", "fused", 36, 44),  # 28, 8 and 4
    ("adamw-8bit", "foreach", 24, 32),  # 16, 8 and 4
])  # fmt: skip
def test_an_optimizer_step_moves_the_bytes_of_its_operators(optimizer, step, at_least, at_most):
    """Per fp32 parameter; those that only change their arguments are on no tape."""
    job = Job(model="wan2.1-t2v-1.3b", method="full", frames=17, height=480, width=832)
    strategy = Strategy(weights_dtype="fp32", autocast="bf16", optimizer=optimizer, optimizer_step=step)
    configuration = Configuration.of(job, strategy, Machine(gpu="h200"))
    run = laid_out(configuration)
    moved = sum(amount.nbytes for (kind, _), amount in step_work(run).optimizer.items() if kind == "pointwise")
    parameters = sum(run.sizes[buffer] for buffer in run.named("gradient").values()) / 4
    assert at_least <= moved / parameters <= at_most


def test_a_mask_slows_cudnn_down_as_it_was_measured():
    """HunyuanVideo on an H200: 395 and 307 TFLOP/s, where 599 and 529 are reached without a mask."""
    h200 = card_lookup.gpu("h200")
    for masked, expected in ((False, 0.60), (True, 0.40)):
        attention = Attention(128, "cudnn", "cudnn", masked)
        sample = JOB.replace(method="sample")
        assert attention_efficiency(h200, Strategy(), sample, attention)[1] == pytest.approx(expected, abs=0.01)
    for model, masked in (("hunyuan-video", True), ("wan2.1-t2v-1.3b", False)):
        configuration = Configuration.of(Job(model=model, frames=17, height=480, width=768), Strategy(), ONE)
        assert step_work(laid_out(configuration)).attention.masked is masked


def test_a_mask_of_all_pairs_is_read_beside_no_product_of_its_own():
    """Its tiles are waited for (mem_eff_attention/kernel_forward.h), where one row stays in the card's cache."""
    passes = {("attention", 1): Work(10**14, 10**11)}
    one_row, pairs, unread = (
        seconds(StepWork(work, attention=Attention(128, "cudnn", "cudnn", True, over_pairs))).compute
        for work, over_pairs in ((passes, False), (passes, True), ({("attention", 1): Work(10**14, 0)}, True))
    )
    assert one_row == unread
    assert pairs - unread == pytest.approx(1.02 * 10**11 / (COPY * 3352e9))


@pytest.mark.parametrize(("model", "over_pairs"), [
    ("hunyuan-video-1.5", True),  # transformer_hunyuan_video15.py makes the mask in each block's attention
    ("ideogram-4", True),  # its mask is made once
    ("hunyuan-video", False),  # one row a sample, beside a matrix in the refiner of its text
    ("ernie-image", False),
    ("wan2.1-t2v-1.3b", False),
])  # fmt: skip
def test_models_whose_mask_is_a_matrix(model, over_pairs):
    configuration = Configuration.of(job_for(lookup.model(model), {}), Strategy(), ONE)
    assert step_work(laid_out(configuration)).attention.over_pairs is over_pairs
