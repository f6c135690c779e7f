"""Videos, compared with the processors of transformers, which use torch (tests/fakes/video_reference.py)."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from quire.server.media.video_families import FAMILIES as VIDEO_FAMILIES
from quire.server.media.video_families import in_words
from tests.fakes.arrays import npy
from tests.fakes.processors import write_processor
from tests.fakes.video_reference import Case

FAMILIES = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "glm4v": "Glm4vProcessor",
    "glm46v": "Glm46VProcessor",
    "gemma4": "Gemma4Processor",
    "llava_onevision": "LlavaOnevisionProcessor",
    "internvl": "InternVLProcessor",
    "smolvlm": "SmolVLMProcessor",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeProcessor",
}
OURS = """
import pickle, sys
from quire.server.media import video
from quire.server.media.processor import Processor
from quire.server.media.types import MediaSettings

found = []
for folder, file, options, settings, video.HAS_PYAV in pickle.load(sys.stdin.buffer):
    try:
        processor = Processor(MediaSettings(model=folder, **settings))
        with open(file, "rb") as opened:
            item = processor.video(opened, options, 2**22, 2**28, is_array=file.endswith(".npy"))
        found.append((item.arrays, item.text, item.grids, item.seconds_per_frame))
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
assert not sys.modules.get("torch")
sys.stdout.buffer.write(pickle.dumps(found))
"""
BY_TIME = ("qwen3_vl", "glm4v", "glm46v")
"""Families whose prompts have a text for each step in time."""
LEVELS = 2
"""Of 255: by how much a resized frame may differ. torch rounds the filter's weights to fewer bits than Pillow."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {"fps": 1.5},
    {"num_frames": 6, "fps": None},
    {"fps": 2.0, "cap_pixels_per_frame": True, "size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56 * 8}},
)


