"""What is inside an object, which encoders differ, and hits that are made inside of a retriever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer

from rag_explain.errors import InvalidInput
from rag_explain.explainer import Explainer
from rag_explain.render.views.explanation import pieces
from rag_explain.results.deferred import Deferred
from rag_explain.results.metric import Metric
from rag_explain.results.notices import CHUNK
from rag_explain.retrieval import (
    Embedder,
    Encoders,
    Engine,
    HitExplainer,
    Place,
    RetrievedDocument,
    collecting,
    inside,
    models_inside,
    report,
)
from rag_explain.texts.passage import Passage
from rag_explain.types import Hit
from tests.support.models import CORPUS, tiny

QUERY = "where is the cat?"


class Part:
    """What is passed through."""

    def __init__(self, *kept: Any, **named: Any) -> None:
        self.kept = kept
        vars(self).update(named)


class Wanted:
    """What is looked for."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner


def wanted(holder: object) -> list[Any]:
    return inside(holder, lambda one: isinstance(one, Wanted), (Part,))


@cache
def explainer() -> Explainer:
    return Explainer(tiny(dtype=torch.float32))


def embedder(model: SentenceTransformer, prefix: str = "") -> Embedder:
    holder = SimpleNamespace(model=model, prefix=prefix)

    def embed(held: Any, text: str) -> Any:
        return held.model.encode(held.prefix + text)

    return Embedder(holder, {"query": embed, "document": embed})


def test_what_is_wanted_is_found_however_deep_and_each_once_the_nearest_first() -> None:
    one, two, three = Wanted(), Wanted(), Wanted()
    assert wanted(one) == [one]
    assert wanted(Part(Part(Part(Part(Part(two)))), one, one, second=two)) == [one, two]
    assert wanted(SimpleNamespace(searcher=SimpleNamespace(store=three))) == [three]
    assert wanted(Part(SimpleNamespace(many=[one, Part(two)]), three={"c": three})) == [three, one, two]


def test_what_is_found_is_not_looked_into_and_other_objects_one_step_alone() -> None:
    hidden = Wanted()
    outer = Wanted(hidden)
    assert wanted(Part(outer)) == [outer]
    assert wanted(Part(SimpleNamespace(far=SimpleNamespace(farther=hidden)))) == []
    assert wanted(None) == wanted("text") == wanted(Part([], {}, 3)) == []


def test_a_circle_ends() -> None:
    part, found = Part(), Wanted()
    part.kept = (part, Part(part, found))
    assert wanted(part) == [found]


def test_a_long_list_is_looked_at_if_its_first_entry_is_wanted() -> None:
    found = [Wanted() for _ in range(100)]
    assert wanted(SimpleNamespace(many=found)) == found
    assert wanted(SimpleNamespace(many={str(number): one for number, one in enumerate(found)})) == found
    assert wanted(SimpleNamespace(many=[object()] * 100 + found)) == []  # documents, say: no search may read them all


def test_models_are_found_in_lists_too() -> None:
    model = tiny(dtype=torch.float32)
    assert models_inside(Part(many=[SimpleNamespace(model=model)]), (Part,)) == [model]
    assert models_inside(SimpleNamespace(one=SimpleNamespace(two=SimpleNamespace(three=model))), (Part,)) == [model]
    assert models_inside(Part(), (Part,)) == []


def test_encoders_that_embed_alike_are_one() -> None:
    model, copy, other = tiny(dtype=torch.float32), tiny(dtype=torch.float32), tiny("roberta", dtype=torch.float32)
    model.encode("used before")
    mine, encoders = embedder(model), Encoders()
    for same in (mine, Embedder(mine.holder, mine.calls), embedder(model), embedder(copy)):
        assert encoders.among([(mine, mine), (same, same)]) == [(mine, mine)]
    for differs in (embedder(other), embedder(model, "where: ")):
        assert encoders.among([(mine, mine), (differs, differs), (mine, mine)]) == [(mine, mine), (differs, differs)]
    remote = Embedder(object(), mine.calls)
    assert encoders.among([(None, remote), (mine, mine)]) == [(mine, mine)]  # what cannot explain is no other choice
    assert encoders.among([(None, remote)]) == [(None, remote)]
    assert encoders.among([(explainer(), remote), (explainer(), None)]) == [(explainer(), None)]
    assert encoders.among([]) == []


