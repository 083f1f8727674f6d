"""A second start of the same files neither proves nor traces, and gives the same bits; any change proves again."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.mamba import modeling_mamba

from inflight import LLM, SamplingParams
from inflight.contracts.api.config import EngineConfig
from inflight.demo_model import DEMO_MODEL
from inflight.entrypoints.quantization import quantize
from inflight.execution.graph import trace
from inflight.execution.hf import mixer_hook
from inflight.execution.hf.load import load_model
from inflight.execution.kernels import cache_folder, library
from inflight.execution.preparation import packed_proof, proof, proof_result
from inflight.execution.preparation.choice import EARLIER, Preparation
from inflight.execution.preparation.proof_result import preparation_key
from inflight.execution.preparation.result_cache import ResultCache
from tests import others, zoo
from tests.execution import this_cpu
from tests.gguf import files

PROMPTS = [list(range(1, 30)), [7, 8, 9]]
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=3)


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was proved or traced; results are kept in a folder of the test's."""
    seen: list[str] = []
    folder = tmp_path / "cache"
    of_the_test = classmethod(lambda cls, kind: cls(folder / kind.__name__, kind))
    monkeypatch.setattr(ResultCache, "of_the_user", of_the_test)
    for module, name in ((proof, "plain_logits"), (packed_proof, "find_calls"), (trace, "_trace")):
        original = getattr(module, name)

        def watched(*args: Any, original: Callable[..., Any] = original, name: str = name, **options: Any) -> Any:
            seen.append(name)
            return original(*args, **options)

        monkeypatch.setattr(module, name, watched)
    return seen


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def outputs(llm: LLM) -> list[Any]:
    return [
        (each.token_ids, [{token: entry.logprob for token, entry in step.items()} for step in each.logprobs or ()])
        for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        for each in output.outputs
    ]


