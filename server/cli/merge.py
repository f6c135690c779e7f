"""`quire merge`: write a model with an adapter merged into its weights."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from quire.engine.config.devices import Devices
from quire.engine.config.merge_request import merge_request
from quire.engine.config.options import EngineOptions, flag
from quire.engine.config.resolve import fetch_weights, resolve
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository import adapter_folder
from quire.engine.repository.model_folder import is_gguf
from quire.server.config import flags


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """Options of `quire merge`."""

    revision: str | None = flag(None, "branch, tag or commit of the base's Hugging Face repository")
    adapter_revision: str | None = flag(None, "branch, tag or commit of the adapter's Hugging Face repository")
    download_dir: str | None = flag(
        None, "folder that Hugging Face repositories are downloaded to (default: Hugging Face's cache)", metavar="DIR"
    )


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("base", nargs="?", metavar="BASE", help="model folder or Hugging Face repository")
    parser.add_argument(
        "adapter",
        nargs="?",
        metavar="ADAPTER",
        help="folder or Hugging Face repository of a PEFT adapter, or a GGUF file of a LoRA adapter",
    )
    parser.add_argument("out", nargs="?", metavar="OUT", help="folder to write, which must not exist")
    flags.add_flags(parser, MergeOptions)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Merge, and print how to serve the result. Returns 0."""
    if parsed.out is None:
        raise ConfigError("quire merge needs BASE, ADAPTER and OUT: what to read, and the folder to write")
    options, out = flags.collect(parsed, MergeOptions), Path(parsed.out).expanduser().resolve()
    if os.path.exists(out):  # which is false if the name is too long
        raise ConfigError(f"{parsed.out}: exists; use another folder")
    if not os.path.isdir(out.parent):
        raise ConfigError(f"{parsed.out}: {out.parent} is no folder; create it")
    if is_gguf(parsed.base):
        raise ConfigError(f"{parsed.base}: GGUF bases are not supported; use the original model")
    path = Path(parsed.adapter).expanduser()
    if path.suffix != ".gguf":
        path = adapter_folder.locate(parsed.adapter, options.adapter_revision, options.download_dir)
    adapter = adapter_folder.open_adapter(path)
    engine = EngineOptions(
        model=parsed.base,
        revision=options.revision,
        download_dir=options.download_dir,
        device="cpu",
        dtype="float32",
        distributed_executor_backend="mp",
    )
    config = resolve(engine, described=Devices("cpu", 1, 1 << 60))  # the model need not fit
    if out.is_relative_to(config.model.path.resolve()):
        raise ConfigError(f"{parsed.out}: is inside of the base's folder; use another folder")
    if config.model.load_format == "mistral":
        raise ConfigError(f"{parsed.base}: Mistral's own layout is not supported; use the one with a config.json")
    if config.model.quantized is not None:
        raise ConfigError(
            f"{parsed.base} is quantized, with {config.model.quantized.name}, which is not supported; use the model "
            "with 16-bit weights"
        )
    fetch_weights(engine, config)
    request, trained_on = merge_request(config.model, adapter, out), adapter.settings.get("base_model_name_or_path")
    if isinstance(trained_on, str) and Path(trained_on).name not in ("", Path(parsed.base).expanduser().resolve().name):
        print(f"note: the adapter was trained on {trained_on[:200]!r}, and is merged into {parsed.base}")
    request.run()
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(f"{parsed.out}: {size:,} bytes of weights; try it with: quire serve {parsed.out}")
    return 0
