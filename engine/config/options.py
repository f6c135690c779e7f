"""The options of the user (`EngineOptions`), before they are resolved. No torch.

`EngineOptions` is the single list of engine flags: the command line, `--config FILE.yaml` and `LLM(...)` are all
built from its fields. Each of its base classes is a group of flags, and the class's docstring describes the group in
`--help`. `quire.engine.config.resolve.resolve` turns the options into an `EngineConfig` (`engine_config`), once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from quire.engine.protocol.errors import ConfigError

DEMO_MODEL = Path(__file__).parents[1] / "models" / "demo"


def flag(
    default: Any,
    help: str,
    *,
    short: str | None = None,
    metavar: str | None = None,
    least: int | None = None,
    is_per_host: bool = False,
    is_secret: bool = False,
    is_common: bool = False,
) -> Any:
    """Define a dataclass field that is also a command-line flag, with the type and choices of its annotation.

    `least` is the smallest number allowed; a value `is_per_host` if it may differ between hosts. `--help` shows the
    flags that are common before the groups: the ones that nobody can choose for the user (which address, keys and
    names), that split the model, or that decide whether it fits.
    """
    metadata = {
        "help": help,
        "short": short,
        "metavar": metavar,
        "least": least,
        "is_per_host": is_per_host,
        "is_common": is_common,
    }
    return dataclasses.field(default=default, repr=not is_secret, metadata=metadata)


host_flag = partial(flag, is_per_host=True)
"""A flag whose value may differ between hosts."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model: where it comes from, its task, its precision and its lengths."""

    model: str = dataclasses.field(default=str(DEMO_MODEL), metadata={"is_per_host": True})
    runner: Literal["auto", "generate", "pooling"] = flag(
        "auto",
        "task of the model: generate text, or compute embeddings, classes or scores (pooling). auto: pooling for "
        "encoders, classifiers and sentence-transformers folders, else generate",
    )
    model_impl: Literal["auto", "quire", "transformers"] = flag(
        "auto", "model implementation (auto: Quire's own, or transformers' if there is none)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "precision of weights and activations (auto: the checkpoint's on CUDA, float32 on CPU)", is_common=True
    )
    quantization: (
        Literal[
            "int8",
            "int4",
            "auto-round",
            "awq",
            "bitsandbytes",
            "compressed-tensors",
            "fbgemm_fp8",
            "fp8",
            "gguf",
            "gptq",
            "modelopt",
            "mxfp4",
            "quark",
            "torchao",
        ]
        | None
    ) = flag(
        None,
        "quantize the weights while loading: int8 (with activations per token), int4 (in groups); fp8, or "
        "mxfp4 (experts only), unless the checkpoint is quantized. Others are methods of checkpoints, which are "
        "recognized without the flag",
        short="-q",
        is_common=True,
    )
    max_model_len: int | Literal["auto"] | None = flag(
        None,
        "maximum length of prompt and output together, in tokens; auto: the model's, or as much of it as the KV cache "
        "holds (default: as auto, but at least 8192)",
        least=1,
        is_common=True,
    )
    max_logprobs: int = flag(20, "maximum value of logprobs and prompt_logprobs in requests (-1: no limit)", least=-1)
    tokenizer: str | None = host_flag(None, "folder or repository of the tokenizer (default: the model's)")
    revision: str | None = host_flag(None, "branch, tag or commit of a Hugging Face repository")
    hf_overrides: Mapping[str, Any] | None = flag(
        None, "values in place of those in the model's config.json; those in its parts, such as text_config, one by one"
    )
    generation_config: str = flag(
        "auto",
        "where default sampling parameters come from: the model's generation_config.json (auto), a folder with this "
        "file, or nowhere (vllm)",
        metavar="FOLDER",
    )
    override_generation_config: Mapping[str, Any] | None = flag(
        None,
        'default sampling parameters instead of the ones of --generation-config, e.g. {"temperature": 0.5}; '
        "max_new_tokens also limits the output of all requests",
    )
    trust_remote_code: bool = flag(False, "allow Python code that comes with the model or its tokenizer to run")
    seed: int = flag(0, "seed of dummy weights, and of requests without a seed")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How the weights are read, and where they are kept."""

    load_format: Literal["auto", "safetensors", "pt", "dummy"] = flag(
        "auto",
        "format of the weights (auto: *.safetensors, or else pytorch_model*.bin); pt: pytorch_model*.bin, unpickling "
        "tensors only; dummy: random weights, reading only config.json and the tokenizer",
    )
    download_dir: str | None = host_flag(
        None, "folder that Hugging Face repositories are downloaded to (default: Hugging Face's cache)", metavar="DIR"
    )
    packed_cache: float | Literal["auto", "off"] = host_flag(
        "auto",
        "most GiB of disk space for weights as CPUs use them (packed, quantized), which the next start maps instead of "
        "packing them again (auto: 32, a quarter of the free space at most, and no models below 64 MiB)",
        metavar="GIB",
        least=0,
    )
    trust_weights: bool = flag(
        False,
        "compare only headers and samples of the weights between hosts, not all their bytes before the server is ready",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How the model is split over devices, in ranks, stages and replicas."""

    tensor_parallel_size: int = flag(
        1, "number of ranks that each layer is sharded over", short="-tp", metavar="T", least=1, is_common=True
    )
    pipeline_parallel_size: int = flag(
        1, "number of pipeline stages that the layers are split into", short="-pp", metavar="P", least=1, is_common=True
    )
    pipeline_layer_partition: str | None = flag(
        None, "number of layers in each stage, e.g. 3,2,1 (default: as even as possible)", metavar="N,N,…"
    )
    decode_context_parallel_size: int = flag(
        1,
        "number of ranks of a stage that divide the tokens of each KV block instead of keeping copies of the same KV "
        "heads; for models with fewer KV heads than ranks, or latent attention (MLA)",
        short="-dcp",
        metavar="N",
        least=1,
    )
    prefill_context_parallel_size: int = flag(
        1,
        "number of groups of --tensor-parallel-size ranks with the same weights and KV, which divide the tokens of "
        "steps with prompts, so that first tokens come earlier; with --prefill-replicas, of these replicas only",
        short="-pcp",
        metavar="N",
        least=1,
    )
    data_parallel_size: int = flag(
        1, "number of replicas of the model, each with its own ranks", short="-dp", metavar="D", least=1, is_common=True
    )
    distributed_executor_backend: Literal["auto", "uni", "mp", "ray"] = flag(
        "auto",
        "how workers are started: uni (in the engine process), mp (processes on this host, or on --nnodes hosts), ray "
        "(on the nodes of a Ray cluster). auto: ray if this host has too few GPUs or inside a placement group, else "
        "uni or mp",
    )
    disable_custom_all_reduce: bool = flag(
        False, "use only NCCL for all-reduce between the GPUs of a stage, never symmetric memory"
    )
    prefill_replicas: int | None = flag(
        None,
        "number of replicas, the first ones, that compute long prompts and hand them over, with their KV, to the "
        "--decode-replicas; the two numbers together are --data-parallel-size",
        metavar="P",
        least=1,
    )
    decode_replicas: int | None = flag(
        None,
        "number of replicas that decode, and compute short prompts",
        metavar="D",
        least=1,
    )
    prefill_tensor_parallel_size: int | None = flag(
        None,
        "--tensor-parallel-size of the --prefill-replicas (default: the same as the others')",
        metavar="T",
        least=1,
    )
    prefill_pipeline_parallel_size: int | None = flag(
        None,
        "--pipeline-parallel-size of the --prefill-replicas (default: the same as the others')",
        metavar="P",
        least=1,
    )

    def __post_init__(self) -> None:
        """Derive the number of replicas from the numbers of each role. Raises `ConfigError` if they contradict."""
        if self.prefill_replicas is None or self.decode_replicas is None:
            return
        replicas = self.prefill_replicas + self.decode_replicas
        if self.data_parallel_size not in (1, replicas):
            raise ConfigError(
                f"--data-parallel-size {self.data_parallel_size} contradicts --prefill-replicas "
                f"{self.prefill_replicas} and --decode-replicas {self.decode_replicas}, which are {replicas} together; "
                "omit it"
            )
        object.__setattr__(self, "data_parallel_size", replicas)


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Where the experts of a mixture of experts are."""

    enable_expert_parallel: bool = flag(
        False,
        "distribute whole experts over all ranks and replicas, instead of sharding each over the ranks of a stage",
        is_common=True,
    )
    expert_placement_strategy: Literal["linear", "round_robin"] = flag(
        "linear", "which experts are on a rank: consecutive ones, or every n-th"
    )
    all2all_backend: Literal["allgather_reducescatter", "all_to_all"] = flag(
        "allgather_reducescatter",
        "how tokens are sent to experts: all tokens to all ranks, or each token only to the ranks of its experts",
    )
    enable_eplb: bool = flag(
        False, "expert load balancing: measure the load of each expert, and move and replicate busy ones"
    )
    num_redundant_experts: int = flag(
        0, "with --enable-eplb, copies of busy experts in each layer, over all ranks", least=0
    )
    eplb_step_interval: int = flag(3000, "with --enable-eplb, steps between two rearrangements", metavar="N", least=1)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Several hosts: their addresses, their token and their timeouts."""

    nnodes: int = flag(
        1,
        "number of hosts that the ranks of all replicas are distributed over evenly, in order (without Ray); a replica "
        "has whole hosts, or a host whole replicas",
        metavar="N",
        least=1,
    )
    node_rank: int = host_flag(
        0, "number of this host among --nnodes; host 0 has the API, the others run --headless", metavar="R"
    )
    master_addr: str = host_flag("127.0.0.1", "address of host 0 that the other hosts connect to", metavar="ADDR")
    master_port: int = host_flag(29501, "port of host 0 that the other hosts connect to", metavar="PORT")
    data_parallel_size_local: int | None = host_flag(
        None,
        "number of replicas on this host (default: all; with --data-parallel-start-rank 1)",
        short="-dpl",
        metavar="D",
        least=0,
    )
    data_parallel_start_rank: int | None = host_flag(
        None,
        "number of this host's first replica; with --headless its API is at --data-parallel-address, otherwise this "
        "host's API serves only its own replicas, behind an external load balancer",
        short="-dpr",
        metavar="R",
    )
    data_parallel_address: str | None = host_flag(
        None,
        "address of the host with the API, or with replica 0; if it is given to a host that has all replicas, others "
        "can join it while it serves (default: 127.0.0.1)",
        short="-dpa",
        metavar="ADDR",
    )
    data_parallel_rpc_port: int = host_flag(
        29550, "port of --data-parallel-address that replicas on other hosts connect to", short="-dpp", metavar="PORT"
    )
    cluster_token: str | None = host_flag(
        None,
        "secret of at least 16 characters that all hosts share: it authenticates and encrypts their connections. "
        "Command lines are visible to all users of a host: QUIRE_CLUSTER_TOKEN and --cluster-token-file are not "
        "(default: the variable; without any, the first host makes one and prints the others' command)",
        metavar="TOKEN",
        is_secret=True,
    )
    cluster_token_file: str | None = host_flag(None, "file with the --cluster-token", metavar="FILE")
    cluster_timeout_seconds: float = flag(
        15.0,
        "seconds without a message after which another host is lost; shorter cuts of the network are survived",
        metavar="S",
    )
    distributed_timeout_seconds: float = host_flag(
        600.0, "timeout of communication between ranks, in seconds", metavar="S"
    )
    watchdog_seconds: float = host_flag(
        10.0, "a process or rank that does not respond for this many seconds is killed and replaced", metavar="S"
    )


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The memory of a device, and the KV cache in it."""

    gpu_memory_utilization: float = host_flag(
        0.9, "fraction of the device's free memory for weights, activations and KV cache together", is_common=True
    )
    kv_cache_memory_bytes: int | None = host_flag(
        None, "size of the KV cache per rank, in bytes (default: derived from --gpu-memory-utilization)", least=1
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", "int4"] = flag(
        "auto",
        "data type of the KV cache (auto: the model's, at most 16 bits with --quantization; int8, fp8: with a "
        "scale per token and head; fp8_e4m3 is the same as fp8; int4: keys with a scale per feature of a block, values "
        "per token, and the newest block of each request in 16 bits)",
    )
    block_size: int = flag(16, "tokens in a KV block", least=1)
    enable_prefix_caching: bool = flag(True, "reuse the KV blocks of common prompt prefixes")
    kv_events_config: Mapping[str, Any] | None = flag(
        None,
        "publish which KV blocks each replica has, for routers, as a JSON object with the fields of vLLM's, e.g. "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}. Whoever '
        "reaches these ports can read the tokens of prompts and answers",
    )
    kv_offloading_size: float | None = host_flag(
        None,
        "GiB of each host's memory for KV of prefixes evicted from the devices; its replicas share it, and load "
        "prefixes that load faster than they compute (default: 1 with --kv-disk, with --prefill-replicas enough for "
        "prompts on their way, in both cases at most a tenth of the free memory; else none)",
        metavar="GIB",
        least=0,
        is_common=True,
    )
    kv_disk: str | None = host_flag(
        None,
        "folder for KV of prefixes, and the maximum GiB of files in it; a server that restarts finds its KV there",
        metavar="PATH:GIB",
    )
    kv_disk_bandwidth: float | None = host_flag(
        None, "maximum MiB per second that are written to --kv-disk (default: no limit)", metavar="MIB", least=1
    )
    kv_peers: str | None = host_flag(
        None,
        "KV stores of other servers with the same model and --cluster-token, from which this one loads prefixes that "
        "load faster than they compute. The hosts of one server find each other without it",
        metavar="HOST:PORT,…",
    )
    kv_peer_port: int | None = host_flag(
        None,
        "port at which KV stores of other servers read this host's store (default: none; the hosts of one server do "
        "not need it)",
        metavar="PORT",
        least=1,
    )
    kv_peer_bandwidth: float | None = host_flag(
        None,
        "maximum MiB per second that this host's KV store sends to others; it serves as many at once as get 2 each "
        "(default: no limit)",
        metavar="MIB",
        least=2,
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """How many requests and tokens a step has, and in which order."""

    max_num_seqs: int = flag(256, "maximum number of running requests", least=1, is_common=True)
    max_num_batched_tokens: int | Literal["auto"] = flag(
        "auto", "maximum tokens in a step (auto: what --itl-target-ms allows, learned from measured steps)", least=1
    )
    itl_target_ms: float | None = flag(
        None,
        "with automatic step size, target inter-token latency during prefills, in milliseconds "
        "(default: 5 measured decode steps, up to 15 when prompts queue up)",
        metavar="MS",
    )
    max_num_partial_prefills: int = flag(
        1,
        "number of prompts that share the prompt tokens of a step equally; a long prompt then delays others less",
        least=1,
    )
    long_prefill_token_threshold: int = flag(
        0, "maximum tokens of a prompt in a step while there are other requests (0: no limit)", least=0
    )
    enable_chunked_prefill: bool = flag(True, "split long prompts over several steps, together with running decodes")
    scheduling_policy: Literal["fcfs", "priority"] = flag(
        "fcfs", "scheduling order: by arrival, or by the `priority` of requests (lower is earlier)"
    )


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """Images and videos in prompts, and the tower that encodes them."""

    limit_mm_per_prompt: Mapping[str, Any] | None = flag(
        None,
        "maximum number of images and videos in a prompt; with 0 for all kinds that the model takes, its tower is not "
        'loaded, e.g. {"image": 4, "video": 0} (default: 256 together)',
    )
    language_model_only: bool = flag(False, "take only text, and do not load the model's tower for images and videos")
    mm_encoder_tp_mode: Literal["weights", "data"] = flag(
        "weights",
        "how the ranks of --tensor-parallel-size encode images and videos: weights, each has a part of the tower's "
        "layers; data, each has the whole tower, and encodes its share of the items alone",
    )
    mm_encoder_quantization: Literal["int8"] | None = flag(
        None,
        "quantize the tower's weights while loading, as --quantization int8 does with the decoder's; on CPUs only "
        "(default: as the checkpoint stores them)",
    )
    encoder_cache_size: int | None = flag(
        None,
        "features of images and videos (tokens that these take in a prompt) that a rank keeps for later requests, and "
        "the most that a single image or video may have (default: 16384, or the model's length if that is less; for a "
        "single image, the model's size of images if they all have one)",
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Adapters (LoRA) that requests choose instead of the model itself."""

    enable_lora: bool = flag(False, "let requests use adapters (LoRA), and reserve memory for them", is_common=True)
    max_loras: int = flag(
        2,
        "with --enable-lora, number of adapters of --max-lora-rank on all linear layers that each device has memory "
        "for; more of them if they are smaller. Others are swapped in when requests need them",
        metavar="N",
        least=1,
    )
    max_lora_rank: int = flag(
        64, "rank of the adapters that --max-loras counts; higher ranks are supported, too", metavar="R", least=1
    )
    lora_memory: float | Literal["auto"] = flag(
        "auto",
        "with --enable-lora, most GiB of each host's memory for adapters that are ready to be swapped in; others are "
        "read again when requests need them (auto: 4, at most a tenth of the free memory)",
        metavar="GIB",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions:
    """Speculative decoding."""

    spec_method: Literal["auto", "none", "ngram", "draft_model", "mtp", "eagle", "eagle3"] = flag(
        "auto",
        "speculative decoding, which changes no answer: ngram guesses that a text repeats itself, draft_model lets "
        "--spec-model guess, too, eagle and eagle3 let the head in --spec-model, mtp that in the model's checkpoint, "
        "wherever that pays (auto: draft_model with --spec-model, else ngram on CPU, none on GPU)",
    )
    spec_model: str | None = host_flag(
        None,
        "folder or repository of a smaller model with the same vocabulary, or of a head, which guesses tokens",
        metavar="MODEL",
    )
    spec_tokens: int | None = flag(
        None,
        "maximum tokens guessed at once for a request by speculative decoding (default: ngram 16, "
        "draft_model 5, eagle and eagle3 3, mtp 1; n-grams beside these 16)",
    )
    speculative_config: Mapping[str, Any] | None = flag(
        None,
        'speculative decoding as a JSON object, e.g. {"method": "ngram", "num_speculative_tokens": 5, '
        '"prompt_lookup_min": 2}',
        short="-sc",
    )


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """The device, and how a step runs on it."""

    device: Literal["auto", "cpu", "cuda"] = flag(
        "auto", "device that the model runs on (auto: CUDA if there is a GPU)"
    )
    attention_backend: Literal["auto", "triton", "flashinfer", "reference"] = flag(
        "auto",
        "attention implementation on GPUs (auto: the fastest one installed whose results are correct, timed at "
        "start-up; decodes in CUDA graphs always use triton); reference: plain torch, slow, CPU too, for comparison",
    )
    enforce_eager: bool = flag(
        False, "launch every operation of a step individually, without CUDA graphs or, on CPU, op replay"
    )
    cuda_graph_sizes: str | None = flag(
        None,
        "batch sizes of the decode steps that are captured as CUDA graphs, e.g. 1,2,4,8; other sizes are padded to the "
        "next one (default: 1, 2, 4, 8, 16, 24, … up to --max-num-seqs)",
        metavar="N,N,…",
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(  # in reverse, as the fields of a dataclass begin with those of its last base
    ExecutionOptions,
    SpeculativeOptions,
    LoraOptions,
    EncoderOptions,
    SchedulerOptions,
    CacheOptions,
    ClusterOptions,
    ExpertOptions,
    ParallelOptions,
    LoadOptions,
    ModelOptions,
):
    """All engine options, unresolved: `None` and "auto" mean that Quire decides. The model is a positional argument."""
