"""Asking the shared server: bodies that give the same answer every time, and what an answer or a stream holds."""

from __future__ import annotations

from typing import Any

import httpx

from tests.server.harness import events

GREEDY = {"temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hello world"}], **GREEDY, "max_tokens": 12}
TEXT = {"prompt": "hello world", **GREEDY, "max_tokens": 12}


def ask(client: httpx.Client, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response.iter_lines()))


def alike(one: Any, two: Any) -> bool:
    """Equal, numbers to 1e-4: the last bits of a sum depend on what shares the batch, tokens do not."""
    if isinstance(one, float) and isinstance(two, float):
        return abs(one - two) < 1e-4
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(alike(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(alike, one, two))
    return bool(one == two)


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and "Traceback" not in response.text
    error: dict[str, Any] = body["error"]
    return error
