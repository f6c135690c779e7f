"""Resolves the model (`EngineOptions` → `ModelConfig`): its architecture, data type, length and pooling. No torch."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.engine.architecture import quantization
from quire.engine.architecture.encoder_spec import EncoderSpec, bidirectional
from quire.engine.architecture.families import (
    ENCODERS,
    FAMILIES,
    from_hf_config,
    length_key,
    of_text,
    transformers_backend,
)
from quire.engine.architecture.families.values import check_values
from quire.engine.architecture.media_spec import TransformersTowerSpec
from quire.engine.architecture.model_spec import ModelSpec, TransformersModelSpec
from quire.engine.architecture.quantization import online
from quire.engine.architecture.quantization.form import INT4_GROUPS
from quire.engine.architecture.quantization.method import DTYPES, Method
from quire.engine.architecture.recurrent_spec import RWKVSpec
from quire.engine.config import checkpoint_tensors, classifier, devices, media_config, pooling
from quire.engine.config.devices import FP4_CAPABILITY, FP8_CAPABILITY, Devices
from quire.engine.config.engine_config import DTYPE_BYTES, ModelConfig, ParallelConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.pooling import Pooling
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.repository import gguf_folder, mistral_folder, model_files, model_folder, tokenizer_files

logger = logging.getLogger(__name__)

_SAMPLING_DEFAULTS = (
    "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Parameters that generation_config.json may set, besides `max_new_tokens`, which is `max_tokens`."""
_LEAST_DEFAULT_LEN = 8192
"""Minimum length of a model whose length is not set, unless its own is shorter. If the KV cache holds fewer tokens, the
model is refused: users would not expect so short a length."""
_SHORTEST = 2
"""A prompt and an output of a token each."""
_MIN_LAYER_BYTES = 24 << 10
"""Minimum host memory of a layer on its rank, whatever its size: the Python objects of its modules and parameters."""
_FEW_LAYERS = 1 << 14
"""Layers that every host can describe: a host that runs only the API needs no memory for them."""


def resolve(options: EngineOptions, available: Devices) -> ModelConfig:
    """Read config.json and resolve the model. Raises `ConfigError` if it is not supported."""
    path = model_folder.locate(
        options.model, options.revision, options.download_dir, has_tokenizer=options.tokenizer is None
    )
    hf_config = model_files.with_overrides(model_files.read_json(path / "config.json"), options.hf_overrides or {})
    hf_config["architectures"] = _architecture_names(path, hf_config, options.trust_remote_code)
    key_of_length = length_key(hf_config)
    hf_config = of_text(
        hf_config, [each for name in hf_config["architectures"] for each in classifier.base_names(name)]
    )
    generation, generation_config = _generation_config(options, path)
    settings = _quantization_settings(path, hf_config)
    try:
        quantized = quantization.read(settings)
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from None
    tokenizer = path
    if options.tokenizer is not None:
        tokenizer = model_folder.locate(options.tokenizer, None, options.download_dir)
    arch, pooler = _architecture(options, path, hf_config, tokenizer)
    if arch.media is not None and media_config.is_text_only(options, arch.media):
        arch = replace(arch, media=None)
    if arch.media is not None and options.mm_encoder_tp_mode == "data":
        arch = replace(arch, media=replace(arch.media, tower=replace(arch.media.tower, divides_items=True)))
    arch = _without_dual_chunks(arch, hf_config, options)
    load_format = _choose_load_format(options, path)
    arch = checkpoint_tensors.as_stored(arch, path, load_format)
    requested = _choose_quantization(options, quantized, available.kind)
    packed = requested if available.kind == "cpu" and (requested == "int8" or requested == "int4") else None
    if requested is not None and packed is None:
        quantized = online.of(requested, arch, quantized)
    if load_format == "dummy":
        quantized = None
    _check_attention_backend(options, arch, available)
    dtype = _choose_dtype(options, available, hf_config, arch)
    return ModelConfig(
        path=path,
        tokenizer=tokenizer,
        architecture=arch,
        dtype=dtype,
        stored_dtype=_stored_dtype(dtype, available, hf_config, arch, path, load_format),
        quantization=packed,
        tower_quantization=_tower_quantization(options, arch, available.kind),
        max_model_len=(length := _choose_max_model_len(options, arch, pooler, key_of_length)),
        min_model_len=_min_model_len(options, length),
        load_format=load_format,
        hf_overrides=options.hf_overrides or {},
        sampling_defaults=_sampling_defaults(generation, generation_config),
        max_output_tokens=_max_output_tokens(options, generation_config),
        packed_cache=0.0 if options.packed_cache == "off" else options.packed_cache,
        quantized=quantized,
        quantized_outer=checkpoint_tensors.quantized_outer(path, load_format, arch, quantized),
        rounded_types=_rounded_types(available) if quantized is not None else ("int8",),
        eos_token_ids=_eos_token_ids(
            {generation: generation_config, str(path / "config.json"): hf_config}, tokenizer, arch.vocab_size
        ),
        trust_remote_code=options.trust_remote_code,
        seed=options.seed,
        max_logprobs=options.max_logprobs,
        attention_backend=options.attention_backend,
        pooling=pooler,
    )


