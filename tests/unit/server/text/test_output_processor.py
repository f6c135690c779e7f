"""Token ids → text: with any tokens in any chunks, the texts add up."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.parsers.output_parser import OutputFormat
from quire.server.parsers.reasoning import REASONING_FORMATS
from quire.server.parsers.tool_formats import TOOL_FORMATS
from quire.server.text.output_processor import Detokenizer, OutputProcessor, StopStrings, TextDelta
from quire.server.text.tokenizer import Tokenizer
from tests.fakes.tokenizers import byte_fallback, byte_level, wrapped

BYTE_LEVEL = wrapped(byte_level())
FALLBACK = wrapped(byte_fallback())


def token(tokenizer: Tokenizer, piece: str) -> int:
    """The id of a piece that is in the vocabulary."""
    token_id = tokenizer.backend.token_to_id(piece)
    assert token_id is not None
    return token_id


BYTES = range(token(FALLBACK, "<0x00>"), token(FALLBACK, "<0xFF>") + 1)
SPECIAL = FALLBACK.backend.get_added_tokens_decoder().keys()
WORDS = [i for i in range(FALLBACK.backend.get_vocab_size()) if i not in BYTES]


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    return "".join([*map(detokenizer.feed, output), detokenizer.flush()])


def whole(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> str:
    """The guarantee, spelled out: the decoded whole without its common prefix with the decoded prompt."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    text = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    if text.startswith(before.rstrip("\ufffd")):
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False)))
        return text[shared:]
    raise AssertionError("the decoder took the prompt back")


def byte_ids(text: str) -> list[int]:
    return [BYTES[byte] for byte in text.encode()]


any_tokens = st.lists(st.integers(0, BYTE_LEVEL.backend.get_vocab_size() + 3), max_size=60)
emoji_bytes = st.text("é中😀👍🏽\U00010348", min_size=1, max_size=4).map(byte_ids)
broken_bytes = st.lists(st.sampled_from(BYTES[0x80:0x100]), max_size=20).map(lambda tail: [BYTES[0xFF], *tail])
word = st.sampled_from(WORDS).map(lambda word: [word])
plain_word = st.sampled_from([i for i in WORDS if i not in SPECIAL]).map(lambda word: [word])


@st.composite
def fallback_tokens(draw: st.DrawFn) -> list[int]:
    """Words and runs of byte tokens that are UTF-8, or broken from the first byte on; a word after each run."""
    runs = draw(
        st.lists(
            st.one_of(word, st.tuples(st.one_of(emoji_bytes, broken_bytes), plain_word).map(lambda p: p[0] + p[1]))
        )
    )
    return [one for run in runs for one in run]


@given(any_tokens, any_tokens, st.booleans())
def test_byte_level_stream_is_the_whole_for_any_tokens(prompt: list[int], output: list[int], skip: bool) -> None:
    assert stream(BYTE_LEVEL, prompt, output, skip) == whole(BYTE_LEVEL, prompt, output, skip)


@given(st.text(), st.text(), st.integers(0, 8))
def test_text_cut_anywhere_comes_back(prompt: str, output: str, cut: int) -> None:
    """The prompt may end inside a character; the output completes it and shows it whole."""
    ids = BYTE_LEVEL.encode(prompt + output, add_special_tokens=False)
    cut = min(len(BYTE_LEVEL.encode(prompt, add_special_tokens=False)) + cut, len(ids))
    if any(i in SPECIAL for i in ids):  # with HYPOTHESIS_PROFILE=explore, texts contain constants from our sources
        return
    said = BYTE_LEVEL.decode(ids[:cut], skip_special_tokens=True).rstrip("\ufffd")
    if (prompt + output).startswith(said) and "\ufffd" not in prompt + output:
        assert said + stream(BYTE_LEVEL, ids[:cut], ids[cut:]) == prompt + output


@given(fallback_tokens(), fallback_tokens())
def test_byte_fallback_stream_is_the_whole(prompt: list[int], output: list[int]) -> None:
    assert stream(FALLBACK, prompt, output) == whole(FALLBACK, prompt, output)


@given(st.lists(st.integers(0, FALLBACK.backend.get_vocab_size() + 3), max_size=60))
def test_byte_fallback_stream_of_anything_keeps_its_words(output: list[int]) -> None:
    """Runs that turn invalid late are the exception to exactness; nothing else may suffer from them."""
    text = stream(FALLBACK, WORDS[3:4], output)
    words = [FALLBACK.token_text(i) for i in output if i in WORDS and i not in SPECIAL]
    at = 0
    for said in words:
        at = text.index(said, at) + len(said)


