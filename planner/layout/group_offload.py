"""Group offload: weights wait in host RAM and come to the GPU for their turn in a forward without gradients.

Read in diffusers 0.42.1, hooks/group_offloading.py. By *block*, each entry of a module list (or Sequential) that is a
direct child of the model is a group of its own, here of one block; everything else is one more group, there for the
whole forward. By *leaf*, each module that owns weights is a group: a layer for its own forward, a parent that owns
some itself for as long as its children run. With a *stream* the group that runs has the next one fetched
(``GroupOffloadingHook.pre_forward``), from the second forward on. tests/contract watches the real hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from planner.allocator.caching import BLOCK_ROUND_BYTES
from planner.layout.run import Run
from planner.layout.sharding.stage_editor import StageEditor, spans
from planner.tape.program import Block, Stage, frees
from planner.units import power_of_two

Groups = Mapping[Block | None, Mapping[str, int]]
"""By block (None: outside all of them): full name -> buffer."""


class GroupTransfers(NamedTuple):
    """How group offload brings the weights of one module to the GPU: by block or leaf, with or without a copy
    stream."""

    kind: str
    """block or leaf"""
    stream: bool
    size: Callable[[int], int]
    """bytes of a buffer"""
    new: Callable[[int], int]
    """a new buffer for weights, of so many bytes"""

    def insert(self, stage: Stage, weights: Mapping[str, int]) -> None:
        """Puts the coming and going of weights (full name -> buffer) into a forward that has none of them."""
        editor, blocks = StageEditor(stage), spans(stage, "forward")
        if self.kind == "block":
            # A list inside another module is not looked for, and one that the tape does not follow counts with the
            # rest.
            blocks = {block: place for block, place in blocks.items() if "." not in block[0]}
        inside: dict[Block | None, dict[str, int]] = {None: {}}
        for name, buffer in weights.items():
            inside.setdefault(_block_of(name, blocks), {})[name] = buffer
        last = len(stage.stretches) - 1
        if self.kind == "block":
            self._by_block(editor, blocks, inside, last)
        else:
            own = [name for name in inside[None] if "." not in name]
            held = [inside[None].pop(name) for name in own]  # the model's own, while its children run
            editor.before(0, held)
            self._by_leaf(editor, blocks, inside, last)
            editor.after(last, frees(held))
        editor.insert("group offload")

    def _by_block(
        self, editor: StageEditor, blocks: Mapping[Block, tuple[int, int]], inside: Groups, last: int
    ) -> None:
        rest = list(inside[None].values())
        groups = [(list(inside.get(block, {}).values()), *place) for block, place in blocks.items()]
        editor.before(0, [*rest, *(groups[0][0] if self.stream and groups else ())])
        for index, (group, first, end) in enumerate(groups):
            fetched = groups[index + 1][0] if self.stream and index + 1 < len(groups) else []
            editor.before(first, fetched if self.stream else group)
            editor.after(end, frees(group))
        editor.after(last, frees(rest))

    def _by_leaf(self, editor: StageEditor, blocks: Mapping[Block, tuple[int, int]], inside: Groups, last: int) -> None:
        """Which layer runs when inside a part is not on a tape: the largest counts throughout."""
        needs = {block: self._most(weights) for block, weights in inside.items()}
        in_blocks = {index for first, end in blocks.values() for index in range(first, end + 1)}
        outside = [(None, (index, index)) for index in range(last + 1) if index not in in_blocks]
        for block, (first, end) in [*blocks.items(), *outside]:
            if needs.get(block):
                turn = self.new(needs[block])
                editor.before(first, [turn])
                editor.after(end, [~turn])

    def _most(self, weights: Mapping[str, int]) -> int:
        """The most bytes of a part's weights at once: a layer, with a stream the two largest as if one followed the
        other, and what its parents own."""
        owned: dict[str, int] = {}
        for name, buffer in weights.items():
            owner = name.rpartition(".")[0]
            owned[owner] = owned.get(owner, 0) + -(-self.size(buffer) // BLOCK_ROUND_BYTES) * BLOCK_ROUND_BYTES
        parents = {owner for owner in owned if any(other.startswith(f"{owner}.") for other in owned)}
        layers = sorted((nbytes for owner, nbytes in owned.items() if owner not in parents), reverse=True)
        return sum(layers[: 2 if self.stream else 1]) + sum(owned[owner] for owner in parents)


def host_copy_bytes(kind: str, stream: bool, weights: Mapping[str, int], lists: Collection[str]) -> tuple[int, int]:
    """(pageable, pinned) bytes of the copies in host RAM, given the bytes of each weight and the names of lists.

    Without a stream the weights themselves wait. With one each has a pinned copy for good, but for what is in no list
    when the groups are blocks: that group has no stream (``_apply_group_offloading_block_level``).
    """
    if not stream:
        return sum(weights.values()), 0
    direct = tuple(f"{name}." for name in lists if "." not in name)
    pageable = sum(size for name, size in weights.items() if kind == "block" and not name.startswith(direct))
    pinned = sum(power_of_two(size) for name, size in weights.items() if kind == "leaf" or name.startswith(direct))
    return pageable, pinned


def model_host_bytes(run: Run) -> tuple[int, int]:
    """(while it runs, the most while it is applied): host RAM, bytes, of the model under group offload; else 0.

    The first copy of a weight goes when its group is first let go: by leaf each at once, by block only when all groups
    are made (``_apply_group_offloading_block_level``).
    """
    strategy = run.strategy
    if strategy.group_offload == "none":
        return 0, 0
    sizes = {name: run.sizes[buffer] for name, buffer in run.named("weight").items()}
    lists = {entry.module_list for entry in run.facts.step.runs}
    pageable, pinned = host_copy_bytes(strategy.group_offload, strategy.group_offload_stream, sizes, lists)
    plain = sum(sizes.values())
    return pageable + pinned, plain + pinned if strategy.group_offload == "block" else max(plain, pinned)


def _block_of(name: str, blocks: Mapping[Block, tuple[int, int]]) -> Block | None:
    """The block that a weight is of, by its name."""
    for module_list in {module_list for module_list, _ in blocks}:
        if name.startswith(f"{module_list}."):
            return module_list, int(name[len(module_list) + 1 :].split(".", 1)[0])
    return None


def offload_model_groups(run: Run, denoise: Stage) -> None:
    """Rewrites the denoising stage so that the model's weights are brought to the GPU group by group. Changes
    ``denoise`` and adds buffers to the run."""
    strategy = run.strategy
    transfers = GroupTransfers(
        strategy.group_offload,
        strategy.group_offload_stream,
        run.sizes.__getitem__,
        lambda nbytes: run.new(nbytes, "weight", "group offload"),
    )
    transfers.insert(denoise, run.named("weight"))
