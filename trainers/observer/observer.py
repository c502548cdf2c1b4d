"""One process of the command: counts its optimizer steps, notes where it runs out of memory, and writes what it saw.

Its file in the run's folder is `observed-PID.json`, whole at any time. After the step that the run is bounded by, the
process waits to be ended by its parent, which waits for the other ranks.
"""

from __future__ import annotations

import atexit
import functools
import json
import linecache
import os
import sys
import threading
import time
import traceback
import weakref
from types import FrameType, MethodType, ModuleType
from typing import Any, NoReturn

from . import import_hook
from .forward_phases import ForwardPhases
from .hollow_tensors import HollowTensors, HollowUpdates
from .idle_kernels import IdleAdamBuilder
from .import_hook import ImportHook
from .memory_history import MemoryHistory
from .memory_peaks import MemoryPeaks
from .printed_tensors import install as print_from_host
from .refusals import install as install_refusals
from .small_values import watch_values
from .working_module import working_moment

MOST_FRAMES = 40
MOST_READS = 20
"""Places in the program where values of the card were read, that are named."""

WORDS = {"_local_scalar_dense": "item", "_to_copy": "copy to the host", "copy_": "copy to the host"}
"""How people call operators that read."""

WATCHDOG_SECONDS = 0.25

WRAPPERS = ("/torch/_compile.py", "/torch/_dynamo/eval_frame.py", "/torch/utils/_python_dispatch.py")

READERS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero")
"""Methods of a tensor by which its values reach Python, and may decide what comes next."""

_OWN = os.path.dirname(os.path.abspath(__file__))


