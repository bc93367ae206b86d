"""Every error that Octavo raises on purpose.

An error names what was wrong, where, the values seen, and what to do about it. The HTTP server
turns these classes into status codes in one place (`octavo.server.errors`); nothing else in the
tree knows about status codes.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Root of all errors raised by Octavo itself."""


class ConfigError(OctavoError):
    """A flag, environment variable, config file or plugin option is wrong. Start-up stops."""


class PluginError(OctavoError):
    """A plugin could not be imported, breaks the contract, or was named and rejects the needs."""


class LoadError(OctavoError):
    """A checkpoint is missing, malformed or does not fit the architecture. Raised before any
    device memory is taken."""


class QuantizeError(OctavoError):
    """A model cannot be quantised as asked: a shape, a weight or a text that does not allow it."""


class RequestError(OctavoError):
    """A request that can never be right: the client's fault (HTTP 400).

    `param` is the field of the request that is wrong; `code` is a stable identifier such as
    ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code


class UnknownModel(OctavoError):
    """A model's name that this process does not have (HTTP 404)."""


class AdmissionRefused(OctavoError):
    """A well-formed request that this engine will not take.

    `code` is one of ``queue_full`` (try again: HTTP 429 with Retry-After), ``too_large`` (the KV
    pool can never hold it: HTTP 400), ``no_capacity`` (hard block limit: HTTP 429), ``draining``,
    ``loading`` or ``restarting`` (HTTP 503), ``invalid_grammar`` (HTTP 400) or ``grammar_failed`` (HTTP 500). `retry_after` is in seconds, None where trying again cannot help.
    """

    def __init__(self, message: str, *, code: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message, self.code, self.retry_after = message, code, retry_after


class Aborted(OctavoError):
    """The request was ended before it was complete, by whoever runs the engine and not by its consumer."""


class EngineDead(OctavoError):
    """The engine's process or loop has ended; no request can finish (HTTP 503, or an error event
    on a stream that has begun)."""
