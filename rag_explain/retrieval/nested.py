"""Retrievers around retrievers: the encoder that is inside, and the hits that wrapped retrievers inside have made."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

from rag_explain.errors import InvalidInput, ProcessBound
from rag_explain.results.hits import Hit
from rag_explain.retrieval.sharing import ExplainerSource, glance
from rag_explain.retrieval.usage import Embedder

Source: TypeAlias = "ExplainerSource | Embedder"
# What explains what one retriever or store finds, and what embeds its queries.
Encoder: TypeAlias = "tuple[Source | None, Embedder | None]"

_collecting: ContextVar[InnerHits | None] = ContextVar("collecting", default=None)
_digests: WeakKeyDictionary[Any, tuple[object, str]] = WeakKeyDictionary()


class InnerHits:
    """Hits that were made inside a retriever while it was asked, by what copies of their documents are known by.

    What stands between may return copies that carry no hit: an ensemble returns the first of equal documents, a filter
    makes new ones.
    """

    def __init__(self) -> None:
        self._hits: dict[Hashable, Hit] = {}

    def __bool__(self) -> bool:
        return bool(self._hits)

    def find(self, keys: Sequence[Hashable]) -> Hit | None:
        """The hit of the document that is known by one of these keys, the most telling first."""
        return next((self._hits[key] for key in keys if key in self._hits), None)

    def add(self, keys: Iterable[Hashable], hit: Hit) -> None:
        """Of a document that was found several times the first hit stays."""
        if hit.status != "skipped":
            for key in keys:
                self._hits.setdefault(key, hit)


@contextmanager
def collecting() -> Iterator[InnerHits]:
    """Collects the hits of all wrapped retrievers that run inside, in threads and tasks that share the context too."""
    inner = InnerHits()
    token = _collecting.set(inner)
    try:
        yield inner
    finally:
        _collecting.reset(token)


def report(hits: Iterable[tuple[Sequence[Hashable], Hit]]) -> None:
    """A wrapped retriever has made these hits: the one inside which it runs, if any, may need them."""
    outer = _collecting.get()
    if outer is not None:
        for keys, hit in hits:
            outer.add(keys, hit)


class Encoders(ProcessBound):
    """The encoders inside one retriever, looked for at each search. Remembers how each embedding object embeds."""

    instead = "make the retriever that holds it anew where it is unpickled"

    def __init__(self) -> None:
        self._known: dict[int, Embedder] = {}

    def among(self, found: Iterable[Encoder]) -> list[Encoder]:
        """Those that can explain, or all where none can, and of those that embed alike the first."""
        every = [self._remembered(one) for one in found]
        self._known = {id(one.holder): one for _, one in every if one is not None}
        every = [one for one in every if one[0] is not None] or list(map(_by_itself, every))
        unique = {id(getattr(source or embedder, "holder", source)): (source, embedder) for source, embedder in every}
        if len(unique) < 2:
            return list(unique.values())
        distinct: dict[Hashable, Encoder] = {}
        for encoder in every:
            distinct.setdefault(_key(encoder[0]), encoder)
        return list(distinct.values())

    def chosen(self, found: Iterable[Encoder], given: Source | None) -> Encoder:
        """What explains and what embeds: as the caller said, else the only encoder that there is."""
        encoders = self.among(found)
        source, embedder = encoders[0] if len(encoders) == 1 else (None, None)
        if given is None:
            return source, embedder
        return given, given if isinstance(given, Embedder) else embedder

    def refuse(self, found: Iterable[Encoder], holder: object, what: str) -> NoReturn:
        """Why none of these can explain what (documents, nodes) the holder finds."""
        encoders, name = self.among(found), type(holder).__name__
        if len(encoders) > 1:  # which of them is to explain, only the caller knows
            names = " and ".join(_name(source) for source, _ in encoders)
            raise InvalidInput(
                f"{name} holds several encoders ({names}): pass the one to explain by as explainer=, or put an "
                "ExplainingRetriever around each retriever inside"
            )
        with_what = " and ".join(dict.fromkeys(embedder.name for _, embedder in encoders if embedder is not None))
        raise InvalidInput(
            f"nothing that embeds was found in {name}{with_what and f' with {with_what}'}: pass "
            f"explainer=Explainer(model) with the model that embeds its {what}"
        )

    def _remembered(self, encoder: Encoder) -> Encoder:
        source, embedder = encoder
        kept = None if embedder is None else self._known.get(id(embedder.holder), embedder)
        return (kept if source is embedder else source), kept


def _by_itself(encoder: Encoder) -> Encoder:
    """Where nothing can be looked into, an embedding object explains by the vectors that it gives."""
    _, embedder = encoder
    return (embedder if embedder is not None and embedder.is_black_box else None), embedder


def _key(source: Any) -> Hashable:
    """What two encoders have in common that embed alike."""
    if not isinstance(source, Embedder):
        return id(source)
    model, usage = source.seen()
    return id(source.holder) if model is None else _digest(model), usage


def _digest(model: Any) -> str:
    """Two models that were loaded from the same place are two objects, and one encoder."""
    from rag_explain.encoder.identity import digest, facts, tensors

    state = glance(model)
    known = _digests.get(model)
    if known is None or known[0] != state:
        known = _digests[model] = state, digest(facts(model), tensors(model))
    return known[1]


def _name(source: Any) -> str:
    """The class of an embedding object, and which model it says that it has, or of which class that is."""
    if not isinstance(source, Embedder):
        return type(source).__name__
    said = getattr(source.holder, "model_name", None)
    if not isinstance(said, str) or said == "unknown":
        said = type(getattr(source.model[0], "auto_model", source.model)).__name__ if source.model else "no model"
    return f"{source.name} with {said}"
