"""TLS: the certificate that the server shows, and those that it asks its clients for.

Owns the options of uvicorn's TLS context and the replacing of a certificate while the server runs.
"""

from __future__ import annotations

import ssl
from typing import Any

from octavo.config import ServerConfig
from octavo.errors import ConfigError

FLAGS = "--ssl-certfile, --ssl-keyfile, --ssl-ca-certs"


def options(config: ServerConfig) -> dict[str, Any]:
    """uvicorn's options for this configuration. With a CA file, a client without a certificate that it
    has signed gets no further than the handshake. Raises ConfigError."""
    if config.ssl_certfile is None and (config.ssl_keyfile or config.ssl_ca_certs):
        raise ConfigError(f"{FLAGS}: without --ssl-certfile the server speaks plain HTTP; name a certificate or drop the others")
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
    try:
        # Into a context of its own first: a half-read pair would leave the live one unusable.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as exc:  # ssl.SSLError is one
        raise ConfigError(f"{FLAGS}: {exc}") from exc