def _architecture(
    options: EngineOptions, path: Path, hf_config: dict[str, Any], tokenizer: Path
) -> tuple[ModelSpec, Pooling | None]:
    """Return the model's architecture, and its pooling if it is an embedding model or a classifier."""
    names: list[str] = hf_config["architectures"]
    classifies = next((name for name in names if classifier.base_names(name)), None)
    if classifies is None:
        # AutoModel saves a decoder without its head under a name such as Qwen3Model.
        stems = [name.removesuffix("Model") for name in names if name.endswith("Model")]
        full_names = [f"{each}ForCausalLM" for stem in stems for each in (stem, stem.removesuffix("Text"))]
    else:
        full_names = [name for name in classifier.base_names(classifies) if name in FAMILIES][:1]
        if not full_names or options.model_impl == "transformers":
            raise ConfigError(
                f"{path / 'config.json'}: {classifies} is not supported: classifiers need a model that Quire has an "
                "implementation of its own of (docs/reference/models.md), and cannot use --model-impl transformers"
            )
    is_headless = not any(name in FAMILIES for name in names) and any(name in FAMILIES for name in full_names)
    arch = _model_spec(options, path, {**hf_config, "architectures": full_names} if is_headless else hf_config)
    token_layer = "" if isinstance(arch, TransformersModelSpec) else FAMILIES[arch.name].token_layer
    is_headless = is_headless or bool(token_layer)
    has_pooling = (path / pooling.MODULES).exists() or pooling.JINA_STRATEGY in hf_config
    computes_vectors = options.runner == "pooling" or is_headless or has_pooling
    is_pooling = options.runner != "generate" and (computes_vectors or isinstance(arch, EncoderSpec))
    if is_pooling and not isinstance(arch, EncoderSpec):
        arch = _two_way(arch, hf_config)
    _check_task(options, arch, hf_config, classifies, is_headless=is_headless, is_pooling=is_pooling)
    if not is_pooling:
        return arch, None
    if classifies is not None:
        return arch, classifier.read(classifies, hf_config, arch, tokenizer)
    default: pooling.Mode = "mean" if isinstance(arch, EncoderSpec) else "lasttoken"
    return arch, pooling.read(path, hf_config, arch.hidden_size, default=default, token_layer=token_layer)


def _two_way(arch: ModelSpec, hf_config: Mapping[str, Any]) -> ModelSpec:
    """Return a decoder that pools with attention in both directions, if config.json says so."""
    is_two_way = hf_config.get("is_causal") is False
    if not isinstance(arch, TransformersModelSpec):
        is_two_way |= FAMILIES[arch.name].complete(hf_config).get("use_bidirectional_attention") is True
    if not is_two_way:
        return arch
    if arch.media is not None and arch.media.joins_prompt:
        return replace(arch, media=replace(arch.media, joins_text=True))
    return bidirectional(arch)