class ProcessObserver:
    """What is known of this process."""

    def __init__(self, folder: str, most_steps: int) -> None:
        self._folder = folder
        self._most_steps = most_steps
        self._pid = os.getpid()
        self._torch: Any = None
        self._peaks: MemoryPeaks | None = None
        self._history: MemoryHistory | None = None
        self._steps_of: dict[int, int] = {}
        self._engine_steps: int | None = None
        self._in_engine_step = False
        self._forwards: ForwardPhases | None = None
        self._oom: dict[str, Any] | None = None
        self._ooms = 0
        self._refused: dict[str, Any] | None = None
        self._reads: dict[str, int] = {}
        self._hollow: HollowTensors | None = None
        self._end = ""

    @property
    def steps(self) -> int:
        """Optimizer steps so far. DeepSpeed's engine says its own; else the optimizer that has stepped most often
        counts: some programs have an optimizer for every parameter, and step each once."""
        if self._engine_steps is not None:
            return self._engine_steps
        return max(self._steps_of.values(), default=0)

    # ---- set-up

    def watch_torch(self, torch: ModuleType) -> None:
        """Hooks into torch, which has just been imported."""
        if not hasattr(torch, "cuda") or not hasattr(torch._C, "_cuda_memoryStats"):  # a CPU build
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._torch = torch
        self._peaks = MemoryPeaks(torch)
        self._history = MemoryHistory(torch, self._folder, os.environ.get("VPLAN_GPU_EVENTS") == "1")
        peaks = self._peaks
        self._forwards = ForwardPhases(torch, peaks.enter, lambda: peaks.phase, splits_gradients=_deepspeed_runs)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._watch_own_steps(torch.optim.Optimizer)
        torch.cuda._lazy_call(self._watch_allocator)
        print_from_host(torch)
        if os.environ.get("VPLAN_GPU_VALUES") == "1":
            places = os.environ.get("VPLAN_HOLLOW", "")
            self._hollow = HollowTensors(torch, places.split(os.pathsep) if places else [])
            self._hollow.watch_buffers()
            watch_values(torch, self._note_read, self._hollow)
        else:  # nothing is computed: whatever is read is not what it would be
            for name in READERS:
                self._watch_reader(torch.Tensor, name)
        atexit.register(self._at_exit)

    def watch_deepspeed(self, module: ModuleType) -> None:
        """DeepSpeed steps an optimizer once for every group of parameters, and gathers what they trained behind that;
        its engine knows what a step is."""
        engine: Any = module.DeepSpeedEngine
        take_step = engine._take_model_step

        def counted(*arguments: Any, **options: Any) -> Any:
            assert self._forwards is not None
            self._in_engine_step = True
            self._forwards.step_begins()
            result = take_step(*arguments, **options)
            self._in_engine_step = False
            self._forwards.step_ended()
            self._engine_steps = (self._engine_steps or 0) + 1
            self._count()
            return result

        engine._take_model_step = counted

    def watch_deepspeed_adam(self, module: ModuleType) -> None:
        """DeepSpeed's optimizer for host RAM updates by an operator of its own, which torch does not dispatch."""
        optimizer: Any = module.DeepSpeedCPUAdam
        initialize = optimizer.__init__

        def initialized(instance: Any, *arguments: Any, **options: Any) -> None:
            initialize(instance, *arguments, **options)
            if self._hollow is not None:
                instance.ds_opt_adam = HollowUpdates(instance.ds_opt_adam, self._hollow)

        optimizer.__init__ = initialized

    def watch_fused_adam(self, module: ModuleType) -> None:
        """DeepSpeed's optimizer for the card compiles its kernel by nvcc when it is made. Kernels of a virtual card do
        nothing, so nothing is compiled."""
        module.FusedAdamBuilder = IdleAdamBuilder  # type: ignore[attr-defined]

    def _watch_own_steps(self, optimizer_class: Any) -> None:
        """torch's hooks belong to a class's ``step``. A program that gives one optimizer another (OneTrainer,
        modules/util/optimizer/adamw_extensions.py) is seen to do so; schedulers wrap the one that is there."""
        given = optimizer_class.__setattr__

        def watched(optimizer: Any, name: str, value: Any) -> None:
            given(optimizer, name, self._counted_once(optimizer, value) if name == "step" else value)

        optimizer_class.__setattr__ = watched

    def _counted_once(self, optimizer: Any, step: Any) -> Any:
        """The step, bound to its optimizer if it was, counted here unless torch's hooks do."""
        owner, function = weakref.ref(optimizer), getattr(step, "__func__", step)

        @functools.wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            before = self._steps_of.get(id(owner()), 0)
            self._before_step()
            result = function(*arguments, **options)
            if self._steps_of.get(id(owner()), 0) == before:
                self._after_step(owner())
            return result

        return MethodType(counted, optimizer) if function is not step else counted

    def _watch_allocator(self) -> None:
        assert self._history is not None
        self._history.start()
        self._torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)

    def _watch_reader(self, tensor: Any, name: str) -> None:
        read = getattr(tensor, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            if arguments[0].is_cuda:
                self._note_read(name)
            return read(*arguments, **options)

        noted.__name__, noted.__doc__ = name, read.__doc__
        setattr(tensor, name, noted)

    # ---- phases and steps

    def _before_step(self, *_ignored: Any) -> None:
        assert self._forwards is not None
        self._forwards.step_begins()

    def _after_step(self, optimizer: Any, *_ignored: Any) -> None:
        assert self._forwards is not None
        self._let_works_end()
        if not self._in_engine_step:
            self._forwards.step_ended()
        self._steps_of[id(optimizer)] = self._steps_of.get(id(optimizer), 0) + 1
        if self._engine_steps is None and not _deepspeed_runs():
            self._count()

    def _let_works_end(self) -> None:
        """Buffers of a collective live until torch's watchdog sees that it is done, which it looks for every 100 ms
        (ProcessGroupNCCL.cpp, kWatchdogThreadSleepMillis): a real step takes longer than that, ours may not."""
        distributed = self._torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            time.sleep(WATCHDOG_SECONDS)

    def _count(self) -> None:
        self.write()
        if self._most_steps and self.steps >= self._most_steps:
            self._wait_for_the_end()

    def _wait_for_the_end(self) -> NoReturn:
        self._write_peak()
        self._end = "steps"
        self.write()
        sys.stdout.flush()
        sys.stderr.flush()
        while True:
            time.sleep(1)

    # ---- what is worth telling

    def _out_of_memory(self, device: int, requested: int, _limit: int, _free: int) -> None:
        """torch calls this after it has emptied its cache and still found no room, before it raises."""
        assert self._peaks is not None
        assert self._history is not None
        self._ooms += 1
        self._peaks.note()
        frame = _working_frame()
        self._oom = {
            "device": device,
            "requested_bytes": requested,
            "allocated_bytes": int(self._torch.cuda.memory_allocated(device)),
            "reserved_bytes": int(self._torch.cuda.memory_reserved(device)),
            "phase": self._peaks.phase,
            "step": self.steps + 1,
            "moment": working_moment(self._torch, frame, self._model_in_training()),
            "frames": _frames(frame),
        }
        self._history.write_error(device, self._peaks.starts)
        self.write()

    def _model_in_training(self) -> Any:
        model = self._forwards.model if self._forwards is not None else None
        return model and model()

    def _note_read(self, name: str) -> None:
        frame = _program_frame()
        if frame is not None:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} {WORDS.get(name, name.strip('_'))}"
            if place in self._reads or len(self._reads) < MOST_READS:
                self._reads[place] = self._reads.get(place, 0) + 1

    def refuse(self, what: str, fix: str) -> NoReturn:
        """Ends the process: a number would be wrong."""
        self._refused = {"what": what, "fix": fix, "frames": _frames(_working_frame())}
        self._end = "refused"
        self.write()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(77)

    def _write_peak(self) -> None:
        """Unless the program ends by an error about memory: then that is what was written."""
        if self._history is None or self._peaks is None:
            return
        unhandled = hasattr(sys, "last_value")  # Python has printed an error that nobody caught
        over = unhandled and self._oom is not None and self._oom["step"] == self.steps + 1
        device = self._peaks.fullest
        if device is not None and not over:
            self._history.write_peak(device, self._peaks.starts)

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self._write_peak()
            self._end = "exit"
            self.write()

    def write(self) -> None:
        """Replace this process's file. A process that never used the card writes nothing."""
        if os.getpid() != self._pid or self._peaks is None or not self._is_of_interest():
            return
        self._peaks.note()
        facts = {
            "pid": self._pid,
            "rank": _number("RANK"),
            "local_rank": _number("LOCAL_RANK"),
            "world_size": _number("WORLD_SIZE"),
            "torch": str(self._torch.__version__),
            "program": sys.argv[:1],
            "phase": self._peaks.phase,
            "phases": self._peaks.phases,
            "steps": self.steps,
            "retries": self._peaks.retries(),
            "ooms": self._ooms,
            "hollow_bytes": self._hollow.most_unwritten_bytes if self._hollow else 0,
            "oom": self._oom,
            "refused": self._refused,
            "reads": self._reads,
            "end": self._end,
        }
        path = os.path.join(self._folder, f"observed-{self._pid}.json")
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump(facts, file)
        os.replace(f"{path}.part", path)

    def _is_of_interest(self) -> bool:
        return bool(self._torch.cuda.is_initialized() or self.steps or self._refused)


