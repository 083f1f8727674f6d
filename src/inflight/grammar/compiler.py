"""`GrammarCompiler`: compiles a `StructuredOutput` into a matcher at its start.

It writes each kind as a grammar, limits the cost of grammars, and caches matchers. Callers own the returned matchers.

Forced text is not restricted to the tokenizer's tokens (`no_forcing`): a mask has every token that the grammar allows,
and a special token is never generated for text that looks like it.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import cached_property
from threading import Lock, Thread, stack_size
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.structured_output import Reasoning, StructuredOutput
from inflight.grammar.json_schema import checked_schema
from inflight.grammar.marks import opaque_tokens, pieces_of, written_mark
from inflight.grammar.matcher import GrammarError, GrammarMatcher, reason
from inflight.grammar.vocabulary import Vocabulary
from inflight.text.tokenizer import Tokenizer

MAX_KEPT = 128
MAX_KEPT_CHARACTERS = 2**20
MAX_GRAMMAR_CHARACTERS = 2**16
MAX_GBNF_CHARACTERS = 2**13  # GBNF is converted in Python, in quadratic time
MAX_SECONDS = 3.0
MAX_LATE = 2
_OPTIONS = '%llguidance {"no_forcing": true}'
_SPACE = r"/[ \n\r\t]{0,4}/"

# In the library's units: about 50,000 of fuel or 20,000 items per millisecond, and half a kilobyte per state.
_LIMITS = LLParserLimits(
    max_grammar_size=500_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=100_000,
    verbose_errors=False,
)

# The library follows references by recursion, with up to 30 kB each; an overflow would end the process. Only the used
# part of the stack takes memory.
_STACK_BYTES = 2**29


class GrammarCompiler:
    """Compiles structured outputs and caches the latest ones. Thread-safe.

    Args:
        tokenizer: the model's.
        vocab_size: the width of its logits, V.
        eos_token_ids: the tokens that end a sequence.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._kept: OrderedDict[StructuredOutput, GrammarMatcher | str] = OrderedDict()  # or the refusal
        self._lock = Lock()
        self._late: list[Thread] = []

    def compile(self, output: StructuredOutput) -> GrammarMatcher:
        """Return a matcher for a new sequence. The first call also builds the tokenizer's table (half a second for
        50,000 tokens); compiling mostly takes milliseconds, and never more than `MAX_SECONDS`.

        Raises InvalidRequestError, in one sentence, if the structured output cannot be enforced.
        """
        with self._lock:
            if output in self._kept:
                return self._given(output)
            vocabulary = self._vocabulary
            self._late = [each for each in self._late if each.is_alive()]
            if len(self._late) >= MAX_LATE:
                raise InvalidRequestError("slow structured outputs are being compiled; try again later")
        made = self._in_time(lambda: _build(output, vocabulary, opaque_tokens(self._tokenizer)))
        with self._lock:
            self._kept[output] = made
            try:
                return self._given(output)
            finally:
                self._release()

    def _given(self, output: StructuredOutput) -> GrammarMatcher:
        self._kept.move_to_end(output)
        kept = self._kept[output]
        if isinstance(kept, str):
            raise InvalidRequestError(kept)
        return kept.clone()

    def _in_time(self, work: Callable[[], GrammarMatcher]) -> GrammarMatcher | str:
        """Run `work` in a thread with a deep stack; return its result or refusal. Abandons a slow thread."""
        future: Future[GrammarMatcher] = Future()
        thread = Thread(target=_settle, args=(future, work), name="inflight-grammar", daemon=True)
        with self._lock:  # the stack size applies to all threads that this process starts
            default_bytes = stack_size(_STACK_BYTES)
            try:
                thread.start()
            finally:
                stack_size(default_bytes)
        try:
            return future.result(MAX_SECONDS)
        except InvalidRequestError as error:
            return str(error)
        except TimeoutError:
            with self._lock:
                self._late.append(thread)
            raise InvalidRequestError(f"structured output takes more than {MAX_SECONDS:g} s to compile") from None

    def _release(self) -> None:
        while len(self._kept) > MAX_KEPT or sum(each.num_characters for each in self._kept) > MAX_KEPT_CHARACTERS:
            self._kept.popitem(last=False)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)