def write_video(path: Path, codec: str, count: int, width: int, height: int, rate: int = 10, rotation: int = 0) -> Path:
    """A picture that moves."""
    noise = np.random.default_rng(0).integers(0, 255, (height // 8 + 2, width // 8 + 2, 3)).astype(np.uint8)
    image = np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for each in range(count):
            frame = av.VideoFrame.from_ndarray(np.roll(image, 3 * each, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


Settings = dict[str, Any]
Found = tuple[dict[str, Any], str, tuple[tuple[int, int, int], ...], float]
COMPARED = [
    (family, name, options)
    for family, name, options in itertools.product(FAMILIES, ("h264", "mpeg4"), OPTIONS)
    if VIDEO_FAMILIES[FAMILIES[family]].arguments >= options.keys()
    and (family != "gemma4" or not options.get("fps"))  # a rate is an error in transformers
]
COMPARED += [("glm4v", "h264", {}), ("glm46v", "h264", {}), ("glm46v", "mpeg4", {}), ("gemma4", "h264", {})]
COMPARED += [("smolvlm", "h264", {}), ("smolvlm", "h264", {"fps": 0.1}), ("smolvlm", "mpeg4", {"num_frames": 1})]
SET: dict[str, tuple[str, str, Settings, Settings, bool]] = {
    "webm": ("qwen3_vl", "webm", {"num_frames": 21}, {}, True),
    "plain": ("qwen2_vl", "mpeg4", {"num_frames": 2}, {}, True),
    "turned": ("qwen2_vl", "turned", {"num_frames": 2}, {}, True),
    "--mm-processor-kwargs": ("qwen3_vl", "h264", {}, {"processor_kwargs": {"num_frames": 4}}, True),
    "--media-io-kwargs": ("qwen3_vl", "h264", {}, {"io_kwargs": {"video": {"num_frames": 4}}}, True),
    "request": ("qwen3_vl", "h264", {"num_frames": 4}, {"io_kwargs": {"video": {"fps": 10}}}, True),
    "negative": ("qwen3_vl", "h264", {}, {"processor_kwargs": {"fps": -1}}, True),
    "unknown": ("qwen3_vl", "h264", {}, {"io_kwargs": {"video": {"backend": "opencv"}}}, True),
    "without PyAV": ("qwen3_vl", "h264", {}, {}, False),
    "file, qwen2_5_vl": ("qwen2_5_vl", "mpeg4", {"num_frames": 4}, {}, True),
    "frames, qwen2_5_vl": ("qwen2_5_vl", "frames, qwen2_5_vl", {}, {}, True),
    "file, qwen3_vl": ("qwen3_vl", "mpeg4", {"num_frames": 4}, {}, True),
    "frames, qwen3_vl": ("qwen3_vl", "frames, qwen3_vl", {}, {}, True),
    "another family": ("llava", "h264", {}, {}, True),
    "another size": ("by edge", "h264", {}, {}, True),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Videos, and models' folders by family."""
    root = tmp_path_factory.mktemp("videos")
    folders = {family: root / family for family in (*FAMILIES, "llava")}
    for family, folder in folders.items():
        folder.mkdir()
        write_processor(family, folder)
    (root / "by edge").mkdir()
    folders["by edge"] = write_processor("internvl", root / "by edge")
    (root / "by edge" / "video_preprocessor_config.json").write_text('{"size": {"shortest_edge": 28}}')
    mpeg4 = write_video(root / "b.mp4", "mpeg4", 7, 300, 40, rate=2)
    # A phone's: the matrix of the track (ISO/IEC 14496-12, 8.3.2) turns the frames to the right.
    data, one, last = mpeg4.read_bytes(), b"\0\1\0\0", b"\x40\0\0\0"
    matrix = one + bytes(12) + one + bytes(12) + last
    at = data.index(matrix, data.index(b"tkhd"))
    turned = bytes(4) + one + bytes(4) + b"\xff\xff\0\0" + bytes(16) + last
    (root / "turned.mp4").write_bytes(data[:at] + turned + data[at + len(matrix) :])
    with av.open(str(mpeg4)) as container:
        pictures = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    arrays = {}
    for family in ("qwen2_5_vl", "qwen3_vl"):
        numbers = VIDEO_FAMILIES[FAMILIES[family]].sample(7, 2.0, {"num_frames": 4, "temporal_patch_size": 2})
        arrays[f"frames, {family}"] = path = root / f"{family}.npy"
        path.write_bytes(b"".join(map(npy, (pictures[numbers], numbers, np.array([2.0, 7.0])))))
    return {
        **arrays,
        "h264": write_video(root / "a.mp4", "libx264", 33, 160, 96),
        "mpeg4": mpeg4,
        "turned": root / "turned.mp4",
        "webm": write_video(root / "c.webm", "libvpx-vp9", 21, 96, 160),
        **folders,
    }


@pytest.fixture(scope="module")
def ours(files: dict[str, Path]) -> list[Found | str]:
    """What our processor makes of `COMPARED` and then of `SET`, in a process without torch."""
    asked: list[tuple[str, str, Settings, Settings, bool]] = [(*case, {}, True) for case in COMPARED]
    asked += SET.values()
    order = pickle.dumps([(str(files[family]), str(files[name]), *others) for family, name, *others in asked])
    done = subprocess.run([sys.executable, "-P", "-c", OURS], input=order, check=True, capture_output=True)
    return list(pickle.loads(done.stdout))


@pytest.fixture
def found(ours: list[Found | str]) -> dict[str, Found]:
    return {name: each for name, each in zip(SET, ours[len(COMPARED) :], strict=True) if not isinstance(each, str)}


@pytest.mark.slow
def test_videos_are_processed_as_transformers_does(
    files: dict[str, Path], ours: list[Found | str], tmp_path: Path
) -> None:
    cases = [
        Case(str(files[family]), str(files[name]), options, str(tmp_path / f"{i}.npz"))
        for i, (family, name, options) in enumerate(COMPARED)
    ]
    command = [sys.executable, "-m", "tests.fakes.video_reference"]
    subprocess.run(command, input=msgspec.json.encode(cases), check=True, capture_output=True)
    for (family, _, _), case, own in zip(COMPARED, cases, ours, strict=False):
        assert not isinstance(own, str)
        (arrays, text, grids, seconds), theirs = own, np.load(case.target)
        pixels, expected = arrays["pixel_values_videos"], theirs["pixel_values_videos"]
        assert pixels.dtype == expected.dtype == np.float32
        assert pixels.shape == expected.shape
        difference = np.abs(pixels - expected) * 255 * min(VIDEO_FAMILIES[FAMILIES[family]].defaults["image_std"])
        assert difference.max() < LEVELS + 0.01
        assert (difference > 0.01).mean() < (0.02 if family == "smolvlm" else 0.01)  # it resizes twice
        assert text == str(theirs["text"])
        if "video_grid_thw" in theirs:
            assert (arrays["video_grid_thw"] == theirs["video_grid_thw"]).all()
            time, height, width = theirs["video_grid_thw"][0] // (1, 2, 2)
            time //= 2 if family == "ernie4_5_vl_moe" else 1
            assert grids == (((1, height, width),) * time if family in BY_TIME else ((time, height, width),))
        else:
            assert grids == ()
        if "video_position_ids" in theirs:
            assert (arrays["video_position_ids"] == theirs["video_position_ids"]).all()
        told = float(theirs["second_per_grid_ts"][0]) if family == "qwen2_5_vl" else 0.0
        assert seconds == pytest.approx(told)


def test_frames_are_sampled_as_torch_counts() -> None:
    """Qwen2-VL's processor counts in float32, whose rounding decides some frames."""
    for total, count in itertools.product((4, 7, 33, 100, 1001, 99_999), (2, 4, 6, 48, 98, 768)):
        if count <= total:
            settings = {"num_frames": count, "temporal_patch_size": 2}
            expected = torch.arange(0, total, total / count).int()
            assert VIDEO_FAMILIES["Qwen2VLProcessor"].sample(total, 10.0, settings).tolist() == expected.tolist()


def test_frames_are_counted_in_words() -> None:
    """As by num2words, which transformers' processor of SmolVLM takes."""
    words = {8: "eight", 20: "twenty", 64: "sixty-four", 100: "one hundred", 215: "two hundred and fifteen"}
    words |= {3001: "three thousand and one", 17_342: "seventeen thousand, three hundred and forty-two"}
    assert {number: in_words(number) for number in words} == words


def test_a_video_whose_header_does_not_count_its_frames(found: dict[str, Found]) -> None:
    arrays, text, _, _ = found["webm"]
    assert arrays["video_grid_thw"][0][0] == 11
    assert text.startswith("<0.1 seconds><|vision_start|><|video_pad|>")
    assert "<2.0 seconds>" in text


def test_a_video_is_turned_as_its_header_says(found: dict[str, Found]) -> None:
    (plain, *_), (turned, *_) = found["plain"], found["turned"]
    time, height, width = plain["video_grid_thw"][0]
    assert turned["video_grid_thw"][0].tolist() == [time, width, height]
    # Its first patch, of [3, time, rows, columns], was the last one of the first column. Patches are merged 2 × 2.
    first = turned["pixel_values_videos"][0].reshape(3, 2, 14, 14)[:, 0]
    below = plain["pixel_values_videos"][(height // 2 - 1) * width * 2 + 2].reshape(3, 2, 14, 14)[:, 0]
    assert np.abs(first - np.rot90(below, -1, axes=(1, 2))).max() < 0.1


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_frames_are_those_of_the_file(found: dict[str, Found], family: str) -> None:
    """Qwen2.5-VL's time between frames, and the times in the text of Qwen3-VL."""
    (of_file, *told), (of_frames, *others) = found[f"file, {family}"], found[f"frames, {family}"]
    assert told == others
    for name, array in of_file.items():
        np.testing.assert_array_equal(array, of_frames[name])


def test_the_operator_and_requests_set_the_sampling(found: dict[str, Found]) -> None:
    by_kwargs, by_io, by_request = (found[each] for each in ("--mm-processor-kwargs", "--media-io-kwargs", "request"))
    assert by_kwargs[1] == by_io[1] == by_request[1]
    assert by_kwargs[0]["video_grid_thw"][0][0] == 2


def test_what_cannot_be_is_refused(ours: list[Found | str]) -> None:
    told = dict(zip(SET, ours[len(COMPARED) :], strict=True))
    assert "ConfigError: --mm-processor-kwargs or --media-io-kwargs: invalid value of fps" in told["negative"]
    assert "not supported as an argument of this model's video processor: backend" in told["unknown"]
    assert "MediaRefused: videos need PyAV on the server: install quire-llm[video]" in told["without PyAV"]
    for name in ("another family", "another size"):
        assert "MediaRefused: videos are not supported for this model" in told[name]
