"""Resolves the limits of a step (`EngineOptions` → `SchedulerConfig`). No torch."""

from __future__ import annotations

from quire.engine.architecture.encoder_spec import EncoderSpec
from quire.engine.config import parallel_config
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import ModelConfig, ParallelConfig, SchedulerConfig
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError

_MAX_TUNED_TOKENS = {"cpu": 512, "cuda": 8192}
"""Maximum tokens of a step with automatic size, for which the workspace is sized. Larger steps are hardly cheaper per
token. Replicas that share experts divide the number, because the tokens of all their steps meet in the experts, in the
worst case on one rank."""
_MIN_TUNED_TOKENS = 512
"""The least part of one of them."""


def resolve(
    options: EngineOptions, model: ModelConfig, parallel: ParallelConfig, available: Devices
) -> SchedulerConfig:
    """Return the limits of a step. Raises `ConfigError` if a whole prompt must fit into a step and does not."""
    # Tokens of an encoder attend to the whole prompt, which therefore must be in one step.
    is_chunked = options.enable_chunked_prefill and not isinstance(model.architecture, EncoderSpec)
    minimum = 1 if is_chunked else model.max_model_len
    requested = options.max_num_batched_tokens
    tuned = _MAX_TUNED_TOKENS[available.kind]
    if parallel.is_coupled:
        tuned = max(_MIN_TUNED_TOKENS, tuned // parallel.replicas)
    budget = max(tuned, minimum) if requested == "auto" else requested
    if budget < minimum:
        why = "an encoder" if isinstance(model.architecture, EncoderSpec) else "--no-enable-chunked-prefill"
        raise ConfigError(
            f"{why} needs --max-num-batched-tokens of at least the model length ({minimum}), "
            f"got {budget}; or lower --max-model-len"
        )
    is_tuned = requested == "auto" and is_chunked
    if options.itl_target_ms is not None and not is_tuned:
        raise ConfigError(
            "--itl-target-ms needs --max-num-batched-tokens auto and chunked prefill, because it sizes prompt chunks"
        )
    if not is_chunked:
        for name in ("max_num_partial_prefills", "long_prefill_token_threshold"):
            if getattr(options, name) != getattr(EngineOptions, name):
                raise ConfigError(f"--{name.replace('_', '-')} needs chunked prefill; omit it")
    return SchedulerConfig(
        max_num_seqs=min(options.max_num_seqs, budget),  # so that all decodes fit into every step
        max_num_batched_tokens=budget,
        enable_chunked_prefill=is_chunked,
        policy=options.scheduling_policy,
        depth=_choose_depth(options, available),
        max_num_partial_prefills=options.max_num_partial_prefills,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        dynamic_chunking=is_tuned,
        itl_target=None if options.itl_target_ms is None else options.itl_target_ms / 1000,
    )


def _choose_depth(options: EngineOptions, available: Devices) -> int:
    """Return the number of plans in flight: one per stage; with a single stage one more, to schedule ahead.

    With several stages the plans in flight already hide the core's work. A single rank on CPU runs in the core's
    process and uses all processors, so scheduling ahead in a thread gains nothing (measured with models of 1 to 100 ms
    per step: 0.83 to 1.10 times the throughput, mostly below 1).
    """
    stages = options.pipeline_parallel_size
    if stages > 1:
        return stages
    in_process = parallel_config.choose_executor(options) == "uni"
    return 1 if in_process and available.kind == "cpu" else 2