def test_a_model_that_is_changed_in_place_is_another_encoder() -> None:
    model, copy = tiny(dtype=torch.float32), tiny(dtype=torch.float32)
    pair = [(one, one) for one in (embedder(model), embedder(copy))]
    encoders = Encoders()
    assert len(encoders.among(pair)) == 1
    with torch.no_grad():
        next(copy.parameters()).add_(1.0)
    assert len(encoders.among(pair)) == 2


def test_one_is_chosen_and_several_are_refused_with_their_names() -> None:
    mine, theirs = embedder(tiny(dtype=torch.float32)), embedder(tiny("roberta", dtype=torch.float32))
    theirs.holder.model_name = "a/b"  # type: ignore[attr-defined]
    encoders, both = Encoders(), [(mine, mine), (theirs, theirs)]
    assert encoders.chosen([(mine, mine)], None) == (mine, mine)
    assert encoders.chosen(both, None) == (None, None)
    assert encoders.chosen(both, theirs) == (theirs, theirs)
    assert encoders.chosen([(mine, mine)], "a model") == ("a model", mine)
    with pytest.raises(InvalidInput, match=r"nothing that embeds was found in Part: pass .* embeds its nodes"):
        encoders.refuse([], Part(), "nodes")
    with pytest.raises(
        InvalidInput, match=r"Part holds several encoders .SimpleNamespace with BertModel and Simpl.* a/b"
    ):
        encoders.refuse(both, Part(), "documents")


def hit(name: str, **options: Any) -> Hit:
    handle: Deferred[Any] = options.pop("handle", Deferred.ready(None))
    return Hit(id=name, text="t", rank=1, score=None, metric="cosine", handle=handle)


def test_hits_that_are_made_inside_are_found_by_their_keys_and_the_first_stays() -> None:
    first, second, skipped = hit("first"), hit("second"), hit("skipped", handle=Deferred.skipped("not asked for"))
    report([(("key",), first)])  # outside of all retrievers: nothing keeps it
    with collecting() as outer:
        assert outer.find(["key"]) is None
        report([(("s",), skipped), (("id", "text"), first), (("text",), second)])
        with collecting() as inner:
            report([(("deep",), second)])
        assert inner.find(["deep"]) is second
    assert [outer.find(keys) for keys in (["id"], ["nothing", "text"], ["s"], ["deep"], [])] == [
        first,
        first,
        None,
        None,
        None,
    ]


def test_hits_of_threads_and_tasks_inside_are_collected_and_those_of_others_are_not() -> None:
    with ThreadPoolExecutor() as pool, collecting() as mine:
        pool.submit(copy_context().run, report, [(("inside",), hit("inside"))]).result()
        pool.submit(report, [(("other",), hit("other"))]).result()
    assert mine.find(["other"]) is None
    assert mine.find(["inside"]) is not None

    async def search(name: str) -> bool:
        with collecting() as own:
            await asyncio.gather(*(asyncio.to_thread(report, [((name, part), hit(name))]) for part in "ab"))
            await asyncio.sleep(0)
        return {own.find([key]).id for key in (name, "a", "b")} == {name}  # type: ignore[union-attr]

    async def many() -> list[bool]:
        return list(await asyncio.gather(*(search(f"query {number}") for number in range(20))))

    assert all(asyncio.run(many()))


# ---------------------------------------------------------------------- chunks


def chunk(text: str | Passage, start: int | None, whole: str) -> RetrievedDocument:
    return RetrievedDocument(id="whole", text=text, whole=whole, start=start, vector_id="chunk-7")


