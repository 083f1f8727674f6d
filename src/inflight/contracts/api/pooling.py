"""Pooling: numbers computed from a whole text (embeddings, labels, scores). Plain data."""

from array import array
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

PoolingTask: TypeAlias = Literal["embed", "classify", "rerank"]

NORMALIZE = ""
"""The layer that scales a vector to length 1; other layers are named by their folders."""


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """A checkpoint's pooling configuration.

    Attributes:
        task: "embed" (a vector), "classify" (a number for each label) or "rerank" (a score for a query and a document
            in Qwen3-Reranker's template: how much likelier the answer "yes" is than "no").
        modes: of "embed": how the hidden states of a text become one vector: "cls", "lasttoken", "mean", "max",
            "mean_sqrt_len_tokens", "weightedmean". The vectors of several modes are joined.
        includes_prompt: whether the tokens of a prompt before the text are pooled, too.
        layers: of "embed": the layers after it, in order: folders of dense layers, or `NORMALIZE`.
        max_tokens: the longest text, in tokens; None: as long as the model allows.
        lowers: whether texts are made lower case.
        prompts, default_prompt: texts to begin with, by name, and the name of the one that is used otherwise.
        labels: of a classification head.
        activation: applied to the numbers of such a head, or of "rerank".
        answers: of "rerank": the token ids of the two answers, the affirmative one last; None: the checkpoint has a
            classification head instead.
        similarity: of embeddings: "cosine" or "dot".
        num_values: numbers per text; 0: unknown until the model is loaded.
        reads_last_token: whether these numbers depend on the last token's hidden state alone, in a causal model: then
            a text runs in chunks, and goes on from a cached prefix. Known once the model is loaded.
        padding_id: the padding token, which a classification head does not take for a text's last; None: there is none.
    """

    task: PoolingTask
    modes: tuple[str, ...] = ("mean",)
    includes_prompt: bool = True
    layers: tuple[str, ...] = ()
    max_tokens: int | None = None
    lowers: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    labels: tuple[str, ...] = ()
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    answers: tuple[int, int] | None = None
    similarity: str = "cosine"
    num_values: int = 0
    reads_last_token: bool = False
    padding_id: int | None = None

    def runs_whole(self, text: "PooledText") -> bool:
        """Whether all tokens of a text must run in one step."""
        return not self.reads_last_token or text.token_types is not None or text.token_ids[-1] == self.padding_id


@dataclass(frozen=True, slots=True)
class PooledText:
    """A text, or a pair of texts, as tokens.

    Attributes:
        token_types: which text of a pair each token belongs to; None: all to the first.
        prompt_length: how many of the first tokens are a prompt that is not pooled.
    """

    token_ids: list[int]
    token_types: list[int] | None = None
    prompt_length: int = 0


Values: TypeAlias = "array[float]"
"""The result for a text: float32. `numpy.asarray` takes them without a copy."""
