"""Checks context parallelism: whether the ranks of a stage can divide the tokens in a model's cache (decode), or the
tokens of a step (prefill). No torch."""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine.architecture.attention_spec import AnyAttentionSpec, AttentionSpec, MLASpec
from quire.engine.architecture.encoder_spec import EncoderSpec
from quire.engine.architecture.model_spec import ModelSpec, TransformersModelSpec
from quire.engine.config.engine_config import DTYPE_BYTES, ModelConfig, ParallelConfig, SpeculativeConfig
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError


def check(
    options: EngineOptions,
    model: ModelConfig,
    parallel: ParallelConfig,
    speculative: SpeculativeConfig | None,
    dtype: str,
) -> None:
    """Check --decode-context-parallel-size for a model with a cache of type `dtype`, and for the draft model if its
    ranks divide tokens, too. Raises `ConfigError`."""
    size, tp = parallel.decode_context_parallel_size, parallel.tensor_parallel_size
    if size == 1:
        return
    flag = f"--decode-context-parallel-size {size}"
    if tp % size:
        raise ConfigError(f"{flag} must divide the {tp} ranks of a stage (--tensor-parallel-size)")
    if options.block_size % size:
        raise ConfigError(f"{flag} must divide the {options.block_size} tokens of a block (--block-size)")
    if dtype not in (*DTYPE_BYTES, "int8", "fp8"):
        raise ConfigError(f"{flag} is not supported with --kv-cache-dtype {dtype}; use int8, fp8 or auto")
    if reason := _problem(model.architecture, tp, size, model.max_model_len):
        raise ConfigError(f"{flag} is not supported for {model.architecture.name}: {reason}")
    drafter = None if speculative is None else speculative.model
    if drafter is None or speculative is None or (size := parallel.context_size(speculative.tensor_parallel_size)) == 1:
        return
    if reason := _problem(drafter.architecture, tp, size, model.max_model_len):
        remedy = "; use draft_tensor_parallel_size 1 in --speculative-config" * (speculative.method == "draft_model")
        raise ConfigError(f"{flag} is not supported for the drafter {drafter.architecture.name}: {reason}{remedy}")


def _problem(arch: ModelSpec, tp: int, size: int, length: int) -> str:
    """Why `size` ranks cannot divide the tokens in a model's cache; "" if they can."""
    if isinstance(arch, TransformersModelSpec):
        return "transformers implements it (--model-impl), with its own attention"
    attentions = dict.fromkeys(_attentions(arch))
    if not attentions or isinstance(arch, EncoderSpec):
        return "it caches no keys and values"
    for attention in attentions:
        if feature := _unsupported(attention, length):
            return f"{feature} is not supported"
        if (copies := _copies(attention, tp)) % size:
            heads = attention.num_kv_heads if isinstance(attention, AttentionSpec) else 1
            at_most = f"{copies} ranks have" if copies > 1 else "no two ranks have"
            return f"with {heads} KV heads on {tp} ranks (--tensor-parallel-size), {at_most} the same one"
    return ""


def _attentions(arch: ModelSpec) -> Iterable[AnyAttentionSpec]:
    return [layer.attention for layer in arch.layers if layer.attention is not None]


def _copies(attention: AnyAttentionSpec, tp: int) -> int:
    """How many ranks have the same KV heads."""
    return max(1, tp // attention.num_kv_heads) if isinstance(attention, AttentionSpec) else tp


def _unsupported(attention: AnyAttentionSpec, length: int) -> str:
    """The feature of attention that needs all tokens, or their positions, on one rank; "" if there is none."""
    if not isinstance(attention, AttentionSpec | MLASpec):
        return "compressed attention"
    if attention.window and attention.window < length:
        return (
            "chunked attention" if isinstance(attention, AttentionSpec) and attention.is_chunked else "a sliding window"
        )
    if isinstance(attention, MLASpec):
        return ""
    if attention.top_k is not None:
        return "sparse attention over KV heads"
    if attention.is_chunked:
        return "chunked attention"
    if attention.alibi or attention.num_biases:
        return "a bias by the distance of keys"
    return "" if not attention.has_own_sinks else "a sink for each query"


def check_options(options: EngineOptions) -> None:
    """Check the options that cannot be combined with --prefill-context-parallel-size. Raises `ConfigError`."""
    if (size := options.prefill_context_parallel_size) == 1:
        return
    flag, context = f"--prefill-context-parallel-size {size}", options.decode_context_parallel_size
    others = {
        # With roles, one is for prefill replicas, and the other for decode replicas.
        f"--decode-context-parallel-size {context}": context > 1 and not options.prefill_replicas,
        "--enable-expert-parallel": options.enable_expert_parallel,
        "--distributed-executor-backend ray": options.distributed_executor_backend == "ray",
    }
    for other, is_given in others.items():
        if is_given:
            raise ConfigError(f"{flag} is not supported with {other}; omit one of them")


def check_shares(model: ModelConfig, parallel: ParallelConfig, dtype: str) -> None:
    """Check that ranks can divide the tokens of a model's steps, with a cache of type `dtype`. Raises `ConfigError`."""
    if (size := parallel.prefill_context_parallel_size) == 1:
        return
    flag = f"--prefill-context-parallel-size {size}"
    if dtype not in (*DTYPE_BYTES, "int8", "fp8"):
        raise ConfigError(f"{flag} is not supported with --kv-cache-dtype {dtype}; use int8, fp8 or auto")
    if reason := _indivisible(model):
        raise ConfigError(f"{flag} is not supported for {model.architecture.name}: {reason}")


def _indivisible(model: ModelConfig) -> str:
    """Why ranks cannot divide the tokens of a step; "" if they can."""
    arch = model.architecture
    if isinstance(arch, TransformersModelSpec):
        return "transformers implements it (--model-impl), with its own attention"
    if isinstance(arch, EncoderSpec) or model.pooling is not None:
        return "it is an embedding model"
    if not _attentions(arch):
        return "only tokens of layers with attention are divided, and it has no attention"
    if arch.media is not None and arch.media.is_bidirectional:
        return "image tokens that attend to later ones are not supported; use --language-model-only"
    if any(layer.ngrams is not None for layer in arch.layers):
        return "its n-grams span several tokens"
    for attention in dict.fromkeys(_attentions(arch)):
        if not isinstance(attention, AttentionSpec | MLASpec):
            return "compressed attention is not supported"
        if attention.tokens_per_key > 1 or (isinstance(attention, AttentionSpec) and attention.indexer is not None):
            return "an indexer of blocks or groups of tokens is not supported"
    return ""
