"""A plan becomes a batch, the batch hidden states, and the last stage's hidden states tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from quire import kernels
from quire.engine.cache_groups import cache_specs, count_planes, place_layers
from quire.engine.config import EngineConfig
from quire.engine.layers.attention import Batch, LayerCache
from quire.engine.messages import LOST_TOUCH, PromptLogprobs, StepPlan, StepResult, TokenLogprobs
from quire.engine.models.decoder import Decoder
from quire.engine.models.encoder import Encoder
from quire.engine.models.loading import load_dense, load_model
from quire.engine.parallel import Links, Peers
from quire.engine.worker.balancer import Balancer
from quire.engine.worker.batch import RequestStates, Rows, halve
from quire.engine.worker.pooler import Pooler
from quire.engine.worker.sampler import Sampler

if TYPE_CHECKING:
    from quire.engine.models.by_transformers.decoder import TransformersDecoder

_SCORED_AT_ONCE = (16, 256)
"""Prompt tokens whose logits are held at once: as many as requests may sample, which memory is set aside for, but not
so few that the head is read over and over, nor more than pay."""


def allocate_caches(config: EngineConfig, stage: int, device: torch.device) -> list[LayerCache]:
    """The KV caches of a stage's layers on one rank: planes of blocks, each shared by layers of different groups."""
    cache, groups = config.cache, config.cache.groups
    specs = cache_specs(config.model.architecture, config.parallel.tensor_parallel_size, config.model.max_model_len)
    planes = {
        shape: kernels.allocate_kv_cache(
            layers=count,
            num_blocks=cache.num_blocks,
            kv_heads=shape.heads,
            block_size=cache.block_size,
            head_dim=shape.numbers,
            dtype=getattr(torch, cache.dtype),
            device=device,
            sides=shape.sides,
        )
        for shape, count in count_planes(specs, groups, stage).items()
    }
    places = place_layers(specs, groups, stage)
    layers = config.parallel.stages[stage]
    return [LayerCache(planes[specs[layer].shape][places[layer].plane], places[layer].group) for layer in layers]


