"""Which pages of the KV cache are in use, by how many, and what can be found in them: plain counting, no tensors.

A page is room for the keys and values of `page_size` consecutive tokens. Pages are counted, so that sequences
that start with the same tokens can share the pages that hold them.

A page that is full and computed can be published under a key that stands for its tokens and all tokens before it.
It can be found until it is taken for something else, also after its last holder has let go. Pages that cannot be
found are taken first, then those that nobody has held for longest.

This module knows nothing about sequences. Sharing is as safe as its keys: whatever keys and values depend on
(account, adapter) must be in the salt. The model and the KV format need not be: each has an allocator of its own.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable

KEY_BYTES = 32


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; none was taken."""


def extend_keys(keys: list[bytes], salt: str, tokens: list[int], page_size: int) -> None:
    """Append to `keys`, which has the keys of the first pages of `tokens`, those of all further full pages.

    A key is the BLAKE2b digest of the key before it (for the first page, of the salt) and of the page's tokens: a
    collision, which would show one account's text to another, cannot be found.
    """
    num_pages = len(tokens) // page_size
    if len(keys) >= num_pages:
        return
    # `person` keeps the digest of a salt from ever being that of a page, whatever somebody names an account.
    parent = keys[-1] if keys else _digest(salt.encode(), person=b"salt")
    rest = array("I", tokens[len(keys) * page_size : num_pages * page_size])
    for start in range(0, len(rest), page_size):
        parent = _digest(parent + rest[start : start + page_size].tobytes(), person=b"page")
        keys.append(parent)


def _digest(data: bytes, person: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=person).digest()


class PageAllocator:
    """Hands out page numbers from 0 to `num_pages` - 1."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._counts = [0] * num_pages
        # A stack: the page freed last is the one most likely to be in the processor's cache.
        self._empty = list(range(num_pages - 1, -1, -1))
        # Free and published; freed longest ago first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, tuple[bytes, bytes | None]] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._empty) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Pages that can be found, held or not."""
        return len(self._pages)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.page_size)

    def free_among(self, pages: Iterable[int]) -> list[int]:
        """Those of `pages` that nobody holds."""
        return [page for page in pages if self._counts[page] == 0]

    def take(self, num_pages: int) -> list[int]:
        """`num_pages` free pages, held once each; what was published in them is lost.

        Raises:
            OutOfPages: there are not as many.
        """
        if num_pages > self.num_free:
            raise OutOfPages(f"{num_pages} pages wanted, {self.num_free} of {self.num_pages} free")
        pages = [self._empty.pop() if self._empty else self._evict() for _ in range(num_pages)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """Hold `pages`, which somebody holds already or which were found, once more."""
        for page in pages:
            if self._counts[page] == 0:
                assert page in self._idle, f"page {page} is empty and cannot be shared"
                del self._idle[page]
            self._counts[page] += 1

    def release(self, pages: list[int]) -> None:
        """Let go of `pages`; those that nobody else holds become free."""
        # The last first: of a chain, the end is taken before the beginning, without which it is not found.
        for page in reversed(pages):
            assert self._counts[page] > 0, f"page {page} was released twice"
            self._counts[page] -= 1
            if self._counts[page] > 0:
                continue
            if page in self._keys:
                self._idle[page] = None
            else:
                self._empty.append(page)

    def publish(self, page: int, key: bytes, parent: bytes | None) -> None:
        """Let `page`, which is held and will not change, be found under `key`; `parent` is the key before it.

        If another page has that key already, that one is found and this one is not.
        """
        assert self._counts[page] > 0, f"page {page} is free and cannot be published"
        assert page not in self._keys, f"page {page} is published already"
        if key not in self._pages:
            self._pages[key] = page
            self._keys[page] = (key, parent)

    def is_published(self, key: bytes) -> bool:
        """Whether a page can be found under `key`."""
        return key in self._pages

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the first of `keys`, up to the first key without a page. To keep them, `share` them."""
        pages = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def forget(self, pages: list[int]) -> list[int]:
        """Let `pages`, and the pages whose values were computed from theirs, not be found any more.

        Returns:
            Those of them that nobody holds.
        """
        children = defaultdict(list)
        for page, (_, parent) in self._keys.items():
            children[parent].append(page)
        dropped, pending = [], [page for page in pages if page in self._keys]
        while pending:
            page = pending.pop()
            if page not in self._keys:
                continue
            key, _ = self._keys[page]
            pending += children.get(key, [])
            self._unpublish(page)
            if page in self._idle:
                del self._idle[page]
                self._empty.append(page)
                dropped.append(page)
        return dropped

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._unpublish(page)
        return page

    def _unpublish(self, page: int) -> None:
        key, _ = self._keys.pop(page)
        del self._pages[key]
