"""The resolved plan as `quire serve` prints it. No torch."""

from __future__ import annotations

from collections import Counter

from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import ModelSpec, TransformersModelSpec
from quire.engine.config import topology
from quire.engine.config.devices import SHARE
from quire.engine.config.engine_config import EngineConfig, ParallelConfig
from quire.engine.config.kv_layout import kv_layout
from quire.engine.config.memory_plan import MemoryPlan, format_bytes, quantized_text, tokens_in_cache


def plan_text(config: EngineConfig) -> str:
    """Return the resolved plan as `serve` prints it."""
    model, parallel, cache = config.model, config.parallel, config.cache
    arch, sizes = model.architecture, MemoryPlan.of(config)
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    stored = f", {quantized_text(config)}," if model.quantized else ""
    weights = f" with {model.quantization} weights" if model.quantization else ""
    if model.stored_dtype and not (model.quantization or model.quantized):
        weights = f" with {model.stored_dtype} weights"
    limits = (
        f"at most {config.scheduler.max_num_seqs} run at once, "
        f"{'up to ' * config.scheduler.dynamic_chunking}{config.scheduler.max_num_batched_tokens:,} tokens a step"
    )
    lines = [
        f"{arch.name} from {model.path}{', by transformers' * isinstance(arch, TransformersModelSpec)}",
        f"{model.dtype}{stored}{weights} on {parallel.device}, {_layout_text(parallel)}",
        *parallel_lines(parallel, arch),
    ]
    if not parallel.local_replicas:
        return f"{lines[0]}\n  {parallel.replicas} replicas, none of them on this host"
    if model.pooling is not None:
        length = f"{model.max_model_len:,} tokens"
        verb = "embeds" if model.pooling.classes is None else "classifies"
        lines.append(f"{verb} prompts of up to {length} (--runner pooling): {model.pooling.text()}")
    lines += _stages_text(config)
    if (prefill := config.prefill) is not None:
        lines.append(f"  replicas for prompts have {_layout_text(prefill.parallel)}; {cache_text(prefill)}")
        lines += _links_text(prefill.parallel)
        lines += _stages_text(prefill)
    if (media := config.media) is not None:
        kinds = " and ".join(f"{kind}s" for kind, count in media.max_items.items() if count)
        quantized = f" with {model.tower_quantization} weights" if model.tower_quantization else ""
        lines.append(
            f"  stage 0 also has the tower for {kinds}{quantized}, and {format_bytes(sizes.media[0])} per rank for its "
            f"activations and the {media.encoder_cache_features:,} features that it keeps"
        )
    if (lora := config.lora) is not None:
        lines.append(
            f"  adapters: {format_bytes(lora.device_bytes)} per rank for up to {lora.num_slots} in a step, and "
            f"{format_bytes(lora.host_bytes)} of the host's memory for others that are ready to be swapped in"
        )
    if (store := config.kv_store) is not None and store.memory_bytes:
        disk = f", and {format_bytes(store.disk_bytes)} of disk in {store.disk_path}," * bool(store.disk_path)
        block = sum(kind.size for kind in kv_layout(config).kinds)  # of windows and states, few blocks have entries
        tokens = (store.memory_bytes + store.disk_bytes) // block * cache.block_size
        lines.append(
            f"  KV store: {format_bytes(store.memory_bytes)} of the host's memory{disk} for prefixes of "
            f"{store.min_tokens} tokens or more: at least {tokens:,} tokens"
        )
    if (drafter := config.drafter) is not None and (speculative := config.scheduler.speculative) is not None:
        firsts = range((pp - 1) * parallel.stage_ranks, pp * parallel.stage_ranks, tp)
        of_each = f" (rank{'s' * (len(firsts) > 1)} {', '.join(map(str, firsts))})"
        where = "" if drafter.parallel.tensor_parallel_size == tp else of_each
        kind = f"draft model {drafter.model.architecture.name}"
        if speculative.reads_hidden_states:
            kind = f"{speculative.method} head"
        lines.append(
            f"  stage {pp - 1}{where} also has the {kind} from {drafter.model.path}, for up to "
            f"{speculative.num_speculative_tokens} tokens at once; its weights and KV cache are included"
        )
    if not cache.num_blocks:
        return "\n".join([*lines, limits])
    if graphs := _graphs_text(config, format_bytes(sizes.graphs)):
        lines.append(f"  {graphs}")
    windows = Counter(group.window for group in cache.groups)
    if any(windows):
        unpacked = [
            f"{number} for layers that keep {'all' if window is None else f'a window of {window:,}'} tokens"
            for window, number in windows.items()
        ]
        lines.append(f"  block tables: {', '.join(unpacked)}")
    about = ", about, until it has been measured what the rest takes" * (parallel.device == "cuda")
    lines.append(f"{cache_text(config)}{about}; {limits}")
    return "\n".join(lines)


