"""What if? Parts left out, replaced, or read that were not: every score is computed again, none is predicted.

What was cut off at the end of the encoder's window stays off: leaving out a sentence must not bring in another one.
What was not read is tried by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import regex

from rag_explain.encoder.batch import Batch
from rag_explain.errors import InvalidInput, RagExplainError
from rag_explain.methods.parts import read_part
from rag_explain.results.comparison import Loss
from rag_explain.results.explanation import Explanation
from rag_explain.results.notices import TRUNCATED, Notice
from rag_explain.results.what_if import Change, Kind, Spans, WhatIf, agreement
from rag_explain.scorers.base import Scorer
from rag_explain.texts.edits import edited, is_empty
from rag_explain.texts.passage import Passage
from rag_explain.texts.segments import Span, crosses_word, part_spans, sentence_spans
from rag_explain.texts.tokens import Role, Token

# Parts of a query, and of a document, that are tried when no part is named.
_QUERY_WORDS, _DOCUMENT_PARTS = 32, 5
# A document of more words than this is compared by its sentences: each word costs an embedding.
_FEW_WORDS = 32

Part: TypeAlias = Any
"""A word, a sentence or any other piece of either text, as a string; or a piece of the document with `start`, `end`."""
Replacements: TypeAlias = str | Mapping[str, str]
"""Another query; or what is to stand in the place of words of either text."""
Ranks: TypeAlias = Callable[[Sequence["Tried"]], Sequence[int | None]]
"""The rank of the document for each of these."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A query and a document that were tried: what is None is as it was."""

    text: str
    role: Role
    kind: Kind
    spans: Spans
    query: str | None = None
    document: Passage | None = None
    replacement: str | None = None
    score: float | None = None

    @property
    def is_left(self) -> bool:
        return self.query is not None or self.document is not None


