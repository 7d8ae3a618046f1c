"""Chunks of one document put back together: in its order, with their places, nothing shown twice."""

from __future__ import annotations

import json
from dataclasses import replace

from rag_explain.render.notebook import draw as draw_notebook
from rag_explain.results.deferred import Deferred
from rag_explain.results.hits import Hits
from tests.support.samples import explain, hits

WHOLE = "The bank sends a letter. Reset your password there. Cards are not affected. Nobody reads it twice."


def chunks(*spans: tuple[int, int], **metadata: object) -> Hits:
    made = zip(hits(documents=[WHOLE[start:end] for start, end in spans]), spans, strict=True)
    return Hits(
        replace(hit, metadata={"source": "manual.md", "start_index": span[0], **metadata}) for hit, span in made
    )


def test_chunks_stand_in_the_order_of_their_document_with_their_places() -> None:
    found = chunks((52, 75), (0, 24), (76, 98)).by_document()
    (document,) = found.documents
    assert document.id == "manual.md"
    assert document.starts == (0, 52, 76)
    assert [hit.rank for hit in document.hits] == [2, 1, 3]
    assert document.rank == 1
    shown = str(found)
    assert "characters 52 to 75" in shown
    assert "… 28 characters that were not returned" in shown
    assert shown.index("The bank") < shown.index("Cards") < shown.index("Nobody")


def test_what_two_chunks_have_in_common_is_shown_once() -> None:
    shown = draw_notebook(chunks((0, 51), (25, 75)).by_document()._view())
    assert shown.count(">password<") == 1
    assert shown.count(">Cards<") == 1


def test_chunks_without_a_place_come_last_and_other_hits_stay_apart() -> None:
    first, second = chunks((0, 24), (25, 51))
    lost = replace(first, metadata={"source": "manual.md"}, rank=4, handle=Deferred.skipped("not asked for"))
    alone = replace(second, metadata={}, id="alone", rank=3)
    found = Hits([lost, second, alone]).by_document()
    assert [(one.id, one.starts) for one in found.documents] == [("manual.md", (25, None)), ("alone", (None,))]
    assert "No explanation (skipped)" in str(found)
    assert str(Hits([]).by_document()) == "no hits"
    assert [one["start"] for one in json.loads(json.dumps(found.to_dict()))["documents"][0]["chunks"]] == [25, None]


def test_a_document_and_an_owner_of_one_name_are_two() -> None:
    one, other = chunks((0, 24), (25, 51))
    found = Hits([one, replace(other, id="manual.md", metadata={})]).by_document()
    assert [len(document.hits) for document in found.documents] == [1, 1]


def test_chunks_share_one_scale() -> None:
    weak = explain(document=WHOLE[:24])
    weak = replace(weak, matrix=weak.matrix / 10, score=weak.score / 10)
    one, other = chunks((0, 24), (25, 51))
    view = Hits([replace(one, handle=Deferred.ready(weak)), other]).by_document()._view()
    scales = {block.scale for section in view[1:] for block in section.blocks if hasattr(block, "scale")}
    assert len(scales) == 1
