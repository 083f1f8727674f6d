"""Options are checked on creation by name, type and range; each refusal is one sentence that names the value."""

import pickle
from dataclasses import FrozenInstanceError, asdict, fields, replace
from string import Formatter
from typing import Any

import pytest

from inflight.contracts.api.config import (
    DebugConfig,
    EngineConfig,
    KVCacheConfig,
    PrefixCacheConfig,
    QuantizationConfig,
    SchedulingConfig,
    SpeculationConfig,
)
from inflight.contracts.api.errors import UnknownOptionError
from inflight.contracts.api.foreign_names import FOREIGN_NAMES
from inflight.contracts.api.options import flat_values, option_names
from inflight.contracts.api.params import MAX_SEED, SamplingParams

NAN, INF = float("nan"), float("inf")


def refusal_of(options: type, **given: Any) -> str:
    with pytest.raises(ValueError, match="must be") as caught:
        options(**given)
    return str(caught.value)


def is_one_sentence(message: str) -> bool:
    return "\n" not in message and len(message) < 200


# ------------------------------------------------------------------------------------- SamplingParams

BAD_SAMPLING_PARAMS = {
    "n": [0, -1, 1.0, True, None, "1", NAN],
    "temperature": [-0.1, -1, NAN, INF, -INF, None, "1", True, 1j],
    "top_p": [0, 0.0, -0.1, 1.1, 2, NAN, INF, None, "1", True],
    "top_k": [-2, 0.5, 1.0, True, None, "1", NAN, INF],
    "min_p": [-0.1, 1.1, NAN, INF, -INF, None, "0", False],
    "seed": [-1, MAX_SEED + 1, 1.0, True, "1", NAN],
    "max_tokens": [0, -1, 1.0, True, "16", NAN, INF],
    "min_tokens": [-1, 17, 1.0, True, None, "0", NAN],
    "truncate_prompt_tokens": [0, -1, 1.0, True, "1", NAN],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD_SAMPLING_PARAMS.items() for value in values],
    ids=lambda value: str(value),
)
def test_a_bad_sampling_parameter_is_refused_by_name_with_its_value(name: str, value: Any) -> None:
    message = refusal_of(SamplingParams, **{name: value})
    assert message.startswith(f"{name} is {value!r}; it must be ")
    assert is_one_sentence(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 0}, "n is 0; it must be an integer from 1 to 16384"),
        ({"temperature": NAN}, "temperature is nan; it must be a finite number of at least 0"),
        ({"top_p": 0}, "top_p is 0; it must be a number above 0 and at most 1"),
        ({"top_k": -2}, "top_k is -2; it must be an integer from -1 to 2147483647"),
        ({"min_p": 1.5}, "min_p is 1.5; it must be a number from 0 to 1"),
        ({"seed": -1}, f"seed is -1; it must be an integer from 0 to {MAX_SEED}"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; it must be an integer from 0 to 4"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5; it must be a number from -2 to 2"),
        ({"frequency_penalty": NAN}, "frequency_penalty is nan; it must be a number from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be a number from 0.01 to 100"),
        ({"logprobs": -1}, "logprobs is -1; it must be an integer from 0 to 1000"),
        ({"prompt_logprobs": True}, "prompt_logprobs is True; it must be an integer from 0 to 1000"),
        ({"logit_bias": {5: 101}}, "logit_bias[5] is 101; it must be a number from -100 to 100"),
        ({"logit_bias": {"5": 1}}, "a token id of logit_bias is '5'; it must be an integer of at least 0"),
        ({"logit_bias": [5]}, "logit_bias is [5]; it must be a dict of token ids and numbers"),
        ({"bad_words": "no"}, "bad_words is 'no'; it must be a list of non-empty strings"),
        (
            {"bad_words": [""]},
            "bad_words contains ''; it must be a list of strings of 1 to 256 characters",
        ),
        ({"prediction": 5}, "prediction is 5; it must be text or a list of token ids"),
        ({"prediction": "\ud800"}, "prediction is '\\ud800'; it must be text that UTF-8 can encode"),
        ({"prediction": [-1]}, "a member of prediction is -1; it must be an integer from 0 to 2147483647"),
        ({"bad_words": ["\ud800"]}, "bad_words contains '\\ud800'; it must be text that UTF-8 can encode"),
        ({"bad_words": ["a"] * 1025}, "bad_words has 1025 strings; it must be at most 1024"),
    ],
    ids=lambda value: "",
)
def test_a_refusal_names_what_is_accepted(given: dict[str, Any], message: str) -> None:
    assert refusal_of(SamplingParams, **given) == message


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [None], [5], [b"a"], b"a"], ids=repr)
def test_a_stop_string_that_is_empty_or_not_a_string_is_refused(stop: Any) -> None:
    message = refusal_of(SamplingParams, stop=stop)
    wrong = stop if isinstance(stop, str) else stop[-1]
    assert message == f"stop contains {wrong!r}; it must be a non-empty string or a list of such strings"


