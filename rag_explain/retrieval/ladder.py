"""Why not that one? Rung by rung, until one of them explains it.

What was never there or was taken out is looked at first: the index, its chunks, filter, threshold, the approximate
index, later stages. What is left is a score that was too low: how low by exact search, whether the encoder read the
document to its end, and the words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rag_explain.errors import InvalidInput, RagExplainError
from rag_explain.results.hits import Hit
from rag_explain.results.notices import TRUNCATED
from rag_explain.results.why_not import Rung, Suggestion, WhyNot
from rag_explain.retrieval.asked import Asked, checked_id, document_of, embedded
from rag_explain.retrieval.corpus import MOST, Entry, owners, text_of
from rag_explain.retrieval.trace import Run
from rag_explain.texts.passage import Passage, as_passage
from rag_explain.texts.segments import part_spans
from rag_explain.what_if import Texts, unread

_NEAR = 2e-3  # similarities of equal vectors that an engine kept may be this far apart
_SHOWN = 3  # chunks that are named
_MOST_WORDS = 40  # of a query, each of which is left out once
# The rungs after which it is asked why the score itself is what it is.
_BY_SCORE = ("cut", "returned", "unknown")


def climb(asked: Asked, wanted: str, got: str | None = None) -> WhyNot:
    """The ladder for a document by its id; `got` is the hit that it is contrasted with."""
    checked_id(wanted, "id")
    if got is not None:
        checked_id(got, "got")
    rungs: list[Rung] = []
    with asked.explainer.scorer.computing():
        entry = _entry(asked, wanted, rungs)
        rival = _rival(asked, got, entry)
        if entry is not None and not any(rung.explains for rung in rungs):
            rungs += _steps(asked, entry, rival)
        made = WhyNot(
            query=asked.query,
            wanted=wanted,
            got=None if rival is None else rival.id,
            rungs=tuple(rungs),
            rank=None if entry is None else asked.rank(entry),
            total=asked.total,
            k=len(asked.hits),
        )
    if entry is None or rival is None or not rungs or entry.document.text is None or rival.text is None:
        return made
    try:
        if made.reason.name == "stage" and (own := asked.ranked(entry.document.id)) is not None:
            return replace(made, contrast=own.contrast(rival))
        return _with_words(asked, made, entry, rival) if made.reason.name in _BY_SCORE else made
    except RagExplainError as error:  # no more texts may be sent, say: what is known so far stays
        return replace(made, rungs=(*made.rungs, Rung("words", f"the words cannot be told: {error}")))


def _steps(asked: Asked, entry: Entry, rival: Hit | None) -> Iterator[Rung]:
    """The rungs from here on, up to the first that explains it."""
    hit = asked.hit(entry.document.id)
    if hit is not None:
        yield _returned(asked, hit, rival)
        return
    for step in (_filter, _threshold, _approximate, _stage, _cut):
        found = step(asked, entry)
        if found is not None:
            yield found
            if found.explains:
                return


# ---------------------------------------------------------------- is it there?


def _entry(asked: Asked, wanted: str, rungs: list[Rung]) -> Entry | None:
    """The entry that is meant, with what was seen on the way to it."""
    hit, entries = asked.hit(wanted), asked.corpus.entries
    if entries is None and hit is None:
        why = f"{asked.searched} cannot list its documents, or holds more than {MOST:,}"
        rungs.append(Rung("unknown", f"{why}: whether {wanted!r} is among them is not known", explains=True))
        return None
    found = asked.corpus.named(wanted)
    if len(found) > 1:
        rungs.append(Rung("chunks", f"{len(found)} entries have the id {wanted!r}: the best of them is meant"))
    if found:
        entry = _best(asked, found)
        rungs += _siblings(asked, entry, hit)
        return entry
    if hit is not None:  # what was returned goes by another name than its chunk
        return Entry(None, document_of(hit))
    return _chunk(asked, wanted, rungs)


def _siblings(asked: Asked, entry: Entry, hit: Hit | None) -> Iterator[Rung]:
    """Other chunks of the entry's document, where they were returned in its place."""
    of = owners(entry.document)[:1] if hit is None else []
    of_others = {one.document.id: owners(one.document)[:1] for one in asked.corpus.entries or () if of}
    found = [one for one in asked.hits if of and of_others.get(one.id) == of]
    if found:  # what half of an index is "of" is where it is from, and no document
        is_one = 2 * list(of_others.values()).count(of) <= len(of_others)
        yield Rung("chunks", f"its document {of[0]!r} was returned, in other chunks: {_named(found)}", explains=is_one)


