"""A stage of a model that transformers builds, with the interface of `quire.engine.models.decoder.Decoder`."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_outputs import MultimodalBaseModelOutputWithPast

from quire.engine.architecture.media_spec import TransformersTowerSpec
from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.architecture.quantization.online import Online, with_stars
from quire.engine.architecture.recurrent_spec import TransformersStateSpec
from quire.engine.checkpoints.checkpoint import StoredSlice
from quire.engine.config.engine_config import ModelConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import Batch
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.weight import Shard, Weight
from quire.engine.models.transformers_backend import attention, build
from quire.engine.models.transformers_backend.checkpoint import CheckpointNames, differences, needed
from quire.engine.models.transformers_backend.sharding import PlannedLinear, without_numbers
from quire.engine.models.transformers_backend.states import RecurrentStates, StateCache, has_states
from quire.engine.models.transformers_backend.tower import TransformersTower
from quire.kernels import AdapterRows


class _BaseOutput(nn.Module):
    """Stands in for the base model, and has its attributes; returns its previous output."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.output: Any = None
        self._base = [base]  # in a list, as it is not a part of this

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"][0], name)

    @property
    def decoder(self) -> _BaseOutput:
        """Some heads call this instead of the base model itself."""
        return self

    def forward(self, *inputs: object, **more: object) -> Any:
        return self.output


class _OutputWithoutPictures(MultimodalBaseModelOutputWithPast):
    """The output of a base model of images and text for a step without images: what it would say about them is None."""

    def __getattr__(self, name: str) -> None:
        return None


