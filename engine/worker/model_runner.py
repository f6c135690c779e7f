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
from quire.engine.distributed.expert_group import ExpertCommunicator
from quire.engine.distributed.parallel_state import ParallelState
from quire.engine.layers.batch import Batch, share_size
from quire.engine.models.build import Model, load_model
from quire.engine.models.decoder import Decoder
from quire.engine.models.encoder import Encoder
from quire.engine.process import log
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from quire.engine.protocol.rank_report import RankReport
from quire.engine.protocol.runner_output import LOST_REPLICAS, EncoderOutput, ModelRunnerOutput, RankOutput
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.worker import warm_up
from quire.engine.worker.adapter_store import AdapterStore
from quire.engine.worker.async_copies import Array, AsyncOutput, AsyncRead, send
from quire.engine.worker.chained_rows import StepEnd
from quire.engine.worker.cuda_graphs import DecodeGraphs
from quire.engine.worker.drafter import SampledStep, count_accepted, may_draft
from quire.engine.worker.drafters import load_drafter
from quire.engine.worker.encoder_cache import EncoderCache
from quire.engine.worker.eplb import ExpertLoadBalancer
from quire.engine.worker.input_batch import InputBatch, Ints, StepRows
from quire.engine.worker.kv_caches import KVCaches
from quire.engine.worker.kv_copies import KVCopies, KVStaging
from quire.engine.worker.media_rows import MediaRows
from quire.engine.worker.memory import MemoryMeter, determine_num_blocks
from quire.engine.worker.oom import OOMHandler
from quire.engine.worker.pooling_runner import PoolingRunner
from quire.engine.worker.sampler import Sampler, SamplerOutput
from quire.engine.worker.tower_graphs import TowerGraphs

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
        meter: MemoryMeter | None = None,
        wait_for_kernels: Callable[[], None] = lambda: None,
        on_report: Callable[[RankReport], None] = lambda report: None,
    ) -> None:
        """`wait_for_kernels` blocks until the device's kernels are ready. It is called after the weights are loaded.
        `on_report` is as `Worker.on_report`."""
        self._tp, self._pcp, self._pipeline = parallel_state.tp, parallel_state.pcp, parallel_state.pipeline
        self._begin_step, self._device = parallel_state.begin_step, device
        self._replicas: ExpertCommunicator | None = None
        """This rank's counterparts in the replicas that share experts; None: there are none."""
        if (experts := parallel_state.experts) is not None and experts.dp.size > 1:
            self._replicas = experts.dp
        is_single_rank = config.parallel.world_size == 1 and self._replicas is None
        self._oom_handler = OOMHandler(device) if is_single_rank else None

        model, cache, slots = config.model, config.cache, config.scheduler.max_num_seqs
        self._stage_width, self._dtype = model.architecture.stage_width, getattr(torch, model.dtype)
        self._vocab_size = model.architecture.vocab_size
        minimum, maximum = _SCORE_CHUNK_TOKENS
        self._score_chunk_size = max(minimum, min(maximum, slots))

        self._model = load_model(config, rank, self._tp, device, experts=experts)
        self._make_drafter = load_drafter(config, parallel_state, device, self._model)
        wait_for_kernels()
        self._logits_indices_only = _reads_logits_indices_only(self._model, config)
        self._balancer = ExpertLoadBalancer.of(self._model, config, parallel_state, device)
        self._pooling_runner: PoolingRunner | None = None
        if model.pooling is not None and self._pipeline.is_last:
            self._pooling_runner = PoolingRunner(model, model.pooling, self._model, device)
        self._adapters: AdapterStore | None = None
        """None: requests have no adapters."""
        self._adapter_failures: dict[bytes, str] = {}
        """See `ModelRunnerOutput`; of the step that is launched."""
        if config.lora is not None:
            if not isinstance(self._model, Decoder | Encoder):
                raise ConfigError(f"--enable-lora is not supported for {model.architecture.name}")
            layers = config.parallel.stages[self._pipeline.stage]
            modules = {} if self._pooling_runner is None else self._pooling_runner.changes
            given = self._model, model, config.lora, layers, rank, device
            self._adapters = AdapterStore(*given, on_report, modules, survives=is_single_rank)
        self._sampler = Sampler(self._vocab_size, model.eos_token_ids, device)
        media = model.architecture.media
        self._encoder_cache: EncoderCache | None = None
        """On the ranks of the first stage of a model that takes images or videos."""
        tower = None if isinstance(self._model, Encoder) else self._model.tower
        if tower is not None:
            assert media is not None
            of_tower = tower, media.tower, self._dtype, device
            self._encoder_cache = EncoderCache(*of_tower, self._tp, self._adapters, self._pcp)
        states = [number for number, group in enumerate(cache.groups) if group.is_state]
        self._input_batch = InputBatch(
            slots=slots,
            max_length=model.max_model_len,
            block_size=cache.block_size,
            groups=len(cache.groups),
            device=device,
            states=states,
            blocks_per_page=cache.blocks_per_page,
            media=None
            if media is None
            else MediaRows(slots, media, self._vocab_size, has_axes=model.architecture.has_rope_sections),
            num_adapter_slots=0 if config.lora is None else config.lora.num_slots,
            recent=cache.recent,
        )

        drafter = config.drafter if self._pipeline.is_last else None
        self._drafts = drafter is not None
        """Whether this stage has a drafter, on this rank or the first one."""
        every_rank_drafts = drafter is not None and drafter.parallel.tensor_parallel_size == self._tp.size
        self._chains = every_rank_drafts and self._pipeline.is_first and not states
        """Whether rows can be chained to rows of a step with drafts: each rank has the drafts, and no state goes back.
        """
        self._step_end: StepEnd | None = None
        """The end of the last step, if a row of the next one can be chained to one of its rows."""

        self._on_layer: Callable[[int], None] | None = None
        """Of the step that is being launched: see `Batch.on_layer`."""

        staging = KVStaging.of(config, rank, device)
        self._graphs: DecodeGraphs | None = None
        self.num_blocks = cache.num_blocks
        """Blocks in the KV cache, the same on every rank of the replica."""
        if meter is not None and cache.num_blocks:
            self._initialize_kv_caches(config.with_blocks(cache.blocks_per_page))
            self.num_blocks = determine_num_blocks(config, rank, meter, lambda plan: self._launch(plan).result())
            del self._kv_caches, self._drafter  # they hold memory that does not depend on the number of blocks
        config = config.with_blocks(self.num_blocks)
        self._initialize_kv_caches(config)
        self._kv_copies: KVCopies | None = None
        """None: there is no KV store."""
        if config.kv_store is not None:
            self._kv_copies = KVCopies(config, rank, self._kv_caches.memory, device, staging, on_report)
        if isinstance(self._model, Decoder) and model.pooling is None:
            caches, stage = self._kv_caches.layers, self._pipeline.stage
            self._graphs = DecodeGraphs(self._model, caches, config, device, stage, self._tp)
        self._tower_graphs = TowerGraphs(tower, config, device, self._tp) if config.graphs.tower_sizes else None
        # GPU kernels are compiled or loaded at their first launch.
        self._warm_up_plans = warm_up.decode_steps(config) if meter is not None and model.pooling is None else iter(())
        self._shows_progress = rank == 0 and config.parallel.is_first_local_replica and not log.is_json()

    def _initialize_kv_caches(self, config: EngineConfig) -> None:
        """Allocate the KV caches, and make the drafter that uses a part of them."""
        self._kv_caches = KVCaches(config, self._pipeline.stage, self._device)
        self._drafter = None if self._make_drafter is None else self._make_drafter(self._kv_caches.drafter)

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
        self._pipeline.post_receive(self._received_shape(plan), self._dtype)

    def finalize(self) -> dict[str, float]:
        """Prepare for requests, once all ranks are loaded. Returns the seconds that each part took.

        Raises `ConfigError` if the ranks are not compatible.
        """
        seconds, begun = {}, time.perf_counter()
        captured = self._graphs is not None and self._graphs.capture(bar=self._shows_progress)
        if self._tower_graphs is not None:
            captured |= self._tower_graphs.capture()
        if captured:
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
        if self._tower_graphs is not None:
            self._tower_graphs.close()
        if self._drafter is not None:
            self._drafter.close()
        if self._adapters is not None:
            self._adapters.close()
        if self._kv_copies is not None:
            self._kv_copies.close()

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> AsyncOutput:
        """Start a step of this stage, queued behind those started before it. On a GPU, this waits for none of them,
        except to know where chained rows begin (`StepEnd.resume`).

        The returned object gives the step's result: the tokens on the first rank of the last stage, None on the others,
        except for `EncoderOutput`.
        """
        self._adapter_failures = {}
        if self._kv_copies is None or plan.kv_copies is None:
            return self._launch_safely(plan)
        self._on_layer = self._kv_copies.begin(plan.kv_copies)
        try:
            return self._launch_safely(plan)
        finally:
            self._kv_copies.end_step()
            self._on_layer = None

    def _launch_safely(self, plan: SchedulerOutput) -> AsyncOutput:
        """Start a step; where no other rank waits for this one, one that finds too little memory fails alone."""
        if self._oom_handler is None:
            return self._launch(plan)

        def failed(reason: str) -> AsyncOutput:
            result = ModelRunnerOutput(plan.step, [], failure=reason, adapter_failures=self._adapter_failures)
            return AsyncOutput(result, [], self._device)

        def skip() -> None:
            self._apply_adapters(plan)
            self._input_batch.apply(plan)
            if self._encoder_cache is not None and plan.media is not None:
                self._encoder_cache.free(plan.media)

        return self._oom_handler.run(plan, lambda: self._launch(plan), skip, failed)

    @torch.inference_mode()
    def _launch(self, plan: SchedulerOutput) -> AsyncOutput:
        returns_result = self._pipeline.is_last and self._tp.rank == self._pcp.rank == 0
        failures = dict[bytes, str]()
        """See `EncoderOutput`."""
        result: ModelRunnerOutput | None = None
        reported: RankOutput = None
        if returns_result:
            result = ModelRunnerOutput(plan.step, [-1] * plan.num_rows, encoding_failures=failures)
            result.adapter_failures, reported = self._adapter_failures, result
        elif self._encoder_cache is not None and self._tp.rank == self._pcp.rank == 0 and plan.encodes:
            reported = EncoderOutput(plan.step, failures)
        if self._replicas is None:
            return AsyncOutput(reported, self._run(plan, (), result, failures), self._device)
        try:
            replica_tokens, is_active = self._sync_replicas(plan, self._replicas)
            readings = self._run(plan, replica_tokens, result, failures)
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise RuntimeError(f"{LOST_REPLICAS}: {error}") from error
            raise
        if result is not None:
            result.is_wave_active = is_active
        return AsyncOutput(reported, readings, self._device)

    def _sync_replicas(self, plan: SchedulerOutput, replicas: ExpertCommunicator) -> tuple[tuple[int, ...], bool]:
        """The number of tokens of each replica in this step, and whether any replica has work."""
        assert plan.has_work is not None
        reported = replicas.all_gather_ints((plan.step, plan.num_tokens, plan.has_work))
        assert all(step == plan.step for step, *_ in reported), (
            f"replicas are at steps {[step for step, *_ in reported]}"
        )
        return tuple(tokens for _, tokens, _ in reported), any(has_work for *_, has_work in reported)

    def _run(
        self,
        plan: SchedulerOutput,
        replica_tokens: tuple[int, ...],
        result: ModelRunnerOutput | None,
        failures: dict[bytes, str],
    ) -> list[AsyncRead]:
        """Start all of a step, and store in `result` and `failures` everything known immediately. Returns the reads of
        the rest."""
        expert_load = None if self._balancer is None else self._balancer.step()
        if result is not None:
            result.expert_load = expert_load
        self._begin_step()
        rows = self._update_states(plan, failures)
        if not plan.num_rows and not any(replica_tokens):
            return self._run_without_rows(plan)
        batch, places = self._prepare_inputs(rows, replica_tokens)
        if not plan.num_rows:
            return self._run_without_rows(plan, batch)
        own = batch.share(self._pcp) if self._num_shares(plan) > 1 else batch
        hidden = self.execute_model(self._receive(plan), own)
        if result is not None and self._graphs is not None:
            result.has_captured, self._graphs.has_captured = self._graphs.has_captured, False
        readings: list[AsyncRead] = []
        if self._pipeline.is_last and own.shares is not None:
            hidden = own.shares.gather_last(hidden) if own.logits_indices_only else own.shares.gather(hidden)
        if not self._pipeline.is_last:
            self._pipeline.send(hidden)
        elif self._pooling_runner is not None:
            readings += self._pooling_runner.pool(rows, batch, hidden, self._input_batch, result)
        else:
            readings += self._score(rows, hidden, result)
            tokens, sampled = self.sample_tokens(plan, rows, batch, places, hidden, result)
            readings += sampled
            if self._drafts:
                readings += self.propose_drafts(plan, rows, batch, hidden, tokens, result)
        self._input_batch.advance(rows)
        return readings

    def _update_states(self, plan: SchedulerOutput, failures: dict[bytes, str]) -> StepRows:
        """Bring the state of the requests to the start of `plan`; store in `failures` what could not be encoded."""
        self._apply_adapters(plan)
        end, self._step_end = self._step_end, None
        assert end is not None or not any(row.is_chained for row in plan.scheduled), "chained to no step"
        rows = self._input_batch.apply(plan, {} if end is None else end.resume(plan, self._input_batch))
        self._kv_caches.clear_new_blocks(plan)
        if self._encoder_cache is not None and plan.media is not None:
            failures |= self._encoder_cache.update(plan.media)
        return rows

    def _apply_adapters(self, plan: SchedulerOutput) -> None:
        if self._adapters is not None and plan.adapters is not None:
            before = self._adapters.version
            self._adapter_failures |= self._adapters.apply(plan.adapters)
            if self._graphs is not None and plan.adapters.assigned:
                self._graphs.on_assigned(is_changed=self._adapters.version != before)

    def _prepare_inputs(self, rows: StepRows, replica_tokens: tuple[int, ...]) -> tuple[Batch, Tensor]:
        """See `InputBatch.batch`."""
        has_prompts = int(rows.counts.sum()) > len(rows.counts)
        logits_indices_only = self._logits_indices_only and has_prompts and not rows.scoring and rows.num_drafts is None
        batch, places = self._input_batch.batch(rows, replica_tokens, logits_indices_only=logits_indices_only)
        if self._on_layer is not None:
            batch = replace(batch, on_layer=self._on_layer)
        if isinstance(self._model, Encoder):
            batch = replace(batch, token_types=self._input_batch.token_types(rows))
        if batch.media_tokens is not None and self._encoder_cache is not None:
            batch = replace(batch, media_features=self._encoder_cache.read(self._input_batch.features))
        return batch, places

    def _receive(self, plan: SchedulerOutput) -> Tensor | None:
        """The previous stage's output; None on the first stage."""
        if self._pipeline.is_first:
            return None
        return self._pipeline.receive(self._received_shape(plan), self._dtype, is_patient=plan.encodes)

    def _received_shape(self, plan: SchedulerOutput) -> tuple[int, int]:
        """Of the previous stage's output for this rank; a plan without rows has one, too."""
        return share_size(plan.num_tokens or 1, self._num_shares(plan)), self._stage_width

    def _num_shares(self, plan: SchedulerOutput) -> int:
        """The number of ranks that divide the step's tokens. Each rank computes a whole step of decodes, with drafts or
        without, as the ranks would read the same weights for parts of it; so nothing is exchanged, and it can be
        replayed. That includes accepted drafts, which models with recurrent states compute again."""
        is_divided = self._pcp.size > 1 and any(row.has_prompt_tokens for row in plan.scheduled)
        return self._pcp.size if is_divided else 1

    def execute_model(self, received: Tensor | None, batch: Batch) -> Tensor:
        """Run this stage's layers: the output of `Decoder.forward`."""
        is_eager, replayed = self._adapters is not None and self._adapters.changes_embedding(batch), None
        if self._graphs is not None and not is_eager and batch.shares is None:
            replayed = self._graphs.run(received, batch)
        return self._model(received, batch, self._kv_caches.layers) if replayed is None else replayed

    def sample_tokens(
        self,
        plan: SchedulerOutput,
        rows: StepRows,
        batch: Batch,
        places: Tensor,
        hidden: Tensor,
        result: ModelRunnerOutput | None,
    ) -> tuple[Tensor, list[AsyncRead]]:
        """Sample the tokens of each row that samples, int64 `[sampling rows]` on the device.

        The first rank broadcasts the tokens, rather than each rank sampling by itself: the ranks synchronize anyway,
        and the result does not depend on every rank rounding in the same way. The tokens are written to their `places`
        in the input batch, so that a single stage continues without a round trip through the core or the host, and a
        drafter can read them.
        """
        adapters = None if batch.adapters is None else batch.adapters.sampling
        logits = self._decoder.logits(hidden[batch.logits_indices], adapters)
        if result is None:
            tokens, readings = torch.empty(len(rows.sampling), dtype=torch.int64, device=self._device), []
        else:
            slots = rows.slots[rows.sampling]
            sampled = self._sampler.sample(logits, self._input_batch, slots, rows.lengths, plan.masks)
            token_ids = batch.token_ids[: 0 if rows.num_drafts is None else None]  # only the drafts are read
            fill = partial(_store_sampled, rows, sampled, result)
            tokens, readings = sampled.tokens, [AsyncRead([sampled.tokens, token_ids, *sampled.columns], fill)]
        has_readers = self._pipeline.is_first or (self._drafts and plan.num_drafts is not None)
        if has_readers and len(rows.sampling):
            tokens = self._tp.broadcast(self._pcp.broadcast(tokens))
            self._input_batch.write_sampled(places, tokens)
        if self._pipeline.is_first:
            self._input_batch.append_sampled(rows)
        return tokens, readings

    def propose_drafts(
        self,
        plan: SchedulerOutput,
        rows: StepRows,
        batch: Batch,
        hidden: Tensor,
        tokens: Tensor,
        result: ModelRunnerOutput | None,
    ) -> list[AsyncRead]:
        """Guess the tokens that follow the sampled ones, if the plan asks for drafts and this rank has a drafter. Keeps
        the end of the step if rows of the next one can be chained to it."""
        may_chain = self._chains and (plan.num_drafts or plan.num_draft_tokens)
        if plan.num_drafts is None:
            self._input_batch.drafted_until[rows.slots] = 0
            if not may_chain:
                return []
        num_accepted = count_accepted(rows, batch, tokens)
        if may_chain:
            self._step_end = StepEnd(rows, num_accepted, self._device)
        if plan.num_drafts is None or self._drafter is None:
            return []
        first = self._input_batch.num_computed_tokens[rows.slots]
        step = SampledStep(rows, first, batch, hidden, num_accepted, may_draft(rows, [*plan.masks]), plan.num_drafts)
        draft = partial(self._drafter.draft, step, self._input_batch)
        drafts = draft() if self._oom_handler is None else self._oom_handler.attempt("drafts", draft)
        if drafts is not None:  # as sampled tokens are: ranks need not round in the same way
            drafts = replace(drafts, tokens=self._pcp.broadcast(drafts.tokens))
        if self._step_end is not None:
            self._step_end.drafts = drafts
        if drafts is None or result is None:
            return []

        def fill(tokens: Array) -> None:
            result.draft_token_ids = drafts.by_row(tokens)

        return [AsyncRead([drafts.tokens], fill)]

    @property
    def _decoder(self) -> Decoder | TransformersDecoder:
        assert not isinstance(self._model, Encoder)
        return self._model

    def _score(self, rows: StepRows, hidden: Tensor, result: ModelRunnerOutput | None) -> list[AsyncRead]:
        """Log-probabilities of the prompt tokens that follow the rows' tokens, on the first rank only.

        The tokens are processed in chunks, as the logits of a whole prompt may need more memory than the model.
        """
        if not rows.scoring:
            return []
        places, following, slots, counts = self._input_batch.scored_tokens(rows)
        tops = [min(self._input_batch.num_top(rows.slots[row]), self._vocab_size) for row in rows.scoring]
        slices = []
        for start in range(0, len(places), self._score_chunk_size):
            cut = slice(start, start + self._score_chunk_size)
            adapters = self._input_batch.adapter_rows(slots[cut])
            logits = self._decoder.logits(hidden[send(places[cut], self._device)], adapters)
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

    def _run_without_rows(self, plan: SchedulerOutput, batch: Batch | None = None) -> list[AsyncRead]:
        """Run a plan without rows: each stage waits for the previous one and for its own ranks, and signals the next.

        The empty `batch` processes other replicas' tokens with this rank's experts.
        """
        hidden = self._receive(plan)
        if batch is not None:
            self.execute_model(None if hidden is None else hidden[:0], batch)
        self._tp.all_reduce(self._pcp.all_reduce(torch.zeros(1, device=self._device)))
        if not self._pipeline.is_last:
            self._pipeline.send(torch.zeros(1, self._stage_width, dtype=self._dtype, device=self._device))
        return []


def _reads_logits_indices_only(model: Model, config: EngineConfig) -> bool:
    """Whether a step without drafts and prompt log-probabilities needs the last layer's output at the rows' last tokens
    only."""
    speculative, pooling = config.scheduler.speculative, config.model.pooling
    return (
        isinstance(model, Decoder)
        and model.supports_logits_indices_only
        # The choice of an expert's copy and the token counts need the positions of the whole batch.
        and config.parallel.experts is None
        and not (speculative is not None and speculative.reads_hidden_states)
        and not (pooling is not None and pooling.needs_all_tokens)
    )


def _store_sampled(
    rows: StepRows, sampled: SamplerOutput, result: ModelRunnerOutput, tokens: Array, token_ids: Array, *columns: Array
) -> None:
    """Store the sampled tokens, once they are on the host. `token_ids` are the batch's, if it has drafts."""
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


def _verify(
    rows: StepRows,
    num_drafts: Ints,
    token_ids: Array,
    tokens: list[int],
    logprobs: list[TokenLogprobs | None],
    result: ModelRunnerOutput,
) -> None:
    """Store the sampled tokens of a step with drafts: each row's up to the first that is not its draft. `token_ids` are
    the batch's."""
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
