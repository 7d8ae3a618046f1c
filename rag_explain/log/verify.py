"""Does a record still hold? Its digest, the hashes of its texts, and the explanation computed again."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from rag_explain.errors import RagExplainError
from rag_explain.log.compact import LoggedExplanation, all_cells, cells
from rag_explain.log.erasure import ERASED
from rag_explain.log.files import LogFile
from rag_explain.log.models import kept_models
from rag_explain.log.reader import read
from rag_explain.log.record import LoggedHit, Record
from rag_explain.log.redaction import MASK, is_hash_of, needs_key
from rag_explain.probes import Probes
from rag_explain.results.explanation import Explanation
from rag_explain.texts.passage import Passage

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

Outcome = Literal["holds", "moved", "changed", "damaged", "unknown"]
Explainers = Callable[[Explanation], "Explainer"]
"""Gives the Explainer for a logged explanation's `model`, `method` and `settings`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known about one hit of a record, or about a file; docs/log-format.md explains the outcomes.

    Attributes:
        score: what the encoder at hand says, where it was asked.
        shift: the largest difference among score and kept pairs, in score units.
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
    """One verdict per hit of each record, and one per file that could not be read whole: its reason names the file.

    Args:
        explainers: what computes again; None checks digests and hashes only.
        documents: today's texts by document id: used instead of the logged ones, and told when they have changed.
        record_id: only this record.
        tolerance: how far score and pairs may move, relative to the size of the explanation (the sum of |pairs|, or
            |score| where that is larger); float32 on another machine moves them by 1e-6.
    """
    problems: list[LogFile] = []
    is_found, models = False, kept_models(path)
    for record in read(path, Record.from_line, record_id or "", problems.append):
        is_found = True
        for index, hit in enumerate(record.logged_hits):
            document = (documents or {}).get(hit.id, hit.text)
            yield _verdict(record, index, document, explainers, tolerance, hash_key, models)
    for file in problems:
        if not record_id or not is_found or file.torn:  # else the damage is elsewhere in the log
            is_damaged = file.damage is not None or file.torn
            yield Verdict("", "", "damaged" if is_damaged else "unknown", f"{file.name}: {file.problem}")


def _verdict(
    record: Record,
    index: int,
    document: str | None,
    explainers: Explainers | None,
    tolerance: float,
    hash_key: bytes | None,
    models: Mapping[str, Sequence[Probes]],
) -> Verdict:
    """The checks of one hit, in order; the first that fails decides."""
    hit, query = record.logged_hits[index], record.asked(index)
    verdict = partial(Verdict, record.id, hit.id)
    if query is None or document is None:
        return verdict("unknown", "the document was erased" if hit.reason == ERASED else "the texts were not kept")
    doubt = _doubt(record, hit, query, document, hash_key)
    if doubt is not None:
        return verdict(*doubt)
    why = hit.explanation
    if why is None:
        return verdict("unknown", f"there is no explanation: {hit.reason or hit.status}")
    if explainers is None:
        return verdict("holds")
    before, after = hit.around or ("", "")
    if hit.around_hash is None and why.metadata_tokens:
        return verdict("unknown", "the encoder read more than the document's text, which is not in the record")
    if hit.around_hash and not is_hash_of(f"{before}\0{after}", hit.around_hash, hash_key):
        return verdict("unknown", "what was embedded with the document is redacted or was not kept")
    start, end = hit.chunk or (0, len(document))
    passage = Passage(before + document[start:end] + after, len(before), len(before) + len(document[start:end]))
    try:
        explainer = explainers(why.outline)
        again = explainer.explain(query, passage, unit=why.outline.unit).within(document, start)
        is_other = _is_other(explainer, models.get(why.outline.fingerprint, ()))
    except Exception as error:  # whatever a model raises when it is loaded: the other records are still checked
        told = str(error) if isinstance(error, RagExplainError) else f"{type(error).__name__}: {error}"
        return verdict("unknown", told)
    shift, allowed = _shift(again, why), tolerance * max(abs(why.outline.score), why.absolute)
    reasons = ["the model computes other embeddings than when this was logged"] if is_other else []
    outcome: Outcome = "moved" if is_other or not shift <= allowed else "holds"
    return verdict(outcome, "; ".join([*reasons, *_differences(again, why.outline)]), again.score, shift)


def _shift(again: Explanation, why: LoggedExplanation) -> float:
    """The largest difference among score and kept pairs. A word that the encoder does not see now carries nothing."""
    found = all_cells(again)
    shifts = (abs(found.get(cell, 0.0) - value) for cell, value in cells(why.pairs).items())
    return max([abs(again.score - why.outline.score), *shifts])


def _doubt(
    record: Record, hit: LoggedHit, query: str, document: str, hash_key: bytes | None
) -> tuple[Outcome, str] | None:
    """Why these are not the texts that were explained, or why that cannot be told; None where they are."""
    expected = {"query": (query, hit.query_hash or record.query_hash), "document": (document, hit.text_hash)}
    for name, (text, text_hash) in expected.items():
        if text_hash is not None and needs_key(text_hash) and hash_key is None:
            return "unknown", "its hashes are keyed: give the key"
        if text_hash is not None and not is_hash_of(text, text_hash, hash_key):
            if record.texts == "redacted" and MASK in text:
                return "unknown", f"the {name} is redacted"
            return "changed", f"the {name} is not the text that was explained"
    return None


def _is_other(explainer: "Explainer", kept: Sequence[Probes]) -> bool:
    """Whether the model at hand matches none of what was kept of the logged one; False where nothing was."""
    allowed = explainer.scorer.tolerance if kept else 0.0
    return bool(kept) and all(not explainer.scorer.probes.distance(one) <= allowed for one in kept)


def _differences(again: Explanation, logged: Explanation) -> list[str]:
    names = [name for name in ("fingerprint", "method") if getattr(again, name) != getattr(logged, name)]
    reasons = [f"{name} is {getattr(again, name)!r}, was {getattr(logged, name)!r}" for name in names]
    if again.settings != logged.settings:
        reasons.append(f"settings are {dict(again.settings)}, were {dict(logged.settings)}")
    return reasons
