"""A run that is asked to stop by Ctrl-C."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from planner.launch.stop import STOP_REQUEST, first_interrupt_stops


def test_the_first_ctrl_c_asks_and_the_second_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), first_interrupt_stops(tmp_path):
            signal.raise_signal(signal.SIGINT)
            assert (tmp_path / STOP_REQUEST).exists() and "Ctrl-C again" in capsys.readouterr().err
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with first_interrupt_stops(tmp_path):
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_ignores_ctrl_c_goes_on_doing_so(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with first_interrupt_stops(tmp_path):
            signal.raise_signal(signal.SIGINT)
        assert not (tmp_path / STOP_REQUEST).exists()
    finally:
        signal.signal(signal.SIGINT, before)
