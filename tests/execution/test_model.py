"""Loading: required files, refusals and their messages, and the resulting dtype and device."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from inflight import LLM
from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.execution.hf.load import available_cache_memory, has_fast_bfloat16, load_model, resolve_device
from inflight.execution.preparation.prepare import prepare
from tests import others, zoo

FAST_DTYPE = torch.bfloat16 if has_fast_bfloat16() else torch.float32
UP_PROJECTION = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama in float32. Tests must not change it; `broken_copy` makes a changed copy."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    zoo.build("llama").save_pretrained(folder)
    return folder


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor(zoo.sample_sequences()[:1]), use_cache=False).logits


def same_bits(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


# ------------------------------------------------------------------------------------- what loads


@pytest.mark.parametrize("as_source", [str, Path])
def test_a_saved_model_loads_with_the_same_bits_and_is_ready_to_run(saved: Path, as_source: type) -> None:
    model = load_model(as_source(saved), EngineConfig(dtype="float32"))
    assert same_bits(model, zoo.build("llama"))
    assert not model.training
    assert model.device == resolve_device("auto")


def test_sharded_checkpoints_load(tmp_path: Path) -> None:
    zoo.build("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert same_bits(load_model(tmp_path, EngineConfig(dtype="float32")), zoo.build("llama"))


def test_a_loaded_model_is_copied_in_evaluation_mode_but_shares_its_memory() -> None:
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0).train()
    own = load_model(model, EngineConfig())
    assert not any(module.training for module in own.modules())
    assert all(module.training for module in model.modules())
    assert own.config is not model.config
    pairs = zip(own.parameters(), model.parameters(), strict=True)
    assert all(ours is not theirs and ours.data_ptr() == theirs.data_ptr() for ours, theirs in pairs)


def test_a_model_that_writes_to_its_weights_is_copied_whole() -> None:
    model = copy.deepcopy(others.build("rwkv"))
    model.config.rescale_every = 2
    before = {name: each.clone() for name, each in model.state_dict().items()}
    LLM(model)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_a_loaded_model_of_several_dtypes_keeps_them() -> None:
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0).to(torch.bfloat16)
    model.model.layers[0].mlp.float()
    own = load_model(model, EngineConfig())
    assert [p.dtype for p in own.parameters()] == [p.dtype for p in model.parameters()]


# -------------------------------------------------------------------------------- what is refused


def truncate_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def delete_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def delete_one_weight(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(UP_PROJECTION))


def reshape_one_weight(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({UP_PROJECTION: torch.zeros(3, 64)}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def delete_one_shard(folder: Path) -> None:
    zoo.build("llama").save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    sorted(folder.glob("*.safetensors"))[1].unlink()


def delete_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama",')


def config_without_a_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": 64}')


def config_of_an_unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "nonesuch"}')


def config_of_an_encoder_decoder(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "t5"}')


def config_of_another_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 80}))


BROKEN: dict[Callable[[Path], None], str] = {
    truncate_weights: "header",
    empty_weights: "header",
    delete_weights: "model.safetensors",
    delete_one_weight: UP_PROJECTION,
    reshape_one_weight: UP_PROJECTION,
    delete_one_shard: "safetensors",
    delete_config: "config.json",
    config_that_is_no_json: "not a valid JSON file",
    config_without_a_type: "model_type",
    config_of_an_unknown_type: "nonesuch",
    config_of_an_encoder_decoder: "lacks some of the model's weights",
    config_of_another_size: ".weight",
}
"""What is wrong with a folder, and what the message must name in addition to the folder."""


@pytest.mark.parametrize("breaks", BROKEN)
def test_a_broken_folder_is_refused_with_one_sentence_that_names_it(
    saved: Path, tmp_path: Path, breaks: Callable[[Path], None]
) -> None:
    folder = tmp_path / "broken-llama"
    shutil.copytree(saved, folder)
    breaks(folder)
    with pytest.raises(ModelError) as raised:
        load_model(str(folder), EngineConfig())
    assert str(folder) in str(raised.value)
    assert BROKEN[breaks] in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_missing_folder_is_refused_by_name_and_not_searched_for_elsewhere(tmp_path: Path, load_format: str) -> None:
    for source in (tmp_path / "nowhere", str(tmp_path / "nowhere"), "./nowhere", "no/model/here"):
        with pytest.raises(ModelError, match=rf"^there is no model folder '{source}'; give a folder .* or a hub id"):
            load_model(source, EngineConfig(load_format=load_format))


def test_a_file_is_not_accepted_as_a_folder(saved: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no model folder '.*/model\.safetensors'"):
        load_model(saved / "model.safetensors", EngineConfig())


@pytest.mark.parametrize("device", ["nonesuch", "", "cuda:99"])
def test_an_unavailable_device_is_refused_by_name(saved: Path, device: str) -> None:
    for source in (str(saved), zoo.build("llama")):
        with pytest.raises(ModelError, match=rf"^device '{device}' cannot be used here: ") as raised:
            load_model(source, EngineConfig(device=device))
        assert "\n" not in str(raised.value)


# ----------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("checkpoint", "asked", "given"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", FAST_DTYPE),
        (torch.float16, "auto", FAST_DTYPE),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float16, "bfloat16", torch.bfloat16),
    ],
)
def test_a_checkpoint_on_a_cpu_gets_the_requested_dtype_or_its_own(
    tmp_path: Path, checkpoint: torch.dtype, asked: str, given: torch.dtype
) -> None:
    zoo.draw("llama", zoo.FACTORS["llama"], seed=0).to(checkpoint).save_pretrained(tmp_path)
    model = load_model(tmp_path, EngineConfig(device="cpu", dtype=asked))
    assert {parameter.dtype for parameter in model.parameters()} == {given}
    expected = zoo.build("llama").model.layers[0].mlp.up_proj.weight.to(checkpoint).to(given)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, expected)


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_what_is_found_names_the_dtype_of_the_checkpoint_beside_the_one_in_use(
    tmp_path: Path, own: torch.dtype
) -> None:
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0).to(own)
    model.save_pretrained(tmp_path)
    for source in (str(tmp_path), model):
        info = prepare(source, EngineConfig(device="cpu", dtype="float32", num_blocks=8)).info
        assert (info.checkpoint_dtype, info.dtype) == (str(own).removeprefix("torch."), "float32")


def test_a_checkpoint_that_names_no_dtype_runs_in_float32(tmp_path: Path) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(tmp_path, EngineConfig(device="cpu")).dtype == torch.float32


def test_float16_on_a_cpu_is_refused(saved: Path) -> None:
    half = zoo.draw("llama", zoo.FACTORS["llama"], seed=0).half()
    assert load_model(half, EngineConfig(device="cpu")).dtype == torch.float32
    for source, dtype in ((str(saved), "float16"), (zoo.build("llama"), "float16"), (half, "float16")):
        with pytest.raises(ModelError, match=r"float16 is unusably slow on a CPU; use float32, or bfloat16"):
            load_model(source, EngineConfig(device="cpu", dtype=dtype))
    assert zoo.build("llama").dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_converting_a_loaded_model_equals_loading_it_in_that_dtype(tmp_path: Path, name: str) -> None:
    """Tensors that transformers always keeps in float32 (rotary frequencies, router biases) stay in float32."""
    zoo.build(name).save_pretrained(tmp_path)
    config = EngineConfig(device="cpu", dtype="bfloat16")
    loaded = load_model(tmp_path, config)
    converted = load_model(zoo.draw(name, zoo.FACTORS[name], seed=0), config)
    loaded.set_attn_implementation("eager")
    assert converted.dtype == torch.bfloat16
    assert all(buffer.dtype == torch.float32 for key, buffer in converted.named_buffers() if "inv_freq" in key)
    assert torch.equal(logits(converted), logits(loaded))


def test_what_a_class_keeps_in_float32_may_have_a_dotted_name() -> None:
    """As DeepSeek V3's routers have since `transformers` 5.24."""
    model = zoo.build("deepseek_v3")
    model._keep_in_fp32_modules_strict = {"gate.weight"}
    converted = load_model(model, EngineConfig(device="cpu", dtype="bfloat16"))
    kept = [name for name, each in converted.named_parameters() if each.dtype == torch.float32]
    assert kept
    assert all(name.endswith(".gate.weight") for name in kept)


