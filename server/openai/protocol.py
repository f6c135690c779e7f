"""The common parameters of generation requests, and what happens to fields that nothing reads.

A field that may change the answer and is not supported is rejected by name. A hint, a label and an unknown field inside
a message are accepted and ignored (`RequestModel`).
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import MAX_N, MAX_STOP_STRINGS, SamplingParams, StructuredOutputs
from quire.server.client.fair_share import enter_user
from quire.server.http.response import StreamUsage
from quire.server.text.input_processor import InputProcessor
from quire.server.text.inputs import IgnoredParameter, Processed, RequestOptions, Task, TruncationSide, tasks_of

_SHORT = 1024
"""Characters of a string that a processed body keeps."""
MAX_MESSAGES = 4096
"""Messages of a chat."""
MAX_PROMPTS = 2048
"""Prompts of a completion, and inputs of an embeddings request; OpenAI's limit."""
MAX_SEQUENCES = 4096
"""Prompts × n of a completion."""


Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer that fits into a message to the engine."""
TokenIds = Annotated[list[Int64], Field(fail_fast=True)]
"""Only the first error of a long list is reported: reporting every element would take minutes and gigabytes."""
Texts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
ManyTokenIds = Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]


class ExtraField(NamedTuple):
    """What happens to a field that nothing reads. Null is the same as no field."""

    kind: Literal["label", "hint", "rejected"]
    """A label never has an effect. Other values of a hint are ignored and logged, or rejected with
    `--strict-parameters`.
    """
    neutral: tuple[Any, ...] = ()
    """Values without effect, which are always accepted."""


LABEL = ExtraField("label")


def hint(*neutral: Any) -> ExtraField:
    """A preference, such as a shorter answer, or a label that few servers know."""
    return ExtraField("hint", neutral)


def rejected(*neutral: Any) -> ExtraField:
    """A field that would change the answer."""
    return ExtraField("rejected", neutral)


def _add_extra_fields(schema: dict[str, Any], model: type[RequestModel]) -> None:
    """Add the fields that nothing reads to a JSON schema. docs/reference/api.md is generated from this."""
    for kind in ("label", "hint", "rejected"):
        extra = {name: each for name, each in model.extra_fields.items() if name not in model.model_fields}
        found = {name: list(each.neutral) for name, each in sorted(extra.items()) if each.kind == kind}
        if found:
            schema[f"x-{kind}"] = found
    if model.unknown_fields.kind == "hint":
        schema["x-ignores-unknown"] = True


class RequestModel(BaseModel):
    """A body, or part of one. It may have fields that it does not declare: see `extra_fields`."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        use_attribute_docstrings=True,
        json_schema_extra=_add_extra_fields,
    )
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {}
    """The known fields that nothing reads."""
    unknown_fields: ClassVar[ExtraField] = rejected()
    """What happens to the others."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Null is the same as no field."""
        return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value

    def check_fields(self, param: str = "") -> set[str]:
        """Return the fields that are ignored, here and in parts, named after `param`; raise `InvalidParameter` for the
        first one that is rejected.
        """
        ignored = set()
        for name, value in (self.model_extra or {}).items():
            extra = self.extra_fields.get(name, self.unknown_fields)
            if extra.kind == "label" or value in extra.neutral:
                continue
            if extra.kind == "rejected":
                why = "is not a parameter of this API"
                if name in self.extra_fields:
                    why = "is not supported" + " with this value" * bool(extra.neutral)
                raise InvalidParameter(f"{param}{name} {why}", f"{param}{name}")
            ignored.add(f"{param}{name}")
        for name in type(self).model_fields:
            match getattr(self, name):
                case RequestModel() as part:
                    ignored |= part.check_fields(f"{param}{name}.")
                case [RequestModel() | str(), *_] as parts:  # not lists of token ids, which are long
                    for at, part in enumerate(parts):
                        if isinstance(part, RequestModel):
                            ignored |= part.check_fields(f"{param}{name}[{at}].")
        return ignored


class MessagePart(RequestModel):
    """A message, or part of one. Clients send back what they got from other servers, so unknown fields are ignored."""

    unknown_fields: ClassVar[ExtraField] = hint()