class TransformersDecoder(nn.Module):
    """The layers `layers` of a model. Parameters have transformers' names and are uninitialized on `device`.

    `hf_model` is transformers' complete model. Its text part is its base, or a part of the base if that takes images,
    too. To compute logits, `hf_model` is called while its base is replaced by one that returns the given hidden
    states. `tower` are the modules that compute features of images, by their paths in the base; None: all that are not
    of the text part. The first stage has them.
    """

    def __init__(
        self,
        config: Any,
        layers: range,
        total: int,
        parallel: Parallel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_length: int,
        trust_remote_code: bool = False,
        tower: Collection[str] | None = (),
    ) -> None:
        super().__init__()
        model = build.build_model(config, dtype, attention.NAME, trust_remote_code)
        self.names = frozenset(model.state_dict())
        """Names of all parameters of the whole model."""
        self.plans = model.pp_plan
        tied_to = dict(model.all_tied_weights_keys)
        self._conversions = get_model_conversion_mapping(model)
        self.places: list[tuple[Weight, Shard, StoredSlice]] = []
        """The slices that fill the parameters, and their location in the checkpoint, once `find` knows them."""
        self.surplus: list[str] = []
        """Tensors of the checkpoint that the whole model does not use."""
        build.fix_frequencies(model, max_length)
        if len(layers) != total:
            build.keep_stage(model, layers, total)
        model.all_tied_weights_keys = tied_to
        modules = build.keep_tower(model, () if layers.start else tower)
        self.tied = build.replace_layers(model, parallel, device, modules)
        """Parameters whose values are another's in the checkpoint."""
        self.hf_model = model
        self.paged = attention.PagedAttention()
        attention.attach(model, self.paged)
        attention.request_biases(model)
        self.cache = StateCache(config=config) if has_states(config) else None
        """For the states of layers that have them."""
        self.states: RecurrentStates | None = None
        """Runs these layers, once `keep_states` knows the states."""
        self.attention_calls: Sequence[int] = layers
        """The stage's layers whose caches the calls of attention in a step use, in order."""
        self.layers, self._dtype = layers, dtype
        base = build.base_of(model)
        parent, name = build.text_of(model)
        self._base, self._text = (base,), (parent.get_submodule(name),)  # in tuples, as they are already in `hf_model`
        self._base_output = _BaseOutput(base)
        self.has_axes = hasattr(base, "get_rope_index")
        """Whether tokens have rotary positions along several axes."""
        self.tower = TransformersTower(base, dtype, device) if modules else None
        names = inspect.signature(self._text[0].forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # as before transformers 5.24
        self._output: type[Any] | None = None

    @staticmethod
    def of(
        model: ModelConfig, arch: TransformersModelSpec, layers: range, parallel: Parallel, device: torch.device
    ) -> TransformersDecoder:
        """Build the decoder for the resolved configuration; embedding models have no head."""
        config = build.read_config(model.path, model.trust_remote_code, model.hf_overrides)
        tower = None if arch.media is None else arch.media.tower
        assert tower is None or isinstance(tower, TransformersTowerSpec)
        decoder = TransformersDecoder(
            config,
            layers,
            arch.num_layers,
            parallel,
            device=device,
            dtype=getattr(torch, model.dtype),
            max_length=model.position_len,
            trust_remote_code=model.trust_remote_code,
            tower=() if tower is None else tower.modules,
        )
        decoder.keep_unpacked(arch.read_directly)
        states = {
            number: layer.state
            for number, layer in enumerate(arch.layers)
            if isinstance(layer.state, TransformersStateSpec)
        }
        decoder.keep_states(states, by_token=arch.continues_by_token)
        decoder.attention_calls = [number for number in arch.attention_calls if number in layers]
        if model.pooling is not None:
            build.drop_head(decoder.hf_model)
        return decoder

    def find(self, stored: Collection[str] | None) -> None:
        """Locate the parameters in a checkpoint with the tensors `stored`; None: a checkpoint with the parameters'
        own names."""
        names = None if stored is None else CheckpointNames(self.hf_model, self.names, stored, self._conversions)
        self.places = list(needed(self.hf_model, self.tied, names))
        self.surplus = [] if names is None else names.surplus

    def quantized_online(self, method: Online) -> Online:
        """The same method with the checkpoint's names in place of the parameters'; `find` knows them."""
        renamed, _ = differences(self.hf_model)
        modules = {
            id(weight): renamed.get(path, path).removesuffix(".weight")
            for path, weight in self.hf_model.named_parameters()
        }
        names, heads = set[str](), set[str]()
        for weight, _, stored in self.places:
            module, name = modules[id(weight)], stored.name.removesuffix(".weight")
            if module in method.heads:
                heads.add(name)
            elif method.is_rounded(module):
                names.add(with_stars(name))
        return replace(method, modules=tuple(sorted(names)), heads=tuple(sorted(heads)))

    def keep_unpacked(self, direct: frozenset[str]) -> None:
        """Do not pack these linear layers (with `*` for layer numbers): the model reads their weights directly."""
        for path, module in self.hf_model.named_modules():
            if isinstance(module, PlannedLinear):
                module.is_read_directly = without_numbers(path) in direct

    def keep_states(self, specs: Mapping[int, TransformersStateSpec], *, by_token: bool) -> None:
        """Run the modules that have the recurrent states `specs`, by layer, one request after another; see
        `RecurrentStates`."""
        own = {number: spec for number, spec in specs.items() if number in self.layers}
        if own:
            self.states = RecurrentStates(
                self.hf_model, self.cache, own, first=self.layers.start, dtype=self._dtype, by_token=by_token
            )

    def forward(self, x: Tensor | None, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        """As `Decoder.forward`: `[tokens, hidden_size]` after this stage, given the previous stage's output."""
        if self.states is not None:
            self.states.begin(batch, caches)
            batch = replace(batch, on_layer=None)  # modules outside of attention write to the caches, too
        calls = [number - self.layers.start for number in self.attention_calls]
        self.paged.begin(batch, [caches[number] for number in calls], calls)
        return self.step(x, batch)

    def step(self, x: Tensor | None, batch: Batch) -> Tensor:
        """As `forward`, once attention and states have begun the step."""
        if x is None and batch.media_features is not None:
            assert batch.media_tokens is not None
            token_ids = batch.token_ids.index_fill(0, batch.media_tokens, 0)  # there may be no such embedding
            embedded: Tensor = self.hf_model.get_input_embeddings()(token_ids)
            x = embedded.index_copy(0, batch.media_tokens, batch.media_features)
        return self.run(x, batch.token_ids, batch.positions if batch.rope_positions is None else batch.rope_positions)

    def run(self, x: Tensor | None, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Run the text part on a flat batch, with the attached attention function. `positions` are `[tokens]`, or
        `[axes, tokens]`."""
        start: dict[str, Tensor] = {"input_ids": token_ids[None]} if x is None else {"inputs_embeds": x[None]}
        cached: dict[str, Any] = {"use_cache": False}
        if self.cache is not None:
            self.cache.positions = positions
            cached = {"use_cache": True, self._cache_name: self.cache}
        output = self._text[0](**start, position_ids=positions.unsqueeze(-2), **cached)
        self._output = type(output) if self._text == self._base else _OutputWithoutPictures
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def features(self, x: Tensor) -> Tensor:
        """As `Decoder.features`; the base model has already normalized `x`."""
        return x

    def logits(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """As `Decoder.logits`: the last stage's `[rows, hidden_size]` → float32 `[rows, vocab_size]`."""
        assert self._output is not None, "logits() called before the first step"
        assert adapters is None
        model, base = self.hf_model, self._base[0]
        name = model.base_model_prefix
        self._base_output.output = self._output(last_hidden_state=x[None])
        setattr(model, name, self._base_output)
        try:
            output = model(inputs_embeds=x[None], use_cache=False)
        finally:
            setattr(model, name, base)
        logits: Tensor = output.logits[0]
        return logits.float()
