"""trainers/recording/cuda_ops.py: shipped tapes show no unclassified operator, and CPU tensors take CUDA's path
meanwhile."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import profiles
from planner.catalog import lookup
from planner.tape.format import Monomial
from planner.tape.packs import Pack
from planner.tape.parameter_table import FILE as PARAMETERS
from planner.tape.variants.inventory import step_variants
from trainers.recording import cuda_ops, op_table
from trainers.recording.cuda_ops import Rounded, autocast_lists, cuda_semantics, workspaces
from trainers.recording.factoriser import Factoriser
from trainers.recording.recorder import Recorder
from trainers.recording.tapes import shallow_config
from trainers.step import step

FLOAT, HALF = torch.float32, torch.bfloat16
TABLES = {
    "SAME": op_table.SAME,
    "KNOWN_SMALL": op_table.KNOWN_SMALL.keys(),
    "UNMODELLED": op_table.UNMODELLED.keys(),
    "WORKSPACES": cuda_ops.WORKSPACES.keys(),
}


def shipped_operators() -> dict[str, str]:
    """Operator -> a tape that shows it."""
    found: dict[str, str] = {}
    for pack in map(Pack.read, profiles.TAPES.glob("*.zip")):
        for model, tape in [(folder, name) for folder in pack.folders for name in pack.names(folder)]:
            if tape != PARAMETERS:  # numbers for templates, which takes a tenth of the time
                found |= dict.fromkeys(pack.body(model, tape, int)["operators"], f"{model}/{tape}")
    return found


def test_every_operator_of_every_shipped_tape_is_classified() -> None:
    operators = shipped_operators()
    assert operators
    missing = {name: tape for name, tape in operators.items() if name not in op_table.CLASSIFIED}
    assert not missing, "look at the CUDA kernel, then add it to a table of trainers/recording/op_table.py"


def test_an_operator_is_in_one_table_only() -> None:
    names = [name for table in TABLES.values() for name in table]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("table", ["KNOWN_SMALL", "UNMODELLED"])
def test_what_is_left_out_says_where_it_is_and_why(table: str) -> None:
    assert all(".cu" in why or ".cpp" in why or ".h" in why for why in getattr(op_table, table).values())


def test_every_classified_operator_exists() -> None:
    for name in op_table.CLASSIFIED:
        namespace, _, packet = name.partition(".")
        if namespace == "aten":
            assert hasattr(torch.ops.aten, packet), name


def autocast_dtype(call: object, dtype: torch.dtype = HALF) -> torch.dtype:
    with FakeTensorMode(), cuda_semantics(), torch.autocast("cpu", dtype=dtype):
        return call().dtype


def vector(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape or (8,), dtype=dtype)


ONE_DTYPE = [
    ("linear", lambda dtype: torch.nn.functional.linear(vector(dtype, 4, 8), vector(dtype, 6, 8)), HALF),
    ("matmul", lambda dtype: vector(dtype, 4, 8) @ vector(dtype, 8, 4), HALF),
    ("conv2d", lambda dtype: torch.conv2d(vector(dtype, 1, 2, 8, 8), vector(dtype, 3, 2, 2, 2)), HALF),
    ("bmm", lambda dtype: torch.bmm(vector(dtype, 2, 4, 8), vector(dtype, 2, 8, 4)), HALF),
    ("pow", lambda dtype: vector(dtype) ** 2, FLOAT),
    ("rsqrt", lambda dtype: vector(dtype).rsqrt(), FLOAT),
    ("exp", lambda dtype: vector(dtype).exp(), FLOAT),
    ("layer_norm", lambda dtype: torch.nn.functional.layer_norm(vector(dtype), (8,)), FLOAT),
    ("group_norm", lambda dtype: torch.nn.functional.group_norm(vector(dtype, 1, 4, 8), 2), FLOAT),
    ("mse_loss", lambda dtype: torch.nn.functional.mse_loss(vector(dtype), vector(dtype)), FLOAT),
    ("softmax", lambda dtype: vector(dtype).softmax(0), FLOAT),
    ("sum", lambda dtype: vector(dtype).sum(), FLOAT),
    ("cumsum", lambda dtype: vector(dtype).cumsum(0), FLOAT),
]


@pytest.mark.parametrize(("call", "expected"), [pytest.param(*rest, id=name) for name, *rest in ONE_DTYPE])
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_autocast_casts_as_on_cuda(call: object, expected: torch.dtype, dtype: torch.dtype) -> None:
    assert autocast_dtype(lambda: call(dtype)) == expected


@pytest.mark.parametrize("name", ["mul", "add", "gelu", "silu", "mean"])
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_what_is_in_no_list_keeps_its_dtype(name: str, dtype: torch.dtype) -> None:
    """CPU autocast would cast some of these, as `mean`'s neighbours."""
    calls = {
        "mul": lambda x: x * 2,
        "add": lambda x: x + x,
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
        "mean": torch.mean,
    }
    assert autocast_dtype(lambda: calls[name](vector(dtype))) == dtype


