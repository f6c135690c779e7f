"""How much of the JSON Schema Test Suite (draft 2020-12) structured outputs enforce.

.venv/bin/python benchmarks/json_schema_suite.py [--suite FOLDER] [--json] [--list]

Each schema of the suite is checked and compiled as in a request, and each of its instances is written as JSON text and
given to the grammar. Printed are the schemas that are accepted and those refused, by the keyword that the error names;
the invalid instances that a grammar accepts, of which there must be none (exit status 1); and the valid ones that it
rejects, by the reason. Properties are written in every order if there are few, since a grammar fixes the order.

The suite is not part of this repository. Without `--suite` (the folder with the suite's `draft2020-12`) it is taken
from the source distribution of the package `jsonschema`, in the installed version, which pip downloads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import StructuredOutputs
from quire.engine.scheduler.grammar import Grammar, GrammarCompiler, GrammarError
from quire.server.text.structured_outputs import StructuredOutputCheck
from quire.server.text.tokenizer import Tokenizer

_DRAFT = "draft2020-12"
_MAX_ORDERS = 720
"""Orders of properties that are tried for an instance."""


class SuiteUnavailable(Exception):
    """The suite cannot be downloaded. The message is pip's."""


def download(folder: Path) -> Path:
    """Download the suite into a folder, and return the one with its drafts. Raises `SuiteUnavailable`."""
    package = f"jsonschema=={metadata.version('jsonschema')}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary=jsonschema",
        "-d",
        str(folder),
        package,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = list(folder.glob("jsonschema-*.tar.gz"))
    if done.returncode or not archives:
        raise SuiteUnavailable(f"pip cannot download {package} as source: {done.stderr.strip()}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("*/json/tests"))


def cases(suite: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each group of tests, and the group: a schema with instances."""
    for path in sorted((suite / _DRAFT).glob("*.json")):
        for number, group in enumerate(json.loads(path.read_bytes())):
            yield f"{path.stem} {number}", group


def orders(value: Any) -> Iterator[Any]:
    """Yield a value with its properties in every order."""
    match value:
        case dict():
            for names in itertools.permutations(value):
                for values in itertools.product(*(list(orders(value[name])) for name in names)):
                    yield dict(zip(names, values, strict=True))
        case list():
            yield from (list(items) for items in itertools.product(*map(list, map(orders, value))))
        case _:
            yield value


class Suite:
    """Runs the suite with the demo model's vocabulary."""

    def __init__(self) -> None:
        config = resolve(EngineOptions(model=str(DEMO_MODEL), device="cpu", max_model_len=512))
        self._check = StructuredOutputCheck(config.model)
        self._grammars = GrammarCompiler(config.model)
        self._tokenizer = Tokenizer.load(config.model.tokenizer)
        self._end = config.model.eos_token_ids[0]

    def close(self) -> None:
        self._check.close()

    def grammar(self, schema: Any) -> Grammar | str:
        """Return a schema's grammar, or the keyword that the refusal names."""
        text = json.dumps(schema) if isinstance(schema, bool) else schema
        try:
            outputs = self._check.resolve(StructuredOutputs(json=text))
        except InvalidParameter as error:
            found = re.search(r"the schema's (\S+)", str(error))
            return found[1].rstrip(":") if found else str(error)
        return self._grammars.compile(outputs)

    def accepts(self, schema: Any, instance: Any) -> bool:
        """Return whether the grammar of an accepted schema allows this value, in any order of properties."""
        return any(self._accepts(schema, each) for each in itertools.islice(orders(instance), _MAX_ORDERS))

    def _accepts(self, schema: Any, instance: Any) -> bool:
        grammar = self.grammar(schema)
        assert isinstance(grammar, Grammar)
        try:
            text = json.dumps(instance, ensure_ascii=False)
            grammar.advance(self._tokenizer.encode(text, add_special_tokens=False))
        except GrammarError:
            return False
        (mask,) = self._grammars.masks([grammar])
        return bool(mask[self._end // 32] >> self._end % 32 & 1)


def _reason(instance: Any) -> str:
    """Return why a valid instance may be rejected."""
    text = json.dumps(instance, ensure_ascii=False)
    if re.search(r"\\u[0-9a-f]{4}|[\x7f]", text):
        return "a character that only a numeric escape can write"
    if re.search(r"[0-9]\.0\b|[0-9][eE]", text):
        return "an integer written as a float"
    return "other"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, metavar="FOLDER", help="the folder that contains draft2020-12")
    parser.add_argument("--json", action="store_true", help="figures instead of tables")
    parser.add_argument("--list", action="store_true", help="also print the refused schemas and rejected instances")
    options = parser.parse_args()
    with ExitStack() as stack:
        suite = Suite()
        stack.callback(suite.close)
        try:
            folder = options.suite or download(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        except SuiteUnavailable as error:
            parser.exit(2, f"the suite is not available: {error}\n")
        accepted, slowest = 0, (0.0, "")
        refused: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        listed: list[str] = []
        wrong: list[str] = []
        instances = {True: 0, False: 0}
        for name, group in cases(folder):
            begun = time.perf_counter()
            grammar = suite.grammar(group["schema"])
            slowest = max(slowest, (time.perf_counter() - begun, name))
            if isinstance(grammar, str):
                refused[grammar] += 1
                listed.append(f"refused {grammar:22} {name:26} {json.dumps(group['schema'])[:200]}")
                continue
            accepted += 1
            for test in group["tests"]:
                instances[test["valid"]] += 1
                allowed = suite.accepts(group["schema"], test["data"])
                about = f"{name:26} {json.dumps(test['data'])[:80]:40} {json.dumps(group['schema'])[:200]}"
                if allowed and not test["valid"]:
                    wrong.append(about)
                elif test["valid"] and not allowed:
                    reason = (
                        "a format, which the suite only annotates"
                        if name < "format 99" and name.startswith("format ")
                        else _reason(test["data"])
                    )
                    reasons[reason] += 1
                    listed.append(f"rejected {reason[:20]:21} {about}")
    figures = {
        "schemas": accepted + refused.total(),
        "accepted": accepted,
        "refused": refused.total(),
        "refused by keyword": dict(refused.most_common()),
        "invalid instances": instances[False],
        "invalid instances accepted": len(wrong),
        "valid instances": instances[True],
        "valid instances rejected": reasons.total(),
        "valid instances rejected because of": dict(reasons.most_common()),
        "slowest check, s": round(slowest[0], 3),
        "slowest schema": slowest[1],
    }
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        for title, figure in figures.items():
            print(f"{title:36}", *([""] if isinstance(figure, dict) else [figure]))
            for key, count in figure.items() if isinstance(figure, dict) else ():
                print(f"    {key:50}{count:5}")
    if options.list:
        print("", *listed, sep="\n")
    print(*(f"accepted although invalid: {each}" for each in wrong), sep="\n", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
