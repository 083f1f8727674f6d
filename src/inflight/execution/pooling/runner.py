"""`PoolingRunner`: texts in, numbers out. Loads a model for pooling, and puts its body and its head together."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from inflight.contracts.cache_layout import ALL_TOKENS
from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import ModelError
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.pooling import NORMALIZE, PooledText, PoolingPlan, Values
from inflight.execution.hf.load import ModelSource, dtype_of_checkpoint, load_model, own_tensors
from inflight.execution.kernels import kernels_in_use
from inflight.execution.mapped_memory import give_back_freed_memory, let_go_of_file_pages
from inflight.execution.pooling.body import Body
from inflight.execution.pooling.dense_files import read_dense
from inflight.execution.pooling.heads import AnswerHead, ClassificationHead, EmbeddingHead, Head
from inflight.execution.pooling.poolers import check_modes
from inflight.execution.pooling.step_prefixes import StepPrefixes
from inflight.execution.preparation.agreement import precision_of
from inflight.execution.preparation.attention_calls import num_embeddings
from inflight.execution.preparation.describe import describe_calls
from inflight.execution.preparation.proof import draw_prompts
from inflight.execution.threads import ComputeThreads, torch_alone
from inflight.execution.weights.inventory import stored_weights


class PoolingRunner:
    """A model that was loaded and proved, with its head.

    Raises:
        ModelError: it cannot be loaded, or does not run as a packed row.

    Attributes:
        plan: with the number of values that a text gets.
        shares_prefixes: whether what several texts of a step begin with is computed once.
        info: what was found out about the model.
    """

    def __init__(self, source: ModelSource, config: EngineConfig, plan: PoolingPlan) -> None:
        _refuse_options(config)
        check_modes(plan.modes)
        self._threads = ComputeThreads(config.num_threads)
        with torch_alone():
            self._load(source, config, plan)

    def _load(self, source: ModelSource, config: EngineConfig, plan: PoolingPlan) -> None:
        classifies = plan.task != "embed" and plan.answers is None
        auto_class = _auto_class(plan)
        spare = ("pooler.",) if plan.task == "embed" else ()
        model = load_model(source, config, auto_class=auto_class, spare=spare)
        if isinstance(source, PreTrainedModel) and plan.task == "embed":
            model = model.base_model
        dtype, num_parameters = model.dtype, sum(each.numel() for each in model.parameters())
        is_loaded_here = model.device.type == "cpu" and not isinstance(source, PreTrainedModel)
        expected = _plain_logits(model) if classifies else None
        body_model = model.base_model
        self._head = _head(model, source, config, plan)
        if getattr(body_model, "pooler", None) is not None:
            body_model.pooler = None  # the head has it
        self._body = Body(body_model, config, let_go_of_file_pages if is_loaded_here else None)
        if is_loaded_here:
            own_tensors(body_model)
            give_back_freed_memory()
        if expected is not None:
            self._check_head(*expected)
        self.shares_prefixes = self._needs_last_token_only() and self._body.share_prefixes()
        num_values = len(self.run([PooledText([0])])[0])
        limits = [each for each in (self._body.report.max_tokens, plan.max_tokens) if each is not None]
        self.plan = replace(plan, num_values=num_values, max_tokens=min(limits))
        self.info = self._describe(type(model).__name__, num_parameters, dtype, config)

    @torch.inference_mode()
    def run(self, texts: Sequence[PooledText]) -> list[Values]:
        """The numbers of each text; all of them run in one row.

        Args:
            texts: at least one, of at least one token each, none longer than the plan's `max_tokens`.
        """
        if self._body.model.device.type == "cpu":
            self._threads.prepare(are_own=not self._body.needs_torch_threads)
        states = self._body.run(texts)
        torch.set_num_threads(1)  # of torch: what a head does with a text is too little work to wait for others
        try:
            numbers = [self._numbers(text, own) for text, own in zip(texts, states, strict=True)]
        finally:
            torch.set_num_threads(self._threads.number)
        return [array("f", each.float().cpu().numpy().tobytes()) for each in numbers]

    def prefixes(self) -> StepPrefixes:
        """Where the texts of a step will lie, and how many of their tokens will be computed."""
        return self._body.prefixes()

    def _numbers(self, text: PooledText, states: torch.Tensor) -> torch.Tensor:
        """What the head gives. Where texts share prefixes it sees the last token only, so that a text's bits do not
        depend on how much of it was computed for another one."""
        if self.prefixes().can_share(text):
            return self._head(PooledText(text.token_ids[-1:]), states[-1:])
        return self._head(text, states)

    @torch.inference_mode()
    def _needs_last_token_only(self) -> bool:
        """Whether the head gives the same for a text's last token as for all of it."""
        prompts = draw_prompts(num_embeddings(self._body.model), [9, 14])
        for text in (PooledText(list(prompt)) for prompt in prompts):
            (states,) = self._body.run([text])
            whole, last = self._head(text, states), self._head(PooledText(text.token_ids[-1:]), states[-1:])
            if _error(last, whole) > precision_of(self._body.model).logits:
                return False
        return True

    @torch.inference_mode()
    def _check_head(self, prompt: Sequence[int], expected: torch.Tensor) -> None:
        """Raise `ModelError` unless body and head together give what the whole model gave."""
        text = PooledText(list(prompt))
        tolerance = max(10 * precision_of(self._body.model).logits, 1e-4)
        (states,) = self._body.run([text])
        given = self._head(text, states)
        error = _error(given, expected)
        if not error <= tolerance:
            raise ModelError(
                f"the head of {type(self._body.model).__name__} does not give the plain model's results: they differ "
                f"by {error:.1e} of their size ({tolerance:.0e} is allowed)"
            )

    def _describe(self, name: str, num_parameters: int, dtype: torch.dtype, config: EngineConfig) -> ModelInfo:
        report, model = self._body.report, self._body.model
        return ModelInfo(
            model_class=name,
            num_parameters=num_parameters,
            checkpoint_dtype=str(dtype_of_checkpoint(model.config)).removeprefix("torch."),
            dtype=str(dtype).removeprefix("torch."),
            device=str(model.device),
            executor="packed",
            proved_on=report.proved_on,
            attention_backend=report.attention_backend,
            quantization=None,
            attention_calls=describe_calls(report.specs),
            logits_error=report.states_error,
            attention_error=report.attention_error,
            is_batch_invariant=report.is_batch_invariant,
            vocab_size=num_embeddings(model),
            max_model_len=self.plan.max_tokens or report.max_tokens,
            recompute_beyond=None,
            can_share_prefixes=self.shares_prefixes,
            block_size=config.block_size,
            num_blocks=0,
            cache_groups=(ALL_TOKENS,),
            max_cached_len=self.plan.max_tokens or report.max_tokens,
            kv_bytes_per_token=0,
            kv_bytes_per_lasting_token=0,
            eos_token_ids=(),
            notes=report.notes,
            weights=stored_weights(model),
            is_recorded=report.is_recorded,
            num_threads=self._threads.number,
            kernels=kernels_in_use() if model.device.type == "cpu" else None,
            pooling=self.plan,
        )


