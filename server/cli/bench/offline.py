"""Common parts of the benchmarks without HTTP: the engine's flags, and an `LLM` created from them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator

from quire.engine.cluster import ray_cluster
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.server.client.output_stream import EngineUnavailable, RequestFailed
from quire.server.config import flags
from quire.server.llm import LLM


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the engine flags of `quire serve`."""
    flags.add_model(parser)
    flags.add_flags(parser, EngineOptions)


@contextlib.contextmanager
def running(options: EngineOptions) -> Iterator[tuple[LLM, EngineConfig]]:
    """A loaded engine and its resolved configuration; raises `ConfigError`."""
    config = ray_cluster.resolve(options)
    print(plan_text(config), flush=True)
    try:
        with LLM(**dataclasses.asdict(options)) as llm:
            yield llm, config
    except (EngineUnavailable, RequestFailed, InvalidParameter) as failure:
        raise ConfigError(str(failure)) from None


def check_lengths(config: EngineConfig, num_tokens: int) -> None:
    """Raise `ConfigError` if prompt and output exceed the model's maximum length."""
    if num_tokens > config.model.max_model_len:
        raise ConfigError(
            f"prompt and output have {num_tokens} tokens, the model's maximum is {config.model.max_model_len}: reduce "
            "--input-len, --output-len or --random-prefix-len"
        )
