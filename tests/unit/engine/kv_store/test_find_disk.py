"""The start of the disk tier, which must not cost the memory tier."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from quire.engine.kv_store import process as module
from quire.engine.kv_store.process import StoreProcess


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PermissionError(13, "Permission denied"), "the model's weights cannot be read: Permission denied"),
        (KeyError("shape"), "the model's weights cannot be read: KeyError: 'shape'"),
    ],
)
def test_without_a_digest_there_is_no_disk_tier(error: Exception, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "signature_of", MagicMock(side_effect=error))
    store = MagicMock()
    store._call = lambda function: function()
    StoreProcess._find_signature(store, MagicMock(), MagicMock())
    store._lack_signature.assert_called_once_with(text)
