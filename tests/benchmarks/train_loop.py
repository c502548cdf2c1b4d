"""Our training loop against a plain diffusers + accelerate loop: seconds a step, interleaved in one process.

    python -m tests.benchmarks.train_loop [STEPS]

All train the same LoRA of the same tiny model on the same cached samples. Prints the ratio of the medians with the
95 % interval of a bootstrap, by the clock and by the CPU seconds of the process: on a busy machine the clock's interval
is wide, and the CPU's is not. The plain loop draws its noise for the whole batch at once, as diffusers' examples do;
ours from a seed for each sample, so that it is the same on any number of ranks. Besides the plain loop that reads its
samples from disk as ours does there is one that has all of them in RAM before it begins, as diffusers' DreamBooth
examples with ``--cache_latents``: what it is ahead by is the price of data sets of any size.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM_UP = 10
RESAMPLES = 1000


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["VPLAN_HOME"] = str(root / "home")
        import torch

        torch.set_num_threads(1)
        from tests.trainers import runs
        from trainers.train import TrainingRun

        place = runs.Place(root, "wan")
        plan = place.plan(batch_size=8)
        request = place.request(root / "out", plan, steps=steps + WARM_UP, checkpoint_every=10**5)
        ours = TrainingRun(request, runs.ReportInMemory())
        loops = {
            "ours": ours._step,
            "plain": plain_step(root, ours),
            "plain from RAM": plain_step(root, ours, held=True),
        }
        clock: dict[str, list[float]] = {name: [] for name in loops}
        cpu: dict[str, list[float]] = {name: [] for name in loops}
        for number in range(steps + WARM_UP):
            for name, step in loops.items():
                began = time.perf_counter(), time.process_time()
                step(number)
                clock[name].append(time.perf_counter() - began[0])
                cpu[name].append(time.process_time() - began[1])
        ours.loader.close()
    for other in ("plain", "plain from RAM"):
        for kind, seconds in (("clock", clock), ("CPU", cpu)):
            report(kind, other, seconds["ours"][WARM_UP:], seconds[other][WARM_UP:])


def plain_step(root: Path, ours: Any, held: bool = False) -> Callable[[int], None]:
    """One step of a loop as diffusers' examples write it, over the same samples; ``held``: they are in RAM before."""
    import diffusers
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig
    from safetensors.torch import load_file

    model = diffusers.WanTransformer3DModel.from_pretrained(root / "model" / "transformer").requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=targets))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model.train(), torch.optim.AdamW(trained, lr=1e-4, foreach=True))
    sampler = ours.loader.sampler

    def read(entry: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return load_file(entry.path)["latents"], load_file(entry.text)["prompt"]

    in_ram = [read(entry) for entry in sampler.entries] if held else None

    def step(number: int) -> None:
        places = sampler.step(number).samples
        samples = [in_ram[place] if in_ram else read(sampler.entries[place]) for place in places]
        latents, prompt = (torch.stack(part) for part in zip(*samples, strict=True))
        noise, sigmas = torch.randn_like(latents), torch.sigmoid(torch.randn(len(places)))
        spread = sigmas.view(-1, 1, 1, 1, 1)
        noisy = (1 - spread) * latents + spread * noise
        out = model(hidden_states=noisy, timestep=sigmas * 1000, encoder_hidden_states=prompt, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(out.float(), (noise - latents).float())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def report(kind: str, other: str, ours: list[float], plain: list[float]) -> None:
    def ratio(one: list[float], other: list[float]) -> float:
        return statistics.median(one) / statistics.median(other)

    dice = random.Random(0)
    drawn = sorted(ratio(dice.choices(ours, k=len(ours)), dice.choices(plain, k=len(plain))) for _ in range(RESAMPLES))
    low, high = drawn[RESAMPLES // 40], drawn[-RESAMPLES // 40]
    print(f"{kind}: ours {statistics.median(ours):.4f} s, {other} {statistics.median(plain):.4f} s, {len(ours)} steps;")
    print(f"ratio {ratio(ours, plain):.3f}, 95 % of resamples in {low:.3f} .. {high:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 120)
