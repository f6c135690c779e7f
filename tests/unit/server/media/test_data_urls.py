"""Files in data: URLs."""

from __future__ import annotations

import base64

import pytest

from quire.engine.protocol.errors import InvalidParameter
from quire.server.media.data_urls import data_url, is_data_url

DATA = bytes(range(256))
BASE64 = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{BASE64}",
        f"DATA:;charset=x;BASE64,{BASE64}",
        f"data:;base64,{BASE64.rstrip('=')}",
        f"data:;base64,{BASE64[:80]}\r\n{BASE64[80:]}\n",
        f"data:;base64,{BASE64.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
        "data:," + "".join(f"%{each:02x}" for each in DATA),
    ],
)
def test_a_file_comes_out_of_every_usual_form(url: str) -> None:
    assert is_data_url(url)
    assert data_url(url, len(DATA)) == DATA


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "must be like data:"),
        ("data:" + "a" * 2000 + ",", "must be like data:"),
        ("data:;base64,####", "invalid base64"),
        ("data:;base64,AAAA=AAA", "invalid base64"),
        ("data:;base64,ÄÄÄÄ", "invalid base64"),
        ("data:;base64,A", "invalid base64"),
        ("data:;base64," + "A" * 2000, r"more than 1000 bytes \(--max-media-bytes\)"),
        ("data:," + "A" * 1001, "more than 1000 bytes"),
    ],
)
def test_what_is_none_is_refused(url: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        data_url(url, 1000)
