"""The messages between a supervisor and the processes that it starts (`quire.engine.process.supervisor`). No torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.stats import EngineStats

LogLevel = Literal["debug", "info", "warning", "error"]
ReplicaRole = Literal["any", "prefill", "decode"]
"""Which requests a replica gets first. Each can run all: a role changes where work is done, never whether."""


class Heartbeat(msgspec.Struct, tag=True, array_like=True):
    """The process makes progress, or is idle; sent every second."""


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The process has started: an engine core has loaded its model, an API process serves."""

    seconds: dict[str, float]
    """Duration of each phase of the start-up."""
    stats: EngineStats | None = None
    """Stats of an engine core; its KV cache can be larger or smaller than planned."""


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The process exits because of an error. This is its last message."""

    reason: str
    user_error: bool = False
    """Whether the configuration is wrong, so that another start would fail, too."""


class Drained(msgspec.Struct, tag=True, array_like=True):
    """An API process has no more requests on a replica that drains."""

    replica: int


class Resize(msgspec.Struct, tag=True, array_like=True):
    """An API process was asked for another number of replicas, or for other roles; answered with `ResizeReply`, in
    order. What is None stays as it is, or follows from the others."""

    count: int | None
    drain_seconds: float
    prefill: int | None = None
    """Replicas for prompts; 0: no replica has a role."""
    decode: int | None = None
    """Replicas for decodes."""


class SetLogLevel(msgspec.Struct, tag=True, array_like=True):
    """Show log messages of at least this level; an API process was asked for it, and passes it on to the supervisor,
    which tells all processes.
    """

    level: LogLevel


class NamedAdapter(msgspec.Struct, array_like=True, frozen=True):
    """An adapter that requests may name as their model."""

    name: str
    path: str
    """As it was given: a folder, a GGUF file, a Hugging Face repository, or an uploaded file."""
    created: int
    """Unix time."""
    ref: AdapterRef | None = None
    """None: its weights have not been read yet."""
    rank: int = 0
    """The highest of its layers."""
    invocation_tokens: tuple[int, ...] = ()
    """See `AdapterSpec`."""
    parent: str = ""
    """The name of its base, if it was given."""
    chat_template: str = ""
    """Its own; empty: the base's."""
    is_pinned: bool = False
    """Whether replicas keep it in memory."""


class ChangeAdapter(msgspec.Struct, tag=True, array_like=True):
    """An API process asks for another adapter under a name; answered with `AdapterReply` when all API processes know of
    it, and if there is none any more, when no request uses it."""

    number: int
    name: str
    old: NamedAdapter | None
    """What the name meant to the process; if it means something else, nothing changes."""
    new: NamedAdapter | None


class AdapterSeen(msgspec.Struct, tag=True, array_like=True):
    """An API process has handled an `AdapterChanged`."""

    version: int


FromProcess = Heartbeat | Ready | Failed | Drained | Resize | SetLogLevel | ChangeAdapter | AdapterSeen


class ReplicaStarting(msgspec.Struct, tag=True, array_like=True):
    """A replica was added, or joins again; it will be up or lost."""

    replica: int
    address: str
    """Where it receives requests."""


class ReplicaUp(msgspec.Struct, tag=True, array_like=True):
    """A replica accepts requests."""

    replica: int
    incarnation: int
    """The number that its outputs have. Each start of a replica has another one."""
    stats: EngineStats | None = None
    seconds: dict[str, float] = {}
    """Duration of each phase of its start-up."""
    max_model_len: int = 0
    """The longest request that its KV cache is enough for, unless the user has set the length; 0: not known."""
    tensor_parallel_size: int = 0
    """Ranks that share each of its layers; 0: not known."""
    stages: list[tuple[int, int]] = []
    """First and last layer of each of its stages."""
    kv_peer: str = ""
    """Where other stores read from the KV store of its host (`HOST:PORT`); empty: nowhere."""
    prefill_context_parallel_size: int = 1
    """So many times the ranks that share layers are in each stage."""


class ReplicaLost(msgspec.Struct, tag=True, array_like=True):
    """A replica has died."""

    replica: int
    reason: str
    returns: bool
    """Whether it is being restarted, or may come back by itself."""
    may_be_caused_by_request: bool = True
    """Whether one of its requests may be the cause. It is not if its host was lost, or if it was stopped along with a
    replica that has died.
    """


class ReplicaDraining(msgspec.Struct, tag=True, array_like=True):
    """A replica is to be removed: it gets no new requests. The running ones may finish, and are then moved to others.

    Every API process answers with `Drained`.
    """

    replica: int
    seconds: float
    """Time after which requests are moved."""


class ReplicaRemoved(msgspec.Struct, tag=True, array_like=True):
    """A replica does not exist any more."""

    replica: int


class ReplicaRoles(msgspec.Struct, tag=True, array_like=True):
    """Replicas have other roles from now on. They restart nothing, and running requests stay where they are."""

    roles: dict[int, ReplicaRole]
    """Of all replicas, also of those that are not up yet; those that are not named have the role "any"."""


class EngineFailed(msgspec.Struct, tag=True, array_like=True):
    """The engine is gone for good: fail all requests."""

    reason: str


class Drain(msgspec.Struct, tag=True, array_like=True):
    """Reject new requests, finish the running ones, and exit."""

    seconds: float
    """Time after which running requests fail."""
    has_successor: bool = False
    """Whether another server accepts new connections. Requests of present connections are not rejected then."""


class UseKVPeers(msgspec.Struct, tag=True, array_like=True):
    """The KV store of this host reads from those at these addresses (`HOST:PORT`), and from no others."""

    addresses: tuple[str, ...]


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    """Exit now; running requests are aborted."""

    reason: str = ""
    """Why, if it is an error; other hosts of a replica wait for its next start then."""


class ResizeReply(msgspec.Struct, tag=True, array_like=True):
    """The answer to `Resize`, after the states that follow from it."""

    error: str
    """Why the number of replicas cannot be changed; empty: it is being changed."""


class Reload(msgspec.Struct, tag=True, array_like=True):
    """Read files again, as after SIGHUP: keys, certificates."""

    log_config: str
    """The content of `--log-config-file` (`quire.engine.process.log.CONFIG`); empty: there is none."""
    log_level: LogLevel


class AdapterChanged(msgspec.Struct, tag=True, array_like=True):
    """A name means another adapter, or none; answered with `AdapterSeen`."""

    version: int
    """The number of the change."""
    name: str
    adapter: NamedAdapter | None


class AdapterReply(msgspec.Struct, tag=True, array_like=True):
    """The answer to `ChangeAdapter`."""

    number: int
    has_changed: bool


EngineState = ReplicaStarting | ReplicaUp | ReplicaLost | ReplicaDraining | ReplicaRemoved | ReplicaRoles | EngineFailed
ToProcess = (
    EngineState | Drain | UseKVPeers | Shutdown | ResizeReply | SetLogLevel | Reload | AdapterChanged | AdapterReply
)
