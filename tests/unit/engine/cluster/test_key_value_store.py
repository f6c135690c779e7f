"""The store that ranks rendezvous with: its answers, and the messages that it rejects, which are dropped."""

from __future__ import annotations

import msgspec
import pytest

from quire.engine.cluster.key_value_store import Call, KeyValueStore, StoreReply


def ask(store: KeyValueStore, call: Call) -> StoreReply:
    return msgspec.msgpack.decode(store.answer(msgspec.msgpack.encode(call)), type=StoreReply)


def test_counters() -> None:
    store = KeyValueStore()
    assert [ask(store, Call(1, "add", ["n"], amount=amount)).count for amount in (2, -5, 1)] == [2, -3, -2]
    assert ask(store, Call(2, "get", ["n"])).values == [b"-2"]


def test_calls_that_cannot_be_answered_are_errors_of_the_message() -> None:
    store = KeyValueStore()
    ask(store, Call(1, "set", ["text"], [b"x"]))
    for call in (Call(2, "add", ["text"], amount=1), Call(3, "add", []), Call(4, "no_such_method")):
        with pytest.raises(msgspec.DecodeError):
            ask(store, call)
    assert ask(store, Call(5, "get", ["text"])).values == [b"x"]
