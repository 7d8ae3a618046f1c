"""One explanation, in the unit in which it is shown: both texts with their words tinted, figures, strongest pairs."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import InvalidInput
from rag_explain.render import sentences
from rag_explain.render.blocks import Block, Column, Figures, Legend, Line, Piece, Section, Table, Texts, View, Words
from rag_explain.render.sentences import name, number
from rag_explain.results.explanation import Explanation
from rag_explain.results.notices import is_of_chunk
from rag_explain.texts.tokens import Role, Unit

# Characters of a label, which can be a sentence, after which it is cut.
_LABEL = 120
# Of what the encoder did not read, this many characters are shown; the rest is counted.
UNREAD_SHOWN = 280
_COLUMNS = Column("query", width=24), Column("document", width=44)
_SHARE = Column("of all pairs", is_number=True, is_spare=True)

_TERMS = 20  # rows of their table: a vocabulary may have hundreds that both texts know
_TERM_COLUMNS = (
    Column("query", width=24),
    Column("term", width=24),
    Column("document", width=24),
    Column("score units", is_number=True),
)


def explanation_view(explanation: Explanation, *, top: int = 10, by: Unit | None = None) -> View:
    """The explanation by words, or by the unit asked for, with its `top` strongest pairs."""
    shown = in_unit(explanation, by)
    scale = strongest(shown.document_saliency())
    query = words(shown, "query", strongest(shown.query_saliency()))
    texts = Texts((query, words(shown, "document", scale)))
    about = Line(sentences.source(shown), "muted"), key(shown), legend(scale, shown)
    return (
        Section((*unread(shown), texts)),
        Section((*figures(shown), *trust(shown), *about, *warnings(shown))),
        *(Section(found) for found in (terms(shown), pairs(shown, top)) if found),
    )


def in_unit(explanation: Explanation, by: Unit | None = None) -> Explanation:
    """The explanation in the unit asked for; by default words, or what it is in when it cannot be split."""
    if by is None:
        return explanation.in_words()
    if by == "token" and explanation.unit != "token":
        raise InvalidInput(f"an explanation by {explanation.unit}s cannot be shown by {by}s: use word or sentence")
    return explanation.grouped(by)


def words(shown: Explanation, side: Role, scale: float | None = None) -> Words:
    """The text of one side, tinted by what each token carries if a scale is given."""
    if scale is None:
        return Words(pieces(shown, side), label=side)
    values = (shown.query_saliency() if side == "query" else shown.document_saliency()).tolist()
    notes = tuple(sentences.met(shown, side, index) for index in range(len(values)))
    return Words(pieces(shown, side), tuple(values), scale, notes, label=side)


def cut(whole: Words, room: int) -> Words:
    """The beginning of a text; what was cut off is marked."""
    kept: list[Piece] = []
    for piece in whole.pieces:
        room -= len(piece.text)
        if room < 0:
            return replace(whole, pieces=(*kept, Piece("…")))
        kept.append(piece)
    return whole


def figures(shown: Explanation) -> tuple[Figures, *tuple[Line, ...]]:
    """The score, what makes it up, what the model made of it, and whether it adds up."""
    parts = sentences.parts(shown.score, shown.unattributed, shown.unit) if shown.additive else ""
    return (*total(shown.score, shown.measure, shown.returned, parts), Line(sentences.balance(shown)))


def total(score: float, measure: str, returned: float | None, parts: str) -> tuple[Figures, *tuple[Line, ...]]:
    """The score that is split, by its name where people know another one; and what the model made of it."""
    told = sentences.returned(score, measure, returned)
    return Figures("logit" if measure == "logit" else "score", f"{score:.4f}", parts), *([Line(told)] if told else ())


def trust(shown: Explanation, about: str = "") -> tuple[Line, ...]:
    """What the papers warn of, on one line; none when all is well."""
    found = sentences.trust(shown)
    return (Line(f"{about}{found}"),) if found else ()


def key(shown: Explanation, more: str = "") -> Line:
    """What the last of the figures means."""
    return Line(f"{more}no {shown.unit}: what cannot be attributed to {shown.unit}s", "muted")


def legend(scale: float, shown: Explanation) -> Legend:
    """What the tints of document words stand for."""
    return Legend(scale, f"{sentences.units(shown)}: the tints of document words, {shown.method}")


def unread(shown: Explanation, side: Role | None = None, about: str = "") -> tuple[Line, ...]:
    """What the encoder could not read, of one side or of both: before everything else."""
    return tuple(Line(f"{about}{sentence}", "warning") for sentence in sentences.unread(shown, side))


def warnings(shown: Explanation, about: str = "") -> tuple[Line, ...]:
    """What else a reader must know before trusting the numbers."""
    return tuple(Line(f"{about}{notice}", "warning") for notice in sentences.notices(shown))


def pairs(shown: Explanation, top: int, scale: float | None = None, brief: int | None = None) -> tuple[Block, ...]:
    """The strongest pairs; given one scale, the bars of several tables compare."""
    count = max(top, brief or 0)
    found = [(*cell, pair) for cell, pair in zip(shown.top_cells(count), shown.top_pairs(count), strict=True)]
    found = [one for one in found if one[-1].value]  # words that differ carry nothing together
    if not found or brief == 0:
        return ()
    rows = tuple(
        (name(pair.query, i), name(pair.document, j, _LABEL), number(pair.value), f"{pair.share:.1%}")
        for i, j, pair in found
    )
    bars = tuple(pair.value for *_, pair in found)
    columns = *_COLUMNS, Column(sentences.units(shown), is_number=True), _SHARE
    scale = abs(bars[0]) if scale is None else scale
    shares = tuple(pair.share for *_, pair in found)
    return (Table(columns, rows, "strongest pairs", bars, scale, brief, shown.pairs.size, shares),)


def terms(shown: Explanation) -> tuple[Table, ...]:
    """The terms that the score is a sum over, those that add most, and what is known of each."""
    if not shown.terms:
        return ()
    names = tuple(dict.fromkeys(name for term in shown.terms for name in term.numbers))
    columns = (*_TERM_COLUMNS, *(Column(sentences.one_line(name, 24), is_number=True) for name in names))
    ranked = sorted(shown.terms, key=lambda term: -abs(term.value))[:_TERMS]
    rows = tuple(
        (
            *(sentences.one_line(text, 24) for text in (", ".join(one.query), one.text)),
            sentences.one_line(", ".join(one.document), 24) or "–",
            number(one.value),
            *(f"{one.numbers[name]:.4g}" if name in one.numbers else "–" for name in names),
        )
        for one in ranked
    )
    bars = tuple(one.value for one in ranked)
    count = len(shown.terms)
    title = f"{count} terms" if count == len(ranked) else f"{len(ranked)} of {count} terms"
    return (Table(columns, rows, title, bars, max(map(abs, bars))),)


def strongest(values: NDArray[np.float32]) -> float:
    """The largest |value|; 0 where there is none."""
    return float(np.abs(values).max(initial=0.0))


def pieces(explanation: Explanation, side: Role) -> tuple[Piece, ...]:
    """The whole text of one side, in order: tokens, what is between them, and what was not read."""
    text = explanation.query if side == "query" else explanation.document
    tokens = explanation.query_tokens if side == "query" else explanation.document_tokens
    if text is None:
        return tuple(Piece(f"{name(token, i)} ", i) for i, token in enumerate(tokens))
    spans = [(t.start, t.end, i) for i, t in enumerate(tokens) if t.part == "text" and t.start < t.end]
    first, last = 0, len(text)  # what the encoder read
    if side in explanation.truncated or (side == "document" and is_of_chunk(explanation.notices)):
        start, end = min((start for start, _, _ in spans), default=0), max((end for _, end, _ in spans), default=0)
        first = start if text[:start].strip() else 0
        last = end if text[end:].strip() else len(text)
    found = [_unread(text[:first], is_tail=False)]
    position = first
    for start, end, index in spans:
        start = max(start, position)  # byte-level tokens share a character: the first of them shows it
        if start < end:
            found += [Piece(text[position:start]), Piece(text[start:end], index, is_known=not tokens[index].is_unknown)]
            position = end
    found += [Piece(text[position:last]), _unread(text[last:], is_tail=True)]
    return tuple(piece for piece in found if piece.text)


def _unread(text: str, *, is_tail: bool) -> Piece:
    """The part that was not read, cut where it is long; whole characters, and the cut is said."""
    if len(text) > UNREAD_SHOWN:
        more = f"… {len(text) - UNREAD_SHOWN:,} more characters"
        text = f"{text[:UNREAD_SHOWN]}{more}" if is_tail else f"{more} …{text[-UNREAD_SHOWN:]}"
    return Piece(text, is_read=False)
