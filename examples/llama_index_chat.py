"""A LlamaIndex model with a stream and a tool, on a server of Quire.

quire serve
pip install llama-index-llms-openai-like
OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python examples/llama_index_chat.py

MODEL=NAME names another model than quire-demo, as in /v1/models.
"""

from __future__ import annotations

import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return f"It is sunny in {city}, at 21 degrees."


def main() -> None:
    """Print a stream of text, and the result of the tool that the model calls."""
    llm = OpenAILike(
        model=os.environ.get("MODEL", "quire-demo"),
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        temperature=0,
    )
    for chunk in llm.stream_chat([ChatMessage(content="Which flag sets the port?")]):
        print(chunk.delta, end="", flush=True)
    print()
    print(llm.predict_and_call([FunctionTool.from_defaults(get_weather)], "What is the weather in Paris?"))


if __name__ == "__main__":
    main()
