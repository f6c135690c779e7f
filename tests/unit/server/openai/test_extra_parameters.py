"""Parameters beside the usual ones: scores of the prompt, echo, best_of, token ids, truncation, ids and salts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.openai.completions import CompletionRequest, _CompletionFormatter
from quire.server.text.output_processor import TextDelta
from tests.fakes.api_server import Server, run_server
from tests.fakes.fake_core import HELD_AT

USER: Any = [{"role": "user", "content": "hello world"}]
ECHO = "user\nhello world\nassistant\n"


async def post(server: Server, route: str, **body: Any) -> dict[str, Any]:
    response = await server.http.post(f"/v1/{route}", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def streamed(server: Server, route: str, **body: Any) -> list[dict[str, Any]]:
    response = await server.http.post(f"/v1/{route}", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    *events, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.fixture
def submitted(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[EngineCoreRequest]:
    """The requests to the engine."""
    sent: list[EngineCoreRequest] = []
    send = server.frontend.client._send

    def watch(message: Any, to: int) -> None:
        sent.append(message)
        send(message, to)

    monkeypatch.setattr(server.frontend.client, "_send", watch)
    return sent


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A choice of completions from its chunks, as it would be whole."""
    mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    whole: dict[str, Any] = {"index": index, "text": "".join(choice["text"] for choice in mine)}
    whole |= dict.fromkeys(("logprobs", "prompt_logprobs", "prompt_token_ids", "token_ids"))
    if logprobs := [choice["logprobs"] for choice in mine if choice["logprobs"]]:
        whole["logprobs"] = {name: [entry for piece in logprobs for entry in piece[name]] for name in logprobs[0]}
    if "token_ids" in mine[0]:
        whole["token_ids"] = [token for choice in mine for token in choice["token_ids"]]
        (whole["prompt_token_ids"],) = (c["prompt_token_ids"] for c in mine if "prompt_token_ids" in c)
    return whole | {name: mine[-1][name] for name in ("finish_reason", "stop_reason")}


async def test_prompt_logprobs_have_vllms_shape(server: Server) -> None:
    ids = server.tokenizer.encode("hello world", add_special_tokens=True)
    (choice,) = (await post(server, "completions", prompt="hello world", prompt_logprobs=3))["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        *(
            {
                str(token + step): {
                    "logprob": logprob,
                    "rank": step + 2,
                    "decoded_token": server.tokenizer.token_text(token + step),
                }
                for step, logprob in ((-1, -0.5), (0, -1.0), (1, -9999.0))
            }
            for token in ids[1:]
        ),
    ]
    (choice,) = (await post(server, "completions", prompt="hello world", prompt_logprobs=0))["choices"]
    assert [list(at) for at in choice["prompt_logprobs"][1:]] == [[str(token)] for token in ids[1:]]
    (one,) = (await post(server, "completions", prompt=[70], prompt_logprobs=2))["choices"]
    assert one["prompt_logprobs"] == [None]
    assert (await post(server, "completions", prompt=[70]))["choices"][0]["prompt_logprobs"] is None
    chat = await post(server, "chat/completions", messages=USER, prompt_logprobs=1, n=2)
    prompt = await server.chat_ids(USER)
    assert [sorted(at) for at in chat["prompt_logprobs"][1:]] == [sorted(map(str, (t - 1, t))) for t in prompt[1:]]
    assert chat["prompt_logprobs"][0] is None
    assert all("prompt_logprobs" not in choice for choice in chat["choices"])


