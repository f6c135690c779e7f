"""Sampling parameters of a request, and their limits. No torch."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from quire.engine.protocol.errors import InvalidParameter

MAX_STOP_STRINGS = 16
MAX_TEXT = 16_384
"""Maximum characters of all stop strings together, and of all bad words together."""
MAX_N = 128
MAX_BAD_WORDS = 1024


class StructuredOutputs(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The constraint on the output: exactly one of these fields. Names and meanings are vLLM's.

    Raises `InvalidParameter` if no field is set, or more than one.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as an object or as JSON text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: list[str] | None = None
    """The texts of which the output is one."""
    grammar: str | None = None
    """A context-free grammar in Lark notation."""
    num_marks: int = 0
    """Of a grammar that the server has made: the number of its `json_mark`s. No API sets it."""

    def __post_init__(self) -> None:
        names = [name for name in self.__struct_fields__ if name != "num_marks"]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidParameter(
                f"structured_outputs takes exactly one of {', '.join(names)}; "
                + (f"given were {' and '.join(given)}" if given else "none was given"),
                "structured_outputs",
            )


StructuredOutputsParams = StructuredOutputs
"""vLLM's name."""


class RequestOutputKind(Enum):
    """The results of a request in the Python API while it runs. `CUMULATIVE`: each has all output so far. `DELTA`: each
    has the new output only. `FINAL_ONLY`: there is one result, at the end. `LLM` always returns whole outputs.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


_SURROGATE = re.compile("[\ud800-\udfff]")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling parameters of a request; names and meanings follow the OpenAI API and vLLM.

    Raises `InvalidParameter` for an invalid field.
    """

    n: int = 1
    """Number of independent outputs for the prompt, at most 128."""
    temperature: float = 1.0
    """From 0 to 100. The logits are divided by it; 0: greedy sampling."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 and -1: from all."""
    top_p: float = 1.0
    """Above 0 and at most 1. Sample from the most likely tokens whose probabilities add up to this."""
    min_p: float = 0.0
    """From 0 to 1. Sample from tokens with at least this probability, relative to the most likely token."""
    seed: int | None = None
    """A 64-bit integer. The same seed gives the same output; None: a random seed for each request."""
    max_tokens: int | None = 16
    """Maximum output tokens; None: up to the model's length; 0: compute only the prompt (for `prompt_logprobs`)."""
    min_tokens: int = 0
    """Minimum output tokens before an end of sequence, a stop token or a stop string can end the output."""
    stop: list[str] = []
    """At most 16 strings that end the output and are not part of it; a single string is accepted too."""
    stop_token_ids: list[int] = []
    """Tokens that end the output, in addition to the model's end of sequence."""
    include_stop_str_in_output: bool = False
    """Include in the output the stop string or stop token that ended it."""
    ignore_eos: bool = False
    """Continue after the model's end of sequence."""
    presence_penalty: float = 0.0
    """From -2 to 2. Subtracted from the logits of tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """From -2 to 2. Subtracted from the logits of tokens once for each occurrence in the output."""
    repetition_penalty: float = 1.0
    """Above 0 and at most 100; 1: none. Divides the positive logits of tokens that occur in prompt or output, and
    multiplies the negative ones.
    """
    logit_bias: dict[int, float] = {}
    """From -100 to 100, by token id. Added to the logits of these tokens."""
    allowed_token_ids: list[int] | None = None
    """Sample only from these tokens; None: from all."""
    bad_words: list[str] = []
    """Texts that are not generated: a word's last token is forbidden if the output ends in the tokens before it."""
    bad_word_ids: list[list[int]] = []
    """The token ids of `bad_words`, set by the server."""
    logprobs: int | None = None
    """k: return the log-probabilities of the sampled token and of the k most likely tokens; -1: of all tokens; None:
    return none.
    """
    logprob_token_ids: list[int] | None = None
    """Return the log-probabilities of these tokens instead of the most likely ones."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for each token of the prompt except the first. Such a request does not use the prefix cache."""
    flat_logprobs: bool = False
    """Python API: return log-probabilities as `FlatLogprobs`, which has fewer objects than a list of dicts."""
    detokenize: bool = True
    """Python API: convert the output to text. If False, `text` is empty, and `stop` cannot be set."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""
    spaces_between_special_tokens: bool = True
    """Python API: as the tokenizer's decoder has them. False is supported only without special tokens in the text."""
    truncate_prompt_tokens: int | None = None
    """Python API: keep only this number of the prompt's last tokens; -1: as many as the model's length allows."""
    thinking_token_budget: int | None = None
    """Conversations: maximum tokens of reasoning; None and -1: no limit."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Python API: the results of a request while it runs."""
    extra_args: dict[str, Any] | None = None
    """Arguments of plug-ins for vLLM, which are not supported: None or empty."""
    structured_outputs: StructuredOutputs | None = None
    """The constraint on the output."""
    prediction: str = ""
    """Text that the output probably repeats, such as a file to edit. The output does not depend on it, only its speed.
    """
    predicted_token_ids: list[int] = []
    """The token ids of `prediction`, set by the server."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words", "logit_bias"):
            if getattr(self, name) is None:
                setattr(self, name, {} if name == "logit_bias" else [])
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        self.validate({})

    @staticmethod
    def from_optional(**given: Any) -> SamplingParams:
        """Make parameters of which None means the default, except for `max_tokens`."""
        return SamplingParams(
            **{name: value for name, value in given.items() if value is not None or name == "max_tokens"}
        )

    def clone(self) -> SamplingParams:
        """Return a deep copy."""
        return copy.deepcopy(self)

    def validate(self, names: Mapping[str, str]) -> None:
        """Raise `InvalidParameter` for an invalid field, by its name in `names` if it is there."""
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name, is_valid, expected in (
            ("n", 1 <= self.n <= MAX_N, f"from 1 to {MAX_N}"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "from 0 to 100"),
            ("top_k", self.top_k >= -1, "-1, 0 (both: all) or a positive number"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "at least 0"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            (
                "min_tokens",
                self.max_tokens is None or self.min_tokens <= self.max_tokens,
                f"at most max_tokens ({self.max_tokens})",
            ),
            ("stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings"),
            ("stop", all(self.stop), "strings that are not empty"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "from -2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "above 0 and at most 100"),
            (
                "logit_bias",
                all(-100.0 <= b <= 100.0 for b in self.logit_bias.values()),
                "biases from -100 to 100",
            ),
            ("allowed_token_ids", self.allowed_token_ids != [], "a list with token ids in it"),
            ("logprob_token_ids", self.logprob_token_ids != [], "a list with token ids in it"),
            ("bad_words", len(self.bad_words) <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS} words"),
            ("bad_words", sum(map(len, self.bad_words)) <= MAX_TEXT, f"at most {MAX_TEXT} characters in all"),
            ("stop", sum(map(len, self.stop)) <= MAX_TEXT, f"at most {MAX_TEXT} characters in all"),
            ("bad_words", all(map(str.strip, self.bad_words)), "words that are not empty"),
            ("logprobs", self.logprobs is None or self.logprobs >= -1, "at least 0, or -1 (all)"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or self.prompt_logprobs >= -1,
                "at least 0, or -1 (all)",
            ),
            ("stop", not any(map(_SURROGATE.search, self.stop)), "text without unpaired surrogates"),
            ("bad_words", not any(map(_SURROGATE.search, self.bad_words)), "text without unpaired surrogates"),
            ("prediction", not _SURROGATE.search(self.prediction), "text without unpaired surrogates"),
            ("stop", self.detokenize or not self.stop, "empty if detokenize is False"),
            (
                "spaces_between_special_tokens",
                self.spaces_between_special_tokens or self.skip_special_tokens,
                "True if skip_special_tokens is False",
            ),
            (
                "thinking_token_budget",
                self.thinking_token_budget is None or self.thinking_token_budget >= 0,
                "at least 0, or -1 (no limit)",
            ),
            ("extra_args", not self.extra_args, "empty, as no plug-in can read it"),
        ):
            if not is_valid:
                param = names.get(name, name)
                raise InvalidParameter(f"{param} must be {expected}, got {_shown(getattr(self, name))}", param)

    def for_engine(self, seed: int) -> SamplingParams:
        """Return the parameters that the engine needs for one of the `n` outputs, with its own seed and without text.

        `stop`, `skip_special_tokens` and others apply to texts or results, and are handled by the server.
        With `max_tokens` 0 the engine samples one token, which the server drops.
        """
        return msgspec.structs.replace(
            self,
            n=1,
            seed=seed,
            max_tokens=None if self.max_tokens is None else max(1, self.max_tokens),
            stop=[],
            bad_words=[],
            prediction="",
            include_stop_str_in_output=False,
            flat_logprobs=False,
            detokenize=True,
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
            truncate_prompt_tokens=None,
            thinking_token_budget=None,
            output_kind=RequestOutputKind.CUMULATIVE,
            extra_args=None,
        )

    def bad_tokens(self, output: list[int]) -> set[int]:
        """Return the tokens that would complete a bad word after these output tokens."""
        return {last for *first, last in self.bad_word_ids if not first or output[-len(first) :] == first}
