"""Keys of published pages, and the map from key to page.

Owns what makes two pages interchangeable and the eviction order; leaves units and
references to `PagePool`. Invariant: two pages have the same key only if every input of
their KV is the same: model, layout, noise, salt, and tokens with depths from position 0.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from looptrt.runtime.kv.page_pool import Page


@dataclass(frozen=True)
class CacheIdentity:
    """What all pages of an engine share, and which request fields enter the key.

    Attributes:
        model: fields that name the model and its arithmetic: fingerprint, dtype, plane
            strategy, page size, noise mode, state scale.
        uses_noise: whether the initial state depends on the noise seed.
    """

    model: tuple[str, ...]
    uses_noise: bool

    def root(self, salt: bytes | None, noise_seed: int) -> bytes:
        """Key that the first page of a request chains from."""
        seed = struct.pack("<q", noise_seed) if self.uses_noise else None
        return _digest([*(field.encode() for field in self.model), salt, seed])


def page_key(
    parent: bytes, token_ids: NDArray[np.int32], depths: NDArray[np.int16] | None
) -> bytes:
    """Key of a full page.

    Args:
        parent: key of the page before, or the request's root.
        token_ids: [page_size] tokens.
        depths: [page_size] recorded loops of each token, None for a key over tokens alone.
    """
    runs = None if depths is None else _run_lengths(depths)
    return _digest([parent, token_ids.astype("<i4", copy=False).tobytes(), runs])


def _run_lengths(depths: NDArray[np.int16]) -> bytes:
    if (depths == depths[0]).all():
        return struct.pack("<2i", depths[0], len(depths))
    starts = np.flatnonzero(np.diff(depths, prepend=-1))
    lengths = np.diff(starts, append=len(depths))
    return np.stack([depths[starts], lengths]).astype("<i4").tobytes()


def _digest(fields: Iterable[bytes | None]) -> bytes:
    """SHA-256 over length-prefixed fields; None differs from every byte string."""
    hasher = hashlib.sha256()
    for value in fields:
        if value is None:
            hasher.update(b"\x00")
        else:
            hasher.update(b"\x01" + struct.pack("<Q", len(value)))
            hasher.update(value)
    return hasher.digest()


class PrefixCache:
    """Published pages by key; unreferenced ones are kept in order of their last use."""

    def __init__(self) -> None:
        self._pages: dict[bytes, Page] = {}
        self._by_tokens: dict[bytes, Page] = {}
        self._idle: OrderedDict[int, Page] = OrderedDict()
        self.idle_units = 0

    def __len__(self) -> int:
        return len(self._pages)

    def pages(self) -> Iterable[Page]:
        """Every published page."""
        return self._pages.values()

    def find(self, key: bytes) -> Page | None:
        """Page published under a key over tokens and depths."""
        return self._pages.get(key)

    def find_by_tokens(self, token_key: bytes) -> Page | None:
        """Page with these tokens whose context ran deepest, whatever the depths."""
        return self._by_tokens.get(token_key)

    def add(self, page: Page, key: bytes, token_key: bytes | None) -> None:
        """Publish a page; the key must be new."""
        self._pages[key] = page
        page.key, page.token_key = key, token_key
        if token_key is not None:
            held = self._by_tokens.get(token_key)
            if held is None or held.context_depth < page.context_depth:
                self._by_tokens[token_key] = page

    def set_idle(self, page: Page) -> None:
        """The last reference to a published page is gone; it may be evicted."""
        self._idle[id(page)] = page
        self.idle_units += len(page.units)

    def set_used(self, page: Page) -> None:
        """A published page is referenced again."""
        del self._idle[id(page)]
        self.idle_units -= len(page.units)

    def evict(self) -> Page | None:
        """Forget the page unused for longest and return it, or None."""
        if not self._idle:
            return None
        _, page = self._idle.popitem(last=False)
        self.idle_units -= len(page.units)
        assert page.key is not None
        del self._pages[page.key]
        if page.token_key is not None and self._by_tokens.get(page.token_key) is page:
            del self._by_tokens[page.token_key]
        page.key = page.token_key = None
        return page
