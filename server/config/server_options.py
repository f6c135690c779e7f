"""Options of the text side of `quire serve`; for the engine's see `quire.engine.config.options.EngineOptions`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import urlsplit

from quire.engine.config.devices import free_host_memory
from quire.engine.config.options import flag
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.media import MediaKind
from quire.engine.protocol.supervision import NamedAdapter
from quire.server.config.media_defaults import CACHE_GB, FETCH_SECONDS, MAX_BYTES

if TYPE_CHECKING:
    from ssl import SSLContext

_API_PROCESS_BYTES = 48 << 20
"""Memory of an idle API process with a small tokenizer, less the memory that it shares with the others."""
_DRAIN_SECONDS = 30.0
"""Default of `--shutdown-timeout` after SIGTERM."""


@dataclass(frozen=True)
class RestartPolicy:
    """The policy for replicas that die."""

    is_enabled: bool = True
    """Whether to start them again."""
    max_restarts: int = 5
    """Maximum number of deaths of the last replica that is up within 10 minutes; after more, the engine has failed."""


TEMPLATE_PARAMETERS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of chat templates that are parameters of requests, and not `chat_template_kwargs`."""
_TOKENIZERS = frozenset(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Variables of chat templates that are the tokenizer's."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The names of the served model, and its chat format."""

    served_model_name: tuple[str, ...] | None = flag(
        None, "names by which requests may refer to the model (default: MODEL as given)", metavar="NAME", is_common=True
    )
    chat_template: str | None = flag(
        None, "Jinja chat template, as a file or as text (default: the model's)", metavar="FILE"
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = flag(
        None,
        'variables of the chat template for all requests, e.g. {"enable_thinking": false}; chat_template_kwargs and '
        "other parameters of a request take precedence",
    )
    trust_request_chat_template: bool = flag(
        False, "accept chat templates in requests; they run in a sandbox, with limits of time and memory"
    )
    strict_parameters: bool = flag(
        False, "reject hints and unknown fields in messages, too, instead of ignoring them (see docs/reference/api.md)"
    )
    keep_billing_header: bool = flag(
        False,
        "keep lines such as x-anthropic-billing-header: … at the start of system prompts; by default they are removed, "
        "as Claude Code sends a new one with each request, which would defeat prefix caching",
    )
    structured_outputs_fallback: Literal["refuse", "warn"] = flag(
        "refuse",
        "a JSON schema with a keyword that cannot be enforced is refused, or enforced without it, with an "
        "X-Quire-Warning header in the response",
    )
    tool_call_parser: Literal[
        "auto",
        "none",
        "hermes",
        "qwen",
        "llama3_json",
        "llama4_json",
        "mistral",
        "mistral_args",
        "granite",
        "granite4",
        "deepseek_v3",
        "deepseek_r1",
        "deepseek_v31",
        "deepseek_v32",
        "deepseek_v4",
        "pythonic",
        "llama4_pythonic",
        "qwen3_coder",
        "qwen3_xml",
        "step3p5",
        "glm45",
        "glm47",
        "kimi_k2",
        "minimax_m2",
        "seed_oss",
        "step3",
        "hunyuan_a13b",
        "hy_v3",
        "nemotron_json",
        "phi4_mini_json",
        "internlm",
        "lfm2",
        "olmo3",
        "functiongemma",
        "gemma4",
        "openai",
    ] = flag("auto", "format of the model's tool calls (default: detected from its chat template)")
    reasoning_parser: Literal[
        "auto",
        "none",
        "deepseek_r1",
        "deepseek_v3",
        "deepseek_v4",
        "qwen3",
        "glm45",
        "glm47",
        "holo2",
        "hy_v3",
        "mimo",
        "minimax_m2",
        "nemotron_v3",
        "olmo3",
        "step3",
        "step3p5",
        "granite",
        "mistral",
        "kimi_k2",
        "hunyuan_a13b",
        "seed_oss",
        "gemma4",
        "openai_gptoss",
    ] = flag(
        "auto", "format of the model's reasoning, which is separated from the content (default: as for tool calls)"
    )

    def check(self) -> None:
        """Raise `ConfigError` for invalid options."""
        for names, whose in ((TEMPLATE_PARAMETERS, "requests set"), (_TOKENIZERS, "is the tokenizer's")):
            if found := names.intersection(self.default_chat_template_kwargs or {}):
                raise ConfigError(f"--default-chat-template-kwargs cannot set {min(found)}, which {whose}; omit it")


@dataclass(frozen=True, kw_only=True)
class MediaOptions:
    """Images and videos in requests: where they may come from, and how they are processed."""

    media_fetch: bool = flag(
        True, "fetch images and videos at http and https URLs in requests; --no-media-fetch: data URLs only"
    )
    allowed_media_domains: tuple[str, ...] | None = flag(
        None,
        "only domains that media is fetched from, such as images.example or *.images.example, which may have private "
        "addresses (default: all domains with public addresses)",
        metavar="DOMAIN",
    )
    allowed_media_networks: tuple[str, ...] | None = flag(
        None,
        "networks that media may be fetched from although their addresses are private or reserved, such as "
        "10.1.0.0/16 (default: none)",
        metavar="NETWORK",
    )
    allowed_local_media_path: str | None = flag(
        None, "folder with files that file:// URLs in requests may read (default: none)", metavar="DIR"
    )
    media_fetch_timeout: float = flag(FETCH_SECONDS, "time limit for fetching an image or video", metavar="SECONDS")
    max_media_bytes: int = flag(MAX_BYTES, "maximum size of an image's or a video's file, in bytes")
    mm_processor_kwargs: Mapping[str, Any] | None = flag(
        None, 'options of the model\'s processor of images and videos, e.g. {"max_pixels": 1003520}'
    )
    media_io_kwargs: Mapping[str, Any] | None = flag(
        None, 'options of reading media, by kind, e.g. {"video": {"num_frames": 32}}'
    )
    file_storage_path: str | None = flag(
        None,
        "folder for files that clients upload (/v1/files) and then name by their ids (default: none)",
        metavar="DIR",
    )
    file_storage_gb: float = flag(10.0, "maximum size of all uploaded files together, in GiB", metavar="GIB")
    enable_mm_embeds: bool = flag(False, "accept the features of images, computed by the client (image_embeds)")
    mm_processor_cache_gb: float = flag(
        CACHE_GB,
        "size of the cache of processed images and videos, which all API processes share, in GiB; 0: none. Those of "
        "running requests may have 1 GiB in any case",
        metavar="GIB",
    )

    def check_media(self) -> None:
        """Raise `ConfigError` for invalid options; domains and networks are checked by `quire.server.media.service`."""
        if not self.media_fetch:
            for name in ("allowed_media_domains", "allowed_media_networks"):
                if getattr(self, name):
                    raise ConfigError(f"--{name.replace('_', '-')} with --no-media-fetch: omit one of them")
        if (folder := self.allowed_local_media_path) and not os.path.isdir(folder):
            raise ConfigError(f"--allowed-local-media-path {folder}: not a folder")
        folder = self.file_storage_path
        if folder and not (os.path.isdir(folder) and os.access(folder, os.R_OK | os.W_OK | os.X_OK)):
            raise ConfigError(f"--file-storage-path {folder}: not a folder that this user can write to")
        for name in ("media_fetch_timeout", "max_media_bytes", "file_storage_gb"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be greater than 0, and finite")
        if not 0 <= self.mm_processor_cache_gb < math.inf:
            raise ConfigError(f"--mm-processor-cache-gb {self.mm_processor_cache_gb:g}: must be at least 0, and finite")
        for kind, value in (self.media_io_kwargs or {}).items():
            if kind not in get_args(MediaKind) or not isinstance(value, dict):
                kinds = " or ".join(get_args(MediaKind))
                raise ConfigError(f"--media-io-kwargs: {kind}: expected {kinds}, with an object of options")


LORA_DISK_GB = 8.0


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Adapters (LoRA), with --enable-lora: which ones, and where clients may load more from."""

    lora_modules: tuple[str, ...] | None = flag(
        None,
        "adapters that requests may name as their model: folders, GGUF files or Hugging Face repositories; also as "
        'JSON, {"name": …, "path": …, "base_model_name": …, "pinned": …}',
        metavar="NAME=PATH",
    )
    lora_root: str | None = flag(None, "folder of the adapters that POST /v1/load_lora_adapter may load", metavar="DIR")
    lora_resolver: Literal["off", "root", "hub"] = flag(
        "off",
        "where to look for models of requests that have no name here: nowhere, below --lora-root, or then also on the "
        "Hugging Face Hub, from which POST /v1/load_lora_adapter may then load, too",
    )
    lora_disk_gb: float = flag(
        LORA_DISK_GB,
        "most GiB of the folder for temporary files (TMPDIR) for copies of adapters, which let requests go on when "
        "their files are overwritten",
    )

    def adapters(self) -> list[NamedAdapter]:
        """Return the adapters of `--lora-modules`. Raises `ConfigError`."""
        found = dict[str, NamedAdapter]()
        for given in self.lora_modules or ():
            name, _, path = given.partition("=")
            parent: Any = ""
            is_pinned: Any = False
            if given.startswith("{"):
                try:
                    fields = json.loads(given)
                except ValueError:
                    raise ConfigError(f"--lora-modules {given}: not valid JSON") from None
                name, path, parent = (fields.pop(each, "") for each in ("name", "path", "base_model_name"))
                is_pinned = fields.pop("pinned", False)
                fields.pop("is_3d_lora_weight", None)  # vLLM's; the files show it
                if fields:
                    raise ConfigError(f"--lora-modules {given}: {next(iter(fields))} is not supported")
            if not all(isinstance(each, str) for each in (name, path, parent)) or not name.strip() or not path:
                raise ConfigError(f"--lora-modules {given}: expected NAME=PATH")
            if not isinstance(is_pinned, bool):
                raise ConfigError(f"--lora-modules {given}: pinned: expected true or false")
            if "," in name:  # which metrics put between names
                raise ConfigError(f"--lora-modules {given}: a name must have no comma")
            if name in found:
                raise ConfigError(f"--lora-modules {name} is given twice")
            found[name] = NamedAdapter(name, path, int(time.time()), parent=parent, is_pinned=is_pinned)
        return [*found.values()]

    def check_adapters(self, base_names: Sequence[str], *, is_enabled: bool) -> None:
        """Raise `ConfigError` for invalid options; `is_enabled`: with `--enable-lora`."""
        for name in ("lora_modules", "lora_root"):
            if getattr(self, name) is not None and not is_enabled:
                raise ConfigError(f"--{name.replace('_', '-')} requires --enable-lora")
        if self.lora_resolver != "off" and not is_enabled:
            raise ConfigError(f"--lora-resolver {self.lora_resolver} requires --enable-lora")
        if self.lora_resolver == "root" and self.lora_root is None:
            raise ConfigError("--lora-resolver root requires --lora-root")
        if self.lora_root is not None and not os.path.isdir(self.lora_root):
            raise ConfigError(f"--lora-root {self.lora_root}: not a folder")
        if not 0 <= self.lora_disk_gb < math.inf:
            raise ConfigError(f"--lora-disk-gb {self.lora_disk_gb:g}: must be at least 0, and finite")
        for each in self.adapters():
            if each.name in base_names:
                raise ConfigError(f"--lora-modules {each.name}: it is a name of the base model; choose another one")
            if each.parent and each.parent not in base_names:
                names = " or ".join(base_names)
                raise ConfigError(f"--lora-modules {each.name}: base_model_name: {each.parent} is not {names}")


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """The address, the processes and the life of the server."""

    host: str = flag("127.0.0.1", "address to listen on (0.0.0.0: all)", is_common=True)
    port: int = flag(8000, "port to listen on (0: any free port; the log shows it)", is_common=True)
    uds: str | None = flag(None, "Unix domain socket to listen on, instead of host and port", metavar="PATH")
    takeover: bool = flag(
        False,
        "take over --host and --port (or --uds) from the server that runs there, without a gap: once this one is ready "
        "it accepts all new connections, and the other one drains and exits; both models are in memory meanwhile",
    )
    root_path: str = flag("", "path prefix that a reverse proxy adds to every route, such as /llm", metavar="PATH")
    api_server_count: int = flag(1, "API processes, which share the port and the engine", short="-asc")
    headless: bool = flag(
        False,
        "run this host's ranks without an API (see --node-rank, --data-parallel-start-rank)",
    )
    auto: bool = flag(
        False,
        "choose any of -tp, -pp, -dp and --enable-expert-parallel that are not given, as quire plan does for this host",
    )
    optimize: Literal["throughput", "latency"] = flag(
        "throughput",
        "with --auto, prefer the most tokens/s of a full batch (throughput) or of a request that is alone (latency)",
    )
    shutdown_timeout: float | None = flag(
        None,
        "time for running requests to finish after SIGTERM or SIGINT, which then fail "
        "(default: 30 after SIGTERM, 0 after SIGINT, as from Ctrl-C)",
        metavar="SECONDS",
    )
    restart: bool = flag(True, "start replicas of the engine that died again; their requests go on")
    max_restarts: int = flag(
        5, "how often the last replica that is up may die within 10 minutes before the server exits"
    )
    ui: bool = flag(True, "a page at / that shows the engine at work")


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Who may send requests: API keys, roles, and fair shares."""

    api_key: tuple[str, ...] | None = flag(
        None,
        "API keys; clients must send one of them as a bearer token, except for /health "
        "(default: the keys in the environment variable QUIRE_API_KEY)",
        metavar="KEY",
        is_common=True,
    )
    admin_key: tuple[str, ...] | None = flag(
        None,
        "keys that may also change the number of replicas and the log level, load adapters, and record profiles; API "
        "keys may not "
        "(default: the keys in the environment variable QUIRE_ADMIN_KEY)",
        metavar="KEY",
    )
    metrics_key: tuple[str, ...] | None = flag(
        None,
        "keys that only read /metrics, which API keys may not read then "
        "(default: the keys in the environment variable QUIRE_METRICS_KEY)",
        metavar="KEY",
    )
    public_metrics: bool = flag(False, "let everybody read /metrics, without a key")
    api_key_file: str | None = flag(
        None,
        "file with additional keys, one per line as NAME:KEY or KEY (# starts a comment), each with its weight for "
        "--fair-share, such as weight=2, if that is not 1, and with role=admin or role=metrics if it is not an API "
        "key; changes take effect immediately",
        metavar="FILE",
    )
    fair_share: Literal["off", "key", "user", "address", "adapter"] = flag(
        "off",
        "who share the engine fairly: clients by their API key, by the `user` of the request or by their address, or "
        "adapters; off: first come, first served (see docs/guides/deployment.md)",
    )
    fair_share_weights: tuple[str, ...] | None = flag(
        None,
        "with --fair-share user, address or adapter, weights other than 1; weights of API keys are in --api-key-file",
        metavar="NAME=WEIGHT",
    )


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limits of requests and connections."""

    max_queue: int | Literal["unlimited"] = flag(
        8192, "maximum number of waiting requests; further requests get status 429 (see docs/guides/deployment.md)"
    )
    request_timeout: float | None = flag(
        None, "maximum duration of a request, from its first byte to the end of the response", metavar="SECONDS"
    )
    max_body_mib: float = flag(
        64.0, "maximum size of a request body, in MiB; larger ones get status 413", metavar="MIB"
    )
    client_header_timeout: float = flag(
        20.0, "time limit for the headers of a request, and for the first request of a connection", metavar="SECONDS"
    )
    client_body_timeout: float = flag(
        60.0, "time in which a request body must end or progress by 1 KiB per second", metavar="SECONDS"
    )
    timeout_keep_alive: int = flag(
        75, "time after which an idle connection is closed; should exceed the load balancer's", metavar="SECONDS"
    )
    max_connections_per_client: int | None = flag(
        None, "maximum number of connections from one address, per API process; further ones get status 429"
    )


@dataclass(frozen=True, kw_only=True)
class MonitoringOptions:
    """Logs, metrics, traces and profiles."""

    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", "lowest level of log messages to show; a running server can change it (see docs/guides/monitoring.md)"
    )
    log_format: Literal["text", "json"] | None = flag(
        None,
        "format of the logs: text, or a JSON object in each line, without progress bars "
        "(default: the environment variable QUIRE_LOG_FORMAT, or text)",
    )
    log_config_file: str | None = flag(
        None,
        "configuration of the logs in JSON or YAML, for Python's logging.config.dictConfig; the logger is `quire`",
        metavar="FILE",
    )
    access_log: bool = flag(False, "log a line for each request when it has ended (see docs/guides/monitoring.md)")
    disable_access_log_for_endpoints: str | None = flag(
        None, "paths that the access log leaves out, separated by commas, such as /health,/metrics", metavar="PATHS"
    )
    log_prompts: bool = flag(False, "show prompts in the access log")
    max_log_len: int | None = flag(None, "maximum number of characters of a prompt in the access log (default: all)")
    vllm_metrics: bool = flag(True, "also export metrics under vLLM's names (vllm:…)")
    enable_per_request_metrics: bool = flag(
        False, "add `metrics`, the times of the request, to chat completions and completions of one choice"
    )
    enable_force_include_usage: bool = flag(
        False, "send the usage in every chunk of streams of chat completions and completions, whatever requests ask for"
    )
    return_tokens_as_token_ids: bool = flag(
        False,
        "represent tokens in log-probabilities as `token_id:123`, unless a request has `return_tokens_as_token_ids`",
    )
    otlp_traces_endpoint: str | None = flag(
        None,
        "OpenTelemetry collector that gets traces of requests, such as http://localhost:4317; "
        "requires the extra quire-llm[otlp] (see docs/guides/monitoring.md)",
        metavar="URL",
    )
    torch_profiler_dir: str | None = flag(
        None, "folder where POST /stop_profile leaves traces, instead of sending them", metavar="DIR"
    )


@dataclass(frozen=True, kw_only=True)
class BrowserOptions:
    """Web pages of other origins that may send requests (CORS)."""

    allowed_origins: tuple[str, ...] | None = flag(
        None,
        "CORS: origins that browsers may send requests from, such as https://chat.example (*: all)",
        metavar="ORIGIN",
    )
    allowed_methods: tuple[str, ...] | None = flag(None, "CORS: methods that these origins may use (default: all)")
    allowed_headers: tuple[str, ...] | None = flag(None, "CORS: headers that these origins may send (default: all)")
    allow_credentials: bool = flag(False, "CORS: accept cookies and client certificates")


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """Certificates of the server and of its clients."""

    ssl_keyfile: str | None = flag(None, "private key for TLS, in PEM format; requires --ssl-certfile", metavar="FILE")
    ssl_certfile: str | None = flag(None, "certificate chain for TLS, in PEM format", metavar="FILE")
    ssl_ca_certs: str | None = flag(
        None, "CA certificates for checking client certificates, in PEM format", metavar="FILE"
    )
    ssl_cert_reqs: int = flag(0, "client certificates: 0: ignored, 1: optional, 2: required")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(  # in reverse, as for `EngineOptions`
    TlsOptions,
    BrowserOptions,
    MonitoringOptions,
    LimitOptions,
    AccessOptions,
    MediaOptions,
    AdapterOptions,
    HttpOptions,
    ChatOptions,
):
    """All server options, for the command line and `--config FILE.yaml`."""

    @property
    def is_tls(self) -> bool:
        return self.ssl_certfile is not None

    def drain_seconds(self, *, is_interrupt: bool = False) -> float:
        """`shutdown_timeout`, or its default; `is_interrupt`: after SIGINT."""
        if self.shutdown_timeout is not None:
            return self.shutdown_timeout
        return 0.0 if is_interrupt else _DRAIN_SECONDS

    @property
    def queue_limit(self) -> int | None:
        """`max_queue` as a number, or None for no limit."""
        return None if self.max_queue == "unlimited" else self.max_queue

    @property
    def share_weights(self) -> dict[str, float]:
        """`fair_share_weights` by name. Raises `ConfigError`."""
        weights = {}
        for given in self.fair_share_weights or ():
            name, _, text = given.rpartition("=")
            if not name or (weight := read_weight(text)) is None:
                raise ConfigError(f"--fair-share-weights {given}: expected NAME=WEIGHT with a weight {WEIGHT_RANGE}")
            weights[name] = weight
        return weights

    @property
    def restart_policy(self) -> RestartPolicy:
        return RestartPolicy(self.restart, self.max_restarts)

    def check(self) -> None:
        """Raise `ConfigError` for invalid or unreadable options."""
        super().check()
        self.check_media()
        if self.shutdown_timeout is not None and not 0 <= self.shutdown_timeout < float("inf"):
            raise ConfigError(f"--shutdown-timeout {self.shutdown_timeout:g}: must be at least 0")
        if (folder := self.torch_profiler_dir) is not None:
            with contextlib.suppress(OSError):
                os.makedirs(folder, exist_ok=True)
            if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
                raise ConfigError(f"--torch-profiler-dir {folder}: not a folder that can be written to")
        if self.max_restarts < 0:
            raise ConfigError(f"--max-restarts {self.max_restarts}: must be at least 0")
        if self.api_server_count < 1:
            raise ConfigError(f"--api-server-count {self.api_server_count}: must be at least 1")
        if self.takeover and self.headless:
            raise ConfigError("--takeover with --headless: only the host with the API can be taken over; omit it")
        if self.takeover and self.port == 0 and self.uds is None:
            raise ConfigError("--takeover with --port 0: give the port of the running server")
        if self.auto and self.headless:
            raise ConfigError("--auto with --headless: all hosts need the same layout; omit it, and give -tp, -pp, -dp")
        free = free_host_memory()
        if self.api_server_count > max(1, fitting := free // _API_PROCESS_BYTES):
            from quire.engine.config.memory_plan import format_bytes  # slow to import

            raise ConfigError(
                f"--api-server-count {self.api_server_count}: each process needs at least "
                f"{format_bytes(_API_PROCESS_BYTES)} of memory, and {format_bytes(free)} is free; use at most {fitting}"
            )
        if self.served_model_name is not None:
            if not all(map(str.strip, self.served_model_name)):
                raise ConfigError("--served-model-name is empty; omit it to use the name of the model")
            if twice := [name for name, count in Counter(self.served_model_name).items() if count > 1]:
                raise ConfigError(f"--served-model-name {twice[0]} is given twice")
        if self.share_weights and self.fair_share not in ("user", "address", "adapter"):
            raise ConfigError("--fair-share-weights requires --fair-share user, address or adapter")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path {self.root_path}: expected a path such as /llm, or nothing")
        for name, keys in (("api", self.api_key), ("admin", self.admin_key), ("metrics", self.metrics_key)):
            if keys is not None and not all(map(str.strip, keys)):
                raise ConfigError(f"--{name}-key is empty; omit it to run without such keys")
        if self.log_prompts and not self.access_log:
            raise ConfigError("--log-prompts requires --access-log, which shows them")
        if self.queue_limit is not None and self.queue_limit < 0:
            raise ConfigError(f"--max-queue {self.max_queue}: must be at least 0, or unlimited")
        for name in (
            "request_timeout",
            "max_body_mib",
            "client_header_timeout",
            "client_body_timeout",
            "timeout_keep_alive",
            "max_connections_per_client",
            "max_log_len",
        ):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be greater than 0, and finite")
        if self.allowed_origins is None:
            for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
                if getattr(self, name):
                    raise ConfigError(f"--{name.replace('_', '-')} requires --allowed-origins")
        for given in (self.allowed_origins, self.allowed_methods, self.allowed_headers):
            names(given)
        if self.otlp_traces_endpoint is not None:
            otlp_exporter(self.otlp_traces_endpoint)
        self._check_tls()

    def _check_tls(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            given, missing = ("key", "cert") if self.ssl_certfile is None else ("cert", "key")
            raise ConfigError(f"--ssl-{given}file requires --ssl-{missing}file")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"--ssl-cert-reqs {self.ssl_cert_reqs}: must be 0, 1 or 2")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-ca-certs requires --ssl-certfile and --ssl-keyfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(f"--ssl-cert-reqs {self.ssl_cert_reqs} requires --ssl-ca-certs")
        if self.is_tls:
            self.tls_context()

    def tls_context(self) -> SSLContext:
        """Read the files of TLS. Raises `ConfigError` if they cannot be used."""
        import ssl  # slow to import

        assert self.ssl_certfile is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=lambda: "")
        except OSError as error:  # includes ssl.SSLError
            raise ConfigError(
                f"--ssl-certfile {self.ssl_certfile}, --ssl-keyfile {self.ssl_keyfile}: {_reason(error)}; "
                "expected a certificate and its key without a passphrase, in PEM format"
            ) from None
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except OSError as error:
                raise ConfigError(f"--ssl-ca-certs {self.ssl_ca_certs}: {_reason(error)}") from None
        context.verify_mode = ssl.VerifyMode(self.ssl_cert_reqs)
        return context


_OTLP_EXPORTERS = {"grpc": "grpc", "http/protobuf": "http"}
"""By protocol, the end of the package's name."""


def otlp_exporter(endpoint: str) -> str:
    """Return the package that exports traces to `--otlp-traces-endpoint`. Raises `ConfigError` if there is none."""
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name = next((name for name in variables if os.environ.get(name)), variables[0])
    protocol = os.environ.get(name) or "grpc"
    if protocol not in _OTLP_EXPORTERS:
        raise ConfigError(f"environment variable {name}={protocol}: must be {' or '.join(_OTLP_EXPORTERS)}")
    scheme, _, address = endpoint.rpartition("://")
    schemes = ("http", "https") if protocol == "http/protobuf" else ("", "grpc", "http", "https")
    try:
        is_valid = scheme in schemes and urlsplit(f"//{address}").hostname and urlsplit(f"//{address}").port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        example = "http://localhost:4318/v1/traces" if protocol == "http/protobuf" else "http://localhost:4317"
        raise ConfigError(f"--otlp-traces-endpoint {endpoint}: expected a URL such as {example} for {protocol}")
    package = f"opentelemetry-exporter-otlp-proto-{_OTLP_EXPORTERS[protocol]}"
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        what = "'quire-llm[otlp]'" if protocol == "grpc" else package
        raise ConfigError(f"--otlp-traces-endpoint requires OpenTelemetry for {protocol}: pip install {what}") from None
    return package.replace("-", ".")


WEIGHT_RANGE = "from 0.01 to 100"


def read_weight(text: str) -> float | None:
    """Read the weight of a share; returns None if it is not a number in `WEIGHT_RANGE`."""
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if 0.01 <= weight <= 100 else None


def names(given: tuple[str, ...] | None) -> list[str]:
    """Return the values of a flag with several values, or `["*"]` if it is not set. Also accept a JSON list, as vLLM
    does.
    """
    if given is None:
        return ["*"]
    if len(given) == 1 and given[0].startswith("["):
        try:
            return [str(name) for name in json.loads(given[0])]
        except ValueError:
            raise ConfigError(f"{given[0]}: not a list of names, and not valid JSON") from None
    return list(given)


def _reason(error: OSError) -> str:
    return (error.strerror or getattr(error, "reason", None) or str(error)).rstrip(".")