# ----------------------------------------------------------------------------------- dummy weights


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    zoo.ARCHITECTURES["llama"]().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    return tmp_path


def test_dummy_weights_depend_only_on_the_seed(config_only: Path) -> None:
    first, other = (load_model(config_only, EngineConfig(load_format="dummy", seed=seed)) for seed in (1, 2))
    torch.rand(3)
    again = load_model(config_only, EngineConfig(load_format="dummy", seed=1))
    assert same_bits(first, again)
    assert not same_bits(first, other)
    assert not first.training
    assert first(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_dummy_weights_do_not_change_the_random_state_of_the_caller(config_only: Path) -> None:
    before = torch.random.get_rng_state()
    load_model(config_only, EngineConfig(load_format="dummy"))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(("asked", "given"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_dummy_weights_have_the_requested_dtype(config_only: Path, asked: str, given: torch.dtype) -> None:
    model = load_model(config_only, EngineConfig(load_format="dummy", dtype=asked, device="cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {given}
    assert torch.get_default_dtype() == torch.float32


def test_a_config_without_weights_is_refused_unless_dummy_weights_are_requested(config_only: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(config_only, EngineConfig())


def test_dummy_weights_of_a_config_in_float16_are_not_float16_on_a_cpu(tmp_path: Path) -> None:
    config = zoo.ARCHITECTURES["llama"]()
    config.dtype = torch.float16
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    assert load_model(tmp_path, EngineConfig(load_format="dummy", device="cpu")).dtype == FAST_DTYPE


# -------------------------------------------------------------------------------------- the device


def test_auto_selects_an_available_device() -> None:
    assert torch.zeros(1, device=resolve_device("auto")).sum() == 0
    assert resolve_device("cpu") == torch.device("cpu")


def test_the_cache_may_take_a_share_of_host_memory() -> None:
    assert 2**28 < available_cache_memory(torch.device("cpu")) < 2**48
