"""A model as numbers: Hugging Face `config.json` → `Architecture` → parameter and KV-cache sizes. No torch here.

Llama, Mistral, Qwen2 and Qwen3 are one decoder with other numbers; what differs is in the fields below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from quire.engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions. `kind` is transformers' rope_type; Llama 3's extra numbers are 0 elsewhere."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position: int = 0


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The numbers that fix every shape of a Llama-like decoder."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: Rope
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads held by each rank; with fewer heads than ranks, each head is replicated."""
        return max(1, self.num_kv_heads // tp)

    def layer_linears(self, tp: int) -> tuple[tuple[int, int], ...]:
        """`(out, in)` features of one layer's linear layers on one rank: qkv, output, gate and up, down."""
        heads, kv_heads = self.num_heads // tp, self.kv_heads_per_rank(tp)
        hidden, ffn = self.hidden_size, self.intermediate_size // tp
        qkv_rows = (heads + 2 * kv_heads) * self.head_dim
        return (qkv_rows, hidden), (hidden, heads * self.head_dim), (2 * ffn, hidden), (hidden, ffn)

    def layer_parameters(self, tp: int) -> int:
        """Parameters of one layer on one rank."""
        qkv, output, gate_up, down = linears = self.layer_linears(tp)
        biases = self.qkv_bias * qkv[0] + self.output_bias * output[0] + self.mlp_bias * (gate_up[0] + down[0])
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        return sum(rows * columns for rows, columns in linears) + biases + norms

    def vocab_per_rank(self, tp: int) -> int:
        """Rows of the embedding and the head on each rank; the last rank's are padded."""
        return -(-self.vocab_size // tp)

    def stage_parameters(self, stages: tuple[range, ...], stage: int, tp: int) -> int:
        """Parameters of one rank of a stage; a tied head is stored again when first and last stage differ."""
        embedding = self.vocab_per_rank(tp) * self.hidden_size
        first, last = stage == 0, stage == len(stages) - 1
        count = len(stages[stage]) * self.layer_parameters(tp)
        count += embedding * first
        count += (embedding * (not (self.tie_embeddings and first)) + self.hidden_size) * last
        return count

    def kv_block_bytes(self, layers: int, tp: int, block_size: int, row_bytes: int) -> int:
        """Bytes of one KV block on a rank that holds `layers` layers; a row is one token's keys or values of a head."""
        return 2 * layers * block_size * self.kv_heads_per_rank(tp) * row_bytes

    def check_divides(self, tp: int) -> None:
        """Refuse a tensor-parallel size that does not cut heads and feed-forward evenly."""
        problems = []
        if self.num_heads % tp:
            problems.append(f"{self.num_heads} attention heads")
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            problems.append(f"{self.num_kv_heads} KV heads")
        if self.intermediate_size % tp:
            problems.append(f"{self.intermediate_size} feed-forward columns")
        if problems:
            limit = gcd(self.num_heads, self.intermediate_size)
            fits = [
                t
                for t in range(1, limit + 1)
                if limit % t == 0 and (self.num_kv_heads % t == 0 or t % self.num_kv_heads == 0)
            ]
            raise ConfigError(
                f"--tensor-parallel-size {tp} does not divide this model's {' and '.join(problems)}; "
                f"sizes that do: {', '.join(map(str, fits))}"
            )


def from_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Map a Hugging Face config to an `Architecture`; raises `ConfigError` for what is not served yet."""
    names = config.get("architectures") or []
    name = next((n for n in names if n in FAMILIES), None)
    if name is None:
        raise ConfigError(
            f"architecture {', '.join(names) or '(none named in config.json)'} is not served; "
            f"served are: {', '.join(FAMILIES)}"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(
            f"this checkpoint is quantized ({method}), which is not served yet; use the full-precision one"
        )
    try:
        return _decoder(name, {**FAMILIES[name], **config})
    except KeyError as missing:
        raise ConfigError(f"config.json lacks {missing}, which {name} needs") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"config.json has a value that {name} cannot use: {error}") from None


# What each family's transformers class assumes where config.json is silent.
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"use_sliding_window": False},
    "MistralForCausalLM": {
        "use_sliding_window": True,
        "sliding_window": 4096,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "Qwen2ForCausalLM": {
        "use_sliding_window": False,
        "sliding_window": 4096,
        "qkv_bias": True,
        "output_bias": False,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
    "Qwen3ForCausalLM": {
        "use_sliding_window": False,
        "sliding_window": 4096,
        "qk_norm": True,
        "head_dim": 128,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
}


def _decoder(name: str, config: Mapping[str, Any]) -> Architecture:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation!r} is not served for {name}; only silu is")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"partial_rotary_factor is not served for {name}")
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    bias = bool(config.get("attention_bias", False))
    return Architecture(
        name=name,
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab_size=int(config["vocab_size"]),
        max_position=int(config.get("max_position_embeddings", 2048)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("qkv_bias", bias)),
        output_bias=bool(config.get("output_bias", bias)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=bool(config.get("qk_norm", False)),
        sliding_window=config["sliding_window"] if config["use_sliding_window"] else None,
    )


def _rope(config: Mapping[str, Any]) -> Rope:
    """Rotary settings, from transformers 5's `rope_parameters` or the older `rope_theta` + `rope_scaling`."""
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(settings.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=float(settings["factor"]))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind=kind,
            factor=float(settings["factor"]),
            low_freq_factor=float(settings["low_freq_factor"]),
            high_freq_factor=float(settings["high_freq_factor"]),
            original_max_position=int(settings["original_max_position_embeddings"]),
        )
    raise ConfigError(f"rope scaling {kind!r} is not served yet; served are default, linear and llama3")
