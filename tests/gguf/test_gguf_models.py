"""A GGUF file gives the output of the dequantised model in `transformers`, and its weights stay quantised."""

import copy
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from inflight import LLM, SamplingParams
from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.demo_model import DEMO_MODEL
from inflight.execution.grouped.weight import GroupedWeight, as_values
from inflight.execution.hf.load import load_model
from inflight.text.tokenizer_files import read_tokenizer
from tests.execution import this_cpu
from tests.gguf.files import continuation, tiny, write

MIXED = [
    "Q4_K",
    "Q6_K",
    "Q5_K",
    "Q8_0",
    "Q4_0",
    "Q3_K",
    "Q5_0",
    "Q4_1",
    "Q5_1",
    "IQ4_NL",
    "IQ4_XS",
    "Q2_K",
    "TQ1_0",
    "TQ2_0",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "F16",
    "BF16",
    "F32",
]
HYBRID = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
"""Two heads of values share a key, which llama.cpp orders in another way."""
MODELS = {
    "llama": tiny("llama"),
    "qwen3": tiny("qwen3", head_dim=128, tie_word_embeddings=True),
    "gemma3_text": tiny("gemma3_text", tie_word_embeddings=True, sliding_window=16),
    "qwen3_moe": tiny(
        "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=768, norm_topk_prob=True
    ),
    "qwen3_5_text": tiny("qwen3_5_text", **HYBRID),
    "qwen3_5_moe_text": tiny(
        "qwen3_5_moe_text",
        **HYBRID | {"linear_num_value_heads": 4},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=768,
        shared_expert_intermediate_size=512,
    ),
    "lfm2": tiny("lfm2", layer_types=["conv", "full_attention", "conv"], num_hidden_layers=3),
    "gpt2": tiny("gpt2", n_head=4, head_dim=None, num_key_value_heads=None, intermediate_size=None, n_positions=1024),
}
CHAT = [{"role": "user", "content": "Tell me a story about a cat."}]


@pytest.fixture(autouse=True)
def _kernels() -> None:
    this_cpu.needs(torch.uint8)


def of_kinds(*kinds: str):  # type: ignore[no-untyped-def]
    """Gives one matrix after the other another type."""
    given: Counter[str] = Counter()

    def kind_of(name: str) -> str:
        given["all"] += "ffn_up_exps" not in name  # which lies in one parameter with the matrix before it
        return kinds[given["all"] % len(kinds)]

    return kind_of


def read_by_transformers(name: str, path: Path) -> PreTrainedModel:
    """The dequantised model. (Its own mapping overlooks some sizes of such small models.)"""
    config = copy.deepcopy(MODELS[name].config)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_what_transformers_reads(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    are_states = name in ("qwen3_5_text", "qwen3_5_moe_text", "lfm2")  # the mapping for these reads fewer types
    unread = ("Q5_0", "Q5_1", "TQ1_0", "TQ2_0") if are_states else ()
    write(path, MODELS[name], of_kinds(*(each for each in MIXED if each not in unread)))
    own = load_model(path, EngineConfig(dtype="float32"))
    theirs = read_by_transformers(name, path)
    assert all("the model has their columns in another order" in note for note in own.inflight_notes)
    assert bool(own.inflight_notes) == (name == "qwen3_5_text")
    for key in (
        "hidden_size",
        "vocab_size",
        "max_position_embeddings",
        "num_key_value_heads",
        "sliding_window",
        "head_dim",
    ):
        if key != "head_dim" or name != "lfm2":  # whose configuration has none
            assert getattr(own.config, key, None) == getattr(theirs.config, key, None)
    expected = theirs.state_dict()
    kinds = Counter()
    for key, weight in own.state_dict().items():
        if isinstance(weight, GroupedWeight):
            kinds[weight.kind] += 1
            assert torch.equal(weight.values(), expected[key]), key
        else:
            assert torch.equal(weight, expected[key]), key
    assert len(kinds) >= 4


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thorough("llama", "qwen3]", "experts-awq")
def test_in_exact_arithmetic_every_token_is_the_plain_models(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, MODELS[name], of_kinds("Q4_K", "Q6_K", "Q4_0", "Q8_0"))
    llm = LLM(str(path), dtype="float32", quantization_arithmetic="exact", num_blocks=60)
    assert llm.model_info.logits_error < 2e-5
    plain = read_by_transformers(name, path)
    plain.generation_config.eos_token_id = None
    prompts = [[5, 6, 7], [300, 2, 9, 11, 200], list(range(40))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == continuation(plain, prompt, 12)


@pytest.mark.thorough
def test_a_file_in_several_parts_runs_like_a_whole_one(tmp_path: Path) -> None:
    texts = []
    for number, size in enumerate((0, 7)):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / "model.gguf", MODELS["llama"], of_kinds("Q4_K", "Q6_K"), tensors_of_part=size)
        llm = LLM(str(folder), dtype="float32", num_blocks=60)
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=8, ignore_eos=True))
        texts.append(list(output.outputs[0].token_ids))
    assert len(list(folder.iterdir())) > 2
    assert texts[0] == texts[1]


