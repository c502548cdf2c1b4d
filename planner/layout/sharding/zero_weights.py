"""How weights come to a rank under ZeRO-3: it keeps its share of every parameter, and small ones whole as well.

Our trainer has DeepSpeed split each parameter once it is filled (trainers/parallel/zero.py ``split_as_loaded``), so a
GPU holds its shares and one whole parameter. A model that ``deepspeed.zero.Init`` did not make goes there as it is,
whole (runtime/engine.py ``_configure_distributed_model`` of 0.19.8: ``self.module.to(self.device)``), and is then split
parameter by parameter. That is what other trainers do.
"""

from __future__ import annotations

from collections.abc import Collection

from planner.layout.run import Run
from planner.layout.run_records import ZeroSettings

HALF = 2
"""Bytes of a 16-bit number, which every parameter is cast to."""

UNSPLIT = "weight before it is split"


def split_weights(run: Run, settings: ZeroSettings, trained: Collection[str]) -> None:
    """Loads the weights and replaces them by this rank's shares, which ``offload_params`` keeps in host RAM."""
    world, offloaded = run.machine.world, run.strategy.offload_params != "none"
    on_gpu = {} if offloaded else {name: HALF * -(-count // world) for name, count in run.elements.items()}
    frozen = {name: nbytes for name, nbytes in on_gpu.items() if name not in trained}
    of_trained = {name: nbytes for name, nbytes in on_gpu.items() if name in trained}
    if run.trainer == "vplan":
        _load_in_turn(run, frozen, of_trained)
    else:
        _load_whole(run)
        run.add(run.load, sum(frozen.values()), "weight", "frozen shares")
    if not offloaded:
        run.add(run.load, sum(of_trained.values()), "weight", "trained shares")
    if world > 1 or offloaded:
        small = sum(count for count in run.elements.values() if count <= settings.persistent)
        run.add(run.load, HALF * small, "weight", "small weights")


def _load_in_turn(run: Run, frozen: dict[str, int], trained: dict[str, int]) -> None:
    """Each parameter comes to the GPU whole, and goes once its share is made. The shares of what is trained go through
    host RAM into one buffer afterwards (``defragment``). ``frozen``, ``trained``: bytes of the shares on the GPU."""
    names = {buffer: name for name, buffer in run.parameters.items()}
    wholes = dict(zip(names, run.add_new([HALF * n for n in run.elements.values()], "temporary", UNSPLIT), strict=True))
    made = dict(zip(frozen, run.add_new([*frozen.values()], "weight", "frozen shares"), strict=True))
    made |= zip(trained, run.add_new([*trained.values()], "weight", "trained share before it is moved"), strict=True)
    for position, (moment, events) in enumerate(run.load.stretches):
        woven: list[int] = []
        for event in events:
            if event not in names:
                woven.append(event)
                continue
            share = made.get(names[event])
            woven += [wholes[event], *([] if share is None else [share]), ~wholes[event]]
        run.load.stretches[position] = (moment, woven)
    run.place(run.load, [~made[name] for name in trained], "shares into one buffer")


def _load_whole(run: Run) -> None:
    """The whole model is on every GPU, in 16 bits, before it is split. Rehearsed: 2.68 GiB for LoRA of Wan 2.1 1.3B on
    two GPUs with ``offload_params``, of which 0.99 stay."""
    whole = {run.parameters[name]: run.new(HALF * count, "temporary", UNSPLIT) for name, count in run.elements.items()}
    run.load.stretches = [
        (moment, [whole.get(event, event) for event in events]) for moment, events in run.load.stretches
    ]
    run.place(run.load, [~weight for weight in whole.values()], "split of the weights")
