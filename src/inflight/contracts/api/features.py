"""`Features`: which options work together, and with which models. Every refusal of a combination is a row of
`REFUSALS`, from which the documents' table is generated.

A row is removed when its reason is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from inflight.contracts.api.errors import ModelError
from inflight.contracts.step.cache_layout import ALL_TOKENS

if TYPE_CHECKING:
    from inflight.contracts.api.model_info import ModelInfo

ADAPTERS, DRAFT_MODEL, PREFIX_STORE, RANKS = "adapters", "draft_model", "prefix_cache_dir", "tensor_parallel_size"
QUANTIZATION, CACHE_DTYPE, SPECULATION = "quantization", "kv_cache_dtype", "speculation"
OTHER_EXECUTORS, GPU, INSPECTION = "an executor other than packed", "a GPU", "a look into attention and cache"
DRAFTING, MULTIMODAL = "drafting for another model", "multimodal input"
"""Features, by the option that asks for each; the last five have no option."""


@dataclass(frozen=True, slots=True)
class Features:
    """The properties of a model that features depend on. Unknown ones refuse nothing.

    Attributes:
        executor: "packed", "rows", "sequential" or "generate".
        device: the kind of its device, such as "cpu".
        num_ranks: how many processes run it together.
        pools: whether it pools texts instead of generating.
        runs_whole_texts: whether these texts cannot continue from cached blocks.
        is_batch_invariant: whether its bits are the same in any batch.
        keeps_all_tokens: whether some of its attention sees all of a sequence.
        keeps_states: whether sequences have recurrent states, which advance with every token.
    """

    executor: str | None = None
    device: str | None = None
    num_ranks: int = 1
    pools: bool = False
    runs_whole_texts: bool = False
    is_batch_invariant: bool = True
    keeps_all_tokens: bool = True
    keeps_states: bool = False

    @classmethod
    def from_info(cls, info: "ModelInfo") -> "Features":
        """Features of a prepared model."""
        return cls(
            info.executor,
            info.device.partition(":")[0],
            info.num_ranks,
            pools=info.pooling is not None,
            runs_whole_texts=info.pooling is not None and not info.can_share_prefixes,
            is_batch_invariant=info.is_batch_invariant,
            keeps_all_tokens=ALL_TOKENS in info.cache_groups,
            keeps_states=info.state_bytes > 0,
        )

    def why_not(self, feature: str) -> str | None:
        """Return why a feature is missing; None if the model has it."""
        found = (each for each in REFUSALS if feature in each.features and each.applies(self))
        refusal = next(found, None)
        return None if refusal is None else f"{feature} is not supported with {refusal.model}: {refusal.reason}"

    def require(self, feature: str) -> None:
        """Raise `ModelError` if a feature is missing."""
        if (reason := self.why_not(feature)) is not None:
            raise ModelError(reason)

    def require_all(self, features: Mapping[str, bool]) -> None:
        """Raise `ModelError` if any requested feature is missing."""
        for feature, is_asked in features.items():
            if is_asked:
                self.require(feature)


class Refusal(NamedTuple):
    """Features that some models do not have.

    Attributes:
        features: the refused features.
        model: which models, in words.
        applies: whether a model is one of them.
        reason: why.
    """

    features: tuple[str, ...]
    model: str
    applies: Callable[[Features], bool]
    reason: str


REFUSALS = (
    Refusal(
        (QUANTIZATION, CACHE_DTYPE, ADAPTERS, PREFIX_STORE, INSPECTION),
        "a model that does not run packed",
        lambda model: model.executor not in (None, "packed"),
        "its attention and cache are the model's own, and nothing of ours reads or writes them",
    ),
    Refusal(
        (SPECULATION, DRAFT_MODEL),
        "a model that does not run packed",
        lambda model: model.executor not in (None, "packed"),
        "it cannot take back what it has computed for draft tokens that turn out wrong",
    ),
    Refusal(
        (MULTIMODAL,),
        "a GPU",
        lambda model: model.device not in (None, "cpu"),
        "this was written and tried on a CPU only",
    ),
    Refusal(
        (MULTIMODAL,),
        "a tensor_parallel_size above 1",
        lambda model: model.num_ranks > 1,
        "every rank would encode every image",
    ),
    Refusal(
        (DRAFTING,),
        "a model with recurrent states",
        lambda model: model.keeps_states,
        "it keeps no states at its own draft tokens, to go back to where one turns out wrong",
    ),
    Refusal(
        (SPECULATION,),
        "a model that is not batch-invariant",
        lambda model: not model.is_batch_invariant,
        "its output would depend on how many draft tokens run together",
    ),
    Refusal(
        (DRAFT_MODEL,),
        "a model that keeps windows only",
        lambda model: not model.keeps_all_tokens,
        "the draft model's blocks lie beside those of all tokens",
    ),
    Refusal(
        (QUANTIZATION, CACHE_DTYPE, ADAPTERS, PREFIX_STORE, RANKS),
        "a GPU",
        lambda model: model.device not in (None, "cpu"),
        "they need kernels that are written for CPUs, or memory that a CPU reads",
    ),
    Refusal(
        (ADAPTERS, DRAFT_MODEL, PREFIX_STORE, INSPECTION),
        "a tensor_parallel_size above 1",
        lambda model: model.num_ranks > 1,
        "each rank has a part of every layer and block, and these need whole ones",
    ),
    Refusal(
        (OTHER_EXECUTORS, GPU),
        "a tensor_parallel_size above 1",
        lambda model: model.num_ranks > 1,
        "ranks divide attention that is ours, and meet in a CPU's memory",
    ),
    Refusal(
        (SPECULATION, DRAFT_MODEL),
        "a model that pools",
        lambda model: model.pools,
        "it chooses no tokens",
    ),
    Refusal(
        (ADAPTERS, RANKS, OTHER_EXECUTORS),
        "a model that pools",
        lambda model: model.pools,
        "its head is proved beside a body that runs packed in one process, and calls for texts name no adapter",
    ),
    Refusal(
        (PREFIX_STORE,),
        "a model that pools all of a text's tokens",
        lambda model: model.runs_whole_texts,
        "its texts run whole, and nothing of them is cached",
    ),
)


def table() -> str:
    """`REFUSALS` as a Markdown table, for the documents."""
    rows = (f"| {', '.join(each.features)} | {each.model} | {each.reason} |" for each in REFUSALS)
    return "\n".join(["| not supported | with | because |", "|---|---|---|", *rows])
