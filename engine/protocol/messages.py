"""The messages between processes: server ⇄ engine core ⇄ workers. Token ids and numbers only; no torch."""

from __future__ import annotations

from array import array
from typing import Any, Literal

import msgspec

from quire.engine.protocol.errors import InvalidParameter

FinishReason = Literal["stop", "length", "abort", "error"]

LOST_REPLICAS = "lost the connection to the other replicas"
"""A rank's reason when a collective with other replicas fails: the cause is elsewhere."""
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
    choice: list[str] | None = None
    grammar: str | None = None
    """A context-free grammar in Lark notation."""

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidParameter(
                f"structured_outputs takes exactly one of {', '.join(self.__struct_fields__)}; "
                + (f"given were {' and '.join(given)}" if given else "none was given"),
                "structured_outputs",
            )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling parameters of a request; names and meanings are those of the OpenAI API and of vLLM.

    `stop` and `skip_special_tokens` apply to text and are handled by the server: `for_engine` clears them.
    Raises `InvalidParameter` with the name of the invalid field.
    """

    n: int = 1
    """Number of independent outputs for the prompt."""
    temperature: float = 1.0
    """The logits are divided by it; 0: greedy sampling."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 and -1: from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities add up to this."""
    min_p: float = 0.0
    """Sample from tokens with at least this probability, relative to that of the most likely token."""
    seed: int | None = None
    """The same seed gives the same output; None: a random seed for each request."""
    max_tokens: int | None = 16
    """Maximum output tokens; None: up to the model's length; 0: compute only the prompt (for `prompt_logprobs`)."""
    min_tokens: int = 0
    """Minimum output tokens before an end of sequence, a stop token or a stop string can end the output."""
    stop: list[str] = []
    """Strings that end the output and are not part of it; a single string is accepted too."""
    stop_token_ids: list[int] = []
    """Tokens that end the output, in addition to the model's end of sequence."""
    include_stop_str_in_output: bool = False
    """Include in the output the stop string or stop token that ended it."""
    ignore_eos: bool = False
    """Continue after the model's end of sequence."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens once for each occurrence in the output."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that occur in prompt or output, and multiplies the negative ones."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids."""
    allowed_token_ids: list[int] | None = None
    """Sample only from these tokens; None: from all."""
    bad_words: list[str] = []
    """Texts that are not generated: a word's last token is forbidden if the output ends in the tokens before it."""
    bad_word_ids: list[list[int]] = []
    """The token ids of `bad_words`, set by the server."""
    logprobs: int | None = None
    """k: return the log-probabilities of the sampled token and of the k most likely tokens; None: return none."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt except the first. Such a request does not use the prefix cache."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""
    structured_outputs: StructuredOutputs | None = None
    """The constraint on the output."""

    def __post_init__(self) -> None:
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
            ("bad_words", len(self.bad_words) <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS} words"),
            ("bad_words", sum(map(len, self.bad_words)) <= MAX_TEXT, f"at most {MAX_TEXT} characters in all"),
            ("stop", sum(map(len, self.stop)) <= MAX_TEXT, f"at most {MAX_TEXT} characters in all"),
            ("bad_words", all(map(str.strip, self.bad_words)), "words that are not empty"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "at least 0"),
            ("prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= 0, "at least 0"),
        ):
            if not is_valid:
                raise InvalidParameter(f"{name} must be {expected}, got {_shown(getattr(self, name))}", name)

    def for_engine(self, seed: int) -> SamplingParams:
        """Return the parameters that the engine needs for one of the `n` outputs, with its own seed and without text.

        With `max_tokens` 0 the engine samples one token, which the server drops.
        """
        return msgspec.structs.replace(
            self,
            n=1,
            seed=seed,
            max_tokens=None if self.max_tokens is None else max(1, self.max_tokens),
            stop=[],
            bad_words=[],
            include_stop_str_in_output=False,
            skip_special_tokens=True,
        )

    def bad_tokens(self, output: list[int]) -> set[int]:
        """Return the tokens that would complete a bad word after these output tokens."""
        return {last for *first, last in self.bad_word_ids if not first or output[-len(first) :] == first}


# --- server → engine core -------------------------------------------------------------------------------------


class EngineCoreRequest(msgspec.Struct, tag=True, array_like=True):
    """A request. The engine answers with one or more `EngineCoreOutput`s, the last one with a finish reason.

    An embedding model answers with exactly one, and ignores the sampling parameters.
    """

    client: int
    """Number of the API process that gets the outputs."""
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: bytes = b""
    """Requests share cached prefixes only with requests of the same salt."""
    output_token_ids: list[int] = []
    """Output tokens sent by another replica before it died: generation continues after them without sending them."""


class AbortRequests(msgspec.Struct, tag=True, array_like=True):
    """Abort requests: the client disconnected, or a stop string was found. Unknown ids are ignored."""

    request_ids: list[str]


class Probe(msgspec.Struct, tag=True, array_like=True):
    """Health check of the loop and every rank. Answered with `ProbeReply` when every rank has completed a step."""

    client: int
    probe_id: int


class Join(msgspec.Struct, tag=True, array_like=True):
    """An API process has started: abort the requests of its predecessor, and answer with `EngineReady`."""

    client: int


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    """Stop the engine core; running requests are aborted."""


class StartWave(msgspec.Struct, tag=True, array_like=True):
    """Sent by a core to the other replicas that share its experts: start wave number `wave`."""

    wave: int


class ReplicaFailed(msgspec.Struct, tag=True, array_like=True):
    """Sent by a core to the other replicas that share its experts: it has failed, and they cannot continue."""

    replica: int
    reason: str


ToCore = EngineCoreRequest | AbortRequests | Probe | Join | Shutdown | StartWave | ReplicaFailed


# --- engine core → server -------------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Natural log-probabilities at one position, from the model's distribution before temperature."""

    logprob: float
    """Log-probability of the sampled token, or of the prompt token."""
    rank: int
    """1 for the most likely token."""
    top_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(msgspec.Struct, array_like=True):
    """`TokenLogprobs` of consecutive prompt tokens, as packed columns instead of objects.

    There is one row per token, but none for the first token of the prompt.
    """

    num_top: int
    """Number of most likely tokens in each row."""
    logprobs: bytes
    """float32 `[rows]`"""
    ranks: bytes
    """int32 `[rows]`"""
    top_ids: bytes
    """int32 `[rows, num_top]`"""
    top_logprobs: bytes
    """float32 `[rows, num_top]`"""

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    def extend(self, more: PromptLogprobs) -> None:
        """Append the rows of the following tokens."""
        assert more.num_top == self.num_top
        self.logprobs += more.logprobs
        self.ranks += more.ranks
        self.top_ids += more.top_ids
        self.top_logprobs += more.top_logprobs

    def after(self, count: int) -> PromptLogprobs:
        """Return the rows after the first `count`."""
        row, top = 4 * count, 4 * count * self.num_top
        return PromptLogprobs(
            self.num_top, self.logprobs[row:], self.ranks[row:], self.top_ids[top:], self.top_logprobs[top:]
        )

    def rows(self) -> list[TokenLogprobs]:
        """Return the rows as objects."""
        logprobs, tops = array("f", self.logprobs), array("f", self.top_logprobs).tolist()
        ranks, ids = array("i", self.ranks), array("i", self.top_ids).tolist()
        cuts = (slice(at * self.num_top, (at + 1) * self.num_top) for at in range(len(self)))
        return [
            TokenLogprobs(logprob, rank, ids[cut], tops[cut])
            for logprob, rank, cut in zip(logprobs, ranks, cuts, strict=True)
        ]


