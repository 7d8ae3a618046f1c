"""verify: a record computed again with the model at hand; diff: two encoders on the same queries."""

from __future__ import annotations

import json
import stat
from dataclasses import replace

import numpy as np
import pytest

from rag_explain import Explainer
from rag_explain.log import ExplanationLog, patterns
from rag_explain.log.diff import diff
from rag_explain.log.files import Folder
from rag_explain.log.verify import verify
from rag_explain.probes import Probes
from rag_explain.results.deferred import Deferred
from rag_explain.results.hits import Hit, Hits
from rag_explain.retrieval import HitExplainer, RetrievedDocument
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Token
from tests.support.answers import DOCUMENTS, QUERY, explanation, hit, hits
from tests.support.models import tiny


@pytest.fixture(scope="module")
def explainer():
    return Explainer(tiny("bert"))


def search(explainer: Explainer, query: str = QUERY, order: tuple[int, ...] = (0, 1, 2)) -> list[Hit]:
    found = explainer.explain_many(query, DOCUMENTS)
    return [
        Hit(
            id=f"doc-{at}",
            text=DOCUMENTS[at],
            rank=rank,
            score=found[at].score,
            metric="cosine",
            handle=Deferred.ready(found[at]),
        )
        for rank, at in enumerate(order)
    ]


def written(path, explainer, **settings):
    with ExplanationLog(path, **settings) as log:
        log.record(query=QUERY, answer="By the sun.", hits=search(explainer))
    return path


def test_a_record_holds_with_the_same_model(tmp_path, explainer):
    verdicts = list(verify(written(tmp_path, explainer), lambda logged: explainer))
    assert [verdict.outcome for verdict in verdicts] == ["holds"] * 3
    assert [verdict.document for verdict in verdicts] == ["doc-0", "doc-1", "doc-2"]
    assert all(verdict.shift < 1e-5 and not verdict.reason for verdict in verdicts)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0, 1e6])
def test_numbers_are_compared_relative_to_their_size(tmp_path, scale):
    """A dot product of 300 is logged with six digits, and one of 0.0001 must not hold when it is another."""
    why = explanation()
    why = replace(why, matrix=scale * why.matrix, score=scale * why.score, measure="dot", probes=None)
    with ExplanationLog(tmp_path) as log:
        log.record(query=QUERY, hits=[hit(handle=Deferred.ready(why))])

    class Again:
        def __init__(self, factor):
            self.factor = factor

        def explain(self, query, passage, unit):
            found = replace(why, matrix=self.factor * why.matrix, score=self.factor * why.score)
            return found.grouped(unit)

    for factor, outcome in ((1.0, "holds"), (1 + 1e-5, "holds"), (1.01, "moved"), (-1.0, "moved")):
        (verdict,) = verify(tmp_path, lambda logged, factor=factor: Again(factor))
        assert verdict.outcome == outcome, factor


def test_a_model_that_fails_in_its_own_way_leaves_the_other_records(tmp_path, explainer):
    def load(logged):
        raise OSError("no such file")

    verdicts = list(verify(written(tmp_path, explainer), load))
    assert {(verdict.outcome, verdict.reason) for verdict in verdicts} == {("unknown", "OSError: no such file")}


def test_explanations_by_sentence_are_compared_by_sentence(tmp_path, explainer):
    for name in ("before", "after"):
        with ExplanationLog(tmp_path / name, matrices=True) as log:
            why = explainer.explain(QUERY, " ".join(DOCUMENTS)).by_sentence()
            log.record(query=QUERY, hits=[hit(" ".join(DOCUMENTS), handle=Deferred.ready(why))])
    (verdict,) = verify(tmp_path / "before", lambda logged: explainer)
    assert verdict.outcome == "holds"
    (move,) = diff(tmp_path / "before", tmp_path / "after")
    assert move.pairs[0].document in DOCUMENTS
    assert move.pairs[0].change == pytest.approx(0, abs=1e-6)  # the planner may take the other path the second time


def test_another_model_is_told(tmp_path, explainer):
    other = Explainer(tiny("distilbert"))
    verdicts = list(verify(written(tmp_path, explainer), lambda logged: other))
    assert {verdict.outcome for verdict in verdicts} == {"moved"}
    assert "fingerprint" in verdicts[0].reason


def test_another_method_is_told(tmp_path, explainer):
    other = Explainer(tiny("bert"), "hxp")
    (verdict, *_) = verify(written(tmp_path, explainer), lambda logged: other)
    assert verdict.outcome == "moved"
    assert "method is 'hxp', was 'bilrp'" in verdict.reason
    assert "settings" in verdict.reason


