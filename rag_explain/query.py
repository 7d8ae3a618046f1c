"""What a method needs of one query, in the units that it is asked for in."""

from __future__ import annotations

import threading
from typing import Any, Literal

from rag_explain.factors import Array
from rag_explain.methods import Method
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Unit

Grain = Unit | Literal["whole"]


class PreparedQuery:
    """One query, read and prepared when it is first needed, and then kept. Thread-safe.

    Most of what is asked is by words, and fewer words than tokens are pushed through the encoder: tokens are prepared
    only for explanations by token. A method that chooses among tokens has no other unit.

    `fingerprint` is not read: it is there for whoever keeps queries, since a changed model prepares them anew.
    """

    def __init__(self, method: Method, query: Passage, fingerprint: str) -> None:
        self._method, self._query = method, query
        self._made: dict[Grain, Any] = {}
        self._lock = threading.Lock()

    def by(self, unit: Grain) -> Any:
        """The query by token, by word (which sentences of documents are asked by too), or as a whole."""
        grain: Grain = "word" if unit == "sentence" else unit
        if not self._method.linear and unit != "whole":
            grain = "token"
        with self._lock:
            if grain not in self._made:
                self._made[grain] = self._make(grain)
            return self._made[grain]

    @property
    def embedding(self) -> Array:
        """(h,): before it is normalised, from whichever unit is there; else by words, which will be needed next."""
        with self._lock:
            made = next((one for grain, one in self._made.items() if grain != "whole"), None)
        embedding: Array = (made or self.by("word")).embedding
        return embedding

    def _make(self, grain: Grain) -> Any:
        if grain == "word" and "token" in self._made:
            return self._made["token"].grouped("word", self._query)
        batch = self._method.scorer.read((self._query,), "query")
        return self._method.whole(batch) if grain == "whole" else self._method.prepare(batch, grain)
