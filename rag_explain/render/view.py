"""What every view shows, decided once: the unit, the figures and their words, the pieces of a text.

Nothing here knows of colours or markup, and everything that came from a caller passes through `visible`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rag_explain.errors import InvalidInput
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit
from rag_explain.texts.tokens import Role, Token, Unit

Item: TypeAlias = Explanation | Hit | Sequence[Explanation]
"""What can be shown: an explanation, a hit, or several explanations of one pair by different methods."""

# Of what the encoder did not read, this many characters are shown; the rest is counted.
UNSEEN_SHOWN = 280

# Control characters move cursors and colour terminals, overrides turn text around: shown as such, not obeyed.
_CONTROLS = dict.fromkeys(
    [*range(9), *range(11, 32), *range(0x7F, 0xA0), 0x202D, 0x202E, *range(0xD800, 0xE000)], 0xFFFD
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a text: the token it belongs to, if any, and whether the encoder read it."""

    text: str
    token: int | None
    seen: bool = True


@dataclass(frozen=True, slots=True)
class Card:
    """One result: the explanations of it that there are, by different methods, and the hit it came from."""

    explanations: tuple[Explanation, ...]
    hit: Hit | None = None


def visible(text: str) -> str:
    """`text` without anything that acts instead of being seen."""
    return text.replace("\r\n", "\n").replace("\r", "\n").translate(_CONTROLS)


def cards(items: Iterable[Item]) -> list[Card]:
    """The items as cards. A hit's explanation is computed here if it was pending."""
    result = []
    for item in items:
        if isinstance(item, Hit):
            explanation = item.explanation
            result.append(Card(() if explanation is None else (explanation,), item))
        elif isinstance(item, Explanation):
            result.append(Card((item,)))
        else:
            group = tuple(item)
            if len({(e.query, e.document) for e in group}) != 1:
                raise InvalidInput("explanations shown as one must be of the same query and document")
            result.append(Card(group))
    return result


def at(explanation: Explanation, by: Unit | None = None) -> Explanation:
    """The explanation in the unit asked for; by default words, or what it is in when it cannot be split."""
    if by is None:
        readable = explanation.query is not None and explanation.document is not None
        return explanation.by_word() if explanation.unit == "token" and readable else explanation
    if by == "word":
        return explanation.by_word()
    if by == "sentence":
        return explanation.by_sentence()
    if by == "token" and explanation.unit == "token":
        return explanation
    raise InvalidInput(f"an explanation by {explanation.unit}s cannot be shown by {by}s: use word or sentence")


def pieces(explanation: Explanation, side: Role) -> list[Piece]:
    """The whole text of one side, in order: tokens, what stands between them, and what was not read."""
    text = explanation.query if side == "query" else explanation.document
    tokens = explanation.query_tokens if side == "query" else explanation.document_tokens
    if text is None:
        return [Piece(f"{name(token, i)} ", i) for i, token in enumerate(tokens)]
    spans = [(t.start, t.end, i) for i, t in enumerate(tokens) if t.part == "text" and t.start < t.end]
    cut = side in explanation.truncated
    first = min((start for start, _, _ in spans), default=0)
    last = max((end for _, end, _ in spans), default=0)
    result: list[Piece] = []
    position = 0
    if cut and text[:first].strip():
        result.append(_unseen(text[:first], tail=False))
        position = first
    for start, end, index in spans:
        start = max(start, position)  # byte-level tokens share a character: the first of them shows it
        if start < end:
            _append(result, text[position:start], None)
            _append(result, text[start:end], index)
            position = end
    if cut and text[last:].strip():
        result.append(_unseen(text[last:], tail=True))
    else:
        _append(result, text[position:], None)
    return result


def name(token: Token, index: int) -> str:
    """What to call a token; by its number where its text is not kept."""
    return visible(token.label).strip() or f"{index + 1}"


def number(value: float) -> str:
    """A signed number in score units."""
    return f"{value:+.4f}"


def balance(explanation: Explanation) -> str:
    """Whether it adds up, in one sentence."""
    gap = explanation.gap
    if gap is None:
        return f"{explanation.method} ranks pairs and does not claim to add up to the score"
    exact = abs(gap) <= 1e-4 * max(1.0, float(np.abs(explanation.matrix, dtype=np.float64).sum()))
    return f"{'adds up to the score' if exact else 'does not add up to the score'}, gap {gap:+.1e}"


def source(explanation: Explanation) -> str:
    """Which method on which model, with its settings."""
    settings = [f"{key} {value}" for key, value in explanation.settings.items() if value is not None]
    return visible(" · ".join(part for part in [explanation.method, explanation.model, *settings] if part))


def notices(explanation: Explanation) -> list[str]:
    """What a reader must know before trusting the numbers."""
    found = []
    if explanation.surrogate is not None:
        found.append(f"Surrogate: {explanation.surrogate}")
    found += [
        f"The encoder read only a part of the {side}; the rest has no influence on the score."
        for side in explanation.truncated
    ]
    if explanation.query is None or explanation.document is None:
        found.append("The texts were not kept: words are shown by their numbers.")
    if explanation.references:
        known = ", ".join(f"{key} {value:.4g}" for key, value in explanation.references.items())
        found.append(f"References: {known}")
    if "note" in explanation.provenance:
        found.append(f"Note: {explanation.provenance['note']}")
    return [visible(notice) for notice in found]


def facts(hit: Hit) -> str:
    """What the index said of this hit, and what it is exactly where that differs."""
    found = ["no score of its own" if hit.score is None else f"{hit.score:.4f} {hit.metric}"]
    if hit.similarity is not None and (hit.score is None or abs(hit.similarity - hit.score) > 5e-5):
        found.append(f"exact similarity {hit.similarity:.4f}")
    if hit.gap is not None and abs(hit.gap) > 5e-5:
        found.append(f"the index differs by {hit.gap:+.4f}")
    return visible(" · ".join(found))


def missing(hit: Hit) -> str:
    """Why there is nothing to show."""
    return visible(f"No explanation ({hit.status}): {hit.reason or 'no reason given'}")


def _append(result: list[Piece], text: str, token: int | None) -> None:
    if text:
        result.append(Piece(visible(text), token))


def _unseen(text: str, *, tail: bool) -> Piece:
    """The part that was not read, cut where it is long; whole characters, and the cut is said."""
    if len(text) <= UNSEEN_SHOWN:
        return Piece(visible(text), None, seen=False)
    more = f"… {len(text) - UNSEEN_SHOWN:,} more characters"
    shown = f"{text[:UNSEEN_SHOWN]}{more}" if tail else f"{more} …{text[-UNSEEN_SHOWN:]}"
    return Piece(visible(shown), None, seen=False)
