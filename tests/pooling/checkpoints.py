"""Tiny checkpoints of models that pool, sensitive by construction (see `tests.zoo`), with tokenizers of words.

A family is a class of models whose attention or positions differ from the others': each of them would be wrong in its
own way if a mask, a window or a position were.
"""

import json
from array import array
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.params import DEFAULT_PARAMS
from inflight.contracts.api.pooling import PooledText, PoolingPlan, Values
from inflight.engine.engine import Engine

VOCAB_SIZE = 256
MAX_POSITIONS = 160
FACTOR = 6
"""What matrices are multiplied by, so that the context matters."""
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "cls_token_id": None, "sep_token_id": None}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"pad_token_id": 0}),
    "roberta": ("roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("xlm-roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "modernbert": ("modernbert", {"local_attention": 16, "global_attn_every_n_layers": 2, "pad_token_id": 0, **NO_IDS}),
    "gemma3, bidirectional": (
        "gemma3_text",
        {"use_bidirectional_attention": True, "sliding_window": 12, "layer_types": None, "pad_token_id": 0, **GROUPED},
    ),
    "qwen3": ("qwen3", {"pad_token_id": 0, **GROUPED}),
    "llama": ("llama", {"pad_token_id": 0, **GROUPED}),
    "gpt2": ("gpt2", {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}),
}
CLASSIFIERS = ("bert", "roberta", "xlm-roberta", "modernbert", "modernbert, mean", "qwen3", "llama")


def make_model(family: str, auto_class: type[Any] = AutoModel, **changes: Any) -> PreTrainedModel:
    name, _, pooling = family.partition(", mean")
    del pooling
    model_type, options = FAMILIES[name]
    if family.endswith(", mean"):
        changes = {"classifier_pooling": "mean", **changes}
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": MAX_POSITIONS,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **{**common, **options, **changes})
        model = auto_class.from_config(config).eval().requires_grad_(False)
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "embed" not in name:
                weight.mul_(FACTOR)
            elif "bias" in name:
                weight.normal_(std=0.1)
    return model


def draw_ids(*lengths: int, low: int = 8) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(low, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "yes", "no"]


def make_tokenizer(family: str = "bert") -> PreTrainedTokenizerFast:
    """One token for each word "w8" to "w255". Encoders have [CLS] and [SEP], and pairs of types; causal models end with
    [SEP], as Qwen3-Embedding does."""
    vocabulary = {word: number for number, word in enumerate(SPECIAL)}
    vocabulary |= {f"w{number}": number for number in range(len(SPECIAL), VOCAB_SIZE)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ids = [("[CLS]", 2), ("[SEP]", 3)]
    if family in ("qwen3", "llama", "gpt2"):
        single, pair = "$A [SEP]", "$A $B [SEP]"
    else:
        single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
    inner.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if family == "bert" else [])]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=names,
    )


def words(*lengths: int) -> list[str]:
    return [" ".join(f"w{number}" for number in ids) for ids in draw_ids(*lengths)]


def save(model: PreTrainedModel, folder: Path, family: str, **modules: Any) -> str:
    """A checkpoint's folder with a tokenizer, and with the folders of `sentence-transformers` if `modules` are given
    (see `write_modules`)."""
    model.save_pretrained(folder)
    make_tokenizer(family).save_pretrained(folder)
    if modules:
        write_modules(folder, **modules)
    return str(folder)


def write_modules(
    folder: Path,
    *,
    pooling: dict[str, Any],
    dense: tuple[dict[str, Any], ...] = (),
    normalize: bool = True,
    prompts: dict[str, str] | None = None,
    own: dict[str, Any] | None = None,
) -> None:
    """What `sentence-transformers` writes beside a model."""
    kinds: list[tuple[str, str]] = [("Transformer", ""), ("Pooling", "1_Pooling")]
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, **pooling})
    for number, config in enumerate(dense, 2):
        path = folder / f"{number}_Dense"
        _write(path / "config.json", config)
        sizes = config["in_features"], config["out_features"]
        generator = torch.Generator().manual_seed(number)
        weight = torch.randn(sizes[1], sizes[0], generator=generator)
        state = {"linear.weight": weight}
        if config["bias"]:
            state["linear.bias"] = torch.randn(sizes[1], generator=generator)
        save_file(state, path / "model.safetensors")
        kinds.append(("Dense", path.name))
    if normalize:
        kinds.append(("Normalize", f"{len(kinds)}_Normalize"))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds)
    ]
    _write(folder / "modules.json", modules)
    _write(folder / "config_sentence_transformers.json", {"prompts": prompts or {}, "default_prompt_name": None})
    _write(folder / "sentence_bert_config.json", own or {"max_seq_length": 128, "do_lower_case": False})


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def causal_model(family: str, **changes: Any) -> PreTrainedModel:
    return make_model(family, AutoModelForCausalLM, **changes)


def classifier(family: str, num_labels: int, **changes: Any) -> PreTrainedModel:
    return make_model(family, AutoModelForSequenceClassification, num_labels=num_labels, **changes)


class TextRunner:
    """Runs texts on an engine of a model that pools, as a plan says."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig, plan: PoolingPlan) -> None:
        with mock.patch("inflight.engine.engine.pooling_plan", return_value=plan):
            self.engine = Engine(model, config)
        self.info = self.engine.model_info
        self._numbers = count()

    def submit(self, *texts: PooledText) -> list[str]:
        """Queue texts; returns the ids of their requests."""
        names = [str(next(self._numbers)) for _ in texts]
        for name, text in zip(names, texts, strict=True):
            self.engine.submit(self.engine.inputs.accept(name, [], DEFAULT_PARAMS, text=text))
        return names

    def run(self, texts: Sequence[PooledText]) -> list[Values]:
        """The numbers of texts that are queued together."""
        names, values = self.submit(*texts), {}
        while self.engine.has_unfinished_requests:
            for output in self.engine.step():
                assert output.error is None
                assert output.finish_reason == "stop"
                assert output.values is not None
                values[output.request_id] = array("f", output.values)
        return [values[name] for name in names]
