"""How results show themselves: in a terminal, in a notebook, as a page. Drawing itself is imported when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rag_explain.render.blocks import View


class Viewable:
    """A result that a terminal, a notebook and `print` show."""

    __slots__ = ()
    _width: ClassVar[int] = 100  # characters of a line that is printed

    def _view(self) -> View:
        from rag_explain.render.views import view_of

        return view_of(self)

    def __rich__(self) -> RenderableType:
        from rag_explain.render.terminal import draw

        return draw(self._view())

    def _repr_html_(self) -> str:
        from rag_explain.render.notebook import draw

        return draw(self._view())

    def __str__(self) -> str:
        from rag_explain.render.terminal import plain_text

        return plain_text(self._view(), self._width)


class Paged(Viewable):
    """A result that also has a page: its view, without anything to explore."""

    __slots__ = ()
    _title: ClassVar[str] = "Where to look"  # of its page

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        raise NotImplementedError

    def to_html(self, path: str | Path | None = None) -> str:
        """A self-contained page; also written to `path` when one is given."""
        from rag_explain.render.page import write_view

        return write_view(self._view(), path, self._title)


class Displayable(Viewable):
    """A result, or a tuple of results, that also has a page to explore. Looking at a hit computes its explanation."""

    __slots__ = ()

    def to_html(self, path: str | Path | None = None) -> str:
        """A self-contained page, one colour scale for all of it; also written to `path` when one is given."""
        from rag_explain.render.page import write_page

        items: tuple[Any, ...] = self if isinstance(self, tuple) else (self,)
        return write_page(items, path)
