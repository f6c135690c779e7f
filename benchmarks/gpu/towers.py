"""Towers: features beside those of the CPU in float32, tokens of prompts with pictures, and what a picture costs."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import load
import torch
from torch import Tensor

from gpu.engine import Engine
from gpu.lab import Lab, free_memory, synchronize
from gpu.records import Check, Note, Record, Row
from quire import kernels
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.linear import Linear
from quire.engine.models.build import load as load_decoder
from quire.engine.models.make_tower import make_tower
from quire.engine.models.tower import Tower, send_arrays
from quire.engine.protocol.media import MediaItem, MediaRun
from quire.engine.worker.tower_graphs import TowerGraphs
from tests.fakes.families import SIZES, write_model
from tests.fakes.media_prompts import IMAGE, Picture, generate, media_data, media_prompt, write_media_model

_TOLERANCES = {"bfloat16": 6e-2, "float16": 1e-2}
"""The largest error of features, as a share of their norm: tiny random towers round the values of a few layers."""
_VIT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 7,
}
_VIT |= {"initializer_range": 0.2}
_OUTPUT = 24
_PICTURES = 5
_PATCHES = 64
"""Rows and columns of patches of 16 pixels: a picture of 1,024 x 1,024 pixels."""
_REPEATS = 20
"""Of a tower alone."""
_STREAMS = 16
_GAPS = 200
"""Steps of the streams with pictures beside them, and without."""

# Qwen3-VL-2B-Instruct's, as its config.json has them.
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
_TEXT_2B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
_TEXT_2B |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 262_144}
_TEXT_2B |= {"rope_parameters": _ROPE | {"mrope_section": [24, 20, 20]}}
_TOWER_2B: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
}
_TOWER_2B |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]}
_TEXT_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_TEXT_TINY |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 1024, "max_position_embeddings": 1024}
_TEXT_TINY |= {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}}
_TOWER_TINY: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
}
_TOWER_TINY |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}


class _Small(NamedTuple):
    """A tiny random model, and a picture as its processor gives it."""

    folder: Path
    arrays: Mapping[str, Tensor]
    runs: tuple[MediaRun, ...]


def check(lab: Lab) -> Iterator[Record]:
    """Yield checks of features and of tokens, then the rows of a picture at Qwen3-VL-2B's shape. On a GPU, towers must
    not wait for it."""
    kernels.prepare(lab.device)()
    for family in ("Qwen3-VL", "Gemma 3", "Mistral Small 3", "InternVL 3"):
        small = _small(family, lab.scratch / f"tower-{family}")
        expected, *_ = _features(small, "cpu", "float32")
        for dtype, tolerance in _TOLERANCES.items():
            found, replayed, waited = _features(small, lab.device, dtype)
            for features, way in ((found, ""), (replayed, ", captured")):
                error = float((features - expected).norm() / expected.norm())
                detail = f"{len(features)} features, error {error:.2g} of their norm, at most {tolerance:.2g}"
                yield Check(f"features of {family} in {dtype}{way}", error <= tolerance, detail)
        if lab.device != "cpu":
            yield Check(f"the tower of {family} does not wait for the device", not waited, waited)
    for family in ("Qwen3-VL",) if lab.tiny else ("Qwen3-VL", "Gemma 3"):
        yield _tokens(lab, family)
    yield from _picture(lab)


def _small(family: str, folder: Path) -> _Small:
    if family in ("Qwen3-VL", "Gemma 3"):
        model = write_media_model(family, folder)
        prompt = media_prompt(model, [Picture((1, 8, 6))])
        arrays = {name: each for name, each in prompt.inputs.items() if not name.endswith("token_type_ids")}
        return _Small(folder, arrays, prompt.items[0].runs)
    generator = torch.Generator().manual_seed(0)
    text, ids = SIZES | {"num_hidden_layers": 2}, {"image_token_id": IMAGE, "image_token_index": IMAGE}
    if family == "InternVL 3":
        vision = _VIT | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [7, 7]}
        settings = {"text_config": text | {"model_type": "qwen2"}, "vision_config": vision, **ids}
        write_model("InternVLForConditionalGeneration", settings, folder)
        arrays, count = {"pixel_values": torch.randn(2, 3, 28, 28, generator=generator)}, 2 * 2 * 2
    else:
        vision = _VIT | {"model_type": "pixtral", "head_dim": 16, "hidden_act": "silu", "image_size": 126}
        settings = {"text_config": text | {"model_type": "mistral"}, "vision_config": vision, **ids}
        write_model("Mistral3ForConditionalGeneration", settings, folder)
        pixels = torch.randn(1, 3, 42, 28, generator=generator)
        arrays, count = {"pixel_values": pixels, "image_sizes": torch.tensor([[42, 28]])}, 3 * 2
    return _Small(folder, arrays, (MediaRun(0, count),))


def _features(small: _Small, device: str, dtype: str) -> tuple[Tensor, Tensor, str]:
    """On the CPU, in float32; the same by captured layers; and what waited for the device, replaying them again, or
    ""."""
    options = EngineOptions(
        model=str(small.folder),
        device=device,  # type: ignore[arg-type]
        dtype=dtype,  # type: ignore[arg-type]
        max_model_len=64,
        kv_cache_memory_bytes=1 << 22,
        packed_cache="off",
    )
    decoder = load_decoder(config := resolve(options), 0, Parallel(), torch.device(device))
    assert decoder.tower is not None
    item = MediaItem(bytes(16), "image", 0, sum(run.length for run in small.runs), small.runs)
    with torch.inference_mode():
        features = _encode(decoder.tower, small.arrays, item, device)
        waited = _what_waits(decoder.tower, small.arrays, item, device)
        replayed = features
        if _capture(decoder.tower, config, device):
            replayed = _encode(decoder.tower, small.arrays, item, device)
            waited = waited or _what_waits(decoder.tower, small.arrays, item, device)
    return features.cpu().float(), replayed.cpu().float(), waited


def _capture(tower: Tower, config: EngineConfig, device: str) -> bool:
    """Capture the tower's layers if that pays; returns whether it does. A dry run replays them on a CPU."""
    if device == "cpu":
        config = replace(config, graphs=replace(config.graphs, tower_sizes=(64, 128)))
    if not config.graphs.tower_sizes:
        return False
    if not TowerGraphs(tower, config, torch.device(device), Parallel()).capture():
        raise RuntimeError("the layers of the tower cannot be captured; the log says why")
    return True