def _check_task(
    options: EngineOptions,
    arch: ModelSpec,
    hf_config: Mapping[str, Any],
    classifies: str | None,
    *,
    is_headless: bool,
    is_pooling: bool,
) -> None:
    """Reject options that the model does not support. `classifies` is its name as a classifier; None: it is not one."""
    if options.runner == "generate":
        if classifies is not None:
            raise ConfigError(f"{classifies} is a classifier and cannot generate text; omit --runner generate")
        if isinstance(arch, EncoderSpec):
            raise ConfigError(f"{arch.name} is an encoder and cannot generate text; omit --runner generate")
        if is_headless:
            names = ", ".join(hf_config["architectures"])
            raise ConfigError(f"{names} has no head to generate text; use it with --runner pooling")
    elif isinstance(arch, EncoderSpec):
        if options.pipeline_parallel_size > 1:
            raise ConfigError(
                f"--pipeline-parallel-size {options.pipeline_parallel_size}: pipeline parallelism is not supported for "
                f"encoders such as {arch.name}; use --tensor-parallel-size"
            )
        if classifies is not None and arch.name not in ENCODERS:
            raise ConfigError(f"{classifies}: classifiers with bidirectional attention in a decoder are not supported")
    elif is_pooling and hf_config.get("use_bidirectional_attention") and not (arch.media and arch.media.joins_text):
        raise ConfigError(f"{arch.name}: bidirectional attention (use_bidirectional_attention) is not supported")


def _model_spec(options: EngineOptions, path: Path, hf_config: dict[str, Any]) -> ModelSpec:
    """Return the model's spec for Quire's own implementation, or else for transformers'."""
    native_error = None
    names: list[str] = hf_config["architectures"]
    name = ", ".join(names) or "it"
    if family := next((FAMILIES[name] for name in names if name in FAMILIES), None):
        fitting = devices.free_host_memory() // _MIN_LAYER_BYTES * options.pipeline_parallel_size
        try:
            nullable = {name for name, value in family.defaults.items() if value is None}
            check_values(family.complete(hf_config), nullable, max(fitting, _FEW_LAYERS))
        except ConfigError as error:
            raise ConfigError(f"{path / 'config.json'}: {error}") from None
    if options.model_impl != "transformers":
        try:
            return from_hf_config(hf_config, media=not options.language_model_only)
        except ConfigError as error:
            if options.model_impl == "quire":
                remedy = "; omit --model-impl quire" * (family is None)
                raise ConfigError(f"{path / 'config.json'}: {error}{remedy}") from None
            native_error = error
    is_own = model_folder.is_gguf(options.model) or mistral_folder.is_layout([file.name for file in path.iterdir()])
    if is_own and hf_config.get("rope_interleave"):
        raise ConfigError(
            f"{options.model}: {native_error or '--model-impl transformers'}; transformers' implementation is not "
            "supported for this layout, whose queries and keys are in another order; use the model with a config.json"
        )
    request = transformers_backend.DescribeRequest(
        path=path,
        architecture=names[0] if names else None,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        length=_requested_len(options),
        media=not options.language_model_only,
        trust_remote_code=options.trust_remote_code,
        hf_overrides=options.hf_overrides or {},
    )
    try:
        transformers_backend.check_known(names, hf_config, options.trust_remote_code)
        arch = transformers_backend.describe(request)
    except ConfigError as error:
        reason = f"{name} is not supported by transformers' implementation: {error}"
        if family is not None and native_error is not None:
            reason = f"{native_error}; and {reason}"
        elif native_error is not None:
            reason = (
                f"{name} is not supported: it has no implementation of Quire's own, and transformers' cannot be used: "
                f"{error}; docs/reference/models.md lists the models that are supported"
            )
        raise ConfigError(f"{path / 'config.json'}: {reason}") from None
    if native_error is not None:
        reason = f"{native_error}" if arch.name in FAMILIES else f"{arch.name} has no implementation of Quire's own"
        logger.warning("%s; using transformers' implementation (--model-impl transformers)", reason)
    return arch


def _architecture_names(path: Path, hf_config: dict[str, Any], trust_remote_code: bool) -> list[str]:
    """Return the names in config.json, or, if they are not known, the class that transformers builds for `model_type`.

    Publishers spell names in their own way (LLaMAForCausalLM), name a class of their own code, or omit them.
    """
    file = path / "config.json"
    names, kind = hf_config.get("architectures") or [], hf_config.get("model_type")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{file}: architectures must be a list of names, got {names!r}")
    if (
        any(name in FAMILIES for name in names)
        or (trust_remote_code and hf_config.get("auto_map"))
        or (names and transformers_backend.knows(names))
        or (names and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names))
    ):
        return names
    built = transformers_backend.architectures(kind, with_headless=not names) if isinstance(kind, str) else []
    if not built and not names:
        raise ConfigError(
            f"{file}: no architectures, and no model_type that transformers knows; set one of them, for example with "
            """--hf-overrides '{"architectures": ["LlamaForCausalLM"]}'"""
        )
    if not built:
        return names
    name = next((each for each in built if each in FAMILIES), built[0])
    reason = f"transformers has no {', '.join(names)}" if names else "no architectures"
    logger.warning("%s: %s; using %s, which transformers builds for model_type %s", file, reason, name, kind)
    return [name]