def test_a_chunk_is_explained_alone_and_shown_in_its_document() -> None:
    whole = f"{CORPUS[0]} {CORPUS[1]}"
    start = whole.index(CORPUS[1])
    alone = explainer().explain(QUERY, CORPUS[1], unit="word")
    header = Passage(f"by anna\n{CORPUS[1]}", 8)
    for text, expected in ((CORPUS[1], alone), (header, explainer().explain(QUERY, header, unit="word"))):
        (found,) = HitExplainer(explainer(), metric="cosine").hits(QUERY, [chunk(text, start, whole)])
        assert (found.text, found.chunk) == (whole, (start, len(whole)))
        why = found.explanation
        assert why is not None
        assert why.score == pytest.approx(expected.score, abs=1e-6)
        assert why.document == whole
        moved = [(one.start - start, one.end - start, one.text) for one in why.document_tokens]
        assert moved == [(one.start, one.end, one.text) for one in expected.document_tokens]
        (notice,) = [one for one in why.notices if one.code == CHUNK]
        assert f"characters {start:,} to {len(whole):,}" in notice.text
        for part in (found.highlights, found.evidence):
            assert part is not None
            assert part.document == whole
            assert all(whole[span.start : span.end] == span.text and span.start >= start for span in part)
        (before, *_), (after, *_) = pieces(why, "document"), pieces(why, "document")[::-1]
        assert (before.text, before.is_read, after.is_read) == (whole[:start], False, True)
        assert f"characters {start:,} to" in found.to_html()


def test_what_stands_nowhere_in_the_document_is_explained_alone() -> None:
    (found,) = HitExplainer(explainer()).hits(QUERY, [chunk(CORPUS[1], None, CORPUS[0])])
    assert (found.text, found.chunk) == (CORPUS[1], None)
    assert found.explanation is not None
    assert found.explanation.document == CORPUS[1]
    assert "does not stand in it" in str(found.explanation.notices)


def test_vectors_are_asked_for_by_the_chunks_own_name() -> None:
    asked: list[str] = []

    class Other(Engine):
        """Keeps the vector of another text."""

        @classmethod
        def of(cls, handle: object, place: Place) -> None:
            return None

        def told_metric(self) -> Metric:
            return Metric("cosine")

        def vectors(self, ids: Sequence[str]) -> dict[str, Any]:
            asked.extend(ids)
            return {"chunk-7": explainer().document_vectors(["the sun"])[0]}

    wrapper = HitExplainer(explainer(), engine=lambda: Other(None))
    (found,) = wrapper.hits(QUERY, [chunk(CORPUS[1], 0, CORPUS[1])])
    assert found.explanation is not None
    assert "index's vector of this document is not the one" in (found.explanation.surrogate or "")
    assert asked == ["chunk-7"]


def test_a_hit_that_is_known_is_kept_with_the_stage_that_came_after() -> None:
    wrapper = HitExplainer(explainer(), metric="cosine", name="inner")
    one, two = wrapper.hits(QUERY, [RetrievedDocument(id=text, text=text, score=0.5) for text in CORPUS[:2]])
    documents = [RetrievedDocument(id=text, text=text) for text in (CORPUS[1], CORPUS[2], CORPUS[0])]
    first, second, third = HitExplainer(explainer(), name="outer").hits(QUERY, documents, known=[two, None, one])
    assert (first.handle, third.handle) == (two.handle, one.handle)
    assert [stage.name for stage in first.stages] == [stage.name for stage in third.stages] == ["inner", "outer"]
    assert [stage.name for stage in second.stages] == ["outer"]
    assert [found.rank for found in (first, second, third)] == [1, 2, 3]
    (same,) = HitExplainer(explainer(), name="outer").hits(QUERY, documents[2:], known=[one])
    assert [(stage.name, stage.kind) for stage in same.stages] == [("inner", "search"), ("outer", "filter")]
    assert (same.score, same.metric) == (0.5, "cosine")
