"""Measures a model that transformers builds, and checks that it runs correctly here. Runs in its own process, for
`quire.engine.architecture.families.transformers_backend`.

A pickled request arrives on standard input; the answer goes to standard output. Only config.json (and code beside it)
is read. First, the model runs over two tokens, with linear layers and experts that return zeros and weights that take
no memory: this shows each layer's attention calls and the sizes on each rank. Then a small random model of the same
kind runs both in transformers and in Quire.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.families.family import LENGTHS, extended_length, stated_length
from quire.engine.architecture.families.transformers_backend import DescribeRequest
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.media_spec import MediaSpec, TransformersTowerSpec
from quire.engine.architecture.model_spec import TransformersLayerSpec, TransformersModelSpec
from quire.engine.architecture.recurrent_spec import TransformersStateSpec
from quire.engine.architecture.spec_parts import MatrixShape
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.linear import Linear
from quire.engine.layers.moe import ExpertMatrices
from quire.engine.models.transformers_backend import attention, build, compare
from quire.engine.models.transformers_backend.checkpoint import differences
from quire.engine.models.transformers_backend.decoder import TransformersDecoder
from quire.engine.models.transformers_backend.experts import PlannedExperts, is_experts
from quire.engine.models.transformers_backend.pictures import (
    Picture,
    examples,
    heads_ratio,
    image_token,
    run_tower,
    shrink_with_tower,
    values_per_feature,
)
from quire.engine.models.transformers_backend.sharding import PlannedEmbedding, PlannedLinear, without_numbers
from quire.engine.models.transformers_backend.shrink import shrink
from quire.engine.models.transformers_backend.states import RecordingCache, has_states
from quire.engine.protocol.errors import ConfigError

_UNLIMITED = 1 << 20
_KINDS = frozenset(
    ("full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe")
)
"""The supported types of layers: with attention, a recurrent state, both or neither."""
_OTHER_STATE = "it keeps a recurrent state outside of transformers' cache, which is not supported"


def describe(request: DescribeRequest) -> TransformersModelSpec:
    """Describe the model. Raises `ConfigError` if it is not supported, or if transformers or the model's own code
    fails."""
    try:
        return _describe(request)
    except ConfigError:
        raise
    except Exception as error:
        is_single = request.tensor_parallel_size == request.pipeline_parallel_size == 1
        layout = "" if is_single else "in this layout "
        raise ConfigError(f"transformers cannot run it {layout}({_first_line(error)})") from None


def _describe(request: DescribeRequest) -> TransformersModelSpec:
    config = build.read_config(request.path, request.trust_remote_code, request.hf_overrides)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # tensors are dequantized while they are read
    name = _check_kind(config, request.architecture)
    torch.set_num_threads(1)
    pictures: list[Picture] = []
    if build.sees(config) and request.media:
        pictures = examples(config, request)
    described = _measure(name, config, request)
    small, reference, picture = _small(config, request, pictures)
    if picture is not None:
        described = replace(described, media=_media(config, small, reference, request, pictures, picture))
    specs = _states(small, request)[0] if has_states(small) else {}
    by_token = compare.compare(small, reference, request, described.read_directly, specs, picture)
    return replace(described, continues_by_token=by_token)


def _check_kind(config: Any, architecture: str | None) -> str:
    """Check that the model generates text from text alone; returns the architecture's name."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "recurrent_kv_cache_mode", "per_loop") != "per_loop":
        raise ConfigError(f"recurrent_kv_cache_mode {text.recurrent_kv_cache_mode!r} is not supported; use 'per_loop'")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError("it is an encoder-decoder model, which is not supported")
    if (parts := build.media_parts(config)) and not build.sees(config):
        raise ConfigError(f"it takes more than text ({', '.join(parts)}), which is not supported")
    if kinds := set(getattr(text, "layer_types", None) or ()) - _KINDS:
        raise ConfigError(f"its layers of {', '.join(sorted(kinds))} are not supported")
    return architecture or str((config.architectures or [type(config).__name__])[0])


