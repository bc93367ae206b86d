"""What crosses between a client's process and an engine's process: msgpack frames over one socket.

A message is two frames: a kind (one byte) and a msgspec struct. To the engine: ADD Request, ABORT,
CLOSE, RESET, PREFIX, RESIZE, PING. From it: PROGRESS, READY, EVENTS (one a step, every request's news together), REFUSED,
PREFIX_STATE (the answer to one PREFIX), RESIZED (to one RESIZE), PONG (to one PING), DEAD.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.request import Events, ModelInfo, Request

CONFIG, ADD, ABORT, RESET, PREFIX, RESIZE, PING, CLOSE = b"C", b"A", b"B", b"X", b"K", b"Z", b"I", b"Q"
PROGRESS, READY, EVENTS, REFUSED, PREFIX_STATE, RESIZED, PONG, DEAD = b"P", b"R", b"E", b"F", b"k", b"z", b"i", b"D"


class Abort(msgspec.Struct, array_like=True):
    request_id: str
    sample: int | None = None


class Reset(msgspec.Struct, array_like=True):
    """Forget every prefix; pins too, or those are computed again."""

    pins: bool = False


class Progress(msgspec.Struct, array_like=True):
    """A stage of the start, with done and total where they are known (total 0: unknown)."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct):
    """The engine serves. explain and inventory are what /admin/plugins shows."""

    info: ModelInfo
    explain: dict[str, Any]
    inventory: list[dict[str, Any]]
    seconds: float


class Refused(msgspec.Struct, array_like=True):
    request_id: str
    message: str
    code: str
    retry_after: float | None = None


class PrefixOrder(msgspec.Struct, array_like=True):
    """A question about the prefix cache. action: "state", "pin" or "unpin"; tokens of the prefix for the last two."""

    id: int
    action: str
    tokens: list[int] = []


class PrefixState(msgspec.Struct, array_like=True):
    """The answer to the order of that id: engine.prefixes.Warmed or PrefixCache.state, as plain values."""

    id: int
    answer: dict[str, Any]


class Resize(msgspec.Struct, array_like=True):
    """An order to change the size of the KV cache; see engine.memory.PoolGovernor.resize."""

    id: int
    blocks: int | None
    rest: bool


class Resized(msgspec.Struct, array_like=True):
    """The answer to the order of that id: the blocks that there are now, or why the size is fixed."""

    id: int
    blocks: int
    error: str | None = None


class Dead(msgspec.Struct, array_like=True):
    """The last message of an engine that cannot go on. error: the class, in octavo.errors, of what is the user's to mend; "" for a
    crash."""

    reason: str
    error: str = ""


_DECODERS: dict[bytes, Any] = {
    ADD: msgspec.msgpack.Decoder(Request),
    ABORT: msgspec.msgpack.Decoder(Abort),
    RESET: msgspec.msgpack.Decoder(Reset),
    PROGRESS: msgspec.msgpack.Decoder(Progress),
    READY: msgspec.msgpack.Decoder(Ready),
    EVENTS: msgspec.msgpack.Decoder(Events),
    REFUSED: msgspec.msgpack.Decoder(Refused),
    PREFIX: msgspec.msgpack.Decoder(PrefixOrder),
    PREFIX_STATE: msgspec.msgpack.Decoder(PrefixState),
    RESIZE: msgspec.msgpack.Decoder(Resize),
    RESIZED: msgspec.msgpack.Decoder(Resized),
    DEAD: msgspec.msgpack.Decoder(Dead),
}
_ENCODER = msgspec.msgpack.Encoder()


def pack(kind: bytes, body: Any = None) -> list[bytes]:
    """The two frames of a message."""
    return [kind, _ENCODER.encode(body)]


def unpack(frames: list[bytes]) -> tuple[bytes, Any]:
    """kind and decoded body (None for kinds that carry nothing)."""
    kind, body = frames
    decoder = _DECODERS.get(kind)
    return kind, decoder.decode(body) if decoder else None
