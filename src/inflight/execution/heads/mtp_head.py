"""`MtpHead`: the multi-token prediction (MTP) layer of some checkpoints.

From a token and the model's last hidden state of the previous token, it predicts the next token (DeepSeek-AI,
DeepSeek-V3 Technical Report, 2024, section 2.2). `transformers` loads it; it uses the model's embedding and head.
"""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import CausalLMOutput

from inflight.contracts.api.errors import ModelError
from inflight.execution.hf.source import first_line


class MtpHead(PreTrainedModel):
    """A checkpoint's first MTP layer as a one-layer model. Its positions are those of the hidden states.

    Attributes:
        states: the hidden states `[T, hidden]` from which the next forward pass over T tokens continues; afterwards the
            layer's own. Tokens beyond the states are padding.
    """

    _supports_attention_backend = True
    states: torch.Tensor

    def __init__(self, inner: MtpModel) -> None:
        super().__init__(inner.config)
        self.inner = inner

    def get_input_embeddings(self) -> torch.nn.Module:
        """The model's."""
        embeddings: torch.nn.Module = self.inner.embed_tokens
        return embeddings

    def get_output_embeddings(self) -> torch.nn.Module:
        """The model's."""
        head: torch.nn.Module = self.inner.shared_head
        return head

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor | int = 0, **_: Any
    ) -> CausalLMOutput:
        """One row of tokens `[1, T]`; see `states`."""
        num_missing = input_ids.shape[1] - len(self.states)
        before = torch.cat([self.states, self.states.new_zeros(num_missing, self.states.shape[1])])
        after = self.inner.forward_layer(0, before[None], position_ids, None, input_ids=input_ids)
        self.states = after[0]
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=self.inner._project_to_logits(after[:, rows]))


def load_mtp_head(model: PreTrainedModel) -> MtpHead:
    """The MTP layer of the checkpoint that a model was loaded from. Raises `ModelError` if there is none, or it cannot
    be loaded."""
    config = model.config.get_text_config()
    if not getattr(config, "num_mtp_layers", None) and not getattr(config, "num_nextn_predict_layers", None):
        raise ModelError("draft_model 'mtp': the checkpoint has no layer for multi-token prediction")
    _name_the_layer(model, config)
    try:
        head = MtpHead(MtpModel.from_pretrained(model))
    except Exception as error:
        raise ModelError(f"draft_model 'mtp': the checkpoint's layer cannot be loaded: {first_line(error)}") from error
    head.eval().requires_grad_(False)
    return head


def _name_the_layer(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Describe the first MTP layer in our copy of the configuration. Some classes name the layers of one published size
    only, and some do not know that they have one."""
    config.num_mtp_layers = 1
    for kinds, of_mtp in (("layer_types", "mtp_layer_types"), ("mlp_layer_types", "mtp_mlp_layer_types")):
        if getattr(config, kinds, None) is not None and getattr(config, of_mtp, None) is None:
            setattr(config, of_mtp, getattr(config, kinds)[-1:])
    ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    model._keys_to_ignore_on_load_unexpected = [*ignored, rf"\.layers\.{config.num_hidden_layers}\."]
