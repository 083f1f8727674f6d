"""What models are expected to take, and what they take."""

from pathlib import Path

from inflight import LLM
from inflight.contracts.api.config import EngineConfig
from inflight.demo_model import DEMO_MODEL
from inflight.host.machine import usable_memory
from inflight.server.models.loading import (
    BYTES_OF_PROCESS,
    bytes_before_load,
    bytes_when_loaded,
    cache_limit,
    weight_bytes,
)


def test_weights_are_found_in_folders_and_files(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.gguf", "model-00002-of-00002.gguf", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(bytes(100))
    assert weight_bytes(tmp_path) == 200
    assert weight_bytes(tmp_path / "model-00001-of-00002.gguf") == 200
    (tmp_path / "a.safetensors").write_bytes(bytes(30))
    assert weight_bytes(tmp_path) == 30
    assert weight_bytes("org/model") == weight_bytes(tmp_path / "missing") == 0


def test_an_engine_takes_weights_its_cache_and_a_process() -> None:
    llm = LLM(kv_cache_memory=2**24)
    info = llm.model_info
    cache_bytes = info.num_blocks * info.block_size * info.kv_bytes_per_token
    assert 0.9 * 2**24 < cache_bytes <= 2**24
    weights = sum(each.num_bytes for each in info.weights)
    assert weights >= 4 * info.num_parameters  # float32
    assert bytes_when_loaded(info) == weights + cache_bytes + BYTES_OF_PROCESS
    expected = bytes_before_load(DEMO_MODEL, 2**24)
    assert expected == int(1.6 * weight_bytes(DEMO_MODEL)) + 2**24 + BYTES_OF_PROCESS


def test_the_default_cache_is_divided_among_engines() -> None:
    config = EngineConfig()
    whole, share = cache_limit(config, 1), cache_limit(config, 4)
    assert whole == usable_memory() // 4
    assert share == whole // 4
    assert cache_limit(EngineConfig(kv_cache_memory=1000), 4) == 1000
    assert cache_limit(EngineConfig(num_blocks=10), 4) is None
