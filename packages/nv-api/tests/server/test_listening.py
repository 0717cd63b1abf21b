"""Where a server listens: a unix socket, TLS; and places where it cannot."""

import os
import socket
import ssl

import pytest
import trustme
from nv_api.cli import app
from nv_api.server.listening import Listening
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A certificate, its key, and that of another; the first one's authority."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued, other = authority.issue_cert("127.0.0.1"), authority.issue_cert("127.0.0.1")
    paths = {name: str(folder / f"{name}.pem") for name in ("cert", "key", "other")}
    issued.cert_chain_pems[0].write_to_path(paths["cert"])
    issued.private_key_pem.write_to_path(paths["key"])
    other.private_key_pem.write_to_path(paths["other"])
    return authority, paths


def test_a_unix_socket(serve, tmp_path, events):
    path = str(tmp_path / "nv.sock")
    served = serve(listening={"uds": path})
    assert served.complete("ab").json()["choices"][0]["text"] == "ab"
    assert len(events(served.complete("ab", stream=True).text)) > 1
    assert served.server._place == f"the socket {path}"


def test_tls(serve, files, events):
    authority, paths = files
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    listening = {"ssl_certfile": paths["cert"], "ssl_keyfile": paths["key"], "verify": trusting}
    served = serve(listening=listening)
    assert served.url.startswith("https://")
    assert served.server._place == served.url
    assert served.complete("ab").json()["choices"][0]["text"] == "ab"
    assert len(events(served.complete("ab", stream=True).text)) > 1
    with socket.create_connection(("127.0.0.1", served.port)) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert plain.recv(100) == b""  # without TLS there is no answer


def test_files_of_tls_are_checked_at_the_start(files):
    _, paths = files
    cert, other = paths["cert"], paths["other"]
    with pytest.raises(FileNotFoundError, match="ssl_keyfile is '/none', which does not exist"):
        Listening(ssl_certfile=cert, ssl_keyfile="/none")
    with pytest.raises(ValueError, match="cannot be used together"):
        Listening(ssl_certfile=cert, ssl_keyfile=other)
    with pytest.raises(FileNotFoundError, match="ssl_ca_certs"):
        Listening(ssl_ca_certs="/none")
    with pytest.raises(ValueError, match=r"ssl_ca_certs is .* which cannot be read"):
        Listening(ssl_certfile=cert, ssl_keyfile=paths["key"], ssl_ca_certs=__file__)


def test_a_path_that_cannot_be_a_socket_is_refused(tmp_path):
    (tmp_path / "a").write_text("a file of the user's")
    with pytest.raises(ValueError, match="a file which is not a socket is there"):
        Listening(uds=str(tmp_path / "a"))
    with pytest.raises(FileNotFoundError, match="its folder does not exist"):
        Listening(uds=str(tmp_path / "none" / "a"))
    with pytest.raises(ValueError, match="at most 107 bytes"):
        Listening(uds=str(tmp_path / ("a" * 108)))


@pytest.mark.parametrize("host", ["127.0.0.1", "no such host"])
def test_a_place_that_is_taken_is_one_sentence_before_any_work(monkeypatch, host):
    made = []
    monkeypatch.setattr("nv_api.AsyncLLM", lambda *given, **options: made.append(given))
    monkeypatch.setitem(os.environ, "NV_LOG", "warning")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["serve", "m", "--host", host, "--port", str(port)]
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    is_taken = host == "127.0.0.1"
    begin = f"nv: cannot listen on {host}:{port}: " if is_taken else f"nv: host is {host!r}: "
    assert result.stderr.startswith(begin)
    advice = "or --host\n" if is_taken else "; give an address of this machine with --host\n"
    assert result.stderr.endswith(advice)
    assert result.stderr.count("\n") == 1
    assert not made


def test_an_empty_host_is_every_address():
    with socket.create_server(("", 0)) as taken:
        listening = Listening(host="", port=taken.getsockname()[1])
        with pytest.raises(OSError, match=r"cannot listen on :\d+: Address already in use"):
            listening.check_free()
    listening.check_free()


def test_the_host_of_any_free_port_is_checked_too():
    Listening(host="127.0.0.1", port=0).check_free()
    with pytest.raises(OSError, match=r"host is 'no such host': .*; give an address of this"):
        Listening(host="no such host", port=0).check_free()
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0: "):
        Listening(host="192.0.2.1", port=0).check_free()  # of no machine (RFC 5737)


def test_an_address_of_a_family_that_is_not_there_is_left_out(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = other.getsockname()
    found = [(family, socket.SOCK_STREAM, 0, "", address) for family in (9999, socket.AF_INET)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: found)
    Listening(host="both", port=address[1]).check_free()
    with socket.create_server(address), pytest.raises(OSError, match="cannot listen on both:"):
        Listening(host="both", port=address[1]).check_free()


def test_an_ipv6_address_is_free_while_the_ipv4_one_is_taken(monkeypatch):
    """A socket that records its options stands for IPv6, which the machine may lack."""
    options = []

    class Tried(socket.socket):
        def __init__(self, family, kind, protocol):
            super().__init__(socket.AF_INET, kind, protocol)

        def setsockopt(self, *option):
            options.append(option)

        def bind(self, address):
            assert (socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1) in options

    found = [(socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::", 1, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: found)
    monkeypatch.setattr(socket, "socket", Tried)
    Listening(host="::", port=1).check_free()
    assert len(options) == 2
