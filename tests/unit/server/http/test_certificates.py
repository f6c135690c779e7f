"""Certificates that change while the server runs."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import pytest
import trustme

from quire.server.config.server_options import ServerOptions
from quire.server.http.certificates import Certificates


class Connection:
    """A client and a connection of the server, in memory."""

    def __init__(self, certificates: Certificates, client: ssl.SSLContext, name: str | None) -> None:
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = client.wrap_bio(to_client, to_server, server_hostname=name)
        self.server = certificates.context.wrap_bio(to_server, to_client, server_side=True)

    def open(self) -> bytes:
        """The server's certificate."""
        for _ in range(2):
            for side in (self.client, self.server):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        certificate = self.client.getpeercert(binary_form=True)
        assert certificate is not None
        return certificate

    def echo(self, text: bytes) -> bytes:
        self.client.write(text)
        self.server.write(self.server.read())
        return self.client.read()


@pytest.mark.parametrize("name", ["quire.example", None])
def test_new_connections_get_the_new_certificate_and_open_ones_live_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str | None
) -> None:
    authority, client = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = name is not None
    authority.configure_trust(client)

    def write(folder: str) -> None:
        issued = authority.issue_cert("quire.example")
        (tmp_path / folder).mkdir()
        issued.private_key_pem.write_to_path(str(tmp_path / folder / "tls.key"))
        issued.cert_chain_pems[0].write_to_path(str(tmp_path / folder / "tls.crt"))

    def switch(folder: str) -> None:
        """As cert-manager's volume does."""
        (tmp_path / "next").symlink_to(tmp_path / folder)
        (tmp_path / "next").rename(tmp_path / "data")

    for folder in ("one", "two"):
        write(folder)
    switch("one")
    cert, key = str(tmp_path / "data" / "tls.crt"), str(tmp_path / "data" / "tls.key")
    certificates = Certificates(ServerOptions(ssl_certfile=cert, ssl_keyfile=key))

    def connect() -> tuple[Connection, bytes]:
        connection = Connection(certificates, client, name)
        return connection, connection.open()

    open_before, first = connect()
    assert connect()[1] == first
    switch("two")
    _, second = connect()
    assert second != first
    assert open_before.echo(b"hello") == b"hello"
    shutil.copy(tmp_path / "one" / "tls.key", key)  # not this certificate's
    assert connect()[1] == second
    assert f"{cert}, {key}: invalid; the previous content stays valid: --ssl-certfile {cert}" in caplog.text
    caplog.clear()
    Path(key).unlink()
    for _ in range(2):
        assert connect()[1] == second
    assert caplog.text.count("cannot be read; the previous content stays valid") == 1
    switch("one")
    assert connect()[1] == first


def test_certificate_authorities_change_too(tmp_path: Path) -> None:
    authorities = [trustme.CA() for _ in range(2)]
    issued = authorities[0].issue_cert("quire.example")
    files = {name: tmp_path / name for name in ("key", "cert", "ca")}
    issued.private_key_pem.write_to_path(str(files["key"]))
    issued.cert_chain_pems[0].write_to_path(str(files["cert"]))
    authorities[0].cert_pem.write_to_path(str(files["ca"]))
    certificates = Certificates(
        ServerOptions(
            ssl_certfile=str(files["cert"]),
            ssl_keyfile=str(files["key"]),
            ssl_ca_certs=str(files["ca"]),
            ssl_cert_reqs=2,
        )
    )

    def is_known(number: int) -> bool:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authorities[0].configure_trust(client)
        authorities[number].issue_cert("client@example.com").configure_cert(client)
        connection = Connection(certificates, client, "quire.example")
        try:
            connection.open()
        except ssl.SSLError:
            return False
        return connection.server.getpeercert() is not None

    assert [is_known(number) for number in (0, 1)] == [True, False]
    authorities[1].cert_pem.write_to_path(str(files["ca"]))
    assert [is_known(number) for number in (0, 1)] == [False, True]