class Runner:
    """One rank's share of the model and of the KV cache, driven by plans, one at a time and in order.

    Raises `ConfigError` where the checkpoint's tensors are not those that config.json announces.
    """

    def __init__(self, config: EngineConfig, rank: int, links: Links, device: torch.device) -> None:
        model, cache = config.model, config.cache
        arch = model.architecture
        self._tp, self._pipeline, self._device = links.tp, links.pipeline, device
        self._replicas: Peers | None = None
        """This rank's counterparts in the replicas that share experts; None: there are none."""
        self._split_tokens: int | None = None
        if (experts := links.experts) is not None and experts.dp.size > 1:
            self._replicas, self._split_tokens = experts.dp, experts.config.split_tokens
        self._hidden_size, self._dtype = arch.hidden_size, getattr(torch, model.dtype)
        self._vocab_size = arch.vocab_size
        least, most = _SCORED_AT_ONCE
        self._scored_at_once = max(least, min(most, config.scheduler.max_num_seqs))
        self._model = load_model(config, rank, links.tp, device, experts=links.experts)
        self._balancer = Balancer.of(self._model, config, links, device) if isinstance(self._model, Decoder) else None
        self._pooler: Pooler | None = None
        if model.pooling is not None:
            self._pooler = Pooler(model.pooling, [load_dense(model, dense, device) for dense in model.pooling.dense])
        self._caches = allocate_caches(config, links.pipeline.stage, device) if cache.num_blocks else []
        slots, groups = config.scheduler.max_num_seqs, len(cache.groups)
        self._states = RequestStates(slots, model.max_model_len, cache.block_size, groups)
        self._sampler = Sampler(arch.vocab_size, model.eos_token_ids, device)

    @property
    def receives(self) -> bool:
        """Whether the hidden states of a plan come from another stage."""
        return not self._pipeline.is_first

    def expect(self, plan: StepPlan) -> None:
        """Let the hidden states of a plan to come arrive while others run; plans are expected all, and in order."""
        if self._balancer is not None:
            self._balancer.expect()
        self._pipeline.expect((plan.num_tokens or 1, self._hidden_size), self._dtype)

    def settle(self) -> None:
        """Agree with the other ranks, once all are loaded; raises `ConfigError` where that cannot be."""
        if self._balancer is not None:
            self._balancer.settle()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run a step of this stage. The first rank of the last stage returns the tokens, the others None."""
        if self._replicas is None:
            return self._run(plan, ())
        try:
            replica_tokens, is_active = self._agree(plan, self._replicas)
            result = self._run(plan, replica_tokens)
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise RuntimeError(f"{LOST_TOUCH}: {error}") from error
            raise
        if result is not None:
            result.is_wave_active = is_active
        return result

    def _agree(self, plan: StepPlan, replicas: Peers) -> tuple[tuple[int, ...], bool]:
        """The tokens of each replica in this step, and whether any of them has work."""
        assert plan.has_work is not None
        told = replicas.tell((plan.step, plan.num_tokens, plan.has_work))
        assert all(step == plan.step for step, *_ in told), f"replicas are at steps {[step for step, *_ in told]}"
        return tuple(tokens for _, tokens, _ in told), any(has_work for *_, has_work in told)

    def _run(self, plan: StepPlan, replica_tokens: tuple[int, ...]) -> StepResult | None:
        expert_load = None if self._balancer is None else self._balancer.step()
        result = self._compute(plan, replica_tokens)
        if result is not None:
            result.expert_load = expert_load
        return result

    def _compute(self, plan: StepPlan, replica_tokens: tuple[int, ...]) -> StepResult | None:
        rows = self._states.apply(plan)
        if not plan.num_rows and not any(replica_tokens):
            return self._pass_on(plan)
        batch = self._states.batch(rows, self._device, replica_tokens)
        if self._split_tokens is not None and max(replica_tokens) >= self._split_tokens:
            batch = replace(batch, halves=halve(batch, rows.counts))
        if not plan.num_rows:
            return self._pass_on(plan, batch)
        hidden = self._model(self._receive(plan.num_tokens), batch, self._caches)
        if self._pooler is not None and self._pipeline.is_last:
            return self._pool(plan, rows, hidden, batch.sampled, self._pooler)
        scores = self._score(rows, hidden) if rows.scoring and self._pipeline.is_last else {}
        self._states.advance(rows)
        if not self._pipeline.is_last:
            self._pipeline.send(hidden)
            return None
        logits = self._decoder.logits(hidden[batch.sampled])
        result = self._sample(plan, rows, logits) if self._tp.rank == 0 else None
        if result is not None:
            result.prompt_logprobs = scores
        if self._pipeline.is_first:
            self._keep(rows, result)
        return result

    @property
    def _decoder(self) -> Decoder | TransformersDecoder:
        assert not isinstance(self._model, Encoder)
        return self._model

    def _pool(self, plan: StepPlan, rows: Rows, hidden: Tensor, ends: Tensor, pooler: Pooler) -> StepResult | None:
        """The vectors of the rows whose tokens end at `ends`, by the first rank, where every rank has the same."""
        vectors: list[bytes] = []
        if self._tp.rank == 0:
            if pooler.needs_all_tokens:
                vectors = pooler.pool(self._model.features(hidden), rows, self._states)
            elif len(ends):
                vectors = pooler.pool_last(self._model.features(hidden[ends]))
        self._states.advance(rows)
        if self._tp.rank != 0:
            return None
        found = dict(zip(rows.sampling.tolist(), vectors, strict=True))
        return StepResult(plan.step, [-1] * plan.num_rows, vectors=found)

    def _receive(self, tokens: int) -> Tensor | None:
        if self._pipeline.is_first:
            return None
        return self._pipeline.receive((tokens, self._hidden_size), self._dtype)

    def _sample(self, plan: StepPlan, rows: Rows, logits: Tensor) -> StepResult:
        sampled, logprobs = self._sampler.sample(logits, self._states, rows.slots[rows.sampling], plan.masks)
        if len(sampled) == plan.num_rows:
            return StepResult(plan.step, sampled, logprobs)
        token_ids = [-1] * plan.num_rows
        places: list[TokenLogprobs | None] = [None] * plan.num_rows if logprobs else []
        for number, row in enumerate(rows.sampling.tolist()):
            token_ids[row] = sampled[number]
            if logprobs:
                places[row] = logprobs[number]
        return StepResult(plan.step, token_ids, places)

    def _score(self, rows: Rows, hidden: Tensor) -> dict[int, PromptLogprobs]:
        """Log-probabilities of the prompt tokens that follow the rows' tokens; {} on all ranks but the first.

        A slice at a time, as the logits of a whole prompt may need more memory than the model.
        """
        places, following, counts = self._states.to_score(rows)
        tops = [min(self._states.num_top(rows.slots[row]), self._vocab_size) for row in rows.scoring]
        slices = []
        for start in range(0, len(places), self._scored_at_once):
            cut = slice(start, start + self._scored_at_once)
            logits = self._decoder.logits(hidden[torch.from_numpy(places[cut]).to(self._device)])
            if self._tp.rank == 0:
                slices.append(self._sampler.score(logits, following[cut], max(tops)))
        if not slices:
            return {}
        columns = [np.concatenate(parts) for parts in zip(*slices, strict=True)]
        ends = np.cumsum(counts).tolist()
        scores = {}
        for row, top, count, end in zip(rows.scoring, tops, counts, ends, strict=True):
            if count:
                logprobs, ranks, ids, values = (column[end - count : end] for column in columns)
                wide = ids[:, :top].tobytes(), values[:, :top].tobytes()
                scores[row] = PromptLogprobs(top, logprobs.tobytes(), ranks.tobytes(), *wide)
        return scores

    def _keep(self, rows: Rows, result: StepResult | None) -> None:
        """The only stage goes on from what it has sampled, without hearing of it from the core.

        The first rank tells the others, rather than each sampling by itself: they wait for one another anyway, and
        then nothing depends on every rank rounding alike.
        """
        if not len(rows.sampling):
            return
        sampled = np.empty(len(rows.sampling), np.int64)
        if result is not None:
            sampled[:] = np.array(result.token_ids, np.int64)[rows.sampling]
        if self._tp.size > 1:
            sampled = self._tp.broadcast(torch.from_numpy(sampled).to(self._device)).cpu().numpy()
        self._states.keep(rows.slots[rows.sampling], sampled)

    def _pass_on(self, plan: StepPlan, batch: Batch | None = None) -> StepResult | None:
        """A plan without rows: each stage waits for the one before, for all its own ranks, and wakes the next.

        The empty `batch` takes other replicas' tokens to the experts that are here.
        """
        hidden = self._receive(1)
        if batch is not None:
            self._model(None if hidden is None else hidden[:0], batch, self._caches)
        self._tp.all_reduce(torch.zeros(1, device=self._device))
        if not self._pipeline.is_last:
            self._pipeline.send(torch.zeros(1, self._hidden_size, dtype=self._dtype, device=self._device))
        return StepResult(plan.step, []) if self._pipeline.is_last and self._tp.rank == 0 else None
