"""The table of `vllm serve`'s flags and environment variables, and of their equivalents in `quire serve`.

`quire.server.config.vllm` applies it, and docs/reference/vllm.md is generated from it. It has the flags that existing
command lines use and Quire does not have; any other flag is unknown. Flags of the same name and meaning are not here. A
flag is written as its name and its other names, separated by `|`, and a suffix: nothing (on or off, with a `--no-`
form), `=` (a value), `?` (possibly a value) or `+` (several values).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, get_args, get_type_hints

from quire.engine.architecture.quantization import METHODS
from quire.engine.protocol.errors import ConfigError
from quire.server.config.server_options import ChatOptions

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _number(text: str) -> str:
    """Return 16k (decimal), 16K (binary) or 25.6k as a plain number; another text as it is."""
    try:
        return str(round(float(text[:-1]) * _UNITS[text[-1]])) if text[-1:] in _UNITS else text
    except (ValueError, OverflowError):
        return text


def _length(text: str) -> str:
    return "auto" if text == "-1" else _number(text)


def _quantization(text: str) -> str:
    method = _METHODS.get(text, text)
    if method not in ("int8", "int4", *METHODS):
        raise ConfigError(
            f"argument --quantization: {text} is not supported; omit it, as the method of a checkpoint is recognized, "
            "or use int8, int4, fp8 or mxfp4, which quantize while loading"
        )
    return method


_METHODS = {
    "gpt_oss_mxfp4": "mxfp4",
    "deepseek_v4_fp8": "fp8",
    "awq_marlin": "awq",
    "auto_awq": "awq",
    "gptq_marlin": "gptq",
    "auto_gptq": "gptq",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
}
"""vLLM's names of kernels for a method, and the method."""


def _level(text: str) -> str:
    return {"critical": "error", "notset": "debug"}.get(text.lower(), text.lower())


def _renamed(**names: str) -> Callable[[str], str]:
    return lambda text: names.get(text, text)


_ALL_TO_ALL = "deepep_high_throughput deepep_low_latency flashinfer_all2allv flashinfer_nvlink_two_sided pplx"
_ATTENTION = (
    "CPU_ATTN CUTLASS_MLA FLASHINFER_MLA FLASHMLA FLASHMLA_SPARSE FLASH_ATTN FLASH_ATTN_MLA FLEX_ATTENTION "
    "ROCM_AITER_FA ROCM_AITER_MLA ROCM_ATTN TORCH_SDPA TRITON_MLA"
)
REPLACED: dict[str, dict[str, str]] = {
    "--all2all-backend": dict.fromkeys(_ALL_TO_ALL.split(), "all_to_all"),
    "--attention-backend": dict.fromkeys(_ATTENTION.split(), "auto"),
}
"""Values of vLLM for which Quire uses another value, which the log reports."""


def _all_to_all(text: str) -> str:
    return {"naive": "allgather_reducescatter", **REPLACED["--all2all-backend"]}.get(text, text)


def _attention(text: str) -> str:
    names = {"TRITON_ATTN": "triton", "FLASHINFER": "flashinfer", **REPLACED["--attention-backend"]}
    return names.get(text.upper(), text)


def _parser(option: str, of_what: str) -> Callable[[str], str]:
    supported = get_args(get_type_hints(ChatOptions)[option])

    def convert(text: str) -> str:
        if text not in supported:
            raise ConfigError(
                f"argument --{option.replace('_', '-')}: {text}: this format of {of_what} is not supported; omit "
                f"the flag, or use one of {', '.join(supported)}"
            )
        return text

    return convert


