"""Other engines' options and their names here. A name in braces is one of ours."""

from collections.abc import Callable

_ONE_DEVICE = "a model runs on one {device} here"
_NO_SWAPPING = "nothing is swapped or offloaded here: a preempted sequence is computed again"
_CACHE = "{kv_cache_memory} says how many bytes keys and values may take"
_BUDGET = "{max_num_batched_tokens} is the most tokens of a step"
_CONTEXT = "{max_model_len} is the most tokens of a sequence"
_CHUNKS = "prompts are always chunked: {max_num_batched_tokens} and {max_prefill_tokens_per_step} say how"
_SLOTS = "{max_num_seqs} is the most sequences that run at once"
_QUANTIZATION = "{quantization} may be 'int8' or 'int4'"
_THREADS = "{num_threads} says how many threads compute"
_NOT_COMPILED = "nothing is compiled: {record_forward}, on by default, takes the Python out of a step"
_STRUCTURE = "{structured_output} takes a schema, a regular expression, a choice or a grammar"
_SPECULATION = (
    "{speculation} may be 'auto', 'lookup', 'grammar', 'draft' or 'off', and {draft_model} names a small model"
)
_DRAFT = "{draft_model} is the small draft model"
_GREEDY = "{temperature} 0 takes the likeliest token, and any other samples"

FOREIGN_NAMES = {
    "gpu_memory_utilization": _CACHE,
    "kv_cache_memory_bytes": _CACHE,
    "mem_fraction_static": _CACHE,
    "num_gpu_blocks_override": "{num_blocks} is the number of blocks in the cache",
    "swap_space": _NO_SWAPPING,
    "cpu_offload_gb": _NO_SWAPPING,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": "replicas says how many engines there are",
    "device_map": _ONE_DEVICE,
    "max_batched_tokens": _BUDGET,
    "max_batch_tokens": _BUDGET,
    "max_num_tokens": _BUDGET,
    "max_batch_prefill_tokens": _BUDGET,
    "max_batch_total_tokens": _BUDGET,
    "chunked_prefill_size": _BUDGET,
    "enable_chunked_prefill": _CHUNKS,
    "long_prefill_token_threshold": _CHUNKS,
    "max_num_partial_prefills": _CHUNKS,
    "max_batch_size": _SLOTS,
    "max_running_requests": _SLOTS,
    "max_concurrent_requests": _SLOTS,
    "parallel": _SLOTS,
    "context_length": _CONTEXT,
    "max_seq_len": _CONTEXT,
    "max_total_tokens": _CONTEXT,
    "n_ctx": _CONTEXT,
    "ctx_size": _CONTEXT,
    "speculative_config": _SPECULATION,
    "speculative_algorithm": _SPECULATION,
    "spec_type": _SPECULATION,
    "assistant_model": _DRAFT,
    "speculative_model": _DRAFT,
    "model_draft": _DRAFT,
    "prompt_lookup_num_tokens": "{max_draft_tokens} is the most draft tokens of a sequence in a step",
    "num_speculative_tokens": "{max_draft_tokens} is the most draft tokens of a sequence in a step",
    "draft_max": "{max_draft_tokens} is the most draft tokens of a sequence in a step",
    "enforce_eager": "{record_forward} may be off",
    "compile": _NOT_COMPILED,
    "compilation_config": _NOT_COMPILED,
    "torch_compile": _NOT_COMPILED,
    "scheduling_policy": "{policy} may be 'fcfs' or 'priority'",
    "torch_dtype": "{dtype} is that of weights, activations and cache",
    "load_in_8bit": _QUANTIZATION,
    "load_in_4bit": _QUANTIZATION,
    "n_threads": _THREADS,
    "threads": _THREADS,
    "download_dir": "the environment's HF_HOME says where checkpoints are kept",
    "max_new_tokens": "{max_tokens} is the most tokens to generate",
    "min_new_tokens": "{min_tokens} is the fewest tokens before a stop",
    "do_sample": _GREEDY,
    "use_beam_search": _GREEDY,
    "num_return_sequences": "{n} is the number of sequences for each prompt",
    "best_of": "{n} is the number of sequences for each prompt, and all of them are returned",
    "stop_words": "{stop} takes strings that end the text",
    "stop_strings": "{stop} takes strings that end the text",
    "eos_token_id": "{stop_token_ids} end a sequence besides the model's own",
    "guided_decoding": _STRUCTURE,
    "structured_outputs": _STRUCTURE,
    "guided_json": _STRUCTURE,
    "guided_regex": _STRUCTURE,
    "guided_choice": _STRUCTURE,
    "guided_grammar": _STRUCTURE,
    "response_format": _STRUCTURE,
}


class _Spelled(dict[str, str]):
    """Maps each name to itself, as a caller spells it."""

    def __init__(self, spell: Callable[[str], str]) -> None:
        self._spell = spell

    def __missing__(self, name: str) -> str:
        return self._spell(name)


def hint(name: str, spell: Callable[[str], str] = str) -> str | None:
    """Return our counterpart of another engine's option `name`; None if it is unknown.

    Args:
        spell: how the caller writes one of our options.
    """
    text = FOREIGN_NAMES.get(name)
    return None if text is None else text.format_map(_Spelled(spell))
