"""`TextReader`: tokenizes texts and pairs, as `sentence-transformers` and a model's card do."""

from collections.abc import Sequence
from numbers import Integral
from typing import TypeAlias

from inflight.contracts.errors import InvalidRequestError
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.pooling import PooledText, PoolingPlan
from inflight.text.tokenizer import Tokenizer

Text: TypeAlias = str | Sequence[int]
"""A text, or its token ids."""

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""Qwen3-Reranker's template around a query and a document."""


class TextReader:
    """Reads the texts of one model's requests.

    Args:
        tokenizer: None: only token ids are taken.
        info: of a model that pools.
        truncate: the most tokens of a text; longer ones are cut. -1: as many as the model allows. None: longer ones are
            refused.

    Raises:
        InvalidRequestError: `truncate` is out of range.
    """

    def __init__(self, tokenizer: Tokenizer | None, info: ModelInfo, truncate: int | None = None) -> None:
        assert info.pooling is not None
        self._given_tokenizer, self._info = tokenizer, info
        self._plan: PoolingPlan = info.pooling
        if truncate is not None and not (truncate == -1 or 1 <= truncate <= info.max_model_len):
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {truncate}; it must be -1, or from 1 to {info.max_model_len}, the most "
                "tokens of a text"
            )
        self._most = info.max_model_len if truncate == -1 else truncate

    def single(self, text: Text, prompt: str = "") -> PooledText:
        """Read a text after a prompt (token ids have none). Raises `InvalidRequestError` if it cannot run."""
        if not isinstance(text, str):
            return self._checked(PooledText(self._token_ids(text)[: self._most]))
        self._check(text)
        prompt_length = self._prompt_length(prompt) if prompt and not self._plan.includes_prompt else 0
        return self._checked(PooledText(self._encoded(prompt + text), None, prompt_length))

    def pair(self, first: Text, second: Text, instruction: str | None = None) -> PooledText:
        """Read a pair of texts that run together. Raises `InvalidRequestError` if they cannot run.

        Args:
            instruction: of a reranker; None: its usual one.
        """
        if not (isinstance(first, str) and isinstance(second, str)):
            raise InvalidRequestError("a pair for this model must be two texts, not token ids")
        self._check(first)
        self._check(second)
        if self._plan.task == "rerank":
            return self._checked(self._question(first, second, instruction))
        if instruction is not None:
            raise InvalidRequestError("an instruction was given; this model takes none")
        return self._checked(
            PooledText(*self._tokenizer.encode_pair(self._written(first), self._written(second), self._most))
        )

    def _question(self, query: str, document: str, instruction: str | None) -> PooledText:
        before, after = (self._tokenizer.encode(each, add_special_tokens=False) for each in (BEFORE, AFTER))
        asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        middle = self._tokenizer.encode(asked)
        if self._most is not None:
            middle = middle[: max(0, self._most - len(before) - len(after))]
        return PooledText([*before, *middle, *after])

    def _encoded(self, text: str) -> list[int]:
        if self._most is None:
            most = self._tokenizer.most_characters(self._info.max_model_len)
            if len(text) > most:
                raise self._too_long(f"{len(text)} characters")
            return self._tokenizer.encode(self._written(text))
        return self._tokenizer.encode_pair(self._written(text), None, self._most)[0]

    def _prompt_length(self, prompt: str) -> int:
        """The number of tokens of a prompt, without the special token that may end a text."""
        token_ids = self._tokenizer.encode(self._written(prompt))
        ends = bool(token_ids) and token_ids[-1] in self._tokenizer.inner.all_special_ids
        return len(token_ids) - ends

    def _written(self, text: str) -> str:
        return text.lower() if self._plan.lowers else text

    def _check(self, text: str) -> None:
        if not text:
            raise InvalidRequestError("the text is empty; it must have at least one character")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has {text[error.start]!r} at place {error.start}; it must be text that UTF-8 can encode"
            ) from None

    def _token_ids(self, given: Sequence[int]) -> list[int]:
        if not isinstance(given, Sequence) or isinstance(given, bytes):
            raise InvalidRequestError(f"the text is a {type(given).__name__}; it must be text or token ids")
        for token_id in given:
            if not isinstance(token_id, Integral) or isinstance(token_id, bool):
                raise InvalidRequestError(f"token id {token_id!r} is a {type(token_id).__name__}, not an integer")
            if not 0 <= token_id < self._info.vocab_size:
                raise InvalidRequestError(
                    f"token id {token_id} is out of range; this model has {self._info.vocab_size} tokens"
                )
        return [int(token_id) for token_id in given]

    def _checked(self, text: PooledText) -> PooledText:
        if not text.token_ids:
            raise InvalidRequestError("the text has no tokens; it must have at least one")
        if len(text.token_ids) > self._info.max_model_len:
            raise self._too_long(f"{len(text.token_ids)} tokens")
        if (highest := max(text.token_ids)) >= self._info.vocab_size:
            raise InvalidRequestError(
                f"token id {highest} is out of range; this model has {self._info.vocab_size} tokens"
            )
        return text

    def _too_long(self, size: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the text has {size}; this model's maximum context length is {self._info.max_model_len} tokens (with "
            "truncate_prompt_tokens=-1 longer texts are cut)"
        )

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._given_tokenizer is None:
            raise InvalidRequestError("text was given, but this model has no tokenizer; give token ids")
        return self._given_tokenizer
