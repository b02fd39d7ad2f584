"""The cache's blocks as numbers: who may write where. No tensors, no sequences.

A block is free or owned by exactly one block table: free + owned = all, after every step.
"""

from collections.abc import Iterable


class BlockPool:
    """Blocks 0 to blocks - 1. The one released last is allocated first: its memory is the warmest."""

    def __init__(self, blocks: int) -> None:
        assert blocks > 0, f"a pool of {blocks} blocks"
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._owned = bytearray(blocks)

    @property
    def free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def owned(self) -> int:
        """Blocks in somebody's table."""
        return self.blocks - len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Takes count free blocks; the caller has looked at free before."""
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = tuple(self._free.pop() for _ in range(count))
        for block in taken:
            self._owned[block] = 1
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Gives blocks back; each must be owned."""
        for block in blocks:
            assert self._owned[block], f"block {block} is released twice"
            self._owned[block] = 0
            self._free.append(block)

    def check(self, tables: Iterable[tuple[int, ...]]) -> None:
        """The conservation law, against every block table there is: each block is free or in one table, once."""
        owned = [block for table in tables for block in table]
        assert len(set(owned)) == len(owned), "a block is in two tables"
        assert len(self._free) + len(owned) == self.blocks, f"{len(self._free)} + {len(owned)} != {self.blocks} blocks"
        assert not set(owned) & set(self._free), "a block is both free and owned"
        assert sum(self._owned) == len(owned), f"{sum(self._owned)} blocks marked, {len(owned)} owned"
