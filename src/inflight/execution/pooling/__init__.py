"""Whole texts in, vectors out: models that pool instead of generating.

`runner` runs texts end to end in one unpadded row; `body` is the model below its head, proved and made fast like one
that generates; `heads` and `poolers` make vectors, labels and scores of its hidden states.
"""

from inflight.execution.pooling.runner import PoolingRunner

__all__ = ["PoolingRunner"]
