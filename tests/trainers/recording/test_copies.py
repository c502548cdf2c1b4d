"""What CUDA copies before it computes is recorded: inputs that an operator cannot read in the order they lie in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn import functional  # noqa: E402

from trainers.recording.cuda_ops import cuda_semantics  # noqa: E402
from trainers.recording.recorder import Recorder  # noqa: E402

IMAGE = (2, 8, 6, 6)
KERNEL = (8, 8, 1, 1)


def rise(change: Callable[[torch.Tensor], torch.Tensor], compute: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Bytes above its input and its output that an operator had, on an image whose strides were changed."""
    recorder = Recorder()
    with cuda_semantics(), FakeTensorMode(), torch.no_grad():
        image = change(torch.empty(IMAGE))
        with recorder:
            out = compute(image)
    sizes = [allocation.nbytes for allocation in recorder.recording.allocations]
    held = most = 0
    for event in recorder.recording.events:
        held += sizes[event] if event >= 0 else -sizes[~event]
        most = max(most, held)
    return most - out.untyped_storage().nbytes()


def convolution(image: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(image, torch.empty(KERNEL))


def upsampling(image: torch.Tensor) -> torch.Tensor:
    return functional.interpolate(image, scale_factor=2.0, mode="nearest")


def norm(image: torch.Tensor) -> torch.Tensor:
    return torch.native_layer_norm(image, (6,), None, None, 1e-5)[0]


NBYTES = 4 * 2 * 8 * 6 * 6
STATISTICS = 2 * 4 * 2 * 8 * 6
"""Mean and deviation of each row, which a norm returns as well."""


@pytest.mark.parametrize(("compute", "beside"), [(convolution, 4 * 8 * 8), (upsampling, 0), (norm, STATISTICS)])
def test_scattered_inputs_are_copied_and_rows_are_not(
    compute: Callable[[torch.Tensor], torch.Tensor], beside: int
) -> None:
    assert rise(lambda image: image, compute) == beside
    assert rise(lambda image: image.transpose(0, 1).contiguous().transpose(0, 1), compute) == beside + NBYTES


@pytest.mark.parametrize(("compute", "copied"), [(convolution, 0), (upsampling, 0), (norm, NBYTES)])
def test_channels_last_is_an_order_that_images_are_read_in(
    compute: Callable[[torch.Tensor], torch.Tensor], copied: int
) -> None:
    plain = rise(lambda image: image, compute)
    assert rise(lambda image: image.contiguous(memory_format=torch.channels_last), compute) == plain + copied
