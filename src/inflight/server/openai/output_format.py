"""The fields of a request that say what the text must look like, and the `StructuredOutput` that they make.

Decides which of the names that clients know mean the same, and that only one of them may be given. Whether a schema or
a grammar can be enforced is the engine's to say.
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


# Dicts, and not models: `schema` and `json` are methods of those.
@with_config(_EXACT)
class JsonSchema(TypedDict):
    """A JSON schema as OpenAI wraps it. It is always enforced, whatever `strict` is."""

    schema: dict[str, Any]
    name: NotRequired[str | None]
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


@with_config(_EXACT)
class StructuredOutputs(TypedDict, total=False):
    """What vLLM calls `structured_outputs`."""

    json: str | dict[str, Any] | None
    json_object: bool | None
    regex: str | None
    choice: Choice | None
    grammar: str | None


class ResponseFormat(StrictModel):
    """OpenAI's: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class OutputFormatFields(StrictModel):
    """What the whole text has to be.

    Attributes:
        response_format: as OpenAI has it.
        structured_outputs: as vLLM has it.
        guided_json, guided_regex, guided_choice, guided_grammar: the same, as older versions of vLLM have it.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None

    @property
    def structured_output(self) -> StructuredOutput | None:
        """As `SamplingParams` has it. Raises `ApiError` if there is more than one, or one that is none."""
        asked = {name: wish for name, wish in self._wishes().items() if wish is not None}
        if not asked:
            return None
        if len(asked) > 1:
            names = " and ".join(asked)
            message = f"{names} are given; a text can be asked to follow one of them only"
            raise ApiError(400, message, param=list(asked)[1].partition(".")[0])
        ((name, wish),) = asked.items()
        try:
            return StructuredOutput(**wish)
        except ValueError as error:
            raise ApiError(400, f"{name}: {error}", param=name.partition(".")[0]) from error

    def _wishes(self) -> dict[str, dict[str, Any] | None]:
        """What each field asks for, in the words of `StructuredOutput`."""
        given = {
            "response_format": _of_response_format(self.response_format),
            "guided_json": _of("json", self.guided_json),
            "guided_regex": _of("regex", self.guided_regex),
            "guided_choice": _of("choice", self.guided_choice),
            "guided_grammar": _of("grammar", self.guided_grammar),
        }
        for kind, value in (self.structured_outputs or {}).items():
            given[f"structured_outputs.{kind}"] = _of(kind, value)
        return given


def _of(kind: str, value: Any) -> dict[str, Any] | None:
    if value is None or value is False:
        return None
    if kind == "json":
        return {"json_schema": value if isinstance(value, str) else _text(value)}
    return {kind: value}


def _text(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except RecursionError as error:  # what could just be read cannot always be written
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
