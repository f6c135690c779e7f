"""Generate text without a server: completions, a chat, and one of several answers.

python examples/offline.py                    # the demo model
python examples/offline.py Qwen/Qwen3-0.6B
"""

from __future__ import annotations

import sys

from quire import LLM, SamplingParams, StructuredOutputs

PROMPTS = ["Quire is", "Tensor parallelism splits"]


def main() -> None:
    """Print the answers."""
    with LLM(*sys.argv[1:2]) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=48)
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, greedy, use_tqdm=False), strict=True):
            print(f"{prompt!r} → {result.outputs[0].text!r}")

        (answer,) = llm.chat([{"role": "user", "content": "Which flag sets the port?"}], greedy, use_tqdm=False)
        print("chat:", answer.outputs[0].text)

        one_of = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputs(choice=["Oslo", "Lima"]))
        (city,) = llm.chat([{"role": "user", "content": "Name a city."}], one_of, use_tqdm=False)
        print("choice:", city.outputs[0].text)


if __name__ == "__main__":
    main()