def _layout_text(parallel: ParallelConfig) -> str:
    ranks = f"{parallel.world_size} rank{'s' * (parallel.world_size > 1)}"
    size = parallel.decode_context_parallel_size
    context = f" (the tokens of each KV block divided by {size})" * (size > 1)
    shares = parallel.prefill_context_parallel_size
    prefill = f" × prefill context parallel {shares}" * (shares > 1)
    return (
        f"tensor parallel {parallel.tensor_parallel_size}{context}{prefill} × pipeline parallel "
        f"{parallel.pipeline_parallel_size} = {ranks} ({parallel.executor})"
    )


def _stages_text(config: EngineConfig) -> list[str]:
    """Return what the ranks of each stage hold."""
    cache, sizes, width, lines = config.cache, MemoryPlan.of(config), config.parallel.stage_ranks, []
    kv_type = "" if cache.dtype == config.model.dtype else f" in {cache.dtype}"
    for stage, layers in enumerate(config.parallel.stages):
        first = stage * width
        ranks = f"rank {first}" if width == 1 else f"ranks {first}-{first + width - 1}"
        size = format_bytes(sizes.kv_block[stage] * cache.num_blocks)
        cached = f"KV cache {size} in {cache.num_blocks:,} blocks of {cache.block_size} tokens{kv_type}"
        if cache.recent is not None:
            cached += f" and {format_bytes(sizes.recent[stage])} in {cache.recent.dtype} for the newest tokens"
        if not cache.num_blocks:
            cached = "no room for a KV cache" if sizes.kv_block[stage] else "no KV cache"
        lines.append(
            f"  stage {stage} ({ranks}): layers {layers.start}-{layers.stop - 1}, per rank weights "
            f"{format_bytes(sizes.weights[stage])}, {cached}"
        )
    return lines


def cache_text(config: EngineConfig) -> str:
    """Return a line about the capacity of the KV cache."""
    tokens, max_len = tokens_in_cache(config), config.model.max_model_len
    return f"KV cache holds {tokens:,} tokens: {tokens / max_len:.1f} requests at the full length of {max_len:,}"


def parallel_lines(parallel: ParallelConfig, arch: ModelSpec) -> list[str]:
    """Return the printed plan of the layout: hosts, links, replicas and experts. Empty for a single rank."""
    return [
        *_hosts_text(parallel),
        *_sharing_text(parallel),
        *_links_text(parallel),
        *_replicas_text(parallel),
        *_experts_text(parallel, arch),
    ]


def _hosts_text(parallel: ParallelConfig) -> list[str]:
    lines = []
    for each in _placed(parallel):
        parts = [
            f"{_numbers('rank', ranks)} on host {node}{_host_suffix(each, node)}"
            for node in each.hosts
            if (ranks := each.ranks_of(node))
        ]
        whose = f"replica {each.replica} on " * (parallel.replicas > 1)
        lines.append(f"  {whose}{len(parts)} host{'s' * (len(parts) > 1)}: {', '.join(parts)}")
    return lines * (parallel.nodes > 1)


def _placed(parallel: ParallelConfig) -> list[ParallelConfig]:
    """Return the replicas whose places are known here, and differ."""
    return [parallel.of_replica(replica) for replica in range(len(parallel.ray))] or [parallel]


def _host_suffix(parallel: ParallelConfig, node: int) -> str:
    if parallel.placement is not None:
        return f" ({parallel.placement.nodes[node - 1][1]})"  # node 0 is the core's
    return " (this host)" * (node == parallel.node)


def _sharing_text(parallel: ParallelConfig) -> list[str]:
    if parallel.ranks_per_device == 1:
        return []
    ranks, gpus = len(parallel.devices), len(set(parallel.devices))
    which = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    return [f"  {ranks} ranks share {which} ({SHARE}) and communicate by gloo: slow, for testing a layout"]


