"""The structs that cross a process: server ⇄ engine core ⇄ workers. Token ids and numbers only; no torch here."""

from __future__ import annotations

from array import array
from typing import Any, Literal

import msgspec

from quire.engine.protocol.errors import InvalidParameter

FinishReason = Literal["stop", "length", "abort", "error"]

LOST_REPLICAS = "lost touch with the other replicas"
"""What a rank says when an exchange with them fails: the cause is elsewhere."""
MAX_STOP_STRINGS = 16
MAX_TEXT = 16_384
"""Characters of all stop strings, and of all bad words."""
MAX_N = 128
MAX_BAD_WORDS = 1024


class StructuredOutputs(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the output must be, by exactly one of these; names and meanings are vLLM's.

    Raises `InvalidParameter` when there is none, or more than one.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as an object or as its text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """A context-free grammar in Lark's notation."""

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
    """How to continue a prompt; names and meanings are those of the OpenAI API and of vLLM.

    `stop` and `skip_special_tokens` concern text and stay in the server: `for_engine` clears them.
    Raises `InvalidParameter`, which names the field.
    """

    n: int = 1
    """Independent outputs for the prompt."""
    temperature: float = 1.0
    """Divides the logits; 0: always the likeliest token."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 and -1 keep all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Keep the tokens that are at least this probable, as a share of the likeliest one's probability."""
    seed: int | None = None
    """The same seed, the same output; None: another one for each request."""
    max_tokens: int | None = 16
    """Output tokens at most; None: up to the model's length; 0: the prompt is only computed, and scored if asked."""
    min_tokens: int = 0
    """Output tokens before which nothing ends the output: no end of sequence, stop token or stop string."""
    stop: list[str] = []
    """Strings that end the output, which does not show them; one string stands for a list of it."""
    stop_token_ids: list[int] = []
    """Tokens that end the output, beside the model's end of sequence."""
    include_stop_str_in_output: bool = False
    """Show the stop string or stop token that ended the output."""
    ignore_eos: bool = False
    """Go on past the model's end of sequence."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that stand in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens once for each time that they stand in the output."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that stand in prompt or output, and multiplies the negative ones."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be sampled; None: all."""
    bad_words: list[str] = []
    """Texts that must not be generated: a word's last token is forbidden where the output ends in those before it."""
    bad_word_ids: list[list[int]] = []
    """The token ids of `bad_words`, which the server fills in."""
    logprobs: int | None = None
    """None: none; k: the sampled token's log-probability and the k likeliest tokens'."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first. The prefix cache spares such a request nothing."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    structured_outputs: StructuredOutputs | None = None
    """What the output is held to."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name, good, expected in (
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
            if not good:
                raise InvalidParameter(f"{name} must be {expected}, got {_shown(getattr(self, name))}", name)

    def for_engine(self, seed: int) -> SamplingParams:
        """What one of the `n` sequences takes to the engine: no text, and a seed of its own.

        A prompt that is only to be computed ends with a token too, which the server leaves out.
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
        """The tokens that would complete a bad word behind these output tokens."""
        return {last for *first, last in self.bad_word_ids if not first or output[-len(first) :] == first}


# --- server → engine core -------------------------------------------------------------------------------------


class EngineCoreRequest(msgspec.Struct, tag=True, array_like=True):
    """A request. The answer is any number of `EngineCoreOutput`s, the last one with a finish reason.

    A model that embeds answers with one, and no parameter concerns it.
    """

    client: int
    """Which API process gets the answer."""
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: bytes = b""
    """Requests share cached prefixes only with those of the same salt."""
    output_token_ids: list[int] = []
    """Output that another replica has given before it died: it goes on behind them, and does not tell them again."""


class AbortRequests(msgspec.Struct, tag=True, array_like=True):
    """The client went away, or its stop string was found: free everything. Unknown ids are ignored."""

    request_ids: list[str]


class Probe(msgspec.Struct, tag=True, array_like=True):
    """Are the loop and every rank alive? Answered with `ProbeReply` once every rank has done a step."""

    client: int
    probe_id: int


class Join(msgspec.Struct, tag=True, array_like=True):
    """An API process has begun: abort what one before it in this place has left, and answer with `EngineReady`."""

    client: int


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    """Stop the engine core; what still runs is aborted."""


class StartWave(msgspec.Struct, tag=True, array_like=True):
    """From one core to the others whose replicas share its experts: begin to step, as wave number `wave`."""

    wave: int


class ReplicaFailed(msgspec.Struct, tag=True, array_like=True):
    """From one core to the others whose replicas share its experts: it ends, and they cannot go on without it."""

    replica: int
    reason: str


ToCore = EngineCoreRequest | AbortRequests | Probe | Join | Shutdown | StartWave | ReplicaFailed


# --- engine core → server -------------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Natural log-probabilities at one position, of the model's own distribution (before temperature)."""

    logprob: float
    """Of the sampled token, or of the prompt's."""
    rank: int
    """1 for the likeliest token."""
    top_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(msgspec.Struct, array_like=True):
    """What `TokenLogprobs` says, for consecutive tokens of a prompt: columns of machine numbers, not objects.

    A row for each token; the first token of a prompt has none, as nothing stands before it.
    """

    num_top: int
    """Likeliest tokens in each row."""
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
        """Append the tokens that follow."""
        assert more.num_top == self.num_top
        self.logprobs += more.logprobs
        self.ranks += more.ranks
        self.top_ids += more.top_ids
        self.top_logprobs += more.top_logprobs

    def behind(self, count: int) -> PromptLogprobs:
        """The same without the first `count` tokens."""
        row, top = 4 * count, 4 * count * self.num_top
        return PromptLogprobs(
            self.num_top, self.logprobs[row:], self.ranks[row:], self.top_ids[top:], self.top_logprobs[top:]
        )

    def rows(self) -> list[TokenLogprobs]:
        """The same as objects."""
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
    """One for each of `token_ids`, when asked for."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token of `stop_token_ids` (or end of sequence) that ended it; it is the last of `token_ids`."""
    error: str | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared, known from the first output on."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of the prompt tokens that follow those told of before; all are told of before the first of `token_ids`."""
    vector: bytes | None = None
    """Of a model that embeds, in the only output: float32, before it is normalized in the end."""


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges now, and counters since the start."""

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    steps: int = 0
    idle_stage_steps: int = 0
    """Stage-steps left empty although some request could have filled them."""
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    started: int = 0
    """When that start was, in milliseconds since 1970: a replica may have more than one."""


class ExpertLoad(msgspec.Struct, array_like=True):
    """How evenly the experts of all replicas that share them are used; told now and then, by each of them alike."""

    layers: dict[int, int]
    """The layers that have experts, by their numbers in the model, and how many experts each has."""
    tokens: bytes
    """int64, expert by expert and layer by layer: tokens that have gone there since the start."""
    imbalance: float
    """Of late, what the busiest rank of each layer had to do over the mean of the ranks: 1 is even."""
    moved: int
    """Experts that were put in another's place since the start."""


class EngineReady(msgspec.Struct, tag=True, array_like=True):
    """The model is loaded and the workers answer."""

    seconds: dict[str, float]
    """Where the start-up time went."""
    replica: int = 0
    stats: EngineStats | None = None
    """As they are now: the KV cache may be larger or smaller than it was planned."""


class EngineCoreOutputs(msgspec.Struct, tag=True, array_like=True):
    """What a step brought to this API process; one message, however many requests.

    A request stands either in `outputs` or, where it has one more token and nothing else to tell, in the two columns.
    """

    outputs: list[EngineCoreOutput] = []
    """First and last outputs, and those with log-probabilities."""
    stats: EngineStats | None = None
    """None: as before."""
    request_ids: list[str] = []
    token_ids: list[int] = []
    """One more token for each of `request_ids`."""
    replica: int = 0
    expert_load: ExpertLoad | None = None
    """None: as before, or there is none."""


class ProbeReply(msgspec.Struct, tag=True, array_like=True):
    """The answer to a `Probe`."""

    probe_id: int
    replica: int = 0


class EngineDead(msgspec.Struct, tag=True, array_like=True):
    """The engine cannot go on; the reason names the rank. Nothing follows."""

    reason: str
    replica: int = 0


ToServer = EngineReady | EngineCoreOutputs | ProbeReply | EngineDead


# --- engine core ⇄ workers ------------------------------------------------------------------------------------


class NewRequestData(msgspec.Struct, array_like=True):
    """A request travels whole, once: when it is first scheduled, and again after a preemption."""

    slot: int
    """Row of the workers' request state, < max_num_seqs; free again once it stands in `SchedulerOutput.released`."""
    token_ids: list[int]
    """Prompt, and what was generated before a preemption."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is already in `block_ids`, by prefix hits."""
    block_ids: list[int]
    """Those of all groups of layers for the first tokens, then for the next; any block where nobody looks any more."""
    params: SamplingParams
    num_scored_tokens: int = 0
    """With `params.prompt_logprobs`: prompt tokens after the first that are scored already, before a preemption."""


class CachedRequestData(msgspec.Struct, array_like=True):
    """A row with something new: `num_tokens` more tokens of a request, and what changed since it was last planned."""

    slot: int
    num_tokens: int
    new_token_ids: list[int]
    """Sampled tokens that the workers do not know; they extend the request's tokens."""
    new_block_ids: list[int]
    """As `NewRequestData.block_ids`, which they extend."""


class SchedulerOutput(msgspec.Struct, array_like=True):
    """What every rank does next. Apply `released`, then `new`, then run the rows: `decodes` first, then `scheduled`.

    A row samples when its computed tokens reach its known tokens. With a single stage the workers keep what they
    sample: it counts as known from then on, and does not come back with a plan. A plan without rows is a sign of
    life: every rank passes it on.
    """

    step: int
    released: list[int]
    new: list[NewRequestData]
    scheduled: list[CachedRequestData]
    decodes: list[int] = []
    """Slots of the rows of one token that need nothing new: no block, and no token but the last one sampled."""
    token_ids: list[int] = []
    """The last token of each of `decodes`; empty where the workers have kept it."""
    masks: dict[int, bytes] = {}
    """By slot, which tokens a row of `scheduled` may sample: bit `i % 32` of the int32 `i // 32` for token `i`."""
    has_work: bool | None = None
    """Of a replica that shares experts: whether it has requests. None: it steps by itself."""
    resumes: bool = False
    """The core knows that a step has failed, and which were skipped behind it: from this one on they run again."""

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.scheduled)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(row.num_tokens for row in self.scheduled)


