"""The models in the formats of all peers: made once with seeded random weights, converted once, kept in `.models`.

A named model has the shape of a real one and is stored in the dtype in which that one is published; the caller's folder
is used unchanged. The values of weights do not affect speed: EOS is ignored and every output length is given. The
tokenizer is a stand-in that converters require, with a name for each id; no text is ever tokenized.
"""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import FEW_BITS, FOLDER, PEERS, Peer
from benchmarks.peers.install import llamacpp_sources

MODELS = FOLDER / ".models"
WEIGHT_SEED = 0
OPENVINO_WEIGHTS = {"float32": "fp32", "bfloat16": "fp16"}
"""Its only 16-bit export format is fp16; with bfloat16 arithmetic that is as fast as fp32 and needs less memory."""
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0", "int4": "q4_0"}
"""By precision; others are GGUF's own names."""
OWN_FILES = ("q4_k_m", *(kind for _, kind in FEW_BITS))
MADE_OF_OTHERS = ("q4_0", *OWN_FILES)
"""Types that the converter does not write; `llama-quantize` makes them of a file in bfloat16."""
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
"""Of the four-bit forms that vLLM reads on a CPU the fastest one, if only just."""
NUM_BYTES = 256
CHAT_TEMPLATE = """{%- if tools %}<|im_start|>system
{% if messages[0].role == "system" %}{{ messages[0].content }}

{% endif %}You may call these tools, which are described within <tools></tools>:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
For each call, write an object within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}{%- for message in messages %}{% if not (tools and loop.first and message.role == "system") -%}
<|im_start|>{{ "user" if message.role == "tool" else message.role }}
{% if message.role == "tool" %}<tool_response>
{{ message.content }}
</tool_response>{% else %}{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>

</think>

{% endif %}"""
"""In the manner of Qwen 3, whose answers may have thoughts and calls."""


def model_folder(model: str) -> Path:
    """Return the folder of a named model, making the model if necessary, or of a path. Raises `FileNotFoundError`."""
    if model not in NAMED_MODELS:
        folder = Path(model).expanduser().resolve()
        if not (folder / "config.json").exists():
            names = ", ".join(NAMED_MODELS)
            raise FileNotFoundError(f"{model!r} is neither {names} nor a folder with a config.json")
        return folder
    return make_once(MODELS / model, lambda folder: NAMED_MODELS[model](folder))


def prepare(peer: Peer, folder: Path, dtype: str, quantization: str | None) -> Path:
    """Return what the peer loads for the model in `folder`. Raises `RuntimeError` if it cannot be converted."""
    if peer.model_format == "hf" and quantization in OWN_FILES:
        peer = PEERS["llamacpp"]
    if peer.model_format == "hf":
        return folder
    if peer.model_format == "awq" and quantization is None:
        return folder
    name = folder.name
    if folder.parent != MODELS:
        name += "-" + hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    if peer.model_format == "awq":
        return make_once(MODELS / f"{name}-awq", lambda target: _without_weights(folder, target, AWQ))
    if peer.model_format == "openvino":
        weights = "int4" if quantization == "q4_k_m" else quantization or OPENVINO_WEIGHTS[dtype]
        return make_once(
            MODELS / f"{name}-openvino-{weights}", lambda target: _to_openvino(peer, folder, target, weights)
        )
    if peer.model_format == "gguf":
        kind = GGUF_TYPES.get(quantization or dtype) or str(quantization)
        return make_once(MODELS / f"{name}-{kind}.gguf", lambda target: _to_gguf(peer, folder, target, kind))
    kind = quantization or dtype
    return make_once(MODELS / f"{name}-ctranslate2-{kind}", lambda target: _to_ctranslate2(peer, folder, target, kind))


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Make a file or folder under a temporary name and renames it when it is complete."""
    if not target.exists():
        unfinished = target.with_name("unfinished-" + target.name)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        make(unfinished)
        unfinished.rename(target)
    return target


# ----------------------------------------------------------------------------------------------------- named models


def _make_gpt2(folder: Path) -> None:
    """GPT-2, 124 M parameters, float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    _save(GPT2LMHeadModel, GPT2Config(n_ctx=1024, dtype="float32"), folder)  # llama.cpp reads n_ctx