PACKED = ("llama", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3", "gpt2", "gemma4")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*PACKED, "bloom", "mamba", "rwkv"])
def test_a_second_start_proves_nothing_and_gives_the_same_bits(
    name: str, dtype: str, proofs: list[str], tmp_path: Path
) -> None:
    this_cpu.needs(getattr(torch, dtype))
    folder = saved((zoo.build if name in zoo.ARCHITECTURES else others.build)(name), tmp_path / "model")
    first = LLM(folder, dtype=dtype, **others.options(num_blocks=64))
    given = outputs(first)
    assert proofs
    proofs.clear()
    second = LLM(folder, dtype=dtype, **others.options(num_blocks=64))
    assert proofs == []
    assert outputs(second) == given
    assert second.model_info == replace(first.model_info, proved_on=second.model_info.proved_on)
    assert second.model_info.proved_on == first.model_info.proved_on.removesuffix(EARLIER) + EARLIER


OPTIONS: list[dict[str, Any]] = [
    {"quantization": "int8", "dtype": "bfloat16"},
    {"quantization": "int4"},
    {"quantization": "int4", "quantization_arithmetic": "exact"},
    {"adapters": {}},
    {"record_forward": False},
    {"load_format": "dummy"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_goes_with_other_options(options: dict[str, Any], proofs: list[str], tmp_path: Path) -> None:
    this_cpu.needs(torch.uint8)
    this_cpu.needs(getattr(torch, options.get("dtype", "float32")))
    folder = saved(zoo.build("qwen3"), tmp_path / "model")
    given = outputs(LLM(folder, **options))
    proofs.clear()
    assert outputs(LLM(folder, **options)) == given
    assert proofs == []


def test_a_second_process_hooks_what_mixes_tokens(
    proofs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(others.build("mamba"), tmp_path / "model")
    given = outputs(LLM(folder, record_forward=False))
    proofs.clear()
    hooked = {name: each for name, each in vars(modeling_mamba).items() if hasattr(each, mixer_hook._HOOKED)}
    assert len(hooked) == 2
    for name, each in hooked.items():
        monkeypatch.setattr(modeling_mamba, name, each.__wrapped__)  # as in another process
    assert outputs(LLM(folder, record_forward=False)) == given
    assert proofs == []


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_it_goes_with_gguf_files(kind: str, proofs: list[str], tmp_path: Path) -> None:
    this_cpu.needs(torch.uint8)
    path = tmp_path / "model.gguf"
    files.write(path, files.tiny("llama"), lambda name: kind if "attn" in name or "ffn" in name else "F32")
    given = outputs(LLM(path))
    proofs.clear()
    assert outputs(LLM(path)) == given
    assert proofs == []
    shutil.copy(path, tmp_path / "copy.gguf")
    LLM(tmp_path / "copy.gguf")
    assert proofs, "another file"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_it_goes_with_quantised_checkpoints(name: str, proofs: list[str], tmp_path: Path) -> None:
    this_cpu.needs(torch.uint8)
    quantize(saved(zoo.build(name), tmp_path / "model"), tmp_path / "out", use_tqdm=False)
    given = outputs(LLM(tmp_path / "out", dtype="float32"))
    proofs.clear()
    assert outputs(LLM(tmp_path / "out", dtype="float32")) == given
    assert proofs == []


@pytest.mark.thorough
def test_it_goes_with_a_model_of_the_hub(tmp_path: Path) -> None:
    """In its cache, as after a download."""
    commit, repository = "a" * 40, tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(DEMO_MODEL, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (tmp_path / "inflight").mkdir()
    for each in cache_folder().glob("*.so"):
        (tmp_path / "inflight" / each.name).symlink_to(each)
    asked = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(tmp_path)}
    environment = os.environ | asked | {"INFLIGHT_CACHE_PREPARATIONS": "1"}
    command = [sys.executable, "-m", "inflight", "info", "org/tiny", "--json"]
    done = [subprocess.run(command, capture_output=True, text=True, env=environment) for _ in range(2)]
    proved = [json.loads(each.stdout)["proved_on"] for each in done]
    assert proved == ["a float32 proxy", f"a float32 proxy{EARLIER}"]


def key(folder: Path, **options: Any) -> str | None:
    config = EngineConfig(**options)
    model = load_model(folder, config)
    return preparation_key(model, config, folder)


def test_the_key_changes_with_each_of_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(zoo.build("llama"), tmp_path / "model")
    first = key(folder)
    assert first is not None
    assert key(folder) == key(folder, verify=True) == key(shutil.copytree(folder, tmp_path / "elsewhere")) == first
    keys = [first]

    def expect_another(**options: Any) -> None:
        keys.append(key(folder, **options))
        assert None not in keys
        assert len(set(keys)) == len(keys)

    for option in ({"block_size": 8}, {"max_num_batched_tokens": 99}, {"executor": "packed"}, {"dtype": "bfloat16"}):
        expect_another(**option)
    for target, name, value in (
        (proof_result, "version", lambda name: "0.0"),
        (proof_result, "SOURCES", tmp_path),
        (proof_result, "kernels_in_use", lambda: "avx1024"),
        (library, "kernels_name", lambda: "of another compiler"),
        (library, "instruction_sets", lambda: "avx1024"),
        (proof_result, "num_threads", lambda: 77),
        (torch.backends.cpu, "get_cpu_capability", lambda: "AVX1024"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(target, name, value)
            expect_another()
    for name in ("ONEDNN_MAX_CPU_ISA", "INFLIGHT_TRIES"):
        with monkeypatch.context() as changed:
            changed.setenv(name, "1")
            expect_another()
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    expect_another()
    written = (folder / "config.json").read_text()
    (folder / "config.json").write_text(written.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    expect_another()


def test_other_weights_that_look_like_the_same_file_are_found_out(proofs: list[str], tmp_path: Path) -> None:
    folder, other = (saved(zoo.build("gemma2", seed), tmp_path / str(seed)) for seed in (0, 1))
    LLM(folder)
    weights = folder / "model.safetensors"
    stat = weights.stat()
    shutil.copy(other / "model.safetensors", weights)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights.stat().st_size == stat.st_size
    proofs.clear()
    expected = outputs(LLM(zoo.build("gemma2", 1)))
    proofs.clear()
    assert outputs(LLM(folder)) == expected
    assert proofs
    proofs.clear()
    assert outputs(LLM(folder)) == expected
    assert not proofs


def test_a_program_that_does_not_fit_is_made_again(proofs: list[str], tmp_path: Path) -> None:
    folder = saved(zoo.build("llama"), tmp_path / "model")
    given = outputs(LLM(folder))
    cache = ResultCache.of_the_user(Preparation)
    (path,) = (tmp_path / "cache" / "Preparation").iterdir()
    found = cache.find(path.name)
    assert found is not None
    assert found.program is not None
    handles = {place: name.replace("layers.1", "layers.7") for place, name in found.program.handles.items()}
    sizes = [replace(each, num_bytes=each.num_bytes + 4) for each in found.program.constants]
    half = found.program.codes[: len(found.program.codes) // 2]
    for changes in ({"handles": handles}, {"constants": sizes}, {"codes": half}):
        cache.keep(path.name, replace(found, program=replace(found.program, **changes)))
        proofs.clear()
        assert outputs(LLM(folder)) == given
        assert proofs
        assert cache.find(path.name) == found


def test_verify_proves_again(proofs: list[str], tmp_path: Path) -> None:
    folder = saved(zoo.build("llama"), tmp_path / "model")
    LLM(folder)
    proofs.clear()
    LLM(folder, verify=True)
    assert proofs


def test_a_callers_model_and_code_of_a_checkpoint_are_proved_at_every_start(proofs: list[str]) -> None:
    for _ in range(2):
        proofs.clear()
        assert LLM(zoo.build("llama")).model_info.proved_on == "the model itself"
        assert proofs