def _deepspeed_runs() -> bool:
    """Whether a DeepSpeed engine is at work, whose steps are counted instead of its optimizers'."""
    engine = sys.modules.get("deepspeed.runtime.engine")
    frame: FrameType | None = sys._getframe(1)
    while engine is not None and frame is not None:
        if frame.f_code.co_filename == engine.__file__:
            return True
        frame = frame.f_back
    return False


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None


def _working_frame() -> FrameType | None:
    """Where the program is: this thread without what we put on top of it; for torch's own threads (backward) the main
    one, which waits for them."""
    inner: FrameType | None = sys._getframe(1)
    frame = inner
    while frame is not None:
        if os.path.dirname(frame.f_code.co_filename) == _OWN and frame.f_code.co_filename != import_hook.__file__:
            inner = _without_wrappers(frame.f_back)
        frame = frame.f_back
    if inner is not None:
        return inner
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _without_wrappers(frame: FrameType | None) -> FrameType | None:
    """torch calls a dispatch mode through wrappers that keep it from being compiled."""
    while frame is not None and frame.f_code.co_filename.replace(os.sep, "/").endswith(WRAPPERS):
        frame = frame.f_back
    return frame


def _program_frame() -> FrameType | None:
    """The innermost frame that is no code of torch or ours."""
    frame = _working_frame()
    torch_folder = os.path.dirname(sys.modules["torch"].__file__ or "")
    while frame is not None and frame.f_code.co_filename.startswith((torch_folder, _OWN)):
        frame = frame.f_back
    return frame


def _frames(frame: FrameType | None) -> list[dict[str, Any]]:
    """The innermost frames, outermost first."""
    told = []
    for entry, line in list(traceback.walk_stack(frame))[:MOST_FRAMES]:
        name = entry.f_code.co_filename
        source = linecache.getline(name, line).strip()
        told.append({"file": name, "line": line, "function": entry.f_code.co_name, "source": source[:200]})
    return told[::-1]


def start() -> None:
    """Begin to watch this process, as its environment says."""
    hook = ImportHook()
    observer = ProcessObserver(os.environ["VPLAN_GPU_FOLDER"], int(os.environ.get("VPLAN_GPU_STEPS", "0")))
    hook.after("torch", observer.watch_torch)
    hook.after("deepspeed.runtime.engine", observer.watch_deepspeed)
    hook.after("deepspeed.ops.adam.cpu_adam", observer.watch_deepspeed_adam)
    hook.after("deepspeed.ops.adam.fused_adam", observer.watch_fused_adam)
    install_refusals(hook, observer.refuse)
    hook.install()
