"""What `quire serve` can be told about its text side (for the rest see `quire.engine.config.options.EngineOptions`)."""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass
from typing import Literal

from quire.engine.config.options import flag
from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What a served model is called, and how it chats."""

    served_model_name: tuple[str, ...] | None = flag(
        None, "names that requests may call the model by (default: MODEL as given)", metavar="NAME"
    )
    chat_template: str | None = flag(
        None, "Jinja chat template, a file or the text itself (default: the model's)", metavar="FILE"
    )
    trust_request_chat_template: bool = flag(
        False, "let requests bring a chat template of their own; it runs in a sandbox, but may run long"
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
        "pythonic",
        "llama4_pythonic",
    ] = flag("auto", "format of the model's tool calls (default: what its chat template shows)")
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "deepseek_v3", "qwen3", "glm45", "granite", "mistral"] = (
        flag("auto", "format of the model's thoughts, which are kept apart from content (default: as for tool calls)")
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions(ModelOptions):
    """Every server option. On the command line and in `--config FILE.yaml`, as for the engine's."""

    host: str = flag("127.0.0.1", "address to listen on (0.0.0.0: all)")
    port: int = flag(8000, "port to listen on (0: any free one, which is logged)")
    uds: str | None = flag(None, "Unix domain socket to listen on, instead of host and port", metavar="PATH")
    api_server_count: int = flag(1, "processes that share the port and the engine, for text and HTTP", short="-asc")
    headless: bool = flag(
        False,
        "run the ranks of this host without an API, which is on another (see --node-rank, --data-parallel-start-rank)",
    )
    root_path: str = flag("", "path that a proxy in front puts before every route, as in /llm", metavar="PATH")
    api_key: tuple[str, ...] | None = flag(
        None,
        "keys of which clients must bring one, as a bearer token; /health stays open "
        "(default: those in the environment's QUIRE_API_KEY)",
        metavar="KEY",
    )
    api_key_file: str | None = flag(
        None, "file with one more key on each line (# comments); a change is seen at once", metavar="FILE"
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "what is worth a log line")

    max_queue: int | Literal["unlimited"] = flag(
        8192, "requests that may wait for the engine; past it the answer is 429 (see docs/guides/deployment.md)"
    )
    request_timeout: float | None = flag(
        None, "longest time that a request may take, from its first byte to the end of the answer", metavar="SECONDS"
    )
    max_body_mib: float = flag(64.0, "largest request body, in MiB; a larger one is answered with 413", metavar="MIB")

    allowed_origins: tuple[str, ...] | None = flag(
        None, "web pages that browsers may call from, as in https://chat.example (*: all)", metavar="ORIGIN"
    )
    allowed_methods: tuple[str, ...] | None = flag(None, "methods that these pages may use (default: all)")
    allowed_headers: tuple[str, ...] | None = flag(None, "headers that these pages may send (default: all)")
    allow_credentials: bool = flag(False, "let browsers send these pages' cookies and certificates")

    ssl_keyfile: str | None = flag(None, "private key for TLS, as PEM; with --ssl-certfile", metavar="FILE")
    ssl_certfile: str | None = flag(None, "certificate for TLS and those that sign it, as PEM", metavar="FILE")
    ssl_ca_certs: str | None = flag(None, "certificates that sign those of clients, as PEM", metavar="FILE")
    ssl_cert_reqs: int = flag(0, "certificates of clients: 0 ignored, 1 checked where there is one, 2 required")

    @property
    def is_tls(self) -> bool:
        return self.ssl_certfile is not None

    @property
    def queue_limit(self) -> int | None:
        """`max_queue` as a number; None: no limit."""
        return None if self.max_queue == "unlimited" else self.max_queue

    def check(self) -> None:
        """Raise `ConfigError` for what makes no sense, or cannot be read."""
        if self.api_server_count < 1:
            raise ConfigError(f"--api-server-count {self.api_server_count}: at least one process must serve")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path {self.root_path}: a path like /llm is expected, or nothing")
        if self.api_key is not None and not all(self.api_key):
            raise ConfigError("--api-key is empty; leave it out to serve without a key")
        if self.queue_limit is not None and self.queue_limit < 0:
            raise ConfigError(f"--max-queue {self.max_queue}: at least 0, or unlimited")
        for name, value in (("request-timeout", self.request_timeout), ("max-body-mib", self.max_body_mib)):
            if value is not None and not value > 0:
                raise ConfigError(f"--{name} {value:g}: a number above 0 is expected")
        if self.allowed_origins is None:
            for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
                if getattr(self, name):
                    raise ConfigError(f"--{name.replace('_', '-')} does nothing without --allowed-origins")
        for given in (self.allowed_origins, self.allowed_methods, self.allowed_headers):
            names(given)
        self._check_tls()

    def _check_tls(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            given, missing = ("key", "cert") if self.ssl_certfile is None else ("cert", "key")
            raise ConfigError(f"--ssl-{given}file needs --ssl-{missing}file, too")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"--ssl-cert-reqs {self.ssl_cert_reqs}: 0, 1 or 2 is expected")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile, too")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(f"--ssl-cert-reqs {self.ssl_cert_reqs} needs --ssl-ca-certs, too")
        if self.ssl_certfile is None:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=lambda: "")
        except OSError as error:  # ssl's own are among them
            raise ConfigError(
                f"--ssl-certfile {self.ssl_certfile}, --ssl-keyfile {self.ssl_keyfile}: {_reason(error)}; a "
                "certificate and its key without a passphrase are expected, as PEM"
            ) from None
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except OSError as error:
                raise ConfigError(f"--ssl-ca-certs {self.ssl_ca_certs}: {_reason(error)}") from None


def names(given: tuple[str, ...] | None) -> list[str]:
    """The values of a flag that takes several, all (`*`) when it was not given; vLLM's JSON list is understood, too."""
    if given is None:
        return ["*"]
    if len(given) == 1 and given[0].startswith("["):
        try:
            return [str(name) for name in json.loads(given[0])]
        except ValueError:
            raise ConfigError(f"{given[0]}: neither a list of names nor JSON") from None
    return list(given)


def _reason(error: OSError) -> str:
    return (error.strerror or getattr(error, "reason", None) or str(error)).rstrip(".")