@pytest.mark.parametrize("wrong", [-1, 1.0, True, None, "a", NAN], ids=repr)
def test_a_bad_stop_token_is_refused(wrong: Any) -> None:
    message = refusal_of(SamplingParams, stop_token_ids=[7, wrong])
    assert message == f"a member of stop_token_ids is {wrong!r}; it must be an integer of at least 0"


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", 5), ("stop_token_ids", 5), ("temperature", 10**400), ("top_p", 10**400)],
    ids=["stop", "stop_token_ids", "temperature", "top_p"],
)
def test_a_value_that_raises_inside_the_check_is_refused_like_any_other(name: str, value: Any) -> None:
    assert refusal_of(SamplingParams, **{name: value}).startswith(name)


@pytest.mark.parametrize("name", ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "speculation"])
@pytest.mark.parametrize("value", ["no", None, 2])
def test_a_flag_that_is_neither_true_nor_false_is_refused(name: str, value: Any) -> None:
    assert refusal_of(SamplingParams, **{name: value}).startswith(f"{name} is {value!r}; it must be ")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"n": 100},
        {"temperature": 0},
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 10**6},
        {"min_p": 0},
        {"min_p": 1.0},
        {"seed": None},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"max_tokens": None},
        {"max_tokens": 1},
        {"min_tokens": 16},
        {"min_tokens": 1000, "max_tokens": None},
        {"stop": "\n"},
        {"stop": ["a", "b"]},
        {"stop": []},
        {"stop": None},
        {"stop_token_ids": (0, 5)},
        {"stop_token_ids": []},
        {"truncate_prompt_tokens": 1},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
        {"logit_bias": {0: -100, 5: 100.0}},
        {"logit_bias": {}},
        {"bad_words": ["a", " b"]},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False},
        {"prediction": "", "speculation": False},
        {"prediction": [1, 2]},
    ],
    ids=str,
)
def test_good_sampling_parameters_are_kept_as_given(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    assert {name: getattr(params, name) for name in given} == given


def test_defaults_match_vllm() -> None:
    assert SamplingParams() == SamplingParams(
        n=1, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, max_tokens=16, min_tokens=0, stop=None
    )


def test_stop_strings_is_always_a_tuple() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


# ------------------------------------------------------------------------------------- EngineConfig

BAD_CONFIG = {
    "dtype": ["float64", "", None, 32],
    "load_format": ["safetensors", None],
    "attention_backend": ["flash", None],
    "max_model_len": [0, -1, 1.0, True, "8", NAN, INF],
    "limit_mm_per_prompt": [4, {"image": -1}, {"image": True}, {"image": "4"}, {"page": 1}, [("image", 4)]],
    "max_num_seqs": [0, -1, 1.0, True, None, "8", NAN, INF],
    "max_num_batched_tokens": [0, -1, 1.0, True, None, "8", NAN, INF],
    "block_size": [0, -1, 1.0, True, None, "8", NAN, INF],
    "num_blocks": [0, -1, 1.0, True, "8", NAN, INF],
    "kv_cache_memory": [0, -1, 1e9, True, "1 GB", NAN, INF],
    "seed": [-1, MAX_SEED + 1, 1.0, True, None, "1", NAN],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD_CONFIG.items() for value in values],
    ids=lambda value: str(value),
)
def test_a_bad_engine_option_is_refused_by_name_with_its_value(name: str, value: Any) -> None:
    message = refusal_of(EngineConfig, **{name: value})
    assert message.startswith(f"{name} is {value!r}; it must be ")
    assert is_one_sentence(message)


def test_the_refusal_of_an_unknown_choice_lists_all_choices() -> None:
    message = refusal_of(EngineConfig, dtype="float64")
    assert message == "dtype is 'float64'; it must be one of 'auto', 'float32', 'bfloat16', 'float16'"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dtype": "bfloat16", "device": "cuda:1", "load_format": "dummy", "attention_backend": "reference"},
        {"max_model_len": 1, "num_blocks": 1, "kv_cache_memory": 1, "block_size": 1},
        {"max_model_len": None, "num_blocks": None, "kv_cache_memory": None},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1, "seed": MAX_SEED},
        {"max_num_seqs": 64, "max_num_batched_tokens": 8},
    ],
    ids=str,
)
def test_good_engine_options_are_kept_as_given(given: dict[str, Any]) -> None:
    values = flat_values(EngineConfig(**given))
    assert {name: values[name] for name in given} == given


