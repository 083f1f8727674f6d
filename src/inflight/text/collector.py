"""`Collector`: collects the engine's outputs for one request into its `RequestOutput`, with text.

Runs in the caller's process. Knows nothing of steps or other requests.
"""

import time
from dataclasses import replace

from inflight.contracts.api.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SequenceOutput,
    TextDelta,
    TokenLogprobs,
    TokenScore,
)
from inflight.contracts.api.params import SamplingParams
from inflight.text.output_text import OutputText
from inflight.text.tokenizer import Tokenizer

NOTHING_YET = SequenceOutput("", 0, [])
"""The initial output of a sequence."""


class Collector:
    """One request's output as it grows.

    Args:
        prompt: the prompt's text, if the prompt was text.
        prompt_index: the prompt's index within its call.
        tokenizer: None leaves all texts empty.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        prompt_index: int = 0,
    ) -> None:
        completions = [CompletionOutput(index) for index in range(params.n)]
        if params.logprobs is not None:
            for completion in completions:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
        metrics = RequestMetrics(arrival_time=time.monotonic())
        self.output = RequestOutput(request_id, prompt, prompt_token_ids, completions, metrics)
        self._prompt_index = prompt_index
        self._tokenizer = tokenizer
        self._wants_prompt_logprobs = params.prompt_logprobs is not None
        self._texts: list[OutputText] = []
        if tokenizer is not None:
            self._texts = [OutputText.of_request(tokenizer, prompt_token_ids, params) for _ in completions]
        self._num_unfinished = params.n
        self._seen = [NOTHING_YET] * params.n  # the latest output of each sequence

    def take_in(self, output: SequenceOutput) -> TextDelta:
        """Add one step's output of one sequence; return the delta."""
        completion = self.output.outputs[output.index]
        completion.token_ids += output.new_token_ids
        logprobs, prompt_logprobs = self._take_in_scores(output)
        delta = ""
        if self._texts:
            text = self._texts[output.index]
            delta = text.take_in(output.new_token_ids, output.finish_reason, output.stop_reason)
            if output.finish_reason is not None:
                completion.text = text.text
        completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_reason
        self.output.error = self.output.error or output.error
        self._num_unfinished -= output.finish_reason is not None
        self.output.finished = self._num_unfinished == 0
        self._measure(output)
        return TextDelta(
            prompt_index=self._prompt_index,
            index=output.index,
            text=delta,
            token_ids=output.new_token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            output=self.output if self.output.finished else None,
        )

    def snapshot(self) -> RequestOutput:
        """Return the output so far, with its text; a snapshot."""
        outputs = [
            replace(
                each,
                token_ids=each.token_ids.copy(),
                logprobs=each.logprobs and each.logprobs.copy(),
                text=self._texts[each.index].text if self._texts else "",
            )
            for each in self.output.outputs
        ]
        return replace(self.output, outputs=outputs, metrics=replace(self.output.metrics))

    def _take_in_scores(
        self, output: SequenceOutput
    ) -> tuple[list[TokenLogprobs] | None, list[TokenLogprobs | None] | None]:
        """Add log-probabilities; return those of the new tokens, and those of the prompt once they have arrived."""
        completion, logprobs, prompt_logprobs = self.output.outputs[output.index], None, None
        prompt_ids = self.output.prompt_token_ids[1:]
        prompt_scores = output.prompt_scores if prompt_ids else []
        if self._wants_prompt_logprobs and prompt_scores is not None and self.output.prompt_logprobs is None:
            of_tokens = [self._logprobs(*each) for each in zip(prompt_ids, prompt_scores, strict=True)]
            prompt_logprobs = self.output.prompt_logprobs = [None, *of_tokens]
        if output.scores is not None:
            logprobs = [self._logprobs(*each) for each in zip(output.new_token_ids, output.scores, strict=True)]
            assert completion.logprobs is not None
            assert completion.cumulative_logprob is not None
            completion.logprobs += logprobs
            for score in output.scores:  # one by one, so that it does not depend on the number of tokens per step
                completion.cumulative_logprob += score.logprob
        return logprobs, prompt_logprobs

    def _logprobs(self, token_id: int, score: TokenScore) -> TokenLogprobs:
        """Return the log-probabilities at a position: the token's own, then those of the likeliest tokens."""
        logprobs = {token_id: Logprob(score.logprob, score.rank, self._decoded(token_id))}
        for rank, (top_id, logprob) in enumerate(zip(score.top_token_ids, score.top_logprobs, strict=True), start=1):
            if top_id != token_id:
                logprobs[top_id] = Logprob(logprob, rank, self._decoded(top_id))
        return logprobs

    def _decoded(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.text_of(token_id)

    def _measure(self, output: SequenceOutput) -> None:
        metrics, now = self.output.metrics, time.monotonic()
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = output.first_scheduled_time
        if output.new_token_ids:
            metrics.first_token_time = metrics.first_token_time or now
            metrics.last_token_time = now
        if self.output.finished:
            metrics.finished_time = now
        before, self._seen[output.index] = self._seen[output.index], output
        metrics.num_preemptions += output.num_preemptions - before.num_preemptions
        metrics.num_draft_tokens += output.num_draft_tokens - before.num_draft_tokens
        metrics.num_accepted_tokens += output.num_accepted_tokens - before.num_accepted_tokens
        if output.index == 0:
            metrics.num_cached_tokens = output.num_cached_tokens
