"""`Dialect`: the request fields that a server accepts, found by probing; writes request bodies accordingly.

Servers differ in three things: prompts as token ids, continuing past EOS (`ignore_eos`), and token counts
(`stream_options`). Some servers refuse unknown fields; others ignore them, which the report shows as fewer tokens than
requested.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, TypeAlias

import msgspec

from inflight.loadtest.openai_client import Chunk, OpenAIClient, ServerError
from inflight.loadtest.workloads import Prompt, Sketch, write_prompts

Endpoint: TypeAlias = Literal["completions", "chat"]
PATHS: Mapping[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

VOCAB_SIZES = (20_000, 1_500)
"""The probe tries token ids below the first of these, then below the second; few vocabularies are smaller."""

FINAL_STATUSES = (401, 403, 404, 429, 503)
"""Statuses independent of the request body."""


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint under test, and common fields of all requests.

    Attributes:
        model: the model's name on the server.
        extra: further fields of every request.
    """

    endpoint: Endpoint
    model: str
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]


@dataclass(frozen=True, slots=True)
class Dialect:
    """A server's accepted fields.

    Attributes:
        vocab_size: token ids below this; None: text only.
        takes_ignore_eos: whether answers can be forced to the requested length.
        takes_stream_options: whether the server can be asked to count tokens.
    """

    vocab_size: int | None = None
    takes_ignore_eos: bool = True
    takes_stream_options: bool = True

    def body(self, target: Target, prompt: Prompt, num_output_tokens: int) -> bytes:
        """Return a request as JSON. Raises `ValueError` if the endpoint does not take this kind of prompt."""
        content: dict[str, Any] = {"model": target.model, "stream": True, "temperature": target.temperature}
        content |= {"max_tokens": num_output_tokens, **_prompt_field(target.endpoint, prompt)}
        if self.takes_ignore_eos:
            content["ignore_eos"] = True
        if self.takes_stream_options:
            content["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(content | dict(target.extra))


async def find_dialect(
    client: OpenAIClient, target: Target, vocab_sizes: Sequence[int | None], timeout: float
) -> Dialect:
    """Request one token in different dialects, the richest first, until the server accepts one.

    Args:
        vocab_sizes: limits of token ids to try, in this order; None: text.
        timeout: seconds to wait for an answer.

    Raises:
        ServerError: the server cannot be reached, or accepts no dialect; the message is the first refusal's.
    """
    refusal = None
    for vocab_size, ignore_eos, stream_options in product(vocab_sizes, (True, False), (True, False)):
        dialect = Dialect(vocab_size, ignore_eos, stream_options)
        try:
            async with asyncio.timeout(timeout), aclosing(_ask(client, target, dialect)) as answer:
                async for _ in answer:
                    pass
        except TimeoutError:
            raise ServerError(f"no answer to a first request within {timeout:g} s") from None
        except ServerError as error:
            refusal = refusal or error
            if error.status in FINAL_STATUSES:
                raise
        else:
            return dialect
    raise refusal or ServerError("nothing was asked")


def _ask(client: OpenAIClient, target: Target, dialect: Dialect) -> AsyncGenerator[list[Chunk], None]:
    prompt: Prompt
    if dialect.vocab_size is None:
        (prompt,) = write_prompts([Sketch(3, 1)], vocab_size=None)
    else:
        prompt = [dialect.vocab_size - 3, dialect.vocab_size - 2, dialect.vocab_size - 1]
    return client.stream(target.path, dialect.body(target, prompt, 1))


def _prompt_field(endpoint: Endpoint, prompt: Prompt) -> dict[str, Any]:
    is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
    if endpoint == "completions":
        if is_chat:
            raise ValueError("a prompt is a chat's messages, which only the endpoint 'chat' takes")
        return {"prompt": prompt}
    if isinstance(prompt, str):
        return {"messages": [{"role": "user", "content": prompt}]}
    if not is_chat:
        raise ValueError("a prompt is token ids, which only the endpoint 'completions' takes")
    return {"messages": prompt}
