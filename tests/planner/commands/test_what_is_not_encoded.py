"""What `vplan train` cannot read of a model's samples is said once for all models that lack the same."""

from __future__ import annotations

import io

from planner.catalog import lookup
from planner.commands._shared.rendering.render import print_data
from planner.terminal import console


def printed(*names: str) -> list[str]:
    stream = io.StringIO()
    print_data(console(file=stream, width=200), *map(lookup.model, names))
    return stream.getvalue().splitlines()


def test_a_line_for_all_that_lack_the_same() -> None:
    (line,) = printed("ltx-2", "sdxl", "ltx-2.3", "ltx-2.5")
    assert line.startswith("ltx-2, ltx-2.3, ltx-2.5: `vplan train` cannot encode sound")
    assert line.endswith(", and takes encoded samples only")
    assert printed("sdxl") == []


def test_models_that_lack_other_things_have_lines_of_their_own() -> None:
    other = next(
        name
        for name in lookup.model_names()
        if lookup.model(name).traits.not_encoded not in ("", None)
        and lookup.model(name).traits.not_encoded != lookup.model("ltx-2").traits.not_encoded
    )
    assert [line.partition(":")[0] for line in printed("ltx-2", other, "ltx-2.3")] == ["ltx-2, ltx-2.3", other]
