"""`RandomStore`: keeps blocks of the model cache, loses some, and loads the others whenever it likes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inflight.scheduling.persistence import BlockContent
from tests.properties.model_cache import ModelCache, Place
from tests.properties.model_states import ModelStates


@dataclass
class Loading:
    blocks: Sequence[tuple[BlockContent, int]]
    num_loaded: int = 0
    is_done: bool = False


class RandomStore:
    """A block store without a thread: what it has been asked for happens in `advance`."""

    def __init__(self, seed: int, cache: ModelCache, states: ModelStates | None) -> None:
        self._states = states
        self.num_loaded = 0
        self._rng = random.Random(seed)
        self._cache = cache
        self._kept: dict[tuple[bytes, int], tuple[BlockContent, list[Place]]] = {}
        self._saves: list[tuple[BlockContent, int, Callable[[], bool]]] = []
        self._loads: list[Loading] = []

    def has(self, block_hash: bytes, group: int) -> bool:
        return (block_hash, group) in self._kept

    def is_faster(self, num_blocks: int, num_states: int, num_tokens: int) -> bool:
        assert num_blocks > 0
        assert num_states == (self._states is not None)
        assert num_tokens > 0
        return self._rng.random() < 0.9

    def load(self, blocks: Sequence[tuple[BlockContent, int]]) -> Loading:
        self._loads.append(Loading(blocks))
        return self._loads[-1]

    def save(self, content: BlockContent, block: int, is_current: Callable[[], bool]) -> None:
        assert is_current()
        self._saves.append((content, block, is_current))

    def wait(self, seconds: float) -> None:
        self.advance()

    def advance(self) -> None:
        """Save and load a few blocks."""
        for _ in range(self._rng.randrange(6)):
            self._save_one()
            self._load_one()

    def finish(self) -> None:
        """Load everything that was asked for."""
        while self._loads:
            self._load_one()

    def _save_one(self) -> None:
        if self._saves:
            content, block, is_current = self._saves.pop(self._rng.randrange(len(self._saves)))
            if is_current():
                places = self._places(block)
                size = self._cache.block_size
                assert [token for _, token, _, _ in places[-size:]] == list(memoryview(content.token_ids).cast("i"))
                self._kept[content.block_hash, content.group] = content, list(places)

    def _load_one(self) -> None:
        if not self._loads:
            return
        loading = self._rng.choice(self._loads)
        content, block = loading.blocks[loading.num_loaded]
        if self._rng.random() < 0.05:
            self._kept.pop((content.block_hash, content.group), None)
        kept = self._kept.get((content.block_hash, content.group))
        if kept is not None:
            assert kept[0] == content
            self._write(block, kept[1])
            loading.num_loaded += 1
            self.num_loaded += 1
        if kept is None or loading.num_loaded == len(loading.blocks):
            loading.is_done = True
            self._loads.remove(loading)

    def _places(self, block: int) -> list[Place]:
        """The content of a block, or of a state, whose numbers follow."""
        size, num_blocks = self._cache.block_size, self._cache.sizes.num_blocks
        if self._states is not None and block >= num_blocks:
            return self._states.states[block - num_blocks] or []
        return self._cache.places[block * size : (block + 1) * size]

    def _write(self, block: int, places: list[Place]) -> None:
        size, num_blocks = self._cache.block_size, self._cache.sizes.num_blocks
        if self._states is not None and block >= num_blocks:
            self._states.states[block - num_blocks] = places
        else:
            self._cache.places[block * size : (block + 1) * size] = places
