"""Settings of other trainers that no binding reads: each is read, said beside the answer, refused, or does nothing."""

import re
from pathlib import Path

import pytest

import planner.dialects
import profiles
from planner.dialects.base import flag_effects, flags
from planner.dialects.base.flag_effects import FlagEffects
from planner.errors import VplanError

WITH_EFFECTS = sorted(path.stem for path in profiles.FLAG_EFFECTS.glob("*.toml"))
READERS = Path(planner.dialects.__file__).parent


def known_names(trainer: str) -> set[str]:
    """Every flag and key of a trainer's scripts and files, but those that are gone."""
    return {name for script in flags.scripts(trainer) for name, flag in script.flags.items() if not flag.gone}


def read_words(trainer: str) -> set[str]:
    """The words of the code that reads a trainer, without the dots and dashes between them."""
    folders = (trainer.replace("-", "_"), f"{trainer.replace('-', '_')}_", "base", "accelerate")
    files = [path for path in READERS.rglob("*.py") if path.parent.name.startswith(folders)]
    return {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("trainer", WITH_EFFECTS)
def test_no_setting_passes_in_silence(trainer: str) -> None:
    known, words, said = known_names(trainer), read_words(trainer), flag_effects.effects(trainer)
    unpriced = [name for row in said.unpriced for name in row.names]
    named = [*unpriced, *said.nothing]
    assert len(set(named)) == len(named), "a setting is named twice"
    assert set(named) <= known, "a setting that the trainer does not have"
    read = {name for name in known if set(re.findall(r"\w+", name.rpartition(".")[2])) <= words}
    assert sorted(known - read - set(named)) == []


def test_a_setting_is_said_where_it_acts() -> None:
    said = FlagEffects.read(
        {
            "unpriced": [
                {"names": ["a[].b"], "why": "one more pass", "source": "x.py", "needs": "more", "off": ["usual"]},
                {"names": ["--c"], "why": "tiles", "source": "x.py", "needs": "less", "scripts": ["flux_train.py"]},
            ]
        }
    )
    given = {"config:a[3].b": True, "--c": "yes"}
    assert [name for name, _ in said.acting({**given, "script": "some/flux_train.py"})] == ["a[].b", "--c"]
    assert [name for name, _ in said.acting({**given, "script": "sdxl_train.py"})] == ["a[].b"]
    for off in (False, 0, "none", "", None, "usual"):
        assert not list(said.acting({"config:a[0].b": off}))


def test_what_is_refused_is_said_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "FLAG_EFFECTS", tmp_path)
    text = '[[unpriced]]\nnames = ["--two"]\nwhy = "a second model"\nsource = "x.py"\nneeds = "more"\n'
    (tmp_path / "told.toml").write_text(text)
    (tmp_path / "refused.toml").write_text(f"{text}refused = true\n")
    assert flag_effects.notes("nobody", {"--two": True}) == ()
    (note,) = flag_effects.notes("told", {"--two": True, "--other": 1})
    assert note == "--two is not estimated (a second model), and takes more than this"
    with pytest.raises(VplanError, match=r"--two is not priced \(a second model\)"):
        flag_effects.notes("refused", {"--two": True})
