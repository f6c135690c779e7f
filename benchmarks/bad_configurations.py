"""The end of `quire serve` for each of tests/fakes/bad_configurations.py: exit code, seconds, and message.

    .venv/bin/python -m benchmarks.bad_configurations [REGULAR EXPRESSION of names]

The first column has a `!` where the exit code or the text is not the expected one, where there is a traceback or more
than one line, or where it takes more than 5 s.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.serving import quire
from tests.fakes.bad_configurations import CASES, BadConfiguration

LIMIT, PATIENCE = 5.0, 20.0


def run(case: BadConfiguration) -> str:
    """Run the case; returns a row of the table."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        command = quire(*case.command(Path(folder)))
        begun = time.monotonic()
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **case.environment}, start_new_session=True
        )
        while process.poll() is None and time.monotonic() < begun + PATIENCE:
            time.sleep(0.05)
            output.seek(0)
            if " serving " in (text := output.read()):
                break
        seconds = time.monotonic() - begun
        code = str(process.poll())
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            code = "serves" if " serving " in text else "hangs"
        output.seek(0)
        text = output.read().replace(folder, "MODEL")
    errors = [line for line in text.splitlines() if "error:" in line]
    last = errors[-1] if errors else (text.strip().splitlines() or ["nothing"])[-1]
    is_right = code == str(case.code) and re.search(case.message, last) and len(errors) == 1 and seconds < LIMIT
    mark = " " if is_right and "Traceback" not in text else "!"
    trace = " (traceback)" * ("Traceback" in text)
    return f"{mark} | {case.name} | {code}{trace} | {seconds:.1f} | {last[:300]}"


def main() -> None:
    chosen = [case for case in CASES if not sys.argv[1:] or re.search(sys.argv[1], case.name)]
    rows = []
    for case in chosen:
        rows.append(run(case))
        print(rows[-1], flush=True)
    print(f"{len(rows)} configurations, {sum(row[0] == '!' for row in rows)} not as expected")


if __name__ == "__main__":
    main()
