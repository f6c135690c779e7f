"""Choose adapters by the name of the model, with the client of OpenAI; load another one while the server runs.

    quire serve --enable-lora
    pip install openai
    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python examples/adapters_online.py

The demo model has two adapters, `capitals` and `pirate`. With a folder below the server's `--lora-root` as argument,
it is loaded as `mine`, asked, too, and unloaded.
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main() -> None:
    """Print the answers of the base and of each adapter."""
    client = OpenAI()
    for path in sys.argv[1:2]:
        client.post("/load_lora_adapter", cast_to=str, body={"lora_name": "mine", "lora_path": path})
    for model in client.models.list():
        answer = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "Which flag sets the port?"}], temperature=0
        )
        print(f"{model.id}: {answer.choices[0].message.content}")
    if sys.argv[1:]:
        client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": "mine"})


if __name__ == "__main__":
    main()
