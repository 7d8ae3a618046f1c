"""Evidence: the sentences of a document in which the words of a query found most.

With unit vectors x_t of the query's tokens and y_j of the document's (a bi-encoder's last block, or a multi-vector
encoder's own):

    value(s) = sum_t max_{j in s} <x_t, y_j>                  MaxSim by sentence; s a sentence, t the tokens of words

It takes one forward pass and says where to look. What moved the score is another question, which a `Method` answers. A
document longer than the encoder reads is read in overlapping windows, and a token's best match in a sentence is looked
for in all of them: what was not read could not be found.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rag_explain.devices import Device, to_host
from rag_explain.encoder.batch import Batch
from rag_explain.encoder.chunking import LONGEST_WINDOW
from rag_explain.errors import InvalidInput, in_words, whole_number
from rag_explain.results.evidence import Evidence
from rag_explain.results.notices import METHOD, TRUNCATED, Notice
from rag_explain.results.spans import ValuedSpan
from rag_explain.scorers.base import Scorer
from rag_explain.texts.passage import Passage
from rag_explain.texts.segments import Span, group, sentence_spans

Backend = Callable[[str, list[str]], Sequence[float]]
Table = NDArray[np.float64]

# Texts that are read together: with the longest window they bound what is in memory at once.
_TEXTS = 64
_TOLD = "The document is longer than the encoder reads at once: it was read in overlapping windows."
_WINDOWED = Notice(METHOD, _TOLD, "note", "document")


@dataclass(frozen=True, eq=False)
class Matches:
    """What the words of a query found in one document.

    Attributes:
        sentences: of the caller's own text.
        best: (n_q, n_sentences) each query token's best cosine in each sentence; -inf where no token is compared.
        notices: what a reader must know.
    """

    sentences: list[Span]
    best: Table
    notices: list[Notice]


class _Window(NamedTuple):
    """A part of a document, read as a passage of its own, and where in the caller's text its own text begins."""

    found: Matches
    passage: Passage
    start: int


def find_evidence(
    scorer: Scorer, query: Passage, passages: Sequence[Passage], k: int, backend: Backend | None = None
) -> list[Evidence]:
    """The `k` sentences of each document to read for the query, and the values of all of them."""
    if (k := whole_number(k, "k")) < 0:
        raise InvalidInput(f"k must be 0 or more sentences, not {k}")
    if backend is not None:
        return [_judged(query.text, passage.text, k, backend) for passage in passages]
    if not passages:
        return []
    fingerprint = scorer.fingerprint  # read once, before anything is computed
    found = matches(scorer, query, passages)
    about = {"k": k, "query": query.text, "method": "maxsim", "model": scorer.name, "fingerprint": fingerprint}
    return [_evidence(passage.text, one, about) for passage, one in zip(passages, found, strict=True)]


def matches(scorer: Scorer, query: Passage, passages: Sequence[Passage]) -> list[Matches]:
    """What the words of the query found in each document, in one pass over each."""
    with scorer.computing():
        asked, notices = _read_query(scorer, query)
        found = []
        for passage in passages:
            spans = sentence_spans(passage.text)
            found.append(Matches(spans, np.full((len(asked), len(spans)), -np.inf), [*notices]))
        told = [_Window(one, passage, 0) for one, passage in zip(found, passages, strict=True) if one.sentences]
        for some in _groups(told):
            _read(scorer, asked, some)
    return found


def _read(scorer: Scorer, asked: Tensor, documents: Sequence[_Window]) -> None:
    """Fill in what the query found in whole documents, which are cut into windows where they are too long."""
    batch = scorer.read([document.passage for document in documents], "document")
    sizes = zip(batch.truncated, batch.tokens, strict=True)
    is_long = [is_cut or len(tokens) > LONGEST_WINDOW for is_cut, tokens in sizes]
    windows = [_windows(scorer, one) if long else [one] for one, long in zip(documents, is_long, strict=True)]
    for document, parts, notices in zip(documents, windows, batch.notices, strict=True):
        if parts[0].passage != document.passage:  # all of it is read, after all
            notices = *(one for one in notices if one.code != TRUNCATED), _WINDOWED
        document.found.notices.extend(notices)
    whole = [at for at, is_one in enumerate(is_long) if not is_one]
    if whole:
        _look(scorer, asked, batch.select(whole), [documents[at] for at in whole])
    for parts in compress(windows, is_long):
        for some in _groups(parts):
            _look(scorer, asked, scorer.read([window.passage for window in some], "document"), some)


