"""Plain vision transformers and their projectors against transformers, over pictures of many sizes and their tiles."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.architecture.families import FAMILIES
from quire.engine.architecture.media_spec import TowerSpec
from quire.engine.config.checkpoint_tensors import by_needed_name
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.distributed.communicator import Parallel
from quire.engine.protocol.media import MediaItem, MediaRun
from tests.fakes import late_device
from tests.fakes.families import CASES as ALL
from tests.fakes.families import SIZES, name_as_published, write_model
from tests.fakes.model_logits import configure
from tests.fakes.quantized_checkpoints import FORMATS
from tests.fakes.ranks import on_ranks
from tests.integration.engine.models.test_towers import check_close, tower_of

Arrays = dict[str, Tensor]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def tiles(config: Any) -> Iterator[Arrays]:
    """One tile, or several."""
    for count in (1, 2, 7):
        yield {"pixel_values": _random(count, 3, 28, 28)}


def other_sizes(config: Any) -> Iterator[Arrays]:
    """Also tiles of other sizes than in training."""
    yield from tiles(config)
    for side in (14, 42, 56, 84):
        yield {"pixel_values": _random(2, 3, side, side)}


def images_of_tiles(config: Any) -> Iterator[Arrays]:
    """The same with a dimension for images."""
    for arrays in other_sizes(config):
        yield {"pixel_values": arrays["pixel_values"][None]}


def any_size(config: Any) -> Iterator[Arrays]:
    """One of them with padding, as in a batch with a larger one."""
    for height, width in ((28, 28), (14, 70), (98, 14), (42, 28), (126, 84)):
        yield {"pixel_values": _random(1, 3, height, width), "image_sizes": torch.tensor([[height, width]])}
    yield {"pixel_values": _random(1, 3, 42, 56), "image_sizes": torch.tensor([[28, 42]])}


def tiles_of_any_size(config: Any) -> Iterator[Arrays]:
    """Images with tiles of a larger copy with padding."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    sizes = [
        (100, 100),
        (30, 200),
        (200, 30),
        (57, 91),
        (13, 17),
        (1000, 700),
        (28, 56),
        (300, 299),
        (5, 200),
        (56, 28),
    ]
    for size in sizes:
        count = image_size_to_num_patches(list(size), config.image_grid_pinpoints, 28)
        yield {"pixel_values": _random(1, count, 3, 28, 28), "image_sizes": torch.tensor([size])}


def padded_patches(config: Any) -> Iterator[Arrays]:
    """Several images of different sizes."""
    for sizes in (((4, 4),), ((2, 6), (6, 2), (4, 2)), ((8, 10), (2, 2))):
        longest = max(rows * columns for rows, columns in sizes)
        lengths = torch.tensor([rows * columns for rows, columns in sizes])
        yield {
            "pixel_values": _random(len(sizes), longest, 147),
            "spatial_shapes": torch.tensor(sizes),
            "pixel_attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
        }


def placed_patches(config: Any) -> Iterator[Arrays]:
    """With padding behind them; the last ones are frames of a video."""
    for rows, columns in ((3, 3), (6, 6), (3, 18), (15, 6), (9, 12)):
        where = torch.full((1, 180, 2), -1)
        places = torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy")
        where[0, : rows * columns] = torch.stack(places, dim=-1).flatten(0, 1)
        yield {"pixel_values": _random(1, 180, 147).sigmoid(), "image_position_ids": where}
    yield {
        "pixel_values_videos": _random(3, 180, 147).sigmoid(),
        "video_position_ids": where.repeat(3, 1, 1),
        "num_frames_per_video": torch.tensor([3]),
    }


def grids(config: Any) -> Iterator[Arrays]:
    """Images, and a video of two grids with frames that belong together."""
    for rows, columns in ((4, 4), (2, 14), (18, 4), (64, 2)):
        yield {
            "pixel_values": _random(rows * columns, 3, 7, 7),
            "image_grid_thw": torch.tensor([(1, rows, columns)]),
        }
    sizes = torch.tensor([(4, 6, 4), (3, 6, 4)])
    if config.model_type == "kimi_k25":
        yield {"pixel_values_videos": _random(7 * 24, 3, 7, 7), "video_grid_thw": sizes}


