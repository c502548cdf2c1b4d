"""What VAEs and text encoders allocate at most on a virtual GPU, beside what their tapes say.

    VPLAN_CUDA_PYTHON=cuda/bin/python python -m tests.tools.component_memory [MODEL...] [--only TEXT] [--record]
        [--sides ROWSxCOLUMNS]

A line for each tape of the models' components: its allocated peak and the virtual GPU's in MiB, weights included, by
how much it is over in percent; likewise reserved; and how many allocations both make. Shapes are those of
`tests.benchmarks.held_out_around`, in latents of ``--sides``. ``--record`` compares what is recorded now, not what is
shipped. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True holds for both. Half a minute a component.

The same module runs on the virtual GPU, as ``python -m tests.tools.component_memory --measure OUT.json``: there
OUT.json has what to measure, and gets what was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import profiles
from planner.allocator.caching import CachingAllocator
from planner.catalog import lookup
from planner.catalog.components import COMPONENTS, Component, components, recorded_lengths
from planner.catalog.profiles import ModelProfile
from planner.layout.recordings import Library
from planner.tape.format import Tape
from planner.tape.packs import is_stored
from planner.tape.program import Part, Program
from planner.units import MIB
from tests.benchmarks.held_out_around import PROMPTS, SIDES, clip

CARD = "h200-141gb"


def shape_of(profile: ModelProfile, component: Component, sides: tuple[int, int]) -> tuple[dict[str, int], int]:
    """The shape to compare at, and in how many chunks a VAE takes it."""
    for encoder in profile.text_encoders:
        if encoder.folder == component.name:
            return {"B": PROMPTS, "T": encoder.max_tokens}, 0
    _, _, *short = component.variant.split("-", 2)
    frames, chunks = (recorded_lengths(profile)[f"-{short[0]}"], 0) if short else clip(profile.vae)
    return {"F": frames, "H": sides[0], "W": sides[1]}, chunks


class Memory(NamedTuple):
    """What a component takes, its weights included: peaks in bytes, and how many allocations it makes."""

    allocated: int
    reserved: int
    allocations: int


def predicted(tape: Tape, piece: str, grid: dict[str, int], chunks: int) -> Memory:
    """What a tape says."""
    program = Program()
    part = Part(tape.model, grid)
    stages = [program.unfold(tape, name, (chunks,) if chunks else None, part) for name in ("load", piece)]
    ops, sizes = [event for stage in stages for event in stage.ops], program.bytes_of({})
    expandable = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    played = CachingAllocator(expandable_segments=expandable).run(ops, sizes)
    count = sum(event >= 0 and sizes[event] > 0 for event in ops)
    return Memory(played.allocated_peak_bytes, played.reserved_peak_bytes, count)


def measure(profile: ModelProfile, component: Component, grid: dict[str, int], chunks: int) -> Memory:
    """What it takes on the card that this process has."""
    import torch

    from trainers.recording.components import DTYPES
    from trainers.step import placement, step

    piece, dtype, *_ = component.variant.split("-", 2)
    model, run = _call(profile, component, piece, DTYPES[dtype], grid)
    step.cast_weights(model, DTYPES[dtype])
    model.requires_grad_(False).eval()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    placement.materialise(model, "cuda")
    with torch.no_grad():
        run()
    after = torch.cuda.memory_stats()
    allocated, reserved = (
        after[f"{what}_bytes.all.peak"] - before[f"{what}_bytes.all.current"] for what in ("allocated", "reserved")
    )
    return Memory(allocated, reserved, after["allocation.all.allocated"] - before["allocation.all.allocated"])


def _call(profile: ModelProfile, component: Component, piece: str, dtype: Any, grid: dict[str, int]) -> tuple[Any, Any]:
    """(a component on the meta device, a call of it once it is on the card)."""
    import diffusers
    import torch
    from accelerate import init_empty_weights

    from trainers.recording import encoders

    for encoder in profile.text_encoders:
        if encoder.folder == component.name:
            model = encoders.text_encoder(encoder)
            return model, encoders.forward(encoder, model, (grid["B"], grid["T"]), dtype, "cuda")
    vae = profile.vae
    with init_empty_weights():
        model = getattr(diffusers, vae.class_name).from_config(vae.config)
    pixels = (vae.temporal * (grid["F"] - 1) + 1, vae.spatial * grid["H"], vae.spatial * grid["W"])
    latents = (grid["F"], grid["H"], grid["W"])
    channels, shape = (vae.colours, pixels) if piece == "encode" else (vae.latent_channels, latents)
    size = (1, channels, *(shape if vae.takes_clips else shape[1:]))

    def run() -> torch.Tensor:
        batch = torch.randn(size, dtype=dtype, device="cuda")
        if piece == "encode":
            drawn: torch.Tensor = model.encode(batch, return_dict=False)[0].sample()
            return drawn
        noise = [torch.zeros(1, dtype=dtype, device="cuda")] if vae.config.get("timestep_conditioning") else []
        decoded: torch.Tensor = model.decode(batch, *noise, return_dict=False)[0]
        return decoded

    return model, run


def wanted(models: list[str], only: str) -> Iterator[tuple[ModelProfile, Component]]:
    """The shipped components of some models, or of all, each once."""
    done: set[Component] = set()
    for name in models or lookup.model_names():
        profile = lookup.model(name)
        for component in components(profile):
            known = is_stored(profiles.TAPES / COMPONENTS / component.name / f"{component.variant}.json.gz")
            if known and component not in done and only in f"{component.name}/{component.variant}":
                done.add(component)
                yield profile, component


def on_virtual_gpu(
    profile: ModelProfile, component: Component, sides: tuple[int, int], interpreter: str
) -> Memory | str:
    """What `measure` says in a process of its own, or the last line of how it failed."""
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        what = {"model": profile.name, "name": component.name, "variant": component.variant, "sides": sides}
        out.write_text(json.dumps(what))
        script = [interpreter, "-m", "tests.tools.component_memory", "--measure", str(out)]
        options = ["--gpu", CARD, "--no-values", "--steps", "0", "--python", interpreter, "--", *script]
        done = subprocess.run(
            [sys.executable, str(root / "vplan.py"), "rehearse", *options], cwd=root, capture_output=True, text=True
        )
        answer = json.loads(out.read_text())
    if "memory" not in answer:
        return (done.stdout + done.stderr).strip().splitlines()[-1]
    return Memory(*answer["memory"])


def _measured_into(path: Path) -> None:
    """Measures what a file asks for, and writes the peak into it."""
    import torch

    asked = json.loads(path.read_text())
    profile, component = lookup.model(asked["model"]), Component(asked["name"], asked["variant"])
    for dtype in (torch.float32, torch.bfloat16):  # cuBLAS's workspace comes with the first product, and stays
        torch.ones(64, 64, device="cuda", dtype=dtype) @ torch.ones(64, 64, device="cuda", dtype=dtype)
    memory = measure(profile, component, *shape_of(profile, component, tuple(asked["sides"])))
    path.write_text(json.dumps({**asked, "memory": memory}))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.component_memory", description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--only", default="", help="a text in the component's name or variant")
    parser.add_argument("--record", action="store_true", help="compare what is recorded now")
    parser.add_argument("--measure", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--sides", default="x".join(map(str, SIDES)), metavar="ROWSxCOLUMNS", help="of a VAE's latents")
    asked = parser.parse_args()
    rows, _, columns = asked.sides.partition("x")
    sides = int(rows), int(columns)
    if asked.measure:
        _measured_into(asked.measure)
        return 0
    library, recorded = Library(), _recorder() if asked.record else None
    for profile, component in wanted(asked.models, asked.only):
        tape = recorded(profile, component) if recorded else library.component_tape(*component)
        assert tape, "what is wanted is shipped"
        ours = predicted(tape, component.variant.split("-")[0], *shape_of(profile, component, sides))
        theirs = on_virtual_gpu(profile, component, sides, os.environ["VPLAN_CUDA_PYTHON"])
        label = f"{component.name}/{component.variant}"
        if isinstance(theirs, str):
            print(f"{label:56} {ours.allocated / MIB:9.1f}  {theirs}", flush=True)
            continue
        columns = [f"{label:56}"]
        for one, other in zip(ours[:2], theirs[:2], strict=True):
            columns.append(f"{one / MIB:9.1f} {other / MIB:9.1f} {100 * (one - other) / other:+8.4f} %")
        print(*columns, f"{ours.allocations:6} {theirs.allocations:6}", flush=True)
    return 0


def _recorder() -> Callable[[ModelProfile, Component], Tape]:
    from trainers.recording import tapes

    return tapes.component_tape


if __name__ == "__main__":
    raise SystemExit(main())
