"""Starting a training run: the request that every rank reads, the launcher that starts them, and how they ended.

The ranks run `trainers/train.py`, started through `vplan.py`, by torch's own launcher if there are several. They and
all their child processes are gone when `run` returns, even if it ends with an error or an interrupt.
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field

from planner.dataset.sources import DataSource
from planner.errors import VplanError
from planner.file_writing import lock_file
from planner.schema import Bytes, Count, CountOrZero, Flag, NotNegative, Record
from planner.spec.job import Strategy
from planner.spec.plan import Basis, Estimate, PhaseName, PhasePeak, Plan
from planner.units import KIB
from planner.worker_process import REQUEST, Ended, read_json, vplan_command, watch_worker, write_json

METRICS, MEMORY, LOG, SAMPLES = "metrics.jsonl", "memory.jsonl", "log.txt", "samples"
RUN_FOLDER, PREPARE_FOLDER = "run", "prepare"
FINAL = "final"
"""The folder of the trained weights, in the run's output folder."""
FULL_BYTES = 64 * KIB
"""With less free space than this, a disk counts as full."""
NAN, OUT_OF_MEMORY = 73, 75
"""Exit codes of a rank. They only show up in the launcher's log: its result file says what happened."""

KILLED = 9
"""SIGKILL, which Windows' signal module lacks."""

