"""Shapes of models that benchmarks run with random weights."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A class of `transformers`, and the sizes that differ from the class's defaults.

    Attributes:
        name: the name in reports.
        model_type, architecture: as in a checkpoint's configuration.
    """

    name: str
    model_type: str
    architecture: str
    sizes: dict[str, Any]

    def save(self, folder: str) -> None:
        """Write a checkpoint without weights, to be loaded with `load_format="dummy"`."""
        from transformers import AutoConfig

        AutoConfig.for_model(self.model_type, architectures=[self.architecture], **self.sizes).save_pretrained(folder)


LLAMA_3_2_1B = Shape(
    "Llama 3.2 1B",
    "llama",
    "LlamaForCausalLM",
    {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
)
GEMMA_3_1B = Shape(
    "Gemma 3 1B",
    "gemma3_text",
    "Gemma3ForCausalLM",
    {
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "vocab_size": 262_144,
        "max_position_embeddings": 32_768,
    },
)
GEMMA_4_NARROW = Shape(
    "Gemma 4",
    "gemma4_text",
    "Gemma4ForCausalLM",
    {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "hidden_size_per_layer_input": 32,
        "vocab_size": 32_768,
        "vocab_size_per_layer_input": 32_768,
        "max_position_embeddings": 32_768,
    },
)
"""The layers of the library's default, with small sizes where they do not affect the cache."""
BLOOM_1B1 = Shape(
    "BLOOM 1B1", "bloom", "BloomForCausalLM", {"hidden_size": 1536, "n_layer": 24, "n_head": 16, "vocab_size": 250_880}
)
MAMBA_1_4B = Shape(
    "Mamba 1.4B",
    "mamba",
    "MambaForCausalLM",
    {"hidden_size": 2048, "num_hidden_layers": 48, "state_size": 16, "vocab_size": 50_280},
)
