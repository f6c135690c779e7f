"""The modules that compiling grammars imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.fakes.tokenizers import write_model


def test_neither_torch_nor_anything_before_it_is_needed(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    code = f"""
import sys
from pathlib import Path
from quire.engine.scheduler.grammar import GrammarCompiler
from quire.engine.protocol.sampling_params import StructuredOutputs
from quire.server.text.structured_outputs import StructuredOutputCheck
from tests.unit.engine.scheduler.test_grammar import model
assert "llguidance" not in sys.modules
given, outputs = model(Path({str(folder)!r})), StructuredOutputs(json={{"type": "object"}})
StructuredOutputCheck(given).resolve(outputs)  # which has a process of its own for it
assert "llguidance" not in sys.modules
GrammarCompiler(given).compile(outputs)
assert "llguidance" in sys.modules
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
