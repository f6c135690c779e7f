"""Structured output from request to text: with any model, output that ends by itself satisfies the request."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime, time
from decimal import Decimal, InvalidOperation, localcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError, validators

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.server.text.output_processor import OutputProcessor, TextDelta
from quire.server.text.structured_outputs import StructuredOutputCheck
from quire.server.text.tokenizer import Tokenizer
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.schemas import SCHEMAS, SETS
from tests.fakes.tokenizers import write_model

MAX_TOKENS = 500
PROMPT = [40, 41, 42]


def _is_integer(_: Any, value: Any) -> bool:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, Decimal) and value % 1 == 0))


_FORMATS = copy.deepcopy(Draft202012Validator.FORMAT_CHECKER)
_FORMATS.checks("date-time", ValueError)(lambda text: not isinstance(text, str) or datetime.fromisoformat(text))
_FORMATS.checks("time", ValueError)(lambda text: not isinstance(text, str) or time.fromisoformat(text))
for _name, _form in {
    "duration": r"P(\d+W|(?=.)(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)",
    "hostname": r"(?!.{254})([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.(?=.)|$))+",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:[!#-;=?-\[\]_a-z~%]*",
}.items():
    _FORMATS.checks(_name)(
        lambda text, form=_form: not isinstance(text, str) or bool(re.fullmatch(form, text, re.IGNORECASE))
    )


def _pattern(validator: Any, pattern: str, text: Any, schema: Any) -> Iterator[ValidationError]:
    """As in ECMA-262: only 0 to 9 are digits."""
    if isinstance(text, str) and not re.search(pattern.replace(r"\D", "[^0-9]"), text):
        yield ValidationError(f"{text!r} does not match {pattern!r}")


_extend: Any = validators.extend
_VALIDATOR = _extend(
    Draft202012Validator,
    {"pattern": _pattern},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)


def validate(schema: Any, text: str) -> None:
    """`text` is JSON that satisfies the schema, its numbers taken to the last digit."""

    def number(text: str) -> Decimal | float:
        try:
            return Decimal(text)
        except InvalidOperation:  # an exponent of twenty digits
            return float(text)

    exact: Callable[[str], Any] = partial(json.loads, parse_float=number, parse_int=Decimal)
    schema = exact(json.dumps(modern(schema)))
    with localcontext() as context:
        context.prec = 1500
        context.Emax, context.Emin = 10**17, -(10**17)
        _VALIDATOR(schema, format_checker=_FORMATS).validate(exact(text))


def modern(schema: Any) -> Any:
    """The schema as this draft says it: lists of items, and exclusive bounds that are true or false."""
    if isinstance(schema, list):
        return [modern(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: modern(value) for key, value in schema.items() if key not in ("$schema", "$id")}
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        schema["items"] = schema.pop("additionalItems", True)
    if schema.get("exclusiveMinimum") is True:
        schema["exclusiveMinimum"] = schema.pop("minimum")
    return schema


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary is padded, and that may write long outputs."""
    folder = write_model(tmp_path_factory.mktemp("structured"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024, "vocab_size": 341}))
    return folder


def load_config(folder: Path, **options: Any) -> EngineConfig:
    options = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 32 << 20, **options}
    return resolve(EngineOptions(model=str(folder), load_format="dummy", **options))


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[Ranks]:
    with Ranks(load_config(folder)) as running:
        yield running


class Texts:
    """Runs structured outputs as a front end would, and reads the output."""

    def __init__(self, ranks: Ranks) -> None:
        model = ranks.config.model
        self._ranks = ranks
        self._check = StructuredOutputCheck(model)
        self.tokenizer = Tokenizer.load(model.tokenizer)

    def run(self, params: list[SamplingParams], **settings: Any) -> list[TextDelta]:
        requests = []
        for one in params:
            outputs = one.structured_outputs
            checked = None if outputs is None else self._check.resolve(outputs)
            requests.append((PROMPT, replace_params(one.for_engine(one.seed or 0), structured_outputs=checked)))
        answers = self._ranks.run(requests, **settings)
        return [self._text(one, outputs) for one, outputs in zip(params, answers, strict=True)]

    def _text(self, params: SamplingParams, outputs: list[EngineCoreOutput]) -> TextDelta:
        text, whole = OutputProcessor(self.tokenizer, 0, PROMPT, params), TextDelta(0)
        for output in outputs:
            assert output.error is None, output.error
            whole.extend(text.feed(output))
        return whole


def replace_params(params: SamplingParams, **changes: Any) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__} | changes)


