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


def test_upsampling_copies_when_it_has_its_output_and_a_norm_before() -> None:
    """As the trace of Wan's decode on a virtual GPU has it, and native/cuda/UpSampleNearest2d.cu."""

    def made(compute: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
        with cuda_semantics(), FakeTensorMode(), torch.no_grad():
            image = torch.empty(IMAGE).transpose(0, 1).contiguous().transpose(0, 1)
            with Recorder() as recorder:
                compute(image)
        sizes = [allocation.nbytes for allocation in recorder.recording.allocations]
        return [sizes[event] for event in recorder.recording.events if event >= 0]

    assert made(upsampling) == [4 * NBYTES, NBYTES]
    assert made(norm) == [NBYTES, NBYTES, STATISTICS // 2, STATISTICS // 2]
    assert made(lambda image: functional.conv2d(image, torch.empty(4, 8, 1, 1))) == [4 * 4 * 8, NBYTES, NBYTES // 2]


@pytest.mark.parametrize(("compute", "copied"), [(convolution, 0), (upsampling, 0), (norm, NBYTES)])
def test_channels_last_is_an_order_that_images_are_read_in(
    compute: Callable[[torch.Tensor], torch.Tensor], copied: int
) -> None:
    plain = rise(lambda image: image, compute)
    assert rise(lambda image: image.contiguous(memory_format=torch.channels_last), compute) == plain + copied


def test_groups_are_normed_in_a_contiguous_copy_that_stays() -> None:
    """torch's CUDA kernel reads no other order, and returns a contiguous output (native/group_norm.cpp)."""
    weight = torch.ones(8)
    with cuda_semantics(), FakeTensorMode(allow_non_fake_inputs=True):
        image = torch.empty(IMAGE).to(memory_format=torch.channels_last).requires_grad_()
        with Recorder() as recorder:
            normed = torch.nn.functional.group_norm(image, 4, weight)
    sizes = [recorder.recording.allocations[event].nbytes for event in recorder.recording.events]
    assert normed.is_contiguous() and min(recorder.recording.events) >= 0, "nothing is freed"
    assert [size for size in sizes if size == NBYTES] == [NBYTES, NBYTES]


def joined(width: int) -> list[tuple[int, ...]]:
    """Strides on the way of rows that become an image, as attention's in a UNet, and are joined to another."""
    rows, residual = torch.zeros(1, 16, width), torch.zeros(1, width, 4, 4)
    image = rows.transpose(-1, -2).reshape(1, width, 4, 4)
    summed = image + residual
    scaled = summed / 1.5
    return [each.stride() for each in (image, summed, scaled, torch.cat([scaled, scaled * 2], dim=1))]


def test_an_image_of_one_sample_has_the_strides_of_a_real_one() -> None:
    expected = joined(8)
    with cuda_semantics(), FakeTensorMode(), Recorder():
        assert joined(8) == expected
    assert expected[-1] == (16 * 16, 16, 4, 1), "two that are channels last but for their sample are joined contiguous"
