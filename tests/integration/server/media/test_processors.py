"""Each family's processor, as the decoders load it: without torch, and equal to what transformers computes with it."""

from __future__ import annotations

import ast
import importlib
import io
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor

from quire.server.media.cohere2_vision import tile_grid
from quire.server.media.types import MediaFormat
from tests.fakes.processors import FAMILIES, PUBLISHED, write_processor

PICTURE = Image.effect_mandelbrot((100, 60), (-2, -1, 1, 1), 50).convert("RGB")
LOAD = """
import io, pickle, sys
from PIL import Image
from quire.server.media.processor import Processor
from quire.server.media.types import MediaSettings

picture = Image.open(io.BytesIO(sys.stdin.buffer.read()))
found = {}
for folder in sys.argv[1:]:
    processor = Processor(MediaSettings(model=folder))
    item = processor.image(picture, {})
    found[folder] = processor.format, item.arrays, item.text, item.grids
assert not [name for name in ("torch", "torchvision") if sys.modules.get(name)]
sys.stdout.buffer.write(pickle.dumps(found))
"""


def idefics() -> str:
    fake, four = "<fake_token_around_image>", "<image>" * 4
    rows = "".join("".join(f"{fake}<row_{row}_col_{column}>{four}" for column in (1, 2)) + "\n" for row in (1, 2))
    return f"{rows}\n{fake}<global-img>{four}{fake}"


