"""Builds models that reveal mistakes: their weights are rescaled until the next token depends on distant context.

A freshly initialised tiny model mostly repeats its input token, whatever is wrong with its attention. So its matrices
(not its embeddings) get a larger deviation: by the smallest factor of a ladder with which other tokens far back change
the argmax at many positions, and greedy output is varied. Knows `transformers` models and nothing of the engine.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from inflight.census.finding import MIN_DISTINCT, MIN_SHARE

FACTORS = (4, 6, 8, 12, 16, 24, 32, 48)
"""The smallest first, because large matrices also amplify rounding noise."""

SEEDS = (0, 1, 2)

BASE_STD = 0.02
"""The deviation that a factor multiplies: the usual `initializer_range`."""

KERNEL_STD = 0.3
"""The deviation of convolutions along the sequence, whose few entries are not a matrix."""

SHARPER = 3
"""The factor of query and key matrices, because attention that averages makes all positions alike."""

NUM_FAR = 16
"""The number of changed tokens at the beginning."""
FIRST_JUDGED = 24
LENGTH = 56
NUM_SEQUENCES = 3
NUM_GREEDY = 24
FIRST_ORDINARY_TOKEN = 4
"""Smaller ids are often special; padding, for example, shifts positions."""

_LEFT_ALONE = ("A_log", "a_log", "inv_freq")
_KERNELS = ("conv",)
_QUERIES_AND_KEYS = ("query", "key", "q_proj", "k_proj", "q_lin", "k_lin")
_QUERY_KEY_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm")
MAX_PARAMETERS = 20_000_000


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """A model's sensitivity to its context.

    Attributes:
        factor: the factor by which its matrices were scaled.
        share_changed: share of argmaxes that change with tokens at least `FIRST_JUDGED - NUM_FAR` positions before.
        num_distinct: distinct tokens among `NUM_GREEDY` greedy ones, for the least varied of some prompts.
    """

    factor: float
    share_changed: float
    num_distinct: int

    @property
    def suffices(self) -> bool:
        """Whether an exact result with this model means something."""
        return self.share_changed >= MIN_SHARE and self.num_distinct >= MIN_DISTINCT

    @property
    def rank(self) -> tuple[bool, int, float]:
        """A sort key; the larger, the better."""
        return self.share_changed >= MIN_SHARE, self.num_distinct, self.share_changed


def sensitive_model(
    model_class: type[PreTrainedModel], config: PreTrainedConfig
) -> tuple[PreTrainedModel, Sensitivity]:
    """Return the first model, of a few seeds, that is sensitive enough, or else the best of them."""
    best: tuple[PreTrainedModel, Sensitivity] | None = None
    for seed in SEEDS:
        model = build(model_class, config, seed)
        sensitivity = make_sensitive(model, seed)
        if best is None or sensitivity.rank > best[1].rank:
            best = model, sensitivity
        if sensitivity.suffices:
            break
    assert best is not None
    return best


def build(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a model in float32 and evaluation mode with random weights. Raises `ValueError` if it is not tiny."""
    try:
        with torch.device("meta"):
            num_parameters = model_class._from_config(config).num_parameters()
    except Exception:
        num_parameters = 0  # not every class can be built on the meta device
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"the configuration is not tiny: {num_parameters:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class._from_config(config, dtype=torch.float32).float().eval().requires_grad_(False)
    model.generation_config = GenerationConfig(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    return model


@torch.no_grad()
def make_sensitive(model: PreTrainedModel, seed: int = 0) -> Sensitivity:
    """Rescale `model` by the first factor that suffices, or else by the best one."""
    matrices = _standardise(model, torch.Generator().manual_seed(seed))
    best, current = None, 1.0
    for factor in FACTORS:
        _scale(matrices, factor / current)
        current = factor
        found = measure(model, factor)
        if found.suffices:
            return found
        if best is None or found.rank > best.rank:
            best = found
    assert best is not None
    _scale(matrices, best.factor / current)
    return best


def _standardise(model: PreTrainedModel, generator: torch.Generator) -> list[Tensor]:
    """Give all weights the base deviation, perturb vectors a little, and return the matrices `[…, out, in]`,
    float32."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = []
    for name, weight in sorted(model.named_parameters()):
        if not weight.is_floating_point() or any(part in name for part in _LEFT_ALONE):
            continue
        if sum(size > 1 for size in weight.shape) >= 2:
            is_kernel = any(part in name for part in _KERNELS)
            is_matrix = id(weight) not in embeddings and not is_kernel
            if is_matrix:  # a mean that all activations share (as after ReLU) would make all positions alike, too
                weight.sub_(weight.mean(-1, keepdim=True)).sub_(weight.mean(-2, keepdim=True))
                matrices.append(weight)
            is_sharp = is_matrix and any(part in name for part in _QUERIES_AND_KEYS)
            deviation = KERNEL_STD if is_kernel else BASE_STD * SHARPER if is_sharp else BASE_STD
            _set_deviation(weight, deviation, generator)
        elif weight.numel() == 1 and not weight.any():
            weight.fill_(1)  # a gate that is shut at first, as Mllama's
        elif weight.dim() == 1:
            is_scale = weight.mean() > 0.5
            weight.add_((0.1 if is_scale else BASE_STD) * torch.randn(weight.shape, generator=generator))
            if any(part in name for part in _QUERY_KEY_NORMS):
                weight.add_(1)  # norms cancel the factor; with doubled weights, scores are four times sharper
    return matrices


def _set_deviation(weight: Tensor, deviation: float, generator: torch.Generator) -> None:
    """Scale a weight `[…]` to this standard deviation, in place; a constant one is drawn at random first."""
    found = weight.std()
    if not torch.isfinite(found) or found < 1e-6:
        weight.copy_(torch.randn(weight.shape, generator=generator))
        found = weight.std()
    weight.mul_(deviation / found)


def _scale(matrices: list[Tensor], factor: float) -> None:
    """Multiply matrices `[…, out, in]` by `factor`, in place."""
    for matrix in matrices:
        matrix.mul_(factor)


@torch.no_grad()
def measure(model: PreTrainedModel, factor: float) -> Sensitivity:
    """Measure the sensitivity of `model` with its present weights; `factor` is only passed on."""
    generator = torch.Generator().manual_seed(1)
    size = (NUM_SEQUENCES, LENGTH)
    original = torch.randint(FIRST_ORDINARY_TOKEN, vocab_size(model), size, generator=generator)
    changed = original.clone()
    changed[:, :NUM_FAR] = original[:, :NUM_FAR].roll(1, dims=0)
    judged = [plain_logits(model, tokens)[:, FIRST_JUDGED:] for tokens in (original, changed)]
    if not all(torch.isfinite(each).any() and not torch.isnan(each).any() for each in judged):
        return Sensitivity(factor, 0.0, 0)
    share = (judged[0].argmax(-1) != judged[1].argmax(-1)).float().mean().item()
    return Sensitivity(factor, share, _num_distinct(model, original[:, :NUM_FAR]))


def _num_distinct(model: PreTrainedModel, tokens: Tensor) -> int:
    """Continue prompts `[B, L]` int64 greedily by `NUM_GREEDY` tokens; return the least number of distinct ones in a
    row."""
    for _ in range(NUM_GREEDY):
        next_tokens = plain_logits(model, tokens)[:, -1].argmax(-1).clamp(max=vocab_size(model) - 1)
        tokens = torch.cat([tokens, next_tokens[:, None]], dim=1)
    return min(len(set(row[-NUM_GREEDY:])) for row in tokens.tolist())


def plain_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return logits `[B, L, V]` float32 of tokens `[B, L]` int64, computed without a cache."""
    logits: Tensor = model(input_ids=tokens, use_cache=False, return_dict=True).logits
    return logits


def vocab_size(model: PreTrainedModel) -> int:
    """Return how many token ids the model can take and produce."""
    return int(model.config.get_text_config(decoder=True).vocab_size)