def _build(output: StructuredOutput, vocabulary: Vocabulary, tokens: Mapping[str, int]) -> GrammarMatcher:
    outer = (
        ["start: @asked"] if output.reasoning is None else _after(output.reasoning, output.kind == "reasoning", tokens)
    )
    grammars = [{"lark_grammar": "\n".join([_OPTIONS, *outer])}, {"name": "asked", **_written(output)}]
    inner = LLMatcher(vocabulary.table, json.dumps({"grammars": grammars}), log_level=0, limits=_LIMITS)
    if inner.is_error():
        raise _refusal(output, reason(inner))
    if warnings := inner.get_grammar_warnings():
        raise _refusal(output, warnings[0])
    matcher = GrammarMatcher(vocabulary, inner)
    try:  # refuses a grammar without a first token; the matcher caches this mask
        matcher.fill_mask(np.empty(vocabulary.num_words, dtype=np.int32))
    except GrammarError as error:
        raise _refusal(output, str(error)) from error
    return matcher


def _settle(future: "Future[GrammarMatcher]", work: Callable[[], GrammarMatcher]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # the waiting thread must learn of it
        future.set_exception(error)


def _after(reasoning: Reasoning, is_free: bool, tokens: Mapping[str, int]) -> list[str]:
    """Return the rules for reasoning and what follows it.

    Args:
        is_free: whether free text follows; it must not begin like reasoning.
        tokens: the ids of single-token markers.

    Raises `InvalidRequestError` if the reasoning cannot be limited.
    """
    first = pieces_of(reasoning.end, tokens)[0]
    begin, end = written_mark(reasoning.begin, tokens), written_mark(reasoning.end, tokens)
    limit = "" if reasoning.max_tokens is None else f"[max_tokens={reasoning.max_tokens}]"
    rules = [f"reasoning: {f'SPACE {begin}' if begin else ''} text {end} SPACE", f"SPACE: {_SPACE}"]
    if isinstance(first, int):
        rules += [f"text{limit}: TEXT" if limit else f"text: (TEXT | <[^{first}]>)*", r"TEXT: /(.|\n)*/"]
    elif limit:
        raise InvalidRequestError(
            f"reasoning cannot have at most {reasoning.max_tokens} tokens: {reasoning.end!r} does not begin with a "
            "single token"
        )
    else:
        rules = [f"reasoning: {f'SPACE {begin}' if begin else ''} ended SPACE", f"SPACE: {_SPACE}"]
        rules += [f"ended[lazy]: TEXT {end}", r"TEXT: /(.|\n)*/"]
    if not begin:
        return ["start: reasoning @asked", *rules]
    begun = pieces_of(reasoning.begin, tokens)[0]
    if not is_free or not isinstance(begun, int):
        return [f"start: reasoning @asked | {written_mark(reasoning.otherwise, tokens)} @asked", *rules]
    return [f"start: reasoning @asked | (OTHER | <[^{begun}]>) @asked |", r"OTHER: /\s*[^\s](.|\n)*/", *rules]


def _written(output: StructuredOutput) -> dict[str, Any]:
    """Return the structured output as a grammar of the library."""
    if output.kind == "reasoning":
        return {"lark_grammar": "start: (TEXT | <[*]>)*\nTEXT: /(.|\\n)*/"}
    if output.json_schema is not None:
        return {"json_schema": checked_schema(output.json_schema, is_exact=output.exact_schema)}
    if output.json_object:
        return {"json_schema": checked_schema('{"type": "object"}')}
    if output.regex is not None:
        return _regex(output.regex)
    if output.choice is not None:
        return _regex("|".join("".join(map(_literal, text)) for text in output.choice))
    assert output.grammar is not None
    most = MAX_GBNF_CHARACTERS if "::=" in output.grammar else MAX_GRAMMAR_CHARACTERS
    if len(output.grammar) > most:
        raise InvalidRequestError(f"the grammar has {len(output.grammar)} characters; at most {most} are accepted")
    try:
        return {"lark_grammar": any_to_lark(output.grammar)}
    except Exception as error:  # RecursionError among them
        raise InvalidRequestError(f"the grammar cannot be read: {_one_line(str(error))}") from error


def _regex(regex: str) -> dict[str, Any]:
    grammar: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0]
    return {"lark_grammar": grammar["lark_grammar"]}


def _literal(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"


def _refusal(output: StructuredOutput, why: str) -> InvalidRequestError:
    if "oneOf" in why:
        why = "oneOf is accepted only where its alternatives plainly exclude each other; write anyOf"
    if output.grammar is None:  # a position in the generated grammar is useless to the caller
        why = re.sub(r"^(at )?\d+\(\d+\): ", "", why).partition(" | start:")[0]
    return InvalidRequestError(f"{output.kind} cannot be enforced: {_one_line(why)}")


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:299] + "…"
