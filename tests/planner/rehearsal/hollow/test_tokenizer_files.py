"""Made tokenizers load in the classes of the published ones, with their sizes and special tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.rehearsal.hollow.tokenizer_files import TokenizerKind, write_tokenizer

transformers = pytest.importorskip("transformers")


def test_clip(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "clip")
    tokenizer = transformers.CLIPTokenizer.from_pretrained(str(tmp_path))
    ids = tokenizer("a Dog", padding="max_length", max_length=10, truncation=True).input_ids
    assert len(tokenizer) == 49408
    assert (ids[0], ids[-1]) == (49406, 49407)
    assert ids == tokenizer("a dog", padding="max_length", max_length=10).input_ids
    assert ids[1] == 320  # "a" as a word, as in the published vocabulary
    assert tokenizer("a dog" * 100, truncation=True, max_length=77).input_ids[-1] == 49407


@pytest.mark.parametrize(("kind", "size"), [("t5", 32_100), ("umt5", 256_300)])
def test_t5(tmp_path: Path, kind: TokenizerKind, size: int) -> None:
    write_tokenizer(tmp_path, kind)
    tokenizer = transformers.T5TokenizerFast.from_pretrained(str(tmp_path))
    ids = tokenizer("a dog, 3", padding="max_length", max_length=32).input_ids
    assert len(tokenizer) == size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert ids.index(1) == 9  # a space before each word, and a token for every letter
    assert set(ids[10:]) == {0}
    assert tokenizer.convert_tokens_to_ids("<extra_id_0>") == size - 1


def test_sentencepiece_reads_the_vocabulary(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    write_tokenizer(tmp_path, "t5")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
    fast = transformers.T5TokenizerFast.from_pretrained(str(tmp_path))
    assert processor.get_piece_size() == 32_000
    assert processor.pad_id() == 0
    assert [*processor.encode("a dog"), 1] == fast("a dog").input_ids
