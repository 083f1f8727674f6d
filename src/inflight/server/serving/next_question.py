"""`expect_question`: computes, while the server is idle, the history as the user's next question will send it.

Many chat templates drop the reasoning of earlier answers once the user asks again, and some move the tools: then
everything behind the previous question differs from what is cached, and the first token of the next answer would wait
for all of it.
"""

import asyncio
import logging
from contextlib import aclosing, suppress

from inflight.contracts.api.config import BACKGROUND
from inflight.contracts.api.outputs import RequestOutput
from inflight.contracts.api.params import SamplingParams
from inflight.server.chat_format.blocks import Blocks, ReasoningBlock, TextBlock
from inflight.server.chat_format.chat_template import render_chat
from inflight.server.serving.generation import Generation
from inflight.server.serving.service import RenderedChat, Service
from inflight.server.wire.off_loop import off_loop
from inflight.server.wire.strict_model import ITEM_MARK

logger = logging.getLogger("inflight.server")

QUESTION = "\uf8ff"
"""Stands for the question: a character for private use."""

LEAST_TOKENS = 64
"""Fewer tokens than these are not worth a request."""


def expect_question(
    service: Service, chat: RenderedChat, generation: Generation, output: RequestOutput, blocks: Blocks
) -> None:
    """Start computing how the next prompt will begin, if that is not cached and the server has nothing else to do.

    Args:
        chat: the chat as it was rendered.
        generation: the request that answered it.
        output: its answer.
        blocks: a new reader of the answer.
    """
    is_whole = len(output.prompt_token_ids) == len(chat.token_ids) and not chat.chat.get("continue_final_message")
    if not is_whole or service.running or output.outputs[0].finish_reason != "stop":
        return

    async def compute() -> None:
        with suppress(asyncio.CancelledError):
            try:
                prompt = await off_loop(len(chat.text), lambda: _prompt(service, chat, output, blocks))
                if prompt is not None:
                    await _run(service, generation, prompt)
            except Exception as error:
                logger.debug("the next question's prompt was not computed: %r", error)

    task = asyncio.create_task(compute())
    service.idle_work.add(task)
    task.add_done_callback(service.idle_work.discard)


def _prompt(service: Service, chat: RenderedChat, output: RequestOutput, blocks: Blocks) -> list[int] | None:
    """Return the next prompt up to the question; None: it is cached, or calls come first."""
    (completion,), tokenizer = output.outputs, service.tokenizer
    blocks.feed(completion.text, is_last=True)
    if blocks.num_calls:
        return None
    said = {"role": "assistant", "content": blocks.text_of(TextBlock)}
    if thoughts := blocks.text_of(ReasoningBlock):
        said["reasoning_content"] = thoughts
    history = [*chat.chat["messages"], said, {"role": "user", "content": QUESTION}]
    text = render_chat({**chat.chat, "messages": history}, tokenizer, "messages", chat.options)
    if ITEM_MARK in text:
        return None  # its images and sounds are gone
    prompt = tokenizer.encode(text.rpartition(QUESTION)[0], add_special_tokens=False)
    known = [*output.prompt_token_ids, *completion.token_ids]
    num_known = next((i for i, (new, old) in enumerate(zip(prompt, known, strict=False)) if new != old), len(known))
    return prompt if num_known + LEAST_TOKENS <= len(prompt) < service.llm.model_info.max_model_len else None


async def _run(service: Service, generation: Generation, prompt: list[int]) -> None:
    stream = service.llm.stream(
        prompt,
        SamplingParams(max_tokens=1),
        f"{generation.request_id}-next",
        priority=BACKGROUND,
        cache_salt=generation.cache_salt,
        adapter=generation.adapter,
    )
    async with aclosing(stream) as deltas:
        async for _ in deltas:
            pass
