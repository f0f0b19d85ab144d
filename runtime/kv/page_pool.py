"""Pages: who owns which units, and how often each page is referenced.

Owns allocation, sharing, publication and eviction of pages; leaves the block table to
`BlockTable` and the choice of pages to the scheduler. Invariant: every unit is free or
owned by exactly one page, and a page without references is published or gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from looptrt.errors import InvariantError
from looptrt.kv_layout import PlaneLayout
from looptrt.runtime.kv.prefix_cache import PrefixCache
from looptrt.runtime.kv.unit_pool import UnitPool


@dataclass(eq=False, slots=True)
class Page:
    """`page_size` tokens of one request, or of several that share them.

    Attributes:
        units: units owned: boundary rows, then planes up to the deepest token's.
        depth: loops of the deepest token the page can hold.
        refs: requests that hold the page; aliases in the table are not counted.
        context_depth: least depth among the page's tokens and all before them, once
            published.
        key, token_key: keys it is published under, None while it is not.
    """

    units: tuple[int, ...]
    depth: int
    refs: int = 1
    context_depth: int = 0
    key: bytes | None = None
    token_key: bytes | None = None


class PagePool:
    """Allocates pages from the units, evicting published pages that nobody holds."""

    def __init__(self, layout: PlaneLayout, num_units: int) -> None:
        self.layout = layout
        self.units = UnitPool(num_units)
        self.cache = PrefixCache()
        self.num_evictions = 0

    @property
    def num_available(self) -> int:
        """Units that are free or can be freed by eviction."""
        return self.units.num_free + self.cache.idle_units

    def allocate(self, depth: int) -> Page | None:
        """Take a page whose tokens may run `depth` loops, or None when units are short."""
        count = self.layout.units_of_page(depth)
        if count > self.num_available:
            return None
        while self.units.num_free < count:
            page = self.cache.evict()
            if page is None:
                raise InvariantError("units counted as evictable belong to no page")
            self.units.release(page.units)
            self.num_evictions += 1
        units = self.units.allocate(count)
        assert units is not None
        return Page(tuple(units), depth)

    def retain(self, page: Page) -> None:
        """Add a reference."""
        if page.refs == 0:
            self.cache.set_used(page)
        page.refs += 1

    def release(self, page: Page) -> None:
        """Drop a reference; an unpublished page without references frees its units."""
        if page.refs < 1:
            raise InvariantError("a page is released more often than it was retained")
        page.refs -= 1
        if page.refs == 0:
            if page.key is None:
                self.units.release(page.units)
            else:
                self.cache.set_idle(page)

    def publish(self, page: Page, key: bytes, token_key: bytes | None, context_depth: int) -> Page:
        """Make a fully written page findable.

        Returns:
            The page, or the equal one that was published before: the reference is then to that.
        """
        if page.key is not None:
            return page
        known = self.cache.find(key)
        if known is None:
            page.context_depth = context_depth
            self.cache.add(page, key, token_key)
            return page
        self.retain(known)
        self.release(page)
        return known

    def check_integrity(self, held: list[Page]) -> None:
        """Compare the books with the pages that requests hold (one entry a reference).

        Raises:
            InvariantError: a unit is leaked or owned twice, or a count is wrong.
        """
        pages = {id(page): page for page in [*held, *self.cache.pages()]}
        refs = dict.fromkeys(pages, 0)
        for page in held:
            refs[id(page)] += 1
        owned = [unit for page in pages.values() for unit in page.units]
        if len(set(owned)) != len(owned):
            raise InvariantError("a unit is owned by two pages")
        if any(self.units.is_free(unit) for unit in owned):
            raise InvariantError("an owned unit is in the free list")
        if len(owned) + self.units.num_free != self.units.num_units - 1:
            raise InvariantError(
                f"units leaked: {len(owned)} owned, {self.units.num_free} free, "
                f"{self.units.num_units - 1} in the pool"
            )
        for key, page in pages.items():
            if page.refs != refs[key]:
                raise InvariantError(f"a page counts {page.refs} references, has {refs[key]}")
        idle = sum(len(page.units) for page in pages.values() if page.refs == 0)
        if idle != self.cache.idle_units:
            raise InvariantError(f"{self.cache.idle_units} units counted as idle, {idle} are")