async def test_echo_puts_the_prompt_in_front(server: Server) -> None:
    for prompt in ("hello world", [70, 71]):
        text = prompt if isinstance(prompt, str) else server.tokenizer.decode(prompt, skip_special_tokens=True)
        whole = (await post(server, "completions", prompt=prompt, echo=True, n=2))["choices"]
        assert [choice["text"] for choice in whole] == [text * 2] * 2
        chunks = await streamed(server, "completions", prompt=prompt, echo=True, n=2)
        assert [joined(chunks, index) for index in range(2)] == whole
        scored = await post(server, "completions", prompt=prompt, echo=True, max_tokens=0)
        assert (scored["choices"][0]["text"], scored["choices"][0]["finish_reason"]) == (text, "length")
        assert scored["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("max_tokens", [0, 1, 50])
@pytest.mark.parametrize("text", ["hello world", "你好 é😀 <|im_start|> x", "x"])
async def test_echo_with_logprobs_scores_the_prompt(server: Server, text: str, max_tokens: int) -> None:
    body: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": max_tokens}
    ids = server.tokenizer.encode(text, add_special_tokens=True)
    special = {"skip_special_tokens": False}
    for prompt, options in ((text, {}), (text, special), (ids, {}), (ids, special)):
        (choice,) = (await post(server, "completions", prompt=prompt, **body, **options))["choices"]
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(text)
        assert logprobs["token_logprobs"][: len(ids)] == [None] + [-1.0] * (len(ids) - 1)
        assert set(logprobs["token_logprobs"][len(ids) :]) <= {-0.5}
        assert logprobs["top_logprobs"][0] is None
        assert [set(top.values()) for top in logprobs["top_logprobs"][1 : len(ids)]] == [{-0.5, -1.0}] * (len(ids) - 1)
        assert [next(iter(top)) for top in logprobs["top_logprobs"][1:]] == logprobs["tokens"][1:]
        assert len({len(column) for column in logprobs.values()}) == 1
        offsets = logprobs["text_offset"]
        assert offsets == sorted(offsets)
        for token, offset in zip(logprobs["tokens"][: len(ids)], offsets, strict=False):
            assert token.startswith("bytes:") or choice["text"].startswith(token, offset)
        if max_tokens:
            assert offsets[len(ids)] == len(text)
        assert joined(await streamed(server, "completions", prompt=prompt, **body, **options)) == choice


async def test_echo_and_prompt_logprobs_may_ask_for_different_counts(server: Server) -> None:
    body: dict[str, Any] = {"prompt": "hello", "echo": True, "max_tokens": 0}
    (choice,) = (await post(server, "completions", **body, logprobs=0, prompt_logprobs=3))["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1] * (len(choice["prompt_logprobs"]) - 1)
    assert [len(at) for at in choice["prompt_logprobs"][1:]] == [3] * (len(choice["prompt_logprobs"]) - 1)


async def test_what_lm_eval_sends(server: Server) -> None:
    """Token ids, echo and one token or none; it cuts the prompt's and the last token off by position."""
    prompts = [[70, 71, 72, 73], [80, 81, 82]]
    answer = await post(
        server, "completions", prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1
    )
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(prompt) + 1
        assert sum(logprobs["token_logprobs"][1:-1]) == -1.0 * (len(prompt) - 1)
        assert all(max(top.values()) == -0.5 for top in logprobs["top_logprobs"][1:-1])


async def test_best_of_shows_n_and_counts_all(server: Server, submitted: list[EngineCoreRequest]) -> None:
    answer = await post(server, "completions", prompt=["hello", "x"], best_of=3, n=2, max_tokens=60)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["hello", "hello", "x", "x"]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert [message.params.logprobs for message in submitted] == [0] * 6
    lengths = [len(message.prompt_token_ids) + 1 for message in submitted]
    assert answer["usage"]["completion_tokens"] == sum(lengths)
    (shown,) = (await post(server, "completions", prompt="hello", best_of=2, logprobs=1))["choices"]
    assert shown["logprobs"]["tokens"]


def test_the_best_have_the_highest_logprob_per_token(server: Server) -> None:
    body = CompletionRequest(prompt="x", n=2, best_of=3)
    means = [-0.5, -0.1, -0.3, -0.9, -0.2, -0.8]
    candidates = [
        TextDelta(index, str(mean), logprobs=[TokenLogprobs(mean, 1, [], [])] * (index + 1))
        for index, mean in enumerate(means)
    ]
    best = _CompletionFormatter(server.tokenizer, body, [[70], [70]], None).best(candidates)
    assert [(delta.index, delta.text) for delta in best] == [(0, "-0.1"), (1, "-0.3"), (2, "-0.2"), (3, "-0.8")]


async def test_token_ids_come_along(server: Server) -> None:
    prompt = server.tokenizer.encode("é 😀", add_special_tokens=True)
    body: dict[str, Any] = {"prompt": "é 😀", "return_token_ids": True, "max_tokens": 60}
    (whole,) = (await post(server, "completions", **body))["choices"]
    assert (whole["prompt_token_ids"], whole["token_ids"]) == (prompt, [*prompt, 2])
    chunks = await streamed(server, "completions", **body)
    assert joined(chunks) == whole
    assert len(chunks) >= 2
    assert joined(await streamed(server, "completions", **body, echo=True))["text"] == "é 😀é 😀"
    chat = await post(server, "chat/completions", messages=USER, return_token_ids=True)
    ids = await server.chat_ids(USER)
    assert chat["prompt_token_ids"] == ids
    assert server.tokenizer.decode(chat["choices"][0]["token_ids"], skip_special_tokens=True) == ECHO
    options = {"stream_options": {"include_usage": True}}
    first, *rest = await streamed(server, "chat/completions", messages=USER, return_token_ids=True, **options)
    assert (first["prompt_token_ids"], first["usage"]) == (ids, None)
    assert not any("prompt_token_ids" in chunk for chunk in rest)
    assert [t for chunk in rest for c in chunk["choices"] for t in c["token_ids"]] == chat["choices"][0]["token_ids"]


async def test_tokens_have_names_of_their_own(server: Server) -> None:
    """Halves of characters are told by their bytes, which is how OpenAI does it; or all by their ids."""
    ids = server.tokenizer.encode("\U00010348<|im_start|>", add_special_tokens=True)
    body: dict[str, Any] = {"prompt": ids, "logprobs": 0, "skip_special_tokens": False, "ignore_eos": True}
    (choice,) = (await post(server, "completions", **body, max_tokens=5, echo=True))["choices"]
    names = ["bytes:\\xf0", "bytes:\\x90", "bytes:\\x8d", "bytes:\\x88", "<|im_start|>"]
    assert choice["logprobs"]["tokens"] == [*names, *names[:4]] + ["bytes:\\xf0"] * (len(names) - 4)
    assert choice["logprobs"]["text_offset"][:5] == [0, 0, 0, 0, 1]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"][5:]] == [
        [n] for n in choice["logprobs"]["tokens"][5:]
    ]
    (choice,) = (await post(server, "completions", **body, return_tokens_as_token_ids=True))["choices"]
    script = [token for token in ids if token > 7]
    assert choice["logprobs"]["tokens"][: len(script)] == [f"token_id:{token}" for token in script]
    message: Any = [{"role": "user", "content": "\U00010348"}]
    chat = {"messages": message, "logprobs": True, "top_logprobs": 1}
    content = (await post(server, "chat/completions", **chat))["choices"][0]["logprobs"]["content"]
    part = next(entry for entry in content if entry["bytes"] == [0xF0])
    assert part["token"] == part["top_logprobs"][0]["token"] == "\\xf0"
    content = (await post(server, "chat/completions", **chat, return_tokens_as_token_ids=True))["choices"][0][
        "logprobs"
    ]
    assert all(entry["token"].startswith("token_id:") for entry in content["content"])
    assert [0xF0] in [entry["bytes"] for entry in content["content"]]


async def test_the_server_may_name_tokens_by_their_ids(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    chat: dict[str, Any] = {"messages": USER, "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    async with run_server(config, return_tokens_as_token_ids=True) as server:
        for asked, is_id in ((None, True), (True, True), (False, False)):
            body = chat if asked is None else {**chat, "return_tokens_as_token_ids": asked}
            (token,) = (await post(server, "chat/completions", **body))["choices"][0]["logprobs"]["content"]
            assert token["token"].startswith("token_id:") == is_id
        (choice,) = (await post(server, "completions", prompt="a", logprobs=1, max_tokens=1))["choices"]
        assert choice["logprobs"]["tokens"][0].startswith("token_id:")
        made = await post(server, "responses", input="a", top_logprobs=1, max_output_tokens=1)
        assert made["output"][-1]["content"][0]["logprobs"][0]["token"].startswith("token_id:")


@pytest.mark.parametrize("by_server", [False, True])
async def test_usage_in_every_chunk(
    config: EngineConfig, core_mode: Callable[[str], None], tmp_path: Path, by_server: bool
) -> None:
    core_mode(f"held until {tmp_path / 'gate'}")  # outputs before and behind it do not merge
    asked = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    options = {} if by_server else asked
    async with run_server(config, enable_force_include_usage=by_server) as server:
        for route, body in (("completions", {"prompt": "hello world"}), ("chat/completions", {"messages": USER})):
            (tmp_path / "gate").unlink(missing_ok=True)
            events: list[dict[str, Any]] = []
            body |= {**options, "n": 2, "stream": True, "max_tokens": HELD_AT + 2, "ignore_eos": True}
            async with server.http.stream("POST", f"/v1/{route}", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        events.append(json.loads(line.removeprefix("data: ")))
                        (tmp_path / "gate").touch()
            *chunks, last = events
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            assert counts[0] < counts[-1] == last["usage"]["completion_tokens"]
            assert not last["choices"]
            assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
        quiet = {"stream_options": {"continuous_usage_stats": True}}
        answers = await streamed(server, "completions", prompt="x", **quiet)
        assert {"usage" in chunk for chunk in answers} == {by_server}


async def test_choices_say_what_stopped_them(server: Server) -> None:
    stops: list[tuple[dict[str, Any], Any]] = [({}, None), ({"stop": "lo"}, "lo"), ({"stop_token_ids": [2]}, 2)]
    for options, reason in stops:
        for route, body in (("completions", {"prompt": "hello"}), ("chat/completions", {"messages": USER})):
            (choice,) = (await post(server, route, **body, **options))["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
            *_, last = await streamed(server, route, **body, **options)
            assert last["choices"][0]["stop_reason"] == reason


async def test_a_prompt_is_cut_from_the_left(server: Server, submitted: list[EngineCoreRequest]) -> None:
    long = [70 + index % 50 for index in range(200)]
    for keep, max_tokens, expected in ((3, 5, 3), (-1, 28, 100), (-1, 127, 1), (128, None, None), (-1, None, 112)):
        body = {"prompt": long, "truncate_prompt_tokens": keep, "max_tokens": max_tokens}
        response = await server.http.post("/v1/completions", json=body)
        if expected is None:
            assert response.json()["error"]["code"] == "context_length_exceeded"
            continue
        assert response.json()["usage"]["prompt_tokens"] == expected
        assert submitted[-1].prompt_token_ids == long[-expected:]
    (choice,) = (await post(server, "completions", prompt="hello world", truncate_prompt_tokens=1, echo=True))[
        "choices"
    ]
    tail = server.tokenizer.encode("hello world", add_special_tokens=True)[-1]
    assert choice["text"] == server.tokenizer.token_text(tail) * 2
    await post(server, "chat/completions", messages=USER * 30, truncate_prompt_tokens=-1)
    assert len(submitted[-1].prompt_token_ids) == 127


async def test_a_prompt_is_cut_from_the_right(server: Server, submitted: list[EngineCoreRequest]) -> None:
    long = [70 + index % 50 for index in range(200)]
    cut: dict[str, Any] = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
    await post(server, "completions", prompt=long, **cut)
    await post(server, "completions", prompt="hello " * 5000, **cut)
    await post(server, "chat/completions", messages=USER, **cut)
    hello = server.tokenizer.encode("hello ", add_special_tokens=True)
    prompts = [message.prompt_token_ids for message in submitted]
    assert prompts == [long[:3], hello[:3], (await server.chat_ids(USER))[:3]]
    tokenized = await server.http.post("/tokenize", json={"messages": USER, **cut})
    assert tokenized.json()["tokens"] == prompts[-1]


async def test_minus_one_asks_for_the_logprobs_of_all_tokens(
    config: EngineConfig, core_mode: Callable[[str], None]
) -> None:
    size = config.model.architecture.vocab_size
    async with run_server(replace(config, model=replace(config.model, max_logprobs=-1))) as server:
        asked = SamplingParams(logprobs=-1, prompt_logprobs=-1)
        params = (await server.frontend.input_processor.process_prompts([[70]], asked)).params
        assert (params.logprobs, params.prompt_logprobs) == (size, size)
        (choice,) = (await post(server, "completions", prompt="hello", logprobs=-1))["choices"]
        assert {len(top) for top in choice["logprobs"]["top_logprobs"]} == {3}  # the fake core has no more
        messages = {"messages": USER, "logprobs": True, "top_logprobs": -1, "max_tokens": 1}
        chat = await post(server, "chat/completions", **messages)
        assert len(chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3


async def test_ids_and_salts_reach_the_engine(server: Server, submitted: list[EngineCoreRequest]) -> None:
    answer = await post(server, "completions", prompt="x", request_id="mine", cache_salt="ß")
    assert answer["id"] == "cmpl-mine"
    assert (await post(server, "chat/completions", messages=USER, request_id="mine"))["id"] == "chatcmpl-mine"
    await post(server, "completions", prompt="x", cache_salt="other")
    first, unsalted, other = (message.cache_salt for message in submitted)
    assert len(first) == len(other) == 16
    assert unsalted == b""
    assert first != other


async def test_an_id_in_use_is_refused(server: Server) -> None:
    async with server.http.stream(
        "POST", "/v1/completions", json={"prompt": "a<hang>", "request_id": "mine", "stream": True, "echo": True}
    ) as first:
        await anext(first.aiter_lines())
        response = await server.http.post("/v1/completions", json={"prompt": "b", "request_id": "mine"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")
        await post(server, "completions", prompt="b", request_id="other")


async def test_special_tokens_are_added_by_default(
    server: Server, submitted: list[EngineCoreRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    encode = server.tokenizer.encode

    def watch(text: str, *, add_special_tokens: bool) -> list[int]:
        asked.append(add_special_tokens)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(server.tokenizer, "encode", watch)
    for given in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        await post(server, "completions", prompt="hello", **given)
    assert asked == [True, True, False]


@pytest.mark.parametrize(("limit", "allowed"), [(2, 2), (0, 0), (-1, 320)])
async def test_the_flag_bounds_every_kind_of_logprobs(
    config: EngineConfig, core_mode: Callable[[str], None], limit: int, allowed: int
) -> None:
    async with run_server(replace(config, model=replace(config.model, max_logprobs=limit))) as server:
        for route, body, param in (
            ("completions", {"prompt": "x"}, "logprobs"),
            ("completions", {"prompt": [70]}, "prompt_logprobs"),
            ("chat/completions", {"messages": USER, "logprobs": True}, "top_logprobs"),
        ):
            await post(server, route, **body, **{param: min(allowed, 3)})
            response = await server.http.post(f"/v1/{route}", json={**body, param: allowed + 1})
            assert response.json()["error"]["param"] == param
            assert f"from 0 to {allowed}" in response.json()["error"]["message"]
            if limit != -1 and param != "logprobs":
                response = await server.http.post(f"/v1/{route}", json={**body, param: -1})
                assert "--max-logprobs -1" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "content", ["hello world", [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]]
)
async def test_a_prediction_reaches_the_engine(
    server: Server, submitted: list[EngineCoreRequest], content: Any
) -> None:
    """As tokens, without special ones; the text stays here."""
    prediction = {"type": "content", "content": content}
    await post(server, "chat/completions", messages=USER, prediction=prediction)
    (params,) = (message.params for message in submitted)
    assert params.predicted_token_ids == server.tokenizer.encode("hello world", add_special_tokens=False)
    assert params.prediction == ""


async def test_a_completion_ignores_a_prediction(server: Server, submitted: list[EngineCoreRequest]) -> None:
    await post(server, "completions", prompt="x", prediction={"type": "content", "content": "y"}, max_tokens=1)
    assert submitted[0].params.prediction == ""
    assert "prediction" in server.frontend.input_processor.ignored