def _choose_load_format(options: EngineOptions, path: Path) -> Literal["safetensors", "pt", "mistral", "gguf", "dummy"]:
    if options.load_format != "auto":
        return options.load_format
    if model_folder.is_gguf(options.model):
        return "gguf"
    found = model_files.find_load_format(options.model, options.revision, path)
    if found == "pt":
        logger.warning(
            "%s has its weights only as pytorch_model*.bin; only tensors are unpickled, and no code in them is run",
            options.model,
        )
    return found


def _choose_dtype(options: EngineOptions, available: Devices, hf_config: dict[str, Any], arch: ModelSpec) -> str:
    dtype: str = options.dtype
    if dtype == "auto":
        stored = "float32" if available.kind == "cpu" else _checkpoint_dtype(hf_config)
        dtype = stored if stored in DTYPE_BYTES else "bfloat16"
    if dtype == "float16" and any(isinstance(layer.state, RWKVSpec) for layer in arch.layers):
        raise ConfigError(
            f"float16 is not supported for {arch.name}, whose hidden states may exceed its range; use --dtype bfloat16"
        )
    return dtype


def _stored_dtype(
    dtype: str, available: Devices, hf_config: dict[str, Any], arch: ModelSpec, path: Path, load_format: str
) -> str | None:
    """The type of most of the checkpoint's matrices, if it has 16 bits, the model is float32, and its products widen
    weights. While the files are not here, config.json states the type."""
    if available.kind != "cpu" or dtype != "float32" or isinstance(arch, TransformersModelSpec):
        return None
    sizes = Counter[str]()
    with contextlib.suppress(ConfigError, OSError):
        headers: dict[str, model_files.TensorInfo] = {}
        if load_format == "gguf":
            headers = gguf_folder.headers(path)
        elif load_format in ("safetensors", "mistral"):
            headers = model_files.read_headers(path, load_format)
        for info in headers.values():
            if info.dtype in DTYPES and len(info.shape) > 1:
                sizes[DTYPES[info.dtype]] += math.prod(info.shape)
    found = sizes.most_common(1)[0][0] if sizes else _checkpoint_dtype(hf_config)
    return found if found in ("bfloat16", "float16") else None


def _checkpoint_dtype(hf_config: dict[str, Any]) -> Any:
    return hf_config.get("dtype") or hf_config.get("torch_dtype")


def _quantization_settings(path: Path, hf_config: dict[str, Any]) -> Any:
    """Return the settings of a quantized checkpoint, from config.json or from the file that older tools write."""
    settings = hf_config.get("quantization_config") or hf_config.get("compression_config")
    if settings:
        # DeepSeek-V4 has one of the settings beside them.
        own = {name: hf_config[name] for name in ("expert_dtype",) if name in hf_config}
        return {**own, **settings} if isinstance(settings, dict) and settings.get("quant_method") == "fp8" else settings
    files = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
    for name, method in files.items():
        if (path / name).exists():
            return {"quant_method": method, **model_files.read_json(path / name)}
    return None


def _choose_quantization(
    options: EngineOptions, quantized: Method | None, device: str
) -> Literal["int8", "int4", "fp8", "mxfp4"] | None:
    """Return how to quantize while loading; checks the name of the checkpoint's own method."""
    requested = options.quantization
    if requested is None or (device == "cpu" and (requested == "int8" or requested == "int4")):
        return requested
    if requested in ("int8", "int4") or (quantized is None and requested in ("fp8", "mxfp4")):
        if options.load_format == "dummy":
            others = ", or use int8 or int4" * (device == "cpu")
            raise ConfigError(
                f"--quantization {requested} is not supported with --load-format dummy on {device}; omit it{others}"
            )
        return requested
    if quantized is None or quantized.name != requested:
        found = "not quantized" if quantized is None else f"quantized with {quantized.name}"
        raise ConfigError(
            f"--quantization {requested}: the checkpoint is {found}"
            "; omit the flag, or use int8 or int4, which quantize while loading (16-bit weights also fp8 and mxfp4)"
        )
    logger.warning("--quantization %s has no effect: the checkpoint is quantized with it", requested)
    return None


