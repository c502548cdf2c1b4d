"""An average in host RAM of weights that FSDP2 splits over GPUs, on a virtual GPU: on a CPU both lie in one place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import vplan
from tests.cuda_wheel import CUDA_PYTHON, needs_cuda_wheel

pytest.importorskip("elftools")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="a rehearsal needs Linux"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="a rehearsal needs a C compiler (cc)"),
]

AVERAGE = """
    import json, os
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from trainers.parallel.ema import Average

    rank, told = int(os.environ["RANK"]), []
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for where, more in (("cpu", {}), ("cpu", {"offload_policy": CPUOffloadPolicy()}), ("gpu", {})):
        model = torch.nn.Linear(16, 32, device="cpu" if more else "cuda")
        fully_shard(model, **more)
        average = Average(dict(model.named_parameters()), where)
        for name, shadow in average.shadow.items():
            average.kept(name).to_local().fill_(7.0)  # as a checkpoint is read
            told.append([where, shadow.device.type, shadow.unique().tolist(), average.full_tensor(name).numel()])
    with open(f"told-{rank}.json", "w") as file:
        json.dump(told, file)
"""


@needs_cuda_wheel
def test_a_checkpoint_s_average_is_read_into_the_average(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(AVERAGE))
    launch = (CUDA_PYTHON, "-m", "torch.distributed.run", "--nproc_per_node", "2", "program.py")
    command = vplan.command("rehearse", "--json", "--gpu", "2x4090", "--steps", "0", "--", *launch)
    root = str(Path(vplan.__file__).parent)
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True, check=True)
    for rank in range(2):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        places = {"cpu": "cpu", "gpu": "cuda"}
        assert told == [[where, places[where], [7.0], size] for where in ("cpu", "cpu", "gpu") for size in (512, 32)]
