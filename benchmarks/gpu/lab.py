"""The input of a part: the device, the model's shape, the sizes of its work, and the measured limits."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import Floor, Machine
from shapes import Shape, write_config, write_pair_tokenizer

MODELS = {
    "8b": Shape(
        *("Llama-3.1-8B", "llama", 32, 4096, 32, 8, 128, 14336, 5e5),
        vocabulary=128_256,
        tied=False,
        positions=131_072,
    ),
    "tiny": Shape("tiny", "llama", 2, 64, 4, 2, 16, 128, 1e4, vocabulary=1024, tied=False, positions=1024),
}


@dataclass(frozen=True)
class Sizes:
    """The amount of work of the parts."""

    context: int
    batch: int
    decode_steps: int
    prefill: int
    attention: tuple[int, int, int, int, int]
    """Requests, tokens of each, query heads, KV heads, head size."""
    sampler: tuple[int, int]
    """Rows, vocabulary."""
    offline: tuple[int, int, int]
    """Requests, prompt tokens, output tokens; concurrency is the number of streams."""
    streams: int
    max_model_len: int
    step_tokens: int
    seconds: float
    """Seconds of the measurement of a kernel."""


FULL = Sizes(1024, 64, 64, 8192, (64, 4096, 64, 8, 128), (256, 128_256), (1000, 512, 256), 256, 8448, 8192, 0.3)
QUICK = Sizes(1024, 64, 16, 8192, (64, 4096, 64, 8, 128), (256, 128_256), (256, 512, 64), 256, 8448, 8192, 0.1)
TINY = Sizes(32, 4, 6, 96, (4, 64, 8, 1, 16), (4, 1000), (8, 16, 8), 4, 128, 128, 0.01)


@dataclass
class Lab:
    """Everything that a part can read."""

    device: str
    tiny: bool
    quick: bool
    scratch: Path
    """The folder for checkpoints."""
    deadline: float
    """The `time.monotonic()` at which the part is terminated."""
    machine: Machine | None = None
    """None if the limits could not be measured."""
    values: dict[str, float] = field(default_factory=dict)
    """The values of the rows so far."""
    data: dict[str, Any] = field(default_factory=dict)
    """Data from earlier parts."""

    @property
    def shape(self) -> Shape:
        return MODELS["tiny" if self.tiny else "8b"]

    @property
    def sizes(self) -> Sizes:
        return TINY if self.tiny else QUICK if self.quick else FULL

    @property
    def dtype(self) -> str:
        return "float32" if self.tiny else "bfloat16"

    @property
    def precision(self) -> str:
        """As `machine` names it."""
        return "f32" if self.tiny else "16-bit"

    def limit(self, read: Callable[[Machine], float]) -> float | None:
        """The floors that follow from the machine's limits, or None if these are unknown."""
        return None if self.machine is None else read(self.machine)

    def floor(self, read: Callable[[Floor], float]) -> float | None:
        """The floors of the model's steps."""
        return self.limit(lambda machine: read(Floor(machine, self.shape, self.precision)))

    @property
    def number_bytes(self) -> int:
        return 4 if self.tiny else 2

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"scratch": str(self.scratch)})

    @staticmethod
    def from_json(text: str) -> Lab:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        machine = fields.pop("machine")
        scratch = Path(fields.pop("scratch"))
        return Lab(**fields, scratch=scratch, machine=Machine(**machine) if machine else None)

    def model_folder(self) -> Path:
        """The model without weights: config.json and a tokenizer, created at the first call."""
        folder = self.scratch / self.shape.name
        if not (folder / "tokenizer.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_config(self.shape, folder)
            write_pair_tokenizer(folder, self.shape.vocabulary)
        return folder

    def engine_options(self, folder: Path, load_format: str = "dummy") -> dict[str, Any]:
        """The fields of `EngineOptions` that every part uses."""
        return {
            "model": str(folder),
            "load_format": load_format,
            "device": self.device,
            "dtype": self.dtype,
            "max_model_len": self.sizes.max_model_len,
            "max_num_seqs": self.sizes.streams,
            "max_num_batched_tokens": self.sizes.step_tokens,
            "spec_method": "none",
            **({"kv_cache_memory_bytes": 1 << 24} if self.tiny else {}),
        }

    def prompts(self, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
        """Prompts of random tokens without common prefixes."""
        source = random.Random(seed)
        return [source.choices(range(300, self.shape.vocabulary), k=tokens) for _ in range(count)]


def synchronize(device: str) -> None:
    """Wait for all work on the device."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Free unreferenced memory."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
