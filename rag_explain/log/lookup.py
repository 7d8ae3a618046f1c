"""Reading an explanation again: what the log has of a question and a document, or what computes it once more."""

import os
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from rag_explain.errors import InvalidInput, LogError
from rag_explain.log.compact import LoggedExplanation
from rag_explain.log.reader import read
from rag_explain.log.record import LoggedHit, Record
from rag_explain.log.redaction import digest
from rag_explain.log.writer import ExplanationLog
from rag_explain.results.explanation import Explanation
from rag_explain.results.notices import MISMATCH, UNCHECKED, Notice
from rag_explain.retrieval.search import RetrievedDocument
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Unit

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

LogSource = ExplanationLog | str | os.PathLike[str]

_KEYED = b'_hash":"hmac-sha256:'
_CHANGED = Notice(
    MISMATCH, "what is embedded of this document is another text now: explained is the one that was logged"
)
_AGAIN = Notice(
    UNCHECKED, "computed again after the search: nothing shows whether this encoder found the document then", "note"
)


def explain_again(
    document: RetrievedDocument,
    query: str | None,
    log: LogSource | None,
    explainer: "Explainer | None",
    unit: Unit = "word",
) -> Explanation | None:
    """The explanation of a document that has none beside it: from the log, or else computed in this unit.

    None where neither log nor explainer is given; where the log has none, and nothing computes one, its error says so.
    """
    if (query is None) != (log is None and explainer is None):
        raise InvalidInput("to read an explanation again pass query= and, with it, log= or explainer=")
    if query is None:
        return None
    if log is not None:
        try:
            return find_explanation(log, query, id=document.id, text=document.text)
        except LogError:
            if explainer is None:
                raise
    return _computed(explainer, query, document, unit)


def _computed(explainer: Any, query: str, document: RetrievedDocument, unit: Unit) -> Explanation:
    """Warm, where the explainer's store has the document's factors in this unit or a finer one."""
    if not hasattr(explainer, "explain_many"):
        raise InvalidInput(f"explainer must be a rag_explain.Explainer, not {type(explainer).__name__}")
    if document.text is None:
        raise InvalidInput("the document has no text to explain")
    found: Explanation = explainer.explain_many(query, [document.text], unit=unit, ids=[document.id])[0]
    return found.with_notices(_AGAIN)


def find_explanation(
    log: LogSource, query: str, *, id: str | None = None, text: str | Passage | None = None
) -> Explanation:
    """The newest logged explanation of this question and this document, which is known by its id, or else by its text.

    The question is the record's, or what the retriever was asked in its place. Texts are compared by their hashes, so
    that they need not be in the log; where they are not, and these are the ones, their words are in the explanation.
    Raises `LogError` with what the log has instead.
    """
    if not isinstance(query, str) or (id is None and text is None):
        raise InvalidInput("find_explanation takes a question, and the id or the text of a document")
    if not isinstance(log, ExplanationLog | str | os.PathLike):
        raise InvalidInput(f"log must be an ExplanationLog or its folder, not {type(log).__name__}")
    path, key = (log.folder.path, log.policy.hash_key) if isinstance(log, ExplanationLog) else (log, None)
    if isinstance(log, ExplanationLog):
        log.flush()
    search = _Search(query, id, text, key)
    for record in filter(None, read(path, search.record_of, newest_first=True)):
        if (found := search.explanation(record)) is not None:
            return found
    if search.changed is not None:
        return search.changed.with_notices(_CHANGED)
    raise LogError(f"the log {path} {search.missing()}")


class _Search:
    """One question and one document, looked for in the records of a log, the newest first."""

    def __init__(self, query: str, id: str | None, text: str | Passage | None, key: bytes | None) -> None:
        self.query, self.id = query, id
        self.text = text.text if isinstance(text, Passage) else text
        self._asked, self._read = _hashes(query, key), _hashes(self.text, key)
        self._around: Set[str | None] | None = None  # of what stands around the text, where that is told
        if isinstance(text, Passage):
            self._around = _hashes("\0".join(text.around), key) if any(text.around) else {None}
        self._has_key = key is not None
        self._is_keyed = self._is_asked = False
        self._unexplained: LoggedHit | None = None
        self.changed: Explanation | None = None  # of this document, when another text was embedded

    def record_of(self, line: bytes) -> Record | None:
        """The record of a line that may be about this question; the others are not parsed."""
        self._is_keyed = self._is_keyed or _KEYED in line
        return Record.from_line(line) if any(one.encode() in line for one in self._asked) else None

    def explanation(self, record: Record) -> Explanation | None:
        """What a record has of the document; where something else of it was embedded, that is only put aside."""
        is_asked = record.query_hash in self._asked
        hits = [hit for hit in record.logged_hits if is_asked or hit.query_hash in self._asked]
        self._is_asked = self._is_asked or is_asked or bool(hits)
        for hit in sorted(hits, key=lambda hit: hit.id != self.id):
            is_read, is_named = hit.text_hash in self._read, self.id is not None and hit.id == self.id
            if not (is_read or is_named):
                continue
            if hit.explanation is None:
                self._unexplained = self._unexplained or hit
            elif (is_read or not self._read) and (self._around is None or hit.around_hash in self._around):
                return self._worded(record, hit, hit.explanation)
            else:
                self.changed = self.changed or hit.explanation.explanation()
        return None

    def _worded(self, record: Record, hit: LoggedHit, why: LoggedExplanation) -> Explanation:
        """With the words of texts that are not in the log, or masked there, where these are the texts."""
        asked, outline = hit.query_hash or record.query_hash, why.outline
        texts = {
            "asked": self.query if asked in self._asked else outline.query,
            "text": self.text if hit.text_hash in self._read else outline.document,
        }
        return LoggedExplanation.from_dict(why.to_dict(), texts).explanation()

    def missing(self) -> str:
        """What a log has instead."""
        if self._unexplained is not None:
            why = self._unexplained.reason or self._unexplained.status
            return f"has no explanation of this document for this question: {why}"
        if self._is_asked:
            return "has this question without this document: another search found that, or it was erased"
        if self._is_keyed and not self._has_key:
            return "knows texts by hashes with a key: pass log=ExplanationLog(path, hash_key=...), opened with that key"
        return "has no record of this question: it was not logged, was worded otherwise, or was erased"


def _hashes(text: str | None, key: bytes | None) -> frozenset[str]:
    """What a text is known by in a log, whose key may have come later; nothing for none."""
    return frozenset() if text is None else frozenset({digest(text), digest(text, key)})
