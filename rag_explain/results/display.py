"""How results show themselves: as a page, in a notebook, in a terminal. Drawing itself is imported when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


class Displayable:
    """A result, or a tuple of results, that can be looked at. Looking at a hit computes its explanation."""

    __slots__ = ()

    def to_html(self, path: str | Path | None = None) -> str:
        """A self-contained page, one colour scale for all of it; also written to `path` when one is given."""
        from rag_explain.render.html import write_page

        return write_page(self._items(), path)

    def _repr_html_(self) -> str:
        from rag_explain.render.notebook import fragment

        return fragment(self._items())

    def __rich__(self) -> RenderableType:
        from rag_explain.render.terminal import items_view

        return items_view(self._items())

    def _items(self) -> tuple[Any, ...]:
        return self if isinstance(self, tuple) else (self,)
