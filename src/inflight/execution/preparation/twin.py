"""A model's twin: small, in float32, of the same class and configuration but for sizes, and sensitive to its context.

What cannot be proved on the model itself, because its precision hides it or it is too large, is proved on the twin.
Decides what is made smaller: the number of layers, as long as there is one of each kind; the vocabulary; the number of
experts; and the width, by fewer heads of the same size. A class that does not allow one of these keeps what it has.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TypeAlias

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from inflight.contracts.errors import ModelError
from inflight.execution.hf.load import ONE_AT_A_TIME
from inflight.execution.preparation.proof import NotCausalError, PlainModel

VOCAB_SIZE = 512
MIN_LAYERS = 2
MAX_HEADS = 4
"""In two groups, if heads share keys and values."""
MIN_WIDTH = 64
WIDTHS, NO_WIDTHS = ("hidden", "embd", "embed", "model", "dim"), ("head_dim", "max_position_embeddings")
"""What the names of numbers contain that are as wide as the hidden state, or times as wide; and some that are not."""
MAX_EXPERTS = 16
MAX_PARAMETERS = 1_000_000_000
FACTORS = (1.0, 4.0, 8.0, 16.0)
"""What matrices are multiplied with until the context matters."""
ENOUGH = 1e-2
SLOW = -4.0
"""The bias of a state space's time steps; some begin with one that lets them forget at once."""


def make_twin(model: PreTrainedModel) -> PlainModel:
    """A twin, and what it gives, with its effect.

    Raises:
        ModelError: none can be made; as `NotCausalError` if the model is no causal language model.
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
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), torch.device("meta"):
        size = sum(weight.numel() for weight in type(model)(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise ModelError(f"it has {size} parameters")
    for factor in FACTORS:
        with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            twin = type(model)._from_config(copy.deepcopy(config), dtype=torch.float32).eval().requires_grad_(False)
        twin.to(model.device)
        tables = [module.weight for module in twin.modules() if isinstance(module, torch.nn.Embedding)]
        for name, weight in twin.named_parameters():
            if weight.dim() >= 2 and not any(weight is table for table in tables):
                weight.mul_(factor)
            elif name.endswith("dt_bias"):
                weight.fill_(SLOW)
        plain = PlainModel.of(twin).with_effect()
        if plain.effect is not None and plain.effect >= ENOUGH:
            return plain
        del twin, tables, weight, plain  # before the next one is made
    raise ModelError("its context does not matter")


# ------------------------------------------------------------------------------------------- what is cut

Cut: TypeAlias = Callable[[PreTrainedConfig, PreTrainedModel], None]
"""Makes something smaller in a configuration of a model."""


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
    """None as well if each layer has its own, which cannot be asked for."""
    try:
        value = getattr(config, name)
    except Exception:
        return None
    return value if isinstance(value, int) else None


def _fewer_layers(config: PreTrainedConfig, model: PreTrainedModel, of_each_kind: int = 1) -> None:
    """So few of the first ones as have so many of each kind; of those that share keys and values once more as many."""
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
    """How many of the first layers have so many of each kind: by the modules they are made of, and by their type."""
    config = model.config.get_text_config()
    kinds: list[object] = list(getattr(config, "layer_types", None) or [None] * config.num_hidden_layers)
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == len(kinds):
            kinds = [(kind, frozenset(map(type, layer.modules()))) for kind, layer in zip(kinds, module, strict=True)]
    wanted = Counter({kind: min(of_each_kind, count) for kind, count in Counter(kinds).items()})
    return next((n for n in range(MIN_LAYERS, len(kinds) + 1) if wanted <= Counter(kinds[:n])), MIN_LAYERS)


def _layers_in_pairs(config: PreTrainedConfig, model: PreTrainedModel) -> None:
    """Of classes whose layers share weights with others of their kind."""
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
    """Fewer heads of the same size, two groups of them at least if there are groups, and all else narrower by as much.
    Of a state space without heads only the width is cut."""
    width, head_size = _number(config, "hidden_size"), _number(config, "head_dim")
    num_heads = _number(config, "num_attention_heads") or _number(config, "num_heads")
    if width is None:  # of a configuration around the text model's
        return
    if num_heads is None:
        num_heads = num_groups = width
        left = groups_left = min(width, 2 * MIN_WIDTH)
    else:
        num_groups = _number(config, "num_key_value_heads") or num_heads
        groups_left = min(num_groups, MAX_HEADS if num_groups == num_heads else 2)
        left = groups_left * min(num_heads // num_groups, MAX_HEADS // groups_left)
    # Whether heads are no parts of the width, or of several. (In a state space: of what it is expanded to.)
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


CUTS: tuple[Cut, ...] = (_fewer_layers, _fewer_words, _fewer_experts, _narrower)
CHOICES_OF_CUTS = (CUTS, (_layers_in_pairs, *CUTS[1:]), *combinations(CUTS, len(CUTS) - 1), CUTS[:2], CUTS[:1], ())
"""All that a class may allow, the smallest first."""
