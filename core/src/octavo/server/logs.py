"""The server's log: where it goes, what a line looks like, and which request it belongs to.

Owns the handlers of the root logger. Must never be handed a key, a header or a client's text: what is
logged is decided where it is logged.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from typing import Any

from octavo.config import ServerConfig
from octavo.errors import ConfigError

OLD_FILES = 5

request_id: ContextVar[str] = ContextVar("octavo_request_id", default="")
"""The id of the request that the current task answers, "" outside of one."""


class _WithRequest(logging.Filter):
    """Every record knows its request; one that names it already is left alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


class TextLines(logging.Formatter):
    """2026-01-31 12:00:00,000 INFO octavo.server: message [request id]"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        found = getattr(record, "request_id", "")
        return f"{line} [{found}]" if found and found not in line else line


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, message; request_id, stack and the request's facts where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if found := getattr(record, "request_id", ""):
            told["request_id"] = found
        if (facts := getattr(record, "request", None)) is not None:
            told["request"] = facts
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            told["stack"] = record.exc_text
        return json.dumps(told, ensure_ascii=False, default=str)


class LogFile(RotatingFileHandler):
    """A file of so many bytes, and five older ones. A disk that is full is said once on stderr, not with every line."""

    def __init__(self, path: str, most: int) -> None:
        super().__init__(path, maxBytes=most, backupCount=OLD_FILES, encoding="utf-8")
        self._failed = self._lost = False  # this line, and the one before it

    def emit(self, record: logging.LogRecord) -> None:
        self._failed = False
        super().emit(record)
        self._lost = self._failed

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            return super().handleError(record)
        self._failed = True
        if not self._lost:
            print(f"octavo: --log-file {self.baseFilename}: {error.strerror}; lines are lost from here on", file=sys.stderr)


def configure(config: ServerConfig) -> None:
    """Send every record of this process to stderr, and to the log file where there is one.

    Raises ConfigError where the file cannot be written.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if config.log_file is not None:
        try:
            handlers.append(LogFile(config.log_file, config.log_file_bytes))
        except OSError as error:
            raise ConfigError(f"--log-file {config.log_file}: cannot be written: {error.strerror or error}") from error
    for handler in handlers:
        handler.setFormatter(JsonLines() if config.log_format == "json" else TextLines())
        handler.addFilter(_WithRequest())
    level = config.log_level.upper()
    logging.basicConfig(level=level, handlers=handlers, force=True)
    logging.getLogger("octavo").setLevel(level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
