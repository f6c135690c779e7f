"""A LangChain chat model with a tool, on a server of Quire.

    quire serve
    pip install langchain-openai
    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python examples/langchain_agent.py

MODEL=NAME names another model than quire-demo, as in /v1/models.

ChatOpenAI works as it does with OpenAI: streams, bind_tools, with_structured_output. OpenAIEmbeddings needs a server of
an embedding model, and check_embedding_ctx_length=False: it would send token ids of OpenAI's models.
"""

from __future__ import annotations

import os

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return '{"temperature": 21, "condition": "sunny"}'


def main() -> None:
    """Let the model call the tool until it has an answer, and print each step."""
    llm = ChatOpenAI(model=os.environ.get("MODEL", "quire-demo"), temperature=0).bind_tools([get_weather])
    messages: list[BaseMessage] = [HumanMessage("What is the weather in Paris?")]
    while True:
        answer = llm.invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            print(f"{call['name']}({call['args']})")
            messages.append(get_weather.invoke(call))
    print(answer.text)


if __name__ == "__main__":
    main()
