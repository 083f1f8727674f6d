"""The request fields that constrain the form of the text, and the `StructuredOutput` that they make.

Decides which of the field names that clients know mean the same, and that only one of them may be given. The engine
decides whether a schema or a grammar can be enforced.
"""

import json
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from inflight.contracts.structured_output import StructuredOutput
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import Many, StrictModel

_EXACT = ConfigDict(extra="forbid", strict=True)
Choice = Annotated[Many[str], Field(min_length=1)]


# Dicts instead of models, because models have methods `schema` and `json`.
@with_config(_EXACT)
class JsonSchema(TypedDict):
    """A JSON schema as OpenAI wraps it. It is always enforced, whatever `strict` is."""

    schema: dict[str, Any]
    name: NotRequired[str | None]
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


@with_config(_EXACT)
class StructuredOutputs(TypedDict, total=False):
    """vLLM's `structured_outputs`; `exact_schema` is ours (see `StructuredOutput`)."""

    json: str | dict[str, Any] | None
    json_object: bool | None
    regex: str | None
    choice: Choice | None
    grammar: str | None
    exact_schema: bool | None


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class OutputFormatFields(StrictModel):
    """The form that the whole text must have.

    Attributes:
        response_format: OpenAI's field.
        structured_outputs: vLLM's field.
        guided_json, guided_regex, guided_choice, guided_grammar: the fields of older versions of vLLM.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The value for `SamplingParams`. Raises `ApiError` if several fields are given or one is invalid."""
        given = {name: options for name, options in self._options().items() if options is not None}
        if not given:
            return None
        if len(given) > 1:
            names = " and ".join(given)
            message = f"{names} are given; a text can follow only one of them"
            raise ApiError(400, message, param=list(given)[1].partition(".")[0])
        ((name, options),) = given.items()
        try:
            return StructuredOutput(**options)
        except ValueError as error:
            raise ApiError(400, f"{name}: {error}", param=name.partition(".")[0]) from error

    def _options(self) -> dict[str, dict[str, Any] | None]:
        """Return what each field asks for, as arguments of `StructuredOutput`."""
        options = {
            "response_format": _of_response_format(self.response_format),
            "guided_json": _of("json", self.guided_json),
            "guided_regex": _of("regex", self.guided_regex),
            "guided_choice": _of("choice", self.guided_choice),
            "guided_grammar": _of("grammar", self.guided_grammar),
        }
        given = dict(self.structured_outputs or {})
        is_exact = {"exact_schema": True} if given.pop("exact_schema", None) else {}
        for kind, value in given.items():
            made = _of(kind, value)
            options[f"structured_outputs.{kind}"] = None if made is None else made | is_exact
        return options


def _of(kind: str, value: Any) -> dict[str, Any] | None:
    if value is None or value is False:
        return None
    if kind == "json":
        return {"json_schema": value if isinstance(value, str) else _text(value)}
    return {kind: value}


def _text(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except RecursionError as error:  # what could be parsed cannot always be written again
        raise ApiError(400, "the JSON schema is nested too deeply") from error


def _of_response_format(given: ResponseFormat | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if (given.type == "json_schema") != (given.json_schema is not None):
        missing = "has no json_schema" if given.json_schema is None else "has a json_schema, too"
        message = f"response_format is of type {given.type!r} and {missing}"
        raise ApiError(400, message, param="response_format")
    if given.json_schema is not None:
        return _of("json", given.json_schema["schema"])
    return {"json_object": True} if given.type == "json_object" else None
