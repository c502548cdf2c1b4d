"""Watching a card: NVML is replaced by a library that answers as real drivers do, and everything above it is ours."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from planner.commands._shared.training.run_progress import Follower
from planner.hardware import nvml
from planner.units import GIB, MIB


class Library:
    """What pynvml answers on a machine with one card; a value that is an error is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used: Any = iter([100 * MIB, *[0] * 10**6])
        self.lists: dict[str, Any] = {"Compute": [], "Graphics": [], "MPSCompute": self.error("NOT_SUPPORTED")}
        self.names = {"GPU-1234"}
        for name, answer in {
            "nvmlInit": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "580",
            "nvmlDeviceGetHandleByUUID": self.handle,
            "nvmlDeviceGetMemoryInfo": self.memory,
            **{f"nvmlDeviceGet{kind}RunningProcesses": self.listing(kind) for kind in self.lists},
        }.items():
            monkeypatch.setattr(pynvml, name, answer)

    @staticmethod
    def error(name: str) -> pynvml.NVMLError:
        return pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))

    def handle(self, uuid: str) -> str:
        if uuid not in self.names:
            raise self.error("NOT_FOUND")
        return uuid

    def memory(self, handle: str, version: int | None = None) -> Any:
        used = self.used if isinstance(self.used, Exception) else next(self.used)
        if isinstance(used, Exception):
            raise used
        return SimpleNamespace(used=used)

    def listing(self, kind: str) -> Callable[[Any], Any]:
        def answer(handle: Any) -> Any:
            found = self.lists[kind]
            if isinstance(found, Exception):
                raise found
            return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in found]

        return answer


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    yield Library(monkeypatch)


def steady(*values: Any) -> Iterator[Any]:
    """These, and then the last for ever."""
    yield from values
    while True:
        yield values[-1]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_use_is_counted_from_where_it_began_and_shares_by_process(library: Library) -> None:
    library.used = steady(GIB, 4 * GIB, 3 * GIB)
    mine, alien = (os.getpid(), 2 * GIB), (2**22 + 5, GIB)
    library.lists["Compute"], library.lists["Graphics"] = [mine, alien], [(2**22 + 6, 7 * MIB)]
    with nvml.DeviceMemory("1234") as watch:
        wait_for(lambda: watch.samples > 5)
        first, second = watch.take(), watch.take()
        assert watch.hertz is not None
    assert (first["device_bytes"], first["used_bytes"]) == (3 * GIB, 4 * GIB)
    assert (second["device_bytes"], second["used_bytes"]) == (2 * GIB, 3 * GIB)
    assert (first["tree_bytes"], first["others_bytes"]) == (2 * GIB, GIB + 7 * MIB)
    assert (watch.base_bytes, watch.driver, watch.missing) == (GIB, "580", [])


def test_a_childs_memory_is_the_trees(library: Library) -> None:
    library.lists["Compute"] = [(os.getpid(), GIB)]
    card = nvml.Card("1234")
    shares = nvml.CardShares(card, nvml.CardUse(card), root=os.getppid())
    assert shares.take() == {"tree_bytes": GIB, "others_bytes": 0}


@pytest.mark.parametrize(
    ("change", "missing", "device"),
    [
        # GB10 shares its memory with the CPU; it still lists processes
        (lambda lib: setattr(lib, "used", lib.error("NOT_SUPPORTED")), ["device_bytes: NVML says Not Supported"], None),
        # a container lists nobody, though the card fills
        (
            lambda lib: lib.lists.update(Compute=[]),
            ["tree_bytes, others_bytes: NVML lists no process of ours, as in a container that hides pids"],
            GIB,
        ),
        # Windows: it lists them, without a number
        (
            lambda lib: lib.lists.update(Compute=[(os.getpid(), None)]),
            ["tree_bytes, others_bytes: this driver does not count memory by process (WDDM)"],
            GIB,
        ),
        # MIG without the privilege to ask
        (
            lambda lib: lib.lists.update(dict.fromkeys(lib.lists, lib.error("NO_PERMISSION"))),
            ["tree_bytes, others_bytes: NVML says Insufficient Permissions"],
            GIB,
        ),
        # a driver older than R510
        (
            lambda lib: lib.lists.update(dict.fromkeys(lib.lists, pynvml.NVMLLibraryMismatchError())),
            ["tree_bytes, others_bytes: NVML says Function Not Found"],
            GIB,
        ),
        # a card that falls off the bus in the middle
        (
            lambda lib: setattr(lib, "used", steady(0, lib.error("GPU_IS_LOST"))),
            ["device_bytes: NVML says GPU is lost"],
            None,
        ),
    ],
)
def test_what_cannot_be_had_is_named_and_the_rest_goes_on(
    library: Library, change: Callable[[Library], Any], missing: list[str], device: int | None
) -> None:
    library.used = steady(0, GIB)
    library.lists["Compute"] = [(os.getpid(), GIB)]
    change(library)
    card = nvml.Card("1234")
    use = nvml.CardUse(card)
    shares = nvml.CardShares(card, use)
    found = {**use.take(), **shares.take()}
    assert [*use.missing, *shares.missing] == missing
    assert found["device_bytes"] == device
    assert (found["tree_bytes"] is None) == any("tree_bytes" in words for words in missing)
    use.sample()
    assert len(use.missing) <= 1


