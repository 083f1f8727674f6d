"""The probe: takes every model that the packed row reproduces, whatever its weights, and refuses all others by name.

Broken attention is made in two ways: backends that get something wrong, and executors that are given wrong batches. A
model with transformers' default initialisation hardly shows it in its logits, so that is what it must be caught on.
"""

import copy
import pickle
import threading
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from inflight import LLM, SamplingParams
from inflight.config import EngineConfig
from inflight.errors import ModelError
from inflight.execution.attention import AttentionBackend, AttentionSpec, TorchAttention, make_backend, reference
from inflight.execution.attention.interface import PagedCache
from inflight.execution.executors import PackedExecutor
from inflight.execution.model import load_model
from inflight.execution.model_runner import ModelRunner
from inflight.execution.probe import ProbeReport, probe_packed
from inflight.execution.ragged_batch import RaggedBatch
from inflight.plan import Span, StepPlan
from tests import zoo

every_architecture = pytest.mark.parametrize("name", zoo.ARCHITECTURES)


def own_copy(model: PreTrainedModel) -> PreTrainedModel:
    return load_model(model, EngineConfig())


def probe(model: PreTrainedModel, backend: str = "torch") -> ProbeReport:
    return probe_packed(
        own_copy(model), lambda block_size: make_backend(backend, model.device, model.dtype, block_size)
    )


