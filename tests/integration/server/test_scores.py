"""A cross-encoder from texts to scores: transformers' tokenizer, model and sigmoid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from quire import LLM
from quire.server.text import tokenizer

WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "a", "fox", "dog", "is", "quick", "lazy", "what", "which", "animal"),
    *("?", ".", "cat", "sat", "on", "mat", "##s", "##es"),
]


def word_piece() -> Tokenizer:
    """As BERT's."""
    built = Tokenizer(models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer()
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    built.add_special_tokens(WORDS[:4])
    return built


def transformers_tokenizer() -> Any:
    wrapped: Any = PreTrainedTokenizerFast
    return wrapped(
        tokenizer_object=word_piece(),
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")},
    )


PAIRS = [
    ("which animal is quick?", "The fox is quick."),
    ("which animal is quick?", ""),
    ("what sat on the mat?", "the cats sat on the mat. " * 8),
    ("which animal sat on which mat?" * 6, "the lazy dogs"),
    ("a fox is a fox", "a dog is a dog"),
]


@pytest.mark.parametrize("side", ["left", "right"])
def test_pairs_are_truncated_as_transformers_does(side: Any) -> None:
    ours, theirs = tokenizer.Tokenizer(word_piece(), {}, {}), transformers_tokenizer()
    theirs.truncation_side = side
    for first, second in PAIRS:
        one, other = (ours.encode(text, add_special_tokens=False) for text in (first, second))
        for limit in (None, 3, 4, 9, 10, 11, 30):
            ids, start = ours.join_pair(one, other, limit, add_special_tokens=True, side=side)
            right = theirs([first], [second], truncation=limit is not None, max_length=limit)
            assert [ids] == right["input_ids"]
            assert [[int(at >= start) for at in range(len(ids))]] == right["token_type_ids"]


def test_scores_of_a_cross_encoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_labels": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = BertConfig(vocab_size=len(WORDS), **sizes, initializer_range=0.5)
    model: Any = BertForSequenceClassification(config).train(False)
    model.save_pretrained(tmp_path)
    theirs = transformers_tokenizer()
    theirs.save_pretrained(tmp_path)
    with torch.inference_mode():
        # A list of pairs: of a single one, transformers drops an empty second text.
        right = [float(model(**theirs([pair], return_tensors="pt")).logits.sigmoid()) for pair in PAIRS]
    firsts, seconds = zip(*PAIRS, strict=True)
    with LLM(str(tmp_path), device="cpu") as llm:
        found = [each.outputs.score for each in llm.score(firsts, seconds, use_tqdm=False)]
    assert found == pytest.approx(right, rel=1e-4)
    assert max(right) - min(right) > 0.01, "they differ"
