"""Block swap: the same losses and gradients to the last bit, with two blocks' frozen weights on the device at most."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.spec.rules import resolve
from tests.trainers.step.test_step import BLOCKS, batch, job, tiny
from trainers.families import family
from trainers.memory import swap
from trainers.memory.quantise import stored_tensors
from trainers.step import placement, step
from trainers.step.optimizers import make_optimizer

CPU = torch.device("cpu")


def blocks_of(model: nn.Module, name: str) -> list[nn.Module]:
    lists = [model.get_submodule(stack.list) for stack in lookup.model(name).stacks]
    return [block for entry in lists for block in entry.children()]


def placed(name: str, swapped: int, **more: Any) -> tuple[step.Trainee, Strategy]:
    """A tiny trainee whose weights depend on their names alone, in the number format ``more`` says."""
    profile = tiny(name)
    method = more.pop("method", "lora")
    typed = {"weights_dtype": "fp32", "autocast": "none", "gradient_checkpointing": "full"}
    strategy = Strategy.read({**typed, "swap_blocks": swapped, **more})
    model = step.build_model(profile, job(profile).replace(method=method), strategy)

    def fill(full_name: str, weight: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(sum(map(ord, full_name)))
        values = torch.randn(weight.shape, generator=generator) * 0.1
        weight.copy_(values.to(weight.dtype))

    placement.place(model, profile, strategy, CPU, fill)
    trainee = step.Trainee(model, step.trainable_parameters(model))
    trainee.optimizer = make_optimizer(trainee.trainable, strategy)
    return trainee, strategy


def losses(trainee: step.Trainee, name: str, strategy: Strategy) -> list[float]:
    found = []
    for seed in range(3):
        inputs = batch(tiny(name), strategy, seed)
        found.append(float(step.accumulated_step(trainee, family(tiny(name)), [inputs], strategy)))
    return found


@BLOCKS
def test_training_is_the_same_to_the_last_bit(name: str) -> None:
    plain, strategy = placed(name, 0)
    count = len(blocks_of(plain.model, name))
    expected = losses(plain, name, strategy)
    for swapped in (1, count) if name == "flux.1-dev" else (count,):
        trainee, strategy = placed(name, swapped)
        assert losses(trainee, name, strategy) == expected
        for adapter, weight in trainee.trainable.items():
            assert torch.equal(weight, plain.trainable[adapter]), adapter


@pytest.mark.parametrize("checkpointing", [{}, {"gradient_checkpointing": "partial", "checkpointed_blocks": 2}])
def test_at_every_call_a_block_has_its_weights_in_the_ring(checkpointing: dict[str, Any]) -> None:
    name = "wan2.1-t2v-1.3b"
    trainee, strategy = placed(name, 2, **checkpointing)
    rings = {parameter.untyped_storage().data_ptr() for parameter in trainee.model.parameters()}
    calls: list[int] = []
    for index, block in enumerate(blocks_of(trainee.model, name)):

        def seen(block: nn.Module, _arguments: Any, index: int = index) -> None:
            frozen = [parameter for parameter in block.parameters() if not parameter.requires_grad]
            storages = {parameter.untyped_storage().data_ptr() for parameter in frozen}
            if len(storages) == 1:  # swapped: all of them in one slot
                calls.append(index)
                rings.update(storages)

        block.register_forward_pre_hook(seen)
    before = len(rings)
    losses(trainee, name, strategy)
    first = 0 if checkpointing else 1
    assert calls == [first, first + 1, first + 1, first] * 3  # forward, then recomputation from the last to the first
    assert len(rings) - before == 2


def test_host_and_ring_hold_what_the_plan_says() -> None:
    """The full-size model, on the meta device: bytes of the largest swapped block, and of all of them."""
    profile = lookup.model("wan2.1-t2v-1.3b")
    machine = Machine(gpu="24GB")
    asked = job_for(profile, {"frames": 17})
    strategy = resolve(asked, Strategy(gradient_checkpointing="full", swap_blocks=7), machine)
    model = step.build_model(profile, asked.replace(lora_targets=profile.lora.targets), strategy)
    swapped = swap.swapped_blocks(model, profile, strategy)
    assert [name for name, _ in swapped] == [f"blocks.{index}" for index in range(23, 30)]
    sizes = dict.fromkeys(swap.on_host(swapped), 0)
    sizes.update(
        {name: weight.numel() * weight.element_size() for name, weight in model.named_parameters() if name in sizes}
    )
    configuration = Configuration.of(asked, strategy, machine)
    run = lay_out(configuration, load_facts(configuration), grid(profile, asked))
    planned = {buffer for buffers in run.swapped_blocks.values() for buffer in buffers}
    assert sum(sizes.values()) == sum(run.sizes[buffer] for buffer in planned)
    ring = [run.sizes[buffer] for buffer, op in enumerate(run.program.op) if op == "swap ring"]
    by_block = [sum(size for name, size in sizes.items() if name.startswith(f"{block}.")) for block, _ in swapped]
    assert ring == [max(by_block)] * 2


@pytest.mark.parametrize("dtype", ["fp8", "int8", "nf4"])
def test_a_quantised_base_is_swapped_as_it_is_stored(dtype: str) -> None:
    """The same bytes through the ring: the same losses, and of the swapped blocks nothing else on the device."""
    name = "wan2.1-t2v-1.3b"
    half = {"weights_dtype": dtype, "compute_dtype": "bf16", "autocast": "bf16"}
    plain, strategy = placed(name, 0, **half)
    count = len(blocks_of(plain.model, name))
    expected = losses(plain, name, strategy)
    trainee, strategy = placed(name, count, **half)
    blocks = blocks_of(trainee.model, name)
    outside: list[str] = []
    for block in blocks:
        for full_name, module in block.named_modules():

            def after(module: nn.Module, *_: Any, full_name: str = full_name, block: nn.Module = block) -> None:
                stored = [(n, t) for n, p in module.named_parameters(recurse=False) for n, t in stored_tensors(n, p)]
                ring = {weight.untyped_storage().data_ptr() for weight in (block.scale_shift_table,)}
                lie = {tensor.untyped_storage().data_ptr() for n, tensor in stored if "lora_" not in full_name}
                outside.extend([full_name] if lie - ring else [])

            module.register_forward_hook(after)
    assert losses(trainee, name, strategy) == expected
    assert not outside


def test_trained_weights_come_back_changed() -> None:
    """Full training with the step inside backward: the same losses and weights, all of them in host RAM or the ring."""
    name = "wan2.1-t2v-1.3b"
    full = {"optimizer_step": "backward", "method": "full"}
    plain, strategy = placed(name, 0, **full)
    expected = losses(plain, name, strategy)
    for swapped in (1, len(blocks_of(plain.model, name))):
        trainee, strategy = placed(name, swapped, **full)
        assert losses(trainee, name, strategy) == expected
        for weight, parameter in trainee.trainable.items():
            assert torch.equal(parameter, plain.trainable[weight]), weight
        moved = [p for block in blocks_of(trainee.model, name)[-swapped:] for p in block.parameters()]
        assert len({parameter.untyped_storage().data_ptr() for parameter in moved}) == swapped
