"""The model's tokenizer as an object of transformers, for programs."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as Backend

from quire.server.text.input_processor import InputProcessor


def hf_tokenizer(processor: InputProcessor) -> Any:
    """Return a `PreTrainedTokenizerFast` with a copy of the tokenizer, its special tokens and its chat template."""
    from transformers import PreTrainedTokenizerFast  # takes a second, and only some programs need it

    tokenizer = processor.tokenizer
    special = tokenizer.special_tokens
    others = [
        token.content
        for token in tokenizer.backend.get_added_tokens_decoder().values()
        if token.special and token.content not in special.values()
    ]
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Backend.from_str(tokenizer.backend.to_str()),
        extra_special_tokens=others,
        chat_template=processor.chat_template,
        model_max_length=processor.max_model_len,
        **special,
    )
