"""Which format of calls a chat template speaks: what `--tool-call-parser auto` goes by.

A template shows the model how to write a call, so it holds the marks of its format. Reads text; renders nothing. Must never import
what makes a format.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.catalog import Accept, Needs, Reject

BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
"""DeepSeek's control token before its calls."""


@dataclass(frozen=True, slots=True)
class Marks:
    """A template of this format has all of `has` and none of `lacks`; both are patterns."""

    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    def missing(self, template: str) -> str:
        """What is against it, "" if nothing is."""
        for mark in self.has:
            if not re.search(mark, template):
                return f"the chat template has no {mark.replace(chr(92), '')}"
        for mark in self.lacks:
            if re.search(mark, template):
                return f"the chat template has {mark.replace(chr(92), '')}"
        return ""


# A quote within a text of a template may have a backslash.
MARKS = {
    "hermes": Marks(("<tool_call>", r'arguments\\*["\']'), lacks=("<function=", "<arg_key>")),
    "llama3_json": Marks(("ipython", r'parameters\\*["\']')),
    "deepseek_v3": Marks((BEGIN, "```json")),
    "deepseek_v31": Marks((BEGIN,), lacks=("```json",)),
}
"""`hermes` shares its tag with formats of XML (Qwen3-Coder, GLM), whose marks it lacks."""


def accepts_template(name: str) -> Callable[[Needs, Any], Accept | Reject]:
    """`accepts` of the format of this name. Whoever names a format gets it, whatever the template says."""

    def accepts(needs: Needs, options: Any) -> Accept | Reject:
        template = needs.facts.get("template")
        if template is None:
            return Accept()
        against = MARKS[name].missing(template)
        return Reject(against) if against else Accept(reason="the chat template writes calls so")

    return accepts
