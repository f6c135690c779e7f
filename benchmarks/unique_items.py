"""The cost of `uniqueItems`: the processor time that it adds to a token, by kind, number and length of items.

.venv/bin/python benchmarks/unique_items.py [--tokens 120000]

Each line is an array of that many items and the beginning of one more, of which the last five bytes are measured: the
medians of advancing by one token and computing the next mask, with and without `uniqueItems`. The vocabulary is made
up, with the punctuation of JSON in many tokens, as real ones have it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.engine.protocol.sampling_params import StructuredOutputs
from quire.engine.scheduler.grammar import GrammarCompiler
from quire.engine.scheduler.unique_places import without_unique_items

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.fakes.configs import TINY, engine_config

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ENDS = ('",', '", ', '","', '", "', '":', '": ', '"]', '"],', '"}', "1,", "1]", "[1", ",1", "1,1", '["', '","a', '"a"')
_MEASURED = 5
_BEFORE = ("", "a", ".", "?", ")", "0", "1", "s", "\\", "_", "-", "/", ">", "}")


def vocabulary(size: int) -> Tokenizer:
    """Words, numbers of up to three digits, and what ends a JSON string or number."""
    rng, byte = random.Random(1), pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = {before + end for before in _BEFORE for end in _ENDS} | {str(number) for number in range(1000)}
    while len(texts) < size:
        texts.add(rng.choice(("", " ")) + "".join(rng.choices(_LETTERS, k=rng.randint(2, 8))))
    names = [*sorted(byte.alphabet()), "<end>"]
    names += ["".join(part for part, _ in byte.pre_tokenize_str(text)) for text in sorted(texts)]
    built = Tokenizer(models.BPE({name: at for at, name in enumerate(dict.fromkeys(names))}, []))
    built.pre_tokenizer, built.decoder = byte, decoders.ByteLevel()
    built.add_special_tokens(["<end>"])
    return built


def _cases() -> list[tuple[str, Any, Sequence[Any], str]]:
    """Name, schema of the items, used items, and the beginning of another one."""
    rng = random.Random(2)
    many = [f"item {number} of many" for number in range(50_000)]
    text = "".join(rng.choices(_LETTERS, k=100_000))
    bounded = {"type": "string", "pattern": "^[a-z0-9 ]{1,40}$"}
    choices = [f"choice {number}" for number in range(200)]
    return [
        *(
            (f"string of {size}", {"type": "string"}, ["a"], f'"{text[: size + _MEASURED]}')
            for size in (10, 1000, 100_000)
        ),
        *((f"{size} strings", {"type": "string"}, many[:size], '"item 1') for size in (10, 1000, 50_000)),
        *((f"{size} bounded strings", bounded, many[:size], '"item 1') for size in (10, 1000)),
        ("bounded string of 1000", {"type": "string", "maxLength": 5000}, ["a"], f'"{text[:1000]}'),
        *((f"{size} of 200 choices", {"enum": choices}, choices[:size], '"choice 1') for size in (10, 190)),
        *((f"{size} integers", {"type": "integer"}, range(1, 7 * size, 7), "100000") for size in (10, 1000, 50_000)),
    ]


def cost(compiler: GrammarCompiler, schema: Any, text: str) -> float:
    """Milliseconds to advance by a token and to compute the next mask at the end of this text."""
    tokens, seconds = compiler._token_texts(), list[float]()
    grammar = compiler.compile(StructuredOutputs(json=schema))
    data = text.encode()
    grammar.advance([tokens.of_byte[byte] for byte in data[:-_MEASURED]])
    compiler.masks([grammar])
    for byte in data[-_MEASURED:]:
        begun = time.process_time()
        grammar.advance([tokens.of_byte[byte]])
        compiler.masks([grammar])
        seconds.append(time.process_time() - begun)
    return statistics.median(seconds) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=120_000, help="size of the vocabulary")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        tokenizer, folder = vocabulary(options.tokens), Path(name)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text("{}")
        architecture = replace(TINY, vocab_size=tokenizer.get_vocab_size())
        ends = (tokenizer.get_vocab()["<end>"],)
        compiler = GrammarCompiler(engine_config(tokenizer=folder, architecture=architecture, eos=ends).model)
        begun = time.process_time()
        compiler.compile(StructuredOutputs(json_object=True))
        print(f"{'tokenizer of the grammars, once':32}{time.process_time() - begun:9.2f} s")
        begun = time.process_time()
        compiler._token_texts()
        print(f"{'sorting the vocabulary, once':32}{time.process_time() - begun:9.2f} s\n")
        print(f"{'':32}  added ms   without")
        for name, items, used, last in _cases():
            schema = {"type": "array", "items": items, "uniqueItems": True}
            text = f"{json.dumps([*used], separators=(',', ':'))[:-1]},{last}"
            without = cost(compiler, without_unique_items(schema), text)
            print(f"{name:32}{cost(compiler, schema, text) - without:9.2f}{without:10.2f}", flush=True)


if __name__ == "__main__":
    main()