def _encode(tower: Tower, arrays: Mapping[str, Tensor], item: MediaItem, device: str) -> Tensor:
    """As `EncoderCache` does: the arrays are on the host."""
    features: Tensor = tower(send_arrays(arrays, torch.device(device)), item)
    return features


def _what_waits(tower: Tower, arrays: Mapping[str, Tensor], item: MediaItem, device: str) -> str:
    if device == "cpu":
        return ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        _encode(tower, arrays, item, device)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _tokens(lab: Lab, family: str) -> Check:
    """Greedy tokens in float32, with chunks that end in pictures where the family allows it."""
    model = write_media_model(family, lab.scratch / f"pictures-{family}")
    parts: list[list[int | Picture]] = [[5, Picture((1, 8, 6)), 6], [9], [Picture((1, 4, 4)), 3, Picture((1, 6, 4)), 2]]
    prompts = [media_prompt(model, each, seed=number) for number, each in enumerate(parts[:1] if lab.tiny else parts)]
    count = 4 if lab.tiny else _OUTPUT
    expected = [generate(model, prompt, count) for prompt in prompts]
    engine = Engine(
        {
            "model": str(lab.scratch / f"pictures-{family}"),
            "device": lab.device,
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 20,
            "spec_method": "none",
            "kv_cache_memory_bytes": 1 << 24,
        }
    )
    try:
        for number, prompt in enumerate(prompts):
            engine.add(str(number), prompt.token_ids, count, media=prompt.items)
        engine.run()
        found = [engine.outputs[str(number)] for number in range(len(prompts))]
    finally:
        engine.close()
        free_memory(lab.device)
    return Check(f"tokens of {family} with pictures in float32", found == expected, f"{len(prompts)} prompts")