def framed_grids(config: Any) -> Iterator[Arrays]:
    """Images of other sizes than in training, the last of the same."""
    for rows, columns in ((4, 4), (2, 6), (18, 4), (8, 8)):
        yield {"pixel_values": _random(rows * columns, 147), "image_grid_thw": torch.tensor([(1, rows, columns)])}


def with_parts(config: Any) -> Iterator[Arrays]:
    """Images without parts, and with three smaller ones."""
    image = {"pixel_values": _random(1, 3, 56, 56)}
    yield image
    yield image | {"pixel_values_local": _random(3, 3, 42, 42), "num_local_patches": torch.tensor([3])}


def square_views(config: Any) -> Iterator[Arrays]:
    """An image that more queries read, a smaller one, and one with two parts."""
    yield {"pixel_values": _random(1, 3, 832, 832)}
    yield {"pixel_values": _random(1, 3, 96, 96)}
    local = {"pixel_values_local": _random(2, 3, 96, 96), "num_local_patches": torch.tensor([2])}
    yield {"pixel_values": _random(1, 3, 128, 128), **local}


class Case(NamedTuple):
    architecture: str
    text: str
    """model_type of the text part."""
    vision: dict[str, Any]
    settings: dict[str, Any]
    images: Callable[[Any], Iterator[Arrays]] = tiles


