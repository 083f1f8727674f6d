"""Examines a class with images, sounds or videos: compares tokens with those of the plain model's `generate`."""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from transformers import GenerationMixin, PreTrainedModel, ProcessorMixin

from inflight.census.finding import Finding, first_line
from inflight.census.sensitive import Sensitivity, build, sensitive_model
from inflight.census.tiny_configs import CLASSES_WITH, whole_config
from inflight.census.tiny_processors import (
    multimodal_class,
    random_image,
    random_sound,
    random_video,
    tiny_with_processor,
)
from inflight.contracts.api.errors import InvalidRequestError, ModelError
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.multimodal import KINDS
from inflight.entrypoints.llm import LLM
from inflight.execution.hf.model_call import forward_parameters
from inflight.text.processor import Processor

NUM_TOKENS = 8
NEAR_TIE = 1e-4
TEXTS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("The quick", ()),
    ("What is {0} fox", (0,)),
    ("{0} and {0}?", (1, 2)),
    ("What is {0} fox, and why", (0,)),
    ("a{0}b{0}c{0}", (2, 0, 1)),
)
"""Prompts, and the numbers of their images."""
WITH_ONE: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("The quick", ()),
    ("What is {0} fox", (0,)),
    ("{0}?", (1,)),
    ("What is {0} fox, and why", (0,)),
    ("a{0}b", (2,)),
)
"""With one a prompt: of sounds and videos, many processors take no more."""
BUDGETS = (24, 1024)
"""Tokens of a step: chunks end within images; or, where images run whole, room for the largest."""


def examine_with(items: str, model_type: str) -> Finding:
    """Examine a class of `CLASSES_WITH` with "images", "sounds" or "videos"."""
    start = time.perf_counter()
    kind = next(kind for kind, name in KINDS.items() if name == items)
    finding = Finding(model_type, CLASSES_WITH[items][model_type], "not built")
    try:
        model_class = multimodal_class(model_type)
        if reason := _why_not_causal(model_class, model_type):
            return replace(finding, outcome="not causal", reason=reason)
        config, processor = tiny_with_processor(model_type, kind)
        num_parameters = build(model_class, config).num_parameters()
        try:
            model, sensitivity = sensitive_model(model_class, config)
        except Exception:  # it does not run on tokens alone
            model, sensitivity = build(model_class, config), Sensitivity(0, 0, 0)
        finding = replace(
            finding,
            num_parameters=num_parameters,
            share_changed=sensitivity.share_changed,
            num_distinct=sensitivity.num_distinct,
            factor=sensitivity.factor,
        )
        prompts, expected, note = _with_expected(model, processor, kind)
        finding = _compared(model, processor, prompts, expected, replace(finding, outcome="failed"))
        finding = replace(finding, reason="; ".join(each for each in (finding.reason, note) if each))
    except Exception as error:
        finding = replace(finding, reason=first_line(error))
    return replace(finding, seconds=time.perf_counter() - start)


def _why_not_causal(model_class: type[PreTrainedModel], model_type: str) -> str:
    """Why a class is no decoder-only language model, by what it declares; "" if it may be one."""
    if whole_config(model_type).is_encoder_decoder:
        return "it is an encoder-decoder"
    if not issubclass(model_class, GenerationMixin):
        return "it does not generate token by token"
    if model_class.forward is torch.nn.Module.forward:
        return "it is several models, and has no forward pass of its own"
    return ""


Prompts: TypeAlias = list[dict[str, Any]]
Expected: TypeAlias = list[tuple[list[int], torch.Tensor]]


def _with_expected(model: PreTrainedModel, processor: ProcessorMixin, kind: str) -> tuple[Prompts, Expected, str]:
    """Prompts, the plain model's answers, and what it cannot take."""
    tried = {
        "": TEXTS if kind == "image" else WITH_ONE,
        f"one {kind} a prompt: it takes no more": WITH_ONE,
        f"one {kind} a prompt: it takes no more, and no text alone": WITH_ONE[1:],
    }
    for each, given in tried.items():
        note = each
        with suppress(Exception) if given != WITH_ONE[1:] else nullcontext():
            prompts = _prompts(processor, kind, given)
            expected = [_plain(model, processor, prompt) for prompt in prompts]
            break
    about, other = _prompts(processor, kind, WITH_ONE[1:3])
    name = next(name for name in about if name != "prompt")
    if _plain(model, processor, {**about, name: other[name]})[0] == _plain(model, processor, about)[0]:
        note = "; ".join(each for each in (note, f"another {kind}, the same answer") if each)
    return prompts, expected, note