def test_a_document_that_changed_since_is_told(tmp_path, explainer):
    path = written(tmp_path, explainer)
    verdicts = list(verify(path, lambda logged: explainer, documents={"doc-1": "Now it says something else."}))
    assert [verdict.outcome for verdict in verdicts] == ["holds", "changed", "holds"]


def test_without_a_model_hashes_are_checked(tmp_path, explainer):
    path = written(tmp_path, explainer)
    assert [verdict.outcome for verdict in verify(path)] == ["holds"] * 3


def test_texts_that_were_not_kept_cannot_be_computed_again(tmp_path, explainer):
    path = written(tmp_path, explainer, keep_text=False)
    verdicts = list(verify(path, lambda logged: explainer))
    assert {(verdict.outcome, verdict.reason) for verdict in verdicts} == {("unknown", "the texts were not kept")}


def test_redacted_texts_cannot_be_computed_again(tmp_path, explainer):
    path = written(tmp_path, explainer, redact=lambda text: [(0, 3)])
    assert {verdict.reason for verdict in verify(path, lambda logged: explainer)} == {"the query is redacted"}


def test_keyed_hashes_need_the_key(tmp_path, explainer):
    key = b"0123456789abcdef"
    path = written(tmp_path, explainer, hash_key=key)
    assert {verdict.reason for verdict in verify(path)} == {"its hashes are keyed: give the key"}
    assert {verdict.outcome for verdict in verify(path, hash_key=key)} == {"holds"}
    assert {verdict.outcome for verdict in verify(path, hash_key=key[::-1])} == {"changed"}


def test_damage_is_found(tmp_path, explainer):
    path = written(tmp_path, explainer)
    current = Folder(path).current
    current.write_bytes(current.read_bytes().replace(b"Honeybees", b"Bumblebee"))
    assert [verdict.outcome for verdict in verify(path, lambda logged: explainer)] == ["damaged"]


def test_what_was_embedded_beside_the_text_is_not_guessed(tmp_path, explainer):
    why = explanation()
    tokens = (*why.document_tokens[:-1], Token("", 0, 0, "metadata", "title"))
    with ExplanationLog(tmp_path) as log:
        log.record(query=QUERY, hits=[hit(handle=Deferred.ready(explanation(document_tokens=tokens)))])
    (verdict,) = verify(tmp_path, lambda logged: explainer)
    assert verdict.outcome == "unknown"
    assert "more than the document's text" in verdict.reason


def embedded_with_metadata(explainer: Explainer) -> Hits:
    passage = Passage(f"title: by anna\n\n{DOCUMENTS[0]}\n\nlang: en", 16, 16 + len(DOCUMENTS[0]))
    assert passage.text == DOCUMENTS[0]
    return HitExplainer(explainer).hits(QUERY, [RetrievedDocument(id="doc-0", text=passage, score=None)], "eager")


def test_what_was_embedded_beside_the_text_is_kept_and_computed_again(tmp_path, explainer):
    found = embedded_with_metadata(explainer)
    with ExplanationLog(tmp_path) as log:
        log.record(query=QUERY, hits=found)
    (verdict,) = verify(tmp_path, lambda logged: explainer)
    assert verdict.outcome == "holds"
    assert verdict.shift < 1e-5
    assert abs(explainer.explain(QUERY, DOCUMENTS[0]).score - verdict.score) > 1e-3  # it does make a difference
    (record,) = ExplanationLog(tmp_path).records()
    assert record.hits[0].around == found[0].around == ("title: by anna\n\n", "\n\nlang: en")
    (verdict,) = verify(tmp_path, lambda logged: explainer, documents={"doc-0": "Another text."})
    assert verdict.outcome == "changed"


def test_what_was_embedded_beside_the_text_is_redacted_keyed_left_out_and_erased_like_the_text(tmp_path, explainer):
    found = embedded_with_metadata(explainer)
    key = b"0123456789abcdef"
    policies = {
        "masked": {"redact": patterns("anna")},
        "other words masked": {"redact": patterns("mondays")},
        "keyed": {"hash_key": key},
        "no text": {"keep_text": False},
    }
    outcomes = {}
    for name, policy in policies.items():
        with ExplanationLog(tmp_path / name, **policy) as log:
            log.record(query=QUERY, hits=found)
        (verdict,) = verify(tmp_path / name, lambda logged: explainer, hash_key=key)
        outcomes[name] = verdict.outcome
        kept = Folder(tmp_path / name).current.read_text()
        assert ("anna" in kept) == (name in ("keyed", "other words masked"))
    assert outcomes == {"masked": "unknown", "other words masked": "holds", "keyed": "holds", "no text": "unknown"}
    with ExplanationLog(tmp_path / "keyed", hash_key=key) as log:
        log.erase(documents=["doc-0"])
    assert "anna" not in Folder(tmp_path / "keyed").current.read_text()