def test_groups_of_options_are_given_nested_or_flat_or_both() -> None:
    nested = EngineConfig(kv_cache=KVCacheConfig(dtype="int8", num_blocks=9), speculation={"method": "off"})
    assert nested == EngineConfig(kv_cache_dtype="int8", num_blocks=9, speculation="off")
    assert EngineConfig(kv_cache=KVCacheConfig(dtype="int8"), num_blocks=9, speculation="off") == nested
    assert nested.replace(num_blocks=5).kv_cache == KVCacheConfig(dtype="int8", num_blocks=5)
    assert EngineConfig(**asdict(nested)) == nested
    sized = EngineConfig(quantization="int4", quantization_group_size=64, num_blocks=9)
    assert sized.replace(quantization=QuantizationConfig(method="int8")).quantization.group_size == 32
    assert sized.replace(quantization={"method": "int4"}, num_blocks=5) == EngineConfig(
        quantization="int4", num_blocks=5
    )
    with pytest.raises(ValueError, match=r"^kv_cache is 3; it must be a KVCacheConfig, or a dict$"):
        EngineConfig(kv_cache=3)
    with pytest.raises(ValueError, match=r"^kv_cache_memory is 0; it must be an integer of at least 1$"):
        EngineConfig(kv_cache={"memory": 0})
    with pytest.raises(UnknownOptionError, match="KVCacheConfig has no option 'sise'"):
        EngineConfig(kv_cache={"sise": 1})


# ------------------------------------------------------------------------------------- both

both = pytest.mark.parametrize("options", [SamplingParams, EngineConfig])


@pytest.mark.parametrize(
    ("options", "name", "hint"),
    [
        (SamplingParams, "max_token", "did you mean 'max_tokens'?"),
        (SamplingParams, "temprature", "did you mean 'temperature'?"),
        (SamplingParams, "logits", "did you mean 'logit_bias'?"),
        (SamplingParams, "beams", "it accepts bad_words, frequency_penalty, ignore_eos, "),
        (SamplingParams, "max_new_tokens", "max_tokens is the most tokens to generate"),
        (SamplingParams, "guided_json", "structured_output takes a schema, "),
        (EngineConfig, "gpu_memory_utilization", "kv_cache_memory says how many bytes keys and values may take"),
        (EngineConfig, "pipeline_parallel_size", "a model runs on one device here"),
        (EngineConfig, "swap_space", "nothing is swapped or offloaded here"),
        (EngineConfig, "max_batched_tokens", "max_num_batched_tokens is the most tokens of a step"),
        (EngineConfig, "max_seqs", "did you mean 'max_num_seqs'?"),
        (EngineConfig, "blocksize", "did you mean 'block_size'?"),
        (EngineConfig, "gpus", "it accepts adapter_memory, adapters, aging_steps, attention_backend, "),
    ],
)
def test_an_unknown_option_is_refused_with_a_hint(options: type, name: str, hint: str) -> None:
    with pytest.raises(UnknownOptionError) as caught:
        options(**{name: 1})
    assert str(caught.value).startswith(f"{options.__name__} has no option {name!r}; {hint}")


def test_what_other_engines_call_otherwise_is_explained_with_options_that_exist() -> None:
    ours = option_names(EngineConfig) | option_names(SamplingParams)
    assert not ours & FOREIGN_NAMES.keys()
    for name, text in FOREIGN_NAMES.items():
        assert {named for _, named, _, _ in Formatter().parse(text) if named is not None} <= ours, name
        assert is_one_sentence(f"EngineConfig has no option {name!r}; {text}")


@both
@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_the_refusal_of_an_unknown_option_is_a_value_error_and_a_type_error(
    options: type, error: type[Exception]
) -> None:
    with pytest.raises(error, match="has no option 'no_such_thing'"):
        options(no_such_thing=1)


@both
def test_options_are_keyword_only(options: type) -> None:
    with pytest.raises(TypeError, match="positional"):
        options(1)


@both
def test_options_are_immutable(options: type) -> None:
    made = options(seed=3)
    with pytest.raises(FrozenInstanceError):
        made.seed = 4
    assert made.seed == 3


@both
def test_a_modified_copy_is_checked_like_new_options(options: type) -> None:
    assert replace(options(seed=3), seed=4) == options(seed=4)
    with pytest.raises(ValueError, match="seed is -1; it must be"):
        replace(options(seed=3), seed=-1)


@pytest.mark.parametrize(
    "made",
    [
        SamplingParams(),
        SamplingParams(n=2, temperature=0.5, seed=7, stop=["a"], stop_token_ids=[1], max_tokens=None),
        EngineConfig(),
        EngineConfig(dtype="float32", num_blocks=8, max_model_len=128),
    ],
    ids=["SamplingParams", "SamplingParams, some set", "EngineConfig", "EngineConfig, some set"],
)
def test_options_survive_pickling(made: Any) -> None:
    assert pickle.loads(pickle.dumps(made)) == made


GROUPS = [QuantizationConfig, KVCacheConfig, PrefixCacheConfig, SchedulingConfig, SpeculationConfig, DebugConfig]


@pytest.mark.parametrize("options", [SamplingParams, EngineConfig, *GROUPS])
def test_every_option_is_explained_in_the_docstring(options: type) -> None:
    explained = options.__doc__ or ""
    assert [field.name for field in fields(options) if f"        {field.name}: " not in explained] == []
