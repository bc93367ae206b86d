"""What clients may ask the form of an answer to be: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`.

Owns these fields, and that a request has one form at most. Whether a schema or a pattern means anything is said by the grammar
provider, in the engine.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from octavo.grammar import Grammar, GrammarError
from octavo.server.errors import ApiError
from octavo.server.wire import Wire

Schema = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}], "description": "A JSON schema."})]
Json = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}], "description": "A JSON schema, or its text."})
]
_SERVER_S = "the server's own: --grammar-backend"
_SPACES = "spaces between the parts of JSON are the model's choice"


class JsonSchema(Wire):
    """strict: schemas are enforced either way."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self, where: str) -> Grammar | None:
        """Raises ApiError."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            what = "is needed where" if self.json_schema is None else "is for"
            param = f"{where}.json_schema"
            raise ApiError(400, f"{param}: {what} type is 'json_schema'", param=param, code="invalid_value")
        if self.json_schema is not None:
            return json_grammar(self.json_schema.schema_, f"{where}.json_schema.schema")
        return Grammar.json_object() if self.type == "json_object" else None


class StructuredOutputs(Wire):
    """vLLM's: one of these."""

    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "structural_tag": ((), "tools are what calls functions in the middle of text"),
        "whitespace_pattern": ((), _SPACES),
        "disable_any_whitespace": ((False,), _SPACES),
        "disable_additional_properties": ((False,), "say additionalProperties in the schema"),
        "disable_fallback": ((True, False), "nothing falls back"),
    }

    json_: Json = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Formed(Wire):
    """The fields of a body that say of what form an answer must be."""

    guided: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "guided_decoding_backend": ((), _SERVER_S),
        "guided_whitespace_pattern": ((), _SPACES),
    }

    structured_outputs: StructuredOutputs | None = None
    guided_json: Json = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def form(self) -> tuple[str, Grammar] | None:
        """The field that asks for a form, and the form. Raises ApiError where two do, or none of its kind can be right."""
        found = self.forms()
        if len(found) > 1:
            both = " and ".join(name for name, _ in found[:2])
            raise ApiError(400, f"{both} cannot both be honoured; send one", param=found[1][0], code="invalid_value")
        return found[0] if found else None

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must be. Raises ApiError."""
        form = self.form()
        return form[1] if form else None

    def forms(self) -> list[tuple[str, Grammar]]:
        given = {f"guided_{kind}": (kind, getattr(self, f"guided_{kind}")) for kind in ("json", "regex", "choice", "grammar")}
        one = self.structured_outputs
        if one is not None:
            values = {"json": one.json_, "regex": one.regex, "choice": one.choice, "grammar": one.grammar}
            given |= {f"structured_outputs.{kind}": (kind, value) for kind, value in values.items()}
            given["structured_outputs.json_object"] = "json_object", one.json_object or None
        found = [(name, _grammar(name, kind, value)) for name, (kind, value) in given.items() if value is not None]
        if one is not None and not any(name.startswith("structured_outputs") for name, _ in found):
            kinds = "json, regex, choice, grammar or json_object"
            raise ApiError(400, f"structured_outputs: one of {kinds} is needed", param="structured_outputs", code="invalid_value")
        return found


def json_grammar(schema: Any, where: str) -> Grammar:
    """A schema as an object, or its text. Raises ApiError."""
    return _grammar(where, "json", schema)


def _grammar(where: str, kind: str, value: Any) -> Grammar:
    try:
        if kind == "json_object":
            return Grammar.json_object()
        if kind == "regex":
            return Grammar.regex(value)
        if kind == "choice":
            return Grammar.choice(value)
        if kind == "grammar":
            return Grammar.lark(value)
        if isinstance(value, str):
            value = json.loads(value)
        if not isinstance(value, (dict, bool)):
            raise ValueError(f"must be a JSON schema, which is an object, got {json.dumps(value):.60}")
        return Grammar.json(value)
    except (ValueError, GrammarError, RecursionError) as error:
        message = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"{where}: {message}", param=where, code="invalid_value") from None
