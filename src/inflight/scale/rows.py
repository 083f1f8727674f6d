"""`RowEngine`: answers rows of a dataset: validation, result columns, and retries after a crash."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from inflight.contracts.api.errors import EngineDeadError, EngineGivenUpError, InvalidRequestError
from inflight.contracts.api.outputs import RequestOutput
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.api.structured_output import StructuredOutput
from inflight.entrypoints.async_llm import AsyncLLM
from inflight.entrypoints.inputs import Prompt
from inflight.scale.settings import options_in_actor

PROMPT_COLUMNS = {
    "messages": "a chat",
    "prompt_token_ids": "token ids",
    "prompt": "text",
}
"""Prompt columns with descriptions; the first with a value counts."""

OTHER_COLUMNS = {"sampling_params": "fields of SamplingParams, as a dict or as JSON, instead of those for all rows"}

ERROR_COLUMN = "__inference_error__"
"""The error column of Ray's processors; empty for answered rows."""

MOST_DEATHS = 5
"""A row fails after this many crashes of its engine."""


class RowEngine:
    """An engine in an actor of Ray.

    Args:
        model: a hub id, or a folder that every node has; None is the small embedded model.
        tokenizer: as of `AsyncLLM`.
        sampling_params: fields of `SamplingParams` for rows without any.
        engine: the fields of `EngineConfig`.
        keeps_errors: whether an invalid row gets an error as its answer.
    """

    def __init__(
        self,
        model: str | None = None,
        tokenizer: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        *,
        keeps_errors: bool = False,
    ) -> None:
        self._keeps_errors = keeps_errors
        self._params = None if sampling_params is None else params_of(sampling_params)
        self._llm = AsyncLLM(model, tokenizer, starts_at_once=True, **options_in_actor(engine or {}))

    async def answers(self, rows: Sequence[Mapping[str, Any]]) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
        """Answer rows concurrently. Yields each row's number and new columns, as they finish.

        Raises:
            InvalidRequestError: a row is invalid, unless it gets an `ERROR_COLUMN`.
            ModelError, EngineDeadError: there is no engine.
        """

        async def numbered(number: int, row: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
            try:
                output = await self._answer(row)
            except InvalidRequestError as error:
                if not self._keeps_errors:
                    raise
                return number, NO_ANSWER | {ERROR_COLUMN: str(error)}
            return number, columns_of(output) | ({ERROR_COLUMN: output.error or ""} if self._keeps_errors else {})

        tasks = [asyncio.create_task(numbered(number, row)) for number, row in enumerate(rows)]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, row: Mapping[str, Any]) -> RequestOutput:
        prompt, params = request_of(row)
        for _ in range(MOST_DEATHS):
            try:
                async with aclosing(self._llm.stream(prompt, params or self._params)) as deltas:
                    async for delta in deltas:
                        if delta.output is not None:
                            return delta.output
            except EngineGivenUpError:
                raise
            except EngineDeadError:
                continue
        raise EngineDeadError(f"the engine died {MOST_DEATHS} times while this row ran: {str(dict(row))[:200]}")


def request_of(row: Mapping[str, Any]) -> tuple[Prompt, SamplingParams | None]:
    """A row's prompt and parameters; None: those of all rows. Raises `InvalidRequestError`."""
    name = next((each for each in PROMPT_COLUMNS if row.get(each) is not None), None)
    if name is None:
        raise InvalidRequestError(f"a row has none of the columns {', '.join(PROMPT_COLUMNS)}, but {', '.join(row)}")
    value, params = plain(row[name]), row.get("sampling_params")
    prompt = {name: [message_of(each) for each in value]} if name == "messages" else value
    return prompt, None if params is None else params_of(plain(params))


def message_of(fields: Any) -> Any:
    """A message without null fields that come from other rows' schema."""
    if not isinstance(fields, Mapping):
        return fields
    return {name: value for name, value in fields.items() if value is not None or name == "content"}


def params_of(fields: Mapping[str, Any] | str) -> SamplingParams:
    """Parameters from a dict or from JSON, without null fields, since a dataset's rows share a schema. Raises
    `InvalidRequestError`."""
    if isinstance(fields, str):
        try:
            fields = msgspec.json.decode(fields, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise InvalidRequestError(f"sampling_params: {error}") from error
    given = {name: value for name, value in fields.items() if value is not None}
    if given.get("n", 1) != 1:
        raise InvalidRequestError(f"n is {given['n']}; a row has one answer")
    try:
        if isinstance(shape := given.get("structured_output"), Mapping):
            shape = {name: value for name, value in shape.items() if value is not None}
            given["structured_output"] = StructuredOutput(**shape)
        return SamplingParams(**given)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"sampling_params: {error}") from error


def columns_of(output: RequestOutput) -> dict[str, Any]:
    """The result columns, under the names of Ray's own processors."""
    answer = output.outputs[0]
    return {
        "generated_text": answer.text,
        "generated_tokens": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "num_input_tokens": len(output.prompt_token_ids),
        "num_generated_tokens": len(answer.token_ids),
    }


NO_ANSWER: dict[str, Any] = {
    "generated_text": "",
    "generated_tokens": [],
    "finish_reason": "error",
    "num_input_tokens": 0,
    "num_generated_tokens": 0,
}


def plain(value: Any) -> Any:
    """A value of a row without NumPy, in which Ray Data hands over lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
