"""Calls our operators with invalid arguments. They may raise errors, and must not access memory outside their tensors.

    python -m tests.execution.fuzz_operators --seed 1 --calls 20_000 --sanitize

`--sanitize` builds the kernels with AddressSanitizer and runs the calls in a process that has loaded it.
"""

import argparse
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from inflight.execution.attention.cpu_backend import BITS
from inflight.execution.graph.encode import EncodedProgram, encode
from inflight.execution.graph.trace import trace_forward
from inflight.execution.kernels import building, kernels_available
from inflight.execution.weights.panels import panels_of

EXTREMES = (-(2**63), -(2**31), -7, -1, 0, 1, 2, 3, 5, 16, 17, 64, 255, 2**20, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
GROUPED = [
    *((4, 0, False, 0), (4, 0, True, 0), (4, 1, True, 0), (5, 0, False, 0), (5, 1, True, 0), (6, 2, False, 0)),
    *((8, 0, False, 0), (8, 0, True, 0), (8, 0, False, 1), (4, 0, False, 2), (4, 1, False, 3)),
    *((2, 0, False, 0), (2, 0, True, 0), (2, 2, True, 0), (3, 0, False, 0), (3, 0, True, 0), (3, 2, False, 0)),
    *((4, 2, False, 4), (4, 1, False, 5), (4, 1, False, 6)),
]
"""Bits, fine scales, minima and code of weights in groups."""


TABLE = torch.randn(16, 48)


def _norm_of_rows(input_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
    x = torch.nn.functional.embedding(input_ids, TABLE) + positions[:, None].float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return torch.cat((-x[:, 24:], x[:, :24]), -1).to(torch.bfloat16).view(-1, 3, 16).transpose(0, 1)[:, logit_rows] * 2


class Fuzzer:
    """Generates valid calls, changes some of their arguments, and makes them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.refused: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        """Calls of each operator."""
        self.programs: list[EncodedProgram] = []
        self.operators: list[Callable[[], None]] = [
            self._greedy,
            self._sample,
            self._activate,
            self._linear,
            self._adapters,
            self._experts,
            self._attention,
            self._mixers,
            self._placing,
            self._program,
            self._exchange,
        ]

    def run(self, num_calls: int) -> None:
        """Make this number of calls of each operator, alternating between torch's threads and ours."""
        for number in range(num_calls):
            torch.ops.inflight.use_own_threads(number % 2 * torch.get_num_threads())
            for operator in self.operators:
                operator()
        torch.ops.inflight.use_own_threads(0)

    def call(self, name: str, *arguments: Any, rate: float = 0.3) -> Any:
        """Call an operator with some arguments changed; None if it refuses."""
        changed = [self._changed(each) if self.random.random() < rate else each for each in arguments]
        try:
            given = getattr(torch.ops.inflight, name)(*changed)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, OverflowError, IndexError, MemoryError):
            self.refused[name] += 1
            return None
        self.accepted[name] += 1
        return given

    # ------------------------------------------------------------------------------------- operators

    def _greedy(self) -> None:
        self.call("greedy", self._floats(3, 40))

    def _sample(self) -> None:
        rows = self.random.randint(1, 4)
        each = [torch.full((rows,), value) for value in (0.7, 0.9, 0.1, 0.5)]
        top_k = torch.full((rows,), self.random.choice(EXTREMES))
        self.call("sample", self._floats(rows, 70), each[0], top_k, *each[1:], rate=0.15)

    def _activate(self) -> None:
        self.call("activate", self._floats(3, 20), self.random.choice(["relu", "gelu", "swish", "none"]), "tanh")

    def _new_linear(self, num_inputs: int, num_outputs: int, activation: str = "none", rate: float = 0.1) -> int | None:
        weight, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
        given = (panels_of(weight), bias, None, num_inputs, num_outputs, activation, "")
        if self.random.random() < 0.3 and torch.ops.inflight.has_panels(torch.int8):
            int8 = (weight * 30).clamp(-127, 127).to(torch.int8)
            given = (panels_of(int8), bias, torch.rand(num_outputs), num_inputs, num_outputs, activation, "")
        if self.random.random() < 0.3:
            return self._new_grouped_linear(num_inputs, num_outputs, activation, rate / 2)
        number: int | None = self.call("new_linear", *given, rate=rate)
        return number

    def _new_grouped_linear(self, num_inputs: int, num_outputs: int, activation: str, rate: float) -> int | None:
        bits, fine, minima, code = self.random.choice(GROUPED)
        coarse = self.random.choice([32, 64, 256])
        num_runs = -(-num_inputs // coarse)
        is_wide = self.random.random() < 0.5
        layout = [bits, coarse, fine, int(minima), 0 if minima else 1 << (bits - 1), 4 if is_wide else 2, code]
        numbers = torch.randint(0, 1 << bits, (num_outputs, num_inputs), dtype=torch.uint8)
        scales = torch.rand(2, num_outputs, num_runs, dtype=torch.float32 if is_wide else torch.float16)
        whole = torch.randint(-128, 128, (2, num_outputs, fine * num_runs * coarse // 32), dtype=torch.int8)
        several, least = whole if fine else (None, None)
        minima_given = (scales[1], least) if minima else (None, None)
        panels = self.call("pack_grouped", layout, numbers, scales[0], several, *minima_given, rate=rate)
        if panels is None:
            return None
        rows = torch.randint(0, num_outputs, (3,))
        self.call("grouped_rows", layout, panels, rows, num_outputs, num_inputs, torch.float32, rate=rate)
        self.call("grouped_values", layout, panels, num_outputs, num_inputs, torch.bfloat16, rate=rate)
        order = self.random.choice([None, torch.randperm(num_inputs)])
        given = (panels, layout, order, self.random.random() < 0.5, torch.randn(num_outputs))
        number: int | None = self.call("new_grouped_linear", *given, num_inputs, num_outputs, activation, "", rate=rate)
        return number

    def _linear(self) -> None:
        num_inputs, num_outputs = self.random.randint(1, 70), self.random.randint(1, 70)
        number = self._new_linear(num_inputs, num_outputs)
        if number is not None:
            self.call("linear", self._floats(self.random.randint(1, 40), num_inputs), number, num_outputs)
            torch.ops.inflight.delete_linear(number)

    def _adapters(self) -> None:
        num_inputs, num_outputs, rank = (self.random.randint(1, 70) for _ in range(3))
        number, step = self._new_linear(num_inputs, num_outputs, rate=0), torch.ops.inflight.new_adapted_step()
        first = self.random.randint(0, num_outputs - 1)
        down = torch.randn(rank, -(-num_inputs // 32) * 32)
        up = panels_of(torch.randn(num_outputs - first, rank))
        given = (3, [1, 2], [first, 0], [num_outputs - first] * 2, [down, torch.randn(9, rank)], [up, up])
        adapter = self.call("new_adapter", *given, rate=0.05)
        self.call("adapt_linear", number, step, self.random.randint(0, 3), self.random.random() < 0.3, rate=0.05)
        num_rows = self.random.randint(1, 12)
        rows = [self.random.randint(-1, 0) for _ in range(num_rows)]
        self.call("begin_adapted_step", step, [] if adapter is None else [adapter], rows, rows[:3], rate=0.05)
        self.call("linear", self._floats(self.random.choice([num_rows, 3]), num_inputs), number, num_outputs, rate=0.1)
        ids = torch.randint(0, 9, (num_rows,))
        self.call("adapted_rows", self._floats(num_rows, num_outputs - first), ids, step, 2, rate=0.1)
        torch.ops.inflight.delete_adapted_step(step)
        torch.ops.inflight.delete_linear(number)

    def _experts(self) -> None:
        size, width = self.random.randint(1, 20), self.random.randint(1, 20)
        rate = self.random.choice([0.0, 0.1])
        ups, downs = (
            [self._new_linear(*each, rate=rate) for _ in range(3)] for each in ((size, 2 * width), (width, size))
        )
        activation = self.random.choice(["swish", "none"])
        number = self.call("new_experts", [n or 0 for n in ups], [n or 0 for n in downs], activation, "", rate=0.1)
        if number is not None:
            chosen = torch.randint(-1, 4, (5, 2))
            self.call("experts", self._floats(5, size), chosen, number)
            self.call("experts_up", self._floats(5, size), chosen, number, 2 * width)
            self.call("experts_down", self._floats(10, width), chosen, number, size)
        self.call("weighted_sum", self._floats(10, size), self._floats(5, 2))

    def _attention(self) -> None:
        """A cache, a step, a write and a read: each changed by itself, so that wrong steps meet right tensors."""
        draw, ops = self.random, torch.ops.inflight
        step, block_size, num_blocks = ops.new_step(), draw.choice([1, 4, 16, 20, 300]), draw.randint(1, 9)
        heads, head_size, value_size = draw.choice([(4, 2), (2, 2), (3, 1)]), draw.randint(1, 20), draw.randint(1, 20)
        lanes, dtype = ops.num_lanes(), draw.choice([torch.float32, torch.bfloat16, torch.int8, torch.uint8])
        key_size = head_size if dtype == torch.float32 else head_size + head_size % 2
        value_lanes = -(-value_size // lanes) * lanes
        stripe = lanes * (key_size + value_lanes) * BITS[dtype] // 8 + (8 * lanes if dtype.itemsize == 1 else 0)
        stored = torch.zeros(num_blocks, heads[1], -(-block_size // lanes), stripe, dtype=torch.int8)
        sizes = [
            *heads,
            head_size,
            value_size,
            draw.choice([0, 0, 3]),
            draw.choice([0, 0, 5]),
            block_size,
            draw.choice([1, 1, 0]),
        ]
        if draw.random() < 0.1:
            sizes[draw.randrange(8)] = draw.choice(EXTREMES)
        call = self.call("new_call", step, sizes, 0.3, 0.0, draw.choice([0, 0, 0, 1]), stored, dtype, rate=0.03)
        kv_lens = [draw.randint(1, num_blocks * block_size) for _ in range(draw.randint(1, 3))]
        query_lens = [draw.randint(1, length) for length in kv_lens]
        width = max(-(-length // block_size) for length in kv_lens)
        tables = torch.randint(0, num_blocks, (len(kv_lens), width), dtype=torch.int32)
        if draw.random() < 0.2:
            tables[0, : draw.randint(0, width)] = draw.choice([-1, num_blocks, -(2**31), 2**31 - 1])
        indices = torch.randint(-1, num_blocks * block_size, (sum(query_lens),))
        lengths = [torch.tensor(query_lens), torch.tensor(kv_lens)]
        items = draw.choice([None, torch.randint(0, 2, (len(query_lens),))])
        self.call("begin_step", step, block_size, *lengths, items, [indices], [tables], rate=0.05)
        if call is not None:
            tokens = sum(query_lens)
            sinks = draw.choice([None, torch.zeros(heads[0])])
            keys, values = self._floats(tokens, heads[1], head_size), self._floats(tokens, heads[1], value_size)
            if draw.random() < 0.5:
                ops.see_items(call)
            self.call("write", keys, values.to(keys.dtype), call, rate=0.1)
            self.call("attend", self._floats(tokens, heads[0], head_size), sinks, call, value_size, rate=0.1)
            ops.delete_call(call)
        ops.delete_step(step)

    def _mixers(self) -> None:
        """States, a step, a convolution and a recurrence, each changed by itself."""
        draw, ops = self.random, torch.ops.inflight
        heads, key_heads = draw.choice([(4, 2), (2, 2), (3, 1)])
        rows, columns, taps = draw.randint(1, 20), draw.randint(1, 70), draw.randint(2, 5)
        step, num_states, ends = ops.new_mixer_step(), draw.randint(1, 3), [0]
        spans = []
        for number in range(draw.randint(1, 3)):
            ends.append(ends[-1] + draw.randint(0, 40))
            before = draw.choice([-1, 0, num_states - 1, -2 if number else -1])
            spans.append([*ends[-2:], before, draw.choice([-1, 0, num_states - 1])])
        if draw.random() < 0.2:
            spans[0][draw.randrange(4)] = draw.choice([*EXTREMES, num_states])
        self.call("begin_mixing", step, torch.tensor(spans), rate=0.05)
        tokens = ends[-1] + draw.choice([0, 0, 2, -1])
        sizes = heads * -(-columns // 32) * 32 * rows, (taps - 1) * columns
        recurrence, convolution = (
            self.call("new_mixer", step, torch.zeros(num_states, size), rate=0.05) for size in sizes
        )
        if convolution is not None:
            x = self._floats(max(0, tokens), columns)
            given = (x, self._floats(columns, taps).to(x.dtype), draw.choice([None, torch.zeros(columns).to(x.dtype)]))
            self.call("convolve", *given, draw.choice(["none", "swish"]), convolution, rate=0.05)
            ops.delete_mixer(convolution)
        if recurrence is not None:
            tokens = max(0, tokens)
            kind = draw.choice(["head", "key", "element"])
            decay = {"head": (), "key": (rows,), "element": (columns,)}[kind]
            given = (
                *(self._floats(tokens, key_heads, rows) for _ in range(2)),
                self._floats(tokens, heads, columns),
                -torch.rand(tokens, heads, *decay),
                draw.choice([None, torch.rand(tokens, heads)]),
                draw.choice([None, torch.rand(heads)]),
                torch.rand(heads, rows, columns) if kind == "element" else None,
            )
            flags = draw.random() < 0.5 and kind != "element", draw.random() < 0.5
            self.call("recur", *given, *flags, 0.3, draw.choice([torch.float32, torch.bfloat16]), recurrence, rate=0.05)
            ops.delete_mixer(recurrence)
        ops.delete_mixer_step(step)

    def _placing(self) -> None:
        """Rows that go into others, once."""
        draw, placing = self.random, torch.ops.inflight.new_placing()
        tokens, hidden = draw.randint(0, 9), draw.choice([1, 20])
        places = torch.tensor([draw.randrange(tokens + 1) for _ in range(draw.randint(0, 4))], dtype=torch.int64)
        rows = self._floats(len(places), hidden)
        self.call("put_rows", placing, rows, places, draw.random() < 0.5, rate=0.1)
        for _ in range(2):
            self.call("place_rows", self._floats(tokens, hidden).to(rows.dtype), placing, rate=0.1)
        torch.ops.inflight.delete_placing(placing)

    def _program(self) -> None:
        """A compiled norm of rows, of which one number or another is changed."""
        if not self.programs:
            with torch.inference_mode():
                graph = trace_forward(lambda *rows: [_norm_of_rows(*rows)], max_tokens=64)
            self.programs = [encode(graph, fuses=fuses) for fuses in (True, False)]
        codes, *others = self.random.choice(self.programs)[:4]
        changed = list(codes)
        for _ in range(self.random.randint(0, 2)):
            place = self.random.randrange(len(changed))
            near = changed[place] + self.random.choice([-16, -2, -1, 1, 2, 16])
            # Nothing between: a program may ask for as much memory as it likes.
            extreme = self.random.choice([each for each in EXTREMES if not 2**16 < each < 2**40])
            changed[place] = self.random.choice([near, near, extreme])
        number = self.call("new_program", changed, *others, rate=0.02)
        if number is not None:
            rows = torch.arange(self.random.randint(0, 9))
            self.call("run_program", rows, rows, rows[:3], number, rate=0.05)
            run = self.call("new_program_run", rows, rows, rows[:3], number, rate=0.05)
            while run is not None and self.call("advance_program_run", run, 1, rate=0.05):
                self.call("outputs_of_program_run", run)
            torch.ops.inflight.delete_program(number)

    # ------------------------------------------------------------------------------------- changes

    def _exchange(self) -> None:
        """A single rank. A call with several ranks fails without waiting, because one of them counts as ended."""
        file = os.memfd_create("fuzzed")
        sizes = [self._changed(each) if self.random.random() < 0.1 else each for each in (0, 1, 4096)]
        try:
            number = self.call("new_exchange", file, *sizes, rate=0)
        finally:
            os.close(file)
        if number is None:
            return
        torch.ops.inflight.end_exchange(number)
        self.call("begin_exchange", number, self.random.randrange(3), rate=0.1)
        rows = self._floats(self.random.randint(0, 70), self.random.randint(1, 70))
        self.call("sum_of_ranks", rows, number)
        self.call("gather_of_ranks", rows, number, 1)
        torch.ops.inflight.delete_exchange(number)

    def _floats(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes).to(self.random.choice([torch.float32, torch.bfloat16]))

    def _changed(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return self._changed_tensor(argument)
        if isinstance(argument, list):
            return self._changed_list(argument)
        if isinstance(argument, bool | str) or argument is None:
            return self.random.choice(["", "none", "gelu", None, torch.zeros(2)])
        if isinstance(argument, int):
            return self.random.choice([argument + 1, argument - 1, *EXTREMES])
        if isinstance(argument, float):
            return self.random.choice([0.0, -1.0, math.inf, math.nan, 1e30])
        return argument

    def _changed_list(self, argument: list[Any]) -> list[Any]:
        changed = list(argument)
        if changed and self.random.random() < 0.6:
            place = self.random.randrange(len(changed))
            changed[place] = self._changed(changed[place])
            return changed
        return changed[:-1] if self.random.random() < 0.5 else changed + changed[-1:]

    def _changed_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        draw = self.random
        match draw.randrange(9):
            case 0:
                return tensor.to(draw.choice([torch.float64, torch.int64, torch.int32, torch.bool, torch.bfloat16]))
            case 1:
                return tensor[..., : max(0, tensor.shape[-1] - 1)]
            case 2:
                return tensor[: max(0, len(tensor) - 1)] if tensor.dim() else tensor
            case 3:
                return torch.cat([tensor, tensor]) if tensor.dim() else tensor
            case 4:
                return tensor.flatten()
            case 5:
                return tensor[None]
            case 6:
                return tensor.to("meta")
            case 7:
                return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() > 1 else tensor
            case _:
                if tensor.is_floating_point():
                    return torch.full_like(tensor, draw.choice([math.nan, math.inf, -math.inf, 6e4]))
                changed = tensor.clone()
                if changed.numel():
                    limits = torch.iinfo(tensor.dtype) if tensor.dtype != torch.bool else None
                    value = draw.choice(EXTREMES)
                    value = max(limits.min, min(limits.max, value)) if limits else value > 0
                    changed.view(-1)[draw.randrange(changed.numel())] = value
                return changed


def run_sanitized(arguments: list[str]) -> int:
    """Run this module again, in a process with AddressSanitizer. Returns its exit status."""
    compiler, libraries = os.environ.get("CXX", "c++"), []
    for name in ("libasan.so", "libstdc++.so.6"):  # the second, so that its exceptions can be intercepted
        asked = [compiler, f"-print-file-name={name}"]
        libraries.append(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    if not all(map(os.path.isabs, libraries)):
        print(f"{compiler} has no AddressSanitizer")
        return 1
    options = {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}
    environment = os.environ | options | {"LD_PRELOAD": ":".join(libraries)}
    command = [sys.executable, "-m", "tests.execution.fuzz_operators", "--inside", *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sanitize:
        return run_sanitized(["--seed", str(options.seed), "--calls", str(options.calls)])
    if options.inside:
        building.FLAGS.extend(["-fsanitize=address", "-fno-omit-frame-pointer", "-g1"])
    if not kernels_available():
        return 1
    fuzzer = Fuzzer(options.seed)
    fuzzer.run(options.calls)
    print(f"{fuzzer.accepted.total()} calls were accepted, {fuzzer.refused.total()} refused")
    if never := fuzzer.refused.keys() - fuzzer.accepted.keys():
        print(f"never accepted: {', '.join(sorted(never))}")
    return 1 if never else 0


if __name__ == "__main__":
    sys.exit(main())