class _MirroredRank(Parallel):
    """The first of `size` ranks, whose peers return the same values as this one."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)


def _build_without_weights(
    config: Any, request: DescribeRequest, dtype: torch.dtype
) -> tuple[TransformersDecoder, attention.CallRecorder]:
    """A whole model, and a recorder of its attention calls."""
    parallel, length = _MirroredRank(request.tensor_parallel_size), request.length or _UNLIMITED
    decoder = TransformersDecoder(
        copy.deepcopy(config),
        range(1),
        1,
        parallel,
        device=torch.device("meta"),
        dtype=dtype,
        max_length=length,
        trust_remote_code=request.trust_remote_code,
    )
    recorder = attention.CallRecorder(request.tensor_parallel_size)
    attention.attach(decoder.hf_model, recorder)
    _replace_by_zeros(decoder)
    return decoder, recorder


def _states(config: Any, request: DescribeRequest) -> tuple[dict[int, TransformersStateSpec], list[int]]:
    """The states that each layer keeps in transformers' cache, and the layers that call attention, in order."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        decoder, _ = _build_without_weights(config, request, torch.bfloat16)
    finally:
        torch.set_default_dtype(before)
    decoder.cache = cache = RecordingCache(decoder.hf_model.config, decoder.hf_model)
    with torch.inference_mode():
        decoder.run(None, torch.tensor([1, 2]), torch.tensor([0, 1]))
    return cache.specs(), cache.attention_layers


def _measure(name: str, config: Any, request: DescribeRequest) -> TransformersModelSpec:
    tp = request.tensor_parallel_size
    decoder, recorder = _build_without_weights(config, request, torch.float32)
    _check_class(decoder.hf_model, name)
    try:
        with torch.inference_mode():
            hidden = decoder.run(None, torch.tensor([1, 2]), torch.tensor([0, 1]))
            logits = decoder.logits(hidden)
    except RuntimeError:
        heads = getattr(config.get_text_config(decoder=True), "num_key_value_heads", None)
        if isinstance(heads, int) and heads % tp:
            raise ConfigError(f"--tensor-parallel-size {tp} does not divide its {heads} KV heads") from None
        raise
    direct = _read_directly(decoder)
    sizes = _sizes(decoder, direct)
    calls = recorder.calls
    states: dict[int, TransformersStateSpec] = {}
    is_one_each = len(calls) == sizes.layers
    attending = [*range(len(calls))]
    if decoder.cache is not None:
        states, attending = _states(config, request)
        if not states:
            raise ConfigError(_OTHER_STATE)
        is_one_each = max((*attending, *states)) < sizes.layers
    elif not calls:
        raise ConfigError(build.NO_INTERFACE)
    total = max(sizes.layers, *(number + 1 for number in (*attending, *states)))
    numbers, by_layer = set(attending), dict(zip(attending, calls, strict=False))
    if not sizes.layers or len(calls) != len(numbers) or (decoder.cache is None and len(calls) < sizes.layers):
        raise ConfigError(f"{sizes.layers} layers call attention {len(calls)} times, which is not supported")
    widest = max(sizes.widest * tp, *(call.num_heads * call.num_biases for call in calls), 0)
    layers = tuple(
        TransformersLayerSpec(
            attention=by_layer.get(layer),
            state=states.get(layer),
            feed_forward=MLPSpec(intermediate_size=widest),
            linears=tuple(sizes.linears[layer]),
            others=sizes.others[layer],
        )
        for layer in range(total)
    )
    if request.pipeline_parallel_size > 1:
        if not is_one_each:
            raise ConfigError("--pipeline-parallel-size: its layers run, or call attention, more than once")
        build.keep_stage(decoder.hf_model, range(1), sizes.layers)
    return TransformersModelSpec(
        name=name,
        hidden_size=hidden.shape[-1],
        vocab_size=logits.shape[-1],
        max_position=_length(config.get_text_config(decoder=True).to_dict()),
        layers=layers,
        norm=None,
        tie_embeddings=sizes.is_tied,
        embedding=sizes.embedding,
        head=sizes.head,
        before=sizes.before,
        after=sizes.after,
        read_directly=direct,
        attention_calls=tuple(attending),
        has_key_biases=attention.has_key_biases(decoder.hf_model),
        has_axes=decoder.has_axes,
    )


