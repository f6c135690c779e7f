"""Every architecture of transformers' list of causal language models, tiny where that is possible.

`python -m tests.integration.engine.models.every_decoder` prints for docs/reference/models.md which of them run, by a
mapping of Quire or by transformers' implementation, and why the others do not; and on standard error a line for each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.engine.architecture.families import ENCODERS, FAMILIES, from_hf_config, of_text
from quire.engine.architecture.families.transformers_backend import DescribeRequest
from quire.engine.models.transformers_backend.describe import describe
from quire.engine.models.transformers_backend.shrink import shrink
from quire.engine.protocol.errors import ConfigError

DECODERS: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""model_type → architecture."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "num_hidden_layers": 4,
    },
}
"""Settings of published models that the config classes do not have by default."""
LAYOUTS = ((1, 1), (2, 1), (1, 2))


def write(model_type: str, folder: Path) -> bool:
    """Its config.json in `folder`, where nothing else is needed; returns whether it is a tiny one."""
    kind: Any = CONFIG_MAPPING[model_type]
    try:
        values = kind().to_dict()
    except Exception:  # its own defaults do not satisfy it
        values = {}
    layers, heads = values.get("num_hidden_layers"), values.get("num_attention_heads")
    usual = {  # settings that some classes leave unset
        "head_dim": 64,
        "num_key_value_heads": heads,
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_topk": 2,
        "layer_types": ["full_attention"] * (layers if isinstance(layers, int) else 0),
    }
    values |= {name: value for name, value in usual.items() if name in values and values[name] is None}
    values |= PUBLISHED.get(model_type, {})
    small = shrink(values)
    try:
        kind.from_dict(small)
        is_tiny = bool(values)
    except Exception:  # its sizes depend on one another in ways of its own
        is_tiny = False
    written = (small if is_tiny else values) | {"architectures": [DECODERS[model_type]], "model_type": model_type}
    (folder / "config.json").write_text(json.dumps(written, default=str))
    return is_tiny


def native_refusal(folder: Path) -> str:
    """The reason why Quire's mapping does not describe the model, for text; empty: it does."""
    try:
        from_hf_config(of_text(json.loads((folder / "config.json").read_text())), media=False)
    except ConfigError as error:
        return str(error)
    return ""


def refusal(folder: Path, tp: int, pp: int) -> str:
    """The reason why transformers' implementation of the model is not supported in a layout, for text; empty: it is."""
    try:
        describe(DescribeRequest(path=folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, media=False))
    except ConfigError as error:
        return str(error)
    return ""


def table() -> str:
    """Markdown: the models that run, their layouts, and the reasons why the others do not."""
    served: dict[str, str] = {}
    reasons: dict[str, set[str]] = {}
    for model_type, name in DECODERS.items():
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            write(model_type, folder)
            is_native = name in FAMILIES.keys() - ENCODERS.keys()
            why = [refusal(folder, tp, pp) for tp, pp in LAYOUTS]
        layouts = " and ".join(kind for kind, reason in (("TP", why[1]), ("PP", why[2])) if not reason)
        found = why[0] or f"transformers' implementation, {layouts or 'one rank'}"
        print(f"{model_type}: {'a mapping; ' * is_native}{found}", file=sys.stderr)
        if not why[0]:
            served[name] = layouts or "one rank"
        elif is_native:
            served.setdefault(name, _MAPPING_ONLY)
        else:
            reasons.setdefault(_in_short(why[0]), set()).add(name)
    lines = ["| layouts | architectures |", "|---|---|"]
    for layouts in ("TP and PP", "TP", "PP", "one rank", _MAPPING_ONLY):
        names = sorted(name for name, value in served.items() if value == layouts)
        lines += (
            [f"| {layouts} | {', '.join(f'**{n}**' if n not in FAMILIES else n for n in names)} |"] if names else []
        )
    lines += ["", "| not supported, because | architectures |", "|---|---|"]
    for reason, others in sorted(reasons.items()):
        if left := sorted(others - served.keys()):
            lines.append(f"| {reason} | {', '.join(left)} |")
    return "\n".join(lines)


_MAPPING_ONLY = "only with Quire's mapping"


def _in_short(reason: str) -> str:
    return reason.partition(" (")[0].removesuffix(", which is not supported")


if __name__ == "__main__":
    print(table())