def test_space_before_the_first_word_stays_after_a_prompt() -> None:
    hello = token(FALLBACK, "▁hello")
    assert stream(FALLBACK, [hello], [hello]) == " hello"
    assert stream(FALLBACK, [], [hello]) == "hello"
    assert stream(FALLBACK, [hello, *[token(FALLBACK, "</s>")] * 40], [hello]) == " hello"


def test_endless_garbage_costs_bounded_work() -> None:
    detokenizer = Detokenizer(FALLBACK, [], True)
    text = "".join(detokenizer.feed(BYTES[0xFF]) for _ in range(2000))
    assert len(detokenizer._pending) + len(detokenizer._context) <= 32
    assert text + detokenizer.flush() == "\ufffd" * 2000


@pytest.mark.parametrize("count", range(1, 40))
def test_garbage_that_was_shown_too_early_is_not_lost_before_a_whole_token(count: int) -> None:
    output = [*[token(BYTE_LEVEL, "Ã")] * count, *BYTE_LEVEL.encode("a b", add_special_tokens=False)]
    assert stream(BYTE_LEVEL, [], output) == "\ufffd" * count + "a b"


def brute_force_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Reads character by character, and stops at the first that completes a stop string."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_chunks(chunks: list[str], stops: list[str], include: bool) -> None:
    matcher, shown = StopStrings(stops, include), ""
    expected, found = brute_force_stop("".join(chunks), stops, include)
    for chunk in chunks:
        shown += matcher.feed(chunk)
        assert expected.startswith(shown)
        if matcher.found:
            break
    else:
        shown += matcher.flush()
    assert (shown, matcher.found) == (expected, found)


@st.composite
def outputs(draw: st.DrawFn, tokens: list[int]) -> list[EngineCoreOutput]:
    """These tokens in outputs of any sizes, as they come when the reader is slower than the engine."""
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    pieces = [tokens[a:b] for a, b in itertools.pairwise([0, *cuts, len(tokens)])]
    return [
        *(EngineCoreOutput("r", piece) for piece in pieces[:-1] if piece),
        EngineCoreOutput("r", pieces[-1], None, "length"),
    ]


# Text whose characters are cut into several tokens, single bytes that are none, special tokens, ids that do not exist.
scraps = st.one_of(
    st.text("ab é中😀👍🏽\u200d\U00010348", max_size=6).map(
        lambda text: BYTE_LEVEL.encode(text, add_special_tokens=False)
    ),
    st.lists(st.integers(0, BYTE_LEVEL.backend.get_vocab_size() + 3), max_size=4),
)
mixed_tokens = st.lists(scraps, max_size=12).map(lambda parts: [token_id for part in parts for token_id in part])


@given(st.data(), mixed_tokens, mixed_tokens, st.booleans(), st.booleans())
def test_streamed_text_is_the_whole_up_to_the_stop_string(
    data: st.DataObject, prompt: list[int], tokens: list[int], skip: bool, include: bool
) -> None:
    """The stop strings are cut out of the text itself, so that they lie across tokens, characters and chunks."""
    expected = whole(BYTE_LEVEL, prompt, tokens, skip)
    stops = ["\ufffd\ufffda"]
    if expected:
        starts = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=2))
        stops += [expected[start : start + data.draw(st.integers(1, 5))] for start in starts]
    for params in (
        SamplingParams(skip_special_tokens=skip),
        SamplingParams(skip_special_tokens=skip, stop=stops, include_stop_str_in_output=include),
    ):
        sequence, shown, reason = OutputProcessor(BYTE_LEVEL, 0, prompt, params), "", None
        for output in data.draw(outputs(tokens)):
            delta = sequence.feed(output)
            shown, reason = shown + delta.text, delta.finish_reason
            if reason:
                break
        text, found = brute_force_stop(expected, params.stop, include)
        assert (shown, reason) == (text, "stop" if found else "length")


@given(mixed_tokens, st.booleans())
def test_a_piece_is_what_its_token_adds_to_any_whole_text(tokens: list[int], skip: bool) -> None:
    text = BYTE_LEVEL.decode(tokens, skip_special_tokens=skip)
    if not text.endswith("\ufffd"):
        for token_id, piece in ((t, BYTE_LEVEL.pieces(skip)[t]) for t in range(BYTE_LEVEL.backend.get_vocab_size())):
            if piece:
                assert BYTE_LEVEL.decode([*tokens, token_id], skip_special_tokens=skip) == text + piece


def test_pieces_are_known_of_byte_level_decoders_only() -> None:
    assert BYTE_LEVEL.pieces(True)[token(BYTE_LEVEL, "a")] == "a"
    assert BYTE_LEVEL.pieces(True)[token(BYTE_LEVEL, "<|im_end|>")] == ""
    assert BYTE_LEVEL.pieces(False)[token(BYTE_LEVEL, "<|im_end|>")] == "<|im_end|>"
    assert BYTE_LEVEL.pieces(True)[token(BYTE_LEVEL, "Ã")] == ""  # the first byte of two
    assert FALLBACK.pieces(True)[token(FALLBACK, "▁hello")] == ""