def _tower_quantization(options: EngineOptions, arch: ModelSpec, device: str) -> Literal["int8"] | None:
    """Return how to quantize the tower while loading; None: not at all, or there is no tower."""
    requested = options.mm_encoder_quantization
    if requested is None or arch.media is None:
        return None
    if device != "cpu" or isinstance(arch.media.tower, TransformersTowerSpec):
        where = f"on {device}" if device != "cpu" else "for towers that transformers computes"
        raise ConfigError(f"--mm-encoder-quantization {requested} is not supported {where}; omit it")
    return requested


def _rounded_types(available: Devices) -> tuple[Literal["int8", "fp8", "fp4"], ...]:
    """Return the types in which the device multiplies rounded inputs. Few GPUs have FP4: a GPU of
    unknown compute capability counts as having none."""
    if available.kind != "cuda":
        return ("int8",)
    least = min(available.capabilities().values(), default=FP8_CAPABILITY)
    return (
        ("int8", "fp8", "fp4") if least >= FP4_CAPABILITY else ("int8", "fp8") if least >= FP8_CAPABILITY else ("int8",)
    )


def _requested_len(options: EngineOptions) -> int | None:
    return None if options.max_model_len == "auto" else options.max_model_len


def _min_model_len(options: EngineOptions, length: int) -> int:
    """Return the least that `length` may be reduced to, if the KV cache is too small for it; 0: it may not."""
    match options.max_model_len:
        case "auto":
            return min(_SHORTEST, length)
        case None:
            return min(_LEAST_DEFAULT_LEN, length)
    return 0


def _choose_max_model_len(options: EngineOptions, arch: ModelSpec, pooler: Pooling | None, key: str) -> int:
    """Return --max-model-len, or else the model's length; for embedding models, the length they were trained for.

    `key` is that of the model's length in config.json. The length is reduced later if the KV cache does not hold it
    (`memory_plan.with_cache`).
    """
    requested = _requested_len(options)
    if requested is not None and requested > arch.max_position:
        scaling = f"{key.rpartition('.')[0]}.rope_scaling".lstrip(".")
        raise ConfigError(
            f"--max-model-len {requested} is more than the model's {arch.max_position} positions; where its publisher "
            f"says how to extend them, set --hf-overrides.{key} {requested} and --hf-overrides.{scaling}"
        )
    trained_length = pooler.max_length if pooler is not None else None
    length = requested or min(arch.max_position, trained_length or arch.max_position)
    if pooler is None and length < 2:
        raise ConfigError(f"--max-model-len {length} has no room for a prompt and an output token; use 2 or more")
    return length


def _without_dual_chunks(arch: ModelSpec, hf_config: Mapping[str, Any], options: EngineOptions) -> ModelSpec:
    """Limit the length to one at which dual chunk attention (Qwen2.5-1M) is the same as ordinary attention: positions
    of queries and keys differ from it only between chunks (https://arxiv.org/abs/2402.17463).
    """
    name = "dual_chunk_attention_config"
    dual = hf_config.get(name)
    if not dual:
        return arch
    parts = ("chunk_size", "original_max_position_embeddings")
    lengths = [dual.get(part) for part in parts] if isinstance(dual, dict) else [None]
    if not all(type(length) is int and length > 0 for length in lengths):
        raise ConfigError(f"config.json: {name} must have {' and '.join(parts)}, got {dual!r}")
    limit, requested = min(arch.max_position, *lengths), _requested_len(options)
    if requested is not None and limit < requested <= arch.max_position:
        raise ConfigError(
            f"--max-model-len {requested}: dual chunk attention ({name}), which the model needs beyond {limit} tokens, "
            f"is not supported; use --max-model-len {limit} or less"
        )
    if requested is None and limit < arch.max_position:
        logger.warning(
            "%s is not supported: the length is limited to %s of the model's %s tokens, where it has no effect",
            name,
            f"{limit:,}",
            f"{arch.max_position:,}",
        )
    return replace(arch, max_position=limit)


