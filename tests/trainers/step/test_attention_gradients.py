"""trainers/step/attention_kernels.py, `lay_out_gradients`: backward of attention meets one layout of gradients for each
layout of q, k and v, by which torch keeps cuDNN's plans.

On the CPU, where strides are those of a GPU and the kernel reads them right.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from diffusers import ModelMixin  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from planner.spec.job import Strategy  # noqa: E402
from tests.trainers.step.test_step import BLOCKS, batch, built, job, tiny  # noqa: E402
from trainers.families import family  # noqa: E402
from trainers.step import attention_kernels, step  # noqa: E402

Layouts = dict[tuple[Any, ...], set[tuple[int, ...]]]
SLICED = {"flux.1-dev", "flux.1-kontext-dev", "chroma1-hd", "longcat-image"}


class Backwards(TorchDispatchMode):
    """Notes sizes and strides of q, k and v in backward -> strides of the output's gradient."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.seen: Layouts = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product") and name.endswith("_backward"):
            gradient, *inputs = args[:4]
            self.seen[tuple((value.shape, value.stride()) for value in inputs)].add(gradient.stride())
        return func(*args, **(kwargs or {}))


def gradients(name: str, mended: bool, **strategy: str) -> tuple[Layouts, list[Any]]:
    profile = tiny(name)
    trainee, chosen = built(profile, "lora", gradient_checkpointing="full", **strategy)
    if mended:
        attention_kernels.lay_out_gradients(trainee.model)
    torch.manual_seed(2)
    with Backwards() as backwards:
        step.forward(trainee, family(profile), batch(profile, chosen), chosen).backward()
    return backwards.seen, [parameter.grad for parameter in trainee.trainable.values()]


@BLOCKS
def test_a_plan_meets_one_layout_of_gradients(name: str) -> None:
    before, expected = gradients(name, mended=False)
    assert any(len(strides) > 1 for strides in before.values()) == (name in SLICED)
    after, found = gradients(name, mended=True)
    assert after and all(len(strides) == 1 for strides in after.values())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True) if one is not None)


@pytest.mark.parametrize(
    ("attention", "device", "major", "expected"),
    [
        ("sdpa", "cuda", 9, True),
        ("sdpa", "cuda", 10, True),
        ("sdpa", "cuda", 8, False),
        ("sdpa", "cuda", 12, False),
        ("sdpa", "cpu", 9, False),
        ("cudnn", "cuda", 8, True),
        ("flash", "cuda", 9, False),
    ],
)
def test_only_where_cudnn_runs(
    monkeypatch: pytest.MonkeyPatch, attention: str, device: str, major: int, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert attention_kernels.cudnn_runs(attention, torch.device(device)) is expected
    model = step.build_model(tiny("flux.1-dev"), job(tiny("flux.1-dev")), Strategy())
    monkeypatch.setattr(ModelMixin, "set_attention_backend", lambda *_: None)  # it looks for the kernels here
    step.choose_kernels(model, tiny("flux.1-dev"), Strategy(attention=attention), torch.device(device))
    hooked = [module for module in model.modules() if module._forward_hooks]
    assert len(hooked) == (2 if expected else 0)
