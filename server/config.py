"""What `quire serve` can be told about its text side (for the rest see `quire.engine.config.EngineOptions`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.engine.config import flag


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Every server option. On the command line and in `--config FILE.yaml`, as for the engine's."""

    host: str = flag("127.0.0.1", "address to listen on (0.0.0.0: all)")
    port: int = flag(8000, "port to listen on (0: any free one, which is logged)")
    uds: str | None = flag(None, "Unix domain socket to listen on, instead of host and port", metavar="PATH")
    api_key: str | None = flag(None, "key that clients must bring as a bearer token; /health stays open", metavar="KEY")
    served_model_name: tuple[str, ...] | None = flag(
        None, "names that requests may call the model by (default: MODEL as given)", metavar="NAME"
    )
    chat_template: str | None = flag(
        None, "Jinja chat template, a file or the text itself (default: the model's)", metavar="FILE"
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "what is worth a log line")
