"""The model runner turns a plan into a batch, the batch into hidden states and, on the last stage, hidden states into
tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.config.engine_config import EngineConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertCommunicator
from quire.engine.distributed.parallel_state import ParallelState
from quire.engine.layers.attention import Batch
from quire.engine.models.build import load_model
from quire.engine.models.decoder import Decoder
from quire.engine.models.encoder import Encoder
from quire.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from quire.engine.protocol.runner_output import LOST_REPLICAS, ModelRunnerOutput
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.worker import memory, warm_up
from quire.engine.worker.async_copies import Array, AsyncOutput, AsyncRead, send
from quire.engine.worker.chained_rows import StepEnd
from quire.engine.worker.cuda_graphs import DecodeGraphs
from quire.engine.worker.drafter import (
    Drafter,
    Drafts,
    SampledStep,
    count_accepted,
    may_draft,
)
from quire.engine.worker.drafters import load_drafter, make_drafter
from quire.engine.worker.eplb import ExpertLoadBalancer
from quire.engine.worker.input_batch import InputBatch, Ints, StepRows, split_micro_batches
from quire.engine.worker.kv_caches import KVCaches
from quire.engine.worker.oom import OOMHandler
from quire.engine.worker.pooling_runner import PoolingRunner
from quire.engine.worker.sampler import Sampler

if TYPE_CHECKING:
    from quire.engine.models.transformers_backend.decoder import TransformersDecoder

_SCORE_CHUNK_TOKENS = (16, 256)
"""Minimum and maximum number of prompt tokens whose logits are in memory at once. The number is `max_num_seqs`, for
which memory is reserved anyway, clamped to this range: fewer tokens would read the head's weights too often, and more
bring no gain."""


class ModelRunner:
    """One rank's part of the model and of the KV cache. It executes plans one at a time and in order.

    With a `meter`, the KV cache gets the memory that the weights and the largest step leave free, instead of the
    estimated size. Raises `ConfigError` if the checkpoint's tensors do not match config.json, or if too little memory
    is left.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        parallel_state: ParallelState,
        device: torch.device,
        meter: memory.MemoryMeter | None = None,
        wait_for_kernels: Callable[[], None] = lambda: None,
    ) -> None:
        """`wait_for_kernels` blocks until the device's kernels are ready. It is called after the weights are loaded."""
        model, cache = config.model, config.cache
        arch = model.architecture
        self._tp, self._pipeline, self._device = parallel_state.tp, parallel_state.pipeline, device
        self._replicas: ExpertCommunicator | None = None
        """This rank's counterparts in the replicas that share experts; None: there are none."""
        self._dbo_token_threshold: int | None = None
        if (experts := parallel_state.experts) is not None and experts.dp.size > 1:
            self._replicas, self._dbo_token_threshold = experts.dp, experts.config.dbo_token_threshold
        self._stage_width, self._dtype = arch.stage_width, getattr(torch, model.dtype)
        self._vocab_size = arch.vocab_size
        minimum, maximum = _SCORE_CHUNK_TOKENS
        self._score_chunk_size = max(minimum, min(maximum, config.scheduler.max_num_seqs))
        self._model = load_model(config, rank, parallel_state.tp, device, experts=parallel_state.experts)
        self._drafts = config.drafter is not None and parallel_state.pipeline.is_last
        """Whether this stage has a drafter, on this rank or the first one."""
        self._drafter: Drafter | None = None
        self._step_end: StepEnd | None = None
        """Of the last step, if a row of the next one can be chained to one of it."""
        drafter_model, drafter_parallel = None, parallel_state.tp
        if self._drafts and (drafter := config.drafter) is not None:
            drafter_parallel = parallel_state.tp if drafter.parallel.tensor_parallel_size > 1 else Parallel()
            if parallel_state.tp.rank < drafter.parallel.tensor_parallel_size:
                drafter_model = load_drafter(config, drafter_parallel, device, self._model)
        wait_for_kernels()
        self._balancer = (
            ExpertLoadBalancer.of(self._model, config, parallel_state, device)
            if isinstance(self._model, Decoder)
            else None
        )
        self._pooling_runner: PoolingRunner | None = None
        if model.pooling is not None and parallel_state.pipeline.is_last:
            self._pooling_runner = PoolingRunner(model, model.pooling, self._model, device)

        speculative = config.scheduler.speculative
        # The choice of an expert's copy and the token counts need the positions of the whole batch.
        self._logits_indices_only = (
            isinstance(self._model, Decoder)
            and self._model.supports_logits_indices_only
            and parallel_state.experts is None
            and not (self._drafts and speculative is not None and speculative.reads_hidden_states)
            and not (model.pooling is not None and model.pooling.needs_all_tokens)
        )
        is_single_rank = parallel_state.tp.size == parallel_state.pipeline.size == 1 and self._replicas is None
        self._oom_handler = OOMHandler(device) if is_single_rank else None
        slots, groups = config.scheduler.max_num_seqs, len(cache.groups)
        has_states = any(group.is_state for group in cache.groups)
        num_draft_ranks = 0 if config.drafter is None else config.drafter.parallel.tensor_parallel_size
        self._chains = self._drafts and not has_states and num_draft_ranks == parallel_state.tp.size
        """Whether rows can be chained to those of a step with drafts: each rank has these, and no state goes back."""
        self._input_batch = InputBatch(
            *(slots, model.max_model_len, cache.block_size, groups, device),
            states=[number for number, group in enumerate(cache.groups) if group.is_state],
            blocks_per_page=cache.blocks_per_page,
        )
        self._sampler = Sampler(arch.vocab_size, model.eos_token_ids, device)
        self._graphs: DecodeGraphs | None = None

        def allocate(config: EngineConfig) -> None:
            self._kv_caches = KVCaches(config, parallel_state.pipeline.stage, device)
            if drafter_model is not None and (drafter := config.drafter) is not None:
                caches = self._kv_caches.drafter
                self._drafter = make_drafter(drafter, drafter_parallel, device, caches, drafter_model)

        self.num_blocks = cache.num_blocks
        """Blocks in the KV cache, the same on every rank of the replica."""
        if meter is not None and cache.num_blocks:
            allocate(config.with_blocks(cache.blocks_per_page))
            self.num_blocks = memory.determine_num_blocks(config, rank, meter, lambda plan: self._launch(plan).result())
        config = config.with_blocks(self.num_blocks)
        allocate(config)
        # GPU kernels are compiled or loaded at their first launch.
        self._warm_up_plans = warm_up.decode_steps(config) if meter is not None and model.pooling is None else iter(())
        self._shows_progress = rank == 0 and config.parallel.is_first_local_replica
        if isinstance(self._model, Decoder) and model.pooling is None:
            self._graphs = DecodeGraphs(
                self._model, self._kv_caches.layers, config, device, parallel_state.pipeline.stage, parallel_state.tp
            )

    @property
    def receives(self) -> bool:
        """Whether the hidden states of a plan come from another stage."""
        return not self._pipeline.is_first

    def post_receive(self, plan: SchedulerOutput) -> None:
        """Post the receive for a future plan's hidden states, so that they arrive while other plans run.

        Every plan must be posted, in order.
        """
        if self._balancer is not None:
            self._balancer.post_receive()
        self._pipeline.post_receive((plan.num_tokens or 1, self._stage_width), self._dtype)

    def finalize(self) -> dict[str, float]:
        """Prepare for requests, once all ranks are loaded. Returns the seconds that each part took.

        Raises `ConfigError` if the ranks are not compatible.
        """
        seconds, begun = {}, time.perf_counter()
        if self._graphs is not None and self._graphs.capture(bar=self._shows_progress):
            seconds["capture graphs"] = time.perf_counter() - begun
        begun = time.perf_counter()
        for plan in self._warm_up_plans:
            self._launch(plan).result()
            seconds["warm up decodes"] = time.perf_counter() - begun
        if self._balancer is not None:
            self._balancer.finalize()
        return seconds

    def close(self) -> None:
        """Release the graphs, after all steps are done and before the process groups are destroyed: NCCL waits for the
        end of graphs that use it."""
        if self._graphs is not None:
            self._graphs.close()
        if self._drafter is not None:
            self._drafter.close()

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> AsyncOutput:
        """Start a step of this stage, queued behind those started before it. On a GPU, this waits for none of them,
        except to know where chained rows begin (`StepEnd.resume`).

        The returned object gives the step's result: the tokens on the first rank of the last stage, None on the others.
        """
        if self._oom_handler is None:
            return self._launch(plan)

        def failed(reason: str) -> AsyncOutput:
            return AsyncOutput(ModelRunnerOutput(plan.step, [], failure=reason), [], self._device)

        return self._oom_handler.run(plan, lambda: self._launch(plan), lambda: self._input_batch.apply(plan), failed)

    @torch.inference_mode()
    def _launch(self, plan: SchedulerOutput) -> AsyncOutput:
        returns_result = self._pipeline.is_last and self._tp.rank == 0
        result = ModelRunnerOutput(plan.step, [-1] * plan.num_rows) if returns_result else None
        if self._replicas is None:
            return AsyncOutput(result, self._run(plan, (), result), self._device)
        try:
            replica_tokens, is_active = self._sync_replicas(plan, self._replicas)
            readings = self._run(plan, replica_tokens, result)
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise RuntimeError(f"{LOST_REPLICAS}: {error}") from error
            raise
        if result is not None:
            result.is_wave_active = is_active
        return AsyncOutput(result, readings, self._device)

    def _sync_replicas(self, plan: SchedulerOutput, replicas: ExpertCommunicator) -> tuple[tuple[int, ...], bool]:
        """The number of tokens of each replica in this step, and whether any replica has work."""
        assert plan.has_work is not None
        reported = replicas.all_gather_ints((plan.step, plan.num_tokens, plan.has_work))
        assert all(step == plan.step for step, *_ in reported), (
            f"replicas are at steps {[step for step, *_ in reported]}"
        )
        return tuple(tokens for _, tokens, _ in reported), any(has_work for *_, has_work in reported)

    def _run(
        self, plan: SchedulerOutput, replica_tokens: tuple[int, ...], result: ModelRunnerOutput | None
    ) -> list[AsyncRead]:
        """Start all of a step, and store in `result` what is known immediately."""
        expert_load = None if self._balancer is None else self._balancer.step()
        if result is not None:
            result.expert_load = expert_load
        self._tp.begin_step()
        end, self._step_end = self._step_end, None
        rows = self._input_batch.apply(plan, {} if end is None else end.resume(plan, self._input_batch))
        assert end is not None or not any(row.is_chained for row in plan.scheduled), "chained to no step"
        self._kv_caches.clear_new_blocks(plan)
        if not plan.num_rows and not any(replica_tokens):
            return self._run_without_rows()
        has_prompts = int(rows.counts.sum()) > plan.num_rows
        logits_indices_only = self._logits_indices_only and has_prompts and not rows.scoring and rows.num_drafts is None
        first = self._input_batch.num_computed_tokens[rows.slots]
        batch, places = self._input_batch.batch(rows, replica_tokens, logits_indices_only=logits_indices_only)
        if self._dbo_token_threshold is not None and max(replica_tokens) >= self._dbo_token_threshold:
            batch = replace(batch, micro_batches=split_micro_batches(batch, rows.counts))
        if not plan.num_rows:
            return self._run_without_rows(batch)
        if isinstance(self._model, Encoder) and (types := self._input_batch.token_types(rows)) is not None:
            batch = replace(batch, token_types=types)
        hidden = self._forward(self._receive(plan.num_tokens), batch)
        if self._pooling_runner is not None:
            vectors = self._pooling_runner.pool(rows, batch, hidden, self._input_batch, result)
            self._input_batch.advance(rows)
            return vectors
        readings = self._score(rows, hidden, result) if rows.scoring and self._pipeline.is_last else []
        self._input_batch.advance(rows)
        if not self._pipeline.is_last:
            self._pipeline.send(hidden)
            return []
        logits = self._decoder.logits(hidden[batch.logits_indices])
        tokens = None
        if result is not None:
            tokens, reading = self._sample(plan, rows, batch, logits, result)
            readings.append(reading)
        del logits  # a drafter needs the memory
        drafts = self._drafts and plan.num_drafts is not None
        if self._drafts and not drafts:
            self._input_batch.drafted_until[rows.slots] = 0
        if self._pipeline.is_first or drafts:
            sampled = self._write_sampled(rows, places, tokens)
            accepted = count_accepted(rows, batch, sampled) if self._drafts else None
        if self._pipeline.is_first:
            self._input_batch.append_sampled(rows)
            if self._chains and (plan.num_drafts or plan.num_draft_tokens):
                self._step_end = StepEnd(rows, accepted, self._device)
        if drafts and self._drafter is not None:
            drafting = may_draft(rows, [*plan.masks])
            step = SampledStep(rows, first, batch, hidden, accepted, drafting, plan.num_drafts or 0)
            draft = partial(self._drafter.draft, step, self._input_batch)
            made = draft() if self._oom_handler is None else self._oom_handler.attempt("drafts", draft)
            if self._step_end is not None:
                self._step_end.drafts = made
            readings += self._report_drafts(made, result)
        return readings

    def _report_drafts(self, drafts: Drafts | None, result: ModelRunnerOutput | None) -> list[AsyncRead]:
        if drafts is None or result is None:
            return []

        def fill(tokens: Array) -> None:
            result.draft_token_ids = drafts.by_row(tokens)

        return [AsyncRead([drafts.tokens], fill)]

    def _forward(self, received: Tensor | None, batch: Batch) -> Tensor:
        """The output of `Decoder.forward`."""
        replayed = None if self._graphs is None else self._graphs.run(received, batch)
        return self._model(received, batch, self._kv_caches.layers) if replayed is None else replayed

    @property
    def _decoder(self) -> Decoder | TransformersDecoder:
        assert not isinstance(self._model, Encoder)
        return self._model

    def _receive(self, tokens: int) -> Tensor | None:
        if self._pipeline.is_first:
            return None
        return self._pipeline.receive((tokens, self._stage_width), self._dtype)

    def _sample(
        self, plan: SchedulerOutput, rows: StepRows, batch: Batch, logits: Tensor, result: ModelRunnerOutput
    ) -> tuple[Tensor, AsyncRead]:
        """Sample the tokens of each row that samples, int64 on the device."""
        slots = rows.slots[rows.sampling]
        sampled = self._sampler.sample(logits, self._input_batch, slots, rows.lengths, plan.masks)

        def fill(tokens: Array, token_ids: Array, *columns: Array) -> None:
            logprobs = sampled.logprobs(*columns) if columns else []
            if rows.num_drafts is not None:
                _verify(rows, rows.num_drafts, token_ids, tokens.tolist(), logprobs, result)
                return
            if len(tokens) == len(result.token_ids):
                result.token_ids, result.logprobs = tokens.tolist(), logprobs
                return
            for row, token in zip(rows.sampling.tolist(), tokens.tolist(), strict=True):
                result.token_ids[row] = token
            if logprobs:
                result.logprobs = [None] * len(result.token_ids)
                for row, reported in zip(rows.sampling.tolist(), logprobs, strict=True):
                    result.logprobs[row] = reported

        token_ids = batch.token_ids[: 0 if rows.num_drafts is None else None]  # only the drafts are read
        return sampled.tokens, AsyncRead([sampled.tokens, token_ids, *sampled.columns], fill)

    def _score(self, rows: StepRows, hidden: Tensor, result: ModelRunnerOutput | None) -> list[AsyncRead]:
        """Log-probabilities of the prompt tokens that follow the rows' tokens, on the first rank only.

        The tokens are processed in chunks, as the logits of a whole prompt may need more memory than the model.
        """
        places, following, counts = self._input_batch.scored_tokens(rows)
        tops = [min(self._input_batch.num_top(rows.slots[row]), self._vocab_size) for row in rows.scoring]
        slices = []
        for start in range(0, len(places), self._score_chunk_size):
            cut = slice(start, start + self._score_chunk_size)
            logits = self._decoder.logits(hidden[send(places[cut], self._device)])
            if result is not None:
                slices.append(self._sampler.score(logits, following[cut], max(tops)))
        if result is None or not slices:
            return []

        def fill(*columns: Array) -> None:
            ends = np.cumsum(counts).tolist()
            for row, top, count, end in zip(rows.scoring, tops, counts, ends, strict=True):
                if count:
                    logprobs, ranks, ids, values = (column[end - count : end] for column in columns)
                    wide = ids[:, :top].tobytes(), values[:, :top].tobytes()
                    result.prompt_logprobs[row] = PromptLogprobs(top, logprobs.tobytes(), ranks.tobytes(), *wide)

        return [AsyncRead([torch.cat(parts) for parts in zip(*slices, strict=True)], fill)]

    def _write_sampled(self, rows: StepRows, places: Tensor, tokens: Tensor | None) -> Tensor:
        """Write the sampled tokens into the input batch, so that a single stage continues without a round trip through
        the core or the host, and a drafter can read them. Returns them.

        The first rank broadcasts the tokens, rather than each rank sampling by itself: the ranks synchronize anyway,
        and the result does not depend on every rank rounding in the same way.
        """
        if tokens is None:
            tokens = torch.empty(len(rows.sampling), dtype=torch.int64, device=self._device)
        if len(rows.sampling):
            tokens = self._tp.broadcast(tokens)
            self._input_batch.write_sampled(places, tokens)
        return tokens

    def _run_without_rows(self, batch: Batch | None = None) -> list[AsyncRead]:
        """Run a plan without rows: each stage waits for the previous one and for its own ranks, and signals the next.

        The empty `batch` processes other replicas' tokens with this rank's experts.
        """
        hidden = self._receive(1)
        if batch is not None:
            self._forward(None if hidden is None else hidden[:0], batch)
        self._tp.all_reduce(torch.zeros(1, device=self._device))
        if not self._pipeline.is_last:
            self._pipeline.send(torch.zeros(1, self._stage_width, dtype=self._dtype, device=self._device))
        return []


def _verify(
    rows: StepRows,
    num_drafts: Ints,
    token_ids: Array,
    tokens: list[int],
    logprobs: list[TokenLogprobs | None],
    result: ModelRunnerOutput,
) -> None:
    """Store the sampled tokens of a step with drafts: those of a row up to the first that is not its draft. `token_ids`
    are those of the batch."""
    if logprobs:
        result.logprobs = [None] * len(result.token_ids)
    at, sampling, ends = 0, rows.sampling.tolist(), rows.counts.cumsum().tolist()
    while at < len(sampling):
        row = sampling[at]
        guesses = token_ids[ends[row] - num_drafts[row] : ends[row]].tolist()
        sampled = tokens[at : at + len(guesses) + 1]
        matching = takewhile(lambda pair: pair[0] == pair[1], zip(sampled, guesses, strict=False))
        end = at + 1 + sum(1 for _ in matching)
        result.token_ids[row] = tokens[at]
        if end > at + 1:
            result.accepted[row] = tokens[at + 1 : end]
        if logprobs:
            result.logprobs[row] = logprobs[at]
            if end > at + 1 and logprobs[at] is not None:
                result.accepted_logprobs[row] = logprobs[at + 1 : end]
        at += len(guesses) + 1
