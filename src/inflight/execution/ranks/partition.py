"""Shards weights by the model's `tp_plan` in `transformers`.

A plan names modules and parameters, with "*" for numbers, and their sharding: *colwise* by outputs, *rowwise* by
inputs, *packed* for two matrices in one. All other weights are replicated. Modules whose outputs must be communicated
are wrapped (`layers`).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.execution.grouped.weight import watch_expansions
from inflight.execution.ranks.rank import GatheredLinear, Rank, SummedEmbedding, SummedLinear, SummedOutputs

BY_OUTPUTS = {"colwise": 1, "colwise_rep": 1, "colwise_gather_output": 1, "packed_colwise": 2, "embedding_rowwise": 1}
"""Number of matrices in one parameter."""
BY_INPUTS = {"rowwise": 1, "rowwise_rep": 1, "rowwise_split_input": 1, "packed_rowwise": 2}
PADDED = {"colwise_rep", "colwise_gather_output", "embedding_rowwise"}
"""Styles that may be padded with zeros: gathered outputs, and rows that are never looked up."""
WHOLE = {"moe_tp_experts", "all_reduce", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "replicate"}
"""Styles that shard nothing, or exist only for gradients."""
HEADS = re.compile(r"\.(q_proj|k_proj|v_proj|qkv_proj|query_key_value)$")


def divide(model: PreTrainedModel, rank: Rank, release: Callable[[torch.Tensor], None] | None = None) -> None:
    """Reduce `model`, which is exclusively ours, to this rank's shard of each weight, and add its collectives.

    Args:
        release: called with each sharded weight `[…]`, whole and of its dtype, after its shard is copied.

    Raises:
        ModelError: `transformers` has no plan for it, or its sizes do not allow it.
    """
    styles = dict(_styles(model))
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    inside = dict(model.named_modules(), **dict(model.named_parameters()))
    if not any(style not in WHOLE and inside[name] not in ends for name, style in styles.items()):
        raise ModelError(
            f"transformers has no tp_plan for the layers of {type(model).__name__}; no ranks can share them"
        )
    _check(model, styles, rank.size)
    with watch_expansions() as expanded:
        _divide(model, styles, rank, release or (lambda weight: None))
    if expanded:
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(expanded.items()))
        note = f"these weights have groups that {rank.size} ranks cannot divide, and are expanded: {kinds}"
        model.inflight_notes = (*getattr(model, "inflight_notes", ()), note)


def _divide(
    model: PreTrainedModel, styles: dict[str, str], rank: Rank, release: Callable[[torch.Tensor], None]
) -> None:
    """Shard weights by their styles, and add collectives; see `divide`. A weight of several modules is sharded once."""
    shared: list[tuple[nn.Parameter, str, nn.Parameter]] = []
    num_owners = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    for name, module in list(model.named_modules()):
        for own_name, parameter in module._parameters.items():
            style = styles.get(f"{name}.{own_name}") or styles.get(name)
            if parameter is None or style is None or style in WHOLE:
                continue
            way = "inputs" if style in BY_INPUTS else "outputs"
            own = next((own for whole, its_way, own in shared if whole is parameter and its_way == way), None)
            if own is None:
                own = _part(parameter, style, rank, f"{name}.{own_name}")
                if num_owners[id(parameter)] > 1:
                    shared.append((parameter, way, own))
            if own is not parameter:
                release(parameter)
            module._parameters[own_name] = own
        if name in styles:
            _add_collective(model, name, module, styles[name], rank)


def _styles(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """The plan's style for each module and parameter that it names."""
    plan = model.tp_plan or {}
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    for name in names:
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if (style := plan.get(pattern)) is not None:
            yield name, style


def _check(model: PreTrainedModel, styles: dict[str, str], size: int) -> None:
    """Raise `ModelError` if the model cannot be sharded, naming a property of the model rather than a weight."""
    unknown = set(styles.values()) - {*BY_OUTPUTS, *BY_INPUTS, *WHOLE}
    if unknown:
        raise ModelError(f"the tp_plan of {type(model).__name__} divides weights in unknown ways: {sorted(unknown)}")
    config: Any = model.config.get_text_config()
    if any(style == "colwise" and HEADS.search(name) for name, style in styles.items()):
        for attribute in ("num_attention_heads", "num_key_value_heads"):
            number = getattr(config, attribute, None)
            if isinstance(number, int) and number % size:
                words = attribute.removeprefix("num_").replace("key_value", "key/value").replace("_", " ")
                raise ModelError(f"tensor_parallel_size is {size}, but the model has {number} {words}")
    for name, style in styles.items():
        module = model.get_submodule(name) if style == "moe_tp_experts" else None
        if module is not None and (
            getattr(module, "has_bias", False) or getattr(module, "has_post_expert_norm", False)
        ):
            raise ModelError(f"the experts of {type(model).__name__} have more than weights, and cannot be divided")


def _part(parameter: nn.Parameter, style: str, rank: Rank, name: str) -> nn.Parameter:
    """A rank's shard of a weight; a row-parallel bias stays whole, and is added once (`SummedLinear`)."""
    if style in BY_INPUTS and parameter.dim() == 1:
        return parameter
    dim = parameter.dim() - 1 if style in BY_INPUTS else max(0, parameter.dim() - 2)
    num_packed = BY_INPUTS[style] if style in BY_INPUTS else BY_OUTPUTS[style]
    length = parameter.shape[dim]
    if style in PADDED and length % rank.size:
        return nn.Parameter(_padded_part(parameter.data, dim, rank), requires_grad=False)
    if length % (num_packed * rank.size):
        raise ModelError(f"tensor_parallel_size is {rank.size}, but {name} cannot be divided: it has {length} of them")
    parts = [each.chunk(rank.size, dim)[rank.number] for each in parameter.data.chunk(num_packed, dim)]
    own = parts[0].clone(memory_format=torch.contiguous_format) if num_packed == 1 else torch.cat(parts, dim)
    return nn.Parameter(own, requires_grad=False)


def _padded_part(weight: torch.Tensor, dim: int, rank: Rank) -> torch.Tensor:
    """This rank's shard of a weight `[…]` along `dim`, padded with zeros where the ranks do not divide the length
    evenly."""
    length = weight.shape[dim]
    number = -(-length // rank.size)
    first = min(rank.number * number, length)
    own = weight.narrow(dim, first, min(number, length - first))
    missing = list(own.shape)
    missing[dim] = number - own.shape[dim]
    return torch.cat([own, own.new_zeros(missing)], dim)


def _add_collective(model: PreTrainedModel, name: str, module: nn.Module, style: str, rank: Rank) -> None:
    """Wrap a module with its collective, if it needs one."""
    collective: nn.Module
    if style in ("moe_tp_experts", "all_reduce"):
        collective = SummedOutputs(module, rank)
    elif style == "embedding_rowwise":
        assert isinstance(module, nn.Embedding)
        collective = SummedEmbedding(module, rank)
    elif style in (*BY_OUTPUTS, *BY_INPUTS):
        if not isinstance(module, nn.Linear):
            raise ModelError(f"{name} is a {type(module).__name__}, which ranks cannot divide")
        num_outputs = module.out_features
        module.out_features, module.in_features = module.weight.shape
        if style in BY_INPUTS:
            bias = module.bias
            module.register_parameter("bias", None)
            collective = SummedLinear(module, rank, bias, splits=style != "rowwise")
        elif style in ("colwise_rep", "colwise_gather_output"):
            collective = GatheredLinear(module, rank, num_outputs)
        else:
            return
    else:
        return
    parent, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(parent), own_name, collective)
