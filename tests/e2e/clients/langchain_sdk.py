"""langchain-openai: run with QUIRE_URL, …_BUSY_URL, …_EMBEDDING_URL and …_KEY in the environment."""

from __future__ import annotations

import asyncio
import os
from importlib.metadata import version
from typing import Any, Literal

import openai
import pydantic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

URL, BUSY_URL, KEY = (os.environ[name] for name in ("QUIRE_URL", "QUIRE_BUSY_URL", "QUIRE_KEY"))
QUESTION = "How do I serve a model on two nodes with 8 GPUs each?"
ANSWER = "quire serve MODEL --tensor-parallel-size 8 --pipeline-parallel-size 2"
OPTIONS: Any = {"model": "quire-demo", "api_key": KEY, "temperature": 0, "max_tokens": 200}


class Place(pydantic.BaseModel, extra="forbid"):
    """A city; the demo model would go on with fields of its own, if it might."""

    city: Literal["Oslo", "Lima"]
    is_capital: bool


def weather(city: str) -> str:
    """Get the current weather in a city."""
    return '{"temperature": 21, "condition": "sunny"}'


get_weather = tool("get_weather")(weather)


def talks(llm: Any) -> None:
    answer = llm.invoke(QUESTION)
    assert ANSWER in answer.content
    assert answer.usage_metadata["output_tokens"] > 10
    assert llm.invoke([SystemMessage("You are a helper."), HumanMessage(QUESTION)]).content
    chunks = list(llm.stream(QUESTION))
    assert ANSWER in "".join(chunk.content for chunk in chunks)
    assert len(chunks) > 1  # a busy machine joins tokens
    assert [ANSWER in each.content for each in llm.batch([QUESTION] * 2)] == [True] * 2
    assert ANSWER in asyncio.run(llm.ainvoke(QUESTION)).content


def calls_tools(llm: Any) -> None:
    able = llm.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage("What is the weather in Paris?")]
    called = able.invoke(messages)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    first, *others = able.stream(messages)
    for chunk in others:
        first += chunk
    assert [each["args"] for each in first.tool_calls] == [{"city": "Paris"}]
    messages += [called, get_weather.invoke(call)]
    assert isinstance(messages[-1], ToolMessage)
    assert "sunny" in able.invoke(messages).content
    (forced,) = llm.bind_tools([get_weather], tool_choice="get_weather").invoke(QUESTION).tool_calls
    assert forced["name"] == "get_weather"


def is_structured(llm: Any) -> None:
    for options in ({}, {"method": "json_schema", "strict": True}, {"method": "function_calling"}):
        assert isinstance(llm.with_structured_output(Place, **options).invoke("Name a city."), Place), options
    assert isinstance(llm.with_structured_output(method="json_mode").invoke("Name a city as JSON."), dict)


def raises(llm: Any) -> None:
    for wrong, kind in (
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "gpt-4"}, openai.NotFoundError),
        ({"api_key": "guess"}, openai.AuthenticationError),
    ):
        try:
            ChatOpenAI(base_url=URL, **{**OPTIONS, "max_retries": 0, **wrong}).invoke(QUESTION)
        except kind:
            continue
        raise AssertionError(f"{wrong} did not fail")


def embeds() -> None:
    """Its token ids would belong to OpenAI's models."""
    options: Any = {"model": "minilm", "api_key": KEY, "check_embedding_ctx_length": False, "max_retries": 0}
    embeddings = OpenAIEmbeddings(base_url=os.environ["QUIRE_EMBEDDING_URL"], **options)
    texts = ["A man is eating food.", "The girl is carrying a baby."]
    vectors = embeddings.embed_documents(texts)
    assert [len(vector) for vector in vectors] == [384, 384]

    async def at_once() -> list[list[float]]:
        vectors: list[list[float]] = await asyncio.gather(*map(embeddings.aembed_query, texts))
        return vectors

    for again in ([embeddings.embed_query(text) for text in texts], asyncio.run(at_once())):
        for vector, other in zip(vectors, again, strict=True):
            assert max(abs(a - b) for a, b in zip(vector, other, strict=True)) < 1e-5


if __name__ == "__main__":
    llm = ChatOpenAI(base_url=URL, max_retries=0, **OPTIONS)
    for part in (talks, calls_tools, is_structured, raises):
        part(llm)
    assert ANSWER in ChatOpenAI(base_url=BUSY_URL, max_retries=1, **OPTIONS).invoke(QUESTION).content
    assert OpenAI(base_url=URL, max_retries=0, **OPTIONS).invoke("Quire is")
    embeds()
    print("langchain-openai", version("langchain-openai"), "openai", openai.__version__)
