"""Folders with only tokenizer.model, against SentencePiece itself."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from quire.engine.protocol.errors import ConfigError
from quire.server.text.output_processor import Detokenizer
from quire.server.text.tokenizer import Tokenizer

SENTENCES = [
    "the scheduler serves tokens",
    "a model, two nodes and 12345 requests",
    "prefix caching, then decode",
    "é ü",
]
SETTINGS: dict[str, dict[str, Any]] = {
    "bpe": {},
    "bpe, user-defined": {"user_defined_symbols": ["<|turn|>", "\n\n", "▁▁"], "control_symbols": ["<ctl>"]},
    "bpe, no prefix": {"add_dummy_prefix": False, "user_defined_symbols": ["<|turn|>"]},
    "bpe, other spaces": {"remove_extra_whitespaces": True, "normalization_rule_name": "nmt_nfkc"},
    "unigram": {"model_type": "unigram"},
    "unigram, other spaces": {"model_type": "unigram", "remove_extra_whitespaces": True, "byte_fallback": False},
}
TEXTS = (
    *("the scheduler serves 12345 tokens", " two  spaces   ", "中文 😀 é", "a\nb\n\nc\r\n", "▁x ▁", " ", "", "\n\n\n"),
    *("<|turn|>the <|turn|> x<|turn|><|turn|>", "▁▁▁▁▁", "ﬁne ½ Ａ\u00a0x", "prefix\tdecode"),
)


def train(folder: Path, **settings: Any) -> SentencePieceProcessor:
    """Write tokenizer.model."""
    common: dict[str, Any] = {
        "model_type": "bpe",
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
    }
    common |= {"hard_vocab_limit": False} if settings.get("model_type") == "unigram" else {}
    common |= {"normalization_rule_name": "identity", "vocab_size": 400}
    made = io.BytesIO()
    characters = "".join(map(chr, range(33, 127)))
    SentencePieceTrainer.train(
        sentence_iterator=iter([*SENTENCES * 20, characters]), model_writer=made, **common | settings
    )
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(made.getvalue())
    return SentencePieceProcessor(model_proto=made.getvalue())


@pytest.mark.parametrize("kind", SETTINGS)
def test_ids_and_texts_are_those_of_sentencepiece(tmp_path: Path, kind: str) -> None:
    theirs = train(tmp_path, **SETTINGS[kind])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    ours = Tokenizer.load(tmp_path)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text, add_special_tokens=True) == [theirs.bos_id(), *ids]
        if text.startswith("▁") and "other spaces" in kind:
            continue  # a prompt that no client sees decoded: SentencePiece drops all of the spaces
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids).replace(" \u2047 ", ""), text
    ids = [number for text in TEXTS for number in theirs.encode(text)]
    for prompt in ([], [1, *ids[:7]]):
        detokenizer = Detokenizer(ours, prompt, True)
        streamed = "".join([*map(detokenizer.feed, ids), detokenizer.flush()])
        before, text = (ours.decode(each, skip_special_tokens=True) for each in (prompt, [*prompt, *ids]))
        assert before + streamed == text
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert ours.encode("<s>the</s>", add_special_tokens=False) == [1, *theirs.encode("the"), 2]


def test_settings_of_tokenizer_config(tmp_path: Path) -> None:
    theirs = train(tmp_path, user_defined_symbols=["<|turn|>"])
    turn, size = theirs.piece_to_id("<|turn|>"), theirs.get_piece_size()
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": True,
        "eos_token": "<|turn|>",
        "added_tokens_decoder": {
            str(turn): {"content": "<|turn|>", "special": True},
            str(size): {"content": "<|call|>", "special": False},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.load(tmp_path)
    a, b = theirs.encode("the"), theirs.encode("model")
    assert ours.encode("the<|turn|>model<|call|>", add_special_tokens=True) == [*a, turn, *b, size, turn]
    assert ours.decode([*a, turn, *b, size], skip_special_tokens=True) == "the model<|call|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "legacy": False, "add_eos_token": False}))
    ours, inside = Tokenizer.load(tmp_path), theirs.encode("xmodel")
    assert ours.encode("the<|turn|>", add_special_tokens=True) == [*a, turn]
    without_prefix = [theirs.piece_to_id(piece) for piece in theirs.encode("xmodel", out_type=str)][-len(inside) + 2 :]
    assert ours.encode("the<|turn|>model", add_special_tokens=True)[len(a) + 1 :] == without_prefix
    del config["added_tokens_decoder"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "</s>"}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|call|>": size}))
    assert Tokenizer.load(tmp_path).encode("the<|call|>", add_special_tokens=True) == [*a, size, 2]


def test_models_that_cannot_be_represented(tmp_path: Path) -> None:
    train(tmp_path, model_type="unigram", user_defined_symbols=["<|turn|>"])
    with pytest.raises(ConfigError, match=r"tokenizer\.model: the SentencePiece model is not supported, .* model_type"):
        Tokenizer.load(tmp_path)
    train(tmp_path, treat_whitespace_as_suffix=True)
    with pytest.raises(ConfigError, match="because of its treat_whitespace_as_suffix; set --tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x05")
    with pytest.raises(ConfigError, match="not a SentencePiece model; download it again"):
        Tokenizer.load(tmp_path)
