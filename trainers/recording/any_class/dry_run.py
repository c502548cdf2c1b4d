"""Calls a model of fake tensors with arguments that may be wrong, and learns from its error message what is right.

Each unknown width is a different large prime. A layer that gets one of them says in its error which number it expects,
so the width found this way is that of a weight. Which argument is missing is read from the frame of `forward` that
failed.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import math
import re
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from planner.catalog.forward_inputs import BLOCKS, SAMPLES, Argument, parse_argument
from planner.garbage_collection import without_garbage_collection
from trainers.recording import cuda_ops
from trainers.recording.own import REFUSALS
from trainers.recording.recorder import Recorder
from trainers.step import placement

GRID = {"B": 2, "F": 5, "H": 22, "W": 26, "T": 34, "E": 38}
"""A shape at which models that halve several times still run."""
LENGTHS = {
    math.prod(GRID[letter] for letter in letters) + more
    for letters in ("HW", "FHW")
    for more in (-1, 0, 1, GRID["T"], GRID["E"])
}
"""Lengths at that shape; a number in an error message that is one of them is not taken for a width."""
PLACEHOLDERS = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079, 10091, 10093, 10099, 10103)
"""Primes larger than every width of a published model, so that none divides a width."""
MOST_RUNS = 150
FAILURES = (*REFUSALS, NameError, ImportError)
"""What a call may raise; NameError and ImportError because a class may need a package that is not installed."""


class Complaint(NamedTuple):
    """How a call failed: the error in one line, its type, and the arguments of `forward` that were None in the failing
    statement."""

    error: str
    kind: str
    missing: tuple[str, ...]


class FakeModel:
    """A model with fake weights, which can be called repeatedly."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.called: list[nn.Module] = []
        self.allocations = 0
        """the number of allocations in the latest call"""

        self.attends_by_card = False
        """whether a call used attention whose kernel differs by card (`trainers.recording.cuda_ops.CudaAttention`)"""

        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._environment():
            placement.materialise(model, "cpu")
        for module in model.modules():
            module.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, *_: Any) -> None:
        self.called.append(module)

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        logger = logging.getLogger("torch._subclasses.fake_tensor")  # logs a traceback for every failed call
        level = logger.level
        with (
            warnings.catch_warnings(),
            without_garbage_collection(),
            cuda_ops.cuda_semantics(rms_norm_in_fp32=True) as attention,
            self._mode,
            Recorder() as recorder,
        ):
            warnings.simplefilter("ignore")
            recorder.adds_masks_up = True
            logger.setLevel(logging.CRITICAL)
            try:
                yield
            finally:
                logger.setLevel(level)
                self.allocations = len(recorder.recording.allocations)
                self.attends_by_card |= attention.differs_by_card

    def call(self, arguments: Mapping[str, Any], grid: Mapping[str, int]) -> tuple[Any, ...] | Complaint:
        """The model's output for ``arguments``, described as in `planner.catalog.forward_inputs`; a Complaint if it
        raises."""
        with self._environment():
            try:
                return self._run(arguments, grid)
            except FAILURES as error:
                return _complaint(error, self.model)

    def _run(self, arguments: Mapping[str, Any], grid: Mapping[str, int]) -> tuple[Any, ...]:
        self.called = []
        inputs = {name: value_of(tree, grid) for name, tree in arguments.items()}
        out = self.model(**inputs, **self._plain_tuple())
        return out if isinstance(out, tuple) else tuple(out.values()) if isinstance(out, dict) else (out,)

    def _plain_tuple(self) -> dict[str, bool]:
        return {"return_dict": False} if "return_dict" in inspect.signature(self.model.forward).parameters else {}

    def idle_parameters(self, arguments: Mapping[str, Any], grid: Mapping[str, int]) -> set[str] | Complaint:
        """The names of the parameters that get no gradient from the first output."""
        self.model.requires_grad_(True)
        with self._environment():  # one for forward and backward, because it tracks tensors' known values
            try:
                out = self._run(arguments, grid)
                tensors = [leaf for leaf in tree_leaves(out[0]) if isinstance(leaf, Tensor)]
                if not tensors or tensors[0].grad_fn is None:
                    return Complaint("the first output has no gradient", "RuntimeError", ())
                torch.stack([tensor.float().mean() for tensor in tensors]).sum().backward()
            except FAILURES as error:
                return _complaint(error, self.model)
            idle = {name for name, parameter in self.model.named_parameters() if parameter.grad is None}
            for parameter in self.model.parameters():
                parameter.grad = None
        return idle


def value_of(tree: Any, grid: Mapping[str, int]) -> Any:
    """The value of an argument's description at a shape, inside a fake mode. ``grid`` also has the number of blocks,
    for arguments with an entry for each block."""
    if isinstance(tree, dict) and BLOCKS in tree:
        return [value_of(tree[BLOCKS], grid) for _ in range(grid[BLOCKS])]
    if isinstance(tree, dict) and SAMPLES in tree:
        return [value_of(tree[SAMPLES], grid) for _ in range(grid["B"])]
    if isinstance(tree, dict):
        return {key: value_of(inner, grid) for key, inner in tree.items()}
    if isinstance(tree, list):
        values = [value_of(inner, grid) for inner in tree]
        return values if any(isinstance(inner, list) for inner in tree) else tuple(values)
    argument = parse_argument(tree, "an argument")
    return argument.shape(grid)[0] if argument.kind == "number" else tensor_of(argument, grid)