def _chunk(asked: Asked, wanted: str, rungs: list[Rung]) -> Entry | None:
    """The best chunk of the document with this name; where one of them was returned, the document was."""
    chunks = asked.corpus.chunks_of(wanted)
    if not chunks:
        told = f"none of its {len(asked.corpus.entries or ()):,} entries has this id, or names it as its document"
        rungs.append(Rung("missing", f"{wanted!r} is not in {asked.searched}: {told}", explains=True))
        return None
    names = {one.document.id for one in chunks}
    returned = [hit for hit in asked.hits if hit.id in names]
    if returned:
        there = f"{wanted!r} is there in {_chunks(len(chunks))}, and was returned: {_named(returned)}"
        rungs.append(Rung("chunks", there, explains=True))
        return next(one for one in chunks if one.document.id == returned[0].id)
    best = _best(asked, chunks)
    listed = ", ".join(str(one.document.id) for one in chunks[:_SHOWN]) + ", …" * (len(chunks) > _SHOWN)
    there = f"it is there in {_chunks(len(chunks))} ({listed})"
    rungs.append(Rung("chunks", f"no entry has the id {wanted!r}: {there}; the best of them is {best.document.id}"))
    return best


def _chunks(count: int) -> str:
    return f"{count:,} chunks" if count > 1 else "one chunk"


def _named(hits: Sequence[Hit]) -> str:
    return ", ".join(f"{one.id} at rank {one.rank}" for one in hits[:_SHOWN])


def _best(asked: Asked, found: Sequence[Entry]) -> Entry:
    """The entry that stands highest; where no rank is known, the one of the largest similarity."""
    if len(found) == 1:
        return found[0]
    ranks = [(rank, at) for at, one in enumerate(found) if (rank := asked.rank(one)) is not None]
    if ranks:
        return found[min(ranks)[1]]
    scored = [(asked.similarity(one.document.text), -at) for at, one in enumerate(found) if one.document.text]
    return found[-max(scored)[1]] if scored else found[0]


def _rival(asked: Asked, got: str | None, entry: Entry | None) -> Hit | None:
    """The hit that is contrasted with: the one that was named, else the one whose place the document would take."""
    if got is not None:
        hit = asked.hit(got)
        if hit is None:
            names = ", ".join(one.id for one in asked.hits[:10]) or "nothing"
            raise InvalidInput(f"{got!r} was not returned for this query: got must be one of {names}")
        return hit
    own = None if entry is None else asked.hit(entry.document.id)
    if not asked.hits or own is asked.hits[0]:
        return None
    return asked.hits[-1] if own is None else asked.hits[0]


# ---------------------------------------------------------------- what took it out?


def _returned(asked: Asked, hit: Hit, rival: Hit | None) -> Rung:
    if rival is None or hit.rank <= rival.rank:
        return Rung("returned", f"it was returned, at rank {hit.rank}", explains=True)
    after = f"it was returned, at rank {hit.rank}, after {rival.id} at rank {rival.rank}"
    if all(stage.kind in ("search", "filter") for stage in hit.stages):
        return Rung("returned", after)
    seen = [_placed(stage.name, stage.rank, stage.rank_before) for stage in hit.stages if stage.kind != "term"]
    return Rung("stage", f"{after}: {', '.join(seen)}", explains=True)


def _filter(asked: Asked, entry: Entry) -> Rung | None:
    reason = asked.removed.by_filter(entry)
    return None if reason is None else Rung("filter", f"the filter leaves it out: {reason}", explains=True)


def _threshold(asked: Asked, entry: Entry) -> Rung | None:
    reason = asked.removed.by_threshold(entry)
    return None if reason is None else Rung("threshold", reason, explains=True)


