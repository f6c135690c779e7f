"""Tokenizers from GGUF metadata against the ones that the metadata were made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from quire.engine.repository.gguf_folder import write
from quire.server.text import tokenizer
from tests.fakes.gguf_models import add_byte_level, add_sentencepiece, close, config_of, writer
from tests.fakes.tokenizers import SPECIAL

TEXTS = [
    "hello world, how are you?",
    "The quick  brown\tfox's 12345 l'été\n\n  doesn't jump! (IT'S) 中文 é ü 😀😁 ",
    "<|im_start|>user\nserve a model on 2 nodes<|im_end|>\n",
    "  leading and trailing   ",
    "e\u0301 decomposed, HTTPServer/path//x\n/\r\n",
    "",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def original(pre: str) -> Tokenizer:
    """A small tokenizer with the parts of the tokenizer.json of GPT-2, Llama 3, Qwen2, Mistral Nemo or SmolLM."""
    split = {"llama-bpe": LLAMA3, "qwen2": QWEN2, "tekken": TEKKEN}.get(pre)
    built = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    parts: list[pre_tokenizers.PreTokenizer] = (
        [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    )
    if split is not None:
        parts.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    built.pre_tokenizer = pre_tokenizers.Sequence(parts)
    built.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        built.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(TEXTS, trainer)
    built.add_tokens([AddedToken("<think>", normalized=False)])
    return built


def from_file(
    folder: Path, pre: str, *, backend: Tokenizer | None = None, pieces: Mapping[str, int] | None = None
) -> tokenizer.Tokenizer:
    config = config_of("Qwen2ForCausalLM")
    made = writer(folder / "m.gguf", config)
    made.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    if backend is not None:
        add_byte_level(made, backend, pre, plain=("<think>",))
        made.add_bos_token_id(0)
    else:
        add_sentencepiece(made, pieces or {}, has_prefix=pre != "without prefix")
    close(made)
    write(folder / "m.gguf", folder / "model")
    return tokenizer.Tokenizer.load(folder / "model")


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "smollm"])
def test_byte_level_tokenizers_give_the_same_ids(pre: str, tmp_path: Path) -> None:
    backend = original(pre)
    found = from_file(tmp_path, pre, backend=backend)
    for text in [*TEXTS, f"<think>{TEXTS[1]}</think>"]:
        ids = backend.encode(text).ids
        assert found.encode(text, add_special_tokens=False) == ids
        assert found.decode(ids, skip_special_tokens=True) == backend.decode(ids, skip_special_tokens=True)
    assert found.special_tokens["bos_token"] == "<|endoftext|>"
    assert found.special_ids == set(range(len(SPECIAL)))  # <think> is an added token, but not special
    begins_with_bos = found.encode("hello", add_special_tokens=True)[0] == 0
    assert begins_with_bos == (pre in ("llama-bpe", "tekken"))


_WORDS = "▁t he ▁the in ▁a er ll ▁w or an ▁s llo hello ▁hello ld orld aa aaa ▁▁ ▁"
PIECES = (*_WORDS.split(), *"theinarlwosd,qu")


def merged(text: str, pieces: Sequence[str]) -> list[str]:
    """SentencePiece's BPE: the neighbours that make the best piece become it, from the left, until none do."""
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [(pieces.index(a + b), at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in pieces]
        if not pairs:
            return symbols
        at = min(pairs)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    found = from_file(tmp_path, "", pieces=dict.fromkeys(PIECES, 1))
    for text in ("hello world", "the worlder, in the inn", "  aaaaa haaa", "than tho then"):
        expected = merged(f" {text}", PIECES)
        assert [
            found.backend.id_to_token(number) for number in found.encode(text, add_special_tokens=False)
        ] == expected
        assert found.encode(text, add_special_tokens=True)[0] == 1
        assert found.decode(found.encode(text, add_special_tokens=True), skip_special_tokens=True) == text


def test_characters_without_a_piece_are_bytes(tmp_path: Path) -> None:
    found = from_file(tmp_path, "", pieces=dict.fromkeys(PIECES, 1))
    ids = found.encode("hello 😀\n", add_special_tokens=False)
    tokens = " ".join(str(found.backend.id_to_token(number)) for number in ids)
    assert tokens == "▁hello ▁ <0xF0> <0x9F> <0x98> <0x80> <0x0A>"
    assert found.decode(ids, skip_special_tokens=True) == "hello 😀\n"


def test_gemma_has_no_prefix_and_defines_runs_of_spaces(tmp_path: Path) -> None:
    """llama.cpp has them as spaces, with a score that says nothing."""
    pieces = {**dict.fromkeys(PIECES, 1), "<b>": 4, "  ": 4, "   ": 4}
    del pieces["▁▁"]
    found = from_file(tmp_path, "without prefix", pieces=pieces)

    def tokens(text: str) -> list[str | None]:
        ids = found.encode(text, add_special_tokens=False)
        assert found.decode(ids, skip_special_tokens=True) == text
        return [found.backend.id_to_token(number) for number in ids]

    assert tokens("hello the<b>hello") == ["hello", "▁the", "<b>", "hello"]
    assert tokens("the  the   the") == ["t", "he", "▁▁", "t", "he", "▁▁▁", "t", "he"]