class EngineCoreOutput(msgspec.Struct, array_like=True):
    """New tokens of a request. Exactly one output of each request has a `finish_reason`: the last."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, if requested."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token (or end of sequence) that ended the output; it is the last of `token_ids`."""
    error: str | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache; set from the first output on."""
    prompt_logprobs: PromptLogprobs | None = None
    """For the prompt tokens after those already sent; all are sent before the first of `token_ids`."""
    vector: bytes | None = None
    """Embedding models: float32, before the final normalization."""


class EngineStats(msgspec.Struct, array_like=True):
    """Current gauges, and counters since the start."""

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    steps: int = 0
    idle_stage_steps: int = 0
    """Stage-steps left idle although a request could have used them."""
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    started: int = 0
    """Start time in milliseconds since 1970; it changes when a replica restarts."""


class ExpertLoad(msgspec.Struct, array_like=True):
    """How evenly the shared experts are used. Every replica sends the same values from time to time."""

    layers: dict[int, int]
    """Number of experts of each MoE layer, by layer number."""
    tokens: bytes
    """int64, layer by layer and expert by expert: tokens routed to it since the start."""
    imbalance: float
    """Recent load of the busiest rank of each layer divided by the mean load of the ranks; 1 is balanced."""
    moved: int
    """Experts moved since the start."""


class EngineReady(msgspec.Struct, tag=True, array_like=True):
    """The model is loaded and the workers respond."""

    seconds: dict[str, float]
    """Duration of each phase of the start-up."""
    replica: int = 0
    stats: EngineStats | None = None
    """Current stats: the KV cache can be larger or smaller than planned."""


class EngineCoreOutputs(msgspec.Struct, tag=True, array_like=True):
    """The outputs of a step for one API process: one message for all its requests.

    A request is either in `outputs` or, if its output is one token and nothing else, in the two columns.
    """

    outputs: list[EngineCoreOutput] = []
    """First and last outputs, and those with log-probabilities."""
    stats: EngineStats | None = None
    """None: unchanged."""
    request_ids: list[str] = []
    token_ids: list[int] = []
    """One new token for each of `request_ids`."""
    replica: int = 0
    expert_load: ExpertLoad | None = None
    """None: unchanged or not available."""


class ProbeReply(msgspec.Struct, tag=True, array_like=True):
    """The answer to a `Probe`."""

    probe_id: int
    replica: int = 0


class EngineDead(msgspec.Struct, tag=True, array_like=True):
    """The engine has failed; the reason names the rank. This is the last message."""

    reason: str
    replica: int = 0


ToServer = EngineReady | EngineCoreOutputs | ProbeReply | EngineDead


# --- engine core ⇄ workers ------------------------------------------------------------------------------------


class NewRequestData(msgspec.Struct, array_like=True):
    """A complete request, sent when it is first scheduled, and again after a preemption."""

    slot: int
    """Row in the workers' request state, < max_num_seqs; freed by `SchedulerOutput.freed_slots`."""
    token_ids: list[int]
    """The prompt, and the tokens generated before a preemption."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is already in `block_ids`: prefix cache hits."""
    block_ids: list[int]
    """Blocks of all groups of layers for the first `block_size` tokens, then for the next; arbitrary outside windows.
    """
    params: SamplingParams
    num_scored_tokens: int = 0
    """With `params.prompt_logprobs`: prompt tokens after the first that were already scored before a preemption."""


