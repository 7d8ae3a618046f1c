"""A text as it is shown: in which unit, and as pieces: tokens, what is between them, and what was not read."""

from __future__ import annotations

from rag_explain.errors import InvalidInput
from rag_explain.render.blocks import Piece
from rag_explain.render.sentences import name
from rag_explain.results.explanation import Explanation
from rag_explain.texts.tokens import Role, Unit

# Of what the encoder did not read, this many characters are shown; the rest is counted.
UNREAD_SHOWN = 280


def in_unit(explanation: Explanation, by: Unit | None = None) -> Explanation:
    """The explanation in the unit asked for; by default words, or what it is in when it cannot be split."""
    if by is None:
        return explanation.in_words()
    if by == "token" and explanation.unit != "token":
        raise InvalidInput(f"an explanation by {explanation.unit}s cannot be shown by {by}s: use word or sentence")
    return explanation.grouped(by)


def pieces(explanation: Explanation, side: Role) -> tuple[Piece, ...]:
    """The whole text of one side, in order."""
    text = explanation.query if side == "query" else explanation.document
    tokens = explanation.query_tokens if side == "query" else explanation.document_tokens
    if text is None:
        return tuple(Piece(f"{name(token, i)} ", i) for i, token in enumerate(tokens))
    spans = [(t.start, t.end, i) for i, t in enumerate(tokens) if t.part == "text" and t.start < t.end]
    first, last = 0, len(text)  # what the encoder read
    if side in explanation.truncated:
        starts, ends = [start for start, _, _ in spans], [end for _, end, _ in spans]
        first = min(starts, default=0) if text[: min(starts, default=0)].strip() else 0
        last = max(ends, default=0) if text[max(ends, default=0) :].strip() else len(text)
    found = [_unread(text[:first], is_tail=False)]
    position = first
    for start, end, index in spans:
        start = max(start, position)  # byte-level tokens share a character: the first of them shows it
        if start < end:
            found += [Piece(text[position:start]), Piece(text[start:end], index)]
            position = end
    found += [Piece(text[position:last]), _unread(text[last:], is_tail=True)]
    return tuple(piece for piece in found if piece.text)


def _unread(text: str, *, is_tail: bool) -> Piece:
    """The part that was not read, cut where it is long; whole characters, and the cut is said."""
    if len(text) > UNREAD_SHOWN:
        more = f"… {len(text) - UNREAD_SHOWN:,} more characters"
        text = f"{text[:UNREAD_SHOWN]}{more}" if is_tail else f"{more} …{text[-UNREAD_SHOWN:]}"
    return Piece(text, is_read=False)