def default_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model as transformers initialises it: its next token barely depends on what it attends to."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tiny(model_type: str, **changes: Any) -> PreTrainedConfig:
    """A config of two or three layers, of a class that is not in the zoo."""
    common = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    special = {"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return AutoConfig.for_model(model_type, **(common | special | changes))


def tiny_gqa(model_type: str, **changes: Any) -> PreTrainedConfig:
    return tiny(model_type, **({"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96} | changes))


# --------------------------------------------------------------------------- what it makes of the zoo


@every_architecture
def test_a_model_is_accepted_with_its_attention_as_configured(name: str) -> None:
    model = zoo.build(name)
    config = model.config
    head_sizes = (24, 16) if name == "deepseek_v3" else (16, 16)
    report = probe(model)
    assert max(report.logits_error, report.attention_error) < 1e-5
    assert report.max_model_len == config.max_position_embeddings
    assert report.notes == ()
    assert len(report.specs) == config.num_hidden_layers
    scale = 1.0 if name == "opt" else getattr(config, "query_pre_attn_scalar", head_sizes[0]) ** -0.5
    slides = getattr(config, "sliding_window", None) is not None
    layer_types = getattr(config, "layer_types", None) or [zoo.SLIDING if slides else zoo.FULL] * len(report.specs)
    assert [spec.window for spec in report.specs] == [
        zoo.WINDOW if layer_type == zoo.SLIDING else None for layer_type in layer_types
    ]
    for spec in report.specs:
        assert spec.num_heads == 4
        assert spec.num_kv_heads == getattr(config, "num_key_value_heads", 4)
        assert (spec.head_size, spec.value_head_size) == head_sizes
        assert spec.scale == pytest.approx(scale)
        assert spec.softcap == getattr(config, "attn_logit_softcapping", None)
        assert spec.has_sinks == (name == "gpt_oss")
        assert spec.chunk is None


@every_architecture
def test_a_model_in_bfloat16_is_accepted(name: str) -> None:
    """Sensitive models amplify rounding, and a mixture of experts may route a token otherwise: neither is an error."""
    probe(zoo.draw(name, zoo.FACTORS[name], seed=0).to(torch.bfloat16))


@every_architecture
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_default_initialised_model_is_accepted(name: str, dtype: torch.dtype) -> None:
    report = probe(default_model(zoo.ARCHITECTURES[name]()).to(dtype))
    assert max(report.logits_error, report.attention_error) < (1e-5 if dtype == torch.float32 else 0.05)


def test_the_runner_says_how_it_runs_a_model() -> None:
    info = ModelRunner(zoo.build("gpt_oss"), EngineConfig(num_blocks=8)).info
    heads = "4 heads over 2 key/value heads of size 16"
    assert info.executor == "packed"
    assert info.attention_backend == "cpu"
    assert info.attention_calls == (f"2 x {heads}, window 12, sinks", f"1 x {heads}, sinks")
    assert max(info.logits_error, info.attention_error) < 1e-5


def test_the_chunks_of_llama_4_are_found() -> None:
    chunked = {"attention_chunk_size": 8, "layer_types": ["chunked_attention", zoo.FULL, "chunked_attention"]}
    config = tiny_gqa("llama4_text", num_local_experts=2, **chunked)
    assert [spec.chunk for spec in probe(default_model(config)).specs] == [8, None, 8]


def test_llama_4_is_limited_to_where_it_does_not_scale_by_place_in_the_row() -> None:
    model = default_model(tiny_gqa("llama4_text", floor_scale=40, num_local_experts=2, attention_chunk_size=8))
    report = probe(model)
    assert (report.max_model_len, report.max_row_len) == (39, 39)
    with pytest.raises(ModelError, match="max_num_batched_tokens is 64; this model accepts at most 39"):
        ModelRunner(model, EngineConfig(max_num_batched_tokens=64))


def test_a_window_that_attention_is_not_told_of_is_left_to_the_model() -> None:
    """Phi-3.5-MoE slides by a mask of its own making."""
    model = default_model(tiny_gqa("phimoe", num_local_experts=4, sliding_window=40))
    info = ModelRunner(model, EngineConfig(num_blocks=8)).info
    assert (info.executor, info.max_model_len) == ("rows", model.config.max_position_embeddings)
    assert "its sliding window of 40" in info.notes[0]


# ----------------------------------------------------------------------------- broken attention


class OtherSpec(TorchAttention):
    """Attends as if the model had asked for something else."""

    def __init__(self, block_size: int, dtype: torch.dtype, changes: dict[str, Any]) -> None:
        super().__init__(torch.device("cpu"), dtype, block_size)
        self.changes = changes

    def attend(self, query: Tensor, cache: PagedCache, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        spec = replace(spec, **self.changes)
        return super().attend(query, cache, spec, sinks if spec.has_sinks else None)


OTHER_SPECS = {
    "ignores the window": {"window": None},
    "drops the sinks": {"has_sinks": False},
    "wrong scale": {"scale": 1.0},
}


def sees_later_tokens(same_sequence: Tensor, later: Tensor) -> Tensor:
    return later


def sees_other_sequences(same_sequence: Tensor, later: Tensor) -> Tensor:
    return ~same_sequence


def sees_one_key_of_another(same_sequence: Tensor, later: Tensor) -> Tensor:
    return ~same_sequence & (torch.arange(same_sequence.shape[1]) == 0)


WIDER_MASKS = [sees_later_tokens, sees_other_sequences, sees_one_key_of_another]
"""Each gives the `[T, keys]` pairs that are seen though they must not be."""


def restarts_positions(batch: RaggedBatch) -> RaggedBatch:
    starts = torch.from_numpy(batch.kv_lens_host - batch.query_lens_host)
    return replace(batch, positions=batch.positions - starts.repeat_interleave(torch.from_numpy(batch.query_lens_host)))


def gives_logits_of_the_token_before(batch: RaggedBatch) -> RaggedBatch:
    return replace(batch, logit_rows=(batch.logit_rows - 1).clamp(min=0))


def writes_in_the_wrong_order(batch: RaggedBatch) -> RaggedBatch:
    group = batch.groups[0]
    return replace(batch, groups=(replace(group, kv_slots=group.kv_slots.flip(0)),))


def reads_its_blocks_in_the_wrong_order(batch: RaggedBatch) -> RaggedBatch:
    group = batch.groups[0]
    tables = group.block_tables_host.copy()
    tables[:, :2] = group.block_tables_host[:, [1, 0]]
    return replace(batch, groups=(replace(group, block_tables_host=tables),))


def reads_a_block_of_another(batch: RaggedBatch) -> RaggedBatch:
    group = batch.groups[0]
    tables = group.block_tables_host.copy()
    tables[:, 0] = tables[0, 0]
    return replace(batch, groups=(replace(group, block_tables_host=tables),))


OTHER_BATCHES = [
    gives_logits_of_the_token_before,
    writes_in_the_wrong_order,
    reads_its_blocks_in_the_wrong_order,
    reads_a_block_of_another,
]


def probe_with_other_spec(model: PreTrainedModel, changes: dict[str, Any]) -> ProbeReport:
    return probe_packed(own_copy(model), lambda block_size: OtherSpec(block_size, model.dtype, changes))


def probe_with_wider_mask(model: PreTrainedModel, also_seen: Callable[[Tensor, Tensor], Tensor]) -> ProbeReport:
    correct = reference.ragged_mask

    def mask(batch: RaggedBatch, window: int | None = None, chunk: int | None = None) -> Tensor:
        query_spans = torch.arange(len(batch.kv_lens_host)).repeat_interleave(torch.from_numpy(batch.query_lens_host))
        key_spans = torch.arange(len(batch.kv_lens_host)).repeat_interleave(torch.from_numpy(batch.kv_lens_host))
        same_sequence = query_spans[:, None] == key_spans
        return correct(batch, window, chunk) | also_seen(same_sequence, same_sequence & ~correct(batch))

    with mock.patch.object(reference, "ragged_mask", mask):
        return probe(model, "reference")


def probe_with_other_batch(model: PreTrainedModel, change: Callable[[RaggedBatch], RaggedBatch]) -> ProbeReport:
    pack = RaggedBatch.pack
    with mock.patch.object(RaggedBatch, "pack", lambda *args: change(pack(*args))):
        return probe(model, "reference")


def refusal() -> Any:
    """By what the model computed, not because something raised an error on the way."""
    return pytest.raises(ModelError, match=r"^\w+ (?!can not run as a packed row: \w+Error)")


INSENSITIVE = ["llama", "gpt2", "gpt_oss"]
"""GPT-OSS has all that can be ignored: windows, sinks, a scale."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", OTHER_SPECS)
def test_a_backend_that_misses_a_mechanism_is_caught_on_an_insensitive_model(change: str, dtype: torch.dtype) -> None:
    model = default_model(zoo.ARCHITECTURES["gpt_oss"]()).to(dtype)
    with refusal():
        probe_with_other_spec(model, OTHER_SPECS[change])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("also_seen", WIDER_MASKS)
@pytest.mark.parametrize("name", INSENSITIVE)
def test_attention_that_sees_too_much_is_caught_on_an_insensitive_model(
    name: str, also_seen: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    model = default_model(zoo.ARCHITECTURES[name]()).to(dtype)
    with refusal():
        probe_with_wider_mask(model, also_seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", OTHER_BATCHES)
@pytest.mark.parametrize("name", INSENSITIVE)
def test_a_wrong_batch_is_caught_on_an_insensitive_model(
    name: str, change: Callable[[RaggedBatch], RaggedBatch], dtype: torch.dtype
) -> None:
    model = default_model(zoo.ARCHITECTURES[name]()).to(dtype)
    with refusal():
        probe_with_other_batch(model, change)


@pytest.mark.parametrize("name", INSENSITIVE)
def test_positions_that_restart_with_each_chunk_are_caught_on_an_insensitive_model(name: str) -> None:
    """In float32: rounding to bfloat16 is as large as what rotary positions do to such a model."""
    with refusal():
        probe_with_other_batch(default_model(zoo.ARCHITECTURES[name]()), restarts_positions)


@pytest.mark.parametrize("changes", [{"scale": 0.25 * 1.1}, {"window": zoo.WINDOW + 1}], ids=str)
def test_a_slightly_wrong_mechanism_is_caught_on_an_insensitive_model(changes: dict[str, Any]) -> None:
    with refusal():
        probe_with_other_spec(default_model(zoo.ARCHITECTURES["gpt_oss"]()), changes)


def test_a_missing_softcap_is_caught_where_it_matters() -> None:
    """Scores of a default-initialised model are too small to be capped, and so right without a cap."""
    with refusal():
        probe_with_other_spec(zoo.build("gemma2"), {"softcap": None})


# ------------------------------------------------------------------------------- refused by its class

REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "bloom": (lambda: tiny("bloom"), "BloomForCausalLM takes no position_ids"),
    "mpt": (lambda: tiny("mpt", d_model=64, n_heads=4, n_layers=2), "MptForCausalLM takes no position_ids"),
    "falcon, rotary": (lambda: tiny("falcon", alibi=False), "FalconForCausalLM can not run as a packed row"),
    "falcon, alibi": (lambda: tiny("falcon", alibi=True), "FalconForCausalLM can not run as a packed row"),
    "gptj": (lambda: tiny("gptj", rotary_dim=8), "GPTJForCausalLM does its attention itself"),
    "codegen": (lambda: tiny("codegen", rotary_dim=8), "CodeGenForCausalLM does its attention itself"),
    "mamba": (lambda: tiny("mamba"), "MambaForCausalLM takes no position_ids"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_can_not_be_packed_is_refused_with_the_reason_and_left_as_it_was(name: str) -> None:
    make_config, reason = REFUSED[name]
    model = default_model(make_config())
    found, expected = model.config._attn_implementation, plain_logits(model)
    with pytest.raises(ModelError, match=reason) as raised:
        probe(model)
    assert "\n" not in str(raised.value)
    assert model.config._attn_implementation == found
    assert torch.equal(plain_logits(model), expected)


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_an_encoder_decoder_is_refused(model_type: str) -> None:
    sizes = {"d_model": 32, "num_layers": 1, "encoder_layers": 1, "decoder_layers": 1, "d_ff": 32, "vocab_size": 64}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(model_type, **sizes)).eval()
    with pytest.raises(ModelError, match=r"is an encoder-decoder; inflight runs decoder-only"):
        ModelRunner(model, EngineConfig())


STATEFUL: dict[str, Callable[[], PreTrainedConfig]] = {
    "lfm2": lambda: tiny_gqa("lfm2", layer_types=["conv", zoo.FULL, "conv"]),
    "jamba": lambda: tiny_gqa(
        "jamba", attn_layer_period=3, attn_layer_offset=1, num_experts=1, use_mamba_kernels=False
    ),
    "falcon_h1": lambda: tiny_gqa(
        "falcon_h1", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16
    ),
    "recurrent_gemma": lambda: tiny_gqa("recurrent_gemma"),
    "qwen3_next": lambda: tiny_gqa(
        "qwen3_next",
        layer_types=["linear_attention", zoo.FULL, "linear_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    ),
}
"""Their attention can be packed, but other layers carry a state along the row, from one sequence into the next."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_model_with_a_state_besides_attention_is_refused_whatever_its_weights(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(ModelError):
        probe(default_model(STATEFUL[name]()).to(dtype))


def test_a_mechanism_that_begins_beyond_the_probes_prompts_is_not_overlooked() -> None:
    """DeepSeek-V4 attends to summaries of 128 tokens each as well: of none of them in a short prompt."""
    config = tiny_gqa("deepseek_v4", sliding_window=zoo.WINDOW, n_routed_experts=4, num_experts_per_tok=2)
    model = default_model(config)
    prompts = [prompt * 3 for prompt in zoo.sample_sequences()]
    try:
        executor = packed_executor(model)
    except ModelError:
        return
    assert_packed_is_plain(model, packed_logits(executor, prompts), prompts)


def test_weights_that_are_not_numbers_are_refused() -> None:
    model = default_model(zoo.ARCHITECTURES["llama"]())
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    with pytest.raises(ModelError, match="LlamaForCausalLM are not finite even when it runs alone"):
        probe(model)


# --------------------------------------------------------------------------- a caller's own model


def plain_logits(model: PreTrainedModel) -> Tensor:
    """Logits of a call as a caller would make it, with whatever attention the model has."""
    with torch.no_grad():
        return model(torch.tensor(zoo.sample_sequences()[:1]), use_cache=False).logits


def use(model: PreTrainedModel) -> None:
    """Probe a model, and run it through an engine."""
    llm = LLM(model, num_blocks=64, block_size=8)
    llm.generate(zoo.sample_sequences(), SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "phi3_longrope", "stablelm", "gpt2"])
def test_a_callers_model_works_as_before(name: str, implementation: str) -> None:
    if name == "gpt_oss" and implementation == "sdpa":
        pytest.skip("transformers has no sdpa for GPT-OSS")
    model = zoo.draw(name, zoo.FACTORS[name], seed=0)
    model.set_attn_implementation(implementation)
    expected, random_state = plain_logits(model), torch.random.get_rng_state()
    use(model)
    assert torch.equal(plain_logits(model), expected)
    assert model.config._attn_implementation == implementation
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.random.get_rng_state(), random_state)


@every_architecture
def test_a_callers_model_can_still_be_trained(name: str) -> None:
    """Nothing is left in it that was made in inference mode."""
    model = zoo.draw(name, zoo.FACTORS[name], seed=0)
    use(model)
    model.requires_grad_(True)
    model(torch.tensor(zoo.sample_sequences()[:1]), use_cache=False).logits.square().mean().backward()
    assert model.get_input_embeddings().weight.grad.norm() > 0


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_callers_model_can_still_be_copied(copied: Callable[[PreTrainedModel], PreTrainedModel]) -> None:
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0)
    use(model)
    assert torch.equal(plain_logits(copied(model)), plain_logits(model))


def test_a_model_is_left_as_it_was_when_a_step_fails() -> None:
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0)
    expected = plain_logits(model)
    executor = packed_executor(model)
    with pytest.raises(IndexError):
        packed_logits(executor, [[zoo.VOCAB_SIZE + 1]])
    assert model.config._attn_implementation == "eager"
    assert torch.equal(plain_logits(model), expected)
    assert_packed_is_plain(model, packed_logits(executor, zoo.sample_sequences()), zoo.sample_sequences())


# ------------------------------------------------------------------------------------- threads

BLOCK_SIZE, NUM_BLOCKS, CHUNK = 4, 256, 16


def packed_executor(model: PreTrainedModel, backend: AttentionBackend | None = None) -> PackedExecutor:
    backend = backend or make_backend("torch", model.device, model.dtype, BLOCK_SIZE)
    own = own_copy(model)
    report = probe_packed(own, lambda block_size: make_backend("torch", own.device, own.dtype, block_size))
    executor = PackedExecutor(own, backend, report.specs)
    executor.allocate(NUM_BLOCKS)
    return executor


def packed_logits(
    executor: PackedExecutor, prompts: list[list[int]], before_step: Callable[[], object] = lambda: None
) -> list[Tensor]:
    """Each prompt's logits `[len, V]`, computed in chunks, all prompts side by side in scattered blocks."""
    tables = [array("i", range(number, NUM_BLOCKS, len(prompts))) for number in range(len(prompts))]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), CHUNK):
        spans = [
            Span(number, number, start, prompt[start : start + CHUNK], len(prompt[start : start + CHUNK]), len(prompt))
            for number, prompt in enumerate(prompts)
            if start < len(prompt)
        ]
        plan = StepPlan(tuple(spans), (tuple(tables[span.sequence_id] for span in spans),))
        before_step()
        step = executor.forward(RaggedBatch.pack(plan, BLOCK_SIZE, executor.model.device))
        for span, part in zip(spans, step.split([span.length for span in spans]), strict=True):
            logits[span.sequence_id].append(part)
    return [torch.cat(parts) for parts in logits]