def feed(params: SamplingParams, *outputs: EngineCoreOutput) -> tuple[str, list[int], str | None, int | str | None]:
    sequence = OutputProcessor(BYTE_LEVEL, 0, [], params)
    first, *others = [sequence.feed(output) for output in outputs]
    for delta in others:
        first.extend(delta)
    assert first.logprobs is None or len(first.logprobs) == len(first.token_ids)
    return first.text, first.token_ids, first.finish_reason, first.stop_reason


def ids(text: str) -> list[int]:
    return BYTE_LEVEL.encode(text, add_special_tokens=False)


def test_stop_string_inside_one_output_cuts_tokens_and_logprobs_behind_it() -> None:
    tokens = ids("a b c d")
    logprobs = [TokenLogprobs(-1.0, 1, [], []) for _ in tokens]
    output = EngineCoreOutput("r", list(tokens), logprobs, "length")
    text, kept, reason, why = feed(SamplingParams(stop=[" b"]), output)
    assert (text, reason, why) == ("a", "stop", " b")
    assert kept == tokens[: len(ids("a b"))]


def test_stop_string_is_found_in_what_is_flushed_at_the_end() -> None:
    text, _, reason, _ = feed(SamplingParams(stop=["xy"]), EngineCoreOutput("r", ids("ax"), None, "length"))
    assert (text, reason) == ("ax", "length")
    half = ids("é")[:1] if len(ids("é")) > 1 else [token(BYTE_LEVEL, "Ã")]
    text, _, reason, why = feed(SamplingParams(stop=["\ufffd"]), EngineCoreOutput("r", half, None, "length"))
    assert (text, reason, why) == ("", "stop", "\ufffd")


def test_stop_strings_wait_for_min_tokens() -> None:
    params = SamplingParams(stop=["a"], min_tokens=3)
    text, _, reason, _ = feed(params, EngineCoreOutput("r", [*ids("a"), *ids("a"), *ids("a"), *ids("b")], None, None))
    assert (text, reason) == ("aa", "stop")


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_stop_token_shows_only_when_asked_for(include: bool, text: str) -> None:
    params = SamplingParams(stop_token_ids=ids("b"), include_stop_str_in_output=include)
    output = EngineCoreOutput("r", ids("a") + ids("b"), None, "stop", ids("b")[0])
    assert feed(params, output) == (text, ids("a") + ids("b"), "stop", ids("b")[0])


@given(any_tokens, any_tokens, st.sets(st.sampled_from(sorted(BYTE_LEVEL.special_ids)), min_size=1))
def test_special_tokens_that_are_kept_show_alone(prompt: list[int], output: list[int], kept: set[int]) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, prompt, True, frozenset(kept))
    text = "".join([*map(detokenizer.feed, output), detokenizer.flush()])
    skipped = BYTE_LEVEL.special_ids - kept
    prompt, output = ([token_id for token_id in ids if token_id not in skipped] for ids in (prompt, output))
    assert text == whole(BYTE_LEVEL, prompt, output, skip=False)


def test_stop_strings_go_before_the_parser() -> None:
    output_format = OutputFormat(tools=TOOL_FORMATS["hermes"], schemas={"f": {}})
    text = 'Hi<tool_call>{"name": "f", "arguments": {"a": "STOP"}}</tool_call>'
    sequence = OutputProcessor(BYTE_LEVEL, 0, [], SamplingParams(stop=["STOP"]), output_format)
    delta = sequence.feed(EngineCoreOutput("r", ids(text), None, "stop"))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("Hi", "tool_calls", "STOP")
    assert [(call.name, call.arguments) for call in delta.tool_calls] == [("f", '{"a": "')]


@given(st.data())
@settings(max_examples=50)
def test_tokens_before_the_first_words_are_counted_however_outputs_merge(data: st.DataObject) -> None:
    answer, thoughts = ids("<think>hm, well</think>So."), ids("<think>hm, well</think>")
    cuts = data.draw(st.lists(st.integers(0, len(answer)), unique=True).map(sorted))
    parts = [answer[a:b] for a, b in itertools.pairwise([0, *cuts, len(answer)])]
    output_format = OutputFormat(reasoning=REASONING_FORMATS["qwen3"])
    sequence, whole = OutputProcessor(BYTE_LEVEL, 0, [], SamplingParams(), output_format), TextDelta(0)
    for part in parts:
        whole.extend(sequence.feed(EngineCoreOutput("r", list(part))))
    whole.extend(sequence.feed(EngineCoreOutput("r", [], None, "stop")))
    assert (whole.reasoning, whole.text) == ("hm, well", "So.")
    assert whole.num_tokens_before_words == len(thoughts)
