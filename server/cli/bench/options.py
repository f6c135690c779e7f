"""Options of `quire bench serve`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from quire.engine.config.options import flag
from quire.engine.protocol.errors import ConfigError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The server, the load, and the contents of the report, with the names of `vllm bench serve`."""

    base_url: str | None = flag(None, "URL of the server, instead of host and port", metavar="URL")
    host: str = flag("127.0.0.1", "address of the server")
    port: int = flag(8000, "port of the server")
    backend: Literal["openai", "openai-chat"] = flag("openai", "API to use: completions or chat completions")
    endpoint: str | None = flag(None, f"path of the API (default: {COMPLETIONS} or, for chat, {CHAT})", metavar="PATH")
    model: str | None = flag(None, "name of the model (default: the first in /v1/models)")
    api_key: str | None = flag(None, "API key (default: the environment variable OPENAI_API_KEY)", metavar="KEY")
    ready_check_timeout_sec: int = flag(0, "how long to wait for the server to be ready", metavar="SECONDS")
    num_warmups: int = flag(0, "number of warm-up requests")

    request_rate: float = flag(math.inf, "requests per second (inf: all at once)")
    burstiness: float = flag(1.0, "1: Poisson process; less: burstier; more: more even", metavar="X")
    max_concurrency: int | None = flag(None, "maximum number of concurrent requests; further requests wait")
    seed: int = flag(0, "random seed of prompts, lengths and arrivals")

    ignore_eos: bool = flag(True, "generate the full output length; --no-ignore-eos for servers without support for it")
    temperature: float | None = flag(None, "sampling temperature (default: the server's)", metavar="X")
    extra_body: str | None = flag(None, "additional fields of each request, as a JSON object", metavar="JSON")
    random_vocab_size: int = flag(1000, "prompts consist of token ids below this")

    percentile_metrics: str = flag("ttft,tpot,itl,e2el", "metrics to report", metavar="NAME,…")
    metric_percentiles: str = flag("99", "percentiles to report, such as 50,90,99", metavar="P,…")
    goodput: tuple[str, ...] | None = flag(
        None, "report the rate of requests within these limits, such as ttft:500 tpot:50 e2el:9000", metavar="NAME:MS"
    )
    plot: str | None = flag(None, "plot the run to a .png, .svg or .pdf file", metavar="FILE")
    save_result: bool = flag(False, "write the results to a JSON file")
    save_detailed: bool = flag(False, "include the times, text and error of each request")
    result_dir: str | None = flag(None, "folder of the JSON file (default: the current folder)", metavar="FOLDER")
    result_filename: str | None = flag(None, "name of the JSON file (default: from rate, model and time)")
    disable_tqdm: bool = flag(False, "do not show a progress bar")

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    @property
    def path(self) -> str:
        return self.endpoint or (CHAT if self.backend == "openai-chat" else COMPLETIONS)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        url = self.base_url or f"http://{host}:{self.port}"
        return url.rstrip("/").removesuffix("/v1")  # as OpenAI's clients accept it; the paths start with /v1

    def check(self) -> None:
        """Raise `ConfigError` for invalid options."""
        if not self.path.startswith("/"):
            raise ConfigError(f"--endpoint {self.path}: expected a path such as {COMPLETIONS}")
        for name, value in (("request-rate", self.request_rate), ("burstiness", self.burstiness)):
            if not value > 0:
                raise ConfigError(f"--{name} {value:g}: must be greater than 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency {self.max_concurrency}: must be at least 1")
        if self.random_vocab_size < 2:
            raise ConfigError(f"--random-vocab-size {self.random_vocab_size}: must be at least 2")

    def extra_fields(self) -> dict[str, Any]:
        """Parse the object of --extra-body; raises `ConfigError`."""
        try:
            extra = json.loads(self.extra_body or "{}")
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise ConfigError(f"--extra-body {self.extra_body}: expected a JSON object")
        return extra

    def load(self) -> str:
        """A description of the load."""
        pattern = {1.0: ", Poisson", math.inf: ", evenly"}.get(self.burstiness, f", burstiness {self.burstiness:g}")
        is_rated = not math.isinf(self.request_rate)
        words = f"at {self.request_rate:g}/s{pattern}" if is_rated else "all at once"
        if self.max_concurrency is None:
            return words
        return f"{words}, {self.max_concurrency} at most at once" if is_rated else f"{self.max_concurrency} at a time"
