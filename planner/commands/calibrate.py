"""`vplan calibrate`: how much memory this machine's GPU takes beyond tensors and how fast it is, and a short grid of
probes."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import psutil
from click.core import ParameterSource

import profiles
from planner.catalog import card_lookup, lookup
from planner.commands import USAGE
from planner.commands._shared.verb import DONE, FiniteRange, Verb, examples, json_option, show, table
from planner.commands.probe import FAILED, keep
from planner.errors import VplanError, quoted
from planner.estimate.roofline import LAUNCH_SECONDS
from planner.evidence import calibration as calibration_files
from planner.evidence.calibration import Calibration, calibrated
from planner.evidence.from_ledger import measurements_of
from planner.evidence.ledger import Ledger, default_path
from planner.evidence.measurement import ProbeRow, Setup, is_of_a_gpu
from planner.file_writing import write_file
from planner.hardware import doctor
from planner.probe.fork_server import ForkServer
from planner.probe.grid import DEFAULT_MODEL, TINY, plans
from planner.probe.probe import RealRunner, measure_device
from planner.probe.worker_python import WorkerPython
from planner.spec.job import Machine
from planner.spec.plan import Plan
from planner.terminal import echo
from planner.units import MIB, format_gib, gib

if TYPE_CHECKING:
    from rich.console import Console

    from planner.catalog.card_profiles import GpuProfile
    from planner.commands._shared.grid_campaign import Where

STEPS = 3
SHARED = frozenset({
    "allocated_after_step_bytes", "context_bytes", "device_bytes_by_rank", "device_hertz", "first_step_seconds",
    "missing", "others_bytes", "phases", "step_seconds", "total_bytes",
})  # fmt: skip
"""Details of a row that say nothing about the owner of the machine."""


def _grid_options(function: Any) -> Any:
    """The options that belong to --grid."""
    kind = {"cls": GridOption}
    for option in reversed((
        click.option("--grid", metavar="FILE", help="Measure only the plans of a grid.", **kind),
        click.option("-o", "--output", metavar="ROWS.jsonl", help="File to append each row to.", **kind),
        click.option("--max-minutes", type=FiniteRange(0.1, 10_000), metavar="MINUTES",
                     help="Start no plan that would end after this many minutes.", **kind),
        click.option("--dry-run", is_flag=True, help="Print the order and expected seconds; measure nothing.", **kind),
        click.option("--retry", is_flag=True, help="Repeat rows that crashed or timed out.", **kind),
        click.option("--histories", metavar="DIR",
                     help="Run plans that are off by 1 % allocated or 3 % device again, to record their "
                     "history for `vplan accuracy --history DIR/ID.json`.", **kind),
        click.option("--runner", "runner_name", type=click.Choice(["real", "rehearse", "simulate"]), default="real",
                     help="rehearse: use no GPU, but a virtual one, for memory alone; simulate: a simulated machine "
                     "drawn from --seed.  [default: real]", **kind),
        click.option("--gpu", metavar="CARD", help="Card to rehearse on or to simulate.", **kind),
        click.option("--python", metavar="PATH", help="Python with the CUDA wheel of PyTorch, for rehearse.  "
                     "[default: VPLAN_CUDA_PYTHON]", **kind),
        click.option("--seed", type=click.IntRange(0, 2**31), default=0, metavar="N",
                     help="Seed of the simulated machine.", **kind),
    )):  # fmt: skip
        function = option(function)
    return function


class GridOption(click.Option):
    """An option in the help section of grids."""

    section = "Grids"


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan calibrate",
        "vplan calibrate wan2.1-t2v-14b flux.1-dev",
        "vplan calibrate --no-probes --share rows.jsonl",
        "vplan calibrate --grid one-gpu -o rows.jsonl --max-minutes 30",
        "vplan calibrate --grid one-gpu -o rows.jsonl --runner rehearse --gpu h100",
        "vplan calibrate --grid one-gpu -o rows.jsonl --runner simulate --gpu h100",
    ),
)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--probes/--no-probes", default=True, help="Probe a few plans of each MODEL.  [default: probes]")
@click.option(
    "--time-limit",
    type=click.IntRange(1, 86_400),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="Kill a probe after this many seconds.",
)
@click.option("--share", metavar="FILE", help="Write this GPU's measurements to FILE, for sharing.")
@_grid_options
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    help="cpu is a trial run at a tiny size: no GPU is measured.  [default: cuda]",
)
@json_option
def command(
    models: tuple[str, ...],
    probes: bool,
    time_limit: int,
    share: str | None,
    device: Literal["cuda", "cpu"],
    as_json: bool,
    **grid: Any,
) -> int:
    """Measure this machine's GPU to improve estimates for it (a few minutes).

    First the memory a process uses besides tensors (CUDA context, kernels, workspaces), then the speed of matrix
    products, attention and copies, and the CPU's time to launch an operator; `--gpu auto` plans with these numbers.
    Then a short grid of probes of MODEL (by default a small one), which improve estimates of that model on such a card.
    Everything is kept in your data folder, per GPU, driver and torch version.

    With --grid, only the plans of a grid are measured (a bundled name, or a file), one process each, the most
    informative per second first. Each row is appended to ROWS.jsonl at once, and the same command resumes where it
    stopped. `vplan accuracy ROWS.jsonl` shows how close the estimates are.
    """
    _refuse_mixed(grid["grid"] is not None)
    if grid["grid"] is not None:
        return _measure_grid(device, time_limit, as_json, grid)
    names = [lookup.model(name).name for name in models or (DEFAULT_MODEL,)]
    card = None if device == "cpu" else _card()
    if share is not None and Path(share).is_dir():
        raise VplanError(f"--share {quoted(share)} is a folder", "name a file, as --share rows.jsonl")
    if share is not None and not Path(share).absolute().parent.is_dir():
        raise VplanError(f"there is no folder for --share {quoted(share)}", "create it, or choose another file")
    echo("measuring the GPU ...", err=True)
    calibration = Calibration.read(measure_device(device), "what the device told")
    path = calibration_files.write(calibration)
    rows = list(_probe(_plans(names, card), device, time_limit)) if probes else []
    shared = _share(share, calibration) if share is not None else None
    answer: dict[str, Any] = {
        "calibration": calibration.to_json(),
        "path": str(path),
        "probes": [row.to_json() for row in rows],
        "corrections": {name: list(measurements_of(name, card).correction.words) for name in names} if card else {},
        "shared": shared,
    }
    show(answer, as_json, lambda console: _render(console, answer, calibration, card, rows))
    return FAILED if any(row.measured.outcome in ("crash", "timeout") for row in rows) else DONE


def _refuse_mixed(grid: bool) -> None:
    """Raises a VplanError for options that only apply with --grid, or only without it."""
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        if isinstance(option, GridOption) and not grid:
            raise VplanError(f"{option.opts[-1]} needs --grid", "add --grid one-gpu, or leave it out", USAGE)
        if grid and name in ("models", "probes", "share"):
            word = "MODEL" if name == "models" else f"--{name}"
            raise VplanError(f"{word} cannot be used with --grid, which has its own plans", f"leave out {word}", USAGE)


def _measure_grid(device: Literal["cuda", "cpu"], time_limit: int, as_json: bool, typed: dict[str, Any]) -> int:
    from planner.commands._shared.grid_campaign import GridOptions, Where, measure

    options = GridOptions(
        grid=str(profiles.grid(typed["grid"]) or typed["grid"]), output=typed["output"],
        max_minutes=typed["max_minutes"], dry_run=typed["dry_run"], retry=typed["retry"],
        histories=typed["histories"], time_limit=time_limit,
    )  # fmt: skip
    options.check()
    if typed["python"] is not None and typed["runner_name"] != "rehearse":
        raise VplanError("--python is for rehearsals", "add --runner rehearse, or leave it out", USAGE)
    if typed["runner_name"] != "real":
        with contextlib.ExitStack() as stack:
            return measure(options, _unreal(typed, stack), as_json)
    if typed["gpu"] is not None:
        raise VplanError("--gpu is for simulated runs and rehearsals; a grid is measured on this machine's card",
                         "add --runner rehearse or simulate, or leave it out", USAGE)  # fmt: skip
    card = None if device == "cpu" else _card()
    memory = doctor.host_ram()
    torch = doctor.torch_release()
    cards = len(doctor.visible()[1])
    machine = Machine(gpu="24GB", torch=torch)
    if card is not None:
        machine = machine.replace(gpu=card.name, gpus=cards, unified=card.unified)
    with contextlib.ExitStack() as stack:
        forks = device == "cuda" and sys.platform == "linux"
        server = stack.enter_context(ForkServer(sys.executable)) if forks else None
        command = f"vplan calibrate --grid {Path(options.grid).name}"
        runner = RealRunner(device=device, command=command, profiles=True, python=WorkerPython(server=server))
        return measure(options, Where(runner, machine, memory["limit_bytes"] or memory["total_bytes"], device), as_json)


def _unreal(typed: dict[str, Any], stack: contextlib.ExitStack) -> Where:
    """The virtual or simulated machine to measure on. ``stack`` ends the processes it starts."""
    from planner.commands._shared.grid_campaign import Where
    from planner.rehearsal.cards import MOST_CARDS

    machine = Machine(gpu=card_lookup.parse_gpus(typed["gpu"] or "h100-80gb")[1].name, gpus=MOST_CARDS)
    if typed["runner_name"] == "simulate":
        from planner.probe.simulated import SimulatedRunner

        return Where(SimulatedRunner(typed["seed"]), machine, None, "none")
    from planner.rehearsal.probe_runner import RehearsalRunner, cuda_interpreter, torch_release

    interpreter = cuda_interpreter(typed["python"])
    command = f"vplan calibrate --grid {Path(typed['grid']).name} --runner rehearse"
    runner = RehearsalRunner(
        interpreter=interpreter,
        command=command,
        server=stack.enter_context(ForkServer(interpreter.path)),
        say=lambda line: echo(line, err=True),
    )
    # What waits in host RAM is really written there: a virtual card holds only what is on it.
    available = psutil.virtual_memory().available
    return Where(runner, machine.replace(torch=torch_release(interpreter)), available, "none")


def _card() -> GpuProfile:
    """The card to measure, as the catalogue lists it."""
    driver, cards = doctor.visible()
    works = "`vplan estimate` and `vplan suggest` need none; `--device cpu` tries this out at a tiny size"
    if driver["error"] or not cards:
        raise VplanError(f"calibrate needs a GPU; NVML reports: {driver['error'] or 'there is none'}", works)
    known = cards[0]["known_as"]
    if known is None:
        fault = f"{cards[0]['name'] or 'this card'} is not in the catalogue, so there is nothing to correct"
        raise VplanError(fault, f"give it as memory (--gpu 24GiB); {works}")
    return card_lookup.gpu(known)


def _plans(names: Sequence[str], card: GpuProfile | None) -> list[Plan]:
    fitting = [plan for name in names for plan in plans(name, card)]
    if not fitting:
        echo("no plan of the grid fits this card: nothing is probed", err=True)
    return fitting


def _probe(grid: Sequence[Plan], device: Literal["cuda", "cpu"], time_limit: int) -> Iterator[ProbeRow]:
    """Measures plans one after another; finished ones are kept, whatever ends the rest."""
    ledger = Ledger(default_path())
    runner = RealRunner(device=device, config=TINY if device == "cpu" else None, command="vplan calibrate")
    for number, plan in enumerate(grid, start=1):
        job = plan.job
        what = f"{job.model}, {job.frames} frames of {job.height}x{job.width}, "
        what += f"checkpointing {plan.strategy.gradient_checkpointing}"
        echo(f"[{number}/{len(grid)}] {what} ...", err=True)
        row = runner.run(plan, steps=STEPS, time_limit=time_limit)
        keep(ledger, row)
        yield row


def _share(path: str, calibration: Calibration) -> int:
    """Writes the rows of this GPU, driver and torch for bundled models; returns their number."""
    bundled = profiles.model_names()
    rows = [row for row in Ledger(default_path()).rows() if Setup.of(row.env) == calibration.setup and is_of_a_gpu(row)]
    lines = [json.dumps(_without_owner(row, calibration).to_json()) for row in rows if row.job.model in bundled]
    try:
        write_file(Path(path), "".join(line + "\n" for line in lines))
    except OSError as error:
        raise VplanError(f"cannot write {quoted(path)}: {error.strerror}", "choose another file") from None
    return len(lines)


def _without_owner(row: ProbeRow, calibration: Calibration) -> ProbeRow:
    """A row without paths, logs and the typed command."""
    details = {name: value for name, value in row.details.items() if name in SHARED}
    memory = {"outside_bytes": calibration.outside_bytes, "workspaces": calibration.workspaces}
    details["calibration"] = {**memory, **calibration.rates.to_json()}
    return row.replace(details=details, env=row.env.replace(command="vplan probe"))


def _render(
    console: Console,
    answer: dict[str, Any],
    calibration: Calibration,
    card: GpuProfile | None,
    rows: Sequence[ProbeRow],
) -> None:
    title = f"{calibration.gpu}, driver {calibration.driver}, torch {calibration.torch}"
    console.print(title, style="bold", markup=False)
    here = calibrated(card, calibration) if card else None
    console.print(table(("", ">measured", ">listed"), list(_numbers(calibration, card, here))), "")
    if rows:
        console.print(table(("probe", "outcome", ">device GiB", ">s/step"), [_cells(row) for row in rows]), "")
    for words in answer["corrections"].values():
        for line in words:
            console.print(line, markup=False)
    used = "; `--gpu auto` uses it" if card else ""
    console.print(f"saved to {answer['path']}{used}", markup=False, soft_wrap=True)
    if answer["shared"] is not None:
        console.print(f"{answer['shared']} measurements written for sharing")


def _numbers(calibration: Calibration, card: GpuProfile | None, here: GpuProfile | None) -> Iterator[list[str]]:
    """Measured numbers next to listed ones, one per line."""

    def listed(value: float | None, unit: str) -> str:
        return "-" if value is None else f"{value:.4g} {unit}"

    rates = calibration.rates
    context = None if calibration.outside_bytes is None else _mib(calibration.outside_bytes)
    yield ["context and kernels", context or "-", _mib(card.context_bytes) if card else "-"]
    gives = None if calibration.total_bytes is None else format_gib(calibration.total_bytes)
    yield ["gives", gives or "-", format_gib(card.allocatable_bytes) if card else "-"]
    for name, value in calibration.workspaces.items():
        if value:
            yield [f"workspace of {name}", _mib(value), "-"]
    yield [
        "matmul in bf16",
        f"{rates.matmul_flops_per_second / 1e12:.4g} TFLOP/s",
        listed(card.bf16_tflops if card else None, "TFLOP/s at most"),
    ]
    forward, backward = rates.attention_forward_flops_per_second, rates.attention_backward_flops_per_second
    yield ["attention, forward and backward", f"{forward / 1e12:.4g} and {backward / 1e12:.4g} TFLOP/s", "-"]
    copy = listed(card.bandwidth_gbs if card else None, "GB/s at most")
    yield ["memory", f"{rates.copy_bytes_per_second / 1e9:.4g} GB/s", copy]
    if calibration.launch_seconds:
        took, usual = (f"{seconds * 1e6:.3g} us" for seconds in (calibration.launch_seconds, LAUNCH_SECONDS))
        yield ["CPU time of an operator", took, usual]
    link = f"{rates.to_device_bytes_per_second / 1e9:.4g} and {rates.to_host_bytes_per_second / 1e9:.4g} GB/s"
    yield ["to the device and back", link, listed(card.link_gbs if card else None, "GB/s")]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"


def _cells(row: ProbeRow) -> list[str]:
    seen = row.measured
    size = "-" if seen.device_bytes is None else f"{gib(seen.device_bytes):.2f}"
    seconds = "-" if seen.step_seconds is None else f"{seen.step_seconds:.2f}"
    name = f"{row.job.model} {row.job.frames} frames, checkpointing {row.strategy.gradient_checkpointing}"
    return [name, seen.outcome, size, seconds]
