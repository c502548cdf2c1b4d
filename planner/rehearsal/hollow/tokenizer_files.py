"""Tokenizers that work without the published ones: of the same class and vocabulary size, with words of one letter.

Ids stay below the size of the model's embedding, special tokens have their published ids, and padding works. A text
becomes about as many tokens as it has letters, which is more than with the published vocabulary.
"""

from __future__ import annotations

import json
import string
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

TokenizerKind = Literal["clip", "t5", "umt5"]

CLIP_SIZE = 49_408
CLIP_START, CLIP_END = "<|startoftext|>", "<|endoftext|>"
T5_PIECES = {"t5": 32_000, "umt5": 256_000}
T5_EXTRA = {"t5": 100, "umt5": 300}
"""`<extra_id_N>` after the pieces (google/t5-v1_1-xxl and google/umt5-xxl, tokenizer_config.json)."""
SPACE = "\u2581"
"""How SentencePiece writes a space."""
_LETTER, _FILLER = -5.0, -20.0
"""Log probabilities."""
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3
"""SentencePiece.Type (google/sentencepiece src/sentencepiece_model.proto)"""


def write_tokenizer(folder: Path, kind: TokenizerKind) -> None:
    """The files of a tokenizer, as `save_pretrained` names them."""
    files = _clip() if kind == "clip" else _t5(kind)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        with (folder / name).open("xb") as file:
            file.write(data)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# ---- CLIP: byte-level BPE, words end with </w>


def _clip() -> dict[str, str | bytes]:
    letters = [*_byte_letters()]
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += [f"unused-{number}</w>" for number in range(CLIP_SIZE - 2 - len(words))]
    vocabulary = {word: number for number, word in enumerate([*words, CLIP_START, CLIP_END])}
    special = {"bos_token": CLIP_START, "eos_token": CLIP_END, "unk_token": CLIP_END, "pad_token": CLIP_END}
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "do_lower_case": True, **special}
    return {
        "vocab.json": _json(vocabulary),
        "merges.txt": "#version: 0.2\n",
        "tokenizer_config.json": _json(settings),
        "special_tokens_map.json": _json(special),
    }


def _byte_letters() -> Iterator[str]:
    """The printable character for each byte (openai/CLIP simple_tokenizer.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    yield from map(chr, printable)
    yield from (chr(256 + number) for number in range(256 - len(printable)))


# ---- T5 and UMT5: SentencePiece's unigram model


def _t5(kind: str) -> dict[str, str | bytes]:
    pieces = [("<pad>", 0.0, _CONTROL), ("</s>", 0.0, _CONTROL), ("<unk>", 0.0, _UNKNOWN)]
    letters = [SPACE, *string.ascii_letters, *string.digits, *string.punctuation]
    pieces += [(letter, _LETTER, _NORMAL) for letter in letters]
    pieces += [(f"unused-{number}", _FILLER, _NORMAL) for number in range(T5_PIECES[kind] - len(pieces))]
    extra = [f"<extra_id_{number}>" for number in range(T5_EXTRA[kind])]
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": len(extra), "model_max_length": 512, **special}
    return {
        "spiece.model": _sentencepiece(pieces),
        "tokenizer.json": _json(_unigram(pieces, extra)),
        "tokenizer_config.json": _json({**settings, "additional_special_tokens": extra}),
        "special_tokens_map.json": _json({**special, "additional_special_tokens": extra}),
    }


def _unigram(pieces: list[tuple[str, float, int]], extra: list[str]) -> dict[str, Any]:
    """`tokenizer.json` of the tokenizers library, as transformers converts a T5 vocabulary."""
    # Ids of the extra tokens run backwards, as in T5: <extra_id_0> is the last.
    vocabulary = [[text, score] for text, score, _kind in pieces] + [[text, 0.0] for text in reversed(extra)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    numbers = {row[0]: number for number, row in enumerate(vocabulary)}
    added = [{"id": numbers[text], "content": text, **flags} for text in ("<pad>", "</s>", "<unk>", *reversed(extra))]
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    end = [{"SpecialToken": {"id": "</s>", "type_id": 0}}]
    one, other = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
    template = {
        "type": "TemplateProcessing",
        "single": [one, *end],
        "pair": [one, *end, other, *end],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": metaspace,
        "post_processor": template,
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 2, "vocab": vocabulary, "byte_fallback": False},
    }


def _sentencepiece(pieces: list[tuple[str, float, int]]) -> bytes:
    """A ModelProto (sentencepiece_model.proto) of these pieces: fields 1 pieces, 2 trainer_spec, 3 normalizer_spec."""
    rows = b"".join(
        _field(1, _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + _varint(kind))
        for text, score, kind in pieces
    )
    # trainer_spec: 3 model_type UNIGRAM, 4 vocab_size, 40 to 43 ids of <unk>, <s> (none), </s> and <pad>
    ids = {3: 1, 4: len(pieces), 40: 2, 41: -1, 42: 1, 43: 0}
    trainer = b"".join(_varint(number << 3) + _varint(value) for number, value in ids.items())
    normalizer = _field(1, b"identity") + b"".join(_varint(number << 3) + b"\x01" for number in (3, 4, 5))
    return rows + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Protocol Buffers' base-128 number; negative ones take ten bytes."""
    value &= 2**64 - 1
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])