PROMOTED = [
    ("cat", lambda one, other: torch.cat([one, other])),
    ("stack", lambda one, other: torch.stack([one, other])),
    ("addcmul", lambda one, other: torch.addcmul(one, other, other)),
    ("dot", torch.dot),
]


@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in PROMOTED])
@pytest.mark.parametrize(("dtypes", "expected"), [((HALF, HALF), HALF), ((HALF, FLOAT), FLOAT), ((FLOAT, HALF), FLOAT)])
def test_promoting_operators_take_the_widest_dtype(call, dtypes, expected) -> None:
    assert autocast_dtype(lambda: call(*map(vector, dtypes))) == expected


def test_fp16_autocast_casts_to_fp16() -> None:
    call = {name: call for name, call, _ in ONE_DTYPE}["linear"]
    assert autocast_dtype(lambda: call(FLOAT), torch.float16) == torch.float16


def test_autocast_to_fp32_casts_up_inside_that_to_16_bits_as_on_cuda() -> None:
    """On the CPU it turns itself off: musubi-tuner's time embedding would multiply by weights in 16 bits."""
    linear = torch.nn.Linear(4, 4, dtype=HALF)
    with cuda_semantics(), torch.autocast("cpu", dtype=HALF):
        with torch.amp.autocast(device_type="cpu", dtype=FLOAT):
            assert linear(torch.ones(1, 4)).dtype == FLOAT
        with torch.amp.autocast(device_type="cpu", dtype=FLOAT, enabled=False):
            assert not torch.is_autocast_enabled("cpu")
        assert linear(torch.ones(1, 4)).dtype == HALF


def test_the_lists_are_those_of_the_installed_torch() -> None:
    lists = autocast_lists()
    assert {"linear", "matmul", "scaled_dot_product_attention", "addmm"} <= lists["lower"]
    assert {"layer_norm", "mse_loss", "pow.Tensor_Scalar"} <= lists["fp32"]
    assert {"sum", "softmax.int"} <= lists["fp32_dtype"]
    assert {"addcmul", "dot"} <= lists["promote"]  # cat and stack promote by themselves


def test_a_weight_is_cast_once_per_autocast_context() -> None:
    """The cache of cast weights is torch's own; it needs leaves that require gradients."""
    with cuda_semantics(), torch.autocast("cpu", dtype=HALF):
        weight = torch.nn.Parameter(torch.ones(4, 4))
        seen: list[str] = []

        class Log(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(func.overloadpacket.__name__)
                return func(*args, **(kwargs or {}))

        with Log():
            for _ in range(3):
                torch.nn.functional.linear(torch.ones(2, 4, dtype=HALF), weight)
    assert seen.count("_to_copy") == 1


def operators_of(call: object, cudnn: bool = False) -> list[str]:
    seen: list[str] = []

    class Log(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), cuda_semantics(cudnn=cudnn), Log():
        call()
    return seen


def attend(dtype: torch.dtype, size: int = 64, mask: bool = False, key_heads: int = 4) -> object:
    def call() -> None:
        query = torch.empty(2, 4, 16, size, dtype=dtype, requires_grad=True)
        key = query if key_heads == 4 else torch.empty(2, key_heads, 16, size, dtype=dtype, requires_grad=True)
        bias = torch.ones(2, 1, 16, 16, dtype=torch.bool) if mask else None
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, key, bias, enable_gqa=key is not query)
        attended.sum().backward()

    return call


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (attend(HALF), "flash"),
        (attend(torch.float16, 256), "flash"),
        (attend(HALF, 264), "efficient"),
        (attend(HALF, mask=True), "efficient"),
        (attend(FLOAT), "efficient"),
    ],
    ids=["half", "widest head", "too wide a head", "masked", "fp32"],
)
def test_attention_takes_the_kernel_it_takes_on_cuda(call: object, kernel: str) -> None:
    seen = operators_of(call)
    assert f"_scaled_dot_product_{kernel}_attention" in seen
    assert f"_scaled_dot_product_{kernel}_attention_backward" in seen
    assert not any("for_cpu" in name or "math" in name for name in seen)


