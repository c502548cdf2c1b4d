"""Reads the step times that SimpleTuner prints, into profiles/measurements/step_times/simpletuner.jsonl.

    python -m tests.tools.step_times.simpletuner CHECKOUT

CHECKOUT is a clone of bghira/SimpleTuner; the rows name its commit. Each cell of a family that the catalog knows is a
row; what the settings of `vplan` cannot express is a row too, with the reason that it is left out.

A cell's own print says neither the shape nor the number of tokens. Shapes follow from the example's configuration and
the trainer's rounding to 64 pixels (helpers/multiaspect/image.py ``calculate_new_size_by_pixel_area``). All clips are
of one dataset, scenes of Steamboat Willie (CogVideo, finetune/README.md), a film of 1928: any aspect from 1.2 to 1.4
gives 576x448. The printed *memory* says so too, see docs/accuracy/seconds.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

OUT = Path(__file__).parents[3] / "profiles" / "measurements" / "step_times" / "simpletuner.jsonl"
SWEEP, KREA = "documentation/experimental/SEGMENTED_CHECKPOINTING.md", "documentation/quickstart/KREA2.md"
CARDS = {"H100": "h100-80gb", "L40S": "l40s"}


class Family(NamedTuple):
    """One family of the sweep: the job of its example, and what of its strategy the modes do not say."""

    key: str
    job: dict[str, Any]
    blocks: int
    strategy: dict[str, Any] = {}
    interval: Literal["segments", "one by one", "ignored"] = "segments"
    """what it takes an interval of blocks for: those of a segment, which are recomputed together; of as many, one is
    checkpointed; or every block is, whatever is asked"""
    implementation: str = "simpletuner"
    left_out: str | None = None
    note: str | None = None
    hopper: dict[str, Any] = {}
    """what of the strategy is so on the H100 alone"""
    checkpointing: dict[str, Any] = {}
    """what of the strategy is so with checkpoints alone"""


CLIP = {"height": 448, "width": 576, "lora_rank": 16}
LION = {"optimizer": "lion"}
FLASH_3 = {"attention": "flash-3"}
"""What both examples of Wan ask for (``attention_mechanism`` "flash-attn-3-hub"); on an L40S the second is taken."""
STREAMED = "RamTorch streams the weights of all blocks from host RAM, each layer's as it is used"
FAMILIES = {
    "Chroma": Family(
        "chroma",
        {"model": "chroma1-hd", "frames": 1, "height": 512, "width": 512, "lora_rank": 16},
        57,
        interval="one by one",
        checkpointing={"attention": "efficient"},  # "Checkpointed Chroma rows use native-efficient", says the page
        note="the example's images are 512x512, whatever the page's heading says: at 1024x1024 the L40S would do 290 "
        "TFLOP/s; checkpointed rows take the memory-efficient kernel and as long on either card, so the GPU waits for "
        "the host in them, as in the page's AuraFlow (0.180 s without, 1.824 with on the H100, 0.833 on the L40S)",
    ),
    "ERNIE 4.5 Image": Family(
        "ernie",
        {"model": "ernie-image", "frames": 1, "height": 512, "width": 512, "lora_rank": 16, "text_tokens": 32},
        36,
        {"swap_blocks": 35, **LION},
        "one by one",
        "simpletuner@ramtorch",
        note=f"{STREAMED}; the one prompt is a single character, and is not padded",
    ),
    "HunyuanVideo": Family(
        "hv15",
        {"model": "hunyuan-video-1.5", "frames": 45, "batch_size": 2, **CLIP},
        54,
        note="blocks are taken as diffusers' are, whose mask is a matrix of all pairs of tokens; since cc9a8ba3, of "
        "the page's day, SimpleTuner's mask keys alone and take out the prompts' padding, and would be told half of "
        "what is printed; the printed memory speaks for the matrix by its size (27.1 GiB told with it, 24.9 without) "
        "and against it by what segments of two blocks hold more (-0.24 GiB; 0.9 and 0.1)",
    ),
    "Krea 2": Family(
        "krea2",
        {"model": "krea-2", "frames": 1, "height": 512, "width": 512, "lora_rank": 64, "lora_dropout": 0.0},
        28,
        {"attention": "cudnn", **LION},
        left_out="blocks compiled with CUDA graphs, which take as long with checkpointing as without",
        note="its adapters are on a fused to_qkv and on to_out.0, with a dropout of 0.1; those on the tape are on "
        "every layer, and are taken without it, with which they would hold 45.9 GiB where 40.0 are printed",
    ),
    "LTXVideo 0.9.5": Family(
        "ltx095",
        {"model": "ltx-video-2b", "frames": 41, "text_tokens": 226, **CLIP},
        28,
    ),
    "LTXVideo2 2.3": Family(
        "ltx23",
        {"model": "ltx-2.3", "frames": 49, "height": 640, "width": 832, "lora_rank": 16},
        48,
        implementation="simpletuner@unpadded",
        note="all clips of that film are 832x640 by the example's resolution of 720 pixels, whatever the heading says: "
        "so says what segments of two blocks hold more than single ones (0.88 GiB printed, 1.2 counted, 1.9 at "
        "1280x704) and what every other two do in int8 (33.7 GiB printed, 43 counted in bf16, 72); launches decide, "
        "and the host waits for the GPU four times in each forward of a block, which is not priced",
    ),
    "Lumina2": Family(
        "lumina2",
        {
            "model": "lumina-image-2.0",
            "frames": 1,
            "height": 512,
            "width": 512,
            "batch_size": 2,
            "lora_rank": 16,
            "text_tokens": 36,
        },
        26,
        note="the prompt's padding is taken out before the main layers, and the prompt is the pipeline's system "
        "prompt, <Prompt Start> and a single character: about 36 tokens; two refiner blocks over the text see 256; "
        "on the H100 the GPU waits for launches, which took 26 us there and not 32",
    ),
    "Qwen Image": Family(
        "qwen",
        {"model": "qwen-image", "frames": 1, "height": 1024, "width": 1024, "lora_rank": 8, "text_tokens": 1024},
        60,
        LION,
        interval="ignored",
        note="the one prompt is a single character, padded to 1024 tokens and masked "
        "(helpers/training/diffusers_overrides.py), as the printed memory says",
    ),
    "SD 1.x": Family("sd15", {"model": "sd1.5", "frames": 1, "height": 512, "width": 512, "lora_rank": 16}, 0),
    "SD3": Family(
        "sd3",
        {
            "model": "sd3.5-medium",
            "frames": 1,
            "height": 1024,
            "width": 1024,
            "batch_size": 3,
            "lora_rank": 128,
            "lora_targets": ["to_q", "to_k", "to_v", "to_out.0"],
        },
        24,
    ),
    "SDXL": Family("sdxl", {"model": "sdxl"}, 0, left_out="LoKr of factor 12, which is not recorded"),
    "Wan 2.1 T2V 1.3B": Family(
        "wan1.3b",
        {"model": "wan2.1-t2v-1.3b", "frames": 81, **CLIP},
        30,
        {"swap_blocks": 29},
        implementation="simpletuner@ramtorch",
        note=STREAMED,
        hopper=FLASH_3,
    ),
    "Wan 2.1 T2V 14B": Family(
        "wan14b",
        {"model": "wan2.1-t2v-14b", "frames": 81, **CLIP},
        40,
        {"swap_blocks": 39},
        implementation="simpletuner@ramtorch",
        note=STREAMED,
        hopper=FLASH_3,
    ),
    "Z-Image Turbo": Family(
        "z-image",
        {"model": "z-image", "frames": 1, "height": 512, "width": 512, "lora_rank": 64, "text_tokens": 32},
        30,
        LION,
        note="the prompt is a single character and padded to 32 tokens; the example's images are 512x512, whatever the "
        "page's heading says",
    ),
}

PRECISIONS = {
    "bf16": ({"weights_dtype": "bf16"}, None),
    "fp8wo-torchao": ({"weights_dtype": "fp8", "adapter_dtype": "fp32"}, None),
    "int8-torchao": ({"weights_dtype": "int8", "adapter_dtype": "fp32"}, None),
    "fp8-torchao": ({}, "multiplies in fp8, with activations quantized in each step; ours stores in fp8 alone"),
    "int8-sdnq-hadamard": ({}, "multiplies in int8, with rotated activations; ours stores in int8 alone"),
}
OFFLOADED = "keeps what attention saves in host RAM, and recomputes the rest; ours offloads blocks' inputs"


def main() -> int:
    """Writes the rows anew; prints how many there are, and how many can be compared."""
    checkout = Path(sys.argv[1])
    rows = [row for path, read in ((SWEEP, sweep), (KREA, krea)) for row in read(page(checkout, path))]
    commit = git(checkout, "rev-parse", "HEAD").strip()
    for row in rows:
        row["source"]["commit"] = commit
    OUT.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} cells, {sum(row['left_out'] is None for row in rows)} of them comparable")
    return 0


def git(checkout: Path, *command: str) -> str:
    """What a git command prints."""
    return subprocess.run(["git", "-C", str(checkout), *command], check=True, capture_output=True, text=True).stdout


def page(checkout: Path, path: str) -> str:
    """A page of the documentation, as committed."""
    return git(checkout, "show", f"HEAD:{path}")


def sweep(text: str) -> Iterator[dict[str, Any]]:
    """The sweep's cells, family by family."""
    for section in text.split("\n### ")[1:]:
        title, _, body = section.partition("\n")
        family = FAMILIES.get(title.strip())
        if family is None:
            continue
        for line in body.splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            uncompiled = len(cells) == 3 and family.key == "krea2"
            cells = ["bf16", *cells] if uncompiled else cells
            if len(cells) != 4 or cells[0] not in PRECISIONS:
                continue
            precision, mode, *timed = cells
            for card, cell in zip(CARDS, timed, strict=True):
                if found := re.fullmatch(r"([\d.]+) / ([\d.]+)", cell):
                    known = family._replace(left_out=None) if uncompiled else family
                    name = f"st-{family.key}{'-eager' if uncompiled else ''}-{precision}-{mode}-{card.lower()}"
                    yield row(name, known, (precision, mode, card), (float(found[1]), float(found[2])), SWEEP)


