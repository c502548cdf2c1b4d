"""The laws of the ledger hold its code: every mutant that lacks one of its guards makes a law fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import vplan

LOCK, DISK = "test_a_row_waits_for_the_lock", "test_a_row_is_on_the_disk_when_it_is_said_to_be_kept"
TORN, PART = "test_what_is_no_row_stays_and_is_passed_over", "test_no_room_left_leaves_the_file_as_it_was"
WRITE = "        written = os.write(descriptor, line)\n"
BREAK = '            line = b"\\n" + line\n'
MUTANTS = {
    "as it is": ("", "", " or ".join((LOCK, DISK, TORN, PART))),
    "no lock": ("        lock_file(descriptor)  #", "        pass  #", LOCK),
    "a lock that is given back before the row": ("                with _locked(descriptor):\n                    _add",
                                                 "                with _locked(descriptor):\n                    pass\n"
                                                 "                _unlock(descriptor)\n                _add", LOCK),
    "no fsync": ("        os.fsync(descriptor)\n", "", DISK),
    "fsync before the row": (WRITE, "        os.fsync(descriptor)\n        os.fsync = lambda _: None\n" + WRITE, DISK),
    "a row behind a torn line": (BREAK, "            pass\n", TORN),
    "a torn line is cut away": (BREAK, "            os.ftruncate(descriptor, 0)\n", TORN),
    "a torn line ends the reading": ("            return None\n\n    def find",
                                     "            raise\n\n    def find", TORN),
    "a part of a row stays": ("        os.ftruncate(descriptor, end)\n", "", PART),
    "a part of a row counts as one": ("        if written < len(line):\n", "        if written < 0:\n", PART),
}  # fmt: skip
"""What stands in the code, what the mutant has there, and the law that it breaks."""

MUTATED = """
import fcntl, importlib.util, sys
import pytest
import planner.evidence
name, path, old, new, law = "planner.evidence.ledger", *sys.argv[1:5]
source = open(path, encoding="utf-8").read()
assert not old or source.count(old) == 1, old
module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
module._unlock = lambda descriptor: fcntl.flock(descriptor, fcntl.LOCK_UN)
sys.modules[name] = planner.evidence.ledger = module
exec(compile(source.replace(old, new) if old else source, path, "exec"), module.__dict__)
sys.exit(pytest.main(["-n0", "-q", "-p", "no:cacheprovider", sys.argv[5], "-k", law]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="its locks are others")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_breaks_its_law(mutant: str) -> None:
    old, new, law = MUTANTS[mutant]
    path = Path(vplan.HOME) / "planner" / "evidence" / "ledger.py"
    command = [sys.executable, "-c", MUTATED, str(path), old, new, law, str(Path(__file__).with_name("test_ledger.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=vplan.HOME)
    assert done.returncode == (mutant != "as it is"), done.stdout + done.stderr