SAME: dict[str, tuple[str, Callable[[str], str]]] = {
    "--all2all-backend": (
        "`naive` is `allgather_reducescatter`, DeepEP's and the others are `all_to_all`, with a note in the log",
        _all_to_all,
    ),
    "--attention-backend": (
        "`TRITON_ATTN` is `triton`, `FLASHINFER` is `flashinfer`; with another one of vLLM's Quire chooses, with a "
        "note in the log",
        _attention,
    ),
    "--dtype": (
        "`half` is `float16`, `float` is `float32`",
        lambda text: {"half": "float16", "float": "float32"}.get(text := text.removeprefix("torch."), text),
    ),
    "--kv-cache-dtype": (
        "`fp8_per_token_head` and `int8_per_token_head` are `fp8` and `int8`, which have these scales; "
        "`int4_per_token_head` is `int4`, whose keys have a scale for each feature of a block instead",
        _renamed(fp8_per_token_head="fp8", int8_per_token_head="int8", int4_per_token_head="int4"),
    ),
    "--kv-cache-memory-bytes": ("also as `16G` or `25.6g`", _number),
    "--load-format": (
        "`hf` and `mistral` are `auto`; `fastsafetensors`, `instanttensor` and `runai_streamer` are `safetensors`",
        _renamed(
            **dict.fromkeys(("hf", "mistral"), "auto"),
            **dict.fromkeys(("fastsafetensors", "instanttensor", "runai_streamer"), "safetensors"),
        ),
    ),
    "--log-level": ("in capitals, too; `CRITICAL` is `error`, `NOTSET` is `debug`", _level),
    "--max-model-len": ("also as `16k` or `16K`; `-1` is `auto`", _length),
    "--max-num-batched-tokens": ("also as `16k` or `16K`", _number),
    "--quantization": (
        f"a checkpoint's method ({', '.join(f'`{name}`' for name in METHODS)}), or a name of vLLM's for one of its "
        f"kernels ({', '.join(f'`{name}`' for name in _METHODS)}); other methods are not supported",
        _quantization,
    ),
    "-q": ("as `--quantization`", _quantization),
    "--reasoning-parser": (
        "formats that are not listed in [Command line](cli.md) are not supported",
        _parser("reasoning_parser", "reasoning"),
    ),
    "--tool-call-parser": (
        "formats that are not listed in [Command line](cli.md) are not supported",
        _parser("tool_call_parser", "tool calls"),
    ),
    "--model-impl": ("`vllm` is `quire`", _renamed(vllm="quire")),
}
"""Flags of the same name in Quire with values of vLLM's: their meaning, and the conversion."""


LISTS = ("--allowed-headers", "--allowed-methods", "--allowed-origins")
"""Flags of the same name in Quire, with several values, that vLLM takes as a JSON list."""


def _given(flag: str) -> Callable[[list[str]], list[str]]:
    return lambda values: [flag, *values]


def _chosen(name: str, supported: str, flag: str = "--runner", **values: str) -> Callable[[list[str]], list[str]]:
    """Convert a choice of vLLM's; empty results mean Quire's default."""

    def convert(given: list[str]) -> list[str]:
        if (found := values.get(given[0])) is None:
            raise ConfigError(f"{name} {given[0]} is not supported; use {supported}")
        return [flag, found] if found else []

    return convert


def _overrides(name: str, read: Callable[[str], Any]) -> Callable[[list[str]], list[str]]:
    return lambda values: [f"--hf-overrides.{name}", json.dumps(read(values[0]))]


KV_TRANSFER = "--kv-transfer-config"


class _Connector(NamedTuple):
    """A connector that keeps KV on its own host: keys of its extra config."""

    memory: str
    """The size of its memory."""
    memory_unit: int
    """What it is divided by to be GiB."""
    folder: str
    """The folder on its disk; empty: it has none."""
    disk: str
    """The size there."""
    disk_unit: int
    only: dict[str, tuple[str, ...]]
    """Keys with the values that change nothing."""


_CONNECTORS = {
    "OffloadingConnector": _Connector("cpu_bytes_to_use", 1 << 30, "", "", 1, {"spec_name": ("CPUOffloadingSpec",)}),
    "SimpleCPUOffloadConnector": _Connector(
        *("cpu_bytes_to_use", 1 << 30, "disk_path", "disk_capacity_bytes", 1 << 30),
        {"kv_offload_backend": ("cpu", "disk")},
    ),
    **dict.fromkeys(
        ("LMCacheConnector", "LMCacheConnectorV1"),
        _Connector("lmcache.max_local_cpu_size", 1, "lmcache.local_disk", "lmcache.max_local_disk_size", 1, {}),
    ),
}
_KV_TRANSFER_UNUSED = (
    *(
        "kv_connector",
        "kv_connector_extra_config",
        "kv_role",
        "kv_load_failure_policy",
        "engine_id",
        "kv_ip",
        "kv_port",
    ),
    *("kv_rank", "kv_parallel_size", "kv_buffer_device", "kv_buffer_size"),
)
"""Keys that are read elsewhere, or are about connections to other hosts."""
_CONNECTOR_UNUSED = (
    *(
        "block_size",
        "blocks_per_chunk",
        "eviction_policy",
        "max_tracker_size",
        "offload_prompt_only",
        "use_page_cache",
        "store_threshold",
    ),
    *(
        "lazy_offload",
        "lazy_offload_min_prefix_tokens",
        "lmcache.chunk_size",
        "lmcache.local_cpu",
        "lmcache.save_decode_cache",
        "lmcache.cache_policy",
    ),
)
"""Keys about how entries are divided, chosen and evicted, which Quire decides itself."""


