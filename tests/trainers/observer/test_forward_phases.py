"""trainers/observer/forward_phases.py, in a process of its own: its hooks stay."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from torch.utils.checkpoint import checkpoint
from trainers.observer.forward_phases import ForwardPhases

seen = ["load"]
phases = ForwardPhases(torch, seen.append, lambda: seen[-1], "cpu")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.adapter = torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 4)
    def forward(self, x):
        # A block that is frozen whole runs without gradients in its checkpoint too.
        x = checkpoint(self.frozen, x, use_reentrant=REENTRANT)
        return self.adapter(x)

encoder = torch.nn.Sequential(torch.nn.Linear(4, 4)).requires_grad_(False)
vae, model = torch.nn.Linear(4, 4).requires_grad_(False), Model()

class Whole(torch.nn.Module):
    # A trainer's module that holds the encoders too.
    def __init__(self):
        super().__init__()
        self.encoder, self.model = encoder, model
    def forward(self, x):
        with torch.no_grad():
            x = self.encoder(x)
        return self.model(x.requires_grad_())

with torch.no_grad():
    encoder(torch.ones(1, 4))
model.double().float()
for module in (model, Whole()):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with torch.no_grad():
            x = encoder(torch.ones(1, 4))
        module(x.requires_grad_()).sum().backward()
        phases.step_begins()
        optimizer.step()
        phases.step_ended()
    with torch.no_grad():
        encoder(torch.ones(1, 4))
        vae(model(torch.ones(1, 4)))
        vae(model(torch.ones(1, 4)))
print(*seen)
"""

STEP = "encode train optimizer train"
INSIDE = "encode train encode train optimizer train"
"""Of a module that encodes in its own forward, behind an encoding before it."""
SAMPLES = "encode denoise decode denoise decode"

STEPS = (
    PROGRAM.partition("class Whole")[0]
    + """
def step(parameter):
    with torch.no_grad():
        parameter -= parameter.grad
    parameter.grad = None
for parameter in model.adapter.parameters() if IN_BACKWARD else ():
    parameter.register_post_accumulate_grad_hook(step)
for _ in range(3):
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()
print(*seen)
"""
)

PIPELINE = (
    PROGRAM.partition("class Whole")[0]
    + """
class Pipeline(torch.nn.Module):
    # Never called itself, as DiffSynth-Studio's.
    def __init__(self):
        super().__init__()
        layer = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)))
        self.encoder = torch.nn.Sequential(layer).requires_grad_(False)
        self.embedder = torch.nn.Sequential(torch.nn.Linear(4, 4)).requires_grad_(False)
        self.model = model

class Training(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.pipeline = Pipeline()
    def forward(self, x):
        pipeline = self.pipeline
        return pipeline.model(pipeline.embedder(pipeline.encoder(x)).requires_grad_())

module, optimizer = Training(), torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    module(torch.ones(1, 4)).sum().backward()
    phases.step_begins()
    optimizer.step()
    phases.step_ended()
print(*seen)
"""
)

REPLACED = (
    PROGRAM.partition("class Model")[0]
    + """
class Adapter(torch.nn.Module):
    # Never called itself, as ai-toolkit's LoKr: it runs in place of its layer's forward.
    def __init__(self, layer):
        super().__init__()
        self.scale, self.its = torch.nn.Parameter(torch.ones(4)), layer.forward
        layer.forward = self.forward
    def forward(self, x):
        return self.its(x) * self.scale

encoder, model = (torch.nn.Sequential(torch.nn.Linear(4, 4)).requires_grad_(False) for _ in range(2))
adapter = Adapter(model[0])
MODE
optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
for _ in range(2):
    with torch.no_grad():
        x = encoder(torch.ones(1, 4))
    model(x).sum().backward()
    phases.step_begins()
    optimizer.step()
    phases.step_ended()
print(*seen)
"""
)

BY_PARTS = (
    PROGRAM.partition("class Model")[0]
    + """
class Blocks(torch.nn.ModuleList):
    pass

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = torch.nn.Linear(4, 4)
        layer = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)))
        self.feed_forward = torch.nn.Sequential(layer).requires_grad_(False)

class Model(torch.nn.Module):
    # It calls its blocks' parts itself, as SimpleTuner's Stable Diffusion 3.
    def __init__(self):
        super().__init__()
        self.blocks = Blocks([Block(), Block()])
    def forward(self, x):
        for block in self.blocks:
            x = block.feed_forward(block.attention(x))
        return x

model = Model()
optimizer = torch.optim.SGD((each for each in model.parameters() if each.requires_grad), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
    phases.step_begins()
    optimizer.step()
    phases.step_ended()
print(*seen)
"""
)


TWICE = "encode first_step optimizer train encode train optimizer train"
"""Two steps, each behind an encoding."""


@pytest.mark.parametrize("mode", ["", "model.eval()"])
def test_adapters_in_place_of_a_layers_forward_train_its_model(mode: str) -> None:
    assert _shown(REPLACED.replace("MODE", mode)) == f"load {TWICE}"


def test_without_a_module_in_training_mode_the_first_step_goes_unseen() -> None:
    seen = _shown(REPLACED.replace("MODE", "model.eval(), adapter.eval()"))
    assert seen == "load encode optimizer train encode train optimizer train"


def test_parts_of_a_pipeline_that_is_not_called_encode_with_gradients_on() -> None:
    assert _shown(PIPELINE) == "load first_step encode first_step optimizer train encode train optimizer train"


def test_frozen_parts_of_blocks_encode_nothing_where_a_model_calls_them_itself() -> None:
    assert _shown(BY_PARTS) == "load first_step optimizer train optimizer train"


def test_steps_inside_backward_end_the_first_step_at_the_next_forward() -> None:
    assert _shown(STEPS.replace("IN_BACKWARD", "True")) == "load first_step train"


def test_gradients_that_add_up_wait_for_their_step() -> None:
    assert _shown(STEPS.replace("IN_BACKWARD", "False")) == "load first_step"


def test_loading_encoding_and_sampling_are_told_from_training() -> None:
    for reentrant in ("True", "False"):
        shown = _shown(PROGRAM.replace("REENTRANT", reentrant))
        plain = f"load encode load encode first_step optimizer train {STEP} {SAMPLES}"
        assert shown == f"{plain} {INSIDE} {INSIDE} {SAMPLES}"


def _shown(program: str) -> str:
    program = program.replace("REENTRANT", "False")
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
