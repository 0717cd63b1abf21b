"""Listening: where a server listens, checked before a model is loaded.

Owns the options of the socket and of TLS, and the errors that name them. Never accepts a
connection.
"""

import os
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from nv_engine import values
from nv_engine.values import shown

MAX_PORT = 65535
MAX_SECONDS = 24 * 3600.0
MAX_PATH_BYTES = 107
"""Of a unix socket's path, on Linux."""


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a server listens.

    Raises:
        ValueError: at construction, for a value out of range, or for a certificate that is not
            whole.
        FileNotFoundError: at construction, for a file that does not exist.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    uds: str | None = None
    """A socket's path, in place of host and port."""
    root_path: str = ""
    """The beginning of paths that a proxy has cut off."""
    keep_alive: float = 75.0
    """Seconds that an idle connection is kept; longer than nginx keeps one."""
    head_timeout: float = 30.0
    """Seconds for a request's first line and headers, from the connection or the first byte on."""
    body_timeout: float = 120.0
    """Seconds for a request's body, from its head on."""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None

    def __post_init__(self) -> None:
        values.integer("port", self.port, 0, MAX_PORT)
        values.real("keep_alive", self.keep_alive, 0.0, MAX_SECONDS)
        for name in "head_timeout", "body_timeout":
            values.real(name, getattr(self, name), 0.0, MAX_SECONDS, above=True)
        if self.root_path and not self.root_path.startswith("/"):
            raise ValueError(f"root_path is {shown(self.root_path)}: it must begin with /")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile belong together: give both")
        self._check_certificates()
        for name in ("ssl_ca_certs", "ssl_keyfile_password"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ValueError(
                    f"{name} is given without ssl_certfile, so the server would answer in plain "
                    "HTTP: give ssl_keyfile and ssl_certfile too"
                )
        if self.uds is not None:
            self._check_path(self.uds)

    def check_free(self) -> None:
        """Check that the address can be listened on; another process may still take it.

        Raises:
            OSError: it cannot.
        """
        if self.uds is not None:
            return
        place = f"{self.host}:{self.port}"
        try:
            found = socket.getaddrinfo(  # of "": every address of this machine
                self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except socket.gaierror as error:
            raise OSError(
                f"host is {shown(self.host)}: {error.strerror}; give an address of this machine "
                "with --host"
            ) from None
        for family, kind, protocol, _, address in found:
            try:
                tried = socket.socket(family, kind, protocol)
            except OSError:  # this machine lacks the family: asyncio will not listen there either
                continue
            with tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:  # as asyncio: IPv4 has a socket of its own
                    tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    tried.bind(address)
                except OSError as error:
                    raise OSError(
                        f"cannot listen on {place}: {os.strerror(error.errno or 0)}; give another "
                        "--port (0: any free one) or --host"
                    ) from None

    def _check_certificates(self) -> None:
        """Read the files of TLS once."""
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise FileNotFoundError(
                    f"{name} is {shown(path)}, which does not exist: give the path of a PEM file"
                )
        if self.ssl_certfile is None:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:  # without a password, an encrypted key would be asked for on the terminal
            context.load_cert_chain(
                self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password or ""
            )
        except OSError as error:
            raise ValueError(
                f"the certificate {self.ssl_certfile} and the key {self.ssl_keyfile} cannot be "
                f"used together ({error}): both must be PEM, and an encrypted key needs "
                "--ssl-keyfile-password"
            ) from None
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except OSError as error:
                raise ValueError(
                    f"ssl_ca_certs is {shown(self.ssl_ca_certs)}, which cannot be read ({error}): "
                    "give a PEM file of certificates"
                ) from None

    @staticmethod
    def _check_path(uds: str) -> None:
        """Check a unix socket's path."""
        if not Path(uds).parent.is_dir():
            raise FileNotFoundError(f"uds is {shown(uds)}: its folder does not exist")
        if len(os.fsencode(uds)) > MAX_PATH_BYTES:
            raise ValueError(
                f"uds is {shown(uds)}: the path must have at most {MAX_PATH_BYTES} bytes"
            )
        if os.path.lexists(uds) and not stat.S_ISSOCK(Path(uds).lstat().st_mode):
            raise ValueError(f"uds is {shown(uds)}: a file which is not a socket is there")