@pytest.mark.thorough
def test_the_embedded_model_completes_and_chats_as_a_file(tmp_path: Path) -> None:
    """With its tokenizer, its chat template and the tokens that end a text."""
    original = LLM()
    path, tokenizer = tmp_path / "model.gguf", AutoTokenizer.from_pretrained(DEMO_MODEL)
    write(path, AutoModelForCausalLM.from_pretrained(DEMO_MODEL), lambda name: "Q8_0", tokenizer)
    llm = LLM(str(path), dtype="float32", quantization_arithmetic="exact")
    assert llm.model_info.arithmetic == "exact"
    assert {each.kind for each in llm.model_info.weights} == {"Q8_0", "float32"}
    assert llm.model_info.eos_token_ids == original.model_info.eos_token_ids
    text = "Once upon a time, there was a little girl"
    assert llm.tokenizer is not None
    assert llm.tokenizer.encode(text) == tokenizer.encode(text)
    without_torch = (
        "import sys; sys.modules['torch'] = None; from inflight.text.tokenizer_files import read_tokenizer; "
    )
    script = f"{without_torch} print(read_tokenizer(sys.argv[1]).encode(sys.argv[2]))"
    done = subprocess.run([sys.executable, "-c", script, path, text], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == tokenizer.encode(text), "as in the process of `inflight serve`"
    greedy = SamplingParams(temperature=0, max_tokens=8)
    for ask in (lambda each: each.generate(text, greedy, use_tqdm=False), lambda each: each.chat(CHAT, greedy)):
        assert ask(llm)[0].outputs[0].text == ask(original)[0].outputs[0].text


def test_a_vocabulary_without_what_is_needed_is_refused_in_words(tmp_path: Path) -> None:
    """A BPE tokenizer needs merges, or scores to make them of."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match=r"cannot load the tokenizer of .*: the file has no 'tokenizer\.ggml\.scores'$"
    ):
        read_tokenizer(str(path))


def test_types_that_no_kernel_reads_are_expanded_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    monkeypatch.setattr("inflight.execution.hf.gguf_model.kernels_available", lambda: False)
    write(path, MODELS["llama"], of_kinds("Q2_K", "IQ3_S", "TQ2_0", "Q4_K"))
    own, expected = load_model(path, EngineConfig(dtype="float32")), read_by_transformers("llama", path).state_dict()
    for kind in ("Q2_K", "IQ3_S", "TQ2_0"):
        assert any(f"weights in {kind} are expanded to torch.float32" in note for note in own.inflight_notes)
    for name, weight in own.state_dict().items():
        assert torch.equal(as_values(weight), expected[name]), name


def test_in_bfloat16_every_parameter_is_in_bfloat16(tmp_path: Path) -> None:
    """Experts in floats, which two tensors of the file share, included."""
    this_cpu.needs(torch.bfloat16)
    path = tmp_path / "model.gguf"
    write(path, MODELS["qwen3_moe"], lambda name: "F16" if "exps" in name else "Q4_K")
    own = load_model(path, EngineConfig(dtype="bfloat16"))
    expected = read_by_transformers("qwen3_moe", path)
    assert {parameter.dtype for parameter in own.parameters()} == {torch.bfloat16}
    experts = [name for name, _ in own.named_parameters() if "experts" in name]
    assert len(experts) == 4
    for name in experts:
        assert torch.equal(own.get_parameter(name), expected.get_parameter(name).bfloat16())
