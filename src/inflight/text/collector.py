"""`Collector`: what the engine says about one request, collected into its `RequestOutput` with text.

Runs in the caller's process. Knows tokens and texts, nothing of steps or of other requests.
"""

import time
from dataclasses import replace

from inflight.outputs import CompletionOutput, RequestMetrics, RequestOutput, SequenceOutput, TextDelta
from inflight.params import SamplingParams
from inflight.text.output_text import OutputText
from inflight.text.tokenizer import Tokenizer


class Collector:
    """One request's output as it grows.

    Args:
        prompt: the prompt's text, if text was given.
        prompt_index: its place among the prompts of one call.
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
        metrics = RequestMetrics(arrival_time=time.monotonic())
        self.output = RequestOutput(request_id, prompt, prompt_token_ids, completions, metrics)
        self._prompt_index = prompt_index
        self._texts: list[OutputText] = []
        if tokenizer is not None:
            self._texts = [OutputText.of_request(tokenizer, prompt_token_ids, params) for _ in completions]
        self._num_preemptions = [0] * params.n

    def take_in(self, news: SequenceOutput) -> TextDelta:
        """Add what one step gave one of the request's sequences; returns what is new for a reader."""
        completion = self.output.outputs[news.index]
        completion.token_ids += news.new_token_ids
        delta = ""
        if self._texts:
            text = self._texts[news.index]
            delta = text.take_in(news.new_token_ids, news.finish_reason, news.stop_reason)
            if news.finish_reason is not None:
                completion.text = text.text
        completion.finish_reason, completion.stop_reason = news.finish_reason, news.stop_reason
        self.output.error = self.output.error or news.error
        self.output.finished = all(other.finish_reason is not None for other in self.output.outputs)
        self._measure(news)
        return TextDelta(
            prompt_index=self._prompt_index,
            index=news.index,
            text=delta,
            token_ids=news.new_token_ids,
            finish_reason=news.finish_reason,
            output=self.output if self.output.finished else None,
        )

    def snapshot(self) -> RequestOutput:
        """All that there is so far, with its text; what comes later leaves it as it is."""
        outputs = [
            replace(each, token_ids=each.token_ids.copy(), text=self._texts[each.index].text if self._texts else "")
            for each in self.output.outputs
        ]
        return replace(self.output, outputs=outputs, metrics=replace(self.output.metrics))

    def _measure(self, news: SequenceOutput) -> None:
        metrics, now = self.output.metrics, time.monotonic()
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = news.first_scheduled_time
        if news.new_token_ids:
            metrics.first_token_time = metrics.first_token_time or now
            metrics.last_token_time = now
        if self.output.finished:
            metrics.finished_time = now
        self._num_preemptions[news.index] = news.num_preemptions
        metrics.num_preemptions = sum(self._num_preemptions)
        if news.index == 0:
            metrics.num_cached_tokens = news.num_cached_tokens
