"""The pages of running requests: growth, prefix hits, publication and plane copies.

Owns what design rules say about a page's depth and about shared pages; leaves which
request grows or is preempted to the scheduler. Invariant: a request's pages cover its
`capacity`, and none it writes to is referenced by another request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looptrt.kv_layout import PlaneLayout
from looptrt.runtime.kv.block_table import BlockTable
from looptrt.runtime.kv.page_pool import Page, PagePool
from looptrt.runtime.kv.prefix_cache import CacheIdentity, page_key
from looptrt.runtime.request import Request
from looptrt.runtime.slots import Slots


@dataclass(frozen=True)
class PrefixPolicy:
    """When a published page may serve another request.

    Attributes:
        enabled: False where results depend on the chunk schedule.
        at_least: accept pages whose tokens ran deeper than asked (rung R3).
        grid: tokens, whole pages; hits end at its multiples, and only pages of its whole chunks
            are published. None: any page.
    """

    enabled: bool
    at_least: bool = False
    grid: int | None = None


def units_of_sequence(
    layout: PlaneLayout, num_prompt: int, num_tokens: int, prefill_loops: int, loops: int
) -> int:
    """Units that a request of `num_tokens` tokens, prompt included, owns without shared pages."""
    shallow = (num_prompt - 1) // layout.page_size
    deep = layout.num_pages(num_tokens) - shallow
    return shallow * layout.units_of_page(prefill_loops) + deep * layout.units_of_page(loops)


def tokens_in_units(
    layout: PlaneLayout, num_prompt: int, num_units: int, prefill_loops: int, loops: int
) -> int:
    """The most tokens that `num_units` hold; fewer than the prompt's where those do not fit."""
    shallow = (num_prompt - 1) // layout.page_size
    left = num_units - shallow * layout.units_of_page(prefill_loops)
    return (shallow + left // layout.units_of_page(loops)) * layout.page_size


class SequenceKv:
    """Pages and table columns of the requests in `slots`."""

    def __init__(
        self,
        layout: PlaneLayout,
        num_units: int,
        slots: Slots,
        identity: CacheIdentity,
        policy: PrefixPolicy,
    ) -> None:
        max_slots, max_seq_len = slots.token_ids.shape
        self.layout = layout
        self.pool = PagePool(layout, num_units)
        self.table = BlockTable(layout, max_slots, layout.num_pages(max_seq_len))
        self._slots = slots
        self._identity = identity
        self._policy = policy

    def units_needed(self, request: Request) -> int:
        """Units the request owns at its longest, when it shares no page."""
        max_seq_len = self._slots.token_ids.shape[1]
        num_tokens = min(request.max_total_tokens, max_seq_len)
        return units_of_sequence(
            self.layout, request.num_prompt, num_tokens, request.prefill_loops, request.loops
        )

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Allocate pages until `num_tokens` fit; False when units ran out on the way."""
        request = self._slots.request(slot)
        while self._slots.capacity[slot] < num_tokens:
            page = self.pool.allocate(self._page_depth(slot, len(request.pages)))
            if page is None:
                return False
            request.num_allocated_pages += 1
            self._append(slot, page)
        return True

    def release(self, slot: int) -> None:
        """Drop the request's pages, last first, so that shared prefixes stay longest."""
        request = self._slots.request(slot)
        for page in reversed(request.pages):
            self.pool.release(page)
        request.pages.clear()
        self._slots.capacity[slot] = 0

    def share(self, slot: int, pages: Iterable[Page]) -> None:
        """Start the request with published pages, whose tokens count as computed."""
        for page in pages:
            self.pool.retain(page)
            self._append(slot, page)
        self._slots.num_computed[slot] = self._slots.capacity[slot]

    def find_prefix(self, request: Request) -> list[Page]:
        """Published pages for the request's tokens, never the last token's page.

        None for a request whose prompt is still to be scored: every row is needed.
        """
        if self._policy.at_least:
            request.page_keys.clear()  # chained anew: from the keys of the pages found
        scores = request.sampler.prompt_logprobs is not None
        if scores and len(request.token_ids) == request.num_prompt:
            return []
        if not self._policy.enabled or not request.use_prefix_cache:
            return []
        hits: list[Page] = []
        deepest = np.maximum.accumulate(request.depths) if self._policy.at_least else None
        for page_idx in range((len(request.token_ids) - 1) // self.layout.page_size):
            page = self._find_page(request, page_idx, deepest)
            if page is None:
                break
            hits.append(page)
        if self._policy.grid is not None:
            del hits[len(hits) - len(hits) % (self._policy.grid // self.layout.page_size) :]
        if self._policy.at_least:
            del request.page_keys[len(hits) :]
        return hits

    def has_room(self, request: Request, shared: list[Page], num_tokens: int) -> bool:
        """Whether pages for `num_tokens` can be had once `shared` is in use; takes nothing."""
        idle = sum(len(page.units) for page in shared if page.refs == 0)
        depths = self._page_depths(request, len(shared), self.layout.num_pages(num_tokens))
        needed = sum(self.layout.units_of_page(depth) for depth in depths)
        return needed <= self.pool.num_available - idle

    def publish(self, slot: int, begin: int, end: int, num_rows: int) -> None:
        """Publish the pages that the tokens begin..end-1, of a step's rows, have filled.

        With a grid only a whole chunk of it: a prompt's last rows and an answer's are computed in
        other company, and so with other bits, than a cold run of a longer prompt computes them.

        A page equal to a published one is given up for that one, so that whoever holds a
        published page also holds all before it and a beginning is never evicted before its
        continuation. Pages before `begin` that came unpublished, by a fork, are made up for.
        """
        grid = self._policy.grid
        if not self._policy.enabled:
            return
        if grid is not None and (begin % grid or not end - begin == num_rows == grid):
            return  # also where rows were guesses, of which some were not kept
        request, size = self._slots.request(slot), self.layout.page_size
        first_page, end_page = begin // size, end // size
        token_ids, depths = self._slots.token_ids[slot], self._slots.depths[slot]
        while first_page and request.pages[first_page - 1].key is None:
            if grid is not None:
                return
            first_page -= 1
        for page_idx in range(first_page, end_page):
            self._extend_keys(request, token_ids, depths, page_idx)
            at_least = self._policy.at_least
            page_end = (page_idx + 1) * size
            page = self.pool.publish(
                request.pages[page_idx],
                request.page_keys[page_idx],
                request.token_keys[page_idx] if at_least else None,
                int(depths[:page_end].min()) if at_least else 0,
            )
            if page is not request.pages[page_idx]:
                request.pages[page_idx] = page
                self.table.set_page(slot, page_idx, page)

    def copies(self, slot: int, begin: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Plane copies for the tokens begin..end-1 of a request, run in one step.

        Yields:
            (before_loop, src_unit, dst_unit, token_begin, token_end) for every run of tokens
            shallower than their page, one entry for each plane they do not write.
        """
        size, layout = self.layout.page_size, self.layout
        pages = self._slots.request(slot).pages
        for page_idx in range(begin // size, layout.num_pages(end)):
            page, first = pages[page_idx], page_idx * size
            low, high = max(begin, first), min(end, first + size)
            depths = self._slots.depths[slot, low:high]
            if depths.min() == page.depth:
                continue
            planes = page.units[layout.boundary_units :]
            starts = np.flatnonzero(np.diff(depths, prepend=-1))
            ends = np.append(starts[1:], high - low)
            for start, stop in zip(starts.tolist(), ends.tolist(), strict=True):
                depth = int(depths[start])
                written = layout.planes_of_depth(depth)
                for dst_unit in planes[written:]:
                    yield (
                        depth,
                        planes[written - 1],
                        dst_unit,
                        low - first + start,
                        low - first + stop,
                    )

    def _append(self, slot: int, page: Page) -> None:
        pages = self._slots.request(slot).pages
        self.table.set_page(slot, len(pages), page)
        pages.append(page)
        self._slots.capacity[slot] += self.layout.page_size

    def _page_depth(self, slot: int, page_idx: int) -> int:
        """Loops of the deepest token that a page of a running request will hold."""
        begin = page_idx * self.layout.page_size
        end = begin + self.layout.page_size
        if end > self._slots.num_tokens[slot]:
            return int(self._slots.loops[slot])
        return int(self._slots.depths[slot, begin:end].max())

    def _page_depths(self, request: Request, first: int, end: int) -> list[int]:
        """The same for the pages first..end-1 of a waiting request."""
        size = self.layout.page_size
        full = min(end, len(request.depths) // size)
        depths: list[int] = []
        if full > first:
            known = request.depths[first * size : full * size]
            depths = known.reshape(-1, size).max(axis=1).tolist()
        return depths + [request.loops] * (end - first - len(depths))

    def _find_page(
        self, request: Request, page_idx: int, deepest: NDArray[np.int16] | None
    ) -> Page | None:
        """The page to share at that place; deepest: with `at_least`, of a token and all before."""
        self._extend_keys(request, request.token_ids, request.depths, page_idx)
        page = self.pool.cache.find(request.page_keys[page_idx])
        if page is None and deepest is not None:
            page = self.pool.cache.find_by_tokens(request.token_keys[page_idx])
            end = (page_idx + 1) * self.layout.page_size
            if page is None or page.context_depth < deepest[end - 1]:
                return None
            assert page.key is not None
            request.page_keys[page_idx] = page.key  # what follows depends on this page's KV
        return page

    def _extend_keys(
        self,
        request: Request,
        token_ids: NDArray[np.int32],
        depths: NDArray[np.int16],
        page_idx: int,
    ) -> None:
        """Extend the chains of keys up to `page_idx`; earlier keys never change."""
        keys, token_keys, size = request.page_keys, request.token_keys, self.layout.page_size
        for idx in range(len(keys), page_idx + 1):
            page = slice(idx * size, (idx + 1) * size)
            before = keys[-1] if keys else None
            keys.append(self._key_after(before, request, idx, token_ids[page], depths[page]))
        if self._policy.at_least:
            for idx in range(len(token_keys), page_idx + 1):
                parent = token_keys[-1] if token_keys else self._root(request)
                tokens = token_ids[idx * size : (idx + 1) * size]
                token_keys.append(page_key(parent, tokens, None))

    def _key_after(
        self,
        before: bytes | None,
        request: Request,
        page_idx: int,
        token_ids: NDArray[np.int32],
        depths: NDArray[np.int16],
    ) -> bytes:
        """Key of a full page behind the page of key `before`, None for the first page.

        With `at_least` a waiting request's chain begins anew at every step, mostly with the
        same pages found: then the keys of the last time hold, as tokens and depths of a full
        page never change.
        """
        known = request.chained_keys.get(page_idx)
        if known is not None and known[0] == before:
            return known[1]
        key = page_key(self._root(request) if before is None else before, token_ids, depths)
        if self._policy.at_least:
            request.chained_keys[page_idx] = before, key
        return key

    def _root(self, request: Request) -> bytes:
        return self._identity.root(request.cache_salt, request.noise_seed)
