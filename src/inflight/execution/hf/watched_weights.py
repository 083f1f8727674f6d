"""`WatchedWeights`: detects changes of a caller's model after an engine was made from it.

An engine copies most weights into its own layout, and shares a few large ones. After a training step it would mix old
and new weights.
"""

import weakref
from contextlib import suppress

import torch
from transformers import PreTrainedModel


class WatchedWeights:
    """The version of a model's parameters, without references to the model or its memory.

    In-place changes through `parameter.data` are not detected: torch does not count them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._seen: list[tuple[weakref.ref[torch.nn.Parameter], tuple[torch.dtype, torch.device], int, int]] = []
        for parameter in model.parameters():
            with suppress(RuntimeError):  # torch counts no changes of tensors that were made in inference mode
                kind, version = (parameter.dtype, parameter.device), parameter._version
                self._seen.append((weakref.ref(parameter), kind, version, parameter.data_ptr()))

    @property
    def have_changed(self) -> bool:
        """Whether any parameter was written to or replaced. (One that was moved or converted has not changed.)"""
        for reference, kind, version, address in self._seen:
            parameter = reference()
            if parameter is None or (parameter.dtype, parameter.device) != kind:
                continue
            if parameter._version != version or parameter.data_ptr() != address:
                return True
        return False