def test_an_old_driver_knows_version_1_only(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def old(handle: str, version: int | None = None) -> Any:
        if version:
            raise library.error("FUNCTION_NOT_FOUND")
        return SimpleNamespace(used=7)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", old)
    assert nvml.Card("1234").used_bytes() == 7


def test_a_slice_of_a_card_is_found_by_its_own_name(library: Library) -> None:
    """torch leaves out what stands before the number."""
    library.names = {"MIG-1234"}
    assert nvml.Card("1234").handle == nvml.Card("MIG-1234").handle == "MIG-1234"
    lost = nvml.Card("99")
    assert (lost.handle, lost.fault) == (None, "NVML says Not Found")


def test_without_nvml_nothing_is_known_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    with nvml.DeviceMemory("1234") as watch:
        found = watch.take()
    assert found["device_bytes"] is found["tree_bytes"] is watch.driver is None
    assert watch.missing == [
        "device_bytes: NVML says NVML Shared Library Not Found",
        "tree_bytes, others_bytes: NVML says NVML Shared Library Not Found",
    ]


def test_a_new_counter_is_one_class(library: Library) -> None:
    class Looks:
        def __init__(self) -> None:
            self.missing: list[str] = []
            self.count = 0

        def sample(self) -> None:
            self.count += 1

        def take(self) -> dict[str, int | None]:
            return {"looks": self.count}

    with nvml.DeviceMemory("1234", Looks()) as watch:
        wait_for(lambda: (watch.take()["looks"] or 0) > 2)


# ---- what a run's follower says of it

COUNTERS = ("allocated_bytes", "reserved_bytes", "device_bytes", "retries")


def test_peaks_above_the_estimate_and_retries_are_said_at_once(tmp_path: Any, capsys: Any) -> None:
    import json

    path = tmp_path / "metrics.jsonl"
    follower = Follower(path, steps=4, every=4, high_bytes=10 * GIB)

    def step(number: int, device: int, retries: int) -> str:
        line = {"step": number, "loss": 1.0, "seconds": 1.0, "device_bytes": device, "retries": retries}
        with path.open("a") as file:
            file.write(json.dumps({**line, "allocated_bytes": 1, "reserved_bytes": 1}) + "\n")
        follower.tick()
        return str(capsys.readouterr().err)

    assert step(1, 10 * GIB, 2) == ""
    assert "used 11.0 GiB on the device; the plan expects at most 10.0 GiB" in step(2, 11 * GIB, 0)
    assert "step 3 emptied the allocator's cache 2 times" in step(3, 12 * GIB, 2)
    assert "warning" not in step(4, 13 * GIB, 2)
    assert len(follower.warnings) == 2


def test_who_follows_an_attempt_goes_on_from_who_followed_the_one_before(tmp_path: Any) -> None:
    """A run that stepped down keeps its peaks and samples; what is made again is named once."""
    import json

    path = tmp_path / "metrics.jsonl"

    def wrote(follower: Follower, *lines: dict[str, Any]) -> Follower:
        with path.open("a") as file:
            file.writelines(json.dumps(dict.fromkeys(COUNTERS) | line) + "\n" for line in lines)
        follower.tick()
        return follower

    samples = {"step": 2, "samples": ["a.mp4"], "note": None, "device_bytes": 8 * GIB}
    step = {"step": 2, "loss": 1.0, "seconds": 1.0, "device_bytes": 9 * GIB}
    first = wrote(Follower(path, steps=4, every=4, high_bytes=None), step, samples)
    second = Follower(path, 4, 4, None, 1, first)
    assert second.last == first.last
    again = {**samples, "samples": ["a.mp4", "b.mp4"]}
    wrote(second, {**step, "device_bytes": 5 * GIB}, again, {**step, "step": 3, "device_bytes": 6 * GIB})
    assert second.peaks == {"device_bytes": 9 * GIB}
    assert [name.rpartition("/")[2] for name in second.samples] == ["a.mp4", "b.mp4"]
    assert second.last is not None and second.last["step"] == 3
