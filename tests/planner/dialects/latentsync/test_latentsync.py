"""LatentSync's configs: stage 1 is read, and stage 2 refused as what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from planner import dialects
from planner.dialects.base import flags
from planner.dialects.base.dialect import translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError


def shipped(name: str, folder: Path) -> Path:
    """A config with the keys and values of the repository's."""
    tree: dict[str, dict[str, object]] = {}
    for key, flag in flags.script("latentsync", f"configs/unet/{name}").flags.items():
        table, _, last = key.partition(".")
        if flag.default is not None and "." not in last:
            tree.setdefault(table, {})[last] = flag.default
    (folder / name).write_text(yaml.safe_dump(tree))
    return folder / name


@pytest.mark.parametrize("name", ["stage2.yaml", "stage2_512.yaml", "stage2_efficient.yaml"])
def test_the_first_answer_to_stage_2_is_that_it_is_not_recorded(name: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="stage 2 is not recorded") as error:
        translate(*dialects.read_script(from_file(shipped(name, tmp_path))))
    assert "leave" not in error.value.fix  # a config with less of it would be priced as stage 1


def test_stage_1_is_read(tmp_path: Path) -> None:
    assert translate(*dialects.read_script(from_file(shipped("stage1.yaml", tmp_path)))).job["frames"] == 16
