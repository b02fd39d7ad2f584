"""The cache's blocks as numbers: who may read and write where. No tensors, no sequences.

A block is free, cached or owned: free + cached + owned = all, after every step. Owned: in one block table or several, as
often as its reference count says; only a block with one reference is ever written. Cached: in no table, but what it holds is
registered and may be taken up again. Only full, computed blocks are registered, and those are never written.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from workers.engine.prefixes import Prefix


class BlockPool:
    """Blocks 0 to blocks - 1. Free ones go first, the latest released first: its memory is the warmest.

    Then cached ones are forgotten, those first that were released longest ago; a table's last block counts as released before
    its first, so that a chain loses its tail and stays reachable.
    """

    def __init__(self, blocks: int) -> None:
        assert blocks > 0, f"a pool of {blocks} blocks"
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # the one released longest ago comes first
        self._prefixes: dict[int, Prefix] = {}  # of registered blocks, owned or cached
        self._registered: dict[bytes, int] = {}  # digest to block

    @property
    def free(self) -> int:
        """Blocks that nobody owns and that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that nobody owns, with contents that may be wanted again."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that allocate can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def owned(self) -> int:
        """Blocks in somebody's table."""
        return self.blocks - self.available

    def references(self, block: int) -> int:
        """Tables that the block is in."""
        return self._references[block]

    def allocate(self, count: int) -> tuple[int, ...]:
        """Takes count blocks to write to; the caller has looked at available before."""
        assert 0 <= count <= self.available, f"{count} blocks wanted, {self.available} available"
        taken = tuple(self._free.pop() if self._free else self._evict() for _ in range(count))
        for block in taken:
            self._references[block] = 1
        return taken

    def lookup(self, prefix: Prefix) -> int | None:
        """The block that holds exactly this, after exactly that."""
        block = self._registered.get(prefix.digest)
        return block if block is not None and self._prefixes[block] == prefix else None

    def share(self, blocks: Iterable[int]) -> None:
        """One more table holds these blocks, which lookup gave; they may only be read."""
        for block in blocks:
            assert block in self._prefixes, f"block {block} holds nothing that could be shared"
            self._references[block] += 1
            self._cached.pop(block, None)

    def register(self, block: int, prefix: Prefix) -> None:
        """Says what an owned block holds, now that all of it is computed. What another block holds already stays there."""
        assert self._references[block] > 0, f"block {block} is nobody's"
        assert block not in self._prefixes, f"block {block} is registered twice"
        if prefix.digest not in self._registered:
            self._registered[prefix.digest] = block
            self._prefixes[block] = prefix

    def release(self, blocks: tuple[int, ...]) -> None:
        """Takes a table's blocks out of it; each must be owned."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._put_down(block)

    def forget(self) -> None:
        """Drops what cached and owned blocks are known to hold: after a fault nobody knows whether it is true."""
        self._prefixes.clear()
        self._registered.clear()
        self._free += reversed(self._cached)
        self._cached.clear()

    def check(self, tables: Iterable[tuple[int, ...]]) -> None:
        """The conservation law, against every block table there is."""
        counts = Counter(block for table in tables for block in table)
        for block, count in enumerate(self._references):
            assert count == counts[block], f"block {block} is in {counts[block]} tables, counted {count} times"
        ours = [*self._free, *self._cached, *counts]
        assert len(ours) == self.blocks, f"{self.free} + {self.cached} + {len(counts)} != {self.blocks} blocks"
        assert len(set(ours)) == self.blocks, "a block is in two states"
        assert self._registered == {prefix.digest: block for block, prefix in self._prefixes.items()}, "names and blocks differ"
        assert not self._prefixes.keys() & set(self._free), "a free block is registered"
        assert set(self._cached) <= self._prefixes.keys(), "a cached block holds nothing"

    def _put_down(self, block: int) -> None:
        if block in self._prefixes:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._registered[self._prefixes.pop(block).digest]
        return block
