"""Ranks that encode on one computer load their encoders one after another: host RAM may have room for one."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.trainers import tiny
from tests.trainers.data.caching import setting
from trainers.data import cache, parts


def test_ranks_load_an_encoder_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = setting(tiny.folder(tmp_path / "model", tiny.profile("wan2.1-t2v-1.3b")), tmp_path / "cache")
    builds = [cache.CacheBuild(one) for _ in range(3)]
    for rank, build in enumerate(builds):
        build.setting = dataclasses.replace(one, rank=rank, ranks=3)
    load, loading, most = parts.load, [], []

    def observed(*arguments: Any) -> Any:
        loading.append(1)
        most.append(len(loading))
        time.sleep(0.2)
        model = load(*arguments)
        loading.pop()
        return model

    monkeypatch.setattr(parts, "load", observed)
    with ThreadPoolExecutor(3) as pool:  # a lock of the kernel's is of an open file, so threads show it too
        made = list(pool.map(lambda build: build._load(build.text_turns[0]), builds))
    assert all(encoder.model is not None for encoder in made)
    assert most == [1, 1, 1]
