"""Compares llguidance and xgrammar for structured output: correctness, speed, start-up, memory and threads.

python benchmarks/grammar_libraries.py [--suite JSON-Schema-Test-Suite/tests/draft2020-12] [--write]

- Correctness: valid and invalid texts for schemas, regular expressions and grammars, fed token by token. Invalid texts
  matter most: a library that accepts one has silently ignored a keyword. Refusing to compile is honest. With `--suite`,
  also the official tests of JSON Schema (github.com/json-schema-org/JSON-Schema-Test-Suite).
- Speed: masks along the tokens of valid texts, with the embedded model's vocabulary and with one of 50,257 tokens
  (byte-level BPE trained on the sources in site-packages: real words, JSON, spaces); compiling each schema.
- Building the tokenizer's table; memory; whether other Python threads run while masks are computed.

Each library runs in a process of its own, so that memory can be compared. Both use their defaults, except that
llguidance does not force the tokenizer's own tokens where text must come next, as in inflight.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from inflight.demo_model import DEMO_MODEL

RESULTS = Path(__file__).resolve().parent / "results"
LIBRARIES = ("llguidance", "xgrammar")
LARGE_VOCABULARY = 50257
ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string", "minLength": 1}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["street", "zip"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", "blue"]}, "minItems": 1, "maxItems": 3},
        "address": {"$ref": "#/$defs/address"},
        "score": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
    "required": ["name", "age", "born", "tags", "address", "score"],
    "additionalProperties": False,
    "$defs": {"address": ADDRESS},
}
ANNA = {
    "name": "Anna Müller",
    "age": 42,
    "born": "1984-02-29",
    "tags": ["red", "grün"],
    "address": {"street": "Long Street 12, second floor", "zip": "12345"},
    "score": 3.25,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "parts": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["n", "parts"],
            "additionalProperties": False,
        }
    },
}
LEAF = {"n": 1, "parts": []}
# Name: (schema, valid instances, invalid instances).
SCHEMAS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "nested object, $ref, format": (PERSON, [ANNA], [ANNA | {"age": 151}, ANNA | {"born": "29.2.84"}, ANNA | {"x": 1}]),
    "recursion": (TREE, [LEAF, {"n": 0, "parts": [LEAF, LEAF]}], [{"n": 1, "parts": [1]}]),
    "enum of anything": ({"enum": [1, "ä😀", None, [1, 2], {"a": 1}]}, ["ä😀", None, [1, 2]], ["ae", 2, [2, 1]]),
    "const": ({"const": 'a "b"\n'}, ['a "b"\n'], ["a"]),
    "string lengths": ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "😀ü"], ["a", "abcde"]),
    "pattern, unanchored": ({"type": "string", "pattern": "b+"}, ["abc"], ["ac"]),
    "pattern with length": ({"type": "string", "pattern": "^a*$", "minLength": 3}, ["aaa"], ["aa"]),
    "integer bounds": ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, [-3, 11], [-4, 12]),
    "number bounds": ({"type": "number", "minimum": 0.5, "maximum": 1.25}, [0.5, 1.2], [0.4, 1.26]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, [0, 21], [22]),
    "format email": ({"type": "string", "format": "email"}, ["a@example.org"], ["a at b"]),
    "format uuid": ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    "array bounds": ({"type": "array", "minItems": 2, "maxItems": 3}, [[1, 2]], [[1], [1] * 4]),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, [[1]], [["a"], [1, 2]]),
    "additionalProperties": ({"type": "object", "additionalProperties": {"type": "null"}}, [{"a": None}], [{"a": 1}]),
    "patternProperties": ({"type": "object", "patternProperties": {"^n": {"type": "null"}}}, [{"n": None}], [{"n": 1}]),
    "minProperties": ({"type": "object", "minProperties": 2}, [{"a": 1, "b": 2}], [{"a": 1}]),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [4], [2, 6]),
    "oneOf, disjoint": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
    "oneOf, overlapping": ({"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 3}]}, [0], [2]),
    "not": ({"type": "integer", "not": {"const": 3}}, [4], [3]),
    "if, then": ({"type": "string", "if": {"pattern": "^a"}, "then": {"minLength": 3}}, ["abc"], ["ab"]),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    "contains": ({"type": "array", "contains": {"type": "integer"}}, [[1]], [["a"]]),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{"ab": 1}], [{"b": 1}]),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, [{"c": 1}], [{"a": 1}]),
    "unknown format": ({"type": "string", "format": "zork"}, [], []),
    "what nothing satisfies": ({"type": "integer", "minimum": 5, "maximum": 3}, [], [1, 4, 6]),
}  # fmt: skip
REGEXES = {
    r"[A-Z][a-z]+ (\d{2}|x)": (["Berlin 12", "Rome x"], ["berlin 12", "Rome xx"]),
    r"a.c": (["abc", "aüc", "a😀c"], ["a\nc", "ac"]),
    r"(?i)yes|no": (["YES", "no"], ["yep"]),
    r"^\w+@\w+\.(com|org)$": (["me@here.org"], ["me@here.net"]),
    r"[^a-y]{2,3}": (["zz", "你好"], ["az", "zzzz"]),
    r"(?=a)abc": ([], ["b"]),
    r"\bfoo\b": ([], ["xfoox"]),
}
LARK = 'start: sum\nsum: term (("+" | "-") term)*\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]+/\n'
EBNF = 'root ::= sum\nsum ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" sum ")"\n'
SUMS = (["1+2", "(1-(22+3))-4"], ["1+", "(1", "+1", "1 + 2"])


class LlGuidance:
    """One tokenizer and its grammars, through llguidance."""

    grammar = LARK

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        import llguidance.hf

        self._matcher = llguidance.LLMatcher
        self._table = llguidance.hf.from_tokenizer(tokenizer)

    def compile(self, kind: str, text: str) -> Any:
        make: dict[str, Callable[[str], str]] = {
            "json": self._matcher.grammar_from_json_schema,
            "regex": self._matcher.grammar_from_regex,
            "grammar": lambda text: json.dumps({"grammars": [{"lark_grammar": text}]}),
        }
        asked = json.loads(make[kind](text))["grammars"][0] | {"name": "asked"}
        outer = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @asked'}
        compiled = self._matcher(self._table, json.dumps({"grammars": [outer, asked]}), log_level=0)
        if compiled.is_error():
            raise ValueError(compiled.get_error())
        return compiled

    def start(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def fill(self, matcher: Any, row: Any) -> None:
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def accept(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.consume_token(token_id))

    def may_end(self, matcher: Any) -> bool:
        return bool(matcher.is_accepting())


class XGrammar:
    """The same through xgrammar."""

    grammar = EBNF

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        import xgrammar

        self._library = xgrammar
        table = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
        self._compiler = xgrammar.GrammarCompiler(table, max_threads=1, cache_enabled=False)

    def compile(self, kind: str, text: str) -> Any:
        make: dict[str, Callable[[str], Any]] = {
            "json": self._compiler.compile_json_schema,
            "regex": self._compiler.compile_regex,
            "grammar": self._compiler.compile_grammar,
        }
        return make[kind](text)

    def start(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled)

    def fill(self, matcher: Any, row: Any) -> None:
        matcher.fill_next_token_bitmask(row[None])

    def accept(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.accept_token(token_id))

    def may_end(self, matcher: Any) -> bool:
        return bool(matcher.is_completed())


@dataclass
class Findings:
    """The results of one library; times in microseconds, memory in MiB."""

    library: str
    proof_results: dict[str, str] = field(default_factory=dict)
    suite: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


def measure(library: str, suite: Path | None, large: Path) -> Findings:
    found = Findings(f"{library} {importlib.metadata.version(library)}")
    make = LlGuidance if library == "llguidance" else XGrammar
    make(AutoTokenizer.from_pretrained(str(DEMO_MODEL)))  # imports are not measured
    for name, source in (("1.5k", str(DEMO_MODEL)), ("50k", str(large))):
        tokenizer = AutoTokenizer.from_pretrained(source)
        before, began = resident(), time.perf_counter()
        engine = make(tokenizer)
        found.numbers[f"tokenizer's table, ms, {name}"] = (time.perf_counter() - began) * 1e3
        found.numbers[f"tokenizer's table, MiB, {name}"] = resident() - before
        found.numbers |= {f"{what}, {name}": value for what, value in speed(engine, tokenizer).items()}
    found.numbers["other threads run meanwhile (1: yes)"] = lets_others_run(engine, tokenizer)
    small = AutoTokenizer.from_pretrained(str(DEMO_MODEL))
    engine = make(small)
    for name, (schema, valid, invalid) in SCHEMAS.items():
        texts = [[write(each) for each in group] for group in (valid, invalid)]
        found.proof_results[f"schema: {name}"] = proof_result(engine, small, "json", write(schema), *texts)
    for regex, (takes, refuses) in REGEXES.items():
        found.proof_results[f"regex: {regex}"] = proof_result(engine, small, "regex", regex, takes, refuses)
    found.proof_results["grammar: sums"] = proof_result(engine, small, "grammar", engine.grammar, *SUMS)
    if suite is not None:
        found.suite = dict(run_suite(engine, small, suite))
    return found


def write(instance: Any) -> str:
    return json.dumps(instance, ensure_ascii=False)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids).strip() == text.strip()
    return token_ids


def takes(engine: Any, tokenizer: PreTrainedTokenizerFast, compiled: Any, text: str) -> bool:
    matcher = engine.start(compiled)
    token_ids = encode(tokenizer, text)
    return all(engine.inputs.accept(matcher, token_id) for token_id in token_ids) and engine.may_end(matcher)


def proof_result(engine: Any, tokenizer: Any, kind: str, text: str, valid: list[str], invalid: list[str]) -> str:
    try:
        compiled = engine.inputs.compile(kind, text)
    except (ValueError, RuntimeError) as error:
        return "refused: " + " ".join(str(error).split())[:90]
    wrong = [each for each in invalid if takes(engine, tokenizer, compiled, each)]
    missed = [each for each in valid if not takes(engine, tokenizer, compiled, each)]
    if wrong:
        return f"WRONG: takes {wrong[0]}"
    return f"does not take {missed[0]}" if missed else "right"


def run_suite(engine: Any, tokenizer: Any, suite: Path) -> Iterator[tuple[str, int]]:
    """Return counts over the official suite, in which every group of tests is one schema."""
    counts: Counter[str] = Counter()
    for file in sorted(suite.glob("*.json")):
        for group in json.loads(file.read_text()):
            counts["schemas"] += 1
            try:
                compiled = engine.inputs.compile("json", write(group["schema"]))
            except (ValueError, RuntimeError):
                counts["schemas refused"] += 1
                continue
            wrong = missed = False
            for test in group["tests"]:
                taken = takes(engine, tokenizer, compiled, write(test["data"]))
                wrong |= taken and not test["valid"]
                missed |= test["valid"] and not taken
            counts["schemas that take what is invalid"] += wrong
            counts["schemas that take nothing invalid, nor all that is valid"] += missed and not wrong
            counts["schemas told exactly"] += not wrong and not missed
    yield from counts.items()


def speed(engine: Any, tokenizer: Any) -> dict[str, float]:
    compile_seconds = []
    for number in range(7):  # a different title makes it a new text for any cache
        began = time.perf_counter()
        compiled = engine.inputs.compile("json", write(PERSON | {"title": str(number)}))
        compile_seconds.append(time.perf_counter() - began)
    before, began = resident(), time.perf_counter()
    matchers = [engine.start(compiled) for _ in range(2000)]
    start = (time.perf_counter() - began) / len(matchers)
    seconds, accepting = walk(engine, compiled, encode(tokenizer, write(ANNA)), tokenizer)
    free, text = engine.inputs.compile("json", write({"type": "object"})), write({"text": "The quick brown fox " * 20})
    free_seconds, _ = walk(engine, free, encode(tokenizer, text), tokenizer)
    return {
        "compile a schema, ms": statistics.median(compile_seconds) * 1e3,
        "start a sequence, us": start * 1e6,
        "mask, us, median": statistics.median(seconds) * 1e6,
        "mask, us, worst": max(seconds) * 1e6,
        "mask in any JSON object, us, median": statistics.median(free_seconds) * 1e6,
        "accept a token, us, median": statistics.median(accepting) * 1e6,
        "memory of a sequence, KiB": (resident() - before) * 1024 / len(matchers),
    }


def walk(engine: Any, compiled: Any, tokens: list[int], tokenizer: Any) -> tuple[list[float], list[float]]:
    """Return the seconds of each mask and each token along a text, first for the schema's first sequence."""
    row = np.zeros(-(-len(tokenizer) // 32), dtype=np.int32)
    masks, accepts = [], []
    for _ in range(5):
        matcher = engine.start(compiled)
        for token_id in tokens:
            began = time.perf_counter()
            engine.fill(matcher, row)
            masked = time.perf_counter()
            assert engine.inputs.accept(matcher, token_id)
            assert row[token_id // 32] >> (token_id % 32) & 1
            masks.append(masked - began)
            accepts.append(time.perf_counter() - masked)
    return masks, accepts


def lets_others_run(engine: Any, tokenizer: Any) -> bool:
    """Whether a waiting thread gets the interpreter's lock while masks are computed, other than by requesting it (the
    switch interval is too long for a request)."""
    compiled = engine.inputs.compile("json", write({"type": "object"}))
    row, interval = np.zeros(-(-len(tokenizer) // 32), dtype=np.int32), sys.getswitchinterval()
    gate, has_run = threading.Event(), threading.Event()

    def run() -> None:
        gate.wait()
        has_run.set()

    thread = threading.Thread(target=run)
    thread.start()
    sys.setswitchinterval(600)
    gate.set()
    for _ in range(3000):
        engine.fill(engine.start(compiled), row)
    has_run_meanwhile = has_run.is_set()
    sys.setswitchinterval(interval)
    thread.join()
    return has_run_meanwhile


def resident() -> float:
    """This process's memory in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def train_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer of realistic size on the sources of installed Python packages."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    packages = Path(np.__file__).parents[1]
    files = [str(path) for name in ("transformers", "torch") for path in sorted((packages / name).rglob("*.py"))]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = AddedToken("<|endoftext|>", special=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=LARGE_VOCABULARY, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    backend.train(files[:2500], trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end).save_pretrained(folder)


def report(all_found: list[Findings]) -> str:
    """Return the results as Markdown."""
    heads = [each.library for each in all_found]
    lines = ["# Libraries for structured output", "", f"`python benchmarks/grammar_libraries.py` on {machine()}.", ""]

    def table(title: str, rows: dict[str, list[str]]) -> None:
        rule = ["---"] * (1 + len(heads))
        body = [[name, *cells] for name, cells in rows.items()]
        lines.extend("| " + " | ".join(map(escaped, cells)) + " |" for cells in ([title, *heads], rule, *body))
        lines.append("")

    first = all_found[0]
    table("speed", {name: [f"{each.numbers[name]:.3g}" for each in all_found] for name in first.numbers})
    if first.suite:
        table(
            "tests of JSON Schema", {name: [str(each.suite.get(name, 0)) for each in all_found] for name in first.suite}
        )
    table("correctness", {name: [each.proof_results[name] for each in all_found] for name in first.proof_results})
    return "\n".join(lines)


def escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("[", "\\[").replace("\n", "\\n")


def machine() -> str:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    with open("/proc/cpuinfo") as file:
        name = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())
    python, today = platform.python_version(), time.strftime("%F")
    return f"{os.cpu_count()} cores of an {name}, {memory} GiB, Python {python}, {today}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--library", choices=LIBRARIES)
    parser.add_argument("--large", type=Path, default=Path(tempfile.gettempdir()) / f"bpe-{LARGE_VOCABULARY}")
    arguments = parser.parse_args()
    if arguments.library:
        print(json.dumps(asdict(measure(arguments.library, arguments.suite, arguments.large))))
        return
    if not arguments.large.is_dir():
        train_tokenizer(arguments.large)
    all_found = []
    for library in LIBRARIES:
        command = [sys.executable, __file__, "--library", library, "--large", str(arguments.large)]
        command += ["--suite", str(arguments.suite)] if arguments.suite else []
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        all_found.append(Findings(**json.loads(output.splitlines()[-1])))
    text = report(all_found)
    print(text)
    if arguments.write:
        (RESULTS / "grammar-libraries.md").write_text(text)


if __name__ == "__main__":
    main()