class Texts:
    """The query and the document as they are, and edited."""

    def __init__(self, scorer: Scorer, query: str, passage: Passage) -> None:
        self.scorer, self.query, self.passage = scorer, query, passage
        self._batch: Batch = scorer.read((passage,), "document")
        self.is_cut = any(notice.code == TRUNCATED for notice in self._batch.notices[0])
        self._read, self._shift = read_part(self._batch, 0) if self.is_cut else (passage, 0)

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What a reader must know of how the document was read."""
        return (*self.scorer.notices, *self._batch.notices[0])

    @property
    def end(self) -> int:
        """The character of the document at which reading ended."""
        return self._shift + len(self._read.text)

    def tried(self, role: Role, spans: Iterable[Span], replacement: str | None = None) -> Tried:
        """One of the texts without these parts, or with others in their place."""
        spans = tuple(spans)
        own = self.query if role == "query" else self.passage.text
        text = own[slice(*spans[0])]
        kind: Kind = "without" if replacement is None else "replaced"
        made = Tried(text, role, kind, spans, replacement=replacement)
        shift = 0 if role == "query" else self._shift
        changes = {(start - shift, end - shift): replacement or "" for start, end in spans}
        if role == "query":
            changed = edited(self.query, changes)
            return made if is_empty(changed) else replace(made, query=changed)
        before, after = self._read.around
        changed = edited(self._read.text, changes)
        if is_empty(before + changed + after):
            return made
        return replace(made, document=Passage(before + changed + after, len(before), len(before) + len(changed)))

    def find(self, part: Part) -> list[tuple[Role, Spans]]:
        """Where a part stands, in either text or in both; refused where it stands in neither."""
        if hasattr(part, "start") and hasattr(part, "end"):
            span = (int(part.start), int(part.end))
            if not 0 <= span[0] < span[1] <= len(self.passage.text):
                raise InvalidInput(f"{part!r} is no piece of this document")
            return [("document", self._in_sight((span,)))]
        if not isinstance(part, str) or is_empty(part):
            raise InvalidInput(f"without takes words or sentences of the query or of the document, not {part!r}")
        sides: tuple[tuple[Role, str], ...] = (("query", self.query), ("document", self.passage.text))
        found = [(role, spans) for role, text in sides if (spans := occurrences(text, part))]
        if not found:
            raise InvalidInput(f"{part!r} stands neither in the query nor in the document, as words of their own")
        return [(role, self._in_sight(spans) if role == "document" else spans) for role, spans in found]

    def _in_sight(self, spans: Spans) -> Spans:
        """Of places in the document those that were read."""
        read = tuple(span for span in spans if self._shift <= span[0] and span[1] <= self.end)
        if not read:
            start, end = spans[0]
            raise InvalidInput(
                f"{self.passage.text[start:end]!r} was not read: the encoder stopped at character {self.end:,}, and "
                "without it the score is what it was"
            )
        return read


def occurrences(text: str, part: str) -> Spans:
    """Where a part stands in a text, in any case, and not inside another word."""
    found = (match.span() for match in regex.finditer(regex.escape(part.strip()), text, regex.IGNORECASE))
    return tuple(
        (start, end)
        for start, end in found
        if not crosses_word(text[:start], text[start:]) and not crosses_word(text[:end], text[end:])
    )


def changed_texts(texts: Texts, without: Part | Sequence[Part] | None, replaced: Replacements | None) -> list[Tried]:
    """What a caller asked for: each part by itself, in each text that it stands in."""
    found: list[Tried] = []
    parts = [] if without is None else [without] if _is_one(without) else list(without)
    for part in parts:
        found += [texts.tried(role, spans) for role, spans in texts.find(part)]
    if isinstance(replaced, str):
        if is_empty(replaced):
            raise InvalidInput("replace= takes another query with words in it, or {words: other words}")
        span = ((0, len(texts.query)),)
        found.append(Tried(texts.query, "query", "replaced", span, query=replaced, replacement=replaced))
    elif isinstance(replaced, Mapping):
        for part, words in replaced.items():
            if not isinstance(words, str):
                raise InvalidInput(f"replace= takes strings in place of strings, not {type(words).__name__}")
            found += [texts.tried(role, spans, words) for role, spans in texts.find(part)]
    elif replaced is not None:
        raise InvalidInput(f"replace= takes another query, or {{words: other words}}, not {type(replaced).__name__}")
    if not found:
        raise InvalidInput("nothing is to be left out or replaced: leave both arguments out to try what matters")
    return found


def _is_one(part: Any) -> bool:
    return isinstance(part, str) or hasattr(part, "start") or not isinstance(part, Iterable)


def what_matters(texts: Texts, explanation: Explanation) -> list[Tried]:
    """Every word of the query, the parts of the document that carry most, and what was not read of it."""
    found = [texts.tried("query", [span]) for span in part_spans(texts.query)[:_QUERY_WORDS]]
    carried = zip(explanation.document_tokens, explanation.document_saliency().tolist(), strict=True)
    strongest = sorted(carried, key=lambda one: -abs(one[1]))
    spans = [(one.start, one.end) for one, _ in strongest if not is_empty(one.text)][:_DOCUMENT_PARTS]
    found += [texts.tried("document", [span]) for span in sorted(spans) if span[1] <= texts.end]
    return [*found, *unread(texts)]


def unread(texts: Texts) -> list[Tried]:
    """What the encoder did not read of the document, by itself, in pieces that it reads whole."""
    tail = texts.passage.text[texts.end :] if texts.is_cut else ""
    if is_empty(tail):
        return []
    windows = texts.scorer.window_spans(tail, sentence_spans(tail))
    return [
        Tried(tail[a:b], "document", "unread", ((texts.end + a, texts.end + b),), document=Passage(tail[a:b]))
        for a, b in windows
        if not is_empty(tail[a:b])
    ]


def words_and_parts(texts: Texts) -> list[Tried]:
    """Each word of the query, and each of the document or each sentence where those are many."""
    own = part_spans(texts.passage.text)
    spans = own if len(own) <= _FEW_WORDS else sentence_spans(texts.passage.text)
    found = [texts.tried("query", [span]) for span in part_spans(texts.query)[:_QUERY_WORDS]]
    return found + [texts.tried("document", [span]) for span in spans if span[1] <= texts.end]


def scored(texts: Texts, tried: Sequence[Tried]) -> tuple[float, list[Tried]]:
    """The score as it is, and each change with its own; one without a text left has none."""
    queries = list(dict.fromkeys([texts.query, *(one.query for one in tried if one.query is not None)]))
    by_query = texts.scorer.scores(queries, [texts.passage])[:, 0]
    documents = list(dict.fromkeys(one.document for one in tried if one.document is not None))
    by_document = texts.scorer.scores([texts.query], documents)[0] if documents else ()
    known: dict[Any, float] = dict(zip((*queries, *documents), map(float, (*by_query, *by_document)), strict=True))
    made = [replace(one, score=known[one.query or one.document]) if one.is_left else one for one in tried]
    return known[texts.query], made


def recomputed(
    texts: Texts,
    tried: Sequence[Tried],
    explanation: Explanation | None,
    ranks: Ranks | None = None,
) -> tuple[float, tuple[Change, ...]]:
    """Each change, with what the explanation says of it beside."""
    before, found = scored(texts, tried)
    places = [None] * len(found) if ranks is None else ranks(found)
    changes = tuple(
        Change(
            text=one.text,
            role=one.role,
            kind=one.kind,
            spans=one.spans,
            score=one.score,
            rank=place if one.is_left else None,
            carried=None if explanation is None else carried(explanation, one),
            before=before,
            replacement=one.replacement,
        )
        for one, place in zip(found, places, strict=True)
    )
    return before, changes


def carried(explanation: Explanation, tried: Tried) -> float | None:
    """What an explanation says that a part carries: the sum of what it is made of, where that adds up."""
    if tried.kind == "unread":
        return None
    is_query = tried.role == "query"
    tokens: tuple[Token, ...] = explanation.query_tokens if is_query else explanation.document_tokens
    values = explanation.query_saliency() if is_query else explanation.document_saliency()
    inside, covered = [], 0
    for token, value in zip(tokens, values.tolist(), strict=True):
        if token.start < token.end and any(start < token.end and token.start < end for start, end in tried.spans):
            if not any(start <= token.start and token.end <= end for start, end in tried.spans):
                return None  # a half of a unit has no value
            inside.append(value)
            covered += 1
    is_sum = covered <= 1 or explanation.can_be_grouped
    return float(sum(inside)) if inside and is_sum else None


def answer(
    texts: Texts, explanation: Explanation | None, tried: Sequence[Tried], ranks: Ranks | None = None, **more: Any
) -> WhatIf:
    """The changes as a result; `explanation`, where there is one, says what each part carries."""
    scorer = texts.scorer
    fingerprint = scorer.fingerprint
    score, changes = recomputed(texts, tried, explanation, ranks)
    return WhatIf(
        query=texts.query,
        document=texts.passage.text,
        score=score,
        changes=changes,
        method="" if explanation is None else explanation.method,
        model=scorer.name,
        measure=scorer.measure,
        fingerprint=fingerprint,
        notices=texts.notices if explanation is None else explanation.notices,
        **more,
    )


def agreements(
    scorer: Scorer, query: str, passage: Passage, explanations: Sequence[Explanation | None]
) -> tuple[list[float], list[Loss]]:
    """For each explanation of one pair, how far it agrees with what the score really loses; and the losses.

    Nothing is known of a scorer that cannot be asked, or not any more.
    """
    try:
        texts = Texts(scorer, query, passage)
        before, found = scored(texts, words_and_parts(texts))
    except RagExplainError:
        return [float("nan")] * len(explanations), []
    losses = [
        Loss(
            one.text,
            one.role,
            None if one.score is None else before - one.score,
            tuple(None if why is None else carried(why, one) for why in explanations),
        )
        for one in found
    ]
    change = [None if one.lost is None else -one.lost for one in losses]
    told = [agreement(zip([one.carried[at] for one in losses], change, strict=True)) for at in range(len(explanations))]
    return told, losses
