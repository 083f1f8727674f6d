"""`PrefixStore`: saves and loads blocks of the cache while the engine computes others.

One thread reads and writes, directly from and into the cache's memory. Loads come first, with a second thread while the
engine is idle; saves run in the background. While the engine computes, both are limited to a small share of the time. A
block reallocated before it was saved is skipped. File errors cost a recomputation and a log line.
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from inflight.contracts.step.block_hash import ENCODER_OUTPUTS, Root, block_hash, block_hashes
from inflight.prefix_store.block_file import Rows, size_of
from inflight.prefix_store.block_folder import BlockFolder
from inflight.scheduling.persistence import BlockContent

SHARE_OF_SAVING, SHARE_OF_LOADING = 0.03, 0.15
"""The share of time for saving and loading while the engine computes."""
NUM_READERS, READ_AT_ONCE = 2, 16
"""Threads that load while the engine is idle, and how many blocks each loads at once."""
FIRST_RATE = 500e6
"""The initial estimate of a thread's load rate, in bytes per second."""
SMOOTHING = 0.1
"""Weight of the newest duration in a running average."""
MOST_READY = 2**30
"""Bytes of the cache committed ahead of loads."""
BYTES_AHEAD = 2**26
"""How much the disk is told of before it is read."""


@dataclass(slots=True)
class BlockLoading:
    """Blocks that are being loaded; see `scheduling.persistence.Loading`."""

    blocks: Sequence[tuple[BlockContent, int]]
    num_loaded: int = 0
    num_announced: int = 0
    is_done: bool = False


@dataclass(slots=True)
class Saving:
    """A block, or an encoder output, to save."""

    content: BlockContent
    rows: Callable[[], Rows]
    is_current: Callable[[], bool] = field(repr=False)


def _of_output(digest: bytes) -> BlockContent:
    return BlockContent(block_hash(ENCODER_OUTPUTS, digest), ENCODER_OUTPUTS, digest, 0)


