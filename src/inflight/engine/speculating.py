"""Sets up an engine's speculation."""

from collections.abc import Callable
from math import inf

from inflight.contracts.api.config import MTP, EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.contracts.api.features import DRAFT_MODEL, DRAFTING, SPECULATION, Features
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.step.cache_layout import ALL_TOKENS
from inflight.execution.hf.source import check_source
from inflight.execution.model_runner import ModelRunner
from inflight.speculation import Constrained, DraftLayout, DraftModelProposer, Lookup, Speculation
from inflight.speculation.constrained import Grammars
from inflight.text.tokenizer import Tokenizer
from inflight.text.tokenizer_files import load_tokenizer


def speculation_of(
    config: EngineConfig, grammars: Callable[[], Grammars | None], proposer: DraftModelProposer | None
) -> Speculation:
    """The configured `Speculation`.

    Args:
        grammars: returns the grammars of the engine's sequences, once there are any.
        proposer: the draft model, if there is one.
    """
    lookup = Lookup() if config.speculation.method in ("auto", "lookup") else None
    asked = (lambda: None) if config.speculation.method == "draft" else grammars
    return Speculation(Constrained(asked, lookup), config.speculation.max_draft_tokens, proposer=proposer)


def describe_speculation(config: EngineConfig, info: ModelInfo) -> str:
    """What draft tokens, in words; or "off", and why although it is asked for."""
    if config.speculation.method == "off":
        return "off"
    if (reason := Features.from_info(info).why_not(SPECULATION)) is not None:
        return f"off: {reason}"
    draft = "the model's own MTP layer" if config.speculation.draft_model == MTP else "a draft model"
    if config.speculation.method == "draft":
        return draft
    if config.speculation.method != "auto":
        return config.speculation.method
    return "lookup and grammars" if config.speculation.draft_model is None else f"lookup, grammars and {draft}"


def check_draft(config: EngineConfig) -> None:
    """Raise `ModelError` if there is no draft model of the given name: before anything that takes long."""
    if config.speculation.draft_model not in (None, MTP):
        try:
            check_source(config.speculation.draft_model, config.replace(revision=None))
        except ModelError as error:
            raise ModelError(f"draft_model: {error}") from error


def load_draft(config: EngineConfig, model: ModelRunner, tokenizer: Tokenizer | None) -> DraftModelProposer | None:
    """Load the configured draft model, if there is one.

    Args:
        model: the target model; it has not run yet.
        tokenizer: its tokenizer.

    Raises:
        ModelError: it cannot be loaded, or cannot draft for this model.
    """
    if config.speculation.draft_model is None:
        return None
    info = model.info
    Features.from_info(info).require(DRAFT_MODEL)
    layout = DraftLayout(
        info.cache_groups.index(ALL_TOKENS),
        info.num_blocks,
        config.kv_cache.block_size,
        config.scheduling.max_num_seqs,
        config.speculation.max_draft_tokens,
    )
    max_len = int(min(info.max_model_len, info.recompute_beyond or inf))
    if config.speculation.draft_model == MTP:
        try:
            from inflight.execution.heads import HeadRunner
        except ImportError as error:
            raise ModelError("draft_model 'mtp' needs a newer version of transformers") from error
        head = HeadRunner(model, layout.group, layout.num_draft_blocks)
        return DraftModelProposer(
            head, layout, 1, config.scheduling.max_num_batched_tokens, max_len, info.vocab_size, keeps_drafts=False
        )
    draft_config = config.replace(
        draft_model=None,
        speculation="off",
        revision=None,
        max_model_len=None,
        kv_cache_memory=None,
        prefix_cache_dir=None,
        adapters=None,
        num_blocks=layout.num_draft_blocks,
    )
    _check_vocabulary(tokenizer, load_tokenizer(config.speculation.draft_model, None, draft_config))
    try:
        runner = ModelRunner(config.speculation.draft_model, draft_config)
    except ModelError as error:
        raise ModelError(f"draft_model: {error}") from error
    Features.from_info(runner.info).require_all({SPECULATION: True, DRAFTING: True})
    num_groups = len(runner.cache_layout.groups)
    if num_groups > 1:
        runner.recreate_cache(num_groups * layout.num_draft_blocks)
    max_len = int(min(max_len, runner.info.max_model_len, runner.info.recompute_beyond or inf))
    return DraftModelProposer(
        runner, layout, num_groups, config.scheduling.max_num_batched_tokens, max_len, info.vocab_size
    )


def _check_vocabulary(tokenizer: Tokenizer | None, of_draft: Tokenizer | None) -> None:
    """Raise `ModelError` if the draft model's token ids differ. Without tokenizers nothing is checked."""
    if tokenizer is None or of_draft is None:
        return
    token_ids, other_ids = tokenizer.inner.get_vocab(), of_draft.inner.get_vocab()
    if different := {token for token in token_ids.keys() & other_ids.keys() if token_ids[token] != other_ids[token]}:
        raise ModelError(f"draft_model has another tokenizer: it numbers {len(different)} tokens differently")
    if len(token_ids.keys() & other_ids.keys()) < len(token_ids) // 2:
        raise ModelError("draft_model has another tokenizer: most of the model's tokens are unknown to it")
