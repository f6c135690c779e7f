"""The common parameters of chat and completions."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import MAX_N, MAX_STOP_STRINGS, SamplingParams, StructuredOutputs
from quire.server.http.request_body import RequestBody, sampling_params
from quire.server.http.request_model import (
    LABEL,
    ExtraField,
    Int64,
    ReasoningEffort,
    RequestModel,
    TokenIds,
    hint,
    only_one,
    rejected,
)
from quire.server.http.response import StreamUsage
from quire.server.http.state import ServedModel
from quire.server.openai.kv_transfer import KVTransferParams
from quire.server.serving.generation import Generation
from quire.server.text.conversation import CHAT_NAMES, ParamNames
from quire.server.text.inputs import RequestOptions, Task, TruncationSide

MAX_PROMPTS = 2048
"""Prompts of a completion, and inputs of an embeddings request; OpenAI's limit."""
MAX_SEQUENCES = 4096
"""Prompts × n of a completion."""

Texts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
ManyTokenIds = Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]


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
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """llama.cpp's and Together's place of the schema, with type json_schema or json_object."""

    def structured(self) -> StructuredOutputs | None:
        """Convert to the engine's parameters."""
        given = (self.json_schema is not None) + (self.schema_ is not None)
        allowed = {"text": (0,), "json_object": (0,) if self.json_schema else (0, 1), "json_schema": (1,)}
        if given not in allowed[self.type]:
            raise InvalidParameter(
                "response_format: json_schema (or schema) is required with type json_schema, and only allowed with it",
                "response_format",
            )
        if (schema := self.json_schema.schema_ if self.json_schema else self.schema_) is not None:
            return StructuredOutputs(json=schema)
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
    """A context-free grammar in Lark's notation, or in GBNF."""

    def structured(self) -> StructuredOutputs:
        """Convert to the engine's parameters."""
        return StructuredOutputs(**self.model_dump(by_alias=True, include={*type(self).model_fields}))


