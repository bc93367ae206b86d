"""Which format of calls of tools a model gets. The plan asks, to say so, and the server's process, which uses it."""

from __future__ import annotations

from octavo.catalog import Catalog, Device, Needs
from octavo.config import EngineConfig
from octavo.decision import Decision
from octavo.model.source import ModelSource
from octavo.text.tokenizer import tool_template


def choose_tool_parser(config: EngineConfig, catalog: Catalog, source: ModelSource) -> Decision:
    """The named one, or the first whose marks the chat template has. Raises PluginError, LoadError, ConfigError."""
    asked = config.tool_call_parser
    template = tool_template(source, config) if asked == "auto" else None
    return catalog.resolve("tool_parser", Needs("tool_parser", Device(), facts={"template": template}), asked)
