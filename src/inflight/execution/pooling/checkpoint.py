"""`pooling_plan`: reads from a checkpoint's files whether and how it pools.

`modules.json` decides, as for `sentence-transformers`; without it, the name of the architecture does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.contracts.api.pooling import NORMALIZE, PoolingPlan, PoolingTask
from inflight.execution.hf.source import read_config
from inflight.gguf.find import find_gguf
from inflight.gguf.header import GgufHeader

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CLASSIFIES = "ForSequenceClassification"
EMBEDS = ("Model", "EncoderModel", "ForMaskedLM", "ForPreTraining")
"""Name endings of architectures that do not generate."""
LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
GGUF_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}
"""The values of `pooling_type` in llama.cpp."""
LIMIT_OF_TOKENIZERS = 2**20
"""A tokenizer's limit above this is none."""


def pooling_plan(
    source: str | os.PathLike[str] | PreTrainedModel, config: EngineConfig, tokenizer: PreTrainedTokenizerBase | None
) -> PoolingPlan | None:
    """A model's pooling plan; None: it generates. Raises `ModelError` if its files have unsupported settings, or it
    cannot do the `task`.

    Args:
        source: a folder, a hub id, or a loaded model.
    """
    if config.task == "generate":
        return None
    if not isinstance(source, str | os.PathLike):
        return _plan_of(type(source).__name__, source.config, None, config, tokenizer)
    if (gguf := find_gguf(source, config.revision)) is not None:
        header = GgufHeader.read(gguf)
        mode = GGUF_MODES.get(header.metadata.get(f"{header.architecture}.pooling_type", 0))
        if config.task == "auto" and mode is None:  # first, because reading its configuration is slow
            return None
        return _plan_of_gguf(mode, read_config(source, config), config, tokenizer)
    model_config = read_config(source, config)
    files = _Files(os.fspath(source), config.revision)
    modules = files.read("modules.json")
    return _plan_of(
        _architecture(model_config), model_config, None if modules is None else (files, modules), config, tokenizer
    )


def _plan_of_gguf(
    mode: str | None, model_config: PreTrainedConfig, config: EngineConfig, tokenizer: PreTrainedTokenizerBase | None
) -> PoolingPlan | None:
    """The pooling plan of a GGUF file: its `mode`, with normalised vectors, as in llama.cpp."""
    if config.task == "classify":
        raise ModelError("task is 'classify'; a GGUF file has no head for that")
    wanted = config.replace(task="embed") if config.task == "auto" else config
    plan = _plan_of(_architecture(model_config), model_config, None, wanted, tokenizer)
    if plan is None or plan.task != "embed":
        return plan
    return replace(plan, modes=(mode or "mean",), layers=(NORMALIZE,))


def _architecture(model_config: PreTrainedConfig) -> str:
    names = getattr(model_config, "architectures", None) or [""]
    return str(names[0])


class _Files:
    """The JSON files of a folder or a repository."""

    def __init__(self, source: str, revision: str | None) -> None:
        self._name = os.path.expanduser(source)
        self._revision = revision

    def read(self, name: str) -> Any:
        """A file's content; None: there is no such file. Raises `ModelError` if it is no JSON."""
        from transformers.utils import cached_file

        path = cached_file(
            self._name,
            name,
            revision=self._revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is None:
            return None
        try:
            return json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{name} of {self._name!r} cannot be read: {error}") from error


def _plan_of(
    architecture: str,
    model_config: PreTrainedConfig,
    modules: tuple[_Files, Any] | None,
    config: EngineConfig,
    tokenizer: PreTrainedTokenizerBase | None,
) -> PoolingPlan | None:
    task = config.task
    if task == "auto":
        if architecture.endswith(CLASSIFIES):
            task = "classify"
        elif modules is not None or (architecture.endswith(EMBEDS) and not _generates(architecture)):
            task = "embed"
        else:
            return None
    limit = None if tokenizer is None else tokenizer.model_max_length
    longest = limit if limit is not None and limit < LIMIT_OF_TOKENIZERS else None
    if task == "embed":
        plan = PoolingPlan("embed", max_tokens=longest)
        return plan if modules is None else _embedding_plan(plan, *modules)
    if task == "rerank" and not architecture.endswith(CLASSIFIES):
        return PoolingPlan("rerank", max_tokens=longest, activation="sigmoid", answers=_answers(tokenizer))
    if not architecture.endswith(CLASSIFIES):
        raise ModelError(f"task is 'classify', but the checkpoint's architecture is {architecture or 'not known'}")
    names = model_config.id2label or {}
    labels = tuple(str(names[number]) for number in sorted(names))
    if task == "rerank" and len(labels) != 1:
        raise ModelError(f"task is 'rerank', but the checkpoint has {len(labels)} labels; a score needs one")
    kind: PoolingTask = "rerank" if task == "rerank" else "classify"
    return PoolingPlan(kind, max_tokens=longest, labels=labels, activation=_activation(model_config, len(labels)))


def _generates(architecture: str) -> bool:
    """Whether `transformers` has this class for models that write text; some of them are called Model, too."""
    from transformers.models.auto import modeling_auto as auto

    names = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    )
    return any(architecture in each.values() for each in names)


