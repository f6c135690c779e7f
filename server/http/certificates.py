"""The certificates of HTTPS, which may change while the server runs."""

from __future__ import annotations

import ssl

from quire.server.config.server_options import ServerOptions
from quire.server.http.watched_files import WatchedFiles


class Certificates:
    """The TLS settings of connections. Each new connection gets those of the files at that time."""

    def __init__(self, options: ServerOptions) -> None:
        """Read the files. Raises `ConfigError`, and `OSError` if they have vanished."""
        assert options.ssl_certfile is not None
        assert options.ssl_keyfile is not None
        self._options = options
        given = options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs
        self.files = WatchedFiles(self._read, *dict.fromkeys(filter(None, given)))
        self._newest = self.context = options.tls_context()
        """`context` is for the listening socket."""
        self.context.sni_callback = self._choose

    def _read(self) -> str:
        self._newest = self._options.tls_context()
        return "new connections get this certificate"

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called with each client's first message, whether or not it names a server. The settings change as a whole:
        reading the files into `context` would leave it without a key if that does not match.
        """
        self.files.check()
        connection.context = self._newest
