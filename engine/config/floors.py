"""The minimum time of a layout's steps, from the data that they read, compute and send. No torch.

A step of a stage with `n` new tokens of `r` requests takes at least

    max(bytes / bandwidth, operations / rate) + kernels × seconds of a kernel + communication

Bandwidth and rates are the peak figures of the data sheet, times the share that engines reach at best; this share and
the times of kernels and collectives are in `quire.engine.config.achieved`. A CPU's bandwidth is measured instead, and
kernels take no time there.

- bytes: the rank's weights (`memory_plan.read_bytes`) and the KV blocks of the requests. Blocks that several layers
  read count once for each layer.
- operations: 2 for each parameter of a linear layer and token (of the experts, only the chosen ones), 2 × (features
  of a key + of a value) for each head, token and key, and the head of the model once per request. With sparse
  attention, only keys and values of the selected tokens count, and indexers read the keys of all tokens. Products of
  quantized weights and inputs that the device rounds have the rate of their numbers: FP8, FP4, int8.
- kernels: one for each linear layer (two for all experts), and those of norms, positions, attention and routing. Each
  waits for the one before it.
- communication: an all-reduce of `b` bytes among `t` ranks, after each part of a layer, takes a latency, which grows
  with `t`, and 2 (t - 1) / t × b / bandwidth (Patarasuk and Yuan 2009); with NVSwitch, which sums and copies, 1 + 1 / t
  instead, if that is less. Among `h` hosts it takes that on each, or 2 (h - 1) / h × b / (bandwidth of the network ×
  ranks of the group on a host), whichever is longer: every device has its own part of the network. Replicas that share
  experts send tokens to each other and results back: to other hosts over the network, on the same host over its links,
  at the same time. A message between stages takes latency + b / bandwidth. Ranks that divide the tokens of the cache
  gather queries, which takes half of an all-reduce of their bytes, and add results. Ranks that divide the tokens of a
  step gather the keys and values of each layer of attention.

With P stages, `min(rows, P)` plans are in flight, each with its part of the rows. A token of every row takes the time
of all stages, or the time of the slowest stage for each plan, whichever is longer: the rest is the pipeline's bubble.
A prompt is cut into chunks as the scheduler does (`SchedulerConfig.share`), and each stage computes a chunk once it has
computed the one before, and the stage before has computed this one.

Real steps are slower, because the estimate leaves out scheduling and the imbalance of experts, and because few kernels
are as fast as the best. So the tokens/s are upper bounds, which rank layouts rather than predict.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.engine.architecture.attention_spec import CompressedAttentionSpec, MLASpec
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.model_spec import LayerSpec
from quire.engine.architecture.recurrent_spec import RecurrentSpec
from quire.engine.config import achieved, parallel_config
from quire.engine.config.engine_config import DTYPE_BYTES, EngineConfig
from quire.engine.config.kv_cache_groups import KVCacheShape, block_bytes, tokens_per_row
from quire.engine.config.machine import Machine
from quire.engine.config.memory_plan import MemoryPlan, form_of_matrix, read_bytes

Limit = Literal["bandwidth", "compute", "launches", "communication"]


@dataclass(frozen=True)
class Floor:
    """Minimum seconds, by what takes them."""

    parts: Mapping[Limit, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def limit(self) -> Limit:
        """What takes most of the time."""
        return max(self.parts, key=lambda limit: self.parts[limit])


@dataclass(frozen=True)
class Estimate:
    """Upper bounds on a layout's speed."""

    input_len: int
    """Tokens of the prompt, and of context of decodes."""
    rows: int
    """Requests that decode at once, in all replicas."""
    decode_one: Floor
    """Time of a token if there is only one request."""
    decode: Floor
    """Time in which all rows get a token."""
    ttft: Floor
    """Time of a prompt without other requests."""

    @property
    def tokens_per_second_one(self) -> float:
        return 1 / self.decode_one.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all rows together."""
        return self.rows / self.decode.seconds


def estimate(config: EngineConfig, machine: Machine, input_len: int) -> Estimate:
    """Return the floors of a resolved layout, with prompts of `input_len` tokens."""
    floors = _Floors(config, machine)
    cache, replicas = config.cache, config.parallel.replicas
    rows = max(1, min(config.scheduler.max_num_seqs, cache.num_blocks // cache.max_blocks(input_len + 1, 1)))
    return Estimate(
        input_len=input_len,
        rows=rows * replicas,
        decode_one=Floor(floors.decode(1, input_len + 1, busy=1)),
        decode=Floor(floors.decode(rows, input_len + 1, busy=replicas)),
        ttft=Floor(floors.prefill(input_len)),
    )


def doubling_context(config: EngineConfig) -> float:
    """Return the tokens of context with which a token takes twice as many operations as without; infinite if no layer
    attends to all of them."""
    spec, linear, attended = config.model.architecture, 0.0, 0
    for layer in spec.layers:
        mixture, attention = layer.feed_forward, layer.attention
        experts = [*mixture.expert_matrices(spec.hidden_size, 1)] if isinstance(mixture, MoESpec) else []
        for each in layer.matrices(spec.hidden_size, 1):
            if each.module.startswith("feed_forward.media_experts."):
                continue  # no token of text uses them
            if isinstance(mixture, MoESpec) and each in experts:
                linear += each.rows * each.columns * mixture.top_k
            else:
                linear += each.elements
        if attention is None or isinstance(attention, CompressedAttentionSpec):
            continue
        if not attention.window and not attention.top_k:
            attended += attention.num_heads * (attention.head_dim + (attention.v_head_dim or attention.head_dim))
    return linear / attended if attended else math.inf


class _Product(NamedTuple):
    """A product of a layer: elements of its weight, of one expert's for experts, and bits of the numbers multiplied."""

    elements: int
    bits: int
    share: float = 0.0
    """Of experts: the number of this rank's that a token of any replica chooses, on average; 0: another layer."""
    is_recurrent: bool = False
    """Of a recurrent layer, in which each rank computes all tokens of a step."""


