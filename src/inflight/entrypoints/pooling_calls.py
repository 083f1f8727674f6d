"""What a front offers if its model pools: calls that wait (`PoolingCalls`), and ones to await (`AsyncPoolingCalls`)."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from inflight.contracts.model_info import ModelInfo
from inflight.contracts.outputs import ClassificationOutput, EmbeddingOutput, ScoreOutput
from inflight.entrypoints.pooling_requests import (
    Output,
    PoolingRequest,
    Texts,
    classify_request,
    embed_request,
    score_request,
)
from inflight.text.tokenizer import Tokenizer

Result = TypeVar("Result")


class PoolingCalls(ABC):
    """Embeddings, labels and scores of a model that pools. Texts are given as text or as token ids, one or many.

    Whatever is wrong with them is an `InvalidRequestError` that names the text; nothing has run then. Texts longer than
    `model_info.max_model_len` tokens are refused, or cut to `truncate_prompt_tokens` (-1: to that length).
    """

    tokenizer: Tokenizer | None

    @property
    @abstractmethod
    def model_info(self) -> ModelInfo:
        """What was found out about the model at load."""

    @abstractmethod
    def _pool(self, request: PoolingRequest[Output]) -> list[Output]:
        """Run a request to its end."""

    def embed(
        self,
        texts: Texts,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:
        """A vector for each text, in the order of the texts.

        Args:
            prompt_name: one of the model's own prompts, which texts then begin with (`model_info.pooling.prompts`);
                None: its default one, if it has one.
            prompt: another beginning of all texts.
            dimensions: how many of a vector's first numbers to keep, and make it one of length 1 again if the model's
                are (for models that were trained for that); None: all.
        """
        request = embed_request(
            texts,
            self.tokenizer,
            self.model_info,
            prompt_name=prompt_name,
            prompt=prompt,
            dimensions=dimensions,
            truncate=truncate_prompt_tokens,
        )
        return self._pool(request)

    def classify(self, texts: Texts, *, truncate_prompt_tokens: int | None = None) -> list[ClassificationOutput]:
        """A number for each of the model's labels, for each text."""
        return self._pool(classify_request(texts, self.tokenizer, self.model_info, truncate=truncate_prompt_tokens))

    def score(
        self,
        first: Texts,
        second: Texts,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoreOutput]:
        """How well texts fit each other: the only one of `first` with each of `second`, or each with its counterpart. A
        reranker takes queries first, then documents; embeddings are compared.

        Args:
            instruction: what a reranker shall look for (Qwen3-Reranker); None: its usual one.
        """
        request = score_request(
            first,
            second,
            self.tokenizer,
            self.model_info,
            instruction=instruction,
            truncate=truncate_prompt_tokens,
        )
        return self._pool(request)


class AsyncPoolingCalls(ABC):
    """The same for many callers at once; see `PoolingCalls`."""

    tokenizer: Tokenizer | None

    @abstractmethod
    async def _loaded_info(self) -> ModelInfo:
        """What was found out about the model, once it is loaded."""

    @abstractmethod
    async def _pool(self, request: PoolingRequest[Output]) -> list[Output]:
        """Run a request to its end."""

    async def embed(
        self,
        texts: Texts,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:
        """See `PoolingCalls.embed`."""
        info = await self._loaded_info()
        request = await run_beside(
            lambda: embed_request(
                texts,
                self.tokenizer,
                info,
                prompt_name=prompt_name,
                prompt=prompt,
                dimensions=dimensions,
                truncate=truncate_prompt_tokens,
            )
        )
        return await self._pool(request)

    async def classify(self, texts: Texts, *, truncate_prompt_tokens: int | None = None) -> list[ClassificationOutput]:
        """See `PoolingCalls.classify`."""
        info = await self._loaded_info()
        request = await run_beside(
            lambda: classify_request(texts, self.tokenizer, info, truncate=truncate_prompt_tokens)
        )
        return await self._pool(request)

    async def score(
        self,
        first: Texts,
        second: Texts,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoreOutput]:
        """See `PoolingCalls.score`."""
        info = await self._loaded_info()
        request = await run_beside(
            lambda: score_request(
                first, second, self.tokenizer, info, instruction=instruction, truncate=truncate_prompt_tokens
            )
        )
        return await self._pool(request)


_beside = ThreadPoolExecutor(1, "inflight: reading texts")


async def run_beside(work: Callable[[], Result]) -> Result:
    """Do what takes a while beside the event loop: tokenizing."""
    return await asyncio.get_running_loop().run_in_executor(_beside, work)