def _kv_transfer(values: list[str]) -> list[str]:
    """Convert a connector that keeps KV in the memory or on the disk of its own host."""
    try:
        config = json.loads(values[0])
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ConfigError(f"argument {KV_TRANSFER}: invalid JSON object value: {values[0]!r}")
    if (name := config.get("kv_connector")) is None:
        return []
    if not isinstance(name, str) or name not in _CONNECTORS:
        raise ConfigError(
            f"argument {KV_TRANSFER}: kv_connector {name} is not supported; use --kv-offloading-size and "
            f"--kv-disk, or one of {', '.join(_CONNECTORS)}; for prefill apart from decode, --prefill-replicas and "
            "--decode-replicas of one server"
        )
    connector = _CONNECTORS[name]
    if (role := config.get("kv_role", "kv_both")) != "kv_both":
        text = f"argument {KV_TRANSFER}: kv_role {role} is not supported; use kv_both, or --prefill-replicas"
        raise ConfigError(text)
    if config.get("kv_load_failure_policy", "recompute") != "recompute":
        raise ConfigError(
            f"argument {KV_TRANSFER}: what cannot be loaded is computed; use kv_load_failure_policy recompute"
        )
    if not isinstance(more := config.get("kv_connector_extra_config") or {}, dict):
        raise ConfigError(f"argument {KV_TRANSFER}: kv_connector_extra_config must be a JSON object, got {more!r}")
    more = {**more}
    for key, accepted in connector.only.items():
        if (value := more.pop(key, None)) is not None and value not in accepted:
            raise ConfigError(
                f"argument {KV_TRANSFER}: {key} {value} is not supported, as Quire has tiers of its own; use "
                f"{accepted[0]}, and --kv-disk PATH:GIB for a disk"
            )
    size, path, disk_size = (more.pop(key, None) for key in (connector.memory, connector.folder, connector.disk))
    unknown = [key for key in config if key not in _KV_TRANSFER_UNUSED]
    unknown += [key for key, value in more.items() if key not in _CONNECTOR_UNUSED and value]
    if unknown:
        raise ConfigError(
            f"argument {KV_TRANSFER}: {unknown[0]} is not supported, as Quire has tiers of its own; omit it, and use "
            "--kv-offloading-size GIB for memory, and --kv-disk PATH:GIB for a disk"
        )
    if size is None:
        raise ConfigError(
            f"argument {KV_TRANSFER}: {name} has no size; set {connector.memory}, or use --kv-offloading-size"
        )
    if path and not disk_size:
        raise ConfigError(
            f"argument {KV_TRANSFER}: {connector.folder} has no size; set {connector.disk}, or use --kv-disk"
        )
    flags = ["--kv-offloading-size", f"{float(size) / connector.memory_unit:g}"]
    if path:
        flags += ["--kv-disk", f"{path.removeprefix('file://')}:{float(disk_size) / connector.disk_unit:g}"]
    return flags


PARTS: dict[str, tuple[dict[str, str], str, str]] = {
    "--attention-config|-ac=": (
        {"backend": "--attention-backend"},
        "flash_attn_version use_trtllm_attention",
        "Quire chooses the fastest correct kernels itself",
    ),
    "--eplb-config=": (
        {"num_redundant_experts": "--num-redundant-experts", "step_interval": "--eplb-step-interval"},
        "log_balancedness use_async window_size",
        "Quire measures and balances the load in its own way",
    ),
    "--profiler-config=": (
        {"torch_profiler_dir": "--torch-profiler-dir"},
        "profiler=torch torch_profiler_record_shapes torch_profiler_use_gzip torch_profiler_with_flops "
        "torch_profiler_with_memory torch_profiler_with_stack",
        "the body of POST /start_profile and the flags of `quire profile` say what to record",
    ),
    "--structured-outputs-config=": (
        {"reasoning_parser": "--reasoning-parser"},
        "backend",
        "llguidance is the only backend",
    ),
}
"""Flags with a JSON object: the keys that are flags of Quire, the keys without effect, and the reason for these. After
`=`: the only value that is accepted, as it changes nothing. Other keys are errors, unless their value is false or
empty."""