def test_heads_that_are_no_multiple_of_16_bytes_are_padded_for_flash_and_go_the_plain_way_with_a_mask() -> None:
    """Heads of 5 numbers, as DreamLite's UNet has them by its defaults."""
    seen = operators_of(attend(HALF, 5))
    assert seen.count("constant_pad_nd") == 3 + 3  # and back, in backward
    assert "_scaled_dot_product_flash_attention" in seen
    seen = operators_of(attend(HALF, 5, mask=True))
    assert "bmm" in seen and not any("scaled_dot" in name for name in seen)
    assert "constant_pad_nd" not in operators_of(attend(HALF, 40))


@pytest.mark.parametrize(
    ("call", "cudnn", "kernel"),
    [
        (attend(HALF, mask=True, key_heads=2), True, "cudnn"),
        (attend(HALF, mask=True, key_heads=2), False, "math"),
        (attend(FLOAT, mask=True, key_heads=2), True, "math"),  # cuDNN takes 16 bits alone
        (attend(HALF, 136, mask=True, key_heads=2), True, "math"),  # and on every card no wider head than 128
        (attend(HALF, mask=True), True, "efficient"),  # whose tape holds for cuDNN too
        (attend(HALF, key_heads=2), True, "flash"),  # likewise
    ],
)
def test_a_mask_and_fewer_heads_of_keys_are_cudnns_or_go_the_plain_way(call: object, cudnn: bool, kernel: str) -> None:
    seen = operators_of(call, cudnn)
    fused = {name.removeprefix("_scaled_dot_product_") for name in seen if "scaled_dot" in name}
    assert fused == (set() if kernel == "math" else {f"{kernel}_attention", f"{kernel}_attention_backward"})
    assert ("bmm" in seen) is (kernel == "math")


@pytest.mark.parametrize(
    ("call", "differs"),
    [
        (attend(FLOAT, mask=True, key_heads=2), True),
        (attend(HALF, mask=True), False),
        (attend(HALF, key_heads=2), False),
    ],
)
def test_what_differs_by_card_is_seen(call, differs: bool) -> None:
    """In fp32 too, as dry runs are."""
    with FakeTensorMode(), cuda_semantics() as attention:
        call()
    assert attention.differs_by_card is differs


def test_attention_without_an_axis_of_heads_goes_the_plain_way() -> None:
    """No fused kernel takes it (check_tensor_shapes in sdp_utils_cpp.h): HunyuanImage 2.1's VAE asks so."""
    seen = operators_of(lambda: torch.nn.functional.scaled_dot_product_attention(*[torch.empty(2, 16, 64)] * 3))
    assert "bmm" in seen and "_safe_softmax" in seen and not any("scaled_dot" in name for name in seen)


def test_rms_norm_is_one_operator_when_the_weight_has_the_input_s_dtype() -> None:
    def normed(dtype: torch.dtype, fused: bool) -> list[str]:
        value, weight = torch.empty(2, 8, dtype=HALF), torch.empty(8, dtype=dtype)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, cuda_semantics(fused_rms_norm=fused):
            value, weight = mode.from_tensor(value), mode.from_tensor(weight)
            return operators_in(lambda: torch.nn.functional.rms_norm(value, (8,), weight))

    assert normed(HALF, True) == ["empty_like", "new_empty"]
    assert "rsqrt" in normed(FLOAT, True)
    assert "rsqrt" in normed(HALF, False)


def operators_in(call: object) -> list[str]:
    seen: list[str] = []

    class Log(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Log():
        call()
    return seen


def test_dropout_saves_a_mask_of_bytes() -> None:
    saved: list[torch.Tensor] = []
    value = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    watched = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept)
    with cuda_ops.cuda_semantics(), watched:
        out = torch.nn.functional.dropout(value, 0.1)
        assert torch.nn.functional.dropout(value, 0.1, training=False) is value
    assert [(tensor.dtype, tensor.shape) for tensor in saved] == [(torch.bool, value.shape)]
    out.sum().backward()
    assert value.grad is not None and torch.equal(value.grad == 0, saved[0].logical_not())