class CachedRequestData(msgspec.Struct, array_like=True):
    """A row with changes: `num_tokens` more tokens of a known request, and what changed since it was last scheduled."""

    slot: int
    num_tokens: int
    new_token_ids: list[int]
    """Sampled tokens that the workers do not have yet; appended to the request's tokens."""
    new_block_ids: list[int]
    """Appended to `NewRequestData.block_ids`, in the same order."""


class SchedulerOutput(msgspec.Struct, array_like=True):
    """The plan of a step. Each rank applies `freed_slots`, then `new`, then runs the rows: `decodes`, then `scheduled`.

    A row samples when its computed tokens reach its known tokens. With a single stage the workers keep the tokens that
    they sample; these are known from then on, and plans do not contain them. A plan without rows is a heartbeat, which
    every rank passes on.
    """

    step: int
    freed_slots: list[int]
    new: list[NewRequestData]
    scheduled: list[CachedRequestData]
    decodes: list[int] = []
    """Slots of one-token rows without changes: no new block, and no new token except the last one sampled."""
    token_ids: list[int] = []
    """The last token of each of `decodes`; empty if the workers keep sampled tokens."""
    masks: dict[int, bytes] = {}
    """By slot, the tokens that a row of `scheduled` may sample: bit `i % 32` of int32 `i // 32` for token `i`."""
    has_work: bool | None = None
    """Replicas that share experts: whether this one has requests. None: it steps independently."""
    clears_failure: bool = False
    """After a failed step: the workers stop skipping plans and run this one."""

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.scheduled)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(row.num_tokens for row in self.scheduled)


class ModelRunnerOutput(msgspec.Struct, tag=True, array_like=True):
    """The result of a step, from the first TP rank of the last stage, one entry per row of the plan."""

    step: int
    token_ids: list[int]
    """The sampled token of each row; -1 for a row that did not sample."""
    logprobs: list[TokenLogprobs | None] = []
    """Empty if no row requests them."""
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    """By row number, for rows of requests with prompt log-probabilities."""
    vectors: dict[int, bytes] = {}
    """Embedding models: by row number, float32, for rows that complete their prompt. No row samples."""
    is_wave_active: bool = False
    """Replicas that share experts: whether any of them had requests when this step was scheduled."""
    expert_load: ExpertLoad | None = None
    """Expert parallelism: present in some steps only."""
    failure: str = ""
    """Why the step failed; its results are invalid. Steps in flight after it are skipped and report the same reason."""


class WorkerReady(msgspec.Struct, tag=True, array_like=True):
    """A rank, or all ranks of a node, have loaded the model."""

    seconds: dict[str, float]
    num_blocks: int = 0
    """KV blocks of every rank of the replica, as agreed among them; 0: as configured."""


class WorkerFailed(msgspec.Struct, tag=True, array_like=True):
    """A rank, or the ranks of a node, have failed.

    `user_error`: the user can fix the cause, such as a missing tensor; no traceback is logged. `is_certain`: the cause
    is known to be here; otherwise it may be a rank elsewhere.
    """

    reason: str
    user_error: bool = False
    is_certain: bool = False