def _approximate(asked: Asked, entry: Entry) -> Rung | None:
    """A comparison of all has it among as many as were asked for, and nothing but the index stood between."""
    rank, ranking = asked.rank(entry), asked.ranking
    if not asked.hits or asked.surrogate or asked.run is not None:
        return None
    if rank is None or ranking is None or (asked.last_rank(entry) or rank) > asked.most:
        return _coded(asked, entry) if ranking is None or not ranking.is_exact else None
    effort = asked.sought(entry)
    tried = f"; with {effort} it is found" if effort else ""
    exact = "exact search" if ranking.is_exact else "a comparison with all coded vectors"
    return Rung("approximate", f"{exact} has it at rank {rank}: the approximate search missed it{tried}", explains=True)


def _coded(asked: Asked, entry: Entry) -> Rung | None:
    """Where it stands before hits that were returned by the vectors that were given, and the index says otherwise."""
    texts = [embedded(hit) for hit in asked.hits if hit.text is not None]
    if entry.document.text is None or not texts:
        return None
    own = asked.similarity(entry.document.text)
    before = sum(own > asked.similarity(text) + _NEAR for text in texts)
    if not before:
        return None
    told = f"by the vectors themselves it scores {own:.4f}, more than {before} of the {len(texts)} that were returned"
    return Rung("approximate", f"{told}: the index compares coded vectors, or not all of them", explains=True)


def _stage(asked: Asked, entry: Entry) -> Rung | None:
    """What the stages of the search made of a document that came out of none of them, or after what was returned."""
    rank = asked.rank(entry)
    if asked.run is not None:
        return _followed(asked, asked.run, entry, rank)
    if asked.surrogate and rank is not None and rank <= asked.most:
        return Rung("stage", f"by similarity it stands at rank {rank}, but {asked.surrogate}", explains=True)
    return None


def _followed(asked: Asked, run: Run, entry: Entry, rank: int | None) -> Rung:
    name, text = entry.document.id, text_of(entry.document)
    seen = list(run.followed((entry.key, (name, text), name, text)))
    told = ", ".join(_placed(one.name, place) for one, place in seen if place is not None or not one.answered)
    if seen[-1][1] is not None:
        return Rung("stage", f"{told}, and {_returned_in_all(len(asked.hits))}", explains=True)
    if all(place is None for _, place in seen):
        of = "" if rank is None else f"; by similarity it stands at rank {rank:,} of {len(asked.ranking or ()):,}"
        depths = [len(one.found or ()) for one, _ in seen if not one.answered]
        gave = ", ".join(f"{one.name} gave {len(one.found or ()):,}" for one, _ in seen if not one.answered)
        is_missed = rank is not None and len(depths) == 1 and (asked.last_rank(entry) or rank) <= depths[0]
        return Rung("approximate" if is_missed else "cut", f"no search inside found it: {gave}{of}", explains=True)
    lost = next(one for one, place in seen if place is None and one.answered and _is_inside(seen, one))
    return Rung("stage", f"{told}: {lost.name}, which returned {len(lost.found or ()):,}, left it out", explains=True)


def _returned_in_all(count: int) -> str:
    return f"{count:,} {'was' if count == 1 else 'were'} returned"


def _is_inside(seen: Sequence[tuple[Run, int | None]], run: Run) -> bool:
    """Whether something directly inside a run found the document."""
    return any(place is not None and any(one is inner for inner in run.answered) for one, place in seen)


def _placed(name: str, rank: int | None, before: int | None = None) -> str:
    if rank is None:
        return f"{name} did not find it"
    moved = before is not None and before != rank
    return f"{name} put it from rank {before} to rank {rank}" if moved else f"{name} has it at rank {rank}"


# ---------------------------------------------------------------- a score that was too low