def _picture(lab: Lab) -> Iterator[Record]:
    """The time to the first token of a prompt with a picture, again about the same one, and streams beside pictures."""
    side = 8 if lab.tiny else _PATCHES
    folder = lab.scratch / "Qwen3-VL-2B"
    text, tower = (_TEXT_TINY, _TOWER_TINY) if lab.tiny else (_TEXT_2B, _TOWER_2B)
    _write_config(folder, text, tower)
    yield _alone(lab, folder, tower)
    begun = time.perf_counter()
    engine = Engine(
        lab.engine_options(folder) | {"max_model_len": 512 if lab.tiny else 4096, "max_num_seqs": 2 * _STREAMS}
    )
    try:
        yield Note(f"tower and decoder of Qwen3-VL-2B's shape loaded in {time.perf_counter() - begun:.1f} s")
        requests = _Requests(engine, side)
        first, again, plain = (list[float]() for _ in range(3))
        for number in range(_PICTURES + 1):  # the first one compiles
            picture = requests.picture(number)
            first.append(requests.first_token(picture))
            again.append(requests.first_token(picture))
            plain.append(requests.first_token(None))
        seconds, repeated, of_text = (statistics.median(each[1:]) for each in (first, again, plain))
        operations = _operations(text, tower, side)
        floor = lab.limit(lambda machine: operations / machine.rate(lab.precision) * 1e3)
        formula = f"{side * 16} x {side * 16} pixels: {operations / 1e12:.2f} T operations / rate"
        yield Row("picture", seconds * 1e3, floor, formula)
        formula = f"{repeated * 1e3:.1f} ms; {of_text * 1e3:.1f} ms for a text of as many tokens, known as well"
        yield Row("picture again", repeated / of_text, None, formula)
        requests.streams(_GAPS // 4, has_pictures=True)  # the step-time model learns
        gaps = [load.percentile(requests.streams(_GAPS, has_pictures=each), 99) for each in (False, True)]
        without, beside = (gap * 1e3 for gap in gaps)
        formula = f"{_STREAMS} streams: {beside:.1f} ms with one picture after another, {without:.1f} ms without"
        yield Row("picture beside", gaps[1] / gaps[0], None, formula)
        synchronize(lab.device)
    finally:
        engine.close()


def _alone(lab: Lab, folder: Path, settings: dict[str, Any]) -> Note:
    """The time of the tower alone, with random weights, kernel by kernel and with captured layers, beside that of its
    operations. From where both take the same time on, capturing more sizes gains nothing
    (`cuda_graph_sizes._LAUNCHED_MULTIPLICATIONS`)."""
    config = resolve(EngineOptions(**lab.engine_options(folder) | {"max_model_len": 512}))
    spec = config.model.architecture.media
    assert spec is not None
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, lab.dtype))
    with torch.device(lab.device):
        tower = make_tower(spec.tower, Parallel())
    torch.set_default_dtype(before)
    for parameter in tower.parameters():
        parameter.requires_grad_(False).normal_(std=0.02)
    for module in tower.modules():
        if isinstance(module, Linear):
            module.pack(None)
    sides = (4, 8) if lab.tiny else (16, 24, 32, 44, _PATCHES)
    times = [[_seconds(tower, side, lab.device) for side in sides]]
    if is_captured := _capture(tower, config, lab.device):
        times.append([_seconds(tower, side, lab.device) for side in sides])
    if (rate := lab.limit(lambda machine: machine.rate(lab.precision))) is not None:
        times.append([_tower_operations(settings, side) / rate for side in sides])
    ways = "kernel by kernel" + " / captured" * is_captured + " / operations alone" * (rate is not None)
    found = [
        f"{side**2:,} patches " + " / ".join(f"{seconds * 1e3:.2f}" for seconds in each)
        for side, *each in zip(sides, *times, strict=True)
    ]
    return Note(f"tower of Qwen3-VL-2B's shape alone, ms {ways}: {', '.join(found)}")


