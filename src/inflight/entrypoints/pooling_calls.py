"""The fronts' methods for models that pool: synchronous (`PoolingCalls`) and asynchronous (`AsyncPoolingCalls`)."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.outputs import ClassificationOutput, EmbeddingOutput, ScoreOutput
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

    An invalid text raises an `InvalidRequestError` that names it, before anything runs. Texts longer than
    `model_info.max_model_len` tokens are refused, or cut to `truncate_prompt_tokens` (-1: to that length).
    """

    tokenizer: Tokenizer | None

    @property
    @abstractmethod
    def model_info(self) -> ModelInfo:
        """Facts about the model found at load."""

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
            prompt: another prompt for all texts.
            dimensions: keep only this many first numbers of a vector, renormalised if the model's vectors are (for
                models trained for that); None: all.
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
        """Classify texts: a number for each label, for each text."""
        return self._pool(classify_request(texts, self.tokenizer, self.model_info, truncate=truncate_prompt_tokens))

    def score(
        self,
        first: Texts,
        second: Texts,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoreOutput]:
        """Score pairs of texts: one text of `first` with each of `second`, or each with its counterpart. A reranker
        takes queries first, then documents; an embedding model compares vectors.

        Args:
            instruction: the task of a reranker (Qwen3-Reranker); None: its default.
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
    """The same for concurrent callers; see `PoolingCalls`."""

    tokenizer: Tokenizer | None

    @abstractmethod
    async def _loaded_info(self) -> ModelInfo:
        """Facts about the model, once loaded."""

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
    """Tokenize outside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_beside, work)
