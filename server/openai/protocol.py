"""What generation requests have in common: their parameters, and those that are refused by name."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.messages import MAX_N, MAX_STOP_STRINGS, SamplingParams, StructuredOutputs

_HARMLESS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Accepted without effect on the answer: they tell OpenAI who asks, and where it may cache."""

_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    # OpenAI's, with the values that ask for nothing
    "audio": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
    # vLLM's
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": (),
}

MAX_MESSAGES = 4096
"""Of a chat."""
MAX_PROMPTS = 2048
"""Of a completion, and inputs of an embeddings request, as OpenAI has it."""
MAX_SEQUENCES = 4096
"""Prompts × n of a completion."""


def tell_others(harmless: Iterable[str], refused: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
    """For the `json_schema_extra` of a request: its schema tells what else is accepted, and what is refused by name.

    `refused` has the values that ask for nothing, which are accepted. docs/reference/api.md is made of this.
    """

    def tell(schema: dict[str, Any]) -> None:
        schema["x-harmless"] = sorted(set(harmless) - schema["properties"].keys())
        schema["x-refused"] = {name: list(refused[name]) for name in sorted(refused.keys() - schema["properties"])}

    return tell


Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What fits into the messages to the engine."""
TokenIds = Annotated[list[Int64], Field(fail_fast=True)]
"""Of a list that may be long only the first error is told: one for each element would take minutes and gigabytes."""
Texts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
ManyTokenIds = Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]


class LenientModel(BaseModel):
    """A body or a part of one. What else stands in it is kept in `model_extra`: who reads it says what is refused."""

    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True)


class StrictModel(BaseModel):
    """A body or a part of one, with nothing else in it."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class StreamOptions(StrictModel):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's: with `include_usage`, every chunk says what has been used so far."""


class JsonSchemaFormat(StrictModel):
    """`response_format.json_schema`."""

    name: str
    """Without effect."""
    description: str | None = None
    """Without effect."""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Without effect: a schema is always enforced."""


class ResponseFormat(StrictModel):
    """OpenAI's way to ask for structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def structured(self) -> StructuredOutputs | None:
        """The same in the engine's terms."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidParameter(
                "response_format: json_schema goes with type json_schema, and only with it", "response_format"
            )
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.schema_)
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class StructuredOutputsFormat(StrictModel):
    """vLLM's; one of these."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    """A JSON schema, as an object or as its text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """A context-free grammar in Lark's notation."""

    def structured(self) -> StructuredOutputs:
        """The same in the engine's terms."""
        return StructuredOutputs(**self.model_dump(by_alias=True))


class GenerationRequest(LenientModel):
    """The parameters of chat and completions alike. None: the model's default, or else the API's."""

    model_config = ConfigDict(json_schema_extra=tell_others(_HARMLESS, _NOT_SERVED))

    model: str | None = None
    """May be left out: one model is served. Any of its names is accepted, and told in the answer."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[Int64 | None, Field(description=f"At most {MAX_N}.")] = None
    max_tokens: Int64 | None = None
    """0 (completions with `echo` only): the prompt is computed and scored, nothing is generated."""
    min_tokens: Int64 | None = None
    """vLLM's: output tokens before which nothing ends the output."""
    temperature: float | None = None
    """Left out: what the model's generation_config.json says, or 1. Also above 2, up to 100."""
    top_p: float | None = None
    """Left out: what the model's generation_config.json says, or 1."""
    top_k: Int64 | None = None
    """vLLM's: keep the k likeliest tokens; 0 and -1 keep all. Left out: the model's, or all."""
    min_p: float | None = None
    """vLLM's: keep the tokens that are at least this probable, as a share of the likeliest one's probability."""
    seed: Int64 | None = None
    """The same seed gives the same answer, whatever else runs and however the model is cut over devices."""
    stop: Annotated[str | list[str] | None, Field(description=f"At most {MAX_STOP_STRINGS} strings.")] = None
    stop_token_ids: TokenIds | None = None
    """vLLM's: tokens that end the output, beside the model's end of sequence."""
    include_stop_str_in_output: bool | None = None
    """vLLM's: show the stop string or stop token that ended the output."""
    ignore_eos: bool | None = None
    """vLLM's: go on past the model's end of sequence."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    """vLLM's: divides positive logits of tokens that stand in prompt or output, and multiplies negative ones."""
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    """vLLM's: the only tokens that may be sampled."""
    bad_words: list[str] | None = None
    """vLLM's: texts that must not be generated."""
    response_format: ResponseFormat | None = None
    """Enforced token by token, whatever `strict` says; a schema that cannot be enforced is refused."""
    structured_outputs: StructuredOutputsFormat | None = None
    """vLLM's: like `response_format`, also for regular expressions, choices and grammars."""
    skip_special_tokens: bool | None = None
    """vLLM's: leave special tokens out of the text; true if left out."""
    priority: Int64 | None = None
    """vLLM's: lower runs first, on servers with `--scheduling-policy priority`."""
    prompt_logprobs: Int64 | None = None
    """vLLM's: score the prompt's tokens, with this many likelier ones at each place. Not in streams."""
    truncate_prompt_tokens: Int64 | None = None
    """vLLM's: keep this many of the prompt's last tokens; -1: as many as fit."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """vLLM's: requests share cached prefixes only with those of the same salt."""
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None
    """vLLM's: what the response's id ends with."""
    return_token_ids: bool | None = None
    """vLLM's: show the token ids of prompt and output."""
    return_tokens_as_token_ids: bool | None = None
    """vLLM's: in log-probabilities, name tokens `token:123`."""

    def refuse_unserved(self) -> None:
        """Raise `InvalidParameter` for the first field that asks for something not served."""
        for name, value in (self.model_extra or {}).items():
            if name in _HARMLESS or (name in _NOT_SERVED and (value is None or value in _NOT_SERVED[name])):
                continue
            why = "is not served yet" if name in _NOT_SERVED else "is not a parameter of this API"
            raise InvalidParameter(f"{name} {why}", name)
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options is only allowed with stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidParameter("prompt_logprobs is not given in streams; leave stream out", "prompt_logprobs")
        if self.max_tokens == 0 and not getattr(self, "echo", False):
            raise InvalidParameter("max_tokens must be at least 1; 0 is for completions with echo: true", "max_tokens")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def include_continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def response_id(self, kind: str) -> str:
        """The id of the response, which is the request's own if it brings one."""
        return f"{kind}-{self.request_id or uuid.uuid4().hex}"

    def sampling_params(self, defaults: dict[str, Any], **given: Any) -> SamplingParams:
        """The engine's parameters: `given` before the request's before the model's `defaults`."""
        named = {name: getattr(self, name, None) for name in SamplingParams.__struct_fields__}
        named["logit_bias"] = self._logit_bias()
        named["structured_outputs"] = self._structured_outputs()
        return SamplingParams(**{**defaults, **{n: value for n, value in named.items() if value is not None}, **given})

    @property
    def structured_param(self) -> str:
        """The name of the parameter that asks for structured output."""
        return "structured_outputs" if self.structured_outputs is not None else "response_format"

    def _structured_outputs(self) -> StructuredOutputs | None:
        given = None if self.response_format is None else self.response_format.structured()
        if self.structured_outputs is None:
            return given
        if given is not None:
            raise InvalidParameter(
                "structured_outputs and response_format say the same thing; give one", "structured_outputs"
            )
        return self.structured_outputs.structured()

    def _logit_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        try:
            return {int(token_id): bias for token_id, bias in self.logit_bias.items()}
        except ValueError as error:
            raise InvalidParameter(f"logit_bias: the keys must be token ids: {error}", "logit_bias") from None


M = TypeVar("M", bound=LenientModel)


def variant(kinds: Mapping[str, type[M]], value: Mapping[str, Any], param: str, default: str | None = None) -> M:
    """One of several shapes, told apart by the `type` of `value` (or `default`); raises `InvalidParameter`."""
    kind = value.get("type", default)
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidParameter(f"{param}.type must be {' or '.join(kinds)}; {kind!r} is not served", f"{param}.type")
    try:
        return kinds[kind].model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        where = param + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])
        raise InvalidParameter(f"{where}: {problem['msg']}", where) from None


