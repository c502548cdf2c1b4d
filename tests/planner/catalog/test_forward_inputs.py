"""What `--inputs` and a dry run say of an argument of `forward`: read as sizes, refused in one line otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

import profiles
from planner.catalog.forward_call import ForwardCall
from planner.catalog.forward_inputs import check, leaves, length, parse_argument
from planner.catalog.own_inputs import OwnInputs
from planner.errors import VplanError

GRID = {"B": 2, "F": 3, "H": 5, "W": 7, "T": 11, "E": 13}


@pytest.mark.parametrize(
    ("text", "shape", "kind"),
    [
        ("B 16 F 2H 2W", (2, 16, 3, 10, 14), "float"),
        ("B FHW+T 64", (2, 116, 64), "float"),
        ("B T ones", (2, 11), "ones"),
        ("BF 4 8H 8W", (6, 4, 40, 56), "float"),
        ("B timestep", (2,), "timestep"),
        ("timestep", (), "timestep"),
        ("number 2H", (10,), "number"),
        ("number 25.0", (25,), "number"),
        ("FHW 3 fp32", (105, 3), "fp32"),
        ("B 3 4F-3 512", (2, 3, 9, 512), "float"),
        ("B 2F+HW-1", (2, 40), "float"),
    ],
)
def test_a_description_is_a_shape(text: str, shape: tuple[int, ...], kind: str) -> None:
    argument = parse_argument(text, "x")
    assert (argument.shape(GRID), argument.kind) == (shape, kind)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("B 16 X", "'X' is no size"),
        ("B 16 -3", "'-3' is no size"),
        ("B 16 4F-H", "'4F-H' is no size"),
        ("B T onse", "'onse' is no kind of tensor"),
        ("", "is '', not a shape"),
        (7, "is 7, not a shape"),
        ("number", '"number" needs one size'),
        ("B " + "9" * 40, "is no size"),
    ],
)
def test_anything_else_is_refused_in_one_line(text: object, complaint: str) -> None:
    with pytest.raises(VplanError) as refused:
        parse_argument(text, "inputs.x")
    assert complaint in refused.value.message and "\n" not in refused.value.message + refused.value.fix
    assert refused.value.message.startswith("inputs.x")


def test_a_list_has_an_entry_for_each_sample() -> None:
    found = list(leaves({"samples": [["number F", "number H"]]}, "img_shapes"))
    assert [(name, per_sample) for name, _, per_sample in found] == [("img_shapes.0.0", True), ("img_shapes.0.1", True)]
    with pytest.raises(VplanError, match="stands beside other keys"):
        check({"x": {"samples": "T 4", "more": "T 4"}}, "file.toml")


def test_a_list_has_an_entry_for_each_block() -> None:
    assert check({"texts": {"blocks": "B T ?"}}, "file.toml")
    with pytest.raises(VplanError, match="'blocks' stands beside other keys"):
        check({"x": {"blocks": "T 4", "more": "T 4"}}, "file.toml")


def test_a_length_may_be_one_that_is_rounded_up() -> None:
    assert length("2F+P+T+5", "lengths", {"P"}) == (5, ("F", "F", "T", "P"))
    with pytest.raises(VplanError, match=r"'T\+P' is no size"):
        length("T+P", "lengths")


def test_a_table_nested_without_end_is_refused() -> None:
    tree: object = "B 4"
    for _ in range(50):
        tree = {"deeper": tree}
    with pytest.raises(VplanError, match="nested too deeply"):
        check({"x": tree}, "file.toml")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('inputs.hidden_states = "B 16 Q"', "'Q' is no size"),
        ("inputs = 3", "inputs"),
        ("kind = 'sound'", "kind"),
        ('input.hidden_states = "B 16"', "input"),
        ("patch = [1, 2]", "patch"),
        ("vae = { spatial = -8 }", "spatial"),
        ("inputs.x = ", "file.toml"),
        ('rounded.P = { product = "2HW", unit = 32 }', "rounded.P is no product"),
        ('rounded.T = { product = "HW", unit = 32 }', "rounded"),
        ('lengths = ["P+T"]', "'P+T' is no size"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    place = tmp_path / "file.toml"
    place.write_text(text)
    with pytest.raises(VplanError) as refused:
        OwnInputs.from_file(place)
    assert complaint in refused.value.message and "\n" not in refused.value.message


def test_a_file_is_read(tmp_path: Path) -> None:
    place = tmp_path / "file.toml"
    place.write_text('kind = "image"\ntext_tokens = 77\nvae = { spatial = 8 }\ninputs.sample = "B 4 8H 8W"\n')
    found = OwnInputs.from_file(place)
    assert found.vae and (found.kind, found.text_tokens, found.vae.spatial, found.vae.temporal) == ("image", 77, 8, 1)
    assert found.inputs == {"sample": "B 4 8H 8W"}


def test_what_the_user_says_stands_beside_what_is_known_of_a_class() -> None:
    known = OwnInputs.read({"patch": [1, 2, 2], "inputs": {"x": "B HW ?", "mask": "B T ones"}})
    both = OwnInputs.read({"kind": "video", "inputs": {"mask": "none"}}).beside(known)
    assert (both.kind, both.patch, both.inputs) == ("video", (1, 2, 2), {"x": "B HW ?", "mask": "none"})
    assert OwnInputs.of_class("NoSuchClass") == OwnInputs()


@pytest.mark.parametrize("place", sorted(profiles.CLASSES.glob("*.toml")), ids=lambda place: place.stem)
def test_what_is_known_of_a_class_can_be_read(place: Path) -> None:
    assert OwnInputs.of_class(place.stem) != OwnInputs()


def test_parameters_without_gradient_are_known_at_any_depth() -> None:
    call = ForwardCall.read(
        {
            "forward": {"x": "B 4"},
            "main": "x",
            "channel_axis": 1,
            "idle": ["blocks.-1.ff_context.weight", "blocks.*.unused", "outside.bias", "others.image.*.to_q.weight"],
        }
    )
    assert call.is_idle("blocks.5.ff_context.weight", {"blocks": 6}) and call.is_idle("outside.bias", {"blocks": 6})
    assert not call.is_idle("blocks.5.ff_context.weight", {"blocks": 7}) and call.is_idle(
        "blocks.2.unused", {"blocks": 7}
    )
    assert not call.is_idle("blocks.5.ff.weight", {"blocks": 6})
    assert call.is_idle("blocks.5.ff_context.lora_A.default.weight", {"blocks": 6})
    assert call.is_idle("others.image.4.to_q.lora_A.default.weight", {"blocks": 6}), "a list that no forward calls"
    assert not call.is_idle("blocks.5.ff.lora_B.default.weight", {"blocks": 6})
