"""What a step takes under the torch that will run it: autocast computes RMSNorm in fp32 since 2.12."""

from __future__ import annotations

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.errors import NotRecordedError, VplanError
from planner.estimate.estimate import estimate
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy

MODELS = [name for name in lookup.model_names() if lookup.model(name).traits.rms_norm != "none"]


def peak_bytes(name: str, torch: str | None, **strategy: object) -> int:
    machine = Machine(gpu="h200-141gb", host_ram=2**40, torch=torch)
    job = job_for(lookup.model(name), {"method": "lora"})
    configuration = Configuration.of(job, Strategy.read({"gradient_checkpointing": "none", **strategy}), machine)
    found = estimate(configuration, load_facts(configuration))
    return found.phases["train"].allocated_bytes


@pytest.mark.parametrize("name", MODELS)
def test_a_step_under_an_older_torch_keeps_less(name: str) -> None:
    older = peak_bytes(name, "2.11.0+cu130")
    newer = peak_bytes(name, "2.12")
    assert older == newer if lookup.model(name).traits.rms_norm == "torch-in-fp32" else older < 0.99 * newer
    assert peak_bytes(name, None) == newer == peak_bytes(name, "2.13.0")
    assert peak_bytes(name, "2.9") == older


@pytest.mark.parametrize("name", ["wan2.1-t2v-1.3b", "flux.1-dev"])
def test_without_autocast_both_are_alike(name: str) -> None:
    half = {"autocast": "none", "adapter_dtype": "bf16", "weights_dtype": "bf16"}
    assert peak_bytes(name, "2.11", **half) == peak_bytes(name, "2.13", **half)


def test_a_model_without_torch_s_rms_norm_is_the_same_under_any() -> None:
    assert peak_bytes("cogvideox-2b", "2.4") == peak_bytes("cogvideox-2b", None)


def test_before_there_was_a_kernel_nothing_is_said() -> None:
    with pytest.raises(NotRecordedError, match=r"under torch 2.8.0 is not recorded") as refused:
        peak_bytes("wan2.1-t2v-1.3b", "2.8.0")
    assert "--torch 2.9" in (refused.value.fix or "")


@pytest.mark.parametrize("version", ["", "x", "2", "2.", "2.x", "nightly 2.11", "2.1234"])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(VplanError, match="is not a version"):
        Machine.read({"gpu": "24GB", "torch": version})
