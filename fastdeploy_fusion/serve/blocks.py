"""Who holds which block of the KV cache. Pure; only the first rank has one, the others are told."""

import heapq


class BlockAllocator:
    """Hands out blocks of ``block_size`` tokens from a fixed number of them, the lowest first.

    Low numbers first keeps a sequence's blocks side by side when little is in use, and then its keys are read as they
    lie.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks))  # a sorted list is a heap
        self._held = bytearray(num_blocks)  # 1 for each block that is not in it

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def take(self, num_tokens: int) -> list[int] | None:
        """Blocks for so many tokens, or None when they are not free now; all or nothing."""
        count = self.blocks_for(num_tokens)
        if count > len(self._free):
            return None
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for block in taken:
            self._held[block] = 1
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """ValueError for a block that is free already: two sequences would write to it."""
        for block in blocks:
            if not self._held[block]:
                raise ValueError(f"block {block} is given back twice")
            self._held[block] = 0
            heapq.heappush(self._free, block)
