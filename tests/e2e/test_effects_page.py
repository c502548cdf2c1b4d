"""docs/effects.md is maintained by hand: the names it gives exist in the code, and its counts match its items."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "effects.md").read_text(encoding="utf-8")
ITEMS = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)


def test_every_name_is_in_the_file_before_it() -> None:
    for number, said in ITEMS:
        text = None
        for name in re.findall(r"`([^`]+)`", said):
            if "/" in name:
                text = (ROOT / name).read_text(encoding="utf-8")
            elif not name.startswith(("-", "vplan ")):
                assert text is not None and re.search(rf"\b{name}\b", text), f"{number}: {name}"


def test_the_counts_are_those_of_the_items() -> None:
    assert [int(number) for number, _ in ITEMS] == list(range(1, 38))
    partly, out = ([number for number, said in ITEMS if word in said] for word in ("*Partly*", "*Not in*"))
    said = f"{37 - len(partly) - len(out)} are in, {len(partly)} are in partly ({', '.join(partly)}) and {len(out)} are"
    assert f"{said} not ({', '.join(out)});" in " ".join(PAGE.split())
