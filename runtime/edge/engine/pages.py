"""Which pages of the KV cache are in use, and by how many: plain counting, no tensors.

A page is room for the keys and values of `page_size` consecutive tokens. Pages are counted, so that sequences
that start with the same tokens can share the pages that hold them.

This module knows nothing about sequences or what the pages hold.
"""

from __future__ import annotations


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; none was taken."""


class PageAllocator:
    """Hands out page numbers from 0 to `num_pages` - 1."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._counts = [0] * num_pages
        # A stack: the page freed last is the one most likely to be in the processor's cache.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.page_size)

    def take(self, num_pages: int) -> list[int]:
        """`num_pages` free pages, held once each.

        Raises:
            OutOfPages: there are not as many.
        """
        if num_pages > len(self._free):
            raise OutOfPages(f"{num_pages} pages wanted, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """Hold `pages`, which somebody holds already, once more."""
        for page in pages:
            assert self._counts[page] > 0, f"page {page} is free and cannot be shared"
            self._counts[page] += 1

    def release(self, pages: list[int]) -> None:
        """Let go of `pages`; those that nobody else holds become free."""
        for page in reversed(pages):
            assert self._counts[page] > 0, f"page {page} was released twice"
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._free.append(page)
