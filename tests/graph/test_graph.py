"""A compiled graph gives the bits of the forward pass that was traced, for any number of tokens and rows."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from inflight.execution.graph.encode import CompiledGraph, encode
from inflight.execution.graph.fuse import FusedNode, fuse
from inflight.execution.graph.graph import Graph
from inflight.execution.graph.program import ValueKind
from inflight.execution.graph.trace import UntraceableError, trace_forward
from inflight.execution.kernels import kernels_available
from tests.execution.test_threads import torch_threads

pytestmark = pytest.mark.skipif(not kernels_available(), reason="needs a C++ compiler")

MAX_TOKENS = 300
STEPS = ((1, 1), (2, 1), (7, 3), (33, 33), (300, 2))
GENERATOR = torch.Generator().manual_seed(0)


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


TABLE, WIDE, SCALE, ANGLES = weight(64, 96), weight(64, 4096), weight(96), weight(16)
NARROW = weight(64, 7)
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def embedded(input_ids: Tensor, dtype: torch.dtype, table: Tensor = TABLE) -> Tensor:
    return functional.embedding(input_ids[None], table.to(dtype))


def root_mean_square(x: Tensor, scale: Tensor) -> Tensor:
    whole = x.to(torch.float32)
    whole = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-6)
    return scale.to(x.dtype) * whole.to(x.dtype)


def rotated(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def heads(dtype: torch.dtype) -> Forward:
    """Norms and rotary embeddings of heads, in both orders of tokens and heads."""

    def forward(input_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        x = embedded(input_ids, dtype)
        angles = (ANGLES[None, :, None] @ positions[None, None].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(dtype).unsqueeze(1), angles.sin().to(dtype).unsqueeze(1)
        query = root_mean_square(x.view(1, -1, 3, 32), SCALE[:32]).transpose(1, 2)
        query = query * cos + rotated(query) * sin
        out = query.transpose(1, 2).reshape(1, -1, 96) + x
        return root_mean_square(out, SCALE)[0, logit_rows]

    return forward


def layers(dtype: torch.dtype) -> Forward:
    """Residuals and gates, with numbers, in a dtype that is rounded after each step."""

    def forward(input_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        x = embedded(input_ids, dtype) * 9.797958971132712
        for factor in (0.25, 3):
            gate, up = (root_mean_square(x, 1 + SCALE)).split((48, 48), dim=-1)
            x = x + torch.cat((torch.ops.inflight.activate(gate, "swish", "none") * up, up - gate), -1) / factor
        return functional.layer_norm(x, (96,), SCALE.to(dtype))[0][logit_rows] * 0.5

    return forward


def other_operators(dtype: torch.dtype) -> Forward:
    """What row kernels cannot do: in torch's own operators."""

    def forward(input_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        x = embedded(input_ids, dtype)
        pairs = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        x = x + SCALE.to(dtype).repeat(input_ids.shape[0], 1)
        x = functional.gelu(pairs) * torch.sigmoid(x) + functional.pad(x[..., :90], (0, 6))
        weights, chosen = torch.topk(x, 4, dim=-1)
        x = torch.where(x > 0, x, x.tanh() * 2).clone()
        x[..., :4] += weights.softmax(-1)
        x.mul_(chosen.to(dtype).amax(-1, keepdim=True))
        return x[0].index_select(0, logit_rows)

    return forward


def narrow(dtype: torch.dtype) -> Forward:
    """Rows that fill no vector."""

    def forward(input_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        x = embedded(input_ids, dtype, NARROW)
        x = torch.cat((x[..., 3:], x[..., :3] - 1), -1) * x
        return ((x + x[..., 2:3]) / 3 - x[0, :1])[0, logit_rows]

    return forward


def wide(dtype: torch.dtype) -> Forward:
    def forward(input_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        x = embedded(input_ids, dtype, WIDE)
        return root_mean_square(x + root_mean_square(x, WIDE[0]), WIDE[1])[0, logit_rows]

    return forward


def step_of(num_tokens: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, positions and logit rows of a step, at random."""
    return (
        torch.randint(64, (num_tokens,), generator=GENERATOR),
        torch.randint(1000, (num_tokens,), generator=GENERATOR),
        torch.randint(num_tokens, (num_rows,), generator=GENERATOR),
    )


def trace(forward: Forward) -> Graph:
    return trace_forward(lambda *rows: [forward(*rows)], MAX_TOKENS)


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [heads, layers, other_operators, narrow, wide])
def test_the_bits_are_those_of_what_was_traced(
    make: Callable[[torch.dtype], Forward], dtype: torch.dtype, fuses: bool
) -> None:
    forward = make(dtype)
    with torch.inference_mode():
        compiled = CompiledGraph(encode(trace(forward), fuses=fuses))
        for num_tokens, num_rows in STEPS:
            inputs = step_of(num_tokens, num_rows)
            assert torch.equal(*compiled(*inputs), forward(*inputs)), (num_tokens, num_rows)


@pytest.mark.parametrize(
    "size", [8, 9, 31, 32, 64, 100, 128, 511, 512, 768, 1000, 1024, 2048, 4097, 8192, 20000, 32768]
)
def test_sums_have_the_bits_of_torch(size: int) -> None:
    table = weight(16, size)

    def forward(input_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        x = functional.embedding(input_ids, table)
        return (x * x).sum(-1, keepdim=True)[logit_rows] + x.mean(-1, keepdim=True)[logit_rows]

    with torch.inference_mode():
        compiled = CompiledGraph(encode(trace(forward)))
        for num_tokens in (1, 2, 40):
            rows = torch.arange(num_tokens)
            assert torch.equal(*compiled(rows % 16, rows, rows), forward(rows % 16, rows, rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norms_have_the_bits_of_torch_on_any_number_of_threads(dtype: torch.dtype) -> None:
    scale, shift = (each.to(dtype) for each in (WIDE[1], WIDE[2]))

    def forward(input_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        x = functional.layer_norm(embedded(input_ids, dtype, WIDE), (4096,), scale, shift, 1e-6)
        x = functional.layer_norm(x.view(-1, 2, 2048), (2048,))
        whole, means, deviations = torch.native_layer_norm(x, (2, 2048), scale.view(2, -1), None, 1e-5)
        x, more_means, _ = torch.native_layer_norm(whole.transpose(0, 1), (2048,), None, shift[:2048], 1e-5)
        return (x + more_means).transpose(0, 1)[logit_rows] + means[logit_rows] * deviations[logit_rows]

    with torch.inference_mode():
        compiled = CompiledGraph(encode(trace(forward)))
        expected = {inputs: forward(*inputs) for inputs in (step_of(*sizes) for sizes in STEPS)}
        for number in (1, 2, 5):
            with torch_threads(number, are_own=True):
                for inputs, rows in expected.items():
                    assert torch.equal(*compiled(*inputs), rows)


def test_a_pass_may_give_several_tensors() -> None:
    """One of them in the middle of what runs as a single kernel."""

    def forward(input_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> list[Tensor]:
        x = functional.embedding(input_ids, TABLE)
        middle = x * x + 1
        return [(middle * 3)[logit_rows], middle, middle[logit_rows]]

    with torch.inference_mode():
        compiled = CompiledGraph(encode(trace_forward(forward, MAX_TOKENS)))
        for num_tokens, num_rows in STEPS:
            inputs = step_of(num_tokens, num_rows)
            assert all(map(torch.equal, compiled(*inputs), forward(*inputs)))


def test_small_operators_run_together() -> None:
    with torch.inference_mode():
        graph = trace(heads(torch.bfloat16))
    work, stored = fuse(graph)
    kernels = [piece for piece in work if isinstance(piece, FusedNode)]
    others = [piece.name for piece in work if not isinstance(piece, FusedNode)]
    # Angles twice; the heads; the residual and its norm. What a kernel keeps to itself is never written.
    assert len(kernels) <= 4
    assert sum(map(len, stored)) <= 5
    # The embedding, positions as numbers, the angles (twice side by side), and the rows that are wanted.
    assert [name.removeprefix("aten::") for name in others] == [
        *("embedding", "to.dtype", "matmul", "cat", "cos", "sin", "index.Tensor")
    ]


BUFFER = torch.zeros(4)


def reads_a_number(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    return TABLE[ids][rows] * positions.max().item()


def branches_on_a_value(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    return TABLE[ids][rows] * (2 if positions.max() > 3 else 3)


def branches_on_the_length(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    return TABLE[ids][rows] * 2 if len(ids) < 200 else TABLE[ids][rows] - 3


def changes_a_number_with_the_length(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    return TABLE[ids][rows] * (1.0 if len(ids) < 200 else 2.0)


def stops_growing(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    return TABLE[ids][:200].sum(0) + TABLE[rows]


def chooses_rows_by_value(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    return TABLE[ids[ids > 3]].sum(0) + TABLE[rows]


def counts_in_numpy(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    return TABLE[ids][rows] * torch.tensor([float(len(ids))])


def draws(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    return TABLE[rows] + torch.rand(96)


def keeps_a_state(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    BUFFER.add_(1)
    return TABLE[rows] + BUFFER[0]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (reads_a_number, "depends on the values of tensors (aten.item.default)"),
        (branches_on_a_value, "depends on the values of tensors (aten.is_nonzero.default)"),
        (branches_on_the_length, "calls other operators for other lengths"),
        (changes_a_number_with_the_length, "an argument depends on the length"),
        (stops_growing, "a size does not grow evenly with the length"),
        (chooses_rows_by_value, "depends on the values of tensors"),
        (counts_in_numpy, "depends on the length without torch's operators"),
        (draws, "depends on the values of tensors"),
        (keeps_a_state, "mutates its state (aten::add_.Tensor)"),
    ],
)
def test_what_is_not_the_same_every_time_is_not_traced(forward: Forward, reason: str) -> None:
    with torch.inference_mode(), pytest.raises(UntraceableError, match=re.escape(reason)):
        trace(forward)


def test_a_program_takes_nothing_but_a_step() -> None:
    with torch.inference_mode():
        compiled = CompiledGraph(encode(trace(wide(torch.float32))))
    rows = torch.arange(3)
    for inputs in ((rows.float(), rows, rows), (rows, rows[:2], rows), (rows[None], rows, rows)):
        with pytest.raises(RuntimeError, match=r"position|program"):
            compiled(*inputs)


class Interrupted(BaseException):
    pass


def test_an_interrupt_comes_through_in_the_middle_of_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, rows, runs = layers(torch.float32), torch.arange(MAX_TOKENS), []
    advance = torch.ops.inflight.advance_program_run

    def interrupted(run: int, num_items: int) -> bool:
        if runs:
            raise Interrupted
        runs.append(run)
        assert advance(run, num_items), "it has ended at once"
        return True

    with torch.inference_mode():
        compiled = CompiledGraph(encode(trace(forward)))
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops.inflight, "advance_program_run", interrupted)
            with pytest.raises(Interrupted):
                compiled(rows % 64, rows, rows)
        with pytest.raises(RuntimeError, match="there is nothing with number"):
            advance(runs[0], 1)
        assert torch.equal(*compiled(rows % 64, rows, rows), forward(rows % 64, rows, rows))


def test_a_run_gives_nothing_before_its_end() -> None:
    rows = torch.arange(3)
    with torch.inference_mode():
        compiled = CompiledGraph(encode(trace(wide(torch.float32))))
        run = torch.ops.inflight.new_program_run(rows, rows, rows, compiled._handle)
        assert torch.ops.inflight.advance_program_run(run, 1)
        with pytest.raises(RuntimeError, match="a program has not run to its end"):
            torch.ops.inflight.outputs_of_program_run(run)
        torch.ops.inflight.delete_program_run(run)


@torch.inference_mode()
def test_runs_do_not_write_into_what_others_still_need() -> None:
    """Memory is reused, except that of logits and of unfinished runs."""
    forward = heads(torch.float32)
    compiled = CompiledGraph(encode(trace(forward)))
    steps = [step_of(num_tokens, num_rows) for num_tokens, num_rows in ((33, 33), (7, 3), (33, 2), (7, 7))]
    expected = [forward(*step) for step in steps]
    for _ in range(2):
        runs = [torch.ops.inflight.new_program_run(*step, compiled._handle) for step in steps]
        unfinished = set(runs)
        while unfinished:
            unfinished = {run for run in runs if torch.ops.inflight.advance_program_run(run, 1)}
        logits = [each for run in runs for each in torch.ops.inflight.outputs_of_program_run(run)]
        for run in runs:
            torch.ops.inflight.delete_program_run(run)
        logits += [each for step in steps for each in compiled(*step)]
        assert all(map(torch.equal, logits, expected * 2))


def test_a_program_refuses_a_dtype_that_there_is_not() -> None:
    """Torch's own operators do not check this."""

    def forward(input_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        return TABLE[input_ids].to(torch.float64)[logit_rows]

    with torch.inference_mode():
        codes, *others = encode(trace(forward))[:4]
    float64 = torch.ops.inflight.scalar_type(torch.float64)
    pattern = [ValueKind.INTEGER, 1, float64, 0, 0]  # an argument of one size
    places = [place for place in range(2, len(codes)) if codes[place - 2 : place + 3] == pattern]
    assert places
    for place in places:
        for wrong in (-1, 10**6):
            changed = [*codes[:place], wrong, *codes[place + 1 :]]
            with pytest.raises(RuntimeError, match="there is no dtype"):
                torch.ops.inflight.new_program(changed, *others)
