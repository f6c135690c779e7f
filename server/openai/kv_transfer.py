"""`kv_transfer_params`, which proxies like vLLM's pass from the server that computes a prompt to the server that
continues. Here, it is only a hint where to look first: KV is found by its content."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from quire.server.http.request_model import INTEGRAL, LABEL, ExtraField, RequestModel, TokenIds


class KVTransferParams(RequestModel):
    """vLLM extension, for proxies that send a prompt to one server and continue on another one. Other fields that
    connectors use have no effect."""

    unknown_fields: ClassVar[ExtraField] = LABEL

    do_remote_decode: bool = False
    """Another server will continue: the response, or its last chunk, has the `kv_transfer_params` for that server."""
    do_remote_prefill: bool = False
    """Another server has computed the prompt."""
    remote_host: Annotated[str, Field(pattern=r"^[0-9A-Za-z._:-]+$", max_length=253)] | None = None
    """That server's host. Its KV store is asked first, if it is one of --kv-peers."""
    remote_port: Annotated[int, Field(ge=1, le=65535), INTEGRAL] | None = None
    """The port of its KV store."""
    prompt_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    """In chats: the prompt's tokens in the other server's response (`return_token_ids`), which are used instead of
    rendering the messages, unless these have images or videos.
    """

    @property
    def peer(self) -> str | None:
        """The address of the KV store that has the prompt, empty if it is not known; None: no other server is
        involved."""
        if not self.do_remote_prefill and not self.do_remote_decode:
            return None
        if not self.do_remote_prefill or self.remote_host is None or self.remote_port is None:
            return ""
        host = f"[{self.remote_host}]" if ":" in self.remote_host else self.remote_host
        return f"{host}:{self.remote_port}"

    def answer(self, address: str) -> dict[str, Any]:
        """Return the field of the response whose value a proxy sends to the server that continues. `address`: where
        other servers read the KV store that has the prompt; empty: nowhere."""
        if not self.do_remote_decode:
            return {}
        host, _, port = address.rpartition(":")
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": address or None,
            "remote_block_ids": [],
            "remote_host": host.strip("[]") or None,
            "remote_port": int(port) if port else None,
        }
        return {"kv_transfer_params": params}
