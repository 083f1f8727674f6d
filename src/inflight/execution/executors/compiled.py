"""The model through `torch.compile`: small operators are fused, and the Python between them is gone.

One graph serves every step. The numbers of rows and of logit rows are symbols in it, not constants, so there are no
buckets and nothing is compiled again in service. Linear layers and attention remain our own operators, which the graph
knows by number. So the arithmetic is that of the eager model, except where fused operators round less often.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from inflight.execution.attention import CpuCache
from inflight.execution.hf.hook import use_attention
from inflight.execution.hf.longrope import longrope_length
from inflight.execution.kernels import cache_folder
from inflight.execution.weights.onednn import OneDnnLinear

Forward: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Token ids `[T]`, positions `[T]` and logit rows `[R]` to logits `[R, V]`; T and R are at least `MIN_ROWS`."""

MAX_ROWS = 2**20
COMPILED_ROWS = (32, 8)
"""T and R of the step that is compiled: the compiler plans for these sizes."""


def why_uncompilable(
    model: PreTrainedModel, modules: Sequence[torch.nn.Module], caches: Sequence[CpuCache]
) -> str | None:
    """Why a model that runs packed cannot be compiled; None: it can be tried. Arguments as for `compile_forward`."""
    if not caches:
        return "it needs the attention backend 'cpu'"
    if any(isinstance(module, OneDnnLinear) for module in model.modules()):
        return "torch.compile cannot take oneDNN's linear layers, which run here"
    if len(modules) != len(caches):
        return "a module attends more than once in a forward pass"
    if longrope_length(model.config.get_text_config()) is not None:
        return "its position embeddings depend on each sequence's length (LongRoPE)"
    return None


def compile_forward(
    model: PreTrainedModel,
    forward: FunctionType,
    modules: Sequence[torch.nn.Module],
    caches: Sequence[CpuCache],
    mode: str,
) -> Forward:
    """`forward`, compiled and run once. From now on the model attends only through the kernel.

    Args:
        forward: the forward pass of `model`.
        modules, caches: the attention modules in the order of their calls, each of which attends once, and their
            caches.
        mode: "auto", or "max": the calls between operators are compiled, too (to C++), which takes longer.

    Raises:
        Exception: whatever the compiler raises for a model that it cannot compile in one piece.
    """
    # The compiler caches, and counts, by code object: each model gets its own.
    forward = FunctionType(forward.__code__.replace(), forward.__globals__, closure=forward.__closure__)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    for module, cache in zip(modules, caches, strict=True):
        setattr(module, "inflight_call", cache.call)  # noqa: B010
    use_attention(model, "inflight_compiled")
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        "cpp_wrapper": mode == "max",
        # Only the rows ever change: this saves half a millisecond of checking every module in every step.
        "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe,
    }
    compiled = torch.compile(forward, dynamic=True, fullgraph=True, options=options)

    def run(input_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        for rows in (input_ids, positions, logit_rows):
            torch._dynamo.mark_dynamic(rows, 0, min=2, max=MAX_ROWS)
        logits: torch.Tensor = compiled(input_ids, positions, logit_rows)
        return logits

    start = time.monotonic()
    print("inflight: compiling the model …", end="", file=sys.stderr, flush=True)
    try:
        num_rows, num_logit_rows = COMPILED_ROWS
        with torch.inference_mode(False):  # as the rows of a step are
            rows = torch.zeros(num_rows, dtype=torch.int64), torch.arange(num_rows), torch.arange(num_logit_rows)
        run(*rows)
    except BaseException:
        use_attention(model, "inflight")
        print(" failed", file=sys.stderr)
        raise
    print(f" {time.monotonic() - start:.0f} s", file=sys.stderr)
    return run
