"""planner/tape: a hand-made tape of two weights and four events a block, unfolded by hand; damaged files
refused."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planner.allocator.caching import CachingAllocator
from planner.errors import VplanError
from planner.search.batched_peaks import _evaluate
from planner.search.lower_bounds import walked
from planner.tape import packed_json
from planner.tape.codec import parse_tape, read_tape, tape_json
from planner.tape.format import FORMAT, Monomial, Tape, Template
from planner.tape.packed_json import pack, write_packed
from planner.tape.packs import read_recording
from planner.tape.parameter_table import FILE as PARAMETERS
from planner.tape.program import Program
from planner.tape.templates import sections_of, template_of
from tests.shipped_tapes import shipped_tapes

GRID = {"B": 2, "F": 3, "H": 5, "W": 7, "T": 11, "R": 13}
WEIGHT, GRADIENT, ACTIVATION, TEMPORARY = 0, 1, 4, 5
NO_BLOCK = [0, -1, -1]
FORWARD_SWEEP, BACKWARD_SWEEP = 2, 4


def alloc(size: int, category: int, *owner: int, kernel: int = 0) -> list[int]:
    """[size, category, op, kernel, named, (mode, run, block, name)]; the operator's number is the size's."""
    return [size, category, size, kernel, len(owner) // 4, *owner]


def item(
    events: list[list[list[int]]], passes: str = "forward", run: int | None = None, **where: int
) -> dict[str, Any]:
    templates = [{"events": template, "work": []} for template in events]
    return {"run": run, "pass": passes, "templates": templates, **({"block": 0} if run is None else where)}


def tiny() -> dict[str, Any]:
    """A stem and a run of like blocks `blocks.3`, `blocks.4`, ... Forward: each block makes a temporary and its output,
    and frees the temporary. Backward: each frees its own output; the last also frees what the stem made."""
    load = [
        item([[alloc(0, WEIGHT, *NO_BLOCK, 0)]], "load"),
        item([[alloc(1, WEIGHT, 1, 0, 0, 1)]] * 5, "load", 0, step=1),
    ]
    forward = [[alloc(3, TEMPORARY), alloc(2, ACTIVATION), [0, 1, 0, 1]]] * 5
    backward = [[alloc(1, GRADIENT, 1, 0, 0, 1), [2, 1, 0, 1]]] * 5
    backward[0] = [*backward[0], [3, 0, 0, 0]]
    step = [
        item([[alloc(2, ACTIVATION)]]),
        item(forward, "forward", 0, step=1),
        item([[alloc(3, TEMPORARY, kernel=1), [0, 0, 0, 0]]], "backward"),
        item(backward, "backward", 0, step=-1),
    ]
    optimizer = [item([[[-1, GRADIENT, 1, 0, 0, 1]]] * 5, "optimizer", 0, step=1)]
    sizes = [[4, [0] * 6 + [0]], [6, [0, 0, 0, 0, 0, 1, 0]], [2, [1, 1, 1, 1, 0, 0, 0]]]
    sizes.append([2, [1, 0, 0, 0, 0, 0, 0], 128, 1, [0, 1, 1, 1, 0, 0, 0]])
    body = {
        "atoms": ["B", "F", "H", "W", "T", "R", "S"],
        "runs": [{"list": "blocks", "start": 3, "recorded": 6, "count": 8}],
        "names": ["stem.weight", "attn.weight"],
        "ops": ["empty", "randn", "add", "mul"],
        "sizes": sizes,
        "pieces": {"load": load, "step": step, "optimizer": optimizer},
    }
    return {
        "format": FORMAT,
        "model": "tiny",
        "variant": "step-tiny",
        "versions": {"torch": "2.13.0"},
        "regime": {"T": 11},
        "sums": {"S": [4, ["FHW", "T"]]},
        "operators": [],
        "tape": body,
    }


def parsed(data: object) -> Tape:
    return parse_tape(json.dumps(data))


def unfolded(counts: list[int] | None = None) -> tuple[Program, list[Any]]:
    tape = parsed(tiny())
    program = Program()
    return program, [program.unfold(tape, piece, counts) for piece in ("load", "step", "optimizer")]


def test_a_file_of_format_1_has_the_same_events() -> None:
    data = tiny()
    data["format"] = 1
    _, forward, workspace, backward = data["tape"]["pieces"]["step"]
    for section, frees in ((forward, [[1, 1, 0, 0]]), (workspace, [[2, 0, 0, 0]]), (backward, [[1, 1, 0, 1]])):
        for template in section["templates"]:
            made = [event for event in template["events"] if len(event) > 4]
            template["events"] = [*made, *frees]
    backward["templates"][0]["events"].append([0, 0, 0, 0])
    assert tape_json(parsed(data)) == tape_json(parsed(tiny()))


def test_a_size_is_a_product_of_atoms() -> None:
    tape = parsed(tiny())
    assert [size.value(tape.values(GRID)) for size in tape.sizes[:3]] == [4, 6 * 13, 2 * 2 * 3 * 5 * 7]


def test_a_rounded_dimension_is_rounded_before_it_is_multiplied() -> None:
    tape = parsed(tiny())
    assert tape.sizes[3].value(tape.values(GRID)) == 2 * 2 * 128  # 3 * 5 * 7 = 105 rows, rounded up
    assert tape.sizes[3].value(tape.values({**GRID, "W": 9})) == 2 * 2 * 256  # 135 rows
    assert Monomial(3, (1,), 128, 1, (1,)).value([128]) == 3 * 128 * 128  # a multiple stays what it is


def test_a_copy_made_to_round_a_dimension_up_is_nothing_where_none_is_to_be_rounded() -> None:
    copy = Monomial(2, (1, 0), -8, 1, (0, 1))
    assert [copy.value([3, tokens]) for tokens in (15, 16, 17)] == [2 * 3 * 16, 0, 2 * 3 * 24]


def test_a_dimension_may_be_rounded_for_many_samples_alone() -> None:
    """A file keeps it, and so do shapes that are evaluated at once."""
    data = tiny()
    data["tape"]["sizes"][3] = [2, [0, 0, 1, 1, 0, 0, 0], 128, 1, [0, 1, 0, 0, 0, 0, 0], 2 * 35]
    (tape,) = (parse_tape(json.dumps(tape_json(parsed(data)))),)
    few, many = (tape.values({**GRID, "W": columns}) for columns in (7, 8))  # of 5 rows
    assert [tape.sizes[3].value(values) for values in (few, many)] == [2 * 35 * 3, 2 * 40 * 128]
    atoms = np.array([few, many], dtype=float).T
    assert _evaluate(tape.sizes[3], atoms).tolist() == [2 * 35 * 3, 2 * 40 * 128]


def test_a_sum_is_an_atom_of_its_own() -> None:
    tape = parsed(tiny())
    assert tape.values(GRID)[-1] == 4 + 3 * 5 * 7 + 11


def test_a_length_counted_in_several_is_rounded_up_and_may_be_summed() -> None:
    data = tiny()
    data["rounded"] = {"C": ["T", 4], "P": ["HW", 4]}
    data["sums"] = {"S": [0, ["C", "P"]]}
    data["tape"] |= {"atoms": ["B", "F", "H", "W", "T", "R", "C", "P", "S"], "sizes": []}
    assert parsed(data).values(GRID)[-3:] == [3, 9, 12]  # 11 / 4 and 35 / 4


def test_another_batch_than_recorded_says_what_to_do() -> None:
    data = tiny()
    data["regime"] = {"B": 3}
    with pytest.raises(VplanError, match="batch 2 is not recorded") as caught:
        parsed(data).values(GRID)
    assert "--gradient-accumulation" in caught.value.fix


def test_a_shape_outside_the_regime_is_refused_by_name() -> None:
    with pytest.raises(VplanError, match="tiny is recorded with prompts of 11 tokens, not 12") as caught:
        parsed(tiny()).values({**GRID, "T": 12})
    assert "--text-tokens 11" in caught.value.fix


@pytest.mark.parametrize("count", [5, 6, 8, 30])
def test_every_block_gets_its_weights_under_its_own_name(count: int) -> None:
    program, (load, *_) = unfolded([count])
    names = ["stem.weight", *(f"blocks.{3 + block}.attn.weight" for block in range(count))]
    assert list(program.named["weight"]) == names
    assert load.ops == list(range(1 + count))


def test_blocks_unfold_in_order_and_free_their_own_buffers() -> None:
    program, (load, step, optimizer) = unfolded([6])
    first = len(load.ops)
    stem, backward = first, first + 1 + 2 * 6
    forward = [(first + 1 + 2 * block, first + 2 + 2 * block) for block in range(6)]
    workspace = backward
    expected = [stem]
    for temporary, output in forward:
        expected += [temporary, output, ~temporary]
    expected += [workspace, ~workspace]
    for position, block in enumerate(range(5, -1, -1)):
        expected += [workspace + 1 + position, ~forward[block][1]]
        expected += [~stem] if block == 0 else []
    assert step.ops == expected
    assert optimizer.ops == [~(workspace + 6 - block) for block in range(6)]
    assert program.kernel[workspace] == "flash" and stem not in program.kernel


def test_a_moment_says_pass_and_block() -> None:
    _, (_, step, _) = unfolded([6])
    assert step.moment(0)[1:] == ("forward", "", -1)
    assert step.moment(1)[1:] == ("forward", "blocks", 3)
    assert step.moment(3 * 6 + 1)[1:] == ("backward", "", -1)
    assert step.moment(3 * 6 + 3)[1:] == ("backward", "blocks", 8)
    with pytest.raises(IndexError):
        step.moment(len(step.ops))


@given(st.integers(5, 60))
def test_a_step_leaves_gradients_alone_and_its_peak_is_worked_by_hand(count: int) -> None:
    program, (load, step, optimizer) = unfolded([count])
    sizes = program.bytes_of(GRID)
    allocator = CachingAllocator(expandable_segments=True)
    weights = allocator.run(load.ops, sizes).allocated_peak_bytes
    assert weights == 512 * (1 + count)
    # The last block's forward: the stem's output, every block's output and one temporary.
    assert allocator.run(step.ops, sizes).allocated_peak_bytes == weights + 512 * (1 + count + 1)
    assert allocator.allocated_bytes == weights + 512 * count
    allocator.run(optimizer.ops, sizes)
    assert allocator.allocated_bytes == weights


@given(st.integers(5, 60), st.data())
def test_kept_templates_are_both_ends_and_one_middle(count: int, data: st.DataObject) -> None:
    block = data.draw(st.integers(0, count - 1))
    expected = min(block, 2) if block < count - 2 else 5 - (count - block)
    assert template_of(block, count, 5) == expected


@given(st.integers(1, 4), st.data())
def test_a_short_run_keeps_every_block(count: int, data: st.DataObject) -> None:
    block = data.draw(st.integers(0, count - 1))
    assert template_of(block, count, count) == block


def test_a_run_of_unlike_blocks_says_which_template_each_uses() -> None:
    """Of four blocks recorded whole, the second and the last also hold a tensor twice as large until backward."""
    data = tiny()
    data["tape"]["runs"][0] |= {"recorded": 4, "count": 4}
    load, forward, backward = data["tape"]["pieces"]["load"], *data["tape"]["pieces"]["step"][1::2]
    plain, more = ({"events": events, "work": []} for events in ([alloc(2, ACTIVATION)], [alloc(2, ACTIVATION)] * 2))
    last, freed = ({"events": [[2, 1, 0, part] for part in range(parts)], "work": []} for parts in (1, 2))
    order = [0, 1, 0, 1]
    load[1] = item([[alloc(1, WEIGHT, 1, 0, 0, 1)]] * 4, "load", 0, step=1)
    forward |= {"templates": [plain, more], "order": order}
    backward |= {"templates": [last, freed], "order": order}
    program = Program()
    step = program.unfold(parsed(data), "step")
    made = {moment.block: len(events) for moment, events in step.stretches if moment.passes == "forward"}
    assert [made[block] for block in (3, 4, 5, 6)] == [1, 2, 1, 2]
    inside = [(moment.passes, event) for moment, events in step.stretches for event in events if moment.block >= 0]
    ups = [event for passes, event in inside if passes == "forward"]
    downs = [~event for passes, event in inside if passes == "backward"]
    assert sorted(downs) == sorted(ups)
    with pytest.raises(AssertionError, match="one depth"):
        Program().unfold(parsed(data), "step", [5])


def test_block_of_a_parameter() -> None:
    tape = parsed(tiny())
    assert tape.block_of("blocks.4.attn.weight") == ("blocks", 4)
    assert tape.block_of("stem.weight") is None
    assert tape.block_of("blocks_out.4.weight") is None


def written(folder: Path, data: object) -> Path:
    path = folder / "step-tiny.json.gz"
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    return path


def test_a_file_reads_as_what_was_written(tmp_path: Path) -> None:
    tape = parsed(tiny())
    path = write_packed(tape_json(tape), tmp_path / "step-tiny.json.gz")
    assert vars(read_tape(path)) == vars(tape)
    assert tape_json(read_tape(path)) == tiny()


SAMPLE = [path for path in shipped_tapes() if path.name != PARAMETERS][::160]


@pytest.mark.parametrize("path", SAMPLE, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_shipped_tape_is_written_back_as_it_is(path: Path, tmp_path: Path) -> None:
    tape = read_tape(path)
    assert pack(tape_json(tape)) == pack(read_recording(path))
    for piece in tape.pieces:
        for section in sections_of(tape, piece):
            for template in section.templates:
                assert Template.of(template.events, template.work) == template


def without(*keys: str) -> dict[str, Any]:
    data = copy.deepcopy(tiny())
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    del inner[keys[-1]]
    return data


@pytest.mark.parametrize(
    "data",
    [without("regime"), without("tape"), without("tape", "sizes"), without("tape", "pieces"), [], None, 3, {}],
    ids=["regime", "tape", "sizes", "pieces", "list", "null", "number", "empty"],
)
def test_a_file_that_is_no_tape_is_named_and_refused(tmp_path: Path, data: object) -> None:
    with pytest.raises(VplanError, match=r"tape step-tiny\.json\.gz is damaged"):
        read_tape(written(tmp_path, data))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value that is no table and no list."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))
    else:
        yield path


LEAVES = list(leaves(tiny()))


@example(("tape", "pieces", "load", 1, "templates", 3, "events", 0, 0), True)
@given(st.sampled_from(LEAVES), st.sampled_from([None, "x", "3", 0.5, -1, -7, 3, 99, 10**30, [], {}, [1], True]))
def test_a_wrong_value_anywhere_is_refused_in_one_line_or_changes_what_is_laid_out(
    path: tuple[Any, ...], value: object
) -> None:
    """Whatever is read is laid out and replayed: nothing but a VplanError may come of it."""
    data = copy.deepcopy(tiny())
    inner: Any = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    try:
        tape, program = parsed(data), Program()
        allocator = CachingAllocator(expandable_segments=False)
        stages = [program.unfold(tape, piece) for piece in ("load", "step", "optimizer")]
        sizes = program.bytes_of(GRID)
        for stage in stages:
            allocator.run(stage.ops, sizes)
        walked(tape, GRID, None)
    except VplanError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "event",
    [
        [],
        [1],
        [0, 5, 0, 0, 0, 0, 0],
        [99, 5, 0, 0, 0],
        [-1, 5, 0, 0, 0],
        [0, 7, 0, 0, 0],
        [0, 5, 9, 0, 0],
        [0, 5, -1, 0, 0],
        [0, 5, 0, 2, 0],
        [0.5, 5, 0, 0, 0],
        ["0", 5, 0, 0, 0],
        [9, 1, 0, 0],
        [-1, 1, 0, 0],
        [1, 7, 0, 0],
        [1, 1, 0, 9],
        [1, 1, 0, -1],
        [0, 1, 40, 0],
        [0, 1, 0, 9],
        [0, 1, 0, -1],
        [-1, 1, 1, 5, 0, 1],
        [-1, 1, 1, 0, 0, 9],
        [-1, 9, 1, 0, 0, 1],
        None,
        3,
        "free",
    ],
)
def test_an_event_that_is_none_is_refused_where_it_is_laid_out(event: object) -> None:
    data = copy.deepcopy(tiny())
    data["tape"]["pieces"]["step"][1]["templates"][2]["events"].append(event)
    tape = parsed(data)
    with pytest.raises(VplanError, match="tape step-tiny of tiny is damaged"):
        Program().unfold(tape, "step")
    with pytest.raises(VplanError, match="tape step-tiny of tiny is damaged"):
        walked(parsed(data), GRID, None)


def test_a_small_file_of_endless_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step-tiny.json.gz"
    monkeypatch.setattr(packed_json, "MAX_TEXT_BYTES", 1000)
    path.write_bytes(gzip.compress(b" " * 1001))
    with pytest.raises(VplanError, match=r"tape step-tiny\.json\.gz is damaged \(EOFError\)"):
        read_tape(path)


def test_a_file_cut_short_is_named_and_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = written(tmp_path, tiny())
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(VplanError, match=r"tape step-tiny\.json\.gz is damaged"):
            read_tape(path)


def test_a_file_with_a_wrong_byte_is_never_read_as_something_else(tmp_path: Path) -> None:
    path = written(tmp_path, tiny())
    whole = path.read_bytes()
    for position in range(10, len(whole)):  # a gzip header holds a time and a system, which do not matter
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x41]) + whole[position + 1 :])
        with pytest.raises(VplanError, match=r"tape step-tiny\.json\.gz is damaged"):
            read_tape(path)


def test_another_format_is_refused_by_number(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=f"format {FORMAT + 1}, this vplan reads {FORMAT}"):
        read_tape(written(tmp_path, {**tiny(), "format": FORMAT + 1}))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=r"nothing\.json\.gz"):
        read_tape(tmp_path / "nothing.json.gz")


def test_a_tape_is_what_its_type_says() -> None:
    assert isinstance(parsed(tiny()), Tape)