def _make_qwen3(folder: Path) -> None:
    """The shape of Qwen3-0.6B, bfloat16."""
    _save_qwen3(
        folder,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )


def _make_qwen3_draft(folder: Path) -> None:
    """A small model of the same vocabulary, bfloat16: 42 M parameters, of which 39 M are embeddings."""
    _save_qwen3(
        folder,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )


def _save_qwen3(folder: Path, **shape: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=151643,
        eos_token_id=151645,
        dtype="bfloat16",
        **shape,
    )
    _save(Qwen3ForCausalLM, config, folder)


def _make_llama(folder: Path) -> None:
    """The shape of Llama-3.2-1B, bfloat16, with plain frequencies."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        bos_token_id=128000,
        eos_token_id=128001,
        dtype="bfloat16",
    )
    _save(LlamaForCausalLM, config, folder)


def _make_mixture(folder: Path) -> None:
    """A small mixture of experts, in the manner of Qwen3-30B-A3B: 1.1 B parameters, of which a token uses 0.23 B."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=65536,
        hidden_size=1024,
        intermediate_size=3072,
        moe_intermediate_size=512,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        num_hidden_layers=18,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=65534,
        eos_token_id=65535,
        dtype="bfloat16",
    )
    _save(Qwen3MoeForCausalLM, config, folder)


def _make_qwen35(folder: Path) -> None:
    """The shape of Qwen3.5-0.8B's text model, bfloat16: three layers in four have a gated delta rule."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=248320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        max_position_embeddings=262144,
        tie_word_embeddings=True,
        bos_token_id=248045,
        eos_token_id=248046,
        dtype="bfloat16",
    )
    _save(Qwen3_5ForCausalLM, config, folder)


def _make_lfm2(folder: Path) -> None:
    """The shape of LFM2-1.2B, bfloat16: ten layers of short convolutions, and six of attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    attention = (2, 5, 8, 10, 12, 14)
    config = Lfm2Config(
        vocab_size=65536,
        hidden_size=2048,
        intermediate_size=12288,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        layer_types=["full_attention" if layer in attention else "conv" for layer in range(16)],
        max_position_embeddings=128000,
        bos_token_id=1,
        eos_token_id=7,
        dtype="bfloat16",
    )
    _save(Lfm2ForCausalLM, config, folder)


