"""The engine process's log, carried to its parent over the child's stderr, so that one process writes the log.

Owns the line format: a record is a separator and one JSON object; anything else is what a library or
the interpreter printed, and is logged line by line as it came. Must never lose a line, nor raise.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys

MARK = "\x1e"
"""ASCII's record separator: no text that a library prints begins with it."""

LIMIT = 1 << 20
"""Bytes of one line that the parent takes; longer ones arrive in pieces."""

printed = logging.getLogger("octavo.engine.output")


class _Record(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told = {"name": record.name, "level": record.levelno, "message": record.getMessage(), "created": record.created}
        if record.exc_info:
            told["stack"] = self.formatException(record.exc_info)
        return MARK + json.dumps(told)


def send_records(level: str) -> None:
    """In the child: every record of this process goes to stderr in the format that `relay` reads."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Record())
    logging.basicConfig(level=level.upper(), handlers=[handler])


async def relay(stream: asyncio.StreamReader) -> None:
    """In the parent: log what comes on the child's stderr until it closes."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than LIMIT: take what there is
            line = await stream.read(LIMIT)
        if not line:
            return
        take(line.decode("utf-8", "replace").rstrip("\n"))


def take(line: str) -> None:
    """Log one line of a child."""
    if line.startswith(MARK):
        try:
            told = json.loads(line.removeprefix(MARK))
            logger = logging.getLogger(told["name"])
            if logger.isEnabledFor(told["level"]):
                record = logger.makeRecord(told["name"], told["level"], "(engine)", 0, told["message"], (), None)
                record.created = told["created"]
                record.exc_text = told.get("stack")  # formatters print it as they would the exception's
                logger.handle(record)
            return
        except (ValueError, KeyError, TypeError):
            pass  # cut off in the middle by the child's death: shown as it is
    if line.strip():
        printed.warning("%s", line.removeprefix(MARK))
