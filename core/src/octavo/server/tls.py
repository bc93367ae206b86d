"""TLS: the certificate that the server shows, and those that it asks its clients for.

Owns the options of uvicorn's TLS context and the replacing of a certificate while the server runs.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, NoReturn

from octavo.config import ServerConfig
from octavo.errors import ConfigError


def options(config: ServerConfig) -> dict[str, Any]:
    """uvicorn's options for this configuration. With a CA file, a client without a certificate that it
    has signed gets no further than the handshake. Raises ConfigError for a file that cannot be used."""
    if config.ssl_certfile is None and (config.ssl_keyfile or config.ssl_ca_certs):
        flag = "--ssl-keyfile" if config.ssl_keyfile else "--ssl-ca-certs"
        raise ConfigError(f"{flag}: without --ssl-certfile the server speaks plain HTTP; name a certificate or drop the flag")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if config.ssl_certfile is not None:
        _load(context, config.ssl_certfile, config.ssl_keyfile)
    if config.ssl_ca_certs is not None:
        _readable("--ssl-ca-certs", config.ssl_ca_certs)
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as exc:  # ssl.SSLError is one
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs}: holds no certificates in PEM form: {exc}") from exc
    return {
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_certfile": config.ssl_certfile,
        "ssl_ca_certs": config.ssl_ca_certs,
        "ssl_cert_reqs": ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
    }


def renew(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Read the certificate and its key again; connections from now on get the new one. Raises ConfigError and
    leaves the old one in force if the files cannot be used."""
    assert config.ssl_certfile is not None
    # Into a context of its own first: a half-read pair would leave the live one unusable.
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config.ssl_certfile, config.ssl_keyfile)
    _load(context, config.ssl_certfile, config.ssl_keyfile)


def _load(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    _readable("--ssl-certfile", certificate)
    if key is not None:
        _readable("--ssl-keyfile", key)
    files = f"--ssl-certfile {certificate}" + (f", --ssl-keyfile {key}" if key else "")

    def locked() -> NoReturn:  # without an answer of ours the library would ask the terminal, and wait
        raise ConfigError(f"{files}: the key is locked with a password; give one without")

    try:
        context.load_cert_chain(certificate, key, locked)
    except OSError as exc:  # ssl.SSLError is one
        where = "" if key else "; --ssl-keyfile names the key where it has a file of its own"
        raise ConfigError(f"{files}: not a certificate and its key in PEM form: {exc}{where}") from exc


def _readable(flag: str, file: str) -> None:
    """The library's own errors do not say which file it was."""
    try:
        with Path(file).open("rb"):
            pass
    except OSError as exc:
        raise ConfigError(f"{flag} {file}: cannot be read: {exc.strerror}") from exc
