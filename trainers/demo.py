"""The worker that writes the files of `vplan demo`: a pipeline with tiny random weights, and clips to train it on.

`planner.launch.demo` starts it as ``vplan worker demo FOLDER``, with a `DemoRequest` in ``FOLDER/request.json``. The
pipeline is that of a bundled Wan, with fewer and narrower layers; what decides which clips it takes is unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy
import torch

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.launch.demo import DemoRequest
from planner.worker_process import REQUEST, read_json, result_file
from trainers.worker import ResultFile, end_with_parent

SMALL_TRANSFORMER = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 16, "freq_dim": 8}
SMALL_VAE = {"base_dim": 3, "num_res_blocks": 1, "dim_mult": [1, 1, 1, 1]}
SMALL_TEXT = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}

FRAMES, HEIGHT, WIDTH, FRAMES_PER_SECOND = 17, 64, 96, 16
SIDE = 16
"""Pixels of the square that moves."""

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (40, 80, 220)}
CAPTION = "a {} square moves to the right"


def main(arguments: list[str]) -> int:
    """Writes what the request in the folder named by the only argument asks for."""
    folder = Path(arguments[0])
    end_with_parent()
    request = DemoRequest.read(read_json(folder / REQUEST), REQUEST)
    report = ResultFile(folder / result_file(0))
    report.tell(rank=0, phase="demo")
    write_model(lookup.model(request.like), Path(request.model))
    write_clips(Path(request.clips))
    report.tell(outcome="ok")
    return 0


def write_model(like: ModelProfile, folder: Path) -> None:
    """Writes a pipeline of a Wan's classes with tiny random weights, as `save_pretrained` does."""
    import diffusers
    import transformers

    torch.manual_seed(0)
    (encoder,) = like.text_encoders
    words = _words()
    text = transformers.UMT5Config(**{**encoder.config, **SMALL_TEXT, "vocab_size": len(words)})
    config = {**like.config, **SMALL_TRANSFORMER, "text_dim": text.d_model}
    vae: Any = diffusers.AutoencoderKLWan
    transformer: Any = diffusers.WanTransformer3DModel
    scheduler: Any = diffusers.UniPCMultistepScheduler
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": like.training.shift}
    diffusers.WanPipeline(
        tokenizer=_tokenizer(words, encoder.max_tokens),
        text_encoder=transformers.UMT5EncoderModel(text),
        vae=vae(**{**like.vae.config, **SMALL_VAE}),
        transformer=transformer(**config),
        scheduler=scheduler(**flow),
    ).save_pretrained(folder)


def write_clips(folder: Path) -> None:
    """Writes a short video for each colour, with its caption beside it."""
    folder.mkdir(parents=True)
    for name, colour in COLOURS.items():
        (folder / f"{name}.txt").write_text(CAPTION.format(name) + "\n", encoding="utf-8")
        with av.open(str(folder / f"{name}.mp4"), "w") as container:
            stream = container.add_stream("mpeg4", rate=FRAMES_PER_SECOND)
            stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
            for number in range(FRAMES):
                picture = numpy.full((HEIGHT, WIDTH, 3), 240, numpy.uint8)
                left, top = (WIDTH - SIDE) * number // (FRAMES - 1), (HEIGHT - SIDE) // 2
                picture[top : top + SIDE, left : left + SIDE] = colour
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())


def _words() -> dict[str, int]:
    """The vocabulary: all words of the captions, and the tokens that every T5 has."""
    said = sorted({word for name in COLOURS for word in CAPTION.format(name).split()})
    return {word: number for number, word in enumerate(("<pad>", "</s>", "<unk>", *said))}


def _tokenizer(words: dict[str, int], length: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=length, **tokens)