def _cut(asked: Asked, entry: Entry) -> Rung | None:
    rank, count, k = asked.rank(entry), len(asked.corpus.entries or ()), len(asked.hits)
    total = asked.total or count
    of = f" of {total:,}" if total == count else f" of the {total:,} that can be compared"
    if rank is None or asked.ranking is None:
        told = "its rank cannot be known without the vectors of all documents"
        return Rung("unknown", f"{told}: reencode={total} encodes them all again" if total else told)
    kind = "" if asked.ranking.is_exact else " by the coded vectors of the index"
    last = asked.last_rank(entry) or rank
    place = f"rank {rank:,}{of}" if last == rank else f"rank {rank:,} to {last:,}{of}, with others of the same score"
    return Rung("cut", f"it stands at {place}{kind}, and {_returned_in_all(k)}", explains=last > asked.most)


def _with_words(asked: Asked, made: WhyNot, entry: Entry, rival: Hit) -> WhyNot:
    """The ladder on to why the score is what it is: what was not read of the document, and the words."""
    assert entry.document.text is not None
    passage, other = as_passage(entry.document.text), as_passage(embedded(rival))
    contrast = asked.explainer.contrast(asked.query, passage, other)
    with asked.explainer.scorer.computing():
        rungs = (*made.rungs, *_unread(asked, passage), _words(contrast.difference, rival, asked.otherwise))
        tried = (*_read_whole(asked, entry, passage), *_suggestions(asked, passage, other, rival))
    return replace(made, rungs=rungs, contrast=contrast, suggestions=tried)


def _unread(asked: Asked, passage: Passage) -> Iterator[Rung]:
    """Whether the encoder read the document to its end, and what the rest would score by itself."""
    texts = Texts(asked.explainer.scorer, asked.query, passage)
    told = next((one.text for one in texts.notices if one.code == TRUNCATED), None)
    tails = [(asked.similarity(one.document), one) for one in unread(texts) if one.document is not None]
    if told is None or not tails:
        return
    (score, best), own = max(tails, key=lambda both: both[0]), asked.similarity(passage)
    if score > own:
        where = f"From character {best.spans[0][0]:,} on it scores {score:.4f} by itself"
        yield Rung("unread", f"{told} {where}, what was read {own:.4f}", explains=True)
    else:
        yield Rung("unread", f"{told} It is not that: the rest scores {score:.4f} by itself, what was read {own:.4f}")


def _words(difference: float, rival: Hit, otherwise: str | None) -> Rung:
    how = "lower" if difference > 0 else "higher"
    told = f"its own score is {abs(difference):.4f} {how} than that of {rival.id}"
    if difference <= 0 and otherwise:
        return Rung("words", f"{told}, and still it stands lower: {otherwise}", explains=True)
    return Rung("words", f"{told}: the words tell where that comes from", explains=True)


def _read_whole(asked: Asked, entry: Entry, passage: Passage) -> Iterator[Suggestion]:
    """Where the document would stand by what was not read of it."""
    texts, ranking = Texts(asked.explainer.scorer, asked.query, passage), asked.ranking
    scores = [asked.similarity(one.document) for one in unread(texts) if one.document is not None]
    if ranking is None or not scores or max(scores) <= asked.similarity(passage):
        return
    rank, now = ranking.rank_of(max(scores), entry.key), asked.rank(entry)
    if rank is not None and now is not None and rank < now:
        yield Suggestion(f"cut it into chunks that are read whole: the best would stand at rank {rank:,}", rank)


def _suggestions(asked: Asked, wanted: Passage, other: Passage, rival: Hit) -> Iterator[Suggestion]:
    """Query words without which the wanted document comes before the other one: each is tried out."""
    if asked.similarity(wanted) >= asked.similarity(other):
        return
    texts = Texts(asked.explainer.scorer, asked.query, wanted)
    tried = [texts.tried("query", [span]) for span in part_spans(asked.query)[:_MOST_WORDS]]
    tried = [one for one in tried if one.query is not None]
    scores = asked.explainer.scorer.scores([one.query or "" for one in tried], [wanted, other]) if tried else ()
    for one, (own, others) in zip(tried, scores, strict=True):
        if own > others:
            told = f"it scores {own:.4f} then, and {rival.id} {others:.4f}"
            yield Suggestion(f"leave “{one.text}” out of the query: {told}")