def refuse_extra(model: LenientModel, harmless: Mapping[str, Any], param: str = "") -> None:
    """Raise `InvalidParameter` for the first field without a meaning here.

    Null is always accepted; so is what `harmless` names: with `...` any value, with a tuple one of these.
    """
    for name, value in (model.model_extra or {}).items():
        accepted = harmless.get(name, ())
        if value is not None and accepted is not ... and value not in accepted:
            raise InvalidParameter(f"{param}{name} is not served" + (" so" if accepted else ""), f"{param}{name}")


_MESSAGE = re.compile(r"\bmessages\[([0-9]+)\]")


@contextlib.contextmanager
def renamed(names: Mapping[str, str], places: Sequence[str] = ()) -> Iterator[None]:
    """Let an `InvalidParameter` about chat name what the user of another API has sent.

    `names` are pieces of names; `places` say, for each of chat's messages, where the user wrote what it is made of.
    """

    def place(found: re.Match[str]) -> str:
        at = int(found[1])
        return places[at] if at < len(places) else found[0]

    try:
        yield
    except InvalidParameter as error:
        if error.param is None:
            raise
        text, param = str(error), error.param
        if placed := _MESSAGE.search(text):
            text = text[: placed.start()] + place(placed) + text[placed.end() :]
        if (told := _MESSAGE.sub(place, param)) == param:
            for name, other in names.items():
                told = told.replace(name, other)
        if text.startswith(param):
            text = told + text.removeprefix(param)
        raise type(error)(text, told) from None
