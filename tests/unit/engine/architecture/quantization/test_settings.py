"""Keys that are refused, values that are supported, and names of modules."""

from __future__ import annotations

import pytest

from quire.engine.architecture.quantization.settings import (
    check_neutral,
    choose,
    expressions,
    is_excluded,
    is_skipped,
    matches,
    names,
    refuse_unknown,
)
from quire.engine.protocol.errors import ConfigError


def test_unknown_keys_are_refused_unless_they_are_off() -> None:
    refuse_unknown({"quant_method": "x", "known": 3, "other": None, "another": False, "more": []}, ("known",))
    with pytest.raises(ConfigError, match="quantization_config: other is not supported, got 1; supported: known"):
        refuse_unknown({"other": 1}, ("known",))
    with pytest.raises(ConfigError, match="export must be an object, got 3"):
        refuse_unknown(3, ("known",), "export")


def test_a_key_has_one_of_the_supported_values() -> None:
    assert choose({"bits": 4}, "bits", (2, 4)) == 4
    for absent in ({}, {"bits": None}, {"bits": ""}):
        assert choose(absent, "bits", (2, 4), default=2) == 2
        with pytest.raises(ConfigError, match="quantization_config: bits is missing; supported: 2, 4"):
            choose(absent, "bits", (2, 4))
    with pytest.raises(ConfigError, match="group_0: bits 3 is not supported; supported: 2, 4"):
        choose({"bits": 3}, "bits", (2, 4), "group_0", default=2)


def test_a_key_that_changes_answers_is_off_or_neutral() -> None:
    for neutral in ({}, {"rotation": None}, {"rotation": "none"}):
        check_neutral(neutral, {"rotation": ("none",)})
    with pytest.raises(ConfigError, match="rotation quarot is not supported; use a checkpoint that was made without"):
        check_neutral({"rotation": "quarot"}, {"rotation": ("none",)})


def test_a_list_of_names_has_only_names() -> None:
    assert names({"ignore": None}, "ignore") == ()
    assert names({"ignore": ["lm_head"]}, "ignore") == ("lm_head",)
    for value in ("lm_head", [1]):
        with pytest.raises(ConfigError, match="ignore must be a list of modules' names"):
            names({"ignore": value}, "ignore")


def test_patterns_are_names_and_expressions() -> None:
    patterns = ("lm_head", r"re:.*\.gate$")
    assert expressions(patterns) == (r".*\.gate$",)
    assert all(matches(module, patterns) for module in ("lm_head", "lm_head.x", "model.mlp.gate"))
    assert not any(matches(module, patterns) for module in ("lm_head2", "model.lm_head", "model.mlp.gate_proj"))
    with pytest.raises(ConfigError, match=r"ignore has an invalid expression, \["):
        names({"ignore": ["re:["]}, "ignore")


@pytest.mark.parametrize(
    ("pattern", "skipped", "kept"),
    [
        ("lm_head", ["lm_head", "model.lm_head"], ["lm_head2"]),
        ("model.layers.1", ["model.layers.1.mlp.up_proj"], ["model.layers.11.mlp.up_proj"]),
        ("model.layers.*.self_attn", ["model.layers.3.self_attn.q_proj"], ["model.layers.3.self_attn_norm"]),
        ("*gate", ["*gate"], ["model.gate"]),  # not a regular expression
    ],
)
def test_skipped(pattern: str, skipped: list[str], kept: list[str]) -> None:
    assert all(is_skipped(module, [pattern]) for module in skipped)
    assert not any(is_skipped(module, [pattern]) for module in kept)


@pytest.mark.parametrize(
    ("wildcard", "excluded", "kept"),
    [
        ("lm_head", ["lm_head"], ["model.lm_head"]),
        ("model.layers.1*", ["model.layers.1", "model.layers.1.mlp.up_proj"], ["model.layers.10.mlp.up_proj"]),
        ("*.self_attn", ["model.layers.3.self_attn.q_proj"], ["model.layers.3.self_attn_norm"]),
        ("*router*", ["model.layers.3.router"], ["model.layers.3.mlp"]),
        ("model.visual.*", ["model.visual.blocks.0.qkv"], ["model.visual"]),
    ],
)
def test_excluded(wildcard: str, excluded: list[str], kept: list[str]) -> None:
    assert all(is_excluded(module, [wildcard]) for module in excluded)
    assert not any(is_excluded(module, [wildcard]) for module in kept)