def tensor_of(argument: Argument, grid: Mapping[str, int]) -> Tensor:
    """A tensor of an argument's shape and kind on the CPU: fake inside a fake mode."""
    size = argument.shape(grid)
    if argument.kind in ("ones", "zeros", "long"):
        return torch.ones(size, dtype=torch.long) if argument.kind == "ones" else torch.zeros(size, dtype=torch.long)
    if argument.kind in ("bool", "false"):
        return (torch.ones if argument.kind == "bool" else torch.zeros)(size, dtype=torch.bool)
    return torch.randn(size, dtype=torch.complex64 if argument.kind == "complex" else None)


def _complaint(error: BaseException, model: nn.Module) -> Complaint:
    text = " ".join(str(error).split())[:400]
    missing: tuple[str, ...] = ()
    code = inspect.unwrap(type(model).forward).__code__
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is code:
            missing = _missing(trace, text)
        trace = trace.tb_next
    return Complaint(text, type(error).__name__, missing)


def _missing(trace: types.TracebackType, error: str) -> tuple[str, ...]:
    """The arguments that are None and occur in the error message or, if the error is about None, in the failing
    statement."""
    frame = trace.tb_frame
    positions = inspect.getframeinfo(trace).positions
    lines, first = inspect.getsourcelines(frame.f_code)
    statement = ""
    if positions and positions.lineno and positions.end_lineno:
        statement = "".join(lines[positions.lineno - first : positions.end_lineno - first + 1])
    about = f"{error} {statement}" if "None" in error else error
    names = inspect.getargs(frame.f_code).args
    return tuple(name for name in names if frame.f_locals.get(name, 0) is None and re.search(rf"\b{name}\b", about))


_PATTERNS = (
    r"same reduction dim, but got \[\d+, (?P<wrong>\d+)\] X \[(?P<right>\d+), \d+\]",
    r"mat1 and mat2 shapes cannot be multiplied \(\d+x(?P<wrong>\d+) and (?P<right>\d+)x\d+\)",
    r"to have (?P<right>\d+) channels, but got (?P<wrong>\d+) channels",
    r"normalized_shape=\[(?P<right>\d+)\].*size ?\[.*?(?P<wrong>\d+)\]",
    r"tensor a \((?P<wrong>\d+)\) must match the size of tensor b \((?P<right>\d+)\)",
    r"tensor a \((?P<right>\d+)\) must match the size of tensor b \((?P<wrong>\d+)\)",
)


_BROADCAST = re.compile(
    r"Mismatching argument at index \d+ had torch\.Size\(\[(?P<one>[\d, ]*)\]\); "
    r".*broadcastable to \[(?P<two>[\d, ]*)\]"
)


def mismatched(error: str) -> Iterator[tuple[int, int]]:
    """Pairs (wrong, right) of sizes that differ but must not, according to an error message; both ways round if it does
    not tell which is right."""
    if shapes := _BROADCAST.search(error):
        sides = [[int(size) for size in shapes[name].split(",") if size.strip()] for name in ("one", "two")]
        for one, two in zip(*(reversed(side) for side in sides), strict=False):
            if one != two and 1 not in (one, two):
                yield one, two
                yield two, one
    for pattern in _PATTERNS:
        if match := re.search(pattern, error):
            yield int(match["wrong"]), int(match["right"])


_INVALID_VIEW = re.compile(r"shape '\[(?P<shape>[\d, ]+)\]' is invalid for input of size (?P<size>\d+)")


MOST_CONCATENATED = 9000
"""Channels beyond which a larger size is no concatenation."""


def _width_behind(wrong: int, right: int, placeholder: int, unknown: set[int]) -> int | None:
    """What a placeholder would have to be for a size ``wrong`` to be ``right``; None where it has no part in it."""
    if wrong in unknown:
        return right if wrong == placeholder and right not in unknown else None
    beside, times = wrong - placeholder, wrong // placeholder
    if 0 < beside < MOST_CONCATENATED and right > beside:
        return right - beside  # something was concatenated to it
    if right and wrong % placeholder == 0 and right % times == 0:
        return right // times  # it was folded, as cells of a patch are
    return None


def likely_widths(error: str, unknown: set[int]) -> Iterator[tuple[int, int]]:
    """(placeholder, the width that a layer expects in its place) from an error message, the most likely first."""
    if view := _INVALID_VIEW.search(error):
        sides = [int(side) for side in view["shape"].split(",")]
        for placeholder in unknown.intersection(sides):
            rest = math.prod(side for side in sides if side != placeholder)
            if rest and int(view["size"]) % rest == 0:
                yield placeholder, int(view["size"]) // rest
    for wrong, right in mismatched(error):
        for placeholder in unknown:
            width = _width_behind(wrong, right, placeholder, unknown)
            if width is not None:
                yield placeholder, width
    numbers = [int(number) for number in re.findall(r"\d+", error)]
    for placeholder, number in itertools.product(unknown & set(numbers), numbers):
        if number not in unknown and number > GRID["B"] and number not in LENGTHS:
            yield placeholder, number