def _embedding_plan(plan: PoolingPlan, files: _Files, modules: Any) -> PoolingPlan:
    """Extend `plan` by the files of `sentence-transformers`."""
    modes: tuple[str, ...] | None = None
    includes_prompt, layers = True, []
    for module in modules:
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind == "Transformer":
            if path:
                raise ModelError(f"modules.json has the model in {path!r}; it must be in the checkpoint's own folder")
        elif kind == "Pooling":
            pooling = files.read(f"{path}/config.json") or {}
            modes, includes_prompt = _modes(pooling), bool(pooling.get("include_prompt", True))
        elif kind == "Dense":
            layers.append(path)
        elif kind == "Normalize":
            layers.append(NORMALIZE)
        elif kind != "Dropout":  # which has an effect only in training
            raise ModelError(f"modules.json has a module of type {kind!r}, which inflight does not know")
    if modes is None:
        raise ModelError("modules.json has no Pooling; only embeddings of whole texts are supported")
    own, prompts = files.read("sentence_bert_config.json") or {}, files.read("config_sentence_transformers.json") or {}
    given = prompts.get("prompts") or {}
    longest = own.get("max_seq_length") or plan.max_tokens
    return PoolingPlan(
        task="embed",
        modes=modes,
        includes_prompt=includes_prompt,
        layers=tuple(layers),
        max_tokens=longest,
        lowers=bool(own.get("do_lower_case")),
        prompts={str(name): str(prompt) for name, prompt in given.items() if prompt is not None},
        default_prompt=prompts.get("default_prompt_name"),
        similarity=str(prompts.get("similarity_fn_name") or "cosine"),
    )


def _modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    mode = config.get("pooling_mode")
    if mode is None:
        return tuple(name for key, name in LEGACY_MODES.items() if config.get(key)) or ("mean",)
    return (mode,) if isinstance(mode, str) else tuple(mode)


def _activation(config: PreTrainedConfig, num_labels: int) -> Any:
    """A classification's activation: from a `CrossEncoder`'s configuration, else as in `transformers`' pipelines."""
    named = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if named is not None:
        known = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
        if (name := str(named).rpartition(".")[2]) not in known:
            raise ModelError(f"the checkpoint's activation is {named!r}; it may be Sigmoid, Identity or Softmax")
        return known[name]
    if getattr(config, "problem_type", None) == "regression" and num_labels > 1:
        return "none"
    is_multiple = getattr(config, "problem_type", None) == "multi_label_classification"
    return "sigmoid" if num_labels == 1 or is_multiple else "softmax"


def _answers(tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, int]:
    """The token ids of "no" and "yes"."""
    if tokenizer is None:
        raise ModelError("task is 'rerank', which needs the model's tokenizer")
    no, yes = (tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes"))
    if no is None or yes is None or no == yes:
        raise ModelError('task is "rerank", but the tokenizer has no tokens "yes" and "no"')
    return no, yes
