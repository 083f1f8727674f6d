"""`InputProcessor`: requests on their way into an engine. Checks them and resolves grammars, adapters and bad words.

Any thread may call it. It queues nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inflight.contracts.api.config import NO_ADAPTERS, EngineConfig
from inflight.contracts.api.errors import AdapterError, InvalidRequestError, ModelError
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.params import SamplingParams
from inflight.engine.admission import AcceptedRequest, Admission
from inflight.execution.adapters import AdapterCheckpoint, Adapters
from inflight.execution.hf.load import WatchedWeights
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from inflight.grammar.constraints import Constraints


class InputProcessor:
    """Requests of one engine, before they are submitted.

    Args:
        adapters: the model's; None: the engine was made without.
        watched: the weights of the caller's model, which may not change; None: the engine has its own.

    Attributes:
        grammars: the grammars of the engine's sequences, once there is one.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        adapters: Adapters | None,
        watched: WatchedWeights | None,
    ) -> None:
        self._admission = Admission(config, info, tokenizer)
        self._info, self._tokenizer = info, tokenizer
        self._adapters, self._watched = adapters, watched
        self._lock = threading.Lock()
        self.grammars: Constraints | None = None

    def accept(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        adapter_source: str | None = None,
        **options: Any,
    ) -> AcceptedRequest:
        """Check a request and resolve it against the model, except for what `compile` does.

        Args:
            adapter_source: the folder or hub repository of its adapter; None: it has none.
            options: see `Admission.accept`.

        Raises:
            InvalidRequestError: something about it is wrong.
        """
        if self._watched is not None and self._watched.have_changed:
            raise InvalidRequestError(
                "the given model's weights have changed since the engine copied most of them into "
                "its own layout; LLM.reload_weights() takes the new ones"
            )
        accepted = self._admission.accept(
            request_id, prompt_token_ids, params, adapter_source=adapter_source, **options
        )
        if adapter_source is None:
            return accepted
        known = self.adapters.known(adapter_source)
        return replace(accepted, is_compiled=False) if known is None else _adapted(accepted, known)

    def compile(self, accepted: AcceptedRequest) -> AcceptedRequest:
        """The request with its grammar, the tokens of its bad words and of its prediction, and its adapter.

        May take seconds. Raises `InvalidRequestError`.
        """
        if accepted.is_compiled:
            return accepted
        if accepted.adapter_source is not None and accepted.adapter is None:
            accepted = _adapted(accepted, self.adapters.get(accepted.adapter_source))
        params = accepted.params
        grammar = None if params.structured_output is None else self.constraints.compile(params)
        bad_words = self._admission.spelled(tuple(params.bad_words)) if params.bad_words else {}
        speculates = not self._info.speculation.startswith("off")
        predicted_ids = self._admission.predicted_ids(params) if speculates else ()
        request = replace(accepted.request, bad_words=bad_words, predicted_ids=predicted_ids)
        return replace(accepted, request=request, is_compiled=True, grammar=grammar)

    @property
    def adapters(self) -> Adapters:
        """The adapters of the model. Raises `AdapterError` if the engine was made without."""
        if self._adapters is None:
            raise AdapterError(NO_ADAPTERS)
        return self._adapters

    @property
    def constraints(self) -> Constraints:
        """The grammars of this engine's sequences. Their library is loaded with the first of them."""
        with self._lock:
            if self.grammars is None:
                from inflight.grammar.constraints import Constraints

                self.grammars = Constraints(self._tokenizer, self._info)
            return self.grammars


def each_adapter(config: EngineConfig, use: Callable[[str], object]) -> None:
    """Do something with the source of each adapter. Raises `ModelError` if it is refused."""
    for name, source in (config.adapters or {}).items():
        try:
            use(source)
        except AdapterError as error:
            raise ModelError(f"the adapter {name!r} cannot be used: {error}") from error


def _adapted(accepted: AcceptedRequest, adapter: AdapterCheckpoint) -> AcceptedRequest:
    """A request with its adapter."""
    return replace(accepted, request=replace(accepted.request, adapter=adapter.digest), adapter=adapter)
