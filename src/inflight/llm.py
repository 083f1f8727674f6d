"""`LLM`: the offline front. Prompts in, texts out, in the caller's process and thread.

Decides what counts as a prompt, and how the results of one call are put together; everything else is the engine's.
"""

import os
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from itertools import count
from numbers import Integral
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inflight.config import EngineConfig
from inflight.demo_model import DEMO_MODEL
from inflight.engine import AcceptedRequest, Engine
from inflight.errors import InvalidRequestError, ModelError
from inflight.execution.model import ModelSource, check_source
from inflight.model_info import ModelInfo
from inflight.observe.progress import with_progress
from inflight.options import refuse_unknown_options
from inflight.outputs import RequestOutput, SequenceOutput, TextDelta
from inflight.params import SamplingParams
from inflight.text.collector import Collector
from inflight.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict with "prompt", "prompt_token_ids" or "messages"."""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A chat: dicts with "role" and "content"."""

TEMPLATE_OPTIONS = {"chat_template", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
"""What a chat may carry besides its messages, for the template."""


class LLM:
    """A model that generates for many prompts at once.

    Args:
        model: a hub id, a local folder, or a loaded `PreTrainedModel`; None is the small embedded model.
        tokenizer: a hub id, a folder, or a loaded tokenizer; None takes the one in the model's folder or repository.
            Without a tokenizer (a loaded model comes without) prompts are token ids, and texts stay empty.
        options: the fields of `EngineConfig`, such as `dtype`, `max_model_len`, `max_num_seqs`.

    Raises:
        ModelError: the model or tokenizer can not be loaded, or the model can not be run exactly (a `ValueError`).
        ValueError: an option is unknown or out of range.
    """

    def __init__(
        self,
        model: ModelSource | None = None,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> None:
        refuse_unknown_options(options, [field.name for field in fields(EngineConfig)], "LLM")
        for name in ("dtype", "device"):  # torch.bfloat16 and torch.device("cuda") are welcome, too
            if isinstance(options.get(name), torch.dtype | torch.device):
                options[name] = str(options[name]).removeprefix("torch.")
        config = EngineConfig(**options)
        model = _model_source(model)
        if isinstance(model, str):
            check_source(model, config)
        self.tokenizer = _load_tokenizer(model, tokenizer, config)
        self.engine = Engine(model, config, self.tokenizer)
        self._streams: dict[str, _Stream] = {}
        self._request_ids = count()

    @property
    def model_info(self) -> ModelInfo:
        """What was found out about the model at load, and how it is run."""
        return self.engine.model_info

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used when no parameters are given: the model's `generation_config`, else `SamplingParams()`."""
        asked = self.engine.runner.generation_config.to_diff_dict()
        defaults = {
            name: asked[name] for name in ("temperature", "top_k", "top_p", "min_p") if asked.get(name) is not None
        }
        if asked.get("do_sample") is False:
            defaults = {"temperature": 0.0}
        if asked.get("max_new_tokens") is not None:
            defaults["max_tokens"] = asked["max_new_tokens"]
        return SamplingParams(**defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts; results are in the prompts' order.

        Args:
            prompts: one or many, each text, token ids, or a dict with "prompt", "prompt_token_ids" or "messages"
                (and "cache_salt": only prompts of the same salt share cached prefixes).
            sampling_params: for all, or one for each prompt; None: the model's own defaults.
            use_tqdm: show a progress bar with tokens a second on standard error.
            priority: one for each prompt, lower runs first (if `policy="priority"`); None: all alike.

        Raises:
            InvalidRequestError: a prompt or parameter is bad (a `ValueError` that names its index); nothing has run.
        """
        stream = self._open_stream(prompts, sampling_params, priority)
        with closing(self._run(stream)) as deltas:  # an interrupt, wherever it comes, leaves nothing running
            shown = with_progress(deltas, len(stream.accepted), enabled=use_tqdm)
            outputs = {delta.prompt_index: delta.output for delta in shown if delta.output is not None}
        return [outputs[index] for index in sorted(outputs)]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one chat or many, written out by the tokenizer's chat template.

        Args:
            messages: one chat or many, each a list of dicts with "role" and "content".
            template_options: `chat_template` (Jinja, instead of the tokenizer's), `tools` (JSON schemas),
                `add_generation_prompt`, `continue_final_message`, `chat_template_kwargs` (variables of the template).
        """
        refuse_unknown_options(template_options, TEMPLATE_OPTIONS, "LLM.chat")
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise InvalidRequestError(f"messages is {messages!r}; a chat is a list of dicts with a role and a content")
        is_one = isinstance(messages[0], Mapping)
        chats = [messages] if is_one else messages
        prompts = [{"messages": chat, **template_options} for chat in chats]
        return self.generate(prompts[0] if is_one else prompts, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: Sequence[int] | None = None,
    ) -> Generator[TextDelta, None, None]:
        """Like `generate`, but yields each piece of text as it is made, all prompts interleaved.

        Prompts are checked before this returns. Closing the generator aborts what has not finished.
        """
        return self._run(self._open_stream(prompts, sampling_params, priority))

    # ------------------------------------------------------------------------------------- one call

    def _open_stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> "_Stream":
        """Take all prompts of a call through the door; the first bad one is refused by its index."""
        is_one = _is_one_prompt(prompts)
        many: Sequence[Any] = [prompts] if is_one else prompts  # type: ignore[assignment]
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(many)
        for params in sampling_params:
            if not isinstance(params, SamplingParams):
                raise InvalidRequestError(f"sampling_params is or contains {params!r}; it must be SamplingParams")
        if len(sampling_params) != len(many):
            raise InvalidRequestError(
                f"{len(many)} prompts came with {len(sampling_params)} sampling_params; give one for all, or one each"
            )
        priority = [0] * len(many) if priority is None else priority
        if len(priority) != len(many):
            raise InvalidRequestError(f"{len(many)} prompts came with {len(priority)} priorities; give one each")
        stream = _Stream()
        for index, (prompt, params) in enumerate(zip(many, sampling_params, strict=True)):
            try:
                self._accept(stream, index, prompt, params, priority[index])
            except InvalidRequestError as error:
                raise error if is_one else InvalidRequestError(f"prompt {index}: {error}") from None
        return stream

    def _accept(self, stream: "_Stream", index: int, prompt: Prompt, params: SamplingParams, priority: int) -> None:
        text, token_ids = self._tokenize(prompt)
        request_id = str(next(self._request_ids))
        cache_salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        accepted = self.engine.accept(request_id, token_ids, params, priority=priority, cache_salt=cache_salt)
        prompt_token_ids = list(accepted.request.prompt_token_ids)
        stream.accepted.append(accepted)
        stream.collectors[request_id] = Collector(request_id, text, prompt_token_ids, params, self.tokenizer, index)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """A prompt's text, if it has one, and its token ids."""
        if isinstance(prompt, str):
            if not prompt:  # whatever tokens the tokenizer would put around it
                raise InvalidRequestError("the prompt is empty; it must have at least one character")
            return prompt, self._tokenizer_for("text").encode(prompt)
        if isinstance(prompt, Mapping):
            kind = next((key for key in ("prompt", "prompt_token_ids", "messages") if key in prompt), None)
            extra = set(prompt) - {kind, "cache_salt"} - (TEMPLATE_OPTIONS if kind == "messages" else set())
            if kind is None or extra:
                raise InvalidRequestError(
                    'a prompt given as a dict must have the key "prompt", "prompt_token_ids" or "messages" and no '
                    f'other but "cache_salt"; it has {sorted(map(str, prompt))}'
                )
            if kind == "messages":
                options = {name: prompt[name] for name in prompt if name in TEMPLATE_OPTIONS}
                return None, self._tokenizer_for("a chat").chat(_messages(prompt["messages"]), **options)
            return self._tokenize(prompt[kind])
        if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
            return None, prompt
        raise InvalidRequestError(f"the prompt is a {type(prompt).__name__}; it must be text, token ids, or a dict")

    def _tokenizer_for(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"the prompt is {what}, but this model has no tokenizer; give token ids, or LLM a tokenizer"
            )
        return self.tokenizer

    def _run(self, stream: "_Stream") -> Generator[TextDelta, None, None]:
        """Submit a call's requests and step the engine until the last has finished."""
        try:
            for accepted in stream.accepted:
                self._streams[accepted.request.request_id] = stream
                self.engine.submit(accepted)
            while stream.collectors or stream.deltas:
                for news in self.engine.step():
                    self._streams[news.request_id].take_in(news)
                while stream.deltas:
                    yield stream.deltas.popleft()
        finally:
            for accepted in stream.accepted:
                self._streams.pop(accepted.request.request_id, None)
                self.engine.abort(accepted.request.request_id)


class _Stream:
    """The requests of one call, and what they have produced that the caller has not taken yet."""

    def __init__(self) -> None:
        self.accepted: list[AcceptedRequest] = []
        self.collectors: dict[str, Collector] = {}
        self.deltas: deque[TextDelta] = deque()

    def take_in(self, news: SequenceOutput) -> None:
        """Add what one step gave one of the call's sequences."""
        delta = self.collectors[news.request_id].take_in(news)
        self.deltas.append(delta)
        if delta.output is not None:
            del self.collectors[news.request_id]


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    return not isinstance(prompts, Sequence) or (len(prompts) > 0 and isinstance(prompts[0], Integral))


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidRequestError(f"messages is {messages!r}; a chat is a list of dicts with a role and a content")
    return [dict(message) for message in messages]


def _model_source(model: object) -> str | PreTrainedModel:
    """What was given as a model, `~` expanded; None is the embedded one."""
    if model is None:
        return str(DEMO_MODEL)
    if isinstance(model, PreTrainedModel):
        return model
    if isinstance(model, str | os.PathLike):
        return os.path.expanduser(os.fspath(model))
    raise ModelError(
        f"the model is a {type(model).__name__}; it must be a hub id, a folder, or a transformers PreTrainedModel"
    )


def _load_tokenizer(
    model: str | PreTrainedModel,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None,
    config: EngineConfig,
) -> Tokenizer | None:
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return Tokenizer(tokenizer)
    if tokenizer is None and isinstance(model, PreTrainedModel):
        return None
    source = model if tokenizer is None else tokenizer
    if not isinstance(source, str | os.PathLike):
        raise ModelError(f"the tokenizer is a {type(source).__name__}; it must be a hub id, a folder, or a loaded one")
    name = os.path.expanduser(os.fspath(source))
    loaded = Tokenizer.load(name, trust_remote_code=config.trust_remote_code, revision=config.revision)
    if loaded is None and tokenizer is not None:
        raise ModelError(f"there is no tokenizer in {name!r}")
    return loaded