RENAMED: dict[str, tuple[str, Callable[[list[str]], list[str]]]] = {
    "--convert=": (
        "`embed`: `--runner pooling`; `classify`: nothing, as the architecture says so",
        _chosen("--convert", "embed", auto="", none="", classify="", embed="pooling"),
    ),
    "--cudagraph-capture-sizes+": (
        "`--cuda-graph-sizes`",
        lambda values: ["--cuda-graph-sizes", ",".join(values)],
    ),
    "--data-parallel-backend|-dpb=": (
        "`ray`: `--distributed-executor-backend ray`, for all replicas",
        _chosen("--data-parallel-backend", "mp or ray", "--distributed-executor-backend", mp="", ray="ray"),
    ),
    "--data-parallel-rank|-dpn=": (
        "`--data-parallel-start-rank`, with one replica",
        lambda values: ["--data-parallel-start-rank", values[0], "--data-parallel-size-local", "1"],
    ),
    "--enable-log-requests": (
        "`--access-log`; prompts are shown only with `--log-prompts`",
        lambda _: ["--access-log"],
    ),
    "--kv-transfer-config=": (
        "`OffloadingConnector`, `SimpleCPUOffloadConnector` and `LMCacheConnectorV1`, with their sizes: "
        "`--kv-offloading-size` and `--kv-disk`; instead of others, `--prefill-replicas` and `--decode-replicas`",
        _kv_transfer,
    ),
    "--max-cudagraph-capture-size=": (
        "`--cuda-graph-sizes` up to this one",
        lambda values: ["--cuda-graph-sizes", ",".join(map(str, [1, 2, 4, *range(8, int(values[0]) + 1, 8)]))],
    ),
    "--model=": ("`MODEL`", lambda values: values),
    "--rope-scaling=": ("`--hf-overrides.rope_scaling`", _overrides("rope_scaling", json.loads)),
    "--rope-theta=": ("`--hf-overrides.rope_theta`", _overrides("rope_theta", float)),
    "--speculative-model=": ("`--spec-model`", lambda values: ["--spec-model", *values]),
    "--task=": (
        "`generate`: `--runner generate`; `embed`, `embedding`, `score`: `--runner pooling`; `classify`, `reward`: "
        "nothing, as the architecture says so",
        _chosen(
            "--task",
            "generate or embed",
            auto="",
            classify="",
            reward="",
            generate="generate",
            embed="pooling",
            embedding="pooling",
            score="pooling",
        ),
    ),
    "--worker-use-ray": (
        "`--distributed-executor-backend ray`",
        lambda _: ["--distributed-executor-backend", "ray"],
    ),
    "-ep": ("`--enable-expert-parallel`", lambda _: ["--enable-expert-parallel"]),
    "-n=": ("`--nnodes`", _given("--nnodes")),
    "-r=": ("`--node-rank`", _given("--node-rank")),
}
"""Flags of another name or form in Quire: their equivalents, and the conversion of their values."""

