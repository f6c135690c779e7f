"""What `quire serve` makes of each flag and environment variable of `vllm serve`: the table, as data.

`quire.server.config.vllm` applies it, and docs/reference/vllm.md is generated from it. Flags that are not here have the
same name and meaning in Quire. A flag is written as its name and its other names, separated by `|`, and what follows
it: nothing (on or off, with a `--no-` form), `=` (a value), `?` (possibly a value) or `+` (several values).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from quire.engine.architecture.quantization import METHODS
from quire.engine.protocol.errors import ConfigError
from quire.server.config.server_options import ModelOptions

VERSION = "0.32.0"
"""The version of vLLM whose flags these are, besides those of earlier versions in `EARLIER`."""

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _number(text: str) -> str:
    """Return 16k (decimal), 16K (binary) or 25.6k as a plain number; another text as it is."""
    try:
        return str(round(float(text[:-1]) * _UNITS[text[-1]])) if text[-1:] in _UNITS else text
    except (ValueError, OverflowError):
        return text


def _length(text: str) -> str:
    if text in ("auto", "-1"):
        raise ConfigError(f"argument --max-model-len: {text}: give a number, or omit it to use the model's")
    return _number(text)


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


_ALL_TO_ALL = (
    "deepep_high_throughput deepep_low_latency deepep_v2 flashinfer_all2allv flashinfer_nvlink_one_sided "
    "flashinfer_nvlink_two_sided moonep mori_high_throughput mori_low_latency nixl_ep pplx"
)
_ATTENTION = (
    "AMX_MLA B12X CPU_ATTN CPU_MLA CUTLASS_MLA CUTLASS_MSA FLASHINFER_MLA FLASHINFER_MLA_SPARSE "
    "FLASHINFER_MLA_SPARSE_DSV4 FLASHINFER_MLA_SPARSE_DSV41 FLASHINFER_MLA_SPARSE_SM120 FLASHINFER_MLA_SPARSE_SM90 "
    "FLASHMLA FLASHMLA_MEGA_ATTN_DSV41 FLASHMLA_SPARSE FLASHMLA_SPARSE_DSV4 FLASHMLA_SPARSE_DSV41 FLASH_ATTN "
    "FLASH_ATTN_DIFFKV FLASH_ATTN_MLA FLASH_ATTN_MLA_SPARSE FLEX_ATTENTION HPC_ATTN MINIMAX_M3_SPARSE ROCM_AITER_FA "
    "ROCM_AITER_MLA ROCM_AITER_MLA_SPARSE ROCM_AITER_TRITON_MLA ROCM_AITER_UNIFIED_ATTN ROCM_ATTN "
    "ROCM_FLASHMLA_SPARSE_DSV4 ROCM_SEGMENTED_ATTN TOKENSPEED_MLA TORCH_SDPA TRITON_ATTN_DIFFKV TRITON_FLASHINFER "
    "TRITON_FLASH_ATTN TRITON_MLA TRITON_MSA XPU_MLA_SPARSE"
)
REPLACED: dict[str, dict[str, str]] = {
    "--all2all-backend": dict.fromkeys(_ALL_TO_ALL.split(), "all_to_all"),
    "--attention-backend": dict.fromkeys(_ATTENTION.split(), "auto"),
}
"""Values of vLLM that Quire has something else for, which the log says: the value that is used instead."""


def _all_to_all(text: str) -> str:
    return {"naive": "allgather_reducescatter", **REPLACED["--all2all-backend"]}.get(text, text)


def _attention(text: str) -> str:
    names = {"TRITON_ATTN": "triton", "FLASHINFER": "flashinfer", **REPLACED["--attention-backend"]}
    return names.get(text.upper(), text)


def _parser(option: str, of_what: str) -> Callable[[str], str]:
    supported = get_args(get_type_hints(ModelOptions)[option])

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
    "--dtype": ("`half` is `float16`, `float` is `float32`", _renamed(half="float16", float="float32")),
    "--kv-cache-dtype": (
        "`fp8_per_token_head` and `int8_per_token_head` are `fp8` and `int8`, which have these scales",
        _renamed(fp8_per_token_head="fp8", int8_per_token_head="int8"),
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
    "--max-model-len": ("also as `16k` or `16K`; `auto` and `-1` are not supported", _length),
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
"""Flags of the same name in Quire with values of vLLM's: what these mean, and the conversion."""


LISTS = ("--allowed-headers", "--allowed-methods", "--allowed-origins")
"""Flags of the same name in Quire, with several values, that vLLM takes as a JSON list."""


