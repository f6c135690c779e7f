"""The files that scripts/docs writes are up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[3] / "scripts"


def test_generated_files_are_up_to_date() -> None:
    """In a process of its own: the scripts are not a package."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "generate_docs.py"), "--check"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_every_environment_variable_has_an_entry() -> None:
    program = (
        "import environment_docs as docs\n"
        "used, documented = docs.used(), docs.documented()\n"
        "for name, path in used.items():\n"
        "    if name not in documented:\n"
        "        print(f'{name} ({path}) has no entry in scripts/environment_docs.py')\n"
        "for name in documented - set(used):\n"
        "    print(f'{name} has an entry in scripts/environment_docs.py, and no code uses it')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=SCRIPTS, capture_output=True, text=True, timeout=60, check=True
    )
    assert not done.stdout, done.stdout