class ProcessedBody(BaseModel):
    """A body that another process may have processed, if it is large (`quire.server.http.large_bodies`)."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    names: ClassVar[Mapping[str, str]] = {}
    """Chat's parameters as this API calls them."""
    needs: ClassVar[Task | None] = None
    """What the model must be able to do; None: anything."""
    max_items: ClassVar[Mapping[str, int]] = {}
    """The maximum length of lists, which is checked before anything else in a large body."""
    _processed: Processed | None = PrivateAttr(None)
    _is_refused: bool = PrivateAttr(False)
    """The model cannot do it at all; only small fields are left."""
    _user_name: object = PrivateAttr(None)
    """`user_name` of a processed body, if it is small."""

    @property
    def user_name(self) -> object:
        """Who the user is, according to the request; for fair sharing."""
        return getattr(self, "user", None)

    def task_of_model(self) -> Task | None:
        """`needs`, which may depend on the body."""
        return self.needs

    async def process(self, admit: Callable[[], InputProcessor]) -> Any:
        """Return what the route needs of the input processor.

        `admit` is `Frontend.admit`. It is called when the request is known to be supported, before it is rendered.
        """
        enter_user(self._user_name if self._processed is not None else self.user_name)
        if self._is_refused:
            admit()
        if self._processed is None:
            return await self.process_here(admit)
        with renamed_params(self.names):
            return await admit().resolve(self._processed)

    async def process_here(self, admit: Callable[[], InputProcessor]) -> Any:
        """`process` in this process. Every request type has its own."""
        raise NotImplementedError

    @classmethod
    async def prepare(cls, value: Any, processor: InputProcessor, stored: bytes | None) -> Any:
        """Validate and process parsed JSON; returns the body as it is sent to the process that asks."""
        return await cls.validated(value).prepared(processor)

    async def prepared(self, processor: InputProcessor) -> Self:
        """Process this body; returns it reduced. The first process rejects what the model cannot do at all."""
        if (task := self.task_of_model()) is not None and task not in tasks_of(processor.pooling):
            body = self.reduced(None)
            body._is_refused = True
            return body
        value = await self.process_here(lambda: processor)
        unresolved = processor.take_unresolved()
        return self.reduced(Processed(value=value, unresolved=unresolved, ignored=processor.ignored))

    @classmethod
    def validated(cls, value: Any) -> Self:
        """Validate parsed JSON; raises `RequestValidationError`, and `InvalidParameter` for a list that is too long."""
        for name, most in cls.max_items.items():
            given = value.get(name) if isinstance(value, dict) else None
            if isinstance(given, list) and len(given) > most:
                raise InvalidParameter(f"{name}: at most {most} are allowed, got {len(given)}", name)
        try:
            return cls.model_validate(value, from_attributes=True)  # as FastAPI does
        except ValidationError as error:
            problems = error.errors(include_url=False)
            raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in problems]) from None

    def reduced(self, processed: Processed | None) -> Self:
        """Return a copy with `processed`, and with only those fields that are small."""
        kept = {name: value for name in type(self).model_fields if _is_small(value := getattr(self, name))}
        body = self.model_construct(**kept)
        body._processed = processed
        body._user_name = user if _is_small(user := self.user_name) else None
        return body


def _is_small(value: Any) -> bool:
    return (
        len(value) <= _SHORT if isinstance(value, str) else isinstance(value, bool | int | float | StreamOptions | None)
    )


class StreamOptions(RequestModel):
    """Options of a stream."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {"include_obfuscation": LABEL}

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM extension: with `include_usage`, every chunk has the usage so far."""


class JsonSchemaFormat(RequestModel):
    """A JSON schema for the response."""

    name: str
    """No effect."""
    description: str | None = None
    """No effect."""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """No effect: the schema is always enforced."""


class ResponseFormat(RequestModel):
    """OpenAI's format of structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def structured(self) -> StructuredOutputs | None:
        """Convert to the engine's parameters."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidParameter(
                "response_format: json_schema is required with type json_schema, and only allowed with it",
                "response_format",
            )
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.schema_)
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class StructuredOutputsFormat(RequestModel):
    """vLLM's format of structured output. Set exactly one field."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    """A JSON schema, as an object or as text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """A context-free grammar in Lark's notation."""

    def structured(self) -> StructuredOutputs:
        """Convert to the engine's parameters."""
        return StructuredOutputs(**self.model_dump(by_alias=True, include={*type(self).model_fields}))


