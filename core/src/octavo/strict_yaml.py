"""YAML as a person means it: a key that stands twice in a mapping is an error, where YAML's own readers let the last win."""

from __future__ import annotations

from typing import IO, Any

import yaml


class SetTwice(yaml.constructor.ConstructorError):
    """A key stands twice in one mapping; the mark is at the second."""


def load(text: str | IO[str]) -> Any:
    """What a document of plain values holds. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_UniqueKeys)


class _UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise SetTwice(None, None, f"{key.value!r} is set twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)