def test_nothing_stays_patched_afterwards() -> None:
    def behaviour() -> list[object]:
        query = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", dtype=HALF):
            dtypes = [(vector(HALF) ** 2).dtype, torch.cat([vector(HALF), vector(FLOAT)]).dtype]
        out = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        normed = torch.nn.functional.rms_norm(query, (16,), torch.ones(16))
        return [*dtypes, out.sum().item(), normed.sum().item()]

    def registered() -> list[tuple[str, ...]]:
        keys = ("AutocastCPU", "AutogradCPU")
        return [tuple(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in keys]

    before = behaviour(), registered()
    with cuda_semantics():
        assert registered() != before[1]
    assert (behaviour(), registered()) == before
    with pytest.raises(ZeroDivisionError), cuda_semantics():
        raise ZeroDivisionError
    assert (behaviour(), registered()) == before
    with cuda_semantics():
        pass
    assert (behaviour(), registered()) == before


@pytest.mark.parametrize(("key_heads", "expanded"), [(4, []), (2, [2 * 2 * 4 * 70 * 72] * 2)])
def test_flash_backward_accumulates_dq_in_fp32_over_rounded_rows(key_heads: int, expanded: list[int]) -> None:
    """And dk and dv for each head of queries, where several share one of keys."""
    query = torch.empty(2, 4, 130, 72, dtype=HALF, device="meta")
    key = torch.empty(2, key_heads, 70, 72, dtype=HALF, device="meta")
    found = workspaces("aten._scaled_dot_product_flash_attention_backward", (None, query, key))
    assert {kernel for kernel, _ in found} == {"flash"}
    sizes = [torch.Size(dims).numel() for _, dims in found]
    assert sizes == [*expanded, 4 * 2 * 4 * 256, 4 * 2 * 4 * 256 * 96]


def test_keys_of_one_row_are_flashs_on_every_card() -> None:
    """cuDNN takes none (sdp_utils.cpp, check_cudnn_tensor_shapes), so that rows are rounded whatever the kernel."""
    query, key = (torch.empty(2, 4, rows, 64, dtype=HALF, device="meta") for rows in (9, 1))
    found = workspaces("aten._scaled_dot_product_flash_attention_backward", (None, query, key))
    assert [(kernel, torch.Size(dims).numel()) for kernel, dims in found] == [
        ("any", 4 * 2 * 4 * 128),
        ("any", 4 * 2 * 4 * 128 * 64),
    ]
    assert {dim.samples for _, dims in found for dim in dims if isinstance(dim, Rounded)} == {0}


@pytest.mark.parametrize(("samples", "above"), [(3, 0), (3 * 5, 0), (7 * 11, 4 * 2 * 65_535), (3 * 7, 4 * 2 * 65_535)])
def test_a_batch_of_pixels_is_rounded_for_above_what_cudnn_takes(samples: int, above: int) -> None:
    """Of two heads. Samples and frames alone are no such batch."""
    factoriser = Factoriser({"B": 3, "F": 5, "H": 7, "W": 11, "T": 13})
    factoriser.size(4 * samples * 2 * 128, (13, 128, 128), samples)
    (size,) = factoriser.sizes
    assert isinstance(size, Monomial)
    assert (size.multiple, size.inner_exponents, size.above) == (128, (0, 0, 0, 0, 1), above)


@pytest.mark.parametrize(("dtype", "count"), [(HALF, 2), (FLOAT, 1)])
def test_efficient_backward_accumulates_dq_only_when_inputs_are_not_fp32(dtype: torch.dtype, count: int) -> None:
    query = torch.empty(2, 4, 130, 72, dtype=dtype, device="meta")
    found = workspaces("aten._scaled_dot_product_efficient_attention_backward", (None, query))
    assert [torch.Size(dims).numel() for _, dims in found] == [4 * 2 * 4 * 130, 4 * 2 * 4 * 130 * 96][:count]


@pytest.mark.parametrize(("dtype", "size", "count"), [(HALF, 384, 1), (HALF, 128, 0), (FLOAT, 384, 0)])
def test_efficient_attention_adds_up_wide_heads_in_fp32(dtype: torch.dtype, size: int, count: int) -> None:
    query = torch.empty(2, 1, 130, size, dtype=dtype, device="meta")
    found = workspaces("aten._scaled_dot_product_efficient_attention", (query, query, query))
    assert found == [("any", (4, 2, 1, 130, size))] * count


def test_cudnn_backward_accumulates_dq_over_its_rows() -> None:
    """Rounded to nothing, and dk and dv of heads that share keys in no tensors of their own."""
    query, key = (torch.empty(2, heads, 130, 72, dtype=HALF, device="meta") for heads in (4, 2))
    found = workspaces("aten._scaled_dot_product_cudnn_attention_backward", (None, query, key))
    assert [torch.Size(dims).numel() for _, dims in found] == [4 * 2 * 4 * 130, 4 * 2 * 4 * 130 * 72]
    assert {kernel for kernel, _ in found} == {"any"}


def test_softmax_backward_multiplies_gradient_and_output_first() -> None:
    gradient = torch.empty(2, 4, 30, 72, dtype=HALF, device="meta")
    assert workspaces("aten._softmax_backward_data", (gradient, gradient, -1, HALF)) == [("any", (2, 2, 4, 30, 72))]


def test_other_operators_have_no_workspace() -> None:
    assert workspaces("aten.mm", ()) == []


def test_a_rounded_dimension_remembers_what_it_was() -> None:
    rounded = Rounded(130, 128)
    assert (rounded, rounded.exact, rounded.multiple) == (256, 130, 128)
    assert Rounded(256, 128) == 256


def test_autocast_computes_rms_norm_in_fp32_since_torch_2_12() -> None:
    def normed(in_fp32: bool) -> torch.dtype:
        value, weight = vector(HALF, 2, 8), vector(HALF)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, cuda_semantics(rms_norm_in_fp32=in_fp32):
            value, weight = mode.from_tensor(value), mode.from_tensor(weight)
            with torch.autocast("cpu", dtype=HALF):
                return torch.nn.functional.rms_norm(value, (8,), weight).dtype

    assert normed(in_fp32=True) == FLOAT
    assert normed(in_fp32=False) == HALF


source_of = functools.cache(inspect.getsource)
"""The layers of torch are those of all families."""

ONE_OF_EACH_FAMILY = {lookup.model(name).family: name for name in lookup.model_names()}


@pytest.mark.parametrize("family", ONE_OF_EACH_FAMILY)
def test_families_that_call_torch_s_rms_norm_are_known(family: str) -> None:
    profile = lookup.model(ONE_OF_EACH_FAMILY[family])
    job, strategy = next(step_variants(profile)).records(profile)
    model = step.build_model(profile, job.replace(method="full"), strategy, shallow_config(profile))
    sources = (source_of(kind) for kind in {type(module) for module in model.modules()})
    assert any("F.rms_norm(" in source for source in sources) == (profile.traits.rms_norm != "none")


@pytest.mark.parametrize(("rows", "inside"), [(226, ["copy", "output"]), (1, ["output"]), (1009, ["output"])])
def test_four_bit_products_copy_the_weight_before_their_output(rows: int, inside: list[str]) -> None:
    """A product of one row a sample, as of time embeddings, is a fused kernel's, which makes no copy."""
    columns, width = 256, 128
    recorder = Recorder()
    with FakeTensorMode():
        value = torch.empty(1, rows, width, dtype=torch.bfloat16)
        packed = torch.empty(columns * width // 2, 1, dtype=torch.uint8)
        constants = torch.empty(columns * width // 64)
        with recorder:
            out = torch.ops.bitsandbytes.gemm_4bit(value, packed, (columns, width), constants, 64, "nf4")
    names = {2 * columns * width: "copy", out.nbytes: "output"}
    made = [names[recorder.recording.allocations[event].nbytes] for event in recorder.recording.events if event >= 0]
    assert made == inside
    assert [~event for event in recorder.recording.events if event < 0] == [0] * (len(inside) - 1)


def test_four_bit_weights_come_behind_their_constants() -> None:
    recorder = Recorder()
    with FakeTensorMode():
        weight = torch.empty(256, 128, dtype=torch.bfloat16)
        with recorder:
            packed, constants = torch.ops.bitsandbytes.quantize_4bit(weight, 64, "nf4", torch.uint8)
    made = [recorder.recording.allocations[event].nbytes for event in recorder.recording.events if event >= 0]
    assert made == [constants.nbytes, packed.nbytes]