def _generation_config(options: EngineOptions, path: Path) -> tuple[str, dict[str, Any]]:
    """Return where the default sampling parameters are given, and the parameters as given."""
    overrides = options.override_generation_config or {}
    if unknown := sorted(overrides.keys() - {*_SAMPLING_DEFAULTS, "max_new_tokens", "eos_token_id"}):
        raise ConfigError(
            f"--override-generation-config: {unknown[0]} is not supported; the defaults that can be set are "
            f"{', '.join(_SAMPLING_DEFAULTS)}, max_new_tokens and eos_token_id"
        )
    is_own = options.generation_config in ("auto", "vllm")
    file = (path if is_own else Path(options.generation_config).expanduser()) / "generation_config.json"
    if not is_own and not file.exists():
        raise ConfigError(f"--generation-config {options.generation_config}: expected a folder with {file.name}")
    found = model_files.read_json(file) if file.exists() else {}
    if options.generation_config == "vllm":
        found = {"eos_token_id": found.get("eos_token_id")}
    return f"{file}{', --override-generation-config' * bool(overrides)}", {**found, **overrides}


def _sampling_defaults(source: str, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {name: value for name in _SAMPLING_DEFAULTS if (value := generation_config.get(name)) is not None}
    if (longest := generation_config.get("max_new_tokens")) is not None:
        if type(longest) is not int or longest < 1:
            raise ConfigError(f"{source}: max_new_tokens must be at least 1, got {longest!r}")
        defaults["max_tokens"] = longest
    try:
        msgspec.convert(defaults, SamplingParams)
    except msgspec.ValidationError as error:  # also for the ranges that `SamplingParams` checks
        text, _, name = str(error).removeprefix("Expected ").partition(" - at `$.")
        raise ConfigError(f"{source}: {f'{name[:-1]} must be of type ' * bool(name)}{text}") from None
    return defaults


def _max_output_tokens(options: EngineOptions, generation_config: Mapping[str, Any]) -> int | None:
    """Return max_new_tokens if the user has set it; in the model's own file it is only a default, as in vLLM."""
    overrides = options.override_generation_config or {}
    is_set = "max_new_tokens" in overrides or options.generation_config not in ("auto", "vllm")
    return generation_config.get("max_new_tokens") if is_set else None


def _eos_token_ids(configs: Mapping[str, Mapping[str, Any]], tokenizer: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the end-of-sequence ids of the first configuration, by its file, that has any, and the tokenizer's.

    Fine-tunes for chats often name the end of a turn only in their tokenizer.
    """
    found = (
        (source, config["eos_token_id"]) for source, config in configs.items() if config.get("eos_token_id") is not None
    )
    source, eos = next(found, ("", []))
    ids = eos if isinstance(eos, list) else [eos]
    if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in ids):
        raise ConfigError(
            f"{source}: eos_token_id must be a token id, from 0 to {vocab_size - 1}, or a list of them, got {eos!r}"
        )
    own = tokenizer_files.eos_token_id(tokenizer)
    return tuple(dict.fromkeys([*ids, own] if own is not None and own < vocab_size else ids))


def _check_attention_backend(options: EngineOptions, arch: ModelSpec, available: Devices) -> None:
    """Check --attention-backend as far as possible before the ranks start."""
    backend = options.attention_backend
    if backend == "auto":
        return
    requested = f"--attention-backend {backend}"
    if isinstance(arch, EncoderSpec):
        raise ConfigError(f"{requested} is not supported for encoders, which have a single implementation; omit it")
    if available.kind == "cpu" and backend != "reference":
        raise ConfigError(f"{requested} needs a GPU; omit it to use the CPU kernels")
    if backend == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        raise ConfigError(
            f"{requested}: flashinfer is not installed; run pip install 'quire-llm[flashinfer]', or omit the flag"
        )


def check_rank(model: ModelConfig, arch: ModelSpec, parallel: ParallelConfig) -> None:
    """Check that the layers can be sharded and quantized; `arch` has the sizes of a rank."""
    tp = parallel.tensor_parallel_size
    arch.check_divides(tp)
    if model.quantization is None:
        return
    for columns in {each.columns for layer in set(arch.layers) for each in layer.matrices(arch.hidden_size, tp)}:
        if model.quantization == "int4" and columns % INT4_GROUPS[-1]:
            raise ConfigError(
                f"--quantization int4 needs linear layers whose input size is a multiple of {INT4_GROUPS[-1]}; with "
                f"--tensor-parallel-size {tp} a layer of this model has {columns}; use int8"
            )
