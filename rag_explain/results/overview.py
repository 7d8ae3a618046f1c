"""Overview: which words of the query found what in each hit, and why the first of them came first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rag_explain.results.display import Viewable
from rag_explain.results.explanation import Explanation
from rag_explain.results.notices import UNKNOWN
from rag_explain.results.serialization import to_plain
from rag_explain.texts.segments import has_word, word_spans
from rag_explain.texts.tokens import Token

if TYPE_CHECKING:
    from rag_explain.results.hits import Hit

# Words of the query that a sentence names; more than these are no reason but a list.
_NAMED = 3
# A pair is what a word met if it carries this share of what the word carries, else the word is spread over the text.
_MET = 0.25
# A word is spoken to where its best pair carries this share of what the word carries in the query itself
# (`benchmarks/overview.py`).
SPOKEN = 0.15
# Of the difference to the second hit: what a word carries to be named, and what the named words carry together where
# they are the reason, or most of it.
_LEAST, _ALL, _MOST = 0.1, 0.9, 0.5
_FILLER = 0.15  # a word that carries less of what the strongest one does has no column of its own
_LEVEL = 5e-5  # scores that differ by less are shown alike


@dataclass(frozen=True, slots=True)
class Meeting:
    """One word of the query in one document."""

    word: str | None  # of the document, which it met most; None where no pair of it is above zero
    value: float  # what that pair carries
    carried: float  # what the word carries over the whole document
    is_known: bool = True  # whether the encoder knows both words: it takes all that it does not know for one
    rank: int | None = None  # of this hit for the query without the word, where that was computed


@dataclass(frozen=True, slots=True)
class Row:
    """One hit: what each word of the query met in it, and what no word carries."""

    rank: int
    id: str
    score: float | None
    meetings: tuple[Meeting, ...]  # one per word of the query; none for a hit without explanation
    unattributed: float | None  # what no word of the query carries; None where the method does not add up
    standing: float | None = None  # the share of unrelated pairs below it, where that was measured


@dataclass(frozen=True)
class Overview(Viewable):
    """Hits by the words of their query.

    Attributes:
        reason: why the first hit came first, in one sentence. It is said only where it holds: "because" names words of
            the query that carry nine tenths of its lead over the second hit, "mostly because" half of it.
        margin: that difference, and what of it the named words carry; empty where there is nothing to compare.
        silent: words of the query that nothing in these hits speaks to, and that stand in none of them; None where that
            could not be found out.
    """

    words: tuple[str, ...]
    rows: tuple[Row, ...]
    reason: str
    margin: str
    silent: tuple[str, ...] | None

    @classmethod
    def of(cls, hits: Iterable[Hit], itself: Explanation | None = None) -> Overview:
        """The hits of one query; `itself` is the query explained as a document: how much each of its words weighs."""
        hits = tuple(hits)
        shown = [None if hit.explanation is None else hit.explanation.in_words() for hit in hits]
        words = next((one.query_tokens for one in shown if one is not None), ())
        # A hit of another method or unit has other words: it has no row of cells here.
        same = [one if one is not None and one.query_tokens == words else None for one in shown]
        rows = tuple(_row(hit, one) for hit, one in zip(hits, same, strict=True))
        silent = unspoken(words, rows, itself)
        if silent:  # a word that stands there may carry next to nothing, and a reader would find it all the same
            read = {word for one in same if one is not None for word in _words(_read(one))}
            silent = tuple(word for word in silent if word.casefold() not in read)
        reason, margin = _first(hits, same, silent or ())
        return cls(tuple(word.label for word in words), rows, reason, margin, silent)

    def columns(self, k: int) -> tuple[int, ...]:
        """The words of the query that carry most over all hits, k at most, in the order of the query."""
        looked = [row.meetings for row in self.rows if row.meetings]
        carried = [sum(abs(meetings[i].carried) for meetings in looked) for i in range(len(self.words))]
        best = sorted(range(len(carried)), key=lambda i: -carried[i])[:k]
        return tuple(sorted(i for i in best if carried[i] >= _FILLER * max(carried)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain: dict[str, Any] = to_plain(asdict(self))
        return plain


def _row(hit: Hit, shown: Explanation | None) -> Row:
    if shown is None:
        return Row(hit.rank, hit.id, hit.score, (), None, hit.standing)
    asked = hit.peek_what_if()
    changes = () if asked is None else asked.changes
    ranks = {one.spans: one.rank for one in changes if (one.role, one.kind) == ("query", "without")}
    meetings = tuple(
        replace(met, rank=ranks.get(((word.start, word.end),)))
        for word, met in zip(shown.query_tokens, _meetings(shown), strict=True)
    )
    return Row(hit.rank, hit.id, hit.score, meetings, _no_word(shown) if shown.additive else None, hit.standing)


def _no_word(shown: Explanation) -> float:
    return shown.score - float(shown.query_saliency().sum(dtype=np.float64))


def _meetings(shown: Explanation) -> Iterator[Meeting]:
    names = [
        f"sentence {j + 1}" if shown.unit == "sentence" else one.label for j, one in enumerate(shown.document_tokens)
    ]
    for word, row, carried in zip(shown.query_tokens, shown.pairs, shown.query_saliency().tolist(), strict=True):
        best = int(np.argmax(row)) if row.size else None
        value = 0.0 if best is None else float(row[best])
        is_known = not (word.is_unknown and best is not None and shown.document_tokens[best].is_unknown)
        yield Meeting(names[best] if best is not None and value > 0 else None, max(value, 0.0), carried, is_known)


# -------------------------------------------------------------------------------------------------- why it came first


def _first(hits: Sequence[Hit], shown: Sequence[Explanation | None], silent: Sequence[str]) -> tuple[str, str]:
    """Why the first hit came first, and by how much; both empty where that is not known."""
    if not hits or (leader := shown[0]) is None:
        return "", ""
    name, met = hits[0].id, _common(leader, hits[0].around)
    if not leader.additive or leader.surrogate is not None:
        return "", ""
    if any(notice.code == UNKNOWN and notice.side == "query" for notice in leader.notices):
        return f"{name} was found for words that this encoder does not know: it takes them for one another.", ""
    if len(hits) < 2 or (second := shown[1]) is None or not second.additive or second.surrogate:
        return f"{name} was found: {met}.", ""
    lead = leader.score - second.score
    came = "came first" if hits[0].rank == 1 else f"came before {hits[1].id}"  # a slice of hits begins elsewhere
    if abs(lead) <= _LEVEL:
        return f"{name} and {hits[1].id} are level: they have the same score; {met}.", ""
    if lead < 0:
        return f"{name} {came} in the index, and by the exact similarity {hits[1].id} is {-lead:.4f} ahead.", ""
    because, named = _because(leader, second, lead, hits[1].id, silent)
    margin = ", ".join(f"“{word}” {value:+.4f}" for word, value in named)
    rest = _no_word(leader) - _no_word(second)
    told = f"{lead:.4f} ahead of {hits[1].id}; of that {margin and f'{margin}, '}no query word {rest:+.4f}"
    return f"{name} {came} {because}; {met}.", told


def _because(
    leader: Explanation, second: Explanation, lead: float, other: str, silent: Sequence[str]
) -> tuple[str, list[tuple[str, float]]]:
    """The reason, and the words of the query that it names with their lead over the second hit."""
    leads = leader.query_saliency().astype(np.float64) - second.query_saliency()
    order = [int(i) for i in np.argsort(-leads, kind="stable") if leads[i] >= _LEAST * lead]
    order = [i for i in order if leader.query_tokens[i].label not in silent][:_NAMED]
    carried = np.cumsum(leads[order]) / lead
    chosen = order[: int(np.searchsorted(carried, _ALL)) + 1]
    named = [(leader.query_tokens[i].label, float(leads[i])) for i in chosen]
    if not chosen or carried[len(chosen) - 1] < _MOST:
        is_rest = _no_word(leader) - _no_word(second) >= _MOST * lead
        # One word may carry that much and not be named: where nothing speaks to it.
        is_many = float(leads.max(initial=0.0)) < _MOST * lead
        many = "by many small differences" if is_many else "by words that nothing here speaks to"
        return "mostly by what no word of the query carries" if is_rest else many, named
    here, there = list(_meetings(leader)), list(_meetings(second))
    met = dict.fromkeys(_met(leader.query_tokens[i], here[i], there[i], other) for i in chosen)
    return f"{'' if carried[len(chosen) - 1] >= _ALL else 'mostly '}because {_listed(list(met))}", named


def _met(word: Token, here: Meeting, there: Meeting, other: str) -> str:
    """What gave a word its lead: that it counts against the other hit, one pair of words, or none of these."""
    if here.carried < -there.carried:
        return f"“{word.label}” counts against {other}"
    if here.word is None or here.value < _MET * here.carried or here.value <= there.value:
        return f"“{word.label}” counted over the whole text"
    is_same = there.word is not None and there.word.casefold() == here.word.casefold()
    if is_same and here.value - there.value < _MET * (here.carried - there.carried):
        return f"“{word.label}” counted over the whole text"
    return f"“{word.label}” met {here.word}{f' more strongly than in {other}' if is_same else ''}"


def _common(shown: Explanation, around: Sequence[str]) -> str:
    """Which words stand in both texts, as far as they were read; or in what was embedded around the document."""
    asked = [one.label for one in shown.query_tokens if has_word(one.label)]

    def found(texts: Iterable[str]) -> str:
        read = _words(texts)
        return ", ".join(dict.fromkeys(word for word in asked if word.casefold() in read))

    where = " in what was read" if "document" in shown.truncated else ""
    if known := found(_read(shown)):
        return f"in common: {known}"
    beside = found(around)
    return f"in common only with what was embedded around it: {beside}" if beside else f"no word in common{where}"


def _read(shown: Explanation) -> list[str]:
    return [one.label for one in shown.document_tokens if one.part == "text"]


def _words(texts: Iterable[str]) -> set[str]:
    return {text[start:end].casefold() for text in texts for start, end in word_spans(text)}


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


# ------------------------------------------------------------------------------------------- what nothing speaks to


def unspoken(words: Sequence[Token], rows: Sequence[Row], itself: Explanation | None) -> tuple[str, ...] | None:
    """Words that weigh at least their share in the query, and in no hit have a pair near that weight."""
    own = None if itself is None else itself.in_words()
    looked = [row.meetings for row in rows if row.meetings]
    if own is None or own.query_tokens != tuple(words) or not own.additive or not looked:
        return None
    weights = own.query_saliency()
    least = float(np.abs(weights).sum()) / len(words)
    best = [max(meetings[i].value for meetings in looked) for i in range(len(words))]
    silent = (i for i in range(len(words)) if weights[i] >= least and best[i] < SPOKEN * float(weights[i]))
    return tuple(dict.fromkeys(words[i].label for i in silent))