def row(
    name: str, family: Family, cell: tuple[str, str, str], printed: tuple[float, float], where: str
) -> dict[str, Any]:
    """One cell as a row. ``cell``: precision, mode and card; ``printed``: seconds and GiB."""
    precision, mode, card = cell
    stored, unlike = PRECISIONS[precision]
    checkpointing, refused = checkpointed(family, mode)
    hopper = family.hopper if card == "H100" else {}
    also = {} if mode == "none" else family.checkpointing
    return {
        "id": name,
        "job": {"method": "lora", "batch_size": 1, **family.job},
        "strategy": {
            **TRAINED,
            **stored,
            **checkpointing,
            **family.strategy,
            **hopper,
            **also,
        },
        "machine": {"gpu": CARDS[card], "gpus": 1},
        "step_seconds": printed[0],
        "peak_gib": printed[1],
        "settings": f"{precision}, {mode}",
        "implementation": family.implementation,
        "left_out": family.left_out or unlike or refused,
        "note": family.note,
        "source": {"repo": "bghira/SimpleTuner", "where": where},
    }


TRAINED = {
    "autocast": "bf16",
    "adapter_dtype": "bf16",
    "optimizer": "adamw",
    "text_encoder": "cached",
    "vae": "cached",
}


def checkpointed(family: Family, mode: str) -> tuple[dict[str, Any], str | None]:
    """The checkpointing of a mode as ours, for its seconds: what is computed again, in whatever segments; and why not.

    ``interval2`` recomputes every block, two under one checkpoint, or one of two; ``seg2-stride4`` two of every four.
    """
    if "offload" in mode:
        return {}, OFFLOADED
    if mode == "none":
        return {"gradient_checkpointing": "none"}, None
    every = mode == "layer" or (mode == "interval2" and family.interval == "segments")
    if every or family.interval == "ignored":
        return {"gradient_checkpointing": "full"}, None
    assert mode in ("interval2", "seg2-stride4"), mode
    half = sum(block % 4 < 2 for block in range(family.blocks)) if mode == "seg2-stride4" else -(-family.blocks // 2)
    return {"gradient_checkpointing": "partial", "checkpointed_blocks": half}, None


def krea(text: str) -> Iterator[dict[str, Any]]:
    """The cells of Krea 2's own page, all on an H100 with every block checkpointed."""
    for section in text.split("\n### ")[1:]:
        compiled = "compile" in (title := section.partition("\n")[0]) and "off" not in title
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split("|") if cell.strip() != "ok"]
            if len(cells) != 5 or cells[0] not in PRECISIONS or cells[3] == "OOM":
                continue
            precision, side, batch = cells[0], int(cells[1]), int(cells[2])
            family = FAMILIES["Krea 2"]
            job = {**family.job, "height": side, "width": side, "batch_size": batch}
            known = family._replace(job=job, left_out=family.left_out if compiled else None)
            seconds, memory = float(cells[3]), float(cells[4].removesuffix("GiB"))
            name = f"st-krea2-page{'-compiled' if compiled else ''}-{precision}-{side}-b{batch}-h100"
            yield row(name, known, (precision, "layer", "H100"), (seconds, memory), KREA)


if __name__ == "__main__":
    sys.exit(main())
