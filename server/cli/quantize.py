"""`quire quantize`: write a checkpoint of 16-bit weights as a quantized one."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from quire.engine.architecture.encoder_spec import EncoderSpec
from quire.engine.architecture.families import FAMILIES
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.quantization import recipes
from quire.engine.config.devices import Devices
from quire.engine.config.options import EngineOptions, flag
from quire.engine.config.parallel_config import stage_starts
from quire.engine.config.quantize_request import QuantizeRequest
from quire.engine.config.resolve import fetch_weights, resolve
from quire.engine.protocol.errors import ConfigError, reason_of
from quire.engine.repository.model_folder import is_gguf
from quire.server.config import flags
from quire.server.text.tokenizer import Tokenizer

_LENGTH = 2048
"""Maximum number of tokens of a text; longer texts are divided."""


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """Options of `quire quantize`."""

    scheme: Literal["w4a16", "w4a16_asym", "w8a16", "w8a8", "fp8_dynamic", "fp8_block", "mxfp4a16", "nvfp4a16"] = flag(
        "w4a16",
        "what weights are rounded to, by the names of compressed-tensors: w4a16, w4a16_asym and w8a16 are integers in "
        "groups; w8a8 and fp8_dynamic have 8 bits, with a scale for each output feature, and activations may be "
        "rounded, too; fp8_block has blocks of 128 x 128; mxfp4a16 and nvfp4a16 are 4-bit floats",
    )
    group_size: int | None = flag(
        None, "weights that share a scale, for the integers in groups: 32, 64, 128, 256, or -1 for one (default: 128)"
    )
    ignore: tuple[str, ...] = flag(
        (),
        "modules that are not quantized, besides heads, embeddings and routers: names, or re: and an expression that "
        "matches from the start (default: none)",
        metavar="MODULE",
    )
    method: Literal["rtn", "gptq"] = flag(
        "rtn",
        "how weights are rounded: each to the nearest number (rtn), or so that the layers' outputs on the texts of "
        "--calibration change least (gptq)",
    )
    calibration: str | None = flag(
        None,
        'texts for --method gptq: a text file, or a .jsonl file whose lines are strings or have a "text"',
        metavar="FILE",
    )
    revision: str | None = flag(None, "branch, tag or commit of a Hugging Face repository")
    download_dir: str | None = flag(
        None, "folder that Hugging Face repositories are downloaded to (default: Hugging Face's cache)", metavar="DIR"
    )


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    source = "model folder or Hugging Face repository, with 16-bit weights"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=source)
    parser.add_argument("out", nargs="?", metavar="OUT", help="folder to write, which must be new or empty")
    flags.add_flags(parser, QuantizeOptions)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Quantize, and print how to serve the result. Returns 0."""
    if parsed.out is None:
        raise ConfigError("quire quantize needs MODEL and OUT: what to read, and the folder to write")
    options, out = flags.collect(parsed, QuantizeOptions), Path(parsed.out).expanduser().resolve()
    if (options.method == "gptq") != (options.calibration is not None):
        raise ConfigError("--method gptq and --calibration FILE need each other; use both, or neither")
    if os.path.exists(out) and (not out.is_dir() or any(out.iterdir())):  # exists: false if the name is too long
        raise ConfigError(f"{parsed.out}: exists, and is not an empty folder; use another folder")
    if not os.path.isdir(out.parent):
        raise ConfigError(f"{parsed.out}: {out.parent} is no folder; create it")
    if is_gguf(parsed.model):
        raise ConfigError(f"{parsed.model}: GGUF files are not supported; use the original model with 16-bit weights")
    engine = EngineOptions(
        model=parsed.model,
        revision=options.revision,
        download_dir=options.download_dir,
        device="cpu",
        dtype="float32",
        model_impl="quire",
        distributed_executor_backend="mp",
    )
    everything = Devices("cpu", 1, 1 << 60)  # the model need not fit
    config = resolve(engine, described=everything)
    if out.is_relative_to(config.model.path.resolve()):
        raise ConfigError(f"{parsed.out}: is inside of the model's folder; use another folder")
    if config.model.load_format == "mistral":
        raise ConfigError(f"{parsed.model}: Mistral's own layout is not supported; use the one with a config.json")
    if config.model.quantized is not None:
        raise ConfigError(
            f"{parsed.model} is quantized already, with {config.model.quantized.name}; use the one with 16-bit weights"
        )
    arch, texts = config.model.architecture, tuple[tuple[int, ...], ...]()
    arch = replace(arch, separate_experts=FAMILIES[arch.name].stacks_experts(arch))
    settings = recipes.settings(options.scheme, arch, options.group_size, options.ignore)
    if options.calibration is not None:
        stages = _num_stages(arch)
        texts = _texts(options.calibration, Tokenizer.load(config.model.tokenizer), config.model.max_model_len)
        engine = replace(engine, pipeline_parallel_size=stages)
        config = resolve(engine, described=everything)
    fetch_weights(engine, config)
    config = replace(config, model=replace(config.model, architecture=arch))
    QuantizeRequest(config, out, settings, texts).run()
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(f"{parsed.out}: {size:,} bytes of weights; try it with: quire serve {parsed.out}")
    return 0


def _num_stages(arch: ModelSpec) -> int:
    """A stage for each layer, but for layers that share keys and values or weights: they are rounded together.

    Raises `ConfigError` for encoders.
    """
    if isinstance(arch, EncoderSpec):
        raise ConfigError(f"--method gptq: encoders such as {arch.name} are not supported; use --method rtn")
    return 1 if arch.passes_embedding else 1 + len(stage_starts(arch))


def _texts(path: str, tokenizer: Tokenizer, max_model_len: int) -> tuple[tuple[int, ...], ...]:
    """The token ids of a file's texts."""
    try:
        content = Path(path).expanduser().read_text(encoding="utf-8")
        lines = (
            [json.loads(line) for line in content.splitlines() if line.strip()]
            if path.endswith(".jsonl")
            else [content]
        )
        texts = [line["text"] if isinstance(line, dict) else line for line in lines]
    except (OSError, UnicodeDecodeError, ValueError, KeyError) as error:
        raise ConfigError(f"--calibration {path}: cannot be read: {reason_of(error)}") from None
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f'--calibration {path}: each line must be a JSON string, or an object with a "text"')
    length, found = min(_LENGTH, max_model_len), list[tuple[int, ...]]()
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=True)
        found += [tuple(ids[start : start + length]) for start in range(0, len(ids), length)]
    if not found:
        raise ConfigError(f"--calibration {path}: there is no text in it")
    return tuple(found)