def _seconds(tower: Tower, side: int, device: str) -> float:
    """The median time for a picture of `side` x `side` patches."""
    pixels = torch.randn(side**2, 3 * 2 * 16**2, generator=torch.Generator().manual_seed(side))
    arrays = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}
    run = MediaRun(0, side**2 // 4, (1, side // 2, side // 2))
    item, times = MediaItem(bytes(16), "image", 0, run.length, (run,)), []
    with torch.inference_mode():
        for _ in range(_REPEATS):
            synchronize(device)
            begun = time.perf_counter()
            _encode(tower, arrays, item, device)
            synchronize(device)
            times.append(time.perf_counter() - begun)
    return statistics.median(times[_REPEATS // 4 :])


def _write_config(folder: Path, text: dict[str, Any], tower: dict[str, Any]) -> None:
    """config.json of a Qwen3-VL, whose weights are dummies."""
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {"model_type": "qwen3_vl_text", "rms_norm_eps": 1e-6, "hidden_act": "silu"}
        | {"attention_bias": False, "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 1, **text},
        "vision_config": {"model_type": "qwen3_vl", "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2}
        | {"temporal_patch_size": 2, "hidden_act": "gelu_pytorch_tanh", **tower},
        "image_token_id": 120,
        "video_token_id": 121,
        "vision_start_token_id": 122,
        "vision_end_token_id": 123,
        "tie_word_embeddings": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def _operations(text: dict[str, Any], tower: dict[str, Any], side: int) -> float:
    """Of a picture's tower, and of the prompt through the decoder's layers."""
    hidden, heads, size = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    layer = hidden * size * (2 * heads + 2 * text["num_key_value_heads"]) + 3 * hidden * text["intermediate_size"]
    tokens = side**2 // 4
    decode = text["num_hidden_layers"] * (tokens * layer + tokens**2 * heads * size)
    return float(_tower_operations(tower, side) + 2 * decode)


def _tower_operations(tower: dict[str, Any], side: int) -> float:
    patches, width = side**2, tower["hidden_size"]
    of_patch = tower["depth"] * (4 * width**2 + 2 * width * tower["intermediate_size"])
    merged = (4 * width) ** 2 + 4 * width * tower["out_hidden_size"]
    encode = patches * of_patch + patches // 4 * merged * (1 + len(tower["deepstack_visual_indexes"]))
    return float(2 * (encode + tower["depth"] * 2 * patches**2 * width))  # with attention


class _Requests:
    """Requests with pictures of `side` x `side` patches."""

    def __init__(self, engine: Engine, side: int) -> None:
        self._engine, self._side, self._numbers, self._rng = engine, side, itertools.count(), random.Random(0)

    def _text(self, length: int) -> list[int]:
        return [self._rng.randrange(200, 1000) for _ in range(length)]

    def picture(self, seed: int) -> MediaItem:
        side, generator = self._side, torch.Generator().manual_seed(seed)
        pixels = torch.randn(side**2, 3 * 2 * 16**2, generator=generator)
        data = media_data({"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])})
        digest = hashlib.blake2b(data.content, digest_size=16).digest()
        run = MediaRun(0, side**2 // 4, (1, side // 2, side // 2))
        return MediaItem(digest, "image", 4, run.length, (run,), data=data)

    def _add(self, item: MediaItem | None, output: int) -> str:
        """A prompt with the picture, or a text of as many tokens that was asked before."""
        name, count = str(next(self._numbers)), self._side**2 // 4
        if item is None:
            self._engine.add(name, [*[7] * (4 + count), *self._text(12)], output)
        else:
            self._engine.add(name, [5, 6, 7, 8, *[120] * count, *self._text(12)], output, media=[item])
        return name

    def first_token(self, item: MediaItem | None) -> float:
        """Seconds until the first token of a request alone."""
        self._add(item, 1)
        begun = time.perf_counter()
        self._engine.run()
        return time.perf_counter() - begun

    def streams(self, steps: int, *, has_pictures: bool) -> list[float]:
        """Seconds of as many steps, in which `_STREAMS` texts are written; beside them, pictures come one by one."""
        engine = self._engine
        for _ in range(_STREAMS):
            name = str(next(self._numbers))
            engine.add(name, self._text(16), steps + 8)
        picture, seeds = "", itertools.count(next(self._numbers))
        gaps, last = list[float](), time.perf_counter()
        for step in engine.steps():
            gaps.append(step.ended - last)
            engine.scheduler.token_budget.learn(step.plan, gaps[-1])
            last = step.ended
            if has_pictures and len(gaps) < steps and (not picture or engine.outputs[picture]):
                picture = self._add(self.picture(next(seeds)), 1)
                last = time.perf_counter()  # making the picture is not the engine's
        return gaps[4:steps]