class GenerationRequest(ProcessedBody, RequestModel):
    """The common parameters of chat and completions. None: the model's default, or else the API's."""

    needs: ClassVar[Task | None] = "generate"
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        # OpenAI's
        "metadata": LABEL,
        "prompt_cache_key": LABEL,
        "safety_identifier": LABEL,
        "user": LABEL,
        "client_metadata": hint(),
        "prediction": hint(),
        "prompt_cache_retention": hint(),
        "reasoning_effort": hint(),
        "service_tier": hint("auto", "default"),
        "store": hint(False),
        "verbosity": hint("medium"),
        "audio": rejected(),
        "function_call": rejected("none"),
        "functions": rejected([]),
        "modalities": rejected(["text"]),
        "suffix": rejected(""),
        "web_search_options": rejected(),
        # vLLM's
        "add_generation_prompt": rejected(True),
        "add_special_tokens": rejected(False),
        "chat_template": rejected(),
        "chat_template_kwargs": rejected({}),
        "continue_final_message": rejected(False),
        "documents": rejected([]),
        "guided_choice": rejected(),
        "guided_grammar": rejected(),
        "guided_json": rejected(),
        "guided_regex": rejected(),
        "include_reasoning": rejected(True),
        "kv_transfer_params": rejected(),
        "logits_processors": rejected([]),
        "mm_processor_kwargs": rejected({}),
        "prompt_embeds": rejected(),
        "spaces_between_special_tokens": rejected(True),
        "thinking_token_budget": rejected(),
        "vllm_xargs": rejected({}),
        # Open WebUI's
        "chat_id": hint(),
        "session_id": hint(),
        "keep_alive": hint(),
        "options": hint({}),
    }

    model: str | None = None
    """Optional, as the server has one model. Any of its names is accepted; the response repeats it."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[Int64 | None, Field(description=f"At most {MAX_N}.")] = None
    max_tokens: Int64 | None = None
    """0 (completions with `echo` only): compute and score the prompt, generate nothing."""
    min_tokens: Int64 | None = None
    """vLLM extension: the minimum number of output tokens. Stop conditions have no effect before."""
    temperature: float | None = None
    """Default: the value in the model's generation_config.json, or 1. Values up to 100 are accepted."""
    top_p: float | None = None
    """Default: the value in the model's generation_config.json, or 1."""
    top_k: Int64 | None = None
    """vLLM extension: sample from the k most likely tokens; 0 and -1: from all. Default: the model's, or all."""
    min_p: float | None = None
    """vLLM extension: minimum probability of a token, relative to the most likely token."""
    seed: Int64 | None = None
    """The same seed gives the same answer, whatever else is running and however the model is sharded."""
    stop: Annotated[str | list[str] | None, Field(description=f"At most {MAX_STOP_STRINGS} strings.")] = None
    stop_token_ids: TokenIds | None = None
    """vLLM extension: tokens that end the output, in addition to the model's end-of-sequence tokens."""
    include_stop_str_in_output: bool | None = None
    """vLLM extension: include the stop string or stop token in the output."""
    ignore_eos: bool | None = None
    """vLLM extension: continue after the model's end-of-sequence token."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    """vLLM extension: divides the positive logits of tokens in the prompt or output, and multiplies negative ones."""
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    """vLLM extension: the only tokens that may be sampled."""
    bad_words: list[str] | None = None
    """vLLM extension: texts that must not be generated."""
    logprob_token_ids: TokenIds | None = None
    """vLLM extension: with `logprobs`, return those of these tokens instead of those of the most likely ones."""
    response_format: ResponseFormat | None = None
    """Enforced token by token, whatever `strict` says. A schema that cannot be enforced is rejected."""
    structured_outputs: StructuredOutputsFormat | None = None
    """vLLM extension: like `response_format`, but also for regular expressions, choices and grammars."""
    skip_special_tokens: bool | None = None
    """vLLM extension: omit special tokens from the text. Default: true."""
    priority: Int64 | None = None
    """vLLM extension: lower values run first; the server needs `--scheduling-policy priority`."""
    use_beam_search: bool | None = None
    """vLLM extension: find the `n` most likely sequences with as many beams, instead of sampling. Not supported with
    stop strings, penalties, biases or structured outputs.
    """
    length_penalty: float | None = None
    """vLLM extension: beams are compared by the sum of their log-probabilities over this power of the length. Default:
    1.
    """
    prompt_logprobs: Int64 | None = None
    """vLLM extension: return the log-probabilities of the prompt's tokens, with this number of most likely tokens at
    each position; -1: all. Not supported in streams.
    """
    truncate_prompt_tokens: Int64 | None = None
    """vLLM extension: keep only this number of the prompt's tokens; -1: as many as fit."""
    truncation_side: TruncationSide | None = None
    """vLLM extension: the side that `truncate_prompt_tokens` removes. Default: left."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """vLLM extension: requests share cached prefixes only with requests that have the same salt."""
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None
    """vLLM extension: the end of the response's id."""
    return_token_ids: bool | None = None
    """vLLM extension: return the token ids of prompt and output."""
    return_tokens_as_token_ids: bool | None = None
    """vLLM extension: in log-probabilities, represent tokens as `token_id:123`."""

    def reject_unsupported(self) -> set[str]:
        """Return the ignored fields; raise `InvalidParameter` for the first field with an unsupported value."""
        ignored = self.check_fields()
        if self.length_penalty not in (None, 1.0) and not self.use_beam_search:
            raise InvalidParameter("length_penalty requires use_beam_search: true", "length_penalty")
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options requires stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidParameter("prompt_logprobs is not supported in streams; omit stream", "prompt_logprobs")
        if self.max_tokens == 0 and not getattr(self, "echo", False):
            raise InvalidParameter(
                "max_tokens must be at least 1; 0 is only allowed in completions with echo: true", "max_tokens"
            )
        return ignored

    @property
    def stream_usage(self) -> StreamUsage:
        """Where the stream has the usage."""
        if self.stream_options is None or not self.stream_options.include_usage:
            return "none"
        return "continuous" if self.stream_options.continuous_usage_stats else "final"

    def response_id(self, kind: str) -> str:
        """The id of the response: the request's own id, or a new one."""
        return f"{kind}-{self.request_id or uuid.uuid4().hex}"

    def sampling_params(self, defaults: dict[str, Any], **given: Any) -> SamplingParams:
        """The sampling parameters. `given` overrides the request, which overrides `defaults`."""
        named = {name: getattr(self, name, None) for name in SamplingParams.__struct_fields__}
        try:
            named["logit_bias"] = self.logit_bias and {int(token): bias for token, bias in self.logit_bias.items()}
        except ValueError as error:
            raise InvalidParameter(f"logit_bias: the keys must be token ids: {error}", "logit_bias") from None
        format = None if self.response_format is None else self.response_format.structured()
        if format is not None and self.structured_outputs is not None:
            raise InvalidParameter(
                "structured_outputs and response_format exclude each other; send only one of them", "structured_outputs"
            )
        named["structured_outputs"] = self.structured_outputs.structured() if self.structured_outputs else format
        return SamplingParams(**{**defaults, **{n: value for n, value in named.items() if value is not None}, **given})

    def request_options(self, **param_names: str) -> RequestOptions:
        """The options besides the prompt and the sampling parameters; `param_names` as in `RequestOptions`."""
        if self.structured_outputs is None:
            param_names["structured_outputs"] = "response_format"
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return RequestOptions(
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "left",
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            length_penalty=penalty if self.use_beam_search else None,
            param_names=param_names,
        )