def test_hits_without_explanation_and_erased_ones_are_unknown(tmp_path, explainer):
    with ExplanationLog(tmp_path) as log:
        log.record(query=QUERY, hits=[hit(handle=Deferred(None, status="skipped", reason="too long")), hits()[1]])
        log.erase(documents=["doc-1"])
    reasons = [verdict.reason for verdict in verify(tmp_path, lambda logged: explainer)]
    assert reasons == ["there is no explanation: too long", "the document was erased"]


@pytest.mark.parametrize("matrices", [False, True])
def test_diff_says_which_hits_moved_and_which_pairs_moved_them(tmp_path, explainer, matrices):
    other = Explainer(tiny("roberta"))
    for name, engine, order in (("before", explainer, (0, 1)), ("after", other, (1, 2))):
        with ExplanationLog(tmp_path / name, matrices=matrices, top=3) as log:
            log.record(query="asked only once " + name, hits=[])
            log.record(query=QUERY, hits=hits())  # asked again below: the last one counts
            log.record(query=QUERY, hits=search(engine, order=order))
    moves = {move.document: move for move in diff(tmp_path / "before", tmp_path / "after", top=4)}
    assert [(d, m.rank_before, m.rank_after) for d, m in sorted(moves.items())] == [
        ("doc-0", 0, None),
        ("doc-1", 1, 0),
        ("doc-2", None, 1),
    ]
    move = moves["doc-1"]
    assert move.moved
    assert move.same_text
    assert len(move.pairs) == 4
    changes = [abs(pair.change) for pair in move.pairs]
    assert changes == sorted(changes, reverse=True)
    old, new = (engine.explain(QUERY, DOCUMENTS[1]).by_word() for engine in (explainer, other))
    if matrices:
        expected = abs(new.pairs.astype(float) - old.pairs).max()
        assert changes[0] == pytest.approx(expected, rel=1e-3)
        assert all(pair.before is not None and pair.after is not None for pair in move.pairs)
    else:
        assert any(pair.before is None or pair.after is None for pair in move.pairs)
    assert not moves["doc-0"].pairs


def test_diff_compares_no_pairs_of_different_texts(tmp_path):
    for name, document in (("before", DOCUMENTS[0]), ("after", DOCUMENTS[1])):
        with ExplanationLog(tmp_path / name) as log:
            log.record(query=QUERY, hits=[hit(document)])
    (move,) = diff(tmp_path / "before", tmp_path / "after")
    assert move.same_text is False
    assert not move.pairs


def test_diff_works_without_text(tmp_path):
    for name, seed in (("before", 1), ("after", 2)):
        with ExplanationLog(tmp_path / name, keep_text=False) as log:
            log.record(query=QUERY, hits=[hit(seed=seed)])
    (move,) = diff(tmp_path / "before", tmp_path / "after")
    assert move.query.startswith("sha256:")
    assert move.pairs[0].document.startswith("[")


def test_what_the_model_computes_is_kept_once_and_tells_that_another_library_computes_it(tmp_path, explainer):
    """The same weights and settings by every digest, and the same numbers for these pairs: only the probes moved."""
    path = written(written(tmp_path, explainer), explainer)
    (line,) = (path / "models.jsonl").read_text().splitlines()
    assert stat.S_IMODE((path / "models.jsonl").stat().st_mode) == 0o600
    kept = json.loads(line)
    assert kept["fingerprint"] == explainer.scorer.fingerprint
    assert not any(word in line for word in (QUERY, *DOCUMENTS))
    moved = Probes.of(value * np.float32(1.01) for value in explainer.scorer.probes.values)
    (path / "models.jsonl").write_text(json.dumps({**kept, "probes": moved.to_dict()}) + "\n")
    verdicts = list(verify(path, lambda logged: explainer))
    assert {verdict.outcome for verdict in verdicts} == {"moved"}
    assert {verdict.reason for verdict in verdicts} == {"the model computes other embeddings than when this was logged"}
    (path / "models.jsonl").write_text(f"not json\n{json.dumps({**kept, 'probes': moved.to_dict()})}\n{line}\n")
    assert {verdict.outcome for verdict in verify(path, lambda logged: explainer)} == {"holds"}


def test_a_log_without_what_the_model_computes_can_be_verified(tmp_path, explainer):
    path = written(tmp_path, explainer)
    (path / "models.jsonl").unlink()
    assert {verdict.outcome for verdict in verify(path, lambda logged: explainer)} == {"holds"}
    assert {verdict.outcome for verdict in verify(path / "log.jsonl", lambda logged: explainer)} == {"holds"}
