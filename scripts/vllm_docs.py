"""docs/reference/vllm.md from the table of vLLM's flags; `scripts/docs` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from markdown_table import code, table

from quire.server.cli.main import build_parser
from quire.server.config import vllm, vllm_flags

INTRODUCTION = """# Flags of vLLM

`quire serve` takes the command lines, environment variables and `--config` files of `vllm serve`, also with
underscores (`--max_model_len`), with `-O3`, and with JSON by keys (`--hf-overrides.rope_theta 10000`). A flag of vLLM
that command lines in use have is a flag of Quire, has no effect, which the log says once, or is an error that names
what to use instead. Any other flag is an error. `LLM`, `AsyncLLM` and `EngineArgs` take the same options with
underscores: `LLM(swap_space=4)`. `scripts/docs` generates this page from the code.
[Coming from vLLM](../guides/coming-from-vllm.md) lists the other differences.
"""


def render() -> str:
    """The page as Markdown."""
    own = build_parser().parse_args(["serve"]).parser._option_string_actions
    flags = list(dict.fromkeys(vllm.flags().values()))

    def rows(verdict: str) -> Iterable[tuple[str, str]]:
        return sorted((_names(flag.names), _text(flag)) for flag in flags if flag.verdict in verdict)

    parts = [
        INTRODUCTION,
        "## The same in Quire\n",
        "Flags that are not below have the same name and meaning ([Command line](cli.md)). These also take vLLM's "
        "values:\n",
        table(("flag", ""), [(code(name), text) for name, (text, _) in vllm_flags.SAME.items() if name in own]),
        f"{_names(vllm_flags.LISTS)} also take a JSON list.\n",
        "## Another name in Quire\n",
        table(("flag of vLLM", "flag of Quire"), rows("renamed parts")),
        "Other keys of JSON objects have no effect, which the log says, or are errors.\n",
        "## Without effect\n",
        table(("flag of vLLM", "reason"), rows("ignored")),
        "## Not supported\n",
        "The off form (`--no-…`) is accepted.\n",
        table(("flag of vLLM", "instead"), rows("refused")),
        "## Environment variables\n",
        table(
            ("variable of vLLM", "in Quire"),
            [
                *((code(name), code(variable)) for name, variable in vllm_flags.VARIABLES.items()),
                *((code(name), code(flag)) for name, (flag, _) in vllm_flags.VARIABLES_OF_FLAGS.items()),
                *(
                    (code(name.partition("=")[0]), f"not supported: {_marked(text)}")
                    for name, text in vllm_flags.VARIABLES_REFUSED.items()
                ),
            ],
        ),
        "Other variables that begin with `VLLM_` have no effect, and the log says so.\n",
    ]
    return "\n".join(parts)


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(code, names))


def _text(flag: vllm.Flag) -> str:
    accepted = f" (accepted: {', '.join(map(code, flag.harmless))})" if flag.harmless else ""
    return flag.text + accepted if flag.verdict in "renamed parts" else _marked(flag.text) + accepted


def _marked(text: str) -> str:
    """Flags, variables and fields as code."""
    parts = text.split("`")
    parts[::2] = (
        re.sub(r"(?<![\w-])--[a-z][\w-]*|\b\w+_\w+\b|/metrics|\{.*?\}", r"`\g<0>`", part) for part in parts[::2]
    )
    return "`".join(parts)