IGNORED: dict[str, str] = {
    "tools are always on if the chat template supports them": "--enable-auto-tool-choice",
    "reasoning is detected from the chat template; see --reasoning-parser": "--enable-reasoning",
    "requests are logged only with --access-log": "--disable-log-requests --disable-uvicorn-access-log",
    "outputs are never logged; --access-log shows their numbers of tokens": "--enable-log-deltas --enable-log-outputs",
    "the HTTP server logs nothing but errors; see --log-level": "--uvicorn-log-level=",
    "figures are metrics (/metrics), which are always on and are not logged": (
        "--disable-log-stats --kv-cache-metrics --show-hidden-metrics-for-version="
    ),
    "--otlp-traces-endpoint exports all spans; steps are in the metrics of ranks (/metrics)": (
        "--collect-detailed-traces+"
    ),
    "nothing is compiled with torch.compile": "--compilation-config|-cc= --optimization-level=",
    "Quire chooses the fastest correct kernels itself": "--disable-cascade-attn --kernel-config= --moe-backend=",
    "always on where it helps": "--async-scheduling",
    "always on": (
        "--enable-prompt-tokens-details --enable-request-id-headers --enable-server-load-tracking --enable-ssl-refresh"
    ),
    "--data-parallel-start-rank without --headless does this": (
        "--data-parallel-external-lb|-dpe --data-parallel-hybrid-lb|-dph"
    ),
    "each rank reads its own slices of the weights, in several threads": (
        "--ignore-patterns+ --max-parallel-loading-workers= --model-loader-extra-config= --safetensors-load-strategy= "
        "--use-tqdm-on-load"
    ),
    "the processes of --api-server-count render prompts": "--renderer-num-workers=",
    "--max-num-partial-prefills and --long-prefill-token-threshold decide": "--max-long-partial-prefills=",
    "steps are not split into micro-batches (dual-batch overlap)": (
        "--dbo-decode-token-threshold= --dbo-prefill-token-threshold= --enable-dbo"
    ),
    "every token is sent at once": "--stream-interval=",
    "preempted requests are computed again, or loaded with --kv-offloading-size": "--swap-space=",
    "ranks have equal parts of every block, and Quire chooses the collectives": (
        "--cp-kv-cache-interleave-size= --dcp-comm-backend= --dcp-kv-cache-interleave-size= --dcp-q-replicate"
    ),
    "the KV cache has groups of its own for each kind of attention": "--disable-hybrid-kv-cache-manager",
    "the prefix cache has a hash of its own; the hashes in KV events are those of sha256_cbor": (
        "--prefix-caching-hash-algo="
    ),
    "keys and values in an fp8 KV cache have scales of their own for each token": "--calculate-kv-scales",
    "recurrent states are float32, in pages of the KV cache": (
        "--mamba-block-size= --mamba-cache-dtype= --mamba-cache-mode= --mamba-ssm-cache-dtype="
    ),
    "images and videos stay where they are in a message": "--interleave-mm-strings",
    "all API processes share one cache, in shared memory": "--mm-processor-cache-type=",
    "answers do not depend on where the chunks of a prompt end": "--disable-chunked-mm-input",
    "memory for images is planned, not measured": "--skip-mm-profiling",
    "llguidance is the only backend": "--guided-decoding-backend=",
    "it belongs to vLLM's V0 engine": (
        "--disable-async-output-proc --disable-frontend-multiprocessing --max-context-len-to-capture= "
        "--max-seq-len-to-capture= --multi-step-stream-outputs --num-lookahead-slots= --num-scheduler-steps= "
        "--preemption-mode= --scheduler-delay-factor= --use-v2-block-manager"
    ),
    "ranks divide adapters as they divide the weights that these change": "--fully-sharded-loras",
    "the sizes of adapters come from their files": "--lora-extra-vocab-size=",
    "--lora-memory limits the host's memory for adapters": "--max-cpu-loras=",
}
"""Flags without effect, by the reason."""

REFUSED: dict[str, str] = {
    "it is not supported; omit it, adapters are computed in the model's type": "--lora-dtype=auto",
    "it is not supported; omit it, --kv-offloading-size and --kv-disk have a store of their own": (
        "--kv-offloading-backend=native"
    ),
    "it is not supported; use more ranks (--tensor-parallel-size, --pipeline-parallel-size)": (
        "--cpu-offload-gb=0,0.0 --offload-group-size=0 --offload-num-in-group=1 "
        "--offload-params+ --offload-prefetch-step=1"
    ),
    "it is not supported; stop the server to free the GPUs": "--enable-sleep-mode",
    "POST /replicas adds and removes replicas": "--enable-elastic-ep",
    "set the environment variable HF_TOKEN, which `ps` does not show": "--hf-token?",
    "use --kv-cache-memory-bytes": "--num-gpu-blocks-override=",
    "use --hf-overrides, or a folder with another config.json": "--config-format=auto,hf,mistral --hf-config-path=",
    "download the revision, and name its folder as MODEL or --tokenizer": "--code-revision= --tokenizer-revision=",
    "the tokenizer is the model's own; see --tokenizer": "--skip-tokenizer-init --tokenizer-mode=auto,hf,mistral",
    "use --spec-tokens": "--num-speculative-tokens=",
    "limit --max-model-len to the window instead": "--disable-sliding-window",
    "it is read from the model's folder (modules.json)": "--override-pooler-config= --pooler-config=",
    "it is detected from the chat template; see --chat-template": (
        "--chat-template-content-format=auto,string --response-role=assistant"
    ),
    "send no tools in requests": "--exclude-tools-when-tool-choice-none",
    "log-probabilities are the model's, before sampling parameters": "--logprobs-mode=raw_logprobs",
    "use one of the built-in --tool-call-parser and --reasoning-parser": (
        "--reasoning-parser-plugin= --tool-parser-plugin="
    ),
    "let the client call the tools": "--tool-server=",
    "put a reverse proxy in front of the server": "--disable-fastapi-docs --middleware=",
    "use logit_bias, bad_words or structured_outputs in requests": "--logits-processors+",
    "other classes than Quire's own are not supported": (
        "--io-processor-plugin= --scheduler-cls= --worker-cls=auto --worker-extension-cls="
    ),
    "it would change answers; sample fewer frames with --media-io-kwargs": "--video-pruning-rate=0,0.0",
    "it is not supported": (
        "--additional-config={} --enable-prompt-adapter --enable-prompt-embeds --enable-return-routed-experts "
        "--return-sampling-mask"
    ),
}
"""Flags that are errors, by their replacement. After `=`: values that are accepted, as they change nothing. The off
form is accepted, too."""

