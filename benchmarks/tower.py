"""The processor time of encoding one picture, by operation, with random weights in the shape of a real tower.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/tower.py [--size 1024] [--dtype bfloat16] [--compare] [--error]

One thread, and its own processor time, so that other load on the machine affects little. `--compare` also measures the
same with the reference's attention, rotary embedding and activations, which are torch's, and with weights in int8
(--mm-encoder-quantization), in turns. `--error` prints the relative error of features in each precision instead, with
channels behind the norms that are larger than others by some factors, and weights that are smaller by these.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace
from typing import Any

import torch
from media_checkpoint import MEDIA_SHAPES
from torch.profiler import ProfilerActivity, profile

from quire import kernels
from quire.engine.architecture.families import from_hf_config, of_text
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.linear import Linear
from quire.engine.models.make_tower import make_tower
from quire.engine.models.tower import Tower
from quire.engine.protocol.media import MediaItem, MediaRun
from quire.kernels import dispatch

_OURS = ("attention", "activate")


_LARGE_CHANNELS = 64
"""One of so many."""


def random_tower(
    shape: str, dtype: torch.dtype, quantization: kernels.Quantization | None = None, factor: float = 1.0
) -> Tower:
    """The tower of `MEDIA_SHAPES`, with packed weights. The function that it stands for does not depend on the
    factor."""
    torch.manual_seed(0)
    media = from_hf_config(of_text(MEDIA_SHAPES[shape])).media
    assert media is not None
    torch.set_default_dtype(dtype)
    tower = make_tower(media.tower, Parallel())
    torch.set_default_dtype(torch.float32)
    for name, parameter in tower.named_parameters():
        parameter.data = torch.randn(parameter.shape).mul_(0.02).to(dtype)
        if "norm" in name and name.endswith("weight"):
            parameter.data.fill_(1.0)
        parameter.requires_grad_(False)
    layers: Any = tower.get_submodule("layers")
    for layer in layers.values():
        for norm, linear in (
            (layer.attention_norm, layer.attention.qkv),
            (layer.feed_forward_norm, layer.feed_forward.gate_up),
        ):
            for vector in (norm.weight, norm.bias):
                vector.data[::_LARGE_CHANNELS] *= factor
            linear.weight.data[:, ::_LARGE_CHANNELS] /= factor
    for module in tower.modules():
        if isinstance(module, Linear):
            module.pack(quantization)
    return tower


def print_errors(shape: str, arrays: dict[str, Any], item: MediaItem) -> None:
    """Compare features with those of float32, for the same weights."""
    precisions: tuple[tuple[torch.dtype, kernels.Quantization | None], ...] = (
        (torch.bfloat16, None),
        (torch.float32, "int8"),
        (torch.bfloat16, "int8"),
    )
    for factor in (1.0, 16.0):  # powers of two, which round nothing
        with torch.inference_mode():
            exact = random_tower(shape, torch.float32, None, factor)(dict(arrays), item)
            for dtype, quantization in precisions:
                found = random_tower(shape, dtype, quantization, factor)(dict(arrays), item).float()
                name = f"{str(dtype).removeprefix('torch.')}{', int8 weights' * bool(quantization)}"
                error = (found - exact).norm() / exact.norm()
                print(f"channels larger by {factor:g}: {name}: {error:.2%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="pixels of each side of the picture")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--shape", choices=MEDIA_SHAPES, default="qwen3-vl-2b")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--error", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels.prepare("cpu", complete=False)()
    vision = MEDIA_SHAPES[options.shape]["vision_config"]
    side = options.size // vision["patch_size"]
    pixels = torch.randn(side**2, 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2)
    arrays = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}
    count, merged = side**2 // vision["spatial_merge_size"] ** 2, side // vision["spatial_merge_size"]
    item = MediaItem(b"", "image", 0, count, (MediaRun(0, count, (1, merged, merged)),))
    if options.error:
        return print_errors(options.shape, arrays, item)
    tower = random_tower(options.shape, getattr(torch, options.dtype))
    towers = {"ours": tower, "reference": tower}
    if options.compare:
        towers["int8"] = random_tower(options.shape, getattr(torch, options.dtype), "int8")
    ours: Any = dispatch.PLATFORMS["cpu"]
    others = SimpleNamespace(**{name: getattr(ours, name) for name in ours.__all__ if name not in _OURS})
    best: dict[str, float] = {}
    with torch.inference_mode():
        for _ in range(options.repeats):
            for name in ("ours", "reference", "int8") if options.compare else ("ours",):
                dispatch.PLATFORMS["cpu"] = others if name == "reference" else ours
                begun = time.process_time()
                towers[name](dict(arrays), item)
                best[name] = min(best.get(name, torch.inf), time.process_time() - begun)
        dispatch.PLATFORMS["cpu"] = ours
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            tower(dict(arrays), item)
    for name, seconds in best.items():
        print(f"{name}: {seconds:.2f} s of processor time")
    operations = sorted(profiled.key_averages(), key=lambda each: -each.self_cpu_time_total)
    total = sum(each.self_cpu_time_total for each in operations)
    for each in operations[:6]:
        print(f"{each.self_cpu_time_total / total:6.1%}  {each.key}")


if __name__ == "__main__":
    main()