class ModelRunnerOutput(msgspec.Struct, tag=True, array_like=True):
    """From the first TP rank of the last stage, row for row of the plan."""

    step: int
    token_ids: list[int]
    """The sampled token; -1 for a row that did not sample."""
    logprobs: list[TokenLogprobs | None] = []
    """Empty when no row asked for them."""
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    """Of rows, by number, whose tokens stand before prompt tokens that are to be scored."""
    vectors: dict[int, bytes] = {}
    """Of a model that embeds: of rows, by number, that end their prompt; float32. No row samples."""
    is_wave_active: bool = False
    """Of replicas that share experts: whether any of them had requests as this step was planned."""
    expert_load: ExpertLoad | None = None
    """Of a model whose experts are spread over the ranks: not with every step."""
    failure: str = ""
    """Why nothing of this step counts. Those behind it that were under way are skipped, and say the same."""


class WorkerReady(msgspec.Struct, tag=True, array_like=True):
    """A rank is loaded."""

    seconds: dict[str, float]
    num_blocks: int = 0
    """KV blocks that all ranks of the replica have, as they have agreed; 0: those of the configuration."""


class WorkerFailed(msgspec.Struct, tag=True, array_like=True):
    """A rank cannot go on. `user_error`: the reason is for the user alone, such as a missing tensor."""

    reason: str
    user_error: bool
