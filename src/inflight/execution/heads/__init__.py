"""A model's own draft heads: layers beyond its last one, which continue from its last hidden states.

- `MtpHead`: such a layer of a checkpoint, as a model. `HeadRunner`: runs it as a draft model.
"""

from inflight.execution.heads.head_runner import HeadRunner
from inflight.execution.heads.mtp_head import load_mtp_head

__all__ = ["HeadRunner", "load_mtp_head"]