QWEN = "<|image_pad|>"
TEXTS: Mapping[str, tuple[str, str, tuple[tuple[int, int, int], ...]]] = {
    "qwen2_vl": (QWEN, QWEN * 8, ((1, 2, 4),)),
    "colqwen2": (QWEN, QWEN * 8, ((1, 2, 4),)),
    "qwen2_5_vl": (QWEN, QWEN * 8, ((1, 2, 4),)),
    "qwen3_vl": (QWEN, QWEN * 6, ((1, 2, 3),)),
    "qwen3_vl_moe": (QWEN, QWEN * 6, ((1, 2, 3),)),
    "qwen3_5": (QWEN, QWEN * 6, ((1, 2, 3),)),
    "gemma3": ("<start_of_image>", f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n", ()),
    "paligemma": ("<image>", "<image>" * 4, ()),
    "colpali": ("<image>", "<image>" * 4, ()),
    "gemma3n": ("<image_soft_token>", f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n", ()),
    "gemma4": ("<|image|>", f"<|image>{'<|image|>' * 60}<image|>", ()),
    "glm4v": ("<|image|>", "<|image|>" * 8, ((1, 2, 4),)),
    "glm46v": ("<|image|>", "<|image|>" * 8, ((1, 2, 4),)),
    "llava": ("<image>", "<image>" * 4, ()),
    "llava_next": ("<image>", "<image>" * (4 + 2 * (4 + 1)), ()),
    "llava_onevision": ("<image>", "<image>" * (4 + 2 * (4 + 1)), ()),
    "internvl": ("<IMG_CONTEXT>", f"<img>{'<IMG_CONTEXT>' * 4 * 7}</img>", ()),
    "idefics3": ("<image>", idefics(), ()),
    "smolvlm": ("<image>", idefics(), ()),
    "mistral3": ("[IMG]", 2 * ("[IMG]" * 4 + "[IMG_BREAK]") + "[IMG]" * 4 + "[IMG_END]", ()),
    "aya_vision": (
        "<image>",
        "<|START_OF_IMG|>"
        + "".join(f"TILE{tile}" + "<|IMG_PATCH|>" * 4 for tile in [*(f"_{i}" for i in range(1, 7)), "_GLOBAL"])
        + "<|END_OF_IMG|>",
        (),
    ),
    "cohere2_vision": (
        "<|IMG_PATCH|>",
        f"<|START_OF_IMG|>{('<|IMG_PATCH|>' * 4 + '<|IMG_LINE_BREAK|>') * 7}<|END_OF_IMG|>",
        (),
    ),
    "paddleocr_vl": ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_PLACEHOLDER|>" * 8, ((1, 2, 4),)),
    "lfm2_vl": (
        "<image>",
        "<|image_start|>"
        + "".join(f"<|img_row_{row}_col_{column}|>" + "<image>" * 16 for row in (1, 2) for column in (1, 2, 3))
        + f"<|img_thumbnail|>{'<image>' * 15}<|image_end|>",
        (),
    ),
    "llama4": (
        "<|image|>",
        "<|image_start|>"
        + f"{'<|patch|>' * 4}<|tile_x_separator|>{'<|patch|>' * 4}<|tile_y_separator|>" * 2
        + f"<|image|>{'<|patch|>' * 4}<|image_end|>",
        (),
    ),
    "minimax_m3_vl": (
        "]<]image[>[",
        f"]<]start of image[>[{']<]image[>[' * 8}]<]end of image[>[",
        ((1, 2, 4),),
    ),
    "step3p7": (
        "<im_patch>",
        "<patch_start><im_patch><patch_end>" * 2 + f"<im_start>{'<im_patch>' * 4}<im_end>",
        (),
    ),
    "deepseek_ocr2": ("<image>", "<image>" * (4 + 6 + 1), ()),
    "deepseek_ocr2 as published": ("<image>", "<image>" * (4 + 6 + 1), ()),
    "ernie4_5_vl_moe": ("<|image|>", "<|image|>" * 8, ((1, 2, 4),)),
    "deepseek_ocr": ("<image>", "<image>" * (2 * (2 + 1) + 2 * (3 + 1) + 1), ()),
    "granite4_vision": ("<image>", "<image>" * (1 + 2 * (2 + 1)), ()),
    "hunyuan_vl": ("<img_pad>", "<img_pad>" * (2 * (3 + 1) + 2), ((1, 1, 1), (1, 2, 4), (1, 1, 1))),
    "kimi_k25": ("<|media_pad|>", "<|media_pad|>" * 12, ((1, 3, 4),)),
    "got_ocr2": ("<imgpad>", "<imgpad>" * 256, ()),
    "janus": ("<image_placeholder>", f"<begin_of_image>{'<image_placeholder>' * 16}<end_of_image>", ()),
    "vipllava": ("<image>", "<image>" * 16, ()),
    "video_llama_3": ("<image>", "<image>" * 28, ((1, 4, 7),)),
    "ovis2": (
        "<image>",
        "<IMG_START>"
        + "".join(f"{'<IMG_ATOM>' * 4}<IMG_{mark}>" for mark in ("GRID", "COL", "ROW", "COL"))
        + f"{'<IMG_ATOM>' * 4}<IMG_END>",
        (),
    ),
}
"""What stands for the picture: the placeholder, the text, and the grids."""
_OWN = {"cohere2_vision": (7, 3, 28, 28), "lfm2_vl": (7, 64, 48), "llama4": (5, 3, 28, 28), "kimi_k25": (48, 3, 14, 14)}
_OWN |= {"minimax_m3_vl": (32, 1176), "step3p7": (1, 3, 112, 112)}
"""Shapes of pixels of families whose image processors transformers has for torchvision only."""

Found = tuple[MediaFormat, dict[str, np.ndarray], str, tuple[tuple[int, int, int], ...]]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Found]]:
    """By family: the model's folder, and what a process without torch makes of the picture."""
    folders = {family: write_processor(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}
    command = [sys.executable, "-c", LOAD, *map(str, folders.values())]
    done = subprocess.run(command, input=png(PICTURE), stdout=subprocess.PIPE, check=True)
    found = pickle.loads(done.stdout)
    return {family: (folder, found[str(folder)]) for family, folder in folders.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_processor_makes_what_transformers_makes(family: str, loaded: dict[str, tuple[Path, Found]]) -> None:
    folder, (format, arrays, text, grids) = loaded[family]
    assert (format.image_placeholder, text, grids) == TEXTS[family]
    expected = ("<bos>", "\n", False) if family in ("paligemma", "colpali") else ("", "", False)
    assert (format.text_start, format.text_end, format.adds_special_tokens) == expected
    if family in _OWN:
        assert arrays["pixel_values"].shape == _OWN[family]
        return
    name, _, _, settings, _ = FAMILIES[family]
    loader: Any = AutoImageProcessor
    if family in PUBLISHED:  # version 2's is transformers' own
        sizes = {key: settings[key] for key in ("size", "tile_size")}
        reference: Any = importlib.import_module("transformers").DeepseekOcr2ImageProcessorPil(**sizes)
        if family == "deepseek_ocr":
            assert arrays.pop("tile_grid").tolist() == [[3, 2]]
    else:
        reference = loader.from_pretrained(folder, backend="pil")
    if family in PUBLISHED:
        arguments: dict[str, Any] = {}
    elif family == "mistral3":
        arguments = {"patch_size": settings["patch_size"] * settings["spatial_merge_size"]}
    else:
        arguments = getattr(getattr(importlib.import_module("transformers"), name), "images_kwargs", {})
    expected = reference(PICTURE, **{**arguments, "return_tensors": "pt"})
    for_text = {"num_patches", "num_crops", "rows", "cols", "grids", "num_soft_tokens_per_image"}
    assert arrays.keys() == expected.keys() - for_text
    for key, array in arrays.items():
        assert array.dtype in (np.float32, np.int64)
        np.testing.assert_allclose(array, expected[key], rtol=1e-6, atol=1e-6, err_msg=key)


def test_one_of_several_images_is_not_cut(tmp_path: Path) -> None:
    """LLaVA-OneVision's, by the whole processor for a prompt with two."""
    loader: Any = importlib.import_module("transformers").AutoImageProcessor
    folder = write_processor("llava_onevision", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LOAD.replace("picture, {}", "picture, {}, among_several=True"), str(folder)],
        input=png(PICTURE),
        stdout=subprocess.PIPE,
        check=True,
    )
    _, arrays, text, _ = pickle.loads(done.stdout)[str(folder)]
    other = Image.new("RGB", (20, 90), (9, 90, 200))
    images = loader.from_pretrained(folder, backend="pil")
    processing = importlib.import_module("transformers.models.llava_onevision.processing_llava_onevision")
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
    whole = processing.LlavaOnevisionProcessor.__new__(processing.LlavaOnevisionProcessor)
    vars(whole).update(image_processor=images, tokenizer=tokenizer, num_image_tokens=4, image_token="<image>")
    whole.vision_feature_select_strategy = "full"
    expected = images([[PICTURE, other]], return_tensors="np")
    assert text == whole.replace_image_token(expected, 0) == whole.replace_image_token(expected, 1) == "<image>" * 5
    np.testing.assert_allclose(arrays["pixel_values"][0], expected["pixel_values"][0], rtol=1e-6, atol=1e-6)
    assert arrays["image_sizes"].tolist() == expected["image_sizes"][:1].tolist()


def test_command_a_vision_cuts_pictures_as_transformers_does() -> None:
    """Its functions are read from the file, which cannot be imported without torchvision."""
    package = importlib.import_module("transformers.models.cohere2_vision").__path__[0]
    source = Path(package, "image_processing_cohere2_vision.py").read_text()
    wanted = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    for node in wanted:
        node.decorator_list = []
    theirs: dict[str, Any] = {"np": np}
    exec(compile(ast.Module(list(wanted), []), "cohere2_vision", "exec"), theirs)
    for size in np.random.default_rng(0).integers(1, 5000, (200, 2)).tolist():
        for tile, count in ((512, 12), (364, 6)):
            expected = theirs["get_optimal_tiled_canvas"](tuple(size), (tile, tile), 1, count)
            assert tile_grid(tuple(size), (tile, tile), count) == expected


def test_a_model_without_a_processor_for_pillow_is_refused(tmp_path: Path) -> None:
    write_processor("qwen2_vl", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "perception_lm"}')
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = tmp_path / name
        path.write_text(
            '{"processor_class": "PerceptionLMProcessor", "image_processor_type": "PerceptionLMImageProcessor"}'
        )
    done = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], input=png(PICTURE), capture_output=True)
    assert b"ConfigError: images are not supported for perception_lm" in done.stderr