OF_OLLAMA: Mapping[str, ExtraField] = {
    **dict.fromkeys(("f16_kv", "low_vram", "main_gpu", "mirostat_eta", "mirostat_tau", "num_batch", "num_ctx"), hint()),
    **dict.fromkeys(("num_gpu", "num_keep", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"), hint()),
    "repeat_last_n": hint(-1),
    "mirostat": rejected(0),
    "penalize_newline": rejected(True),
    "tfs_z": rejected(1),
    "typical_p": rejected(1),
}
"""Parameters of Ollama that have no effect here, or an effect that is not supported. Open WebUI sends them."""


class OllamaOptions(RequestModel):
    """Options of Ollama. Parameters that have an effect here are fields of the body instead."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {**OF_OLLAMA, "repeat_last_n": rejected(-1)}


class ReasoningRequest(RequestBody):
    """The parameters of the reasoning that chat and Responses share."""

    reasoning_effort: ReasoningEffort | None = None
    """A variable of the model's chat template. A hint if the template does not use it."""
    think: bool | ReasoningEffort | None = None
    """Ollama's: sets the chat template's switch for reasoning, or is a `reasoning_effort`."""

    def efforts(self) -> dict[str, ReasoningEffort | None]:
        """The effort under each of its names."""
        return {
            "think": None if isinstance(self.think, bool) else self.think,
            "reasoning_effort": self.reasoning_effort,
        }


class SamplingRequest(RequestBody):
    """The sampling parameters that chat, completions and Responses share. None: the model's default, or the API's."""

    longest_name: ClassVar[str] = "max_tokens"
    """The API's name of the maximum number of output tokens."""

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
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    """vLLM extension: divides the positive logits of tokens in the prompt or output, and multiplies negative ones."""
    repeat_penalty: float | None = None
    """Ollama's and llama.cpp's name of `repetition_penalty`."""
    num_predict: Int64 | None = None
    """Ollama's name of `max_tokens` (Responses: `max_output_tokens`); negative values mean no limit."""
    format: str | dict[str, Any] | None = None
    """Ollama's name of `response_format` (Responses: `text.format`): `json`, or a JSON schema, also as text."""
    options: OllamaOptions | None = None

    def check_fields(self, param: str = "") -> set[str]:
        """See `RequestModel`. Also checks combinations of fields."""
        ignored = super().check_fields(param)
        for name, other in (("num_predict", self.longest_name), ("repeat_penalty", "repetition_penalty")):
            only_one({each: getattr(self, each) for each in (name, other)})
        if self.repeat_penalty not in (None, 1.0) and (self.model_extra or {}).get("repeat_last_n") not in (None, -1):
            raise InvalidParameter("repeat_last_n must be -1: repeat_penalty is for all tokens", "repeat_last_n")
        return ignored

    def sampled(
        self,
        defaults: dict[str, Any],
        structures: Mapping[str, StructuredOutputs | None],
        names: ParamNames = CHAT_NAMES,
        **given: Any,
    ) -> SamplingParams:
        """The sampling parameters. `given` overrides the request, which overrides `defaults`.

        `structures`: those that the API's own parameters give for the answer, by parameter.
        """
        match self.format:
            case None | "":
                of_ollama = None
            case "json":
                of_ollama = StructuredOutputs(json_object=True)
            case schema:
                of_ollama = StructuredOutputs(json=schema)
        structured = only_one({**structures, "format": of_ollama})
        if self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty
        return sampling_params(self, defaults, names, structured_outputs=structured, **given)


class GenerationRequest(SamplingRequest):
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
        "logits_processors": rejected([]),
        "mm_processor_kwargs": rejected({}),
        "prompt_embeds": rejected(),
        "spaces_between_special_tokens": rejected(True),
        "thinking_token_budget": rejected(),
        "vllm_xargs": rejected({}),
        "guided_decoding_backend": hint(),
        "guided_whitespace_pattern": rejected(),
        # Open WebUI's
        "chat_id": hint(),
        "session_id": hint(),
        # Ollama's, which are Open WebUI's advanced parameters
        **OF_OLLAMA,
        "keep_alive": hint(),
        "think": hint(),
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
    stop_token_ids: TokenIds | None = None
    """vLLM extension: tokens that end the output, in addition to the model's end-of-sequence tokens."""
    include_stop_str_in_output: bool | None = None
    """vLLM extension: include the stop string or stop token in the output."""
    ignore_eos: bool | None = None
    """vLLM extension: continue after the model's end-of-sequence token."""
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    """vLLM extension: the only tokens that may be sampled."""
    bad_words: list[str] | None = None
    """vLLM extension: texts that must not be generated."""
    logprob_token_ids: TokenIds | None = None
    """vLLM extension: with `logprobs`, return the log-probabilities of these tokens instead of the most likely ones."""
    response_format: ResponseFormat | None = None
    """Enforced token by token, whatever `strict` says. A schema that cannot be enforced is rejected."""
    structured_outputs: StructuredOutputsFormat | None = None
    """vLLM extension: like `response_format`, but also for regular expressions, choices and grammars."""
    regex: str | None = None
    """SGLang's name of `structured_outputs.regex`."""
    ebnf: str | None = None
    """SGLang's name of `structured_outputs.grammar`."""
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
    kv_transfer_params: KVTransferParams | None = None
    return_tokens_as_token_ids: bool | None = None
    """vLLM extension: in log-probabilities, represent tokens as `token_id:123`. Default: that of the server
    (`--return-tokens-as-token-ids`).
    """

    def check_fields(self, param: str = "") -> set[str]:
        """See `RequestModel`. Also checks combinations of fields."""
        ignored = super().check_fields(param)
        if self.length_penalty not in (None, 1.0) and not self.use_beam_search:
            raise InvalidParameter("length_penalty requires use_beam_search: true", "length_penalty")
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options requires stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidParameter("prompt_logprobs is not supported in streams; omit stream", "prompt_logprobs")
        if 0 in (self.max_tokens, self.num_predict) and not getattr(self, "echo", False):
            raise InvalidParameter(
                "max_tokens must be at least 1; 0 is only allowed in completions with echo: true", "max_tokens"
            )
        return ignored

    def names_tokens_by_id(self, state: ServedModel) -> bool:
        """Whether log-probabilities have token ids."""
        given = self.return_tokens_as_token_ids
        return state.names_tokens_by_id if given is None else given

    def transfer_fields(self, generation: Generation) -> dict[str, Any]:
        """The fields of the response, or of the last chunk, that say where the KV of the prompt is, if the request asks
        for them."""
        return {} if self.kv_transfer_params is None else self.kv_transfer_params.answer(generation.kv_peer)

    def stream_usage(self, state: ServedModel) -> StreamUsage:
        """The events of the stream that have the usage."""
        if state.forces_usage:
            return "continuous"
        if self.stream_options is None or not self.stream_options.include_usage:
            return "none"
        return "continuous" if self.stream_options.continuous_usage_stats else "final"

    def response_id(self, kind: str) -> str:
        """The id of the response: the request's own id, or a new one."""
        return f"{kind}-{self.request_id or uuid.uuid4().hex}"

    def sampling_params(self, defaults: dict[str, Any], **given: Any) -> SamplingParams:
        """See `sampled`."""
        biases: dict[int, float] = {}
        not_ids = []
        for token, bias in (self.logit_bias or {}).items():
            try:
                biases[int(token)] = bias
            except ValueError:
                not_ids.append(token)
        if not_ids:
            raise InvalidParameter(f"logit_bias: the keys must be token ids, not {', '.join(not_ids)}", "logit_bias")
        structures = {
            "structured_outputs": None if self.structured_outputs is None else self.structured_outputs.structured(),
            "response_format": None if self.response_format is None else self.response_format.structured(),
            "regex": None if self.regex is None else StructuredOutputs(regex=self.regex),
            "ebnf": None if self.ebnf is None else StructuredOutputs(grammar=self.ebnf),
        }
        return self.sampled(defaults, structures, logit_bias=biases, **given)

    def request_options(self, *, logprobs: str = "logprobs") -> RequestOptions:
        """The options besides the prompt and the sampling parameters; `logprobs` is the API's name of that."""
        own = ("structured_outputs", "regex", "ebnf", "format")
        structured = next((name for name in own if getattr(self, name) not in (None, "")), "response_format")
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return RequestOptions(
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "left",
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            length_penalty=penalty if self.use_beam_search else None,
            kv_peer=None if self.kv_transfer_params is None else self.kv_transfer_params.peer,
            param_names=ParamNames(logprobs=logprobs, structured_outputs=structured),
        )
