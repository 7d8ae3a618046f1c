"""Does a record still hold? Its digest, the hashes of its texts, and the explanation computed again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rag_explain.errors import RagExplainError
from rag_explain.log.compact import LoggedExplanation, all_cells, cells
from rag_explain.log.erasure import ERASED
from rag_explain.log.files import Folder
from rag_explain.log.record import LoggedHit, Record, whole
from rag_explain.log.redaction import MASK, is_hash_of, needs_key
from rag_explain.results.explanation import Explanation
from rag_explain.texts.passage import Passage

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

Outcome = Literal["holds", "moved", "changed", "damaged", "unknown"]
Explainers = Callable[[Explanation], "Explainer"]
"""Gives the Explainer for a logged explanation's `model`, `method` and `settings`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known about one hit of a record, or about a whole line; docs/log-format.md explains the outcomes.

    Attributes:
        score: what the encoder at hand says, where it was asked.
        shift: the largest difference among score and kept pairs.
    """

    record: str
    document: str
    outcome: Outcome
    reason: str = ""
    score: float | None = None
    shift: float | None = None


def verify(
    path: str | os.PathLike[str],
    explainers: Explainers | None = None,
    *,
    documents: Mapping[str, str] | None = None,
    record_id: str | None = None,
    tolerance: float = 1e-4,
    hash_key: bytes | None = None,
) -> Iterator[Verdict]:
    """One verdict per hit of each record, and one per damaged line.

    Args:
        explainers: what computes again; None checks digests and hashes only.
        documents: today's texts by document id: used instead of the logged ones, and told when they have changed.
        record_id: only this record.
        tolerance: how far score and pairs may move, in score units; float32 on another machine moves them by 1e-6.
    """
    for line in Folder(path).lines():
        if not whole(line):
            if record_id is None:
                yield Verdict("", "", "damaged", "a line is torn or was changed after it was written")
            continue
        record = Record.from_line(line)
        for index, hit in enumerate(record.logged_hits if record.id.startswith(record_id or "") else ()):
            checks = _Checks(record, hit, record.asked(index), (documents or {}).get(hit.id, hit.text), hash_key)
            try:
                yield checks.verdict(explainers, tolerance)
            except _Stopped as stopped:
                yield Verdict(record.id, hit.id, stopped.outcome, stopped.reason)


class _Stopped(Exception):
    """A check that ends the verification of a hit, with its outcome and reason."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


@dataclass(frozen=True)
class _Checks:
    """The checks of one hit, in order; the first that fails decides."""

    record: Record
    hit: LoggedHit
    query: str | None
    document: str | None
    hash_key: bytes | None

    def verdict(self, explainers: Explainers | None, tolerance: float) -> Verdict:
        """How far score and pairs have moved, where they can be computed again."""
        query, document = self._texts()
        why = self.hit.explanation
        if why is None:
            raise _Stopped("unknown", f"there is no explanation: {self.hit.reason or self.hit.status}")
        if explainers is None:
            return Verdict(self.record.id, self.hit.id, "holds")
        try:
            again = explainers(why.outline).explain(query, self._passage(document, why)).grouped(why.outline.unit)
        except RagExplainError as error:
            raise _Stopped("unknown", str(error)) from error
        # A word that the encoder at hand does not see carries nothing.
        found, kept = all_cells(again), cells(why.pairs)
        shifts = (abs(found.get(cell, 0.0) - value) for cell, value in kept.items())
        shift = max([abs(again.score - why.outline.score), *shifts])
        outcome: Outcome = "holds" if shift <= tolerance else "moved"
        return Verdict(self.record.id, self.hit.id, outcome, _differences(again, why.outline), again.score, shift)

    def _texts(self) -> tuple[str, str]:
        """Query and document, where both are at hand and are the ones that were explained."""
        if self.query is None or self.document is None:
            erased = self.hit.reason == ERASED
            raise _Stopped("unknown", "the document was erased" if erased else "the texts were not kept")
        self._check("query", self.query, self.hit.query_hash or self.record.query_hash)
        self._check("document", self.document, self.hit.text_hash)
        return self.query, self.document

    def _check(self, name: str, text: str, expected: str | None) -> None:
        if expected is not None and needs_key(expected) and self.hash_key is None:
            raise _Stopped("unknown", "its hashes are keyed: give the key")
        if expected is not None and not is_hash_of(text, expected, self.hash_key):
            if self.record.texts == "redacted" and MASK in text:
                raise _Stopped("unknown", f"the {name} is redacted")
            raise _Stopped("changed", f"the {name} is not the text that was explained")

    def _passage(self, document: str, why: LoggedExplanation) -> Passage:
        """The document inside the string that the encoder read, where that is still known."""
        before, after = self.hit.around or ("", "")
        if self.hit.around_hash is None and why.metadata_tokens:
            raise _Stopped("unknown", "the encoder read more than the document's text, which is not in the record")
        if self.hit.around_hash and not is_hash_of(f"{before}\0{after}", self.hit.around_hash, self.hash_key):
            raise _Stopped("unknown", "what was embedded with the document is redacted or was not kept")
        return Passage(before + document + after, len(before), len(before) + len(document))


def _differences(again: Explanation, logged: Explanation) -> str:
    names = [name for name in ("fingerprint", "method") if getattr(again, name) != getattr(logged, name)]
    reasons = [f"{name} is {getattr(again, name)!r}, was {getattr(logged, name)!r}" for name in names]
    if again.settings != logged.settings:
        reasons.append(f"settings are {dict(again.settings)}, were {dict(logged.settings)}")
    return "; ".join(reasons)