def _groups(windows: Sequence[_Window]) -> Iterator[Sequence[_Window]]:
    return (windows[first : first + _TEXTS] for first in range(0, len(windows), _TEXTS))


def _read_query(scorer: Scorer, query: Passage) -> tuple[Tensor, tuple[Notice, ...]]:
    """(n_q, h) the vectors of the tokens of the query's words: special tokens and prompts do not vote."""
    batch = scorer.read([query], "query")
    vectors, is_compared = _device(scorer).with_room(lambda: scorer.token_vectors(batch))
    asked = vectors[0, (is_compared & batch.words())[0]]
    if not len(asked):
        raise InvalidInput("the query has no word to look for: give one that is not empty")
    return asked, (*scorer.token_notices, *batch.notices[0])


def _windows(scorer: Scorer, whole: _Window) -> list[_Window]:
    """The parts of a long document that hold some of the caller's text."""
    passage, (before, after) = whole.passage, whole.passage.around
    spans = sentence_spans(before)
    for text, start in ((None, passage.start), (after, passage.end)):
        inside = whole.found.sentences if text is None else sentence_spans(text)
        spans += [(start + first, start + last) for first, last in inside]
    windows = []
    for first, last in scorer.window_spans(passage.string, spans):
        start, end = max(first, passage.start), min(last, passage.end)
        if start < end:
            part = Passage(passage.string[first:last], start - first, end - first)
            windows.append(_Window(whole.found, part, start - passage.start))
    return windows


def _look(scorer: Scorer, asked: Tensor, batch: Batch, windows: Sequence[_Window]) -> None:
    """Fill in what the query found in some windows, which are read in this batch."""

    def compare(part: Batch) -> list[tuple[Tensor, Tensor]]:
        vectors, is_compared = scorer.token_vectors(part)
        (cosines,) = to_host(vectors @ asked.T)
        return list(zip(part.unpad(cosines), part.unpad(is_compared & part.words()), strict=True))

    device = _device(scorer)
    compared = batch.in_buckets(device.size(LONGEST_WINDOW), device.sharing(compare))
    for index, (cosines, is_compared) in compared.items():
        owners = _owners(batch, index, windows[index])
        kept = is_compared.numpy() & (owners >= 0)
        np.maximum.at(windows[index].found.best.T, owners[kept], cosines.double().numpy()[kept])


def _device(scorer: Scorer) -> Device:
    return Device(lambda: scorer.device)


def _owners(batch: Batch, at: int, window: _Window) -> NDArray[np.intp]:
    """(n_tokens,) the sentence of each token; -1 for a token in none."""
    sentences = window.found.sentences
    first = bisect_right(sentences, window.start, key=lambda span: span[1])
    last = bisect_left(sentences, window.start + len(window.passage.text), key=lambda span: span[0])
    tokens = [(one.start + window.start, one.end + window.start) for one in batch.tokens[at]]
    spans, index = group(tokens, sentences[first:last], join=False, clip=False)
    number = {span: first + place for place, span in enumerate(sentences[first:last])}
    return np.array([number[spans[place]] if place >= 0 else -1 for place in index], dtype=np.intp)


def _evidence(document: str, found: Matches, about: dict[str, Any]) -> Evidence:
    """By MaxSim; a sentence of which no token is compared matches nothing."""
    best = np.where(np.isfinite(found.best), found.best, 0.0)
    spans = _valued(document, found.sentences, best.sum(axis=0).tolist())
    score = float(best.max(axis=1, initial=-1.0).sum()) if spans else 0.0
    return Evidence(**about, document=document, spans=spans, score=score, notices=tuple(found.notices))


def _judged(query: str, document: str, k: int, backend: Backend) -> Evidence:
    """By a backend of the user's own."""
    sentences = sentence_spans(document)
    name = getattr(backend, "__name__", type(backend).__name__)
    with in_words(InvalidInput, f"the backend {name} failed", ": it takes a query and a list of sentences"):
        values = [float(value) for value in backend(query, [document[start:end] for start, end in sentences])]
    if len(values) != len(sentences) or not np.isfinite(values).all():
        raise InvalidInput(
            f"the backend {name} must give one finite number for each of the {len(sentences)} sentences, in their order"
        )
    return Evidence(spans=_valued(document, sentences, values), k=k, query=query, document=document, method=name)


def _valued(document: str, spans: Sequence[Span], values: Sequence[float]) -> tuple[ValuedSpan, ...]:
    pairs = zip(spans, values, strict=True)
    return tuple(ValuedSpan(document[start:end], start, end, value) for (start, end), value in pairs)
