"""trainers/step/optimizers.py: an optimizer over fp32 masters, against the same steps in fp32, and in bytes."""

from __future__ import annotations

import torch
from torch import nn

from planner.spec.job import Strategy
from planner.spec.training import TrainingSettings
from trainers.step.optimizers import OnHost, Optimizer, OverMasters, make_optimizer, take_up

STRATEGY = Strategy(weights_dtype="bf16", master_weights="fp32")


def test_masters_step_as_fp32_weights_do_and_16_bit_ones_follow() -> None:
    torch.manual_seed(0)
    half = nn.Parameter(torch.randn(64, 32).bfloat16())
    whole = nn.Parameter(half.detach().float())
    kept = nn.Parameter(torch.ones(8))
    optimizer = make_optimizer({"weight": half, "norm": kept}, STRATEGY, TrainingSettings(learning_rate=1e-5))
    assert isinstance(optimizer, OverMasters)
    same = make_optimizer({"weight": whole}, Strategy(), TrainingSettings(learning_rate=1e-5))
    for _ in range(5):
        gradient = torch.randn(64, 32).bfloat16()
        half.grad, whole.grad, kept.grad = gradient, gradient.float(), torch.ones(8)
        optimizer.step()
        same.step()
    assert half.grad is None and kept.grad is None
    master = optimizer.masters[half]
    assert torch.equal(master, whole) and not torch.equal(master, half.float())
    assert torch.equal(half, whole.detach().bfloat16())
    assert (kept < 1).all()


def test_masters_and_states_are_fp32_and_what_is_fp32_is_its_own_master() -> None:
    half, kept = nn.Parameter(torch.ones(64, 32).bfloat16()), nn.Parameter(torch.ones(8))
    optimizer = make_optimizer({"weight": half, "norm": kept}, STRATEGY)
    assert isinstance(optimizer, OverMasters)
    half.grad, kept.grad = torch.ones_like(half), torch.ones_like(kept)
    optimizer.step()
    assert optimizer.masters[half].untyped_storage().nbytes() == 4 * 64 * 32
    assert optimizer.masters[kept] is kept
    states = optimizer.state[half]
    assert all(states[name].dtype == torch.float32 for name in ("exp_avg", "exp_avg_sq"))  # type: ignore[attr-defined]


def test_weights_and_gradients_in_host_ram_are_one_piece_of_it() -> None:
    """CUDA pins pages: small weights that were pinned each on its own would share one."""
    weights = [nn.Parameter(torch.full((size,), float(size))) for size in (3, 8)]
    weights.append(nn.Parameter(torch.ones(5).bfloat16()))
    offloaded = Strategy(offload_optimizer="cpu")
    optimizer = make_optimizer({str(number): weight for number, weight in enumerate(weights)}, offloaded)
    assert isinstance(optimizer, OnHost)
    held = [*optimizer.hosts.values(), *optimizer.gradients.values()]
    assert {tensor.untyped_storage().data_ptr() for tensor in held} == {optimizer._host.data_ptr()}
    assert optimizer._host.nbytes == 2 * (16 + 32 + 16)
    for weight, copy in optimizer.hosts.items():
        assert torch.equal(weight, copy)
        weight.grad = torch.ones_like(weight)
    assert [parameter.grad.sum() for parameter in optimizer.take_gradients()] == [3, 8, 5]  # type: ignore[union-attr]


def test_a_run_goes_on_with_its_optimizer_elsewhere_and_stepping_otherwise() -> None:
    """As after running out of memory: the states are the checkpoint's, where and how it steps is the plan's."""
    torch.manual_seed(0)
    gradients = [torch.randn(8, 4) for _ in range(6)]

    def steps(weight: nn.Parameter, optimizer: Optimizer, numbers: range) -> Optimizer:
        for number in numbers:
            weight.grad = gradients[number].clone()
            if isinstance(optimizer, OnHost):
                optimizer.take_gradients()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    def ways(optimizer: Optimizer) -> tuple[object, object]:
        (group,) = optimizer.param_groups
        return group["foreach"], group["fused"]

    whole, moved = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(8, 4))
    steps(whole, make_optimizer({"weight": whole}, Strategy()), range(6))
    before = make_optimizer({"weight": moved}, Strategy())
    numbers = iter((range(2), range(2, 4), range(4, 6)))
    steps(moved, before, next(numbers))
    for strategy in (Strategy(offload_optimizer="cpu"), Strategy(optimizer_step="loop")):
        after = make_optimizer({"weight": moved}, strategy)
        made = ways(after)
        take_up(after, before.state_dict())
        assert ways(after) == made != ways(before)
        before = steps(moved, after, next(numbers))
    torch.testing.assert_close(moved, whole)


def test_muon_steps_matrices_and_adamw_the_rest() -> None:
    torch.manual_seed(0)
    matrix, bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.ones(4))
    alone, beside = nn.Parameter(matrix.detach().clone()), nn.Parameter(bias.detach().clone())
    optimizer = make_optimizer(
        {"matrix": matrix, "bias": bias}, Strategy(optimizer="muon"), TrainingSettings(learning_rate=1e-2)
    )
    muon = torch.optim.Muon([alone], lr=1e-2, weight_decay=1e-2, adjust_lr_fn="match_rms_adamw")
    adamw = make_optimizer({"bias": beside}, Strategy(), TrainingSettings(learning_rate=1e-2))
    for _ in range(3):
        matrix.grad, bias.grad = torch.randn(6, 4), torch.randn(4)
        alone.grad, beside.grad = matrix.grad.clone(), bias.grad.clone()
        for each in (optimizer, muon, adamw):
            each.step()
    assert torch.equal(matrix, alone) and torch.equal(bias, beside)
    assert set(optimizer.state[matrix]) == {"momentum_buffer"}  # type: ignore[attr-defined]
    optimizer.zero_grad()
    assert matrix.grad is None and bias.grad is None


def test_deepspeed_keeps_its_own_masters() -> None:
    half = nn.Parameter(torch.ones(64, 32).bfloat16())
    optimizer = make_optimizer({"weight": half}, STRATEGY.replace(sharding="zero-2"))
    assert isinstance(optimizer, torch.optim.AdamW)


def test_prodigy_keeps_a_copy_of_weights_that_begin_with_a_number_but_zero() -> None:
    """What `planner.layout.optimizer.zero_starts` counts on: of a new adapter's second matrix it never keeps one."""
    first, second = nn.Parameter(torch.randn(8, 64)), nn.Parameter(torch.zeros(64, 8))
    trainable = {"lora_A": first, "lora_B": second}
    optimizer = make_optimizer(trainable, Strategy(optimizer="prodigy"))
    for _ in range(2):
        for parameter in trainable.values():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    assert second.any()
    assert optimizer.state[first]["p0"].numel() == first.numel()  # type: ignore[attr-defined]
    assert optimizer.state[second]["p0"].numel() == 1  # type: ignore[attr-defined]