_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
_VISION |= {"image_size": 28, "patch_size": 7, "initializer_range": 0.2}
_CLIP, _SIGLIP = _VISION | {"model_type": "clip_vision_model"}, _VISION | {"model_type": "siglip_vision_model"}
_PIXTRAL = _VISION | {"model_type": "pixtral", "head_dim": 16, "hidden_act": "silu"}
_INTERNVL = _VISION | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [7, 7]}
_SIGLIP2 = _VISION | {"model_type": "siglip2_vision_model", "num_patches": 16}
_GEMMA4 = _VISION | {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 12}
_GEMMA4 |= {"position_embedding_size": 40}
_LLAMA4 = _VISION | {"model_type": "llama4_vision_model", "projector_input_dim": 40, "projector_output_dim": 40}
_LLAMA4 |= {"vision_output_dim": 40, "intermediate_size": 128}
_KIMI = _VISION | {"model_type": "kimi_k25_vision", "pos_emb_height": 8, "pos_emb_width": 8}
_PADDLEOCR = _VISION | {"model_type": "paddleocr_vl_vision"}
_SAM: dict[str, Any] = {"hidden_size": 32, "mlp_dim": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
_SAM |= {"window_size": 3, "global_attn_indexes": [1], "output_channels": 12, "downsample_channels": [16, 24]}
_SAM |= {"initializer_range": 0.2, "image_size": 128}
_READER: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
_READER |= {"num_key_value_heads": 2, "initializer_range": 0.2}
_GRANITE4 = {
    "qformer_config": {"model_type": "blip_2_qformer", "intermediate_size": 40, "num_hidden_layers": 1},
    "downsample_rate": "1/2",
    "deepstack_layer_map": [[-1, 0], [1, 2]],
    "spatial_target_layers": [1, 3, 4, 5],
    "vision_feature_select_strategy": "full",
    "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
}
_HUNYUAN = _VISION | {"model_type": "hunyuan_vl_vision", "max_image_size": 56}
_FULL = {"vision_feature_select_strategy": "full"}
_SIZES = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]}
_MORE_SIZES = {"image_grid_pinpoints": [[28 * rows, 28 * columns] for rows in range(1, 5) for columns in range(1, 5)]}
CASES = {
    "LLaVA": Case("Llava", "llama", _CLIP, {}),
    "Pixtral": Case("Llava", "mistral", _PIXTRAL, {"vision_feature_layer": -1} | _FULL, any_size),
    "LLaVA-NeXT": Case("LlavaNext", "llama", _CLIP | {"num_attention_heads": 1}, _SIZES, tiles_of_any_size),
    "Granite Vision": Case(
        "LlavaNext", "granite", _SIGLIP, _SIZES | _FULL | {"vision_feature_layer": [-3, 1, -1]}, tiles_of_any_size
    ),
    "LLaVA-OneVision": Case(
        "LlavaOnevision", "qwen2", _SIGLIP, _MORE_SIZES | {"vision_aspect_ratio": "anyres_max_4"}, tiles_of_any_size
    ),
    "InternVL 2.5": Case("InternVL", "qwen2", _INTERNVL | {"attention_bias": True}, {}, other_sizes),
    "InternVL 3.5": Case(
        "InternVL",
        "qwen3",
        _INTERNVL | {"use_qk_norm": True, "norm_type": "rms_norm", "use_mean_pooling": False},
        {},
        other_sizes,
    ),
    "Idefics3": Case("Idefics3", "llama", _VISION, {}, images_of_tiles),
    "SmolVLM": Case("SmolVLM", "llama", _VISION, {"scale_factor": 1}, images_of_tiles),
    "Mistral Small 3": Case("Mistral3", "mistral", _PIXTRAL, {}, any_size),
    "LightOnOCR": Case("LightOnOcr", "qwen3", _PIXTRAL, {"tie_word_embeddings": True}, any_size),
    "Gemma 3": Case("Gemma3", "gemma3_text", _SIGLIP, {"mm_tokens_per_image": 4}),
    "PaliGemma": Case("PaliGemma", "gemma", _SIGLIP, {"projection_dim": 48, "tie_word_embeddings": True}),
    "PaliGemma 2": Case("PaliGemma", "gemma2", _SIGLIP, {"projection_dim": 48, "tie_word_embeddings": True}),
    "Gemma 4": Case("Gemma4", "gemma4_text", _GEMMA4, {}, placed_patches),
    "Gemma 4, clipped, standardized": Case(
        "Gemma4",
        "gemma4_text",
        _GEMMA4 | {"use_clipped_linears": True, "standardize": True, "num_attention_heads": 4},
        {},
        placed_patches,
    ),
    "Kimi K2.5": Case("Kimi_K25", "deepseek_v3", _KIMI, {"projection_hidden_size": 32}, grids),
    "Step 3.7": Case(
        "Step3p7",
        "",
        _VISION | {"hidden_act": "quick_gelu", "mlp_ratio": 1.5, "max_position_embeddings": 16},
        {"text_config": ALL["Step 3.7"][1]["text_config"]},
        with_parts,
    ),
    "PaddleOCR-VL": Case("PaddleOCRVL", "paddleocr_vl_text", _PADDLEOCR, {"tie_word_embeddings": True}, grids),
    "LFM2-VL": Case("Lfm2Vl", "lfm2", _SIGLIP2, {"projector_hidden_size": 40}, padded_patches),
    "Llama 4": Case("Llama4", "llama4_text", _LLAMA4, {}),
    "Aya Vision": Case("AyaVision", "cohere2", _SIGLIP, {"alignment_intermediate_size": 40}),
    "DeepSeek-OCR 2": Case(
        "DeepseekOcr2", "deepseek_ocr2_text", {"sam_config": _SAM, "encoder_config": _READER}, {}, square_views
    ),
    "Granite Vision 4": Case(
        "Granite4Vision", "granite4_vision_text", _SIGLIP | {"hidden_size": 64}, _GRANITE4, tiles_of_any_size
    ),
    "Hunyuan VL": Case("HunYuanVL", "hunyuan_vl_text", _HUNYUAN, {"tie_word_embeddings": True}, framed_grids),
    "Command A Vision": Case("Cohere2Vision", "cohere2", _SIGLIP, {"alignment_intermediate_size": 36}),
}
"""Names of the architectures are without ForConditionalGeneration."""
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
_TEXT: dict[str, Any] = {"granite": {"embedding_multiplier": 3.0}}
_TEXT |= {"gemma": {"head_dim": 12}, "gemma2": {"head_dim": 12, "sliding_window": 96}}
_TEXT |= {"gemma3_text": {"head_dim": 12}, "mistral": {"head_dim": 12}, "qwen3": {"head_dim": 12}}
_TEXT |= {"gemma4_text": {"head_dim": 12, "global_head_dim": 16, "pad_token_id": 0, "hidden_size_per_layer_input": 0}}
_TEXT |= {"deepseek_v3": {"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}}
_TEXT["deepseek_v3"] |= {
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_TEXT |= {"paddleocr_vl_text": {"head_dim": 12, "rope_parameters": _AXES}}
_TEXT |= {"deepseek_ocr2_text": {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}}
_TEXT["deepseek_ocr2_text"] |= {"mlp_layer_types": ["sparse"], "max_position_embeddings": 512}
_TEXT |= {"granite4_vision_text": {"num_hidden_layers": 10, "embedding_multiplier": 3.0, "logits_scaling": 2.0}}
_TEXT["hunyuan_vl_text"] = {"head_dim": 16, "rope_parameters": ALL["Hunyuan VL"][1]["text_config"]["rope_parameters"]}
_TEXT |= {"llama4_text": {"head_dim": 12, "intermediate_size_mlp": 40, "num_local_experts": 2}}


@pytest.fixture(scope="module", params=CASES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path, Any]:
    """A case, and its model in a folder and in transformers."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("model")
    return case, folder, write(case, folder)


def write(case: Case, folder: Path) -> Any:
    text = SIZES | {"num_hidden_layers": 1, "model_type": case.text} | _TEXT.get(case.text, {})
    settings = {"text_config": text, "vision_config": case.vision, "tie_word_embeddings": False, **case.settings}
    model = write_model(f"{case.architecture}ForConditionalGeneration", settings, folder)
    name_as_published(f"{case.architecture}ForConditionalGeneration", folder, model)
    if case.architecture == "Llama4":  # `write_model` returns its text part
        from transformers import Llama4ForConditionalGeneration

        model = Llama4ForConditionalGeneration.from_pretrained(folder)
    return model


def features_of(model: Any, arrays: Arrays) -> Tensor:
    """transformers' features of an image or a video."""
    kind = "video" if "pixel_values_videos" in arrays else "image"
    with torch.inference_mode():
        if hasattr(model, "vision_model"):  # Llama 4
            features: Tensor = model.multi_modal_projector(model.vision_model(**arrays).last_hidden_state)
            return features.flatten(0, -2)
        given = getattr(model.model, f"get_{kind}_features")(**arrays)
        if hasattr(given, "deepstack_features"):  # Granite Vision 4
            return torch.cat([torch.cat(own) for _, own in given.deepstack_features], dim=-1)
        found = given.pooler_output
    factor = getattr(model.config.text_config, "embedding_multiplier", 1.0)  # Granite's decoder applies it
    return factor * torch.cat([each.flatten(0, -2) for each in found])


@pytest.fixture(autouse=True)
def several_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TowerSpec, "num_slices", lambda *_: 3)
    monkeypatch.setattr(TowerSpec, "num_query_slices", lambda *_: 5)


def encode(config: EngineConfig, tower: Any, arrays: Arrays) -> Tensor:
    kind: Any = "video" if "pixel_values_videos" in arrays else "image"
    with torch.inference_mode():
        *paused, found = tower.encode(arrays, item := MediaItem(b"", kind, 0, 1, (MediaRun(0, 1),)))
    spec = config.model.architecture.media
    assert spec is not None
    assert len(paused) == spec.tower.num_steps(item, "cpu")
    assert isinstance(found, Tensor)
    return found


def test_features_are_those_of_transformers(written: tuple[Case, Path, Any], caplog: pytest.LogCaptureFixture) -> None:
    """And no tensor of the checkpoint is unused."""
    case, folder, model = written
    with caplog.at_level(logging.WARNING):
        tower = tower_of(config := configure(folder, max_model_len=64), Parallel())
    assert "does not use" not in caplog.text
    for arrays in case.images(model.config):
        check_close(encode(config, tower, arrays), features_of(model, arrays))
    if case.architecture == "LlavaOnevision":
        video = {"pixel_values_videos": _random(1, 5, 3, 28, 28)}
        check_close(encode(config, tower, video), features_of(model, video))
        one = {"pixel_values": _random(1, 1, 3, 28, 28), "image_sizes": torch.tensor([(100, 70)])}
        two = {name: torch.cat([values, values]) for name, values in one.items()}  # the processor makes no more tiles
        expected = features_of(model, two | {"batch_num_images": torch.tensor([2])})
        check_close(encode(config, tower, one), expected[: len(expected) // 2])


def test_a_tower_never_waits_for_its_device(written: tuple[Case, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case, folder, model = written
    tower = tower_of(configure(folder, max_model_len=64), Parallel(), pack=False)
    *_, arrays = case.images(model.config)
    kind: Any = "video" if "pixel_values_videos" in arrays else "image"
    item = MediaItem(b"", kind, 0, 1, (MediaRun(0, 1),))
    check_close(late_device.encode(tower, arrays, item, monkeypatch), features_of(model, arrays))


def test_ranks_divide_a_tower(written: tuple[Case, Path, Any]) -> None:
    """Each has parts whole that they cannot divide."""
    case, folder, model = written
    config = configure(folder, max_model_len=64, tensor_parallel_size=2)
    *_, arrays = case.images(model.config)
    planned = [each for each in config.model.architecture.parameters_before() if each.module.startswith("tower.")]

    def work(parallel: Parallel) -> tuple[Tensor, int]:
        tower = tower_of(config, parallel, pack=False)
        return encode(config, tower, arrays), sum(weight.numel() for weight in tower.parameters())

    for features, count in on_ranks(2, work):
        check_close(features, features_of(model, arrays))
        assert count == sum(each.elements(2) for each in planned) < sum(each.elements(1) for each in planned)


def test_a_tower_is_quantized_as_it_is_stored_or_while_it_is_loaded(
    written: tuple[Case, Path, Any], tmp_path: Path
) -> None:
    case, folder, model = written
    config = configure(folder, max_model_len=64)
    *_, arrays = case.images(model.config)
    plain = encode(config, tower_of(config, Parallel()), arrays)
    online = configure(folder, max_model_len=64, mm_encoder_quantization="int8")
    found = encode(online, tower_of(online, Parallel()), arrays)
    assert 1e-3 * plain.norm() <= (found - plain).norm() <= 0.1 * plain.norm()
    assert MemoryPlan.of(online).weights < MemoryPlan.of(config).weights

    form, names = FORMATS["bitsandbytes, nf4"], config.model.weight_names
    arch, tensors = config.model.architecture, load_file(folder / "model.safetensors")
    own = {f"{name}.weight" for number, matrix in arch.tower_matrices(1) for name in names[number, matrix.module]}
    stored = by_needed_name({name: name for name in tensors}, FAMILIES[arch.name].prefix, own)
    numbers = dict(tensors)
    for name in (stored[each] for each in own & stored.keys()):
        packed, numbers[name] = form.pack(tensors.pop(name).float())
        tensors |= {name.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in packed.items()}
    settings = json.loads((folder / "config.json").read_text())
    for name, content, more in (("whole", numbers, {}), ("codes", tensors, {"quantization_config": form.settings})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(settings | more))
        save_file(content, tmp_path / name / "model.safetensors")
    expected, found = (
        encode(config, tower_of(configure(tmp_path / name, max_model_len=64), Parallel()), arrays)
        for name in ("whole", "codes")
    )
    assert 0 < (found - expected).norm() <= 1e-3 * expected.norm()