class _Speeds:
    """How fast loading and computing are, as far as is known.

    Attributes:
        bytes_per_block, bytes_per_state: of the cache.
    """

    def __init__(self, bytes_per_block: int, bytes_per_state: int) -> None:
        self.bytes_per_block, self.bytes_per_state = bytes_per_block, bytes_per_state
        self._rate = FIRST_RATE
        self._seconds_per_token: float | None = None

    def observe_load(self, num_bytes: int, seconds: float, num_threads: int) -> None:
        """Threads loaded this much together in `seconds`."""
        each = num_bytes / max(seconds, 1e-9) / num_threads
        self._rate += SMOOTHING * (each - self._rate)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine computed `num_tokens` in `seconds`."""
        each = seconds / num_tokens
        known = each if self._seconds_per_token is None else self._seconds_per_token
        self._seconds_per_token = known + SMOOTHING * (each - known)

    def is_loading_faster(self, num_blocks: int, num_states: int, num_tokens: int, num_threads: float) -> bool:
        """Whether blocks and states are loaded sooner than tokens are computed. Before anything was computed, they
        are."""
        if self._seconds_per_token is None:
            return True
        num_bytes = num_blocks * self.bytes_per_block + num_states * self.bytes_per_state
        return num_bytes / self._rate / num_threads < num_tokens * self._seconds_per_token


class PrefixStore:
    """A `BlockStore` in a folder. Its thread runs until `end` or the end of the process.

    Args:
        rows_of: the memory of a block of the cache, or of a recurrent state, whose numbers follow.
        seconds_to_save: how long it may save at the end.
        num_blocks: of the cache; the first are used first.
        bytes_per_state: of a recurrent state.
        touch: commits memory before it is written to.
        clock: seconds.

    Attributes:
        is_busy: whether the engine computes, set by the engine.
        num_saved, num_loaded: blocks, so far; encoder outputs are saved, too.
    """

    def __init__(
        self,
        folder: BlockFolder,
        rows_of: Callable[[int], Rows],
        seconds_to_save: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        *,
        num_blocks: int = 0,
        bytes_per_state: int = 0,
        touch: Callable[[memoryview], None] = lambda memory: None,
    ) -> None:
        self.is_busy = False
        self.num_saved = self.num_loaded = 0
        self._folder = folder
        self._rows_of = rows_of
        self._clock = clock
        self._speeds = _Speeds(max(1, sum(map(len, rows_of(0)))), bytes_per_state)
        self.observe_prefill = self._speeds.observe_prefill
        self._loads: deque[BlockLoading] = deque()
        self._saves: deque[Saving] = deque()
        self._changed = threading.Condition()
        self._is_working = False
        self._seconds_to_save = seconds_to_save
        self._deadline: float | None = None  # once it has ended
        self._thread = threading.Thread(
            target=self._work, args=(num_blocks, touch), name="inflight-prefix-store", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    # ------------------------------------------------------------------------------------- what the engine asks

    def has(self, block_hash: bytes, group: int) -> bool:
        """See `BlockStore`."""
        return self._folder.has(block_hash, group)

    def is_faster(self, num_blocks: int, num_states: int, num_tokens: int) -> bool:
        """See `BlockStore`."""
        num_threads = SHARE_OF_LOADING if self.is_busy else NUM_READERS
        return self._speeds.is_loading_faster(num_blocks, num_states, num_tokens, num_threads)

    def load(self, blocks: Sequence[tuple[BlockContent, int]]) -> BlockLoading:
        """See `BlockStore`."""
        loading = BlockLoading(blocks)
        with self._changed:
            self._loads.append(loading)
            self._changed.notify_all()
        return loading

    def save(self, content: BlockContent, block: int, is_current: Callable[[], bool]) -> None:
        """See `BlockStore`."""
        with self._changed:
            self._saves.append(Saving(content, lambda: self._rows_of(block), is_current))
            self._changed.notify_all()

    def find_output(self, digest: bytes) -> bytearray | None:
        """The saved encoder output of an image or a sound, if there is one. Reads it at once."""
        content = _of_output(digest)
        try:
            size = self._folder.path_of(content.block_hash, content.group).stat().st_size
        except OSError:
            return None
        output = bytearray(max(0, size - size_of(content, 0)))
        return output if self._folder.read(content, [memoryview(output)]) else None

    def save_output(self, digest: bytes, output: bytes) -> None:
        """Write the encoder output of an image or a sound in the background."""
        with self._changed:
            self._saves.append(Saving(_of_output(digest), lambda: [memoryview(output)], lambda: True))
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """See `BlockStore`."""
        with self._changed:
            waiting_for = list(self._loads)
            self._changed.wait_for(lambda: any(each.is_done for each in waiting_for) or not self._loads, seconds)

    def pin(
        self,
        token_ids: Sequence[int],
        block_size: int,
        firsts: Sequence[int],
        cache_salt: str | None,
        adapter: str | None = None,
        *,
        state_after: int | None = None,
    ) -> None:
        """Pin the saved blocks of a prompt.

        Args:
            token_ids: its tokens; only full blocks are pinned.
            firsts: the first block that later tokens see, in each cache group.
            state_after: the block at whose end a later prompt continues; None: there are no recurrent states.

        Raises:
            ValueError: too much would be pinned.
            OSError: the folder cannot be used, or blocks that later tokens see are not in it.
        """
        paths, num_missing = list[Path](), len(token_ids) // block_size * (len(firsts) + 1)
        for is_long in (False, True):
            hashes, needed = block_hashes(token_ids, block_size, Root(cache_salt, is_long, adapter)), list[Path]()
            for number, name in enumerate(hashes):
                of_groups = [self._folder.path_of(name, group) for group in range(len(firsts))]
                needed += [path for path, first in zip(of_groups, firsts, strict=True) if number >= first]
                paths += of_groups
                if state_after is not None:
                    paths.append(self._folder.path_of(name, len(firsts)))
                    needed += paths[-1:] * (number == state_after)
            num_missing = min(num_missing, sum(not path.exists() for path in needed))
        self._folder.pin(paths)
        if num_missing:
            why = self._folder.write_error or "they were deleted, or taken for other tokens, before"
            raise OSError(f"{num_missing} blocks of the prefix are not saved in {str(self._folder.path)!r}: {why}")

    def flush(self, seconds: float) -> None:
        """Save pending blocks, within a time limit."""
        self.is_busy = False
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._saves and not self._is_working, seconds)

    def end(self) -> None:
        """Stop loading, save pending blocks, and then end the thread. Does not wait, so the garbage collector may call
        it, even in the thread itself."""
        self.is_busy = False
        with self._changed:
            if self._deadline is None:
                self._deadline = self._clock() + self._seconds_to_save
            self._changed.notify_all()

    def close(self) -> None:
        """End, and wait for that."""
        self.end()
        self._thread.join()

    # ------------------------------------------------------------------------------------- the thread

    def _work(self, num_blocks: int, touch: Callable[[memoryview], None]) -> None:
        self._get_ready(num_blocks, touch)
        while True:
            with self._changed:
                self._is_working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._loads or self._saves or self._deadline is not None)
                if self._deadline is not None and (not self._saves or self._clock() >= self._deadline):
                    # If this is its last owner, the cache is freed while the process's end still waits for this thread.
                    del self._rows_of
                    atexit.unregister(self.close)
                    return
                self._is_working = True
                loading = self._loads[0] if self._loads and self._deadline is None else None
                saving = None if loading is not None else self._saves.popleft()
            start = self._clock()
            if loading is not None:
                self._load_next(loading)
                self._rest(self._clock() - start, SHARE_OF_LOADING)
            elif saving is not None:
                self.num_saved += self._folder.write(saving.content, saving.rows(), saving.is_current)
                self._rest(self._clock() - start, SHARE_OF_SAVING)

    def _get_ready(self, num_blocks: int, touch: Callable[[memoryview], None]) -> None:
        """Until this thread is needed, touch the memory that blocks will be loaded into: taking pages from the
        system can take longer than reading the disk."""
        num_blocks = min(num_blocks, self._folder.num_files(), MOST_READY // self._speeds.bytes_per_block)
        for block in range(num_blocks):
            if self.is_busy or self._loads or self._saves or self._deadline is not None:
                return
            for row in self._rows_of(block):
                touch(row)

    def _rest(self, seconds: float, share: float) -> None:
        """After working this long, sleep to leave time to the engine, until it is idle."""
        with self._changed:
            self._is_working = False
            self._changed.notify_all()
            if self.is_busy:
                urgent = len(self._loads)
                self._changed.wait_for(
                    lambda: not self.is_busy or self._deadline is not None or len(self._loads) > urgent,
                    seconds * (1 / share - 1),
                )

    def _load_next(self, loading: BlockLoading) -> None:
        """Load some more blocks."""
        num_threads, num_blocks = (1, 1) if self.is_busy else (NUM_READERS, READ_AT_ONCE)
        blocks = loading.blocks[loading.num_loaded : loading.num_loaded + num_blocks]
        start = self._clock()
        self._announce(loading)
        num_there = self._load_all(blocks, min(num_threads, len(blocks)))
        if num_there == len(blocks):
            num_bytes = sum(len(row) for _, block in blocks for row in self._rows_of(block))
            self._speeds.observe_load(num_bytes, self._clock() - start, min(num_threads, num_there))
        with self._changed:
            self.num_loaded += num_there
            loading.num_loaded += num_there
            if num_there < len(blocks) or loading.num_loaded == len(loading.blocks):
                loading.is_done = True
                if self._loads and self._loads[0] is loading:
                    self._loads.popleft()
        if loading.is_done and loading.num_loaded:
            with suppress(OSError):  # a disk that is full has other ways to say so
                self._folder.observe_hit()

    def _announce(self, loading: BlockLoading) -> None:
        most = loading.num_loaded + 1 + BYTES_AHEAD // self._speeds.bytes_per_block
        for content, _ in loading.blocks[loading.num_announced : most]:
            self._folder.announce(content)
        loading.num_announced = max(loading.num_announced, most)

    def _load_all(self, blocks: Sequence[tuple[BlockContent, int]], num_threads: int) -> int:
        """Load blocks; return how many of the first ones succeeded."""
        are_there = [False] * len(blocks)

        def load_every(first: int) -> None:
            for place in range(first, len(blocks), num_threads):
                content, block = blocks[place]
                are_there[place] = self._folder.read(content, self._rows_of(block))

        others = [threading.Thread(target=load_every, args=(first,)) for first in range(1, num_threads)]
        for other in others:
            other.start()
        load_every(0)
        for other in others:
            other.join()
        return next((place for place, is_there in enumerate(are_there) if not is_there), len(blocks))