def asked(seed: int = 0, **outputs: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=MAX_TOKENS, structured_outputs=StructuredOutputs(**outputs))


def check_all(texts: list[TextDelta], schemas: list[Any]) -> int:
    """Validate the texts that ended; returns their number."""
    ended = 0
    for schema, answer in zip(schemas, texts, strict=True):
        assert answer.finish_reason in ("stop", "length")
        if answer.finish_reason == "stop":
            ended += 1
            try:
                validate(schema, answer.text)
            except Exception as error:
                raise AssertionError(f"{answer.text!r} for {schema}") from error
    return ended


def test_the_table_is_as_large_as_it_claims() -> None:
    assert len({json.dumps(schema) for schema in SCHEMAS}) == len(SCHEMAS) >= 150


def test_every_output_satisfies_its_schema(ranks: Ranks) -> None:
    texts = Texts(ranks).run([asked(0, json=schema) for schema in SCHEMAS], max_num_seqs=256)
    assert check_all(texts, SCHEMAS) > 0.95 * len(SCHEMAS)


@pytest.fixture(scope="module")
def mixed(ranks: Ranks) -> tuple[list[SamplingParams], list[list[int]]]:
    """Requests of which a third is unconstrained, and the tokens of each when it runs alone."""
    params = [replace_params(asked(5, json=schema), max_tokens=120) for schema in [*SCHEMAS[::9], *SETS]]
    for at in range(0, len(params), 3):
        params[at] = replace_params(params[at], structured_outputs=None, max_tokens=80)
    runner = Texts(ranks)
    return params, [runner.run([one])[0].token_ids for one in params]


def test_it_does_not_depend_on_ranks_or_stages(
    mixed: tuple[list[SamplingParams], list[list[int]]], folder: Path
) -> None:
    params, expected = mixed
    with Ranks(load_config(folder, tensor_parallel_size=2, pipeline_parallel_size=2)) as sharded:
        assert [text.token_ids for text in Texts(sharded).run(params)] == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"depth": 1, "max_num_batched_tokens": 24, "max_num_seqs": 12},
        {"depth": 3, "num_blocks": 34},
        {"enable_prefix_caching": False, "num_blocks": 36},
    ],
)
def test_output_does_not_depend_on_the_batch(
    ranks: Ranks, mixed: tuple[list[SamplingParams], list[list[int]]], settings: dict[str, Any]
) -> None:
    params, expected = mixed
    assert [text.token_ids for text in Texts(ranks).run(params, **settings)] == expected
    assert ranks.stats.preemptions > 0 or "num_blocks" not in settings


def test_other_ways_to_say_what_an_output_is(ranks: Ranks) -> None:
    regex, choice = r"(foo|bar)+-\d{2}[α-ω]?", ["yes", "no", "maybe\n", 'ÿ"\\', "a" * 40]
    lark = (
        'start: "<" name ">" %json {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}\nname: /[a-z]{1,3}/'
    )
    lazy = 'start: thought %json {"const": 1}\nthought[lazy]: /[a-c ]{0,9}END/'
    ebnf = 'root ::= sum\nsum ::= number ("+" number)?\nnumber ::= [1-9]'
    special = 'start: /[a-d]{1,3}/ <|im_start|> %json {"enum": ["x", "y"]}'
    kinds: list[tuple[dict[str, Any], Callable[[str], object]]] = [
        ({"regex": regex}, re.compile(regex).fullmatch),
        ({"choice": choice}, choice.__contains__),
        ({"grammar": lark}, re.compile(r"<[a-z]{1,3}>\[[\s\S]*\]").fullmatch),
        ({"grammar": lazy}, re.compile("[a-c ]{0,9}END1").fullmatch),
        ({"grammar": ebnf}, re.compile(r"[1-9](\+[1-9])?").fullmatch),
        ({"grammar": special}, re.compile(r'[a-d]{1,3}<\|im_start\|>"[xy]"').fullmatch),
    ]
    params = [replace_params(asked(seed, **one), skip_special_tokens=False) for one, _ in kinds for seed in range(5)]
    texts = Texts(ranks).run(params)
    for number, answer in enumerate(texts):
        if answer.finish_reason == "stop":
            assert kinds[number // 5][1](answer.text), answer.text
    assert sum(answer.finish_reason == "stop" for answer in texts) >= len(texts) - 3
    objects = [*Texts(ranks).run([asked(seed, json_object=True) for seed in range(9)])]
    assert all(isinstance(json.loads(answer.text), dict) for answer in objects if answer.finish_reason == "stop")
    assert all(answer.text.startswith("{") for answer in objects)