def _prompts(processor: ProcessorMixin, kind: str, given: Sequence[tuple[str, tuple[int, ...]]]) -> Prompts:
    reader = Processor(processor).of(kind)
    name, made = f"{kind}s", cast("Callable[[int], Any]", random_video if kind == "video" else random_image)
    if kind == "audio":
        made = partial(random_sound, reader.sampling_rate)
    return [{"prompt": text.format(reader.placeholder), name: list(map(made, which))} for text, which in given]


@torch.no_grad()
def _plain(model: PreTrainedModel, processor: ProcessorMixin, prompt: dict[str, Any]) -> tuple[list[int], torch.Tensor]:
    """The plain model's tokens, and the logits `[NUM_TOKENS, V]` from which they were chosen."""
    names = {"images": "images", "audio": "audios", "videos": "videos"}
    given: dict[str, Any] = {name: prompt[each] for name, each in names.items() if prompt.get(each)}
    if given:
        given |= {"do_sample_frames": False, "return_metadata": True} if "videos" in given else {}
        types = {"return_mm_token_type_ids": True} if "mm_token_type_ids" in forward_parameters(model) else {}
        read: Any = processor(text=prompt["prompt"], return_tensors="pt", **given, **types).to(model.dtype)
        read.pop("video_metadata", None)
    else:
        read = processor.tokenizer(prompt["prompt"], return_tensors="pt", return_token_type_ids=False)
    output: Any = copy.deepcopy(model).generate(
        **read,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, -NUM_TOKENS:].tolist(), torch.cat(output.logits)


def _compared(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    prompts: Prompts,
    expected: Expected,
    finding: Finding,
) -> Finding:
    """Run the engine, twice: the second time with prefixes from the cache."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for budget in BUDGETS:
        options = {"max_num_batched_tokens": budget, "max_num_seqs": 4, "num_blocks": 1600, "block_size": 4}
        try:
            llm = LLM(copy.deepcopy(model), processor, **options)
            finding = replace(finding, executor=llm.model_info.executor, is_recorded=llm.model_info.is_recorded)
            for which in ("", ", from the cache"):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                if error := next((each.error for each in outputs if each.error), None):
                    return replace(finding, outcome="refused", reason=error)
                answers = [list(output.outputs[0].token_ids) for output in outputs]
                wrong = [
                    number
                    for number, (own, (plain, logits)) in enumerate(zip(answers, expected, strict=True))
                    if not is_as_good(own, plain, logits)
                ]
                if wrong:
                    return replace(finding, outcome="wrong", reason=f"prompts {wrong}{which}")
            num_tokens = 2 * NUM_TOKENS * len(prompts)
            in_one_piece, why = budget != BUDGETS[0], _why_generated(llm)
            finding = replace(finding, outcome="exact", reason="", num_tokens=num_tokens, in_one_piece=in_one_piece)
            if why is not None:
                finding = replace(finding, executor="generate", is_recorded=False, reason=why)
            return finding
        except (ModelError, InvalidRequestError) as error:
            finding = replace(finding, outcome="refused", reason=first_line(error))
            if "see each other" not in finding.reason:
                break
    return finding


def _why_generated(llm: LLM) -> str | None:
    """Why prompts with one item ran in the model's own `generate`, and how texts run; None: they did not."""
    outputs, executor = llm.engine.runner.encoder_outputs, llm.model_info.executor
    if executor == "generate":
        return llm.model_info.notes[-1]
    if outputs is None:
        return f"texts run as {executor}"
    whys = (each.why_generated for name, each in outputs.proofs.found.items() if name in KINDS)
    why = next((each for each in whys if each is not None), None)
    return None if why is None else f"texts run as {executor}: {why}"


def is_as_good(tokens: list[int], plain: list[int], logits: torch.Tensor) -> bool:
    """Whether tokens are the plain model's, up to the first that is as good within the tolerance."""
    if len(tokens) != len(plain):
        return False
    for own, other, row in zip(tokens, plain, logits, strict=True):
        if own != other:
            finite = row[torch.isfinite(row)]
            return bool(row[other] - row[own] <= NEAR_TIE * (finite.max() - finite.min()))
    return True