def _make_granite(folder: Path) -> None:
    """A quarter of Granite-4.0-H-tiny's layers, bfloat16: 1.8 B parameters, of which a token uses 0.5 B. Nine layers of
    Mamba 2 and one of attention, each with 64 experts and a shared one."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    layers = ["attention" if layer == 5 else "mamba" for layer in range(10)]
    config = GraniteMoeHybridConfig(
        vocab_size=100352,
        hidden_size=1536,
        intermediate_size=512,
        shared_intermediate_size=1024,
        num_local_experts=64,
        num_experts_per_tok=6,
        num_hidden_layers=10,
        layer_types=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        embedding_multiplier=12,
        logits_scaling=6,
        residual_multiplier=0.22,
        attention_multiplier=0.0078125,
        position_embedding_type="nope",
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=100257,
        eos_token_id=100257,
        dtype="bfloat16",
    )
    _save(GraniteMoeHybridForCausalLM, config, folder)
    _as_published(folder, {"layer_types": layers})


def _make_nemotron(folder: Path) -> None:
    """Half of Nemotron-H-4B's layers, bfloat16: 2.3 B parameters. Layers of Mamba 2 (M), attention (*) and MLPs (-)."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    pattern = "M-M-M-M*-M-M-M-M*-M-M"
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    config = NemotronHConfig(
        vocab_size=131072,
        hidden_size=3072,
        intermediate_size=12288,
        layers_block_type=[kinds[each] for each in pattern],
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        ssm_state_size=128,
        mamba_num_heads=112,
        mamba_head_dim=64,
        n_groups=8,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )
    _save(NemotronHForCausalLM, config, folder)
    fields = {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    of_mixtures = ("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group")
    _as_published(folder, fields, without=("layers_block_type", *of_mixtures))


def _as_published(folder: Path, fields: dict[str, Any], without: Sequence[str] = ()) -> None:
    """Write fields of the configuration as published models have them, which llama.cpp's converter reads."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if name not in without}, indent=2))


NAMED_MODELS: dict[str, Callable[[Path], None]] = {
    "gpt2": _make_gpt2,
    "qwen3-0.6b": _make_qwen3,
    "qwen3-draft": _make_qwen3_draft,
    "llama-3.2-1b": _make_llama,
    "qwen3-moe": _make_mixture,
    "qwen3.5-0.8b": _make_qwen35,
    "lfm2-1.2b": _make_lfm2,
    "granite-4-h-tiny": _make_granite,
    "nemotron-h-4b": _make_nemotron,
}


def _save(model_class: Any, config: Any, folder: Path) -> None:
    import torch

    torch.manual_seed(WEIGHT_SEED)
    model = model_class(config).to(getattr(torch, str(config.dtype).removeprefix("torch.")))
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
    _save_tokenizer(folder, config.vocab_size, config.eos_token_id)


def _save_tokenizer(folder: Path, vocab_size: int, eos_token_id: int) -> None:
    """Make byte-level BPE with the 256 bytes, one merge and, for every other id, a name that is in no text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(letters) == NUM_BYTES
    names = [*letters, letters[0] + letters[1]]
    names += [f"<{token_id}>" for token_id in range(len(names), vocab_size)]
    end = "<|endoftext|>"
    names[eos_token_id] = end
    vocabulary = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[(letters[0], letters[1])]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text(f"#version: 0.2\n{letters[0]} {letters[1]}\n")
    special = {"tokenizer_class": "GPT2Tokenizer", "bos_token": end, "eos_token": end, "unk_token": end}
    special["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


# ------------------------------------------------------------------------------------------------------- conversions


def _to_openvino(peer: Peer, folder: Path, target: Path, weights: str) -> None:
    arguments = ("--task", "text-generation-with-past", "--weight-format", weights)
    _run(peer.root / "bin" / "optimum-cli", "export", "openvino", "--model", folder, *arguments, target)


def _without_weights(folder: Path, target: Path, quantization_config: dict[str, Any]) -> None:
    """Copy a model's configuration as quantized, without weights."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization_config}
    (target / "config.json").write_text(json.dumps(config))


def _to_gguf(peer: Peer, folder: Path, target: Path, kind: str) -> None:
    if kind in MADE_OF_OTHERS:
        _run(peer.root / "build" / "bin" / "llama-quantize", prepare(peer, folder, "bfloat16", None), target, kind)
        return
    sources = llamacpp_sources(peer)
    options = ["--outfile", target, "--outtype", kind]
    if json.loads((folder / "config.json").read_text())["model_type"].startswith("qwen3_5"):
        options.append("--no-mtp")
    _run(peer.python, "-m", "benchmarks.peers.convert_to_gguf", sources, folder, *options)


def _to_ctranslate2(peer: Peer, folder: Path, target: Path, kind: str) -> None:
    arguments = ("--model", folder, "--output_dir", target, "--quantization", kind)
    _run(peer.root / "bin" / "ct2-transformers-converter", *arguments)


def _run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], cwd=FOLDER.parents[1], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise RuntimeError(f"{Path(str(command[0])).name} failed: {''.join(last)}")
