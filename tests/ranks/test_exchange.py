"""How ranks meet. Here they are threads of one process, which map the same file."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from inflight.execution.ranks.rank import PLACE_BYTES, Rank

SHAPES = [(1, 1), (1, 7), (3, 64), (29, 1024), (2, 5, 33), (0, 16), (700, 2001)]


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    size: int = request.param
    file = os.memfd_create("tested")
    yield [Rank(number, size, file) for number in range(size)]
    os.close(file)


def on_all(ranks: list[Rank], work: Callable[[Rank], torch.Tensor]) -> list[torch.Tensor]:
    """What each rank gets when all work at the same time."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_get_the_sum_in_the_order_of_the_ranks(ranks: list[Rank], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in SHAPES:
        given = [torch.randn(shape, generator=generator).to(dtype) for _ in ranks]
        summed = given[0].float()
        for each in given[1:]:
            summed = summed + each.float()
        for got in on_all(ranks, lambda rank, given=given: rank.sum(given[rank.number])):  # type: ignore[misc]
            assert got.dtype == dtype
            assert torch.equal(got, summed.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_get_what_all_have_side_by_side(ranks: list[Rank], dtype: torch.dtype) -> None:
    for shape in SHAPES:
        given = [torch.randn(shape).to(dtype) for _ in ranks]
        for got in on_all(ranks, lambda rank, given=given: rank.gather(given[rank.number])):  # type: ignore[misc]
            assert torch.equal(got, torch.cat(given, dim=-1))


def test_rows_that_lie_apart_are_exchanged(ranks: list[Rank]) -> None:
    given = [torch.randn(8, 6).T for _ in ranks]
    for got in on_all(ranks, lambda rank: rank.gather(given[rank.number][:, ::2])):
        assert torch.equal(got, torch.cat([each[:, ::2] for each in given], dim=-1))


def test_no_place_is_written_before_all_have_read_it(ranks: list[Rank]) -> None:
    """One rank after the other is slow; a place that is overwritten too early would show in the sums."""

    def meet_often(rank: Rank) -> torch.Tensor:
        total = torch.zeros(1)
        for number in range(300):
            rows = torch.full((1 + number % 5, 100 + number), float(number * (rank.number + 1)))
            if number % len(ranks) == rank.number:
                rows = rows.repeat(20, 1).narrow(0, 0, len(rows)).clone()  # takes longer
            total += rank.sum(rows).mean()
        return total

    factor = sum(rank.number + 1 for rank in ranks)
    expected = torch.zeros(1)
    for number in range(300):
        expected += float(number * factor)
    assert all(torch.equal(got, expected) for got in on_all(ranks, meet_often))


def test_waiting_ranks_learn_that_a_step_is_given_up(ranks: list[Rank]) -> None:
    def work(rank: Rank) -> torch.Tensor:
        rank.begin(1)
        if rank.number == 0:
            rank.give_up()
        else:
            with pytest.raises(RuntimeError, match="rank 0 has given up step 1"):
                rank.sum(torch.ones(2, 2))
            assert rank.is_given_up
        rank.begin(2)
        return rank.sum(torch.ones(2, 2))

    assert all(torch.equal(got, torch.full((2, 2), float(len(ranks)))) for got in on_all(ranks, work))
    assert not any(rank.is_given_up for rank in ranks)


def test_waiting_ranks_learn_that_a_rank_has_ended(ranks: list[Rank]) -> None:
    def wait() -> None:
        with pytest.raises(RuntimeError, match="a rank has ended"):
            ranks[1].sum(torch.ones(2, 2))
        heard.set()

    heard = threading.Event()
    waiting = threading.Thread(target=wait)
    waiting.start()
    ranks[0].end()
    waiting.join()
    assert heard.is_set()
    ranks[2 % len(ranks)].begin(1)
    with pytest.raises(RuntimeError, match="a rank has ended"):
        ranks[2 % len(ranks)].sum(torch.ones(2, 2))


def test_what_cannot_be_exchanged_is_refused(ranks: list[Rank]) -> None:
    for rows in (torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.int64), torch.tensor(1.0)):
        for meet in (ranks[0].sum, ranks[0].gather):
            with pytest.raises(RuntimeError, match="rows must be"):
                meet(rows)
    with pytest.raises(RuntimeError, match="does not fit"):
        ranks[0].gather(torch.ones(1, PLACE_BYTES // 4 + 1))
    ranks[0].begin(5)
    with pytest.raises(RuntimeError, match="there is no step 4"):
        ranks[0].begin(4)
    with pytest.raises(RuntimeError, match="there is no rank 7 of 2"):
        Rank(7, 2, 0)
