"""A web server that a stranger has named: from public addresses alone, over TLS, to the address that was checked."""

import contextlib
import datetime
import ipaddress
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from flockstep.optim.shards import web as web_module
from flockstep.optim.shards.web import STORE, NotThere, Web, hub_folder, steadily
from flockstep.peer.address import is_public_ip
from flockstep.peer.base.errors import UsageError
from support.web import WebStandIn, web_stand_in

NAME = "data.example.org"


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.1.2.3",
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "169.254.169.254",
            "0.0.0.0",
        ),
        *("0.1.2.3", "224.0.0.1", "255.255.255.255", "240.0.0.1", "198.18.0.1", "192.0.2.1", "::", "::1", "fe80::1"),
        *("fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "ff0e::1", "::ffff:127.0.0.1"),
        *("::ffff:10.0.0.1", "2002:7f00:1::", "2002:a00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2001:db8::1"),
        *("2001::1", "::127.0.0.1"),
    ],
)
def test_no_address_of_anybodys_own_network_is_public(address: str) -> None:
    assert not is_public_ip(address)


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101", "2002:101:101::1"],
)
def test_addresses_of_the_public_internet_are(address: str) -> None:
    assert is_public_ip(address)


@pytest.mark.parametrize(
    "found",
    [["127.0.0.1"], ["10.0.0.1"], ["::1"], ["1.1.1.1", "192.168.0.1"], ["169.254.169.254"], ["::ffff:10.0.0.1"]],
)
def test_a_name_that_leads_into_this_network_is_not_asked(monkeypatch: pytest.MonkeyPatch, found: list[str]) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolver(found))
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it was asked"))
    web = Web(f"https://{NAME}/x", public=True)
    with pytest.raises(NotThere, match=rf"{NAME} is .*, no address of the public internet"):
        web.whole("index.json", 10)
    with pytest.raises(NotThere, match=rf"{NAME} is .*, no address of the public internet"):
        web.open("00000.u16", 0, 10)


def resolver(addresses: list[str]) -> Any:
    """A name server on which every name has these addresses."""

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(None, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    return resolve


@pytest.mark.parametrize("url", [f"http://{NAME}/x", "https://127.0.0.1/x", f"https://{NAME}:444/x", "https://x/y"])
def test_what_a_run_may_not_name_is_refused_here_too(url: str) -> None:
    with pytest.raises(UsageError, match="may not be named by a run"):
        Web(url, public=True)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for localhost that signs itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    path = tmp_path / "localhost.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture
def web(tmp_path: Path, certificate: Path) -> Iterator[WebStandIn]:
    """A web server over TLS."""
    (tmp_path / "x").write_bytes(b"0123456789")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with web_stand_in(WebStandIn(tmp_path), context) as web:
        yield web


def test_the_servers_certificate_is_checked_for_its_name(
    web: WebStandIn, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        Web(web.url, public=False).whole("x", 100)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert Web(web.url, public=False).whole("x", 100) == b"0123456789"
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        Web(web.url.replace("localhost", "127.0.0.1"), public=False).whole("x", 100)


def test_a_range_is_asked_for_and_the_answer_says_where_it_begins(
    web: WebStandIn, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    asked = Web(web.url, public=False)
    for ranges, begun, data in ((True, 4, b"456"), (False, 0, b"0123456")):
        web.ranges = ranges
        at, pieces = asked.open("x", 4, 7)
        assert (at, b"".join(pieces)) == (begun, data)
    with pytest.raises(OSError, match="404"):
        asked.whole("none", 10)


def test_what_is_no_web_server_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            with server.accept()[0] as stream:
                stream.recv(1 << 12)
                stream.sendall(b"SSH-2.0-x\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="no answer of a web server: BadStatusLine"):
            Web(f"http://127.0.0.1:{port}/x", public=False).whole("x", 10)
        thread.join()


def test_addresses_are_those_that_were_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def connect(address: Any, **_: Any) -> Any:
        asked.append(address)
        raise OSError("not today")

    monkeypatch.setattr(socket, "getaddrinfo", resolver(["1.1.1.1", "2606:4700:4700::1111"]))
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(OSError, match=f"{NAME} is not reached: not today"):
        Web(f"https://{NAME}/x", public=True).whole("x", 10)
    assert asked == [(str(ipaddress.ip_address(text)), 443) for text in ("1.1.1.1", "2606:4700:4700::1111")]


@pytest.mark.parametrize(
    ("begun", "drop", "reason"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "no whole answer of a web server"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"a", "no whole answer of a web server"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n",
            b"X: y\r\n",
            "in chunks: serve it as",
        ),
    ],
)
def test_an_answer_whose_head_does_not_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, begun: bytes, drop: bytes, reason: str
) -> None:
    monkeypatch.setattr(web_module, "TIMEOUT", 0.25)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as stream, contextlib.suppress(OSError):  # It has hung up.
                stream.recv(1 << 12)
                stream.sendall(begun)
                while True:
                    stream.sendall(drop)
                    gone.wait(0.05)

        gone = threading.Event()
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match=reason):
            Web(f"http://127.0.0.1:{server.getsockname()[1]}/x", public=False).whole("x", 10)
        gone.set()
        thread.join()


@pytest.mark.parametrize(
    ("where", "leads"),
    [
        *(("https://cdn-lfs.hf.co/x", True), ("https://huggingface.co/a/b", True)),
        *(("http://hf.co/x", False), ("https://hf.co.example.org/x", False), ("https://cdn.hf.co:22/x", False)),
        *(("https://user@cdn.hf.co/x", False), ("https://10.0.0.1/x", False), ("https://[::1]/x", False)),
        ("ftp://hf.co/x", False),
        *(("file:///etc/passwd", False), ("https://xhf.co/x", False), ("//intranet.corp/x", False), ("", False)),
    ],
)
def test_a_file_of_the_hub_may_lead_to_its_store_alone(
    tmp_path: Path, where: str, leads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with web_stand_in(WebStandIn(tmp_path)) as web:
        asked, known = list[str](), socket.getaddrinfo

        def resolve(host: str, *about: Any, **more: Any) -> Any:
            if host == "127.0.0.1":
                return known(host, *about, **more)
            asked.append(host)
            raise OSError("no name server")

        web.redirect = where or "/"
        here = Web(web.url, public=False, redirects=STORE)
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        with pytest.raises(OSError, match="has no address: no name server" if leads else "where none of its files may be"):
            here.whole("x", 10)
        assert len(asked) == leads


def test_redirects_in_a_circle_end(tmp_path: Path) -> None:
    with web_stand_in(WebStandIn(tmp_path)) as web:
        web.redirect = f"{web.url}/x"
        with pytest.raises(NotThere, match="redirected more than 3 times"):
            Web(web.url, public=False, redirects=re.compile(".*")).whole("x", 10)
        assert len(web.asked) == 4


def test_a_slow_answer_is_read_as_long_as_its_average_is_enough() -> None:
    late = -1.0
    assert b"".join(steadily(iter([bytes(8000), b"a", b"bc"]), 8002, "it", late)) == bytes(8000) + b"ab"
    with pytest.raises(ConnectionError, match="it sends less than 4 kB/s"):
        list(steadily(iter([b"a"]), 8000, "it", late))


@pytest.mark.parametrize("dataset", ["a/b", "a/b@main", "a/b/c", f"a/../b@{'0' * 40}", f"a/b@{'0' * 40}/../c"])
def test_a_folder_of_the_hub_is_one_at_a_commit(dataset: str) -> None:
    with pytest.raises(UsageError, match="is no folder of the hub at a commit") as refused:
        hub_folder(dataset)
    assert refused.value.remedy
