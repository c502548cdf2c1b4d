"""What torch's memory history is made into: totals over events, what is alive, few points, bytes by stack."""

from __future__ import annotations

from typing import Any

from trainers.observer.memory_history import BUCKETS, StackTable, live_after, running_totals, thinned


def event(action: str, size: int, addr: int = 0, *lines: int) -> dict[str, Any]:
    frames = [{"filename": "/home/me/train.py", "line": line, "name": "f"} for line in lines]
    return {"action": action, "size": size, "addr": addr, "frames": frames}


TRACE = [
    event("segment_alloc", 4096),
    event("alloc", 1000, 1),
    event("alloc", 512, 2),
    event("free_requested", 1000, 1),
    event("free_completed", 1000, 1),
    event("alloc", 300, 1),
    event("segment_free", 4096),
]


def test_totals_are_of_rounded_blocks() -> None:
    allocated, reserved = running_totals(TRACE)
    assert allocated == [0, 1024, 1536, 1536, 512, 1024, 1024]
    assert reserved == [4096] * 6 + [0]


def test_an_address_may_be_given_again() -> None:
    assert [entry["size"] for entry in live_after(TRACE)] == [512, 300]
    assert [entry["size"] for entry in live_after(TRACE[:3])] == [1000, 512]


def test_few_points_have_every_peak() -> None:
    count = 50 * BUCKETS
    allocated = [index % 97 for index in range(count)]
    reserved = [index % 89 for index in range(count)]
    allocated[12_345], reserved[23_456], allocated[777] = 5000, 6000, -1
    chosen = thinned(allocated, reserved)
    assert {0, 777, 12_345, 23_456, count - 1} <= set(chosen)
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= 3 * BUCKETS + 2
    assert thinned([3, 1, 2], [1, 2, 3]) == [0, 1, 2]


def test_stacks_without_frames_of_torch() -> None:
    table = StackTable(("/venv/torch/",))
    torch = {"filename": "/venv/torch/nn/linear.py", "line": 1, "name": "forward"}
    own = [{"filename": "/home/me/train.py", "line": line, "name": "f"} for line in (7, 3)]
    table.add([torch, *own], 100)
    table.add([torch, torch, *own], 50)
    table.add([torch], 8)
    facts = table.to_json()
    assert [frame["line"] for frame in facts["frames"]] == [3, 7]
    assert facts["stacks"] == [
        {"frames": (0, 1), "bytes": 150, "blocks": 2},
        {"frames": (), "bytes": 8, "blocks": 1},
    ]