def _length(text: dict[str, Any]) -> int:
    """The model's length, with the scaling of its rotary positions. It already includes scaling by layer type."""
    length = next((int(v) for name in LENGTHS.split() if isinstance(v := text.get(name), int) and v > 0), _UNLIMITED)
    rope = text.get("rope_parameters") or {}
    if "rope_type" in rope:
        factor, original = rope.get("factor") or 1.0, rope.get("original_max_position_embeddings") or length
        length = extended_length(max(length, stated_length(text)), rope["rope_type"], factor, original)
    return min(length, text.get("keep_window_size") or length)  # of more keys, some are masked


def _check_class(model: Any, name: str) -> None:
    built = type(model).__name__
    if built != name:
        raise ConfigError(f"it is not a causal language model in transformers, which builds {built} from its config")
    if model.config.get_text_config(decoder=True) is not model.config and not build.sees(model.config):
        # A part declares the modalities of the whole model.
        taken = {model.input_modalities} if isinstance(model.input_modalities, str) else set(model.input_modalities)
        if taken != {"text"}:
            raise ConfigError(f"it takes more than text ({', '.join(sorted(taken))}), which is not supported")
    is_in_cache = has_states(model.config)
    if is_in_cache or getattr(model, "_is_stateful", False):
        takes_cache = getattr(model, "_supports_default_dynamic_cache", lambda: True)()
        if not (is_in_cache and takes_cache):
            raise ConfigError(_OTHER_STATE)
    attending: Any = getattr(*build.text_of(model)) if build.sees(model.config) else model
    if not attending._can_set_attn_implementation():
        raise ConfigError(build.NO_INTERFACE)


class _MeasuredSizes:
    """Sizes on a rank: for each layer, by the first number in a parameter's path, and before and after the layers."""

    def __init__(self) -> None:
        self.linears: dict[int, list[MatrixShape]] = defaultdict(list)
        self.others: dict[int, int] = defaultdict(int)
        self.embedding = self.head = MatrixShape(0, 0)
        self.layers = self.before = self.after = self.widest = 0
        self.is_tied = False


def _sizes(decoder: TransformersDecoder, direct: frozenset[str]) -> _MeasuredSizes:
    sizes, model = _MeasuredSizes(), decoder.hf_model
    within_base, head = {*build.base_of(model).modules()}, model.get_output_embeddings()
    text = model.config.get_text_config(decoder=True)
    sizes.layers = int(text.num_hidden_layers)
    renamed, _ = differences(model)
    for path, module in model.named_modules():
        numbers = [int(part) for part in path.split(".") if part.isdigit()]
        within = bool(numbers) and numbers[0] < sizes.layers
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            count = weight.numel()
            if module is head and name == "weight":
                sizes.is_tied = bool(getattr(module, "shares_weight", False))
                stored = decoder.tied.get(f"{path}.weight", f"{path}.weight").removesuffix(".weight")
                stored = sizes.embedding.module if sizes.is_tied else stored
                sizes.head = MatrixShape(len(weight), weight.shape[1], module=stored)
                sizes.after += 0 if sizes.is_tied else count
            elif not within:
                is_after = module is head or path.endswith("norm") or module not in within_base
                sizes.after += count * is_after
                sizes.before += count * (not is_after)
                if isinstance(module, PlannedEmbedding):
                    sizes.embedding = MatrixShape(len(weight), weight.shape[1], module=path)
            elif isinstance(module, ExpertMatrices) and name == "weight":
                number, rows, columns = weight.shape
                name, inputs = renamed[f"{path}.weight"], module.in_features
                sizes.linears[numbers[0]].append(MatrixShape(rows, columns, number, name, inputs))
                sizes.widest = max(sizes.widest, rows)
            elif (
                isinstance(module, PlannedLinear)
                and name == "weight"
                and not module.is_router
                and without_numbers(path) not in direct
            ):
                sizes.linears[numbers[0]].append(MatrixShape(len(weight), weight.shape[1], 1, path, module.in_features))
                sizes.widest = max(sizes.widest, len(weight))
            else:
                sizes.others[numbers[0]] += count
    return sizes


