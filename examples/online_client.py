"""Ask a server with the client of OpenAI: a stream, and a tool that the model calls.

    quire serve
    pip install openai
    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python examples/online_client.py

OPENAI_API_KEY is one of the server's keys, or anything if it has none.
"""

from __future__ import annotations

from typing import Any

from openai import OpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def main() -> None:
    """Print a stream of text, and an answer that needs a tool."""
    client = OpenAI()
    model = client.models.list().data[0].id

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "How do I serve a model on two nodes with 8 GPUs each?"}],
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, temperature=0)
    messages.append(answer.choices[0].message)
    for call in answer.choices[0].message.tool_calls or ():
        assert call.type == "function"
        print(f"{call.function.name}({call.function.arguments})")
        result = '{"temperature": 21, "condition": "sunny"}'  # your program looks it up
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, temperature=0)
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
