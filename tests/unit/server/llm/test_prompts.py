"""The input that the Python API passes on to the engine."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.llm import pooling
from quire.server.llm.prompts import (
    TextPrompt,
    Tokenization,
    TokensPrompt,
    chat_input,
    check_supported,
    joined,
    process_chat,
    process_prompt,
    split,
)
from quire.server.media.arrays import read_embeds, read_frames
from quire.server.media.images import MediaRefused
from tests.fakes.api_server import Server

FRAMES = np.random.default_rng(0).integers(0, 256, (2, 4, 6, 3), dtype=np.uint8)
EMBEDS = np.arange(24, dtype=np.float32).reshape(6, 4)


async def test_priority_and_salt_of_a_prompt_reach_the_engine(server: Server) -> None:
    for params in (None, SamplingParams(max_tokens=3)):
        salted = await process_prompt(server.frontend, {"prompt": "a", "cache_salt": "s"}, params, 3)
        assert (salted.given.priority, salted.given.cache_salt, salted.text) == (3, "s", "a")
        plain = await process_prompt(server.frontend, [70, 71], params, -2)
        assert (plain.given.priority, plain.given.cache_salt, plain.text) == (-2, None, None)


async def test_priority_of_a_conversation_reaches_the_engine(server: Server) -> None:
    chat = replace(chat_input(), messages=[{"role": "user", "content": "a"}])
    assert (await process_chat(server.frontend, chat, None, 3)).given.priority == 3


async def test_prompts_are_truncated_and_tokenized_as_asked(server: Server) -> None:
    whole = server.tokenizer.encode("all kinds", add_special_tokens=True)
    assert len(whole) > 3
    processed = await process_prompt(server.frontend, "all kinds", SamplingParams(truncate_prompt_tokens=3), 0)
    assert processed.given.prompts == [whole[-3:]]
    asked = Tokenization.of({"add_special_tokens": False, "truncate_prompt_tokens": 2})
    processed = await process_prompt(server.frontend, "all kinds", None, 0, tokenization=asked)
    assert processed.given.prompts == [server.tokenizer.encode("all kinds", add_special_tokens=False)[-2:]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"padding": True}, "field `padding`; only add_special_tokens and truncate_prompt_tokens are supported"),
        ({"truncate_prompt_tokens": "x"}, "Expected `int | null`, got `str` - at `$.truncate_prompt_tokens`"),
        ({"add_special_tokens": 1}, "Expected `bool | null`, got `int` - at `$.add_special_tokens`"),
        ([1], "Expected `object`, got `array`"),
    ],
)
def test_tokenization_options_are_checked(given: Any, message: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        Tokenization.of(given)
    assert str(refused.value).startswith("tokenization_kwargs: ")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "given", [{"truncate_prompt_tokens": "x"}, {"truncation_side": "middle"}, {"dimensions": "x"}], ids=str
)
def test_types_of_pooling_options_are_checked(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(InvalidParameter, match=f"^{name}: "):
        pooling.vector_options(None, **given) if name == "dimensions" else pooling.options(**given)


async def test_thinking_budgets_are_for_conversations(server: Server) -> None:
    params = SamplingParams(thinking_token_budget=3)
    with pytest.raises(InvalidParameter, match="thinking_token_budget: only conversations"):
        await process_prompt(server.frontend, "a", params, 0)
    chat = replace(chat_input(), messages=[{"role": "user", "content": "a"}])
    with pytest.raises(InvalidParameter, match="thinking_token_budget: this model has no reasoning"):
        await process_chat(server.frontend, chat, params, 0)


def test_the_parts_of_a_prompt() -> None:
    assert split(TextPrompt(prompt="a", cache_salt="s"))[:3] == ("a", "a", "s")
    assert split(TokensPrompt(prompt_token_ids=[1], prompt="a"))[:3] == ([1], "a", None)
    assert split({"prompt": [1]})[:3] == ([1], None, None)
    assert split({"prompt": "a", "multi_modal_data": None}) == ("a", "a", None, [])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data.image[0]: expected a PIL image"),
        ({"prompt": "a", "multi_modal_data": {"video": np.ones(3)}}, "multi_modal_data.video[0]: expected a file"),
        ({"prompt": "a", "multi_modal_data": {"video": FRAMES * 1.0}}, "multi_modal_data.video[0]: expected a file"),
        (
            {"prompt": "a", "multi_modal_data": {"video": [FRAMES[0], FRAMES[0, 1:]]}},
            "multi_modal_data.video[0]: expected a file",
        ),
        (
            {"prompt": "a", "multi_modal_data": {"video": (FRAMES, {"do_sample_frames": True})}},
            "multi_modal_data.video[0]: do_sample_frames is not supported",
        ),
        (
            {"prompt": "a", "multi_modal_data": {"video": (FRAMES, {"rate": 1})}},
            "multi_modal_data.video[0]: 'rate' of the metadata is not supported",
        ),
        ({"prompt": "a", "multi_modal_data": {"image_embeds": {}}}, "multi_modal_data.image_embeds: expected an array"),
        (
            {"prompt": "a", "multi_modal_data": {"image": {"image_embeds": EMBEDS, "image_grid_thw": [1, 2]}}},
            "multi_modal_data.image: expected arrays of features, and as many grids",
        ),
        (
            {
                "prompt": "a",
                "multi_modal_data": {"image": {"image_embeds": EMBEDS, "image_grid_thw": np.zeros((2, 3), int)}},
            },
            "multi_modal_data.image: expected arrays of features, and as many grids",
        ),
        ({"prompt": "a", "multi_modal_data": {"video": {"a": 1}}}, "multi_modal_data.video[0]: expected a file"),
        (
            {"prompt": "a", "multi_modal_data": {"video": (b"film", {"fps": 5})}},
            "multi_modal_data.video[0]: metadata are for frames",
        ),
        ({"prompt": "a", "multi_modal_data": {"image": "/none"}}, "multi_modal_data.image[0]: expected a PIL image"),
        ({"prompt": "a", "multi_modal_data": {"image": "a\0"}}, "multi_modal_data.image[0]: expected a PIL image"),
        (
            {"prompt": "a", "multi_modal_data": {"image": np.ones((1, 2, 9))}},
            "multi_modal_data.image[0]: expected a PIL",
        ),
        ({"prompt": "a", "multi_modal_data": "x"}, "multi_modal_data: expected a mapping, got str"),
        ({"prompt": "a", "multi_modal_uuids": ["x"]}, "multi_modal_uuids: expected a mapping, got list"),
        ({"prompt": "a", "multi_modal_data": {"audio": b""}}, "multi_modal_data: audio is not supported"),
        (
            {"prompt": "a", "multi_modal_data": {"image": [b"", b""]}, "multi_modal_uuids": {"image": ["x"]}},
            "multi_modal_uuids: 1 for 2 of image",
        ),
        ({"prompt_embeds": np.zeros((2, 3))}, "prompt_embeds: embeddings as prompts are not supported"),
        ({"prompt_tokens_ids": [1]}, "prompt: unknown key 'prompt_tokens_ids'; did you mean prompt_token_ids?"),
        ({"cache_salt": "a"}, "prompt: a mapping must have a prompt or prompt_token_ids"),
    ],
)
def test_keys_that_would_change_the_answer_are_refused(prompt: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        split(prompt)
    assert str(refused.value).startswith(message)


def test_images_and_videos_of_prompts(tmp_path: Path) -> None:
    (file := tmp_path / "a.mp4").write_bytes(b"film")
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    images = [Image.fromarray(pixels), pixels, b"file", "https://a/b", Image.fromarray(pixels).convert("CMYK")]
    prompt = {
        "prompt": "a",
        "multi_modal_data": {"image": images, "video": str(file)},
        "multi_modal_uuids": {"video": "mine"},
        "mm_processor_kwargs": {"max_pixels": 9},
    }
    first, second, third, fourth, fifth, film = split(prompt).media
    for each in (first, second):
        assert (np.asarray(Image.open(io.BytesIO(each.data))) == pixels).all()
    assert (third.data, fourth.url, film.data, film.uuid, film.kind) == (
        b"file",
        "https://a/b",
        b"film",
        "mine",
        "video",
    )
    assert Image.open(io.BytesIO(fifth.data)).mode == "RGB"
    assert first.options == {"max_pixels": 9}
    assert first.param == "multi_modal_data.image[0]"


@pytest.mark.parametrize(
    ("given", "fps", "numbers", "total"),
    [
        (FRAMES, 24.0, [0, 1], 2),
        ([FRAMES], 24.0, [0, 1], 2),
        ((FRAMES, None), 24.0, [0, 1], 2),
        ([(FRAMES, {"fps": None, "total_num_frames": 3})], 24.0, [0, 1], 3),
        ([*FRAMES], 24.0, [0, 1], 2),
        ([Image.fromarray(frame) for frame in FRAMES], 24.0, [0, 1], 2),
        ([(FRAMES, {"fps": 2, "frames_indices": [0, 8], "total_num_frames": 9})], 2.0, [0, 8], 9),
        ((FRAMES, {"fps": 2, "frames_indices": [0, 8], "duration": 4}), 2.0, [0, 8], 9),
    ],
)
def test_frames_of_videos(given: Any, fps: float, numbers: list[int], total: int) -> None:
    (source,) = split({"prompt": "a", "multi_modal_data": {"video": given}}).media
    frames, found, *others = read_frames(source.data)
    assert (frames == FRAMES).all()
    assert (source.is_array, source.kind, found.tolist(), others) == (True, "video", numbers, [fps, total])


@pytest.mark.parametrize("metadata", [{"fps": 0}, {"total_num_frames": 0}])
def test_metadata_of_zero_are_no_defaults(metadata: dict[str, Any]) -> None:
    (source,) = split({"prompt": "a", "multi_modal_data": {"video": (FRAMES, metadata)}}).media
    with pytest.raises(MediaRefused, match="metadata of a video do not fit"):
        read_frames(source.data)


def test_a_file_may_come_with_no_metadata() -> None:
    (source,) = split({"prompt": "a", "multi_modal_data": {"video": (b"film", None)}}).media
    assert (source.data, source.is_array) == (b"film", False)


def test_features_of_images() -> None:
    grids = torch.tensor([[1, 4, 4], [1, 2, 4]])
    together = {"image_embeds": torch.tensor(EMBEDS).bfloat16(), "image_grid_thw": grids}
    prompts: list[Any] = [
        {"image": together},
        {"image_embeds": {**together, "image_grid_thw": grids.numpy()}},
    ]
    for data in prompts:
        first, second = split({"prompt": "a", "multi_modal_data": data}).media
        for source, values, grid in ((first, EMBEDS[:4], (1, 4, 4)), (second, EMBEDS[4:], (1, 2, 4))):
            found, of_file = read_embeds(source.data)
            assert (found == values).all()
            assert (of_file, source.is_array) == (grid, True)
    for each in (EMBEDS.reshape(2, 3, 4), [EMBEDS[:3], EMBEDS[3:]]):
        first, second = split({"prompt": "a", "multi_modal_data": {"image_embeds": each}}).media
        assert (read_embeds(second.data)[0] == EMBEDS[3:]).all()
    mixed = [np.zeros((2, 2, 3), np.uint8), {"image_embeds": EMBEDS}, {"image_embeds": EMBEDS[:3]}]
    assert [each.is_array for each in split({"prompt": "a", "multi_modal_data": {"image": mixed}}).media] == [0, 1, 1]
    for name, value in (("image_embeds", EMBEDS), ("image", {"image_embeds": EMBEDS})):
        content: list[Any] = [{"type": name, name: value, "uuid": "a"}]
        (part,) = chat_input(messages=[{"role": "user", "content": content}]).media
        assert (part.uuid, part.is_array, read_embeds(part.data)[0].tolist()) == ("a", True, EMBEDS.tolist())
        content[0][name] = several = np.stack([EMBEDS, EMBEDS])
        if name == "image":
            content[0][name] = {"image_embeds": several}
        with pytest.raises(InvalidParameter, match=r"content\[0\]: expected the features of one image, not of 2"):
            chat_input(messages=[{"role": "user", "content": content}])


def test_images_and_videos_of_conversations(tmp_path: Path) -> None:
    (file := tmp_path / "a.png").write_bytes(b"png")
    data = "data:image/png;base64,cG5n"
    parts: list[Any] = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": data}},
        {"type": "input_image", "image_url": data},
        {"type": "image", "image": file},
        {"type": "video", "video": "https://a/b"},
    ]
    chat = chat_input(messages=[{"role": "user", "content": parts}, {"role": "user", "content": "b"}])
    assert [source.data for source in chat.media] == [b"png", b"png", b"png", b""]
    assert chat.media[0].param == "messages[0].content[1]"
    kinds = [part["type"] for part in chat.messages[0]["content"]]
    assert kinds == ["text", "image", "image", "image", "video"]
    assert chat.messages[1] == {"role": "user", "content": "b"}


def test_files_are_named_only_in_parts_of_the_python_api(tmp_path: Path) -> None:
    """Those of other types may come from clients."""
    (file := tmp_path / "a.png").write_bytes(b"png")
    for name, field, value, message in (
        ("image_url", "image_url", {"url": str(file)}, "expected a URL of the scheme"),
        ("image_url", "image_url", str(file), "expected a URL of the scheme"),
        ("input_image", "image_url", str(file), "expected a URL of the scheme"),
        ("video_url", "video_url", str(file), "expected a URL of the scheme"),
        ("image_url", "image_url", file, "image_url must be a URL; use the type image for files"),
    ):
        with pytest.raises(InvalidParameter) as refused:
            chat_input(messages=[{"role": "user", "content": [{"type": name, field: value}]}])
        assert str(refused.value).startswith(f"messages[0].content[0]: {message}")


def test_a_part_whose_type_is_no_text_is_left_to_the_template() -> None:
    parts: list[Any] = [{"type": ["image"], "text": "a"}]
    assert chat_input(messages=[{"role": "user", "content": parts}]).messages[0]["content"] == parts


def test_prompts_and_token_ids_are_joined() -> None:
    assert joined("a", None) == ["a"]
    assert joined(None, [1, 2]) == [{"prompt_token_ids": [1, 2], "prompt": None}]
    assert joined(["a", "b"], [[1], [2]])[1] == {"prompt_token_ids": [2], "prompt": "b"}
    with pytest.raises(InvalidParameter, match="prompt_token_ids: 2 for 1 prompts"):
        joined("a", [[1], [2]])
    with pytest.raises(InvalidParameter, match="prompts must be given"):
        joined(None, None)


def test_arguments_of_vllm_that_are_not_supported() -> None:
    check_supported({"prompt_embeds": None, "mm_processor_kwargs": {}, "chat_template_content_format": "auto"})
    with pytest.raises(InvalidParameter, match="prompt_embeds: embeddings as prompts are not supported"):
        check_supported({"prompt_embeds": object()})
    with pytest.raises(TypeError, match="unexpected keyword argument 'prompt_embed'; did you mean prompt_embeds"):
        check_supported({"prompt_embed": None})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'chat_template_kwarg'$"):
        check_supported({"chat_template_kwarg": {}})
