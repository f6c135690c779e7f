"""`--spec-method`, `--spec-tokens` and `--speculative-config` become one configuration, or an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.engine_config import SpeculativeConfig
from quire.engine.config.resolve import resolve
from quire.engine.protocol.errors import ConfigError
from tests.unit.engine.config.test_resolve import folder, options

NGRAM = SpeculativeConfig()


def speculative(tmp_path: Path, **given: Any) -> SpeculativeConfig | None:
    return resolve(options(folder(tmp_path), **given)).scheduler.speculative


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, NGRAM),
        ({"spec_method": "none"}, None),
        ({"spec_method": "none", "spec_tokens": 3}, None),
        ({"spec_method": "ngram"}, NGRAM),
        ({"spec_tokens": 3}, SpeculativeConfig(num_speculative_tokens=3)),
        ({"speculative_config": {}}, NGRAM),
        ({"speculative_config": {"method": "ngram"}}, NGRAM),
        ({"speculative_config": {"method": "none"}}, None),
        ({"speculative_config": {"model": "[ngram]", "method": "ngram"}}, NGRAM),
        ({"speculative_config": {"model": "[ngram]"}}, NGRAM),
        ({"speculative_config": {"prompt_lookup_max": 4}}, SpeculativeConfig(prompt_lookup_min=4)),
        (
            {
                "spec_method": "none",
                "spec_tokens": 9,
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 5,
                    "prompt_lookup_min": 3,
                    "prompt_lookup_max": 4,
                },
            },
            SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_min=3),
        ),
    ],
)
def test_what_is_given(tmp_path: Path, given: dict[str, Any], expected: SpeculativeConfig | None) -> None:
    assert speculative(tmp_path, **given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative_config": {"method": "eagle3"}}, "method 'eagle3' is not supported; omit it"),
        ({"speculative_config": {"model": "a/b", "method": "medusa"}}, "method 'medusa' is not supported"),
        ({"speculative_config": {"method": "draft_model"}}, "method draft_model needs a model"),
        ({"spec_method": "none", "speculative_config": {"draft_tensor_parallel_size": 1}}, "needs a draft model"),
        ({"speculative_config": {"method": ["ngram"]}}, "method ['ngram'] is not supported"),
        ({"speculative_config": {"method": "ngram", "model": "a/b"}}, "model does not apply to ngram"),
        ({"speculative_config": {"method": "ngram", "draft_sample_method": "x"}}, "draft_sample_method is not"),
        (
            {"speculative_config": {"num_speculative_tokens": 0}},
            "num_speculative_tokens must be at least 1 and at most",
        ),
        ({"speculative_config": {"num_speculative_tokens": "5"}}, "num_speculative_tokens must be at least 1"),
        ({"speculative_config": {"prompt_lookup_min": True}}, "prompt_lookup_min must be at least 1"),
        ({"speculative_config": {"prompt_lookup_min": 5, "prompt_lookup_max": 3}}, "more than prompt_lookup_max"),
        ({"spec_tokens": 99}, "--spec-tokens must be at least 1 and at most 32, got 99"),
    ],
)
def test_what_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        speculative(tmp_path, **given)


def test_embedding_models_have_no_speculation(tmp_path: Path) -> None:
    assert speculative(tmp_path, runner="pooling") is None
    with pytest.raises(ConfigError, match="speculative decoding is not supported by embedding models"):
        speculative(tmp_path, runner="pooling", spec_method="ngram")


def test_memory_is_reserved_for_the_logits_of_drafts(tmp_path: Path) -> None:
    few = resolve(options(folder(tmp_path), max_num_seqs=2)).scheduler
    assert few.max_sampled_tokens == 1 + NGRAM.num_speculative_tokens
    assert resolve(options(folder(tmp_path), max_num_seqs=2, spec_method="none")).scheduler.max_sampled_tokens == 2
