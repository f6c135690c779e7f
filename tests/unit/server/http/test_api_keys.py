"""Keys of the API."""

from __future__ import annotations

from quire.server.http.api_keys import ApiKeys


def test_a_key_is_compared_whole() -> None:
    keys = ApiKeys([("api", "sk-quire-of-alice")])
    assert keys.find(b"sk-quire-of-alice")
    assert not any(map(keys.find, (b"sk-quire-of-bob", b"sk-quire", b"sk-quire-of-alice2", b"")))
