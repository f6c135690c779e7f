"""docs/reference/environment.md: the environment variables that Quire reads or sets; `scripts/docs` writes it.

A test compares the list with the sources: a variable that the code uses and that has no entry here fails it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from markdown_table import code, table

from quire.server.config import vllm_flags

ROOT = Path(__file__).parent.parent
FOLDERS = ("server", "engine", "kernels", "quire")
INTRODUCTION = """# Environment variables

Most settings are [flags](cli.md). This page lists the environment variables that Quire reads or sets. A test compares
it with the sources.
"""
SECTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "Quire": (
        "",
        {
            "QUIRE_API_KEY": "Keys that clients of `quire serve` must send, separated by spaces or commas, if "
            "`--api-key` is not given. `quire chat`, `quire complete` and `quire run-batch --url` send the first "
            "one. It must not be set and empty, and neither must the next two.",
            "QUIRE_ADMIN_KEY": "The same for `--admin-key`. `quire profile` sends the first one.",
            "QUIRE_METRICS_KEY": "The same for `--metrics-key`.",
            "QUIRE_LOG_FORMAT": "`text` or `json`, if `--log-format` is not given. Quire sets it for its processes.",
            "QUIRE_LOG_CONFIG": "Quire sets it for its processes to the content of `--log-config-file`.",
            "TQDM_DISABLE": "With `--log-format json`, Quire sets it to `1`: no progress bars.",
            "HF_HUB_DISABLE_PROGRESS_BARS": "The same for downloads from Hugging Face.",
            "QUIRE_CLUSTER_TOKEN": "Secret that the hosts of a server share, if neither `--cluster-token` nor "
            "`--cluster-token-file` is given.",
            "PYTHONHASHSEED": "With `--kv-events-config`, the seed of the hashes in KV events, as for vLLM.",
            "QUIRE_CPU_ISA": "The instruction set that CPU kernels are compiled for and chosen by: `avx512_bf16`, "
            "`avx512_vnni`, `avx512`, `avx_vnni`, `avx2` or `neon_dotprod`. Default: the most capable one "
            "that the processor has.",
            "QUIRE_HOST": "Address to listen on, unless `--host` is given. The container images set it to `0.0.0.0`.",
            "QUIRE_HOST_IP": "This host's own address for traffic between hosts. Default: the address of the interface "
            "that reaches `--master-addr` or `--data-parallel-address`.",
            "QUIRE_KERNEL_CACHE": "Folder of the CPU kernels that are compiled because none that come with Quire fit. "
            "Default: `quire/kernels` in `$XDG_CACHE_HOME`. "
            "The folder may be filled beforehand and be read-only.",
            "QUIRE_PACKED_CACHE": "Folder of the packed weights (`--packed-cache`). Default: `quire/packed` in "
            "`$XDG_CACHE_HOME`. The folder may be filled beforehand and be read-only.",
            "TMPDIR": "Folder in which a server, or a further node, makes a folder `quire-…` for its sockets and "
            "temporary files. The path must be short. Default: `/tmp`.",
            "QUIRE_SHARE_GPU": "`1` lets several ranks share one GPU, to try out a layout. Slow; not for production.",
        },
    ),
    "Traces": (
        "With `--otlp-traces-endpoint`, the OpenTelemetry SDK also reads its own variables, such as "
        "`OTEL_SERVICE_NAME` and `OTEL_TRACES_SAMPLER`; see [Monitoring](../guides/monitoring.md#traces).\n",
        {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "`grpc` or `http/protobuf`. Default: `OTEL_EXPORTER_OTLP_PROTOCOL`.",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "The same for all signals. Default: `grpc`.",
        },
    ),
    "Profiles": (
        "",
        {
            "KINETO_LOG_LEVEL": "Lowest level of the messages of the profiler of torch. While it records, Quire sets "
            "it to `99` (none) if it is not set.",
            "DISABLE_CUPTI_LAZY_REINIT": "Quire sets it to `1` on GPUs if it is not set: the profiler could not be "
            "started twice beside CUDA graphs.",
            "TEARDOWN_CUPTI": "Quire sets it to `0`, for the same reason.",
        },
    ),
    "vLLM": (
        "`quire serve` reads these for command lines that were written for vLLM; see "
        "[Flags of vLLM](vllm.md#environment-variables).\n",
        {
            **{name: f"The same as `{own}`, which takes precedence." for name, own in vllm_flags.VARIABLES.items()},
            **{
                name: f"The same as `{flag}`, which takes precedence{', in GiB' * name.endswith('_SPACE')}."
                for name, (flag, _) in vllm_flags.VARIABLES_OF_FLAGS.items()
            },
            **{spec.partition("=")[0]: f"An error: {remedy}." for spec, remedy in vllm_flags.VARIABLES_REFUSED.items()},
        },
    ),
    "Clients and terminals": (
        "",
        {
            "OPENAI_API_KEY": "The key that `quire bench serve` sends, and that `quire chat`, `quire complete` "
            "and `quire run-batch --url` send if `QUIRE_API_KEY` is not set.",
            "NO_COLOR": "If set, `quire chat` and `quire complete` print no dimmed text.",
        },
    ),
    "Vertex AI": (
        "Vertex AI sets these in the container; see [Deployment](../guides/deployment.md#vertex-ai).\n",
        {
            "AIP_HTTP_PORT": "Port to listen on, unless `--port` is given.",
            "AIP_HEALTH_ROUTE": "Another route for `/health`.",
            "AIP_PREDICT_ROUTE": "Route of predictions.",
        },
    ),
    "systemd": (
        "systemd sets these for a service; see [Deployment](../guides/deployment.md#systemd).\n",
        {
            "NOTIFY_SOCKET": "Socket that hears of the state of the server.",
            "WATCHDOG_USEC": "Microseconds within which the server must give a sign of life.",
            "WATCHDOG_PID": "Process that must give it.",
        },
    ),
    "CPU": (
        "",
        {
            "CXX": "Compiler of the CPU kernels. Default: `c++`.",
            "XDG_CACHE_HOME": "Parent folder of the caches of kernels, of packed weights, of digests of weights and "
            "of what is read from GGUF files and from Mistral's own layout. Default: `~/.cache`.",
            "OMP_NUM_THREADS": "Threads of a rank. Default: the cores of the host divided by the ranks on it.",
            "OMP_WAIT_POLICY": "Quire sets it to `passive` if it is not set, so that idle threads do not use CPU time.",
            "OPENBLAS_NUM_THREADS": "Quire sets it to `1` for the helper processes, which are forked.",
            "TOKENIZERS_PARALLELISM": "Quire sets it to `false` for the helper processes.",
        },
    ),
    "GPUs": (
        "",
        {
            "CUDA_VISIBLE_DEVICES": "The GPUs that Quire may use, by number or UUID.",
            "CUDA_DEVICE_ORDER": "Quire sets it to `PCI_BUS_ID` if it is not set, the order in which NVML counts GPUs.",
            "PYTORCH_ALLOC_CONF": "Settings of torch's allocator. If neither this nor the next one is set, Quire turns "
            "on `expandable_segments`.",
            "PYTORCH_CUDA_ALLOC_CONF": "Older name of `PYTORCH_ALLOC_CONF`.",
            "TRITON_DEFAULT_FP_FUSION": "Quire sets it to `1` if it is not set: Triton adds products without rounding "
            "in between.",
        },
    ),
    "Several ranks or hosts": (
        "",
        {
            "GLOO_SOCKET_IFNAME": "Network interface of gloo. Quire sets it if it is not set: the loopback interface "
            "on one host, otherwise the interface of `QUIRE_HOST_IP`.",
            "NCCL_SOCKET_IFNAME": "Network interface of NCCL. Quire sets it between hosts, as for gloo.",
            "NCCL_IB_HCA": "InfiniBand devices of NCCL; `quire doctor` compares them with those of the host.",
            "NCCL_IB_DISABLE": "`1`: NCCL does not use InfiniBand. `quire doctor` warns of it, and of the next two.",
            "NCCL_P2P_DISABLE": "`1`: GPUs do not read each other's memory.",
            "NCCL_SHM_DISABLE": "`1`: NCCL does not use shared memory.",
            "TORCH_FR_BUFFER_SIZE": "Size of torch's flight recorder, which names the collective that timed out. "
            "Quire sets it to `2000` if it is not set.",
            "RAY_ADDRESS": "HOST:PORT of the head of a Ray cluster. Default: the cluster of this host.",
            "RAY_DEDUP_LOGS": "Quire sets it to `0` if it is not set, so that each log line names its node.",
            "RAY_COLOR_PREFIX": "With `--log-format json`, Quire sets it to `0`: no colours.",
            "RAY_DISABLE_WORKER_LOG_PREFIX": "With `--log-format json`, Quire sets it to `1`: a line of another node "
            "is a JSON object, too.",
            "HF_TOKEN": "Token for Hugging Face. With Ray, all nodes get it, unless they have their own. The same "
            "applies to `OMP_NUM_THREADS` and to variables that begin with `NCCL_`, `GLOO_` or `QUIRE_`, except for "
            "keys, addresses and interfaces.",
        },
    ),
}
OTHERS = {
    "HF_HOME": "Folder of downloaded models (huggingface_hub).",
    "HF_HUB_OFFLINE": "`1`: download nothing (huggingface_hub).",
    "NCCL_DEBUG": "`INFO` makes NCCL log its connections.",
    "RAY_AUTH_MODE": "`token` or `disabled`; the same on all nodes (Ray, `scripts/run_cluster.sh`).",
    "RAY_AUTH_TOKEN": "Token of the Ray cluster; the same on all nodes. `RAY_AUTH_TOKEN_PATH` names a file with it.",
    "RAY_PORT": "Port of the head of the Ray cluster (`scripts/run_cluster.sh`). Default: `6379`.",
    "TRITON_CACHE_DIR": "Folder of compiled Triton kernels. Default: `~/.triton/cache`.",
    "PIP_EXTRA_INDEX_URL": "Another package index for pip, which `scripts/setup` runs: PyTorch's index of CPU builds "
    "on machines without a GPU.",
    "PYTHON": "Python interpreter that `scripts/setup` makes `.venv` with.",
}
"""Variables that only other programs and the scripts read."""

NOT_VARIABLES = {
    *("SC_CLK_TCK", "PCI_BUS_ID", "PATH", "PYTHONPATH", "MONOTONIC_USEC"),
    *("MODEL_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    *("HF_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR"),  # only passed on
}
"""Other names in files that use the environment."""
_NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
_OURS = re.compile(r"(QUIRE|AIP|VLLM)_[A-Z0-9_]+")


def render() -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION]
    for title, (text, variables) in SECTIONS.items():
        parts += [f"## {title}\n", *([text] if text else []), _table(variables)]
    parts += ["## Read by other programs\n", "Quire does not read these, but they are useful:\n", _table(OTHERS)]
    return "\n".join(parts)


def documented() -> set[str]:
    """The variables of the page that the product's code uses."""
    return {name for _, variables in SECTIONS.values() for name in variables}


def used() -> dict[str, str]:
    """The variables that the product's sources use, and a file of each."""
    return {
        name: str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in _names(path.read_text())
        if name not in NOT_VARIABLES
    }


def _names(source: str) -> Iterator[str]:
    """Names of environment variables in a file: all that look like one if it uses the environment, else only our own.

    Names are often constants defined elsewhere in the file, so reading the calls is not enough. Text after `=` is a
    value.
    """
    is_reader = "os.environ" in source or "getenv" in source
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if (_NAME if is_reader else _OURS).fullmatch(text.partition("=")[0]):
                yield text.partition("=")[0]
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ")), args=[ast.Constant(str(text)), *_]):
                yield text
            case ast.Call(func=ast.Attribute(attr="getenv"), args=[ast.Constant(str(text)), *_]):
                yield text
            case ast.Subscript(value=ast.Attribute(attr="environ"), slice=ast.Constant(str(text))):
                yield text


def _table(variables: dict[str, str]) -> str:
    return table(("variable", ""), [(code(name), text) for name, text in variables.items()])


if __name__ == "__main__":
    print(render())