VARIABLES: dict[str, str] = {
    "VLLM_API_KEY": "QUIRE_API_KEY",
    "VLLM_HOST_IP": "QUIRE_HOST_IP",
}
"""Variables of vLLM by the variable of Quire, which takes precedence."""


def _gib(text: str) -> str:
    return str(round(float(text) * (1 << 30)) or "")


VARIABLES_OF_FLAGS: dict[str, tuple[str, Callable[[str], str]]] = {
    "VLLM_ATTENTION_BACKEND": ("--attention-backend", str),
    "VLLM_CPU_KVCACHE_SPACE": ("--kv-cache-memory-bytes", _gib),
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": ("--timeout-keep-alive", str),
    "VLLM_IMAGE_FETCH_TIMEOUT": ("--media-fetch-timeout", str),
    "VLLM_LOGGING_CONFIG_PATH": ("--log-config-file", str),
    "VLLM_LOGGING_LEVEL": ("--log-level", str),
    "VLLM_MM_INPUT_CACHE_GIB": ("--mm-processor-cache-gb", str),
    "VLLM_PP_LAYER_PARTITION": ("--pipeline-layer-partition", str),
    "VLLM_TORCH_PROFILER_DIR": ("--torch-profiler-dir", str),
    "VLLM_VIDEO_FETCH_TIMEOUT": ("--media-fetch-timeout", str),
}
"""Variables of vLLM that are flags of Quire, which take precedence, and the conversion of their values; empty: the
default. Those that begin with VLLM_CPU_ have no effect on GPUs."""

VARIABLES_REFUSED: dict[str, str] = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "use --hf-overrides to set max_position_embeddings, and rope_scaling if needed",
    "VLLM_CPU_INT4_W4A8": "it is not supported; --quantization int8 also quantizes activations",
    "VLLM_DP_MASTER_IP=127.0.0.1": "use --data-parallel-address",
    "VLLM_DP_MASTER_PORT": "use --data-parallel-rpc-port",
    "VLLM_DP_RANK": "use --data-parallel-start-rank",
    "VLLM_DP_RANK_LOCAL=-1,0": "set CUDA_VISIBLE_DEVICES",
    "VLLM_DP_SIZE=1": "use --data-parallel-size",
    "VLLM_ENFORCE_STRICT_TOOL_CALLING=1,true": 'omit "strict" in the function of a tool',
    "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": "use a --chat-template that writes instructions where they belong",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": "activations are quantized only as the checkpoint says; omit it",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": "weights are not quantized on GPUs; omit it",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1,true": "KV events have the last 64 bits of hashes; omit it",
    "VLLM_MARLIN_INPUT_DTYPE": "activations are quantized only as the checkpoint says; omit it",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS=1,true": "redirects are followed, and checked as URLs are; omit it",
    "VLLM_MODEL_REDIRECT_PATH": "name the model's folder as MODEL",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "simulated routing is not supported; omit it",
    "VLLM_PLUGINS": "plug-ins are not supported",
    "VLLM_SYSTEM_START_DATE": "use a --chat-template with the date",
    "VLLM_USE_MODELSCOPE": "download the model, and name its folder as MODEL",
}
"""Variables that are errors, by their replacement. After `=`: values that are accepted, as they change nothing; if
there are none, these are 0 and false."""
