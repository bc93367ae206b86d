"""TLS and client certificates, with throw-away authorities."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server import tls
from octavo.server.app import create_app
from octavo.server.serve import _uvicorn_config

from tests.server.conftest import FLAGS
from tests.server.harness import API_KEYS, NAME, Server, until


@dataclass(frozen=True)
class Files:
    """A server's certificate, its key, and the authority that clients' certificates must come from."""

    authority: trustme.CA
    certificate: Path
    key: Path
    clients: Path

    @classmethod
    def write(cls, folder: Path) -> Files:
        authority = trustme.CA()
        files = cls(authority, folder / "server.pem", folder / "server.key", folder / "clients.pem")
        files.renew()
        authority.cert_pem.write_to_path(files.clients)
        return files

    def renew(self) -> int:
        """Another certificate of the same authority; returns its serial number."""
        issued = self.authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(self.key)
        self.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return x509.load_pem_x509_certificate(issued.cert_chain_pems[0].bytes()).serial_number


def client_context(files: Files, signer: trustme.CA | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    files.authority.configure_trust(context)
    if signer is not None:
        signer.issue_cert("client@example.org").configure_cert(context)
    return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files.write(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(long_tiny: Path, files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that speaks TLS and asks clients for a certificate and a key."""
    flags = ("--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key), "--ssl-ca-certs", str(files.clients))
    running = Server(long_tiny, tmp_path_factory.mktemp("secure") / "log", *FLAGS, *flags, "--api-key", API_KEYS[0])
    try:
        until(lambda: "ready: " in running.text or running.process.poll() is not None, 60, "the engine is ready")
        assert running.process.poll() is None, running.text
        yield running
    finally:
        running.stop()


def client(server: Server, context: ssl.SSLContext, key: str = API_KEYS[0]) -> httpx.Client:
    return httpx.Client(base_url=server.url, verify=context, headers={"Authorization": f"Bearer {key}"}, timeout=30)


def test_a_client_with_a_certificate_of_the_authority_is_served(secure: Server, files: Files) -> None:
    assert secure.url.startswith("https://")
    with (
        client(secure, client_context(files, files.authority)) as http,
        openai.OpenAI(base_url=secure.url + "/v1", api_key=API_KEYS[0], http_client=http, max_retries=0) as api,
    ):
        chunks = list(api.completions.create(model=NAME, prompt="hello", max_tokens=5, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("signer", [None, trustme.CA()], ids=["none", "of another authority"])
def test_a_client_without_one_or_with_another_authoritys_gets_no_answer(
    secure: Server, files: Files, signer: trustme.CA | None
) -> None:
    with client(secure, client_context(files, signer)) as http, pytest.raises(httpx.TransportError):
        http.get("/health")


def test_a_certificate_is_no_key(secure: Server, files: Files) -> None:
    with client(secure, client_context(files, files.authority), "wrong") as http:
        assert http.get("/v1/models").status_code == 401


def test_a_client_that_does_not_know_the_authority_refuses_the_server(secure: Server) -> None:
    with httpx.Client() as http, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        http.get(secure.url + "/health")


def test_plain_http_is_not_answered(secure: Server) -> None:
    with socket.create_connection(secure.address, timeout=5) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert not sock.recv(100).startswith(b"HTTP")


def test_sighup_takes_a_renewed_certificate_and_keeps_the_old_one_if_the_new_is_broken(secure: Server, files: Files) -> None:
    context = client_context(files, files.authority)

    def shown() -> int:
        with (
            socket.create_connection(secure.address, timeout=5) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as sock,
        ):
            return x509.load_der_x509_certificate(sock.getpeercert(binary_form=True) or b"").serial_number

    old = shown()
    with client(secure, context) as http:
        assert http.get("/health").status_code == 200
        new = files.renew()
        secure.signal(signal.SIGHUP)
        until(lambda: "certificate read again" in secure.text, 3, "the certificate is read again")
        assert shown() == new != old
        assert http.get("/health").status_code == 200, "a connection that was open stays open"
    other = trustme.CA().issue_cert("127.0.0.1")
    other.private_key_pem.write_to_path(files.key)  # a key that belongs to another certificate
    secure.signal(signal.SIGHUP)
    until(lambda: "certificate stays as it was" in secure.text, 3, "a mismatch is refused")
    assert shown() == new


# ------------------------------------------------------------------ what stops the start


def start(**settings: str) -> None:
    config = ServerConfig(**settings)  # type: ignore[arg-type]
    _uvicorn_config(create_app(None, config, ["tiny"]), config)


def test_unusable_files_stop_the_start_with_the_flags_named(tmp_path: Path) -> None:
    files = Files.write(tmp_path)
    (tmp_path / "other").mkdir()
    other = Files.write(tmp_path / "other")
    good = {"ssl_certfile": str(files.certificate), "ssl_keyfile": str(files.key)}
    start(**good)
    none, locked = tmp_path / "none", tmp_path / "locked"
    lock = serialization.BestAvailableEncryption(b"password")
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    locked.write_bytes(key.private_bytes(pem, form, lock))
    for bad, says in (
        ({**good, "ssl_keyfile": str(other.key)}, f"--ssl-keyfile {other.key}: not a certificate and its key"),
        ({"ssl_certfile": str(files.certificate)}, "; --ssl-keyfile names the key"),
        ({**good, "ssl_certfile": str(none)}, f"--ssl-certfile {none}: cannot be read: No such file"),
        ({**good, "ssl_keyfile": str(none)}, f"--ssl-keyfile {none}: cannot be read: No such file"),
        ({**good, "ssl_keyfile": str(locked)}, "locked with a password"),
        ({**good, "ssl_ca_certs": str(none)}, f"--ssl-ca-certs {none}: cannot be read: No such file"),
        ({**good, "ssl_ca_certs": str(files.key)}, f"--ssl-ca-certs {files.key}: holds no certificates"),
        ({"ssl_keyfile": str(files.key)}, "without --ssl-certfile"),
        ({"ssl_ca_certs": str(files.clients)}, "without --ssl-certfile"),
    ):
        with pytest.raises(ConfigError) as caught:
            start(**bad)
        assert says in str(caught.value)


def test_a_renewal_that_fails_leaves_the_context_usable(tmp_path: Path) -> None:
    files = Files.write(tmp_path)
    config = ServerConfig(ssl_certfile=str(files.certificate), ssl_keyfile=str(files.key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.renew(context, config)
    good = files.key.read_bytes()
    files.key.write_bytes(b"no key")
    with pytest.raises(ConfigError, match="--ssl-keyfile"):
        tls.renew(context, config)
    files.key.write_bytes(good)
    tls.renew(context, config)
