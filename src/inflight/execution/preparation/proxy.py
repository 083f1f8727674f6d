"""A model's proxy: a small float32 model of the same class and configuration, except for sizes, and with random weights
that make it sensitive to its context.

It replaces a model that is too large for a proof, or whose precision would hide errors. It has fewer layers, at least
one of each kind; a smaller vocabulary; fewer experts; less width, by fewer heads of the same size; and encoders of one
layer. Cuts that the class does not allow are skipped.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import TypeAlias

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.execution.hf.load import ONE_AT_A_TIME
from inflight.execution.preparation.proof import NotCausalError, PlainModel

VOCAB_SIZE = 512
MIN_LAYERS = 2
MAX_HEADS = 4
"""In two groups, if several heads share keys and values."""
MIN_WIDTH = 64
WIDTHS, NO_WIDTHS = ("hidden", "embd", "embed", "model", "dim"), ("head_dim", "max_position_embeddings")
"""Words in the names of sizes that scale with the hidden size; and exceptions."""
OUTPUT_WIDTHS = ("out_hidden_size", "text_hidden_size")
"""Sizes of an encoder that equal the text model's hidden size."""
MAX_EXPERTS = 16
MAX_PARAMETERS = 1_000_000_000
FACTORS = (1.0, 4.0, 8.0, 16.0)
"""Matrices are scaled by the first of these factors with which the context matters."""
ENOUGH = 1e-2
"""The effect of the context, as a relative error of logits, that a proxy must have."""
SLOW = -4.0
"""The bias of a state space's time steps. With the initial one, some forget everything at once."""


def make_proxy(model: PreTrainedModel) -> PlainModel:
    """The reference results of a proxy of `model`, with their effect.

    Raises:
        NotCausalError: the model is not a causal language model.
        ModelError: no proxy can be made.
    """
    reasons = []
    for cuts in CHOICES_OF_CUTS:
        try:
            return _sensitive(model, _smaller(model, cuts))
        except NotCausalError:
            raise
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    raise ModelError(f"no small float32 copy of {type(model).__name__} can be made to prove it on ({reasons[0]})")


def _sensitive(model: PreTrainedModel, config: PreTrainedConfig) -> PlainModel:
    for factor in FACTORS:
        plain = PlainModel.run(_drawn(model, config, factor)).with_effect()
        if plain.effect is not None and plain.effect >= ENOUGH:
            return plain
        del plain  # before the next one is made
    raise ModelError("its context does not matter")


