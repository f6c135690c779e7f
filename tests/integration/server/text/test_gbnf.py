"""Grammars in llama.cpp's notation, which clients of SGLang and of xgrammar send, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import StructuredOutputs
from quire.engine.scheduler.grammar import GrammarCompiler, GrammarError
from quire.server.text.structured_outputs import StructuredOutputCheck
from tests.fakes.configs import TINY, engine_config
from tests.fakes.tokenizers import byte_level


@pytest.fixture(scope="module")
def checker(model_folder: Path) -> Iterator[StructuredOutputCheck]:
    config = engine_config(tokenizer=model_folder, architecture=replace(TINY, vocab_size=320), eos=(2,))
    check = StructuredOutputCheck(config.model)
    yield check
    check.close()


def test_a_grammar_is_enforced(checker: StructuredOutputCheck) -> None:
    """It is converted: `::=` is in none of Lark's rules."""
    grammar = """# an answer
root ::= answer ("," ws answer){0,2} "\\n"?
answer ::= "yes" | [0-9]+
ws ::= " "*
"""
    resolved = checker.resolve(StructuredOutputs(grammar=grammar))
    assert checker.resolve(StructuredOutputs(grammar='start: "a ::= b"')).grammar == 'start: "a ::= b"'
    grammars = GrammarCompiler(checker.model)
    for text, is_good in (("yes", True), ("12,  yes", True), ("1,2,3\n", True), ("1,2,3,4", False), ("no", False)):
        compiled = grammars.compile(resolved)
        try:
            compiled.advance(byte_level().encode(text, add_special_tokens=False).ids)
        except GrammarError:
            assert not is_good, text
        else:
            (mask,) = grammars.masks([compiled])
            assert bool(mask[0] & 1 << 2) == is_good, text


@pytest.mark.parametrize("grammar", ['x ::= "a"', "root ::= y", 'root ::= "a', "root ::= " + "(" * 10_000])
def test_what_cannot_be_converted_is_refused(checker: StructuredOutputCheck, grammar: str) -> None:
    with pytest.raises(InvalidParameter, match="ebnf: the grammar cannot be converted from GBNF: ") as error:
        checker.resolve(StructuredOutputs(grammar=grammar), "ebnf")
    assert len(str(error.value)) < 300