TRACKERS = ("tensorboard", "wandb", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio")
"""Accelerate's trackers (``accelerate.utils.LoggerType``), each named like the module it needs."""

PORT = 29500
"""Rendezvous port of ranks on several machines (torchrun's default)."""

FOREIGN = ("ACCELERATE_", "FSDP_", "DEEPSPEED_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Prefixes of environment variables through which another launcher would affect the ranks."""


class Validation(Record):
    """Which validation samples a training run makes, how often, and with which settings."""

    prompts: str
    """file that lists the prompts and their encoded inputs"""
    every: CountOrZero = 0
    """steps between rounds of samples; 0: only at the end"""
    steps: Count | None = None
    """denoising steps (default: the pipeline's own)"""
    guidance: NotNegative | None = None
    """guidance scale (default: the pipeline's own)"""
    seed: CountOrZero = 0


class RunForecast(Record):
    """A plan's estimate as it was when the run started."""

    phases: dict[PhaseName, PhasePeak]
    low_share: NotNegative
    high_share: NotNegative
    """range of the device peak, as shares of the prediction"""
    budget_bytes: Bytes
    """what the card can allocate, minus the reserve"""
    host_phases: dict[PhaseName, Bytes] = Field(default_factory=dict)
    """host RAM of all processes on one node"""
    step_seconds: NotNegative
    step_seconds_high: NotNegative | None = None
    basis: Basis

    @classmethod
    def of(cls, estimate: Estimate) -> Self:
        """The forecast from an estimate, whose range is that of the highest phase. Other phases get the same shares."""
        peak = estimate.peak.device_bytes
        return cls(
            phases=estimate.phases,
            low_share=estimate.low_bytes / peak,
            high_share=estimate.high_bytes / peak,
            budget_bytes=estimate.budget_bytes,
            host_phases=estimate.host.phases if estimate.host else {},
            step_seconds=estimate.step_seconds,
            step_seconds_high=estimate.step_seconds_high,
            basis=estimate.basis,
        )


class RunRequest(Record):
    """Everything that the ranks of a training run need; each reads it from the request file."""

    plan: Plan
    entries: str
    """file that lists the cached samples"""
    weights: str
    """folder of the published weights"""
    transformer: str | None = None
    """folder of transformer weights that were converted from a single file (default: those in `weights`)"""
    output: str
    run: str
    """id of the run in `output`"""
    device: Literal["cuda", "cpu"] = "cuda"
    steps: Count
    """total optimizer steps"""
    seed: CountOrZero = 0
    checkpoint_every: Count
    keep_checkpoints: Count
    """number of checkpoints whose training state is kept; every LoRA file is kept"""
    resume: str | None = None
    """folder of the checkpoint to resume from, already checked"""
    log_with: str | None = None
    validation: Validation | None = None
    expert_steps: Count | None = None
    """steps that one of two experts trains before the next is drawn (default: as in the model's profile)"""
    forecast: RunForecast | None = None
    """None if there are no recordings of the model"""

    def settings(self) -> dict[str, Any]:
        """The run's settings (steps, seed and training settings) by name, as text and numbers, for checkpoints and
        trackers."""
        training = {name: value for name, value in self.plan.training.to_json().items() if value is not None}
        words = {name: ",".join(map(str, value)) for name, value in training.items() if isinstance(value, list)}
        return {"steps": self.steps, "seed": self.seed, **training, **words}


class Preparation(Record):
    """The request to the process that encodes the data before training."""

    plan: Plan
    data: str
    """folder of clips and captions, or a file that lists several folders"""
    sources: tuple[DataSource, ...] = ()
    """the folders and how they are sampled; empty if `data` is a cache that was made elsewhere"""
    weights: str
    entries: str
    """file to list the cached samples in; its folder is the cache"""
    device: Literal["cuda", "cpu"] = "cuda"
    skip_bad: Flag = False
    prompts: tuple[str, ...] = ()
    """prompts of the samples made during training; without any, a sample has the first clip's caption"""
    validation: str | None = None
    """file to list the samples' encoded inputs in; None if no samples are made"""


class Nodes(NamedTuple):
    """This computer's place in a multi-node run."""

    rank: int = 0
    address: str | None = None
    """address of the first node"""
    port: int = PORT


class Outcome(NamedTuple):
    """How a run ended: `ok`, `stopped`, `nan`, `oom`, `host-oom`, `refused` or `crash`, with a message. On several
    nodes also `gone` (one stopped responding) and `ended` (stopped because of another's failure)."""

    name: str
    message: str = ""
    fix: str = ""
    exit_code: int = 0
    shape: Mapping[str, Any] | None = None
    """shape of the batch that ran out of memory"""


def command(plan: Plan, folder: Path, nodes: Nodes, work: str = "train") -> list[str]:
    """The command line that starts this computer's ranks, each running `trainers/WORK.py`, on a folder's request."""
    worker = vplan_command("worker", work, str(folder))
    machine = plan.machine
    if machine.world == 1 and plan.strategy.sharding == "none":
        return worker
    if machine.nodes == 1:
        return on_ranks(worker, machine.gpus)
    where = ["--master-addr", nodes.address or "127.0.0.1", "--master-port", str(nodes.port)]
    return on_ranks(worker, machine.gpus, "--nnodes", str(machine.nodes), "--node-rank", str(nodes.rank), *where)


def on_ranks(worker: list[str], ranks: int, *meeting: str) -> list[str]:
    """The command line of torch's launcher that starts ``ranks`` workers on this computer. ``meeting``: its options for
    a run on several nodes (default: ``--standalone``)."""
    # -P: else python puts the current folder first on sys.path, and would import a folder called torch there.
    launcher = [worker[0], "-P", "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [*launcher, *(meeting or ("--standalone",)), *worker[1:]]


def environment(device: str) -> dict[str, str]:
    """The ranks' environment variables: those of this process minus other launchers', plus `settings`.

    ``device`` is ``cuda`` or ``cpu``.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)} | settings(device)


def settings(device: str) -> dict[str, str]:
    """Environment variables that are set for the ranks. Cards are in NVML's order, in which vplan looks at them (CUDA's
    own order is fastest first). On the CPU, DeepSpeed is told to use it, and each rank gets one thread. What the user
    set stays, except for DeepSpeed's variable."""
    variables = {"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    if device == "cpu":
        variables |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return variables


def foreign() -> list[str]:
    """Names of other launchers' environment variables that are set in this process."""
    return sorted(name for name in os.environ if name.startswith(FOREIGN))


def run(request: RunRequest, nodes: Nodes, tick: Callable[[], None]) -> Outcome:
    """Runs this computer's ranks until they end. `tick` is called a few times a second. Request, results and log are in
    `run_folder`."""
    folder = write_request(run_folder(Path(request.output), nodes), request)
    return worker_outcome(command(request.plan, folder, nodes), folder, request.device, tick)


@contextlib.contextmanager
def locked(output: Path, node: int = 0) -> Iterator[bool]:
    """A context that locks an output folder against a second run; nodes of one run share it, with a lock each. Raises a
    VplanError if another run holds the lock or the folder is not writable.

    The lock is released with the process, however it ends. Yields False if the file system has no locks.
    """
    try:
        file = (output / f".lock-{node}").open("w")
    except OSError as error:  # another user's folder, or a read-only mount
        fault = f"cannot write to {output}: {error.strerror}"
        raise VplanError(fault, "make it writable, or choose another --output") from None
    with file:
        try:
            has_lock = lock_file(file.fileno(), wait=False)
        except BlockingIOError:
            raise VplanError(f"another run is writing to {output}", "choose another --output, or wait") from None
        yield has_lock


def run_folder(output: Path, nodes: Nodes) -> Path:
    """The folder through which this computer's ranks and their parent exchange files: OUTPUT/run, or OUTPUT/run-RANK on
    all nodes but the first."""
    return output / (f"{RUN_FOLDER}-{nodes.rank}" if nodes.rank else RUN_FOLDER)


def prepare(request: Preparation, output: Path, tick: Callable[[], None]) -> Outcome:
    """Encodes the data in separate processes, one per GPU of this computer. Request, results and log are in
    OUTPUT/prepare."""
    folder = write_request(output / PREPARE_FOLDER, request)
    Path(request.entries).parent.mkdir(parents=True, exist_ok=True)
    worker, gpus = vplan_command("worker", "prepare", str(folder)), request.plan.machine.gpus
    return worker_outcome(on_ranks(worker, gpus) if gpus > 1 else worker, folder, request.device, tick)


def write_request(folder: Path, request: Record) -> Path:
    """Writes a request into a worker's folder and removes an earlier worker's results there; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("result-*.json"):
        path.unlink()
    write_json(folder / REQUEST, request.to_json())
    return folder


def worker_outcome(words: list[str], folder: Path, device: str, tick: Callable[[], None]) -> Outcome:
    """Runs a worker's command line and returns how it ended; request, results and log are in ``folder``."""
    ended = watch_worker(words, folder / LOG, environment(device), tick)
    tick()
    return outcome(folder, ended)


def outcome(folder: Path, ended: Ended) -> Outcome:
    """How the ranks of the request in a folder ended: from their result files, or, if none gives a reason, from the
    exit code and the last error in the log."""
    results = [read_json(path) for path in sorted(folder.glob("result-*.json"))]
    # The launcher ends all ranks when one fails, so what one of them reports explains the rest.
    for name in ("refused", "oom", "host-oom", "nan"):
        for result in (result for result in results if result.get("outcome") == name):
            code = result.get("exit_code", 3 if "oom" in name else 4)
            return Outcome(name, result["message"], result.get("fix", ""), code, result.get("shape"))
    ends = {str(result.get("outcome")) for result in results}
    if ended.returncode == 0 and ends in ({"ok"}, {"stopped"}):
        return Outcome(ends.pop(), results[0].get("message", ""))
    log = folder / LOG
    if shutil.disk_usage(folder).free < FULL_BYTES:  # then neither ranks nor log could report it
        fix = "free some space there and run the same command again: it resumes from the last checkpoint"
        return Outcome("crash", f"the disk of {folder} is full", fix, 4)
    return Outcome("crash", f"{_cause(results, ended)}; its last words: {last_words(log)}", f"read {log}", 4)


def _cause(results: list[dict[str, Any]], ended: Ended) -> str:
    unfinished = [str(result["rank"]) for result in results if result.get("outcome") != "ok"]
    where = f" in {results[0]['phase']}" if results and "phase" in results[0] else ""
    if len(results) == 1:
        code = ended.returncode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if -code == KILLED:
            how += " (where nobody sent it, by the system for want of host RAM)"
        return f"training ended with {how}{where}"
    return f"a rank died{where}, and the others were stopped (ranks {', '.join(unfinished)})"


def last_words(log: Path) -> str:
    """The last line of a log that is an error's message, else its last line; at most 500 characters."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _is_error(line)]
    return (errors or lines or ["no output"])[-1][:500]


def _is_error(line: str) -> bool:
    """Whether a line is `SomeError: reason`, as at the end of a traceback, perhaps after torchrun's rank prefix."""
    words = line.split("]: ", 1)[-1].split(": ", 1)
    return len(words) == 2 and words[0].replace(".", "").isidentifier() and words[0].endswith(("Error", "Exception"))


LIBRARIES = {
    "adamw-8bit": ("bitsandbytes",),
    "adamw-8bit-paged": ("bitsandbytes",),
    "lion": ("bitsandbytes",),
    "nf4": ("bitsandbytes",),
    "adafactor": ("transformers",),
    "prodigy": ("prodigyopt",),
    "came": ("came_pytorch",),
    "int8": ("torchao",),
}
"""Packages that an optimizer or weight format needs besides torch and diffusers."""


def libraries(strategy: Strategy) -> tuple[str, ...]:
    """The packages that a strategy needs besides torch and diffusers."""
    split = ("deepspeed",) if strategy.sharding.startswith("zero") else ()
    return (*LIBRARIES.get(strategy.optimizer, ()), *LIBRARIES.get(strategy.weights_dtype or "", ()), *split)


def check_installed(plan: Plan, log_with: str | None) -> None:
    """Raises a VplanError that names the first missing package that training this plan needs. ``log_with``: the module
    of a tracker, also needed."""
    strategy = plan.strategy
    needed = ["torch", "diffusers", "peft", "accelerate", "safetensors"]
    for package in (*needed, *libraries(strategy)):
        if importlib.util.find_spec(package) is None:
            raise VplanError(f"training this plan needs {package}", "install it: pip install 'vplan[train]'")
    if log_with and importlib.util.find_spec(log_with) is None:
        package = log_with.replace("_", "-")
        raise VplanError(f"--log-with {log_with} needs {package}", f"install it: pip install {package}")