def assert_packed_is_plain(model: PreTrainedModel, packed: list[Tensor], prompts: list[list[int]]) -> None:
    for ours, prompt in zip(packed, prompts, strict=True):
        theirs = zoo.plain_logits(model, prompt)
        assert (ours - theirs).abs().max() < 2e-5 * (theirs.max() - theirs.min())


def in_threads(*works: Callable[[threading.Barrier], Any]) -> list[Any]:
    """Results of functions that run at the same time; each is given a barrier to keep step with the others."""
    barrier = threading.Barrier(len(works), timeout=60)
    results: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            results[number] = works[number](barrier)
        except BaseException as error:
            barrier.abort()
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return results


def probe_at_the_same_time(models: list[PreTrainedModel]) -> None:
    def work(model: PreTrainedModel, barrier: threading.Barrier) -> list[ProbeReport]:
        reports = []
        for _ in range(5):
            barrier.wait()
            reports.append(probe(model))
        return reports

    expected = [probe(model).specs for model in models]
    results = in_threads(*(partial(work, model) for model in models))
    for model, specs, reports in zip(models, expected, results, strict=True):
        assert all(report.specs == specs for report in reports)
        assert model.config._attn_implementation == "eager"


def test_two_models_probed_at_the_same_time_do_not_disturb_each_other() -> None:
    probe_at_the_same_time([zoo.draw(name, zoo.FACTORS[name], seed=0) for name in ("gpt_oss", "gemma2")])