M = TypeVar("M", bound=RequestModel)


def variant(
    kinds: Mapping[str, type[M]], value: Mapping[str, Any], param: str, ignored: set[str], default: str | None = None
) -> M:
    """Parse `value` as the model for its `type` (or `default`), and add the fields that are ignored to `ignored`.

    Raises `InvalidParameter`.
    """
    kind = value.get("type", default)
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidParameter(f"{param}.type must be {' or '.join(kinds)}; {kind!r} is not supported", f"{param}.type")
    try:
        read = kinds[kind].model_validate({name: each for name, each in value.items() if name != "type"})
    except ValidationError as error:
        problem = error.errors()[0]
        where = param + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])
        raise InvalidParameter(f"{where}: {problem['msg']}", where) from None
    ignored |= read.check_fields(f"{param}.")
    return read


_MESSAGE = re.compile(r"\bmessages\[([0-9]+)\]")


@contextlib.contextmanager
def renamed_params(names: Mapping[str, str], places: Sequence[str] = ()) -> Iterator[None]:
    """Rename the parameter in an `InvalidParameter` about chat to the one that the user of another API has sent.

    `names` maps parts of names. `places` gives, for each chat message, the parameter that it was made from.
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
        if isinstance(error, IgnoredParameter):  # a message is named as the client has sent it
            raise IgnoredParameter(text.replace(param, names.get(param, param), 1), names.get(param, param)) from None
        if placed := _MESSAGE.search(text):
            text = text[: placed.start()] + place(placed) + text[placed.end() :]
        if (reported := _MESSAGE.sub(place, param)) == param:
            for name, other in names.items():
                reported = reported.replace(name, other)
        if text.startswith(param):
            text = reported + text.removeprefix(param)
        raise type(error)(text, reported) from None
