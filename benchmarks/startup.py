"""Seconds from `quire serve` to the first answered chat, over several starts; arguments go to `quire serve`.

.venv/bin/python benchmarks/startup.py --runs 5 -- -tp 2 -pp 2
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

_QUESTION = {"messages": [{"role": "user", "content": "What is Quire?"}], "max_tokens": 8, "temperature": 0}


def start_once(arguments: list[str]) -> tuple[float, str]:
    """One start; returns the seconds to the first answer, and the log line that says where they went."""
    begun = time.monotonic()
    command = [str(Path(sys.executable).parent / "quire"), "serve", *arguments, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    where = ""
    try:
        for line in server.stderr:
            if "ready" in line:
                where = line.strip()
            if found := re.search(r"serving .* on (http://\S+)", line):
                request = urllib.request.Request(
                    f"{found[1]}/v1/chat/completions",
                    json.dumps(_QUESTION).encode(),
                    {"Content-Type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert json.load(answer)["choices"][0]["message"]["content"]
                return time.monotonic() - begun, where
        raise SystemExit(f"{' '.join(command)} ended before it served; run it to see why")
    finally:
        threading.Thread(target=server.stderr.read, daemon=True).start()
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("serve", nargs="*", help="arguments of `quire serve`, after --")
    options = parser.parse_args()
    runs = [start_once(options.serve) for _ in range(options.runs)]
    seconds = sorted(run[0] for run in runs)
    print(f"quire serve {' '.join(options.serve)}".strip())
    print(f"first answer after {statistics.median(seconds):.2f} s (median of {len(runs)}; ", end="")
    print(f"{seconds[0]:.2f} to {seconds[-1]:.2f} s)")
    print(f"last start: {runs[-1][1]}")


if __name__ == "__main__":
    main()