def _count_kernels(layer: LayerSpec, hidden: int, tp: int) -> int:
    """The kernels of a layer's step, one after the other."""
    kernels = len({each.module for each in layer.matrices(hidden, tp)})
    for part in layer.parts:
        match part:
            case MoESpec():
                kernels += achieved.MOE_KERNELS
            case MLPSpec():
                kernels += achieved.MLP_KERNELS
            case MLASpec() | CompressedAttentionSpec():
                kernels += achieved.LATENT_ATTENTION_KERNELS
            case RecurrentSpec():
                kernels += achieved.RECURRENT_KERNELS
            case _:
                kernels += achieved.ATTENTION_KERNELS
    return kernels


class _Floors:
    """The floors of a layout's steps on a machine."""

    def __init__(self, config: EngineConfig, machine: Machine) -> None:
        parallel = config.parallel
        self.config, self.machine = config, machine
        self.stages = range(len(parallel.stages))
        self._achieved = machine.achieved
        self._arch = parallel_config.rank_spec(config.model.architecture, parallel)
        self._sizes = MemoryPlan.of(config)
        self._layers = [Counter(self._arch.layers[number] for number in layers) for layers in parallel.stages]
        self._products = [self._count_products(layers) for layers in parallel.stages]
        """The products of each stage's layers."""
        self._share = min(1.0, machine.count / max(1, parallel.num_local_ranks))
        """A rank's share of a device."""

    def decode(self, rows: int, context: int, busy: int) -> Counter[Limit]:
        """Seconds in which each of the `rows` of each of `busy` replicas gets a token at `context` tokens."""
        plans = min(rows, len(self.stages))
        times = [self.stage(stage, math.ceil(rows / plans), 1, context, busy) for stage in self.stages]
        one_plan: Counter[Limit] = sum(times, Counter())
        slowest = max(times, key=lambda time: sum(time.values()))
        rounds: Counter[Limit] = Counter({limit: plans * seconds for limit, seconds in slowest.items()})
        return max(one_plan, rounds, key=lambda time: sum(time.values()))

    def prefill(self, tokens: int) -> Counter[Limit]:
        """Seconds until the last stage has computed a prompt of `tokens` tokens that is alone."""
        chunk = self.config.scheduler.share(tokens, len(self.stages))
        finished: list[Counter[Limit]] = [Counter() for _ in self.stages]
        for start in range(0, tokens, chunk):
            end = min(tokens, start + chunk)
            for stage in self.stages:
                begun = max(finished[stage], finished[max(0, stage - 1)], key=lambda time: sum(time.values()))
                finished[stage] = begun + self.stage(stage, 1, end - start, end, busy=1)
        return finished[-1]

    def stage(self, stage: int, requests: int, tokens: int, context: int, busy: int) -> Counter[Limit]:
        """Seconds of one step of a stage: `tokens` new tokens of each request, the last one at `context` tokens.

        `busy` replicas do the same at that time.
        """
        config, device, parallel = self.config, self.machine.device, self.config.parallel
        shares = parallel.prefill_context_parallel_size if tokens > 1 else 1  # decodes are not divided
        tokens = math.ceil(tokens / shares)  # of the last rank, whose queries attend to the most keys
        new, tp = requests * tokens, parallel.tensor_parallel_size
        coupled = new * busy if parallel.is_coupled else new
        read = read_bytes(config, self._arch, stage, self._sizes.weights[stage], coupled)
        read += requests * config.cache.blocks_moved(context, tokens) * self._sizes.kv_block[stage]
        read += requests * (self._read_again(stage, tokens, context) - self._unread(stage, tokens, context))
        bandwidth = device.bandwidth * self._achieved.bandwidth
        if read <= device.cache * self._share:
            bandwidth = device.cache_bandwidth
        operations: defaultdict[int, float] = defaultdict(float)
        for products, count in self._products[stage].items():
            for each in products:
                rows = coupled * each.share if each.share else new * shares if each.is_recurrent else new
                operations[each.bits] += count * 2 * each.elements * rows
        operations[self._bits] += sum(
            count * self._operations(each, requests, tokens, context, shares)
            for each, count in self._layers[stage].items()
        )
        kernels = sum(
            count * _count_kernels(each, self._arch.hidden_size, tp) for each, count in self._layers[stage].items()
        )
        if stage == len(self.stages) - 1:
            _, head = self._arch.outer_matrices(tp)
            operations[self._bits] += 2 * requests * head.elements
            kernels += achieved.LAST_KERNELS
        compute = sum(count / device.flops.get(bits, device.flops[16]) for bits, count in operations.items())
        memory, compute = read / (bandwidth * self._share), compute / (self._achieved.flops * self._share)
        return Counter(
            {
                "bandwidth" if memory >= compute else "compute": max(memory, compute),
                "launches": kernels * self._achieved.kernel_seconds,
                "communication": self._links(stage, requests, new, coupled, shares),
            }
        )

    @property
    def _bits(self) -> int:
        """Bits of the numbers that are multiplied, except in products of rounded inputs and quantized weights."""
        model = self.config.model
        return 8 if model.quantization else 8 * DTYPE_BYTES[model.dtype]

    def _count_products(self, layers: range) -> Counter[tuple[_Product, ...]]:
        """The products of these layers. Without quantization, equal layers have the same."""
        keys = [number if self.config.model.keeps_quantized() else id(self._arch.layers[number]) for number in layers]
        products = {key: self._products_of(number) for key, number in dict(zip(keys, layers, strict=True)).items()}
        return Counter(products[key] for key in keys)

    def _products_of(self, number: int) -> tuple[_Product, ...]:
        """The products of a layer on a rank."""
        config, layer = self.config, self._arch.layers[number]
        tp, hidden, device = config.parallel.tensor_parallel_size, self._arch.hidden_size, config.parallel.device
        mixture, products = layer.feed_forward, []
        experts = [*mixture.expert_matrices(hidden, tp)] if isinstance(mixture, MoESpec) else []
        ranks = 1 if config.parallel.experts is None else config.parallel.expert_ranks
        for each in layer.matrices(hidden, tp):
            form, bits = form_of_matrix(config.model, device, number, each), self._bits
            if form is not None and form.rounds_inputs(each.columns, device):
                bits = form.bits
            if each.module.startswith("feed_forward.media_experts."):
                continue  # no token of text uses them
            if isinstance(mixture, MoESpec) and each in experts:
                products.append(_Product(each.rows * each.columns, bits, mixture.top_k / ranks))
            else:
                products.append(_Product(each.elements, bits, is_recurrent=each.module.startswith("state.")))
        return tuple(products)

    def _operations(self, layer: LayerSpec, requests: int, tokens: int, context: int, shares: int = 1) -> float:
        """Operations of a layer besides those of its linear layers, for `tokens` of each request, one of `shares`."""
        tp, attention = self.config.parallel.tensor_parallel_size, layer.attention
        sums = 3 * shares * requests * tokens * (0 if layer.state is None else math.prod(layer.state.state_shape(tp)))
        if attention is None:
            return 2 * sums
        if isinstance(attention, CompressedAttentionSpec):
            features, most = 2 * attention.head_dim, min(context, attention.window) + attention.max_entries(context)
        else:
            features = attention.head_dim + (attention.v_head_dim or attention.head_dim)
            most = min(attention.window or context, attention.top_k or context)
        index = attention.index_features(tp) if context > most else 0
        pairs, scored = (_pairs(tokens, context, min(context, window)) for window in (most, context))
        attended = pairs * features * attention.num_heads / tp + scored * index
        return 2 * (sums + requests * attended)

    def _read_again(self, stage: int, tokens: int, context: int) -> float:
        """Bytes of a request's KV cache that layers read in addition to the layer that it belongs to."""
        cache, tp = self.config.cache, self.config.parallel.tensor_parallel_size
        context_size, again = self.config.parallel.decode_context_parallel_size, 0.0
        for layer, count in self._layers[stage].items():
            attention = layer.attention
            if attention is not None and layer.kv_source is not None:
                shape = KVCacheShape(*attention.kv_shape(tp), context_size)
                row = block_bytes(shape, cache.block_size, cache.dtype)
                keys = min(context, (attention.window or context) + tokens - 1)
                again += count * keys * row / cache.block_size
        return again

    def _unread(self, stage: int, tokens: int, context: int) -> float:
        """Bytes of a request's KV cache that sparse attention does not select."""
        cache, tp = self.config.cache, self.config.parallel.tensor_parallel_size
        context_size, unread = self.config.parallel.decode_context_parallel_size, 0.0
        for layer, count in self._layers[stage].items():
            attention = layer.attention
            if isinstance(attention, CompressedAttentionSpec):
                row = block_bytes(KVCacheShape(*attention.kv_shape(tp)), 1, cache.dtype)
                stored = context / tokens_per_row([self._arch], cache.block_size)  # also in layers without entries
                ratio, most = attention.compressor_ratio, tokens * attention.max_entries(context)
                unread += count * max(0.0, stored - (min(context // ratio, most) if ratio else 0)) * row
            elif attention is not None and attention.top_k is not None:
                shape = KVCacheShape(*attention.kv_shape(tp), context_size)
                row = block_bytes(shape, cache.block_size, cache.dtype)
                unread += count * max(0, context - tokens * attention.top_k) * row / cache.block_size
        return unread

    def _links(self, stage: int, requests: int, new: int, coupled: int, shares: int) -> float:
        """Seconds of communication: inside the stage, whose ranks have `new` tokens in each of `shares` shares, among
        replicas that share experts, and to the next stage."""
        parallel, machine, cache = self.config.parallel, self.machine, self.config.cache
        tp, token = parallel.tensor_parallel_size, self._arch.hidden_size * DTYPE_BYTES[self.config.model.dtype]
        ranks_per_host = parallel.world_size // parallel.nodes
        layers, first = self._layers[stage].items(), stage * parallel.stage_ranks
        seconds = 0.0

        def on_hosts(ranks: range) -> list[int]:
            """How many of them each host has."""
            return [*Counter(rank // ranks_per_host for rank in ranks).values()]

        if tp > 1:
            own = on_hosts(range(first, first + tp))
            number = (stage == 0) + sum(count * (len(each.parts) - each.is_parallel) for each, count in layers)
            recurrent = sum(count for each, count in layers if each.state is not None)
            seconds += (number - recurrent) * self._all_reduce(own, new * token)
            seconds += recurrent * self._all_reduce(own, shares * new * token)
        if (context := parallel.decode_context_parallel_size) > 1:
            own = on_hosts(range(first, first + context))
            seconds += sum(count * self._combine(own, each, requests, new) for each, count in layers)
        for layer, count in layers:
            if shares > 1:  # they gather the inputs of recurrent layers, and rows of the cache
                rows, attention = [token] * (layer.state is not None), layer.attention
                if attention is not None and layer.kv_source is None:
                    shapes = attention.kv_shape(tp), attention.index_shape()
                    rows += [block_bytes(KVCacheShape(*each), 1, cache.dtype) for each in shapes if each is not None]
                own = on_hosts(range(first, first + parallel.stage_ranks, tp))
                seconds += count * sum(self._all_reduce(own, shares * new * row // 2) for row in rows)  # sends half
            if parallel.is_coupled and isinstance(layer.feed_forward, MoESpec):
                seconds += 2 * count * self._exchange(layer.feed_forward.top_k, new, coupled, token)
        if stage < len(self.stages) - 1:
            is_last_of_host = (stage + 1) * parallel.stage_ranks % ranks_per_host == 0
            link = machine.network if is_last_of_host else machine.device.link
            passed = self._arch.stage_width * DTYPE_BYTES[self.config.model.dtype]
            seconds += link.latency.base + new * passed / link.bandwidth
        return seconds

    def _combine(self, ranks: list[int], layer: LayerSpec, requests: int, new: int) -> float:
        """Seconds in which ranks that divide the tokens of the cache gather queries and logarithms, and add results."""
        attention, tp = layer.attention, self.config.parallel.tensor_parallel_size
        if attention is None or (isinstance(attention, MLASpec) and new > requests):  # prompts gather rows instead
            return 0.0
        heads, width = attention.num_heads // tp * sum(ranks), DTYPE_BYTES[self.config.model.dtype]
        row = attention.kv_shape(tp)[2]
        sizes = heads * row * width // 2, heads * sum(ranks) * 4 // 2, heads * row * 4  # gathering sends half as much
        return sum(self._all_reduce(ranks, new * size) for size in sizes)

    def _all_reduce(self, ranks: list[int], size: int) -> float:
        """Seconds of an all-reduce of `size` bytes among so many ranks on each host."""
        link, network, most, hosts = self.machine.device.link, self.machine.network, max(ranks), len(ranks)
        factor = 2 * (most - 1) / most
        if self.machine.device.has_multicast:
            factor = min(factor, 1 + 1 / most)
        inside = factor * size / link.bandwidth
        if hosts == 1:
            return link.seconds(most) + inside
        return (
            link.seconds(most)
            + network.seconds(hosts)
            + max(inside, 2 * (hosts - 1) / hosts * size / (network.bandwidth * min(ranks)))
        )

    def _exchange(self, top_k: int, new: int, coupled: int, token: int) -> float:
        """Seconds in which replicas that share experts send each other's tokens, of `token` bytes, in one direction."""
        parallel, nodes = self.config.parallel, self.machine.nodes
        link, network = self.machine.device.link, self.machine.network
        ranks, tokens = parallel.replicas, float(coupled)
        if parallel.experts is not None and parallel.experts.all2all_backend == "all_to_all":
            ranks = parallel.expert_ranks
            tokens = min(tokens, new / parallel.tensor_parallel_size * min(top_k, ranks))
        own_host, other_hosts = tokens * (1 / nodes - 1 / ranks) * token, tokens * (1 - 1 / nodes) * token
        latency = network.seconds(nodes) if nodes > 1 else link.seconds(ranks)
        return latency + max(own_host / link.bandwidth, other_hosts / network.bandwidth)


def _pairs(tokens: int, context: int, window: int) -> float:
    """Keys that `tokens` queries attend to together, the last one at `context`, each to at most `window` keys.

    They have context - tokens + 1, …, context keys: `rising` of them at most the window, the others more.
    """
    rising = max(0, min(tokens, window - context + tokens))
    return tokens * window - rising * (rising - 1) / 2