def _error(given: torch.Tensor, expected: torch.Tensor) -> float:
    """How much numbers differ from others, relative to these."""
    return float((given - expected).norm() / expected.norm().clamp_min(1e-6))


def _auto_class(plan: PoolingPlan) -> type[Any]:
    """What finds the model's class in `transformers`."""
    found: type[Any] = AutoModel
    if plan.task != "embed":
        found = AutoModelForSequenceClassification if plan.answers is None else AutoModelForCausalLM
    return found


def _head(model: PreTrainedModel, source: ModelSource, config: EngineConfig, plan: PoolingPlan) -> Head:
    if plan.answers is not None:
        return AnswerHead(model.get_output_embeddings().weight, plan.answers)
    if plan.task != "embed":
        return ClassificationHead(model)
    folders = [layer for layer in plan.layers if layer != NORMALIZE]
    return EmbeddingHead(plan, read_dense(str(source), folders, config.revision) if folders else {})


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel) -> tuple[Sequence[int], torch.Tensor]:
    """A prompt, and the numbers that the whole model gives it."""
    (prompt,) = draw_prompts(num_embeddings(model), [9])
    tokens = torch.tensor([list(prompt)], device=model.device)
    return prompt, model(input_ids=tokens, return_dict=True).logits[0].float()


def _refuse_options(config: EngineConfig) -> None:
    """Raise `ModelError` for options that a model that pools knows nothing of."""
    usual = EngineConfig()
    for name in (
        "quantization",
        "kv_cache_dtype",
        "tensor_parallel_size",
        "draft_model",
        "prefix_cache_dir",
        "adapters",
    ):
        if (given := getattr(config, name)) != getattr(usual, name):
            raise ModelError(f"{name} is {given!r}; that is for models that generate, and this one pools")
    if config.executor not in ("auto", "packed"):
        raise ModelError(f"executor is {config.executor!r}; a model that pools runs packed")