class _Zeros(kernels.PackedLinear):
    """A linear layer's product without weights."""

    def __init__(self, rows: int) -> None:
        self._rows, self.is_called = rows, False

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        self.is_called = True
        return x.new_zeros(len(x), self._rows)


def _read_directly(decoder: TransformersDecoder) -> frozenset[str]:
    """Linear layers that are never called, with `*` for layer numbers: models read their weights directly."""
    called: dict[str, bool] = defaultdict(bool)
    for path, module in decoder.hf_model.named_modules():
        if isinstance(module, PlannedLinear):
            assert isinstance(module._product, _Zeros)
            called[without_numbers(path)] |= module._product.is_called
    return frozenset(path for path, is_called in called.items() if not is_called)


def _replace_by_zeros(decoder: TransformersDecoder) -> None:
    """Make linear layers and experts return zeros; other parameters become zeros that share one element of memory."""
    for module in decoder.hf_model.modules():
        if isinstance(module, Linear):
            module._product = _Zeros(len(module.weight))
        for name, weight in module._parameters.items():
            if weight is not None and weight.device.type == "meta":
                module._parameters[name] = nn.Parameter(
                    torch.zeros((), dtype=weight.dtype).expand(weight.shape), requires_grad=False
                )
        if isinstance(module, PlannedExperts) or is_experts(module):
            module.forward = lambda x, *others, **more: torch.zeros_like(x)


def _small(config: Any, request: DescribeRequest, pictures: Sequence[Picture]) -> tuple[Any, Any, Picture | None]:
    """A small config of the same kind, transformers' model of it, and the picture with the fewest tokens, for it."""
    picture = min(pictures, key=lambda each: len(each.tokens), default=None)
    try:
        ranks = 1 << (request.tensor_parallel_size - 1).bit_length()
        if picture is None:
            values = shrink(config.to_dict(), ranks)
        else:
            values, picture = shrink_with_tower(config, picture, ranks)
        small = type(config).from_dict(values)
        small.architectures = config.architectures
        return small, compare.reference(small, request), picture
    except Exception as error:
        raise ConfigError(
            f"no small model of its kind can be built to compare with transformers ({_first_line(error)})"
        ) from None


def _media(
    config: Any, small: Any, reference: Any, request: DescribeRequest, pictures: Sequence[Picture], picture: Picture
) -> MediaSpec:
    """How the model takes images; `picture` is one for the model `reference`, whose config is `small`."""
    run = run_tower(reference, picture.arrays)
    if len(run.features) != (count := picture.item.num_features):
        raise ConfigError(f"its tower returns {len(run.features)} features of an image with {count} tokens")
    model = build.build_model(copy.deepcopy(config), torch.float32, attention.NAME, request.trust_remote_code)
    base = build.base_of(model)
    stored = (base.get_submodule(path).state_dict().values() for path in run.modules)
    counts = {each.item.num_features for each in pictures}
    tower = TransformersTowerSpec(
        hidden_size=config.get_text_config(decoder=True).hidden_size,
        max_features=counts.pop() if len(counts) == 1 else None,
        modules=run.modules,
        num_parameters=sum(each.numel() for each in chain(*stored) if each.is_floating_point()),
        values_per_feature=values_per_feature(base, run, heads_ratio(config, small)),
    )
    return MediaSpec(tower=tower, image_token_id=image_token(config))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"


def main() -> None:
    """Answer one request; everything else that is printed goes to standard error."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    request: DescribeRequest = pickle.load(sys.stdin.buffer)
    try:
        answer: TransformersModelSpec | str = describe(request)
    except ConfigError as error:
        answer = str(error)
    pickle.dump(answer, output)
    output.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
