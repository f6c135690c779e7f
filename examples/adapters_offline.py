"""Answer one batch with a base model and its adapters, without a server.

python examples/adapters_offline.py                                              # the demo model and its adapters
python examples/adapters_offline.py Qwen/Qwen2.5-7B-Instruct /adapters/sql /adapters/support
"""

from __future__ import annotations

import sys
from pathlib import Path

from quire import LLM, LoRARequest, SamplingParams


def main() -> None:
    """Print the answer of the base and of each adapter to the same question."""
    with LLM(*sys.argv[1:2], enable_lora=True) as llm:
        paths = sys.argv[2:]
        if not sys.argv[1:]:
            paths = sorted(map(str, (llm.model_config.path.parent / "demo_adapters").iterdir()))
        adapters = [None, *(LoRARequest(Path(path).name, lora_path=path) for path in paths)]
        question = [{"role": "user", "content": "Which flag sets the port?"}]
        greedy = SamplingParams(temperature=0.0, max_tokens=48)
        results = llm.chat([question] * len(adapters), greedy, use_tqdm=False, lora_request=adapters)
        for adapter, result in zip(adapters, results, strict=True):
            print(f"{'base' if adapter is None else adapter.name}: {result.outputs[0].text}")


if __name__ == "__main__":
    main()