def _given(flag: str) -> Callable[[list[str]], list[str]]:
    return lambda values: [flag, *values]


def _chosen(name: str, supported: str, flag: str = "--runner", **values: str) -> Callable[[list[str]], list[str]]:
    """Convert a choice of vLLM's; those that are empty are Quire's default."""

    def convert(given: list[str]) -> list[str]:
        if (found := values.get(given[0])) is None:
            raise ConfigError(f"{name} {given[0]} is not supported; use {supported}")
        return [flag, found] if found else []

    return convert


def _overrides(name: str, read: Callable[[str], Any]) -> Callable[[list[str]], list[str]]:
    return lambda values: [f"--hf-overrides.{name}", json.dumps(read(values[0]))]


PARTS: dict[str, tuple[dict[str, str], str, str]] = {
    "--attention-config|-ac=": (
        {"backend": "--attention-backend"},
        "flash_attn_max_num_splits_for_cuda_graph flash_attn_version minimax_m3_msa_decode_backend mla_prefill_backend "
        "tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph use_trtllm_attention "
        "disable_flashinfer_q_quantization",
        "Quire chooses the fastest correct kernels itself",
    ),
    "--eplb-config=": (
        {"num_redundant_experts": "--num-redundant-experts", "step_interval": "--eplb-step-interval"},
        "communicator enable_migration_batching log_balancedness log_balancedness_interval policy use_async "
        "window_size",
        "Quire measures and balances the load in its own way",
    ),
    "--logging-config=": (
        {"log_level": "--log-level"},
        "configure_logging formatter",
        "the log has a single format",
    ),
    "--profiler-config=": (
        {"torch_profiler_dir": "--torch-profiler-dir"},
        "profiler=torch torch_profiler_dump_cuda_time_total torch_profiler_record_shapes torch_profiler_use_gzip "
        "torch_profiler_with_flops torch_profiler_with_memory torch_profiler_with_stack ignore_frontend "
        "active_iterations delay_iterations max_iterations wait_iterations warmup_iterations",
        "the body of POST /start_profile and the flags of `quire profile` say what to record",
    ),
    "--structured-outputs-config=": (
        {"reasoning_parser": "--reasoning-parser"},
        "backend",
        "llguidance is the only backend",
    ),
}
"""Flags with a JSON object: the keys that are flags of Quire, those that have no effect, and the reason for these.
After `=`: the only value that is accepted, as it changes nothing. Other keys are errors, unless their value is false or
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
    "--dbo-decode-token-threshold=": ("`--dbo-token-threshold`", _given("--dbo-token-threshold")),
    "--device-memory-utilization=": ("`--gpu-memory-utilization`", _given("--gpu-memory-utilization")),
    "--max-cudagraph-capture-size=": (
        "`--cuda-graph-sizes` up to this one",
        lambda values: ["--cuda-graph-sizes", ",".join(map(str, [1, 2, 4, *range(8, int(values[0]) + 1, 8)]))],
    ),
    "--model=": ("`MODEL`", lambda values: values),
    "-ep": ("`--enable-expert-parallel`", lambda _: ["--enable-expert-parallel"]),
    "-n=": ("`--nnodes`", _given("--nnodes")),
    "-r=": ("`--node-rank`", _given("--node-rank")),
}
"""Flags of another name or form in Quire: what they become, and the conversion of their values."""

IGNORED: dict[str, str] = {
    "tools are always on if the chat template supports them": "--enable-auto-tool-choice",
    "requests are not logged; --log-level debug logs their paths": (
        "--disable-access-log-for-endpoints= --disable-uvicorn-access-log --enable-log-deltas --enable-log-outputs "
        "--enable-log-requests --log-error-stack --max-log-len= --uvicorn-log-level="
    ),
    "figures are metrics (/metrics), which are always on and are not logged": (
        "--aggregate-engine-logging --cudagraph-metrics --custom-histogram-buckets= --disable-log-stats "
        "--enable-logging-iteration-details --enable-mfu-metrics --kv-cache-metrics --kv-cache-metrics-sample= "
        "--per-request-spec-decode-metrics= --show-hidden-metrics-for-version="
    ),
    "--otlp-traces-endpoint exports all spans; steps are in the metrics of ranks (/metrics)": (
        "--collect-detailed-traces+"
    ),
    "nothing is compiled with torch.compile": (
        "--compilation-config|-cc= --enable-flashinfer-autotune --ir-op-priority= --optimization-level="
    ),
    "Quire chooses the fastest correct kernels itself": (
        "--disable-cascade-attn --gdn-prefill-backend= --jit-monitor-mode= --jit-monitor-verbose --kda-decode-backend= "
        "--kda-prefill-backend= --kernel-config= --linear-backend= --moe-backend= --performance-mode= "
        "--sparse-indexer-topk-backend= --use-fp64-gumbel"
    ),
    "always on where it helps": "--async-scheduling",
    "always on": (
        "--enable-ep-weight-filter --enable-prompt-tokens-details --enable-request-id-headers "
        "--enable-server-load-tracking --enable-tokenizer-info-endpoint"
    ),
    "replicas that die are replaced, see --restart": (
        "--data-parallel-supervisor-port= --dp-supervisor-probe-failure-threshold= --dp-supervisor-probe-interval-s= "
        "--dp-supervisor-probe-timeout-s= --enable-fault-tolerance --fault-tolerance-config="
    ),
    "--data-parallel-start-rank without --headless does this": (
        "--data-parallel-external-lb|-dpe --data-parallel-hybrid-lb|-dph"
    ),
    "a request is admitted only if all its known tokens fit into the KV cache": (
        "--scheduler-reserve-full-isl --watermark="
    ),
    "each rank reads its own slices of the weights, in several threads": (
        "--ignore-patterns+ --max-parallel-loading-workers= --model-loader-extra-config= --pt-load-map-location= "
        "--safetensors-load-strategy= --safetensors-prefetch-block-size= --safetensors-prefetch-num-threads= "
        "--use-tqdm-on-load"
    ),
    "the processes of --api-server-count render prompts": "--renderer-num-workers=",
    "--distributed-timeout-seconds is for all groups": "--cpu-distributed-timeout-seconds=",
    "ranks are not bound to cores; use numactl or taskset": "--numa-bind --numa-bind-cpus+ --numa-bind-nodes+",
    "the token budget follows measured step times": "--long-prefill-token-threshold-adaptive",
    "replicas agree on steps in Quire's own way": (
        "--disable-nccl-for-dp-synchronization --dp-sync-interval= --prefill-schedule-interval="
    ),
    "--dbo-token-threshold is for all steps, in two micro-batches": "--dbo-prefill-token-threshold= --ubatch-size=",
    "every token is sent at once": "--stream-interval=",
    "the KV cache has groups of its own for each kind of attention": (
        "--disable-hybrid-kv-cache-manager --kv-sharing-fast-prefill --prefix-match-unit= --swa-bounded-replay"
    ),
    "the prefix cache has a hash of its own, and blocks stay until their memory is needed": (
        "--prefix-cache-retention-interval= --prefix-caching-hash-algo="
    ),
    "recurrent states are float32, in pages of the KV cache, and have one implementation": (
        "--enable-mamba-cache-stochastic-rounding --enable-mamba-shared-prefix-checkpoint --mamba-backend= "
        "--mamba-block-size= --mamba-cache-dtype= --mamba-cache-mode= --mamba-cache-philox-rounds= "
        "--mamba-ssm-cache-dtype= --mamba-ssu-algorithm= --replayssm-buffer-len= --use-replayssm"
    ),
    "only text is supported": (
        "--allowed-local-media-path= --allowed-media-domains+ --disable-chunked-mm-input --ec-manager-config= "
        "--enable-mm-embeds --enable-shm-tensor-arena --enable-tower-connector-lora --interleave-mm-strings "
        "--language-model-only --limit-mm-per-prompt= --media-io-kwargs= --mm-device-do-normalize "
        "--mm-encoder-attn-backend= --mm-encoder-attn-dtype= --mm-encoder-fp8-scale-path= "
        "--mm-encoder-fp8-scale-save-margin= --mm-encoder-fp8-scale-save-path= --mm-encoder-only "
        "--mm-encoder-tp-mode= --mm-hasher-algorithm= --mm-ipc-gpu-memory-gb= --mm-processor-cache-gb= "
        "--mm-processor-cache-type= --mm-processor-device= --mm-processor-kwargs= "
        "--mm-shm-cache-max-object-size-mb= --mm-tensor-ipc= --skip-mm-profiling --trust-request-mm-kwargs "
        "--video-pruning-method= --video-pruning-rate="
    ),
    "there are no LoRA adapters": (
        "--default-mm-loras= --enable-mixed-moe-lora-format --enable-moe-shared-loras --fully-sharded-loras "
        "--lora-dtype= --lora-target-modules+ --max-cpu-loras= --max-lora-cls-labels= --max-lora-rank= --max-loras= "
        "--specialize-active-lora"
    ),
    "nothing is offloaded": (
        "--cpu-offload-params+ --kv-offloading-backend= --offload-backend= --offload-group-size= "
        "--offload-num-in-group= --offload-params+ --offload-prefetch-step="
    ),
    "there is no sleep mode": (
        "--enable-cumem-allocator --enable-nccl-comm-suspend --sleep-mode-offload-cudagraph "
        "--sleep-preserve-parameter-names+"
    ),
    "there is no context parallelism": (
        "--cp-kv-cache-interleave-size= --dcp-comm-backend= --dcp-kv-cache-interleave-size= --dcp-q-replicate"
    ),
    "only torch's profiler is supported; see `quire profile`": (
        "--enable-layerwise-nvtx-tracing --ray-workers-use-nsight"
    ),
    "see the limits in docs/guides/deployment.md": "--h11-max-header-count= --h11-max-incomplete-event-size=",
    "system_fingerprint names Quire's version": "--fingerprint-mode= --fingerprint-value=",
    "it is only for vLLM's own models and platforms": (
        "--additional-config= --allow-deprecated-quantization --cohere-format= --cohere-is-reasoning-model "
        "--enable-batch-sharded-sampling --enable-flash-late-interaction --enable-hc-sp --enable-offline-docs"
    ),
}
"""Flags without effect, by the reason."""

REFUSED: dict[str, str] = {
    "LoRA adapters are not supported; merge the adapter into the model": "--enable-lora --lora-modules+",
    "it is not supported; omit it, prefixes are kept in the KV cache of each replica": (
        "--ec-transfer-config= --kv-events-config= --kv-transfer-config="
    ),
    "it is not supported; use more ranks (--tensor-parallel-size, --pipeline-parallel-size)": (
        "--cpu-offload-gb=0,0.0 --kv-offloading-size="
    ),
    "it is not supported; use --tensor-parallel-size": (
        "--decode-context-parallel-size|-dcp=1 --prefill-context-parallel-size|-pcp=1"
    ),
    "it is not supported; stop the server to free the GPUs": "--enable-sleep-mode",
    "it is not supported; start the server again with the new weights": "--weight-transfer-config=",
    "POST /replicas adds and removes replicas": "--elastic-ep-max-dp-size= --enable-elastic-ep",
    "start a server for each replica, with --data-parallel-start-rank": "--data-parallel-multi-port-external-lb|-dpm",
    "set the environment variable CUDA_VISIBLE_DEVICES": "--device-ids=",
    "set the environment variable HF_TOKEN, which `ps` does not show": "--hf-token?",
    "use --max-num-seqs": "--max-num-active-seqs=",
    "use --max-num-batched-tokens": "--max-num-scheduled-tokens=",
    "use --max-queue, which limits waiting requests": "--max-num-queued-reqs= --max-num-queued-tokens=",
    "use --kv-cache-memory-bytes": "--num-gpu-blocks-override=",
    "use --hf-overrides, or a folder with another config.json": "--config-format=auto,hf,mistral --hf-config-path=",
    "use --model-impl": "--model-class-overrides=",
    "download the revision, and name its folder as MODEL or --tokenizer": "--code-revision= --tokenizer-revision=",
    "the tokenizer is the model's own; see --tokenizer": "--skip-tokenizer-init --tokenizer-mode=auto,hf,mistral",
    "it is read from the checkpoint; --quantization quantizes while loading": "--quantization-config=",
    "--kv-cache-dtype is for all layers": "--kv-cache-dtype-skip-layers+",
    "limit --max-model-len to the window instead": "--disable-sliding-window",
    "it is read from the model's folder (modules.json)": "--pooler-config=",
    "it is detected from the chat template; see --chat-template": (
        "--chat-template-content-format=auto,string --response-role=assistant"
    ),
    "send chat_template_kwargs in requests": "--anthropic-disabled-thinking-effort=auto",
    "send return_tokens_as_token_ids in requests": "--return-tokens-as-token-ids",
    'send stream_options {"include_usage": true} in requests': "--enable-force-include-usage",
    'send "strict": true in the function of a tool': "--tool-strict-level=auto",
    "send no tools in requests": "--exclude-tools-when-tool-choice-none",
    "log-probabilities are those of the model, before sampling parameters": "--logprobs-mode=raw_logprobs",
    "use one of the built-in --tool-call-parser and --reasoning-parser": (
        "--reasoning-config= --reasoning-parser-plugin= --tool-parser-plugin="
    ),
    "let the client call the tools": "--tool-server=",
    "put a reverse proxy in front of the server": (
        "--disable-fastapi-docs --enable-ssl-refresh --middleware= --ssl-ciphers="
    ),
    "raise the read timeout of the proxy": "--sse-keep-alive-interval=0",
    "use the HTTP API": "--enable-scale-out --grpc --grpc-port= --tokens-only",
    "use logit_bias, bad_words or structured_outputs in requests": "--logits-processors+",
    "other classes than Quire's own are not supported": (
        "--io-processor-plugin= --scheduler-cls= --worker-cls=auto --worker-extension-cls="
    ),
    "use --log-level": "--log-config-file=",
    "it is not supported; the log names the variables of vLLM that have no effect": "--fail-on-environ-validation",
    "it is not supported": (
        "--aux-output-config= --diffusion-config|-dc= --enable-prompt-embeds --enable-return-routed-experts "
        "--enable-trace-replay --engram-config= --return-sampling-mask --watermark-config="
    ),
}
"""Flags that are errors, by what to use instead. After `=`: values that are accepted, as they change nothing. The off
form is accepted, too."""

EARLIER: dict[str, str] = {
    "preempted requests are computed again, and nothing is swapped": "--preemption-mode= --swap-space=",
    "requests are not logged; --log-level debug logs their paths": "--disable-log-requests",
    "--max-num-partial-prefills and --long-prefill-token-threshold decide": "--max-long-partial-prefills=",
    "llguidance is the only backend": "--guided-decoding-backend=",
    "reasoning is detected from the chat template; see --reasoning-parser": "--enable-reasoning",
    "it belongs to vLLM's V0 engine": (
        "--disable-async-output-proc --disable-frontend-multiprocessing --engine-use-ray --max-seq-len-to-capture= "
        "--multi-step-stream-outputs --num-lookahead-slots= --num-scheduler-steps= --use-v2-block-manager"
    ),
    "keys and values in an fp8 KV cache have scales of their own for each token": "--calculate-kv-scales",
    "Quire measures and balances the load in its own way": "--eplb-window-size=",
}
"""Flags of earlier versions of vLLM that have no effect, by the reason."""

EARLIER_REFUSED: dict[str, str] = {
    "use --spec-tokens": "--num-speculative-tokens=",
    "it is read from the model's folder (modules.json)": "--override-pooler-config=",
}
"""Flags of earlier versions of vLLM that are errors, by what to use instead."""

EARLIER_RENAMED: dict[str, tuple[str, Callable[[list[str]], list[str]]]] = {
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
}
"""Flags of earlier versions of another name or form in Quire."""

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
    "VLLM_LOGGING_LEVEL": ("--log-level", str),
    "VLLM_PP_LAYER_PARTITION": ("--pipeline-layer-partition", str),
    "VLLM_TORCH_PROFILER_DIR": ("--torch-profiler-dir", str),
}
"""Variables of vLLM that are flags of Quire, which take precedence, and the conversion of their values; empty: the
default. Those that begin with VLLM_CPU_ have no effect on GPUs."""

VARIABLES_REFUSED: dict[str, str] = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "use --hf-overrides to set max_position_embeddings, and rope_scaling if needed",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "LoRA adapters are not supported; merge the adapter into the model",
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
    "VLLM_LOGGING_CONFIG_PATH": "use --log-level",
    "VLLM_MARLIN_INPUT_DTYPE": "activations are quantized only as the checkpoint says; omit it",
    "VLLM_MODEL_REDIRECT_PATH": "name the model's folder as MODEL",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "simulated routing is not supported; omit it",
    "VLLM_PLUGINS": "plug-ins are not supported",
    "VLLM_SKIP_MODEL_NAME_VALIDATION": "name all models that requests may ask for with --served-model-name",
    "VLLM_SYSTEM_START_DATE": "use a --chat-template with the date",
    "VLLM_TEST_FORCE_LOAD_FORMAT": "use --load-format",
    "VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY": "let the client call the tools",
    "VLLM_USE_MODELSCOPE": "download the model, and name its folder as MODEL",
}
"""Variables that are errors, by what to use instead. After `=`: values that are accepted, as they change nothing; if
there are none, these are 0 and false."""