def _links_text(parallel: ParallelConfig) -> list[str]:
    """Return the links that tensor and pipeline parallelism use, and warnings about slow ones."""
    tp, links, is_cpu = parallel.tensor_parallel_size, parallel.links, parallel.device == "cpu"
    shared = " through its memory" * (parallel.ranks_per_device > 1)
    network = f"over {links.network}" if links.network else "over the network"
    spread = [[ranks for node in each.hosts if (ranks := each.ranks_of(node))] for each in _placed(parallel)]
    hosts = max(spread, key=len)
    is_cut, is_stage_cut = (
        any(ranks.start % size or ranks.stop % size for each in spread for ranks in each)
        for size in (tp, parallel.stage_ranks)
    )
    parts, warnings = [], []
    if tp > 1:
        inside = " over shared memory" if is_cpu else shared or _over_link(links.tensor)
        parts.append(f"tensor parallel {f'across hosts {network}' if is_cut else f'inside a host{inside}'}")
        if is_cut and not links.network:
            suggested = max(size for size in range(1, tp) if not any(n % size for n in (tp, *map(len, hosts))))
            warnings.append(
                "warning: tensor parallelism communicates between hosts in every layer, and no fast network "
                f"(InfiniBand, RoCE) is active on this host: use --tensor-parallel-size {suggested} "
                f"--pipeline-parallel-size {tp * parallel.pipeline_parallel_size // suggested}"
            )
        if not is_cut and links.tensor is topology.LinkType.SOCKETS:
            warnings.append(
                "warning: tensor parallelism communicates between CPU sockets in every layer: a smaller "
                "--tensor-parallel-size with more --pipeline-parallel-size may be faster"
            )
    if parallel.prefill_context_parallel_size > 1:
        inside = " over shared memory" if is_cpu else shared or _over_link(links.tensor)
        where = f"across hosts {network}" if is_stage_cut else f"inside a host{inside}"
        parts.append(f"prefill context parallel {where}")
    if parallel.pipeline_parallel_size > 1:
        inside = " over loopback" if is_cpu else shared or _over_link(links.pipeline)
        parts.append(f"pipeline {f'across hosts {network}' if len(hosts) > 1 else f'inside a host{inside}'}")
    return [f"  {'; '.join(parts)}"] * bool(parts) + warnings


def _over_link(link: topology.LinkType | None) -> str:
    return "" if link is None else f" over {link.text}"


def _replicas_text(parallel: ParallelConfig) -> list[str]:
    if parallel.replicas == 1:
        return []
    local_ranks, step = parallel.local_replicas, "step together" if parallel.is_coupled else "run independently"
    on_host = f": {_numbers('replica', local_ranks) if len(local_ranks) else 'none'} on this host" * (not parallel.ray)
    roles = ""
    if parallel.prefill_replicas:
        prefill = range(parallel.prefill_replicas)
        decode = range(prefill.stop, parallel.replicas)
        roles = f"{_numbers('replica', prefill)} for prompts, {_numbers('replica', decode)} for decodes, "
    return [f"  {parallel.replicas} replicas, which {step}{on_host}, {roles}each with the ranks below"]


def _experts_text(parallel: ParallelConfig, arch: ModelSpec) -> list[str]:
    """Return how the experts are distributed over the ranks."""
    if (experts := parallel.experts) is None:
        return []
    ranks = parallel.replicas * parallel.tensor_parallel_size
    counts = sorted({layer.feed_forward.num_routed for layer in arch.layers if isinstance(layer.feed_forward, MoESpec)})
    copies = f" and {experts.num_redundant_experts} copies" * bool(experts.num_redundant_experts)
    which = f" ({parallel.replicas} replicas × {parallel.tensor_parallel_size})" * parallel.is_coupled
    each = " or ".join(str((count + experts.num_redundant_experts) // ranks) for count in counts)
    text = [
        f"{' or '.join(map(str, counts))} experts a layer{copies} over {ranks} rank{'s' * (ranks > 1)}{which}, "
        f"{each} each, {experts.placement}"
    ]
    if parallel.is_coupled:
        across = " across hosts" * (len(parallel.local_replicas) < parallel.replicas)
        text.append(f"tokens are dispatched by {experts.all2all_backend}{across}")
    if experts.enable_eplb:
        text.append(f"rebalanced every {experts.step_interval:,} steps")
    return [f"  {'; '.join(text)}"]


def _numbers(name: str, numbers: range) -> str:
    """rank 0, ranks 0-3"""
    return f"{name} {numbers[0]}" if len(numbers) == 1 else f"{name}s {numbers[0]}-{numbers[-1]}"


def _graphs_text(config: EngineConfig, size: str) -> str:
    """Return a line of the plan; empty on CPU. `size` is the formatted estimate."""
    graphs = config.graphs
    if config.parallel.device == "cpu":
        return ""
    if graphs.disabled_reason:
        return f"no CUDA graphs: {graphs.disabled_reason}"
    if not graphs.sizes:
        return ""
    count = len(graphs.sizes)
    return (
        f"{count} CUDA graph{'s' * (count > 1)} for decodes of up to {graphs.sizes[-1]} requests, about {size} a rank"
    )