def _drawn(model: PreTrainedModel, config: PreTrainedConfig, factor: float) -> PreTrainedModel:
    """A model of this configuration, with matrices scaled by `factor`."""
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), torch.device("meta"):
        size = sum(weight.numel() for weight in type(model)(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise ModelError(f"it has {size} parameters")
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        proxy = type(model)._from_config(copy.deepcopy(config), dtype=torch.float32).eval().requires_grad_(False)
    proxy.to(model.device)
    tables = [module.weight for module in proxy.modules() if isinstance(module, torch.nn.Embedding)]
    for name, weight in proxy.named_parameters():
        if weight.dim() >= 2 and not any(weight is table for table in tables):
            weight.mul_(factor)
        elif name.endswith("dt_bias"):
            weight.fill_(SLOW)
    return proxy


# ------------------------------------------------------------------------------------------- what is cut

Cut: TypeAlias = Callable[[PreTrainedConfig, PreTrainedModel], None]
"""Reduces some sizes in a configuration, in place, for a proxy of the model."""


def _smaller(model: PreTrainedModel, cuts: Sequence[Cut]) -> PreTrainedConfig:
    config = copy.deepcopy(model.config)
    parts = {id(part): part for part in (config, config.get_text_config())}
    for cut in cuts:
        for part in parts.values():
            cut(part, model)
    return config


def _integers(config: PreTrainedConfig) -> list[tuple[str, int]]:
    return [(name, value) for name, value in vars(config).items() if type(value) is int]


def _number(config: PreTrainedConfig, name: str) -> int | None:
    """A size in the configuration; None if it has none, or one per layer (which raises when read)."""
    try:
        value = getattr(config, name)
    except Exception:
        return None
    return value if isinstance(value, int) else None


def _fewer_layers(config: PreTrainedConfig, model: PreTrainedModel, of_each_kind: int = 1) -> None:
    """Keep the first layers, until there are `of_each_kind` of every kind. If some layers share the keys and values of
    others, keep twice as many, and let the second half share."""
    num_layers, left = model.config.get_text_config().num_hidden_layers, _num_first(model, of_each_kind)
    if getattr(config, "num_kv_shared_layers", None):
        config.num_kv_shared_layers, left = left, 2 * left
    for name, value in _integers(config):
        if ("layer" in name or "blocks" in name) and value == num_layers > left:
            setattr(config, name, left)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == num_layers:
            setattr(config, name, value[:left])


def _num_first(model: PreTrainedModel, of_each_kind: int) -> int:
    """The number of first layers that include `of_each_kind` of every kind, or all of a kind. A layer's kind is its
    type and the classes of its modules."""
    config = model.config.get_text_config()
    kinds: list[object] = list(getattr(config, "layer_types", None) or [None] * config.num_hidden_layers)
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == len(kinds):
            kinds = [(kind, frozenset(map(type, layer.modules()))) for kind, layer in zip(kinds, module, strict=True)]
    wanted = Counter({kind: min(of_each_kind, count) for kind, count in Counter(kinds).items()})
    return next((n for n in range(MIN_LAYERS, len(kinds) + 1) if wanted <= Counter(kinds[:n])), MIN_LAYERS)


def _layers_in_pairs(config: PreTrainedConfig, model: PreTrainedModel) -> None:
    """Keep two layers of each kind, for classes whose layers share weights within a kind."""
    _fewer_layers(config, model, of_each_kind=2)


def _fewer_words(config: PreTrainedConfig, model: PreTrainedModel) -> None:
    for name, value in _integers(config):
        if name.startswith("vocab_size"):
            setattr(config, name, min(value, VOCAB_SIZE))
        elif name.endswith("_token_id") and value >= VOCAB_SIZE:
            setattr(config, name, 0)
    if isinstance(ends := getattr(config, "eos_token_id", None), list):
        config.eos_token_id = [token_id for token_id in ends if token_id < VOCAB_SIZE] or [0]


def _fewer_experts(config: PreTrainedConfig, model: PreTrainedModel) -> None:
    for name, value in _integers(config):
        if "experts" in name and "tok" not in name:
            setattr(config, name, min(value, MAX_EXPERTS))


def _narrower(config: PreTrainedConfig, model: PreTrainedModel) -> None:
    """Keep fewer heads of the same size, in at least two groups if there are groups, and make everything else narrower
    by the same factor. In a state space without heads, only the width is cut."""
    width, head_size = _number(config, "hidden_size"), _number(config, "head_dim")
    num_heads = _number(config, "num_attention_heads") or _number(config, "num_heads")
    if width is None:  # a wrapper of the text model's configuration
        return
    if num_heads is None:
        num_heads = num_groups = width
        left = groups_left = min(width, 2 * MIN_WIDTH)
    else:
        num_groups = _number(config, "num_key_value_heads") or num_heads
        groups_left = min(num_groups, MAX_HEADS if num_groups == num_heads else 2)
        left = groups_left * min(num_heads // num_groups, MAX_HEADS // groups_left)
    # Whether the heads' size is independent of the width. (A state space splits its expanded width into heads.)
    is_free = head_size is not None and head_size * num_heads % width > 0 and hasattr(config, "num_attention_heads")
    new_width = min(width, max(MIN_WIDTH, left * (MIN_WIDTH if is_free else width // num_heads)))
    for name, value in _integers(config):
        counts_heads = "head" in name and not any(word in name for word in ("dim", "d_head", "size"))
        if counts_heads and value in (num_heads, num_groups):
            setattr(config, name, left if value == num_heads else groups_left)
        elif value % width == 0 and any(word in name for word in WIDTHS) and name not in NO_WIDTHS:
            setattr(config, name, value // width * new_width)
        elif any(word in name for word in ("intermediate", "ffn", "inner")):
            setattr(config, name, min(value, 2 * new_width))
        elif "mamba" in name and (counts_heads or "d_ssm" in name) and value * new_width % width == 0:
            setattr(config, name, value * new_width // width)
        elif "groups" in name:
            setattr(config, name, min(value, left))
    if isinstance(sizes := getattr(config, "intermediate_size", None), list):  # of each layer
        config.intermediate_size = [min(size, 2 * new_width) for size in sizes]


def _shallow_encoders(config: PreTrainedConfig, model: PreTrainedModel) -> None:
    """Keep one layer of what encodes images or sound, which a proof does not run."""
    width, text_config = _number(model.config.get_text_config(), "hidden_size"), config.get_text_config()
    for part in _parts(config):
        if part is text_config or config is text_config:
            continue
        for name, value in _integers(part):
            if name == "depth" or "layers" in name:
                setattr(part, name, min(value, 1))
            elif name in OUTPUT_WIDTHS and value == width:
                setattr(part, name, _number(text_config, "hidden_size"))


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The configurations within a configuration."""
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            yield part
            yield from _parts(part)


CUTS: tuple[Cut, ...] = (_fewer_layers, _fewer_words, _fewer_experts, _narrower, _shallow_encoders)
CHOICES_OF_CUTS = (CUTS, (_layers_in_pairs, *CUTS[1:]), *combinations(CUTS, len(CUTS) - 1), CUTS[:2], CUTS[:1], ())
"""Sets of cuts to try in turn; the smallest proxy first."""