def test_one_model_probed_twice_at_the_same_time_is_accepted_twice() -> None:
    probe_at_the_same_time([zoo.draw("llama", zoo.FACTORS["llama"], seed=0)] * 2)


def test_two_models_run_at_the_same_time_do_not_disturb_each_other() -> None:
    """Every step of one begins together with a step of the other; each gives its own model's logits."""
    models = [zoo.draw("llama", zoo.FACTORS["llama"], seed) for seed in range(2)]
    prompts = [zoo.sample_sequences(seed) for seed in range(2)]
    executors = [packed_executor(model) for model in models]

    def work(number: int, barrier: threading.Barrier) -> list[list[Tensor]]:
        return [packed_logits(executors[number], prompts[number], barrier.wait) for _ in range(5)]

    results = in_threads(*(partial(work, number) for number in range(2)))
    for model, own_prompts, rounds in zip(models, prompts, results, strict=True):
        assert model.config._attn_implementation == "eager"
        for packed in rounds:
            assert_packed_is_plain(model, packed, own_prompts)


class Interrupted(TorchAttention):
    """Calls a function in the middle of every step: when the model's first layer attends."""

    def __init__(self, interrupt: Callable[[], object]) -> None:
        super().__init__(torch.device("cpu"), torch.float32, BLOCK_SIZE)
        self.interrupt = interrupt
        self.is_first = True

    def begin_step(self, batch: RaggedBatch) -> None:
        super().begin_step(batch)
        self.is_first = True

    def attend(self, query: Tensor, cache: PagedCache, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        if self.is_first:
            self.is_first = False
            self.interrupt()
        return super().attend(query, cache, spec, sinks)


def assert_overlapping_steps_are_right(first: PreTrainedModel, second: PreTrainedModel) -> None:
    """A step of the first ends while one of the second is running, if the second does not wait for its turn."""
    first_runs, second_runs, first_is_done = threading.Event(), threading.Event(), threading.Event()

    def in_first() -> None:
        first_runs.set()
        second_runs.wait(timeout=0.3)  # in vain if it rightly waits for us

    def in_second() -> None:
        second_runs.set()
        first_is_done.wait(timeout=60)

    prompt = zoo.sample_sequences()[0][:CHUNK]
    executors = packed_executor(first, Interrupted(in_first)), packed_executor(second, Interrupted(in_second))

    def run_first(_: threading.Barrier) -> list[Tensor]:
        try:
            return packed_logits(executors[0], [prompt])
        finally:
            first_is_done.set()

    def run_second(_: threading.Barrier) -> list[Tensor]:
        first_runs.wait(timeout=60)
        return packed_logits(executors[1], [prompt])

    for model, packed in zip((first, second), in_threads(run_first, run_second), strict=True):
        assert_packed_is_plain(model, packed, [prompt])
        assert model.config._attn_implementation == "eager"


def test_two_executors_of_one_model_do_not_disturb_each_other() -> None:
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0)
    assert_overlapping_steps_are_right(model, model)


def test_two_models_made_from_one_config_object_do_not_disturb_each_other() -> None:
    """`LlamaForCausalLM(config)` keeps the caller's config, so two such models share it."""
    first, second = (zoo.draw("llama", zoo.FACTORS["llama"], seed) for seed in range(2))
    for module in second.modules():
        if hasattr(module, "config"):
            module.config = first.config
    assert_overlapping_steps_are_right(first, second)
