"""`Tokenizer`: converts text and chats to token ids, and token ids to text.

`tokenizer_files` reads files; `detokenizer` turns a growing sequence into text.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from inflight.contracts.api.errors import InvalidRequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from inflight.text.processor import Processor

ANSWER = "Quixotic"
"""A word that no chat template contains."""
CONFIGURATION = "configuration"
"""The source name of EOS tokens in `generation_config`, which defaults to the `config`."""


class Tokenizer:
    """A thin wrapper around a `transformers` tokenizer, fast or slow; `.inner` is the wrapped one.

    Attributes:
        named_ends: token ids that end a turn, by source in the tokenizer's file.
        notes: assumptions made when it was read.
        limits: the most items of a prompt, by kind; without an entry: no limit.

    Args:
        load_processor: reads the processor of images and sounds; None: there is none.
    """

    def __init__(
        self,
        inner: PreTrainedTokenizerBase,
        named_ends: Mapping[str, int] | None = None,
        notes: Sequence[str] = (),
        load_processor: Callable[[], Processor] | None = None,
    ) -> None:
        self.inner = inner
        self._load_processor = load_processor
        self.limits: Mapping[str, int] = {}
        self.named_ends, self.notes = named_ends or {}, tuple(notes)
        self._cutting_lock = threading.Lock()

    @cached_property
    def processor(self) -> Processor:
        """The processor of images and sounds. Raises `InvalidRequestError` if there is none."""
        if self._load_processor is None:
            raise InvalidRequestError(
                "this model has no processor of images or sounds: give the engine a folder, or the processor"
            )
        processor = self._load_processor()
        processor.limits = self.limits
        return processor

    @property
    def eos_token_id(self) -> int | None:
        """The id of the tokenizer's own end-of-sequence token; a model's `generation_config` may name others."""
        token_id: int | None = self.inner.eos_token_id
        return token_id

    def ends(self, configured: Iterable[int] = ()) -> dict[int, str]:
        """Return the tokens that end a sequence, with their sources: the model's configuration (`configured`), a file
        (`named_ends`), and, if the model chats or none is named, the tokenizer (its EOS) and its chat template.

        The template's is the first token directly after an answer, or, of several, one that is also named elsewhere:
        Harmony's and Command A's templates also have tokens that end only a part of a turn.
        """
        named = [(each, CONFIGURATION) for each in configured]
        named += [(each, key) for key, each in self.named_ends.items()]
        eos_token_id = None if self.named_ends else self.eos_token_id
        if eos_token_id is not None and (self.inner.chat_template or not named):
            named.append((eos_token_id, "tokenizer"))
        closing, known = self._closing_tokens(), {token_id for token_id, _ in named}
        named += [(each, "chat template") for each in sorted(closing, key=lambda each: each not in known)[:1]]
        return {token_id: ", ".join(name for each, name in named if each == token_id) for token_id, _ in named}

    def _closing_tokens(self) -> list[int]:
        """The added tokens that the chat template writes directly after an answer, in order."""
        if not self.inner.chat_template:
            return []
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]
        try:
            _, answer, behind = self.render_chat(messages, add_generation_prompt=False).rpartition(ANSWER)
        except InvalidRequestError:
            return []
        token_ids, added = self.encode(behind, add_special_tokens=False), self.inner.added_tokens_decoder
        closing = [each for each in token_ids if each in added]
        follows = answer and closing and not self.decode(token_ids[: token_ids.index(closing[0])]).strip()
        return closing if follows else []

    @cached_property
    def vocab_size(self) -> int:
        """The number of tokens, including added ones. A model's logits may be wider (padding)."""
        return len(self.inner)

    def most_characters(self, num_tokens: int) -> int:
        """The most characters of a text of `num_tokens` tokens.

        (A tokenizer that merges runs of unknown or blank characters could fit more.)"""
        return num_tokens * self._longest

    @cached_property
    def _longest(self) -> int:
        """The characters of the longest token, or more: a name in the vocabulary has one for each byte or character."""
        return max(map(len, self.inner.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer adds by default, or without."""
        token_ids: list[int] = self.inner.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return token_ids

    def encode_pair(
        self, first: str, second: str | None, max_tokens: int | None = None
    ) -> tuple[list[int], list[int] | None]:
        """Return the token ids of a text, or a pair, with special tokens; and their token types, if the model uses
        them.

        Args:
            max_tokens: truncate longer ones, as the tokenizer does, keeping special tokens.
        """
        if max_tokens is None:
            read = self.inner(first, second, verbose=False)
        else:
            with self._cutting_lock:
                read = self._cutting(first, second, truncation=True, max_length=max_tokens, verbose=False)
        types = read.get("token_type_ids")
        return list(read["input_ids"]), None if types is None else list(types)

    @cached_property
    def _cutting(self) -> PreTrainedTokenizerBase:
        """A copy with truncation, which is a tokenizer's shared state."""
        return copy.deepcopy(self.inner)

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return a word's token ids at the beginning of a text and after a space, without special tokens."""
        spelled = (tuple(self.inner.encode(each, add_special_tokens=False)) for each in (word, f" {word}"))
        return [token_ids for token_ids in dict.fromkeys(spelled) if token_ids]

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Return the token ids of a chat that `render_chat` writes with these options."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a chat as text, special tokens included, by the model's chat template (or by `chat_template`, Jinja).

        `messages` are dicts with a `role` and a `content`, `tools` are JSON schemas. With `continue_final_message` the
        last message is left open for the model to continue; then set `add_generation_prompt` to False.
        `chat_template_kwargs` are further variables of the template, such as `enable_thinking`. Raises
        InvalidRequestError, in one sentence, if there is no template or the template refuses the messages.
        """
        if not messages:
            raise InvalidRequestError("a chat needs at least one message")
        if chat_template is None and not self.inner.chat_template:
            raise InvalidRequestError(
                "this model's tokenizer has no chat template: pass a chat_template, or a text prompt"
            )
        try:
            template = self.inner.get_chat_template(chat_template, tools)
            text: str = self.inner.apply_chat_template(
                _in_parts(messages) if _reads_parts(template) else messages,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(chat_template_kwargs or {}),
            )
        except Exception as error:  # a template is a program, and can raise anything
            raise InvalidRequestError(f"the chat template cannot write these messages: {one_line(error)}") from error
        return text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, with spaces as the model wrote them (no clean-up)."""
        text: str
        if self.inner.is_fast:  # called for each token: as `inner.decode`, in less than half the time
            text = self.inner.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        else:
            text = self.inner.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text

    def text_of(self, token_id: int) -> str:
        """Return the text of a single token, special ones included. Caches the latest."""
        return self._text_of(token_id)

    @cached_property
    def _text_of(self) -> Callable[[int], str]:
        return lru_cache(maxsize=2**16)(lambda token_id: self.decode([token_id], skip_special_tokens=False))

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a single token's text, also of partial characters."""
        if token_id in self.byte_of_token:
            return bytes([self.byte_of_token[token_id]])
        text = self.text_of(token_id)
        if "\ufffd" in text and self.inner.is_fast:
            with suppress(KeyError, TypeError):  # a byte vocabulary without byte characters
                return bytes(map(_byte_of_letter().__getitem__, self.inner.convert_ids_to_tokens(token_id)))
        return text.encode(errors="replace")

    def has_text(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` gives text for `token_id`: it exists, and is not a skipped special token.

        A model's vocabulary may be padded beyond its tokenizer's, so a model can sample an id without a token.
        """
        if skip_special_tokens and token_id in self._special_token_ids:
            return False
        if not self.inner.is_fast:
            return 0 <= token_id < self.vocab_size
        try:
            return self.inner.convert_ids_to_tokens(token_id) is not None
        except OverflowError:  # not a 32-bit number
            return False

    @cached_property
    def byte_of_token(self) -> Mapping[int, int]:
        """The byte of each byte token (`<0x00>` to `<0xFF>`, SentencePiece's byte fallback); empty without them."""
        token_ids = self.inner.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
        if None in token_ids or len(set(token_ids)) < 256:
            return {}
        if self.decode([token_ids[byte] for byte in "字".encode()]) != "字":  # ordinary tokens that look alike
            return {}
        return {token_id: byte for byte, token_id in enumerate(token_ids)}

    @cached_property
    def _special_token_ids(self) -> frozenset[int]:
        """The ids that `decode` skips: a fast tokenizer's added tokens marked special, a slow one's ids with a role."""
        if self.inner.is_fast:
            return frozenset(i for i, token in self.inner.added_tokens_decoder.items() if token.special)
        return frozenset(self.inner.all_special_ids)


@lru_cache(maxsize=16)
def _reads_parts(chat_template: str) -> bool:
    """Whether a template loses text unless it is in parts, `[{"type": "text", "text": …}]`, as those of multimodal
    models may."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": ANSWER}]
    for form in (messages, _in_parts(messages)):
        with suppress(Exception):  # a template is a program, and can raise anything
            if ANSWER in render_jinja_template(conversations=[form], chat_template=chat_template)[0][0]:
                return form is not messages
    return False


def _in_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with texts as lists of one part."""
    contents = (message.get("content") for message in messages)
    return [
        {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else dict(message)
        for message, text in zip(messages, contents, strict=True)
    ]


@lru_cache(maxsize=1)
def _byte_of_letter() -> Mapping[str, int]:
    """The byte of each character in byte-level vocabularies."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def one_line(error: Exception) -> str:
    """An error's message in one line."""
    return " ".join(str(error).split()) or type(error).__name__
