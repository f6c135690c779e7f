"""What the options for images and videos become, and what they are refused for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.media_spec import MediaSpec, TowerSpec, TransformersTowerSpec
from quire.engine.architecture.spec_parts import NormSpec, Parameters, linear
from quire.engine.architecture.tower_spec import GridTowerSpec, MergerSpec, PatchSpec, tower_layer
from quire.engine.config import model_config
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.media_config import is_text_only
from quire.engine.config.memory_plan import MemoryPlan, format_bytes
from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import resolve
from quire.engine.config.speculative_config import drafter_options
from quire.engine.protocol.errors import ConfigError
from tests.unit.engine.config.test_resolve import folder, on_a_gpu, options


@dataclass(frozen=True, kw_only=True)
class _Tower(TowerSpec):
    @property
    def patches_per_feature(self) -> int:
        return 4

    def patches_per_input(self, module: str) -> int:
        return 4 if module.startswith("merger") else 1

    def parameters(self) -> Parameters:
        yield from linear("layers.0.up", 4096, 1024)
        yield from linear("merger.down", 256, 8192)


SPEC = MediaSpec(tower=_Tower(hidden_size=256, num_levels=3), image_token_id=7, video_token_id=8)


def resolved(tmp_path: Path, spec: MediaSpec = SPEC, **given: Any) -> EngineConfig:
    asked = options(folder(tmp_path, max_position_embeddings=32768), **given)
    model = resolve(options(asked.model)).model
    return resolve(asked, model=replace(model, architecture=replace(model.architecture, media=spec)))


@pytest.mark.parametrize(
    ("given", "image", "video"),
    [
        (None, 256, 256),
        ({"image": 4}, 4, 256),
        ({"image": {"count": 2, "width": 512}, "video": {"num_frames": 8}, "audio": 0}, 2, 256),
        ({"video": 0}, 256, 0),
    ],
)
def test_a_prompt_has_a_limit_for_each_kind(
    tmp_path: Path, given: dict[str, Any] | None, image: int, video: int
) -> None:
    media = resolved(tmp_path, limit_mm_per_prompt=given).media
    assert media is not None
    assert media.max_items == {"image": image, "video": video}
    without = resolved(tmp_path, replace(SPEC, video_token_id=None), limit_mm_per_prompt=given).media
    assert without is not None
    assert without.max_items == {"image": image, "video": 0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"picture": 1}, "--limit-mm-per-prompt: picture is not supported; the kinds are image, video"),
        ({"image": -1}, "image must be a number from 0 to 256, got -1"),
        ({"image": True}, "image must be a number from 0 to 256, got True"),
        ({"audio": 1}, "audio is not supported"),
    ],
)
def test_other_limits_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(tmp_path, limit_mm_per_prompt=given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"language_model_only": True}, True),
        ({"limit_mm_per_prompt": {"image": 0}}, False),
        ({"limit_mm_per_prompt": {"image": 0, "video": 0}}, True),
    ],
)
def test_a_tower_is_left_out_if_nothing_may_need_it(given: dict[str, Any], expected: bool) -> None:
    assert is_text_only(EngineOptions(**given), SPEC) == expected


def test_a_model_of_text_has_no_media(tmp_path: Path) -> None:
    config = resolve(options(folder(tmp_path)))
    assert config.media is None
    assert MemoryPlan.of(config).media == (0,)


def test_a_draft_model_takes_no_images(tmp_path: Path) -> None:
    assert drafter_options(options("some/model"), resolved(tmp_path).model).language_model_only


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enable_chunked_prefill": False}, "--no-enable-chunked-prefill is not supported for models that take images"),
        ({"pipeline_parallel_size": 3}, "the first pipeline stage has 2 layers, .* the model's first 3, which must be"),
        ({"encoder_cache_size": 0}, "--encoder-cache-size must be at least 1, got 0"),
        ({"encoder_cache_size": 1 << 30}, r"\+ images .* TiB\), .* or --encoder-cache-size"),
    ],
)
def test_what_images_cannot_be_combined_with_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(tmp_path, **given)


def test_only_own_towers_on_cpus_are_quantized(tmp_path: Path) -> None:
    asked = options("model", mm_encoder_quantization="int8")
    arch = resolved(tmp_path).model.architecture
    assert model_config._tower_quantization(asked, arch, "cpu") == "int8"
    assert model_config._tower_quantization(asked, replace(arch, media=None), "cuda") is None
    with pytest.raises(ConfigError, match="--mm-encoder-quantization int8 is not supported on cuda; omit it"):
        model_config._tower_quantization(asked, arch, "cuda")
    tower = TransformersTowerSpec(hidden_size=256, modules=("visual",), num_parameters=1, values_per_feature=1.0)
    with pytest.raises(ConfigError, match="not supported for towers that transformers computes; omit it"):
        model_config._tower_quantization(asked, replace(arch, media=replace(SPEC, tower=tower)), "cpu")


def test_an_image_that_is_never_in_one_step_is_refused(tmp_path: Path) -> None:
    spec = replace(SPEC, is_bidirectional=True, run_length=256)
    assert resolved(tmp_path, spec, max_num_batched_tokens=256).media is not None
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 255 is less than the 256 tokens of an image"):
        resolved(tmp_path, spec, max_num_batched_tokens=255)
    joined = replace(spec, joins_prompt=True)
    assert resolved(tmp_path, joined, max_num_batched_tokens=32_768).media is not None
    with pytest.raises(ConfigError, match=r"more than the 32768 tokens of the image, .* in the model's length, 32768"):
        resolved(tmp_path, replace(joined, run_length=32_768), max_num_batched_tokens=32_768)


def test_features_of_several_layers_need_these_in_the_first_stage(tmp_path: Path) -> None:
    assert resolved(tmp_path, pipeline_parallel_size=3, pipeline_layer_partition="3,2,1").media is not None


def test_memory_for_features_and_for_the_tower_is_the_first_stages(tmp_path: Path) -> None:
    config = resolved(tmp_path, pipeline_parallel_size=2)
    assert config.media is not None
    assert (config.media.encoder_cache_features, config.media.max_encoder_features) == (16_384, 512)
    small = resolved(tmp_path, encoder_cache_size=1000, pipeline_parallel_size=2)
    features = 1000 * 256 * 4 * 4  # three levels more, float32
    activations = 1000 * 4 * (4096 + 2 * 1024) * 4
    workspace = MemoryPlan.of(small).workspace
    assert MemoryPlan.of(small).media == (features + activations - workspace, 0)
    first, second = MemoryPlan.of(small).fixed
    weights = MemoryPlan.of(small).weights
    assert first - second == weights[0] - weights[1] + features + activations - workspace
    fixed = resolved(tmp_path, replace(SPEC, tower=replace(SPEC.tower, max_features=100)), pipeline_parallel_size=2)
    assert fixed.media is not None
    assert (fixed.media.encoder_cache_features, fixed.media.max_item_features) == (16_384, 100)
    needed = 100 * 4 * (4096 + 2 * 1024) * 4 - MemoryPlan.of(fixed).workspace
    assert MemoryPlan.of(fixed).media == (16_384 * 256 * 4 * 4 + max(0, needed), 0)
    size = format_bytes(features + activations - workspace)
    text = f"the tower for images and videos, and {size} per rank for its activations and the 1,000 features"
    assert text in plan_text(small)


def test_towers_are_captured_for_pictures_that_take_no_longer_than_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs, if they consist of layers of one kind; the first stage has memory for it."""

    def tower(width: int, inner: int) -> MediaSpec:
        norm, feed_forward = NormSpec(eps=1e-6), MLPSpec(intermediate_size=inner, activation="gelu", is_gated=False)
        merger = MergerSpec(width=width, merged=4, output=256, inner=4 * width, norm=norm)
        layers = (tower_layer(width, 16, feed_forward, norm),) * 24
        patch = PatchSpec(shape=(3, 2, 16, 16))
        spec = GridTowerSpec(hidden_size=256, width=width, patch=patch, layers=layers, merge=2, merger=merger)
        return replace(SPEC, tower=spec)

    assert resolved(tmp_path, tower(1024, 4096)).graphs.tower_sizes == ()
    on_a_gpu(monkeypatch, 80 << 30)
    large = resolved(tmp_path, tower(1024, 4096), device="cuda", pipeline_parallel_size=2)
    assert large.graphs.tower_sizes == (256, 384, 512, 768, 1024, 1536, 2048)
    assert resolved(tmp_path, tower(1280, 5120), device="cuda").graphs.tower_sizes[-1] == 1024
    assert resolved(tmp_path, tower(3200, 12800), device="cuda").graphs.tower_sizes == ()
    assert resolved(tmp_path, device="cuda").graphs.tower_sizes == ()
    eager = resolved(tmp_path, tower(1024, 4096), device="cuda", pipeline_parallel_size=2, enforce_eager=True)
    assert eager.graphs.tower_sizes == ()
    first, second = (
        more - less for more, less in zip(MemoryPlan.of(large).media, MemoryPlan.of(eager).media, strict=True)
    )
    assert 7 * 24 * (256 << 10) + 2048 * 4096 * 2 < first < 200 << 20
    assert second == 0
