"""Which path serves a document, and that all paths say the same."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rag_explain import Explainer
from rag_explain.errors import InvalidInput, StoreError
from rag_explain.results.notices import TRUNCATED, UNKNOWN
from rag_explain.results.precomputed import Precomputed
from rag_explain.store import Store
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Unit
from tests.support.models import CORPUS, tiny

QUERY = "the cat looked at paris"
LONG = " ".join(CORPUS)


def paths(explanations) -> list[str]:
    return [explanation.provenance["path"] for explanation in explanations]


@pytest.mark.parametrize("method", ["bilrp", "hxp"])
def test_every_path_gives_the_same_explanation(method: str, tmp_path: Path) -> None:
    with Explainer(tiny("bert"), method, store=Store(tmp_path, precision="fp32")) as explainer:
        cold = explainer.explain_many(QUERY, [LONG, *CORPUS])
        assert paths(cold)[0] == "cold"
        explainer.precompute([LONG, *CORPUS], unit="token", progress=False)
        warm = explainer.explain_many(QUERY, [LONG, *CORPUS])
        assert set(paths(warm)) == {"memory"}
        explainer.store.close()
    with Explainer(tiny("bert"), method, store=Store(tmp_path, precision="fp32")) as explainer:
        disk = explainer.explain_many(QUERY, [LONG, *CORPUS])
        assert set(paths(disk)) == {"disk"}
        explainer.store.close()
    for one, two, three in zip(cold, warm, disk, strict=True):
        np.testing.assert_allclose(one.matrix, two.matrix, atol=2e-5)
        # The same rounded rows; a product may add them up in another order.
        np.testing.assert_allclose(two.matrix, three.matrix, atol=1e-6)
        assert one.document_tokens == two.document_tokens == three.document_tokens
        assert one.score == pytest.approx(two.score, abs=1e-5)
        assert abs(two.gap) < 1e-4
        assert (one.document, one.truncated, one.fingerprint) == (three.document, three.truncated, three.fingerprint)
        assert two.provenance["seconds"] > 0


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_rounded_factors_still_add_up_nearly(precision: str, tmp_path: Path) -> None:
    with Store(tmp_path, precision=precision) as store, Explainer(tiny("bert"), store=store) as explainer:
        exact = Explainer(tiny("bert")).explain(QUERY, LONG)
        explainer.precompute([LONG], unit="token", progress=False)
        rounded = explainer.explain(QUERY, LONG)
        error = np.linalg.norm(rounded.matrix - exact.matrix) / np.linalg.norm(exact.matrix)
        assert error < {"fp16": 5e-4, "int8": 1e-2}[precision]
        assert rounded.score == pytest.approx(exact.score, abs=1e-6)


def test_documents_that_are_looked_at_again_are_built_and_kept() -> None:
    with Explainer(tiny("bert")) as explainer:
        seen = [paths(explainer.explain_many(f"{QUERY} {look}", [LONG]))[0] for look in range(60)]
    assert seen[0] == "cold"
    assert seen[-1] == "memory"
    assert seen.count("built") == 1
    assert seen == sorted(seen, key=["cold", "built", "memory"].index)


def test_a_long_query_builds_at_once() -> None:
    with Explainer(tiny("bert")) as explainer:
        assert paths(explainer.explain_many(LONG, ["a cat"])) == ["built"]


def test_one_call_may_take_every_path(tmp_path: Path) -> None:
    with Explainer(tiny("bert"), store=tmp_path) as explainer:
        explainer.precompute([CORPUS[0], CORPUS[1]], unit="token", progress=False)
    with Explainer(tiny("bert"), store=tmp_path) as explainer:
        explainer.explain_many(QUERY, [CORPUS[1]])
        documents = [CORPUS[0], LONG, CORPUS[1], "moon", LONG, CORPUS[0]]
        explanations = explainer.explain_many(QUERY, documents)
        assert paths(explanations) == ["disk", "cold", "memory", "built", "cold", "disk"]
        assert [explanation.document for explanation in explanations] == documents


def test_a_store_made_with_other_weights_is_a_miss(tmp_path: Path) -> None:
    with Explainer(tiny("bert"), store=tmp_path) as explainer:
        explainer.precompute(CORPUS, unit="token", progress=False)
    other = tiny("bert")
    with torch.no_grad():
        next(other.parameters()).mul_(1.01)
    with Explainer(other, store=tmp_path) as explainer:
        assert {"disk", "memory"}.isdisjoint(paths(explainer.explain_many(QUERY, CORPUS)))
    with Explainer(tiny("bert"), "hxp", store=tmp_path) as explainer:
        assert {"disk", "memory"}.isdisjoint(paths(explainer.explain_many(QUERY, CORPUS)))
    with Explainer(tiny("bert"), layer=1, store=tmp_path) as explainer:
        assert {"disk", "memory"}.isdisjoint(paths(explainer.explain_many(QUERY, CORPUS)))
    with Explainer(tiny("bert"), store=Store(tmp_path, precision="int8")) as explainer:
        assert {"disk", "memory"}.isdisjoint(paths(explainer.explain_many(QUERY, CORPUS)))
        explainer.store.close()


def test_the_same_string_with_another_text_in_it_is_another_document(tmp_path: Path) -> None:
    with Explainer(tiny("bert"), store=tmp_path) as explainer:
        string = "title: moon " + CORPUS[0]
        passages = [string, Passage(string, 12), Passage(string, 12, 20)]
        explainer.precompute(passages, unit="token", progress=False)
        for passage, explanation in zip(passages, explainer.explain_many(QUERY, passages), strict=True):
            assert explanation.provenance["path"] == "memory"
            text = passage if isinstance(passage, str) else passage.text
            assert explanation.document == text
            assert all(token.text == text[token.start : token.end] for token in explanation.document_tokens)


def test_precompute_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{sentence} {number}" for number in range(8) for sentence in CORPUS]
    monkeypatch.setattr("rag_explain.planner._WINDOW", 10)

    def interrupted():
        for number, text in enumerate(texts):
            if number == 25:
                raise KeyboardInterrupt
            yield text

    with Explainer(tiny("bert"), store=tmp_path) as explainer, pytest.raises(KeyboardInterrupt):
        explainer.precompute(interrupted(), unit="token", progress=False)
    with Explainer(tiny("bert"), store=tmp_path) as explainer:
        assert explainer.precompute(texts, unit="token", progress=False).built == 20
        assert explainer.precompute(texts, unit="token", progress=False).built == 0


def test_precompute_does_not_work_for_nothing(tmp_path: Path) -> None:
    for store in (Store(memory_bytes=100), Store(tmp_path, max_bytes=100)):
        with store, Explainer(tiny("bert"), store=store) as explainer, pytest.raises(StoreError, match="nothing"):
            explainer.precompute(CORPUS, unit="token", progress=False)


def test_precompute_shows_its_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Explainer(tiny("bert"), store=tmp_path) as explainer:
        assert explainer.precompute([*CORPUS, CORPUS[0]]).built == 5
    captured = capsys.readouterr()
    assert "6/6" in captured.err
    assert captured.out == ""


def test_documents_are_erased_by_id(tmp_path: Path) -> None:
    with Explainer(tiny("bert"), store=tmp_path) as explainer:
        explainer.precompute(CORPUS[:2], unit="token", progress=False, ids=["a", "b"])
        explainer.explain_many(LONG, ["moon", CORPUS[1]], ids=["c", "second name"])
        assert explainer.store.forget(["a", "c", "second name"]) == 3
        assert explainer.store.info()["disk"]["rows"] == 0
    assert b"moon" not in (tmp_path / "factors.sqlite").read_bytes()


def test_ids_are_added_to_documents_that_are_kept_already(tmp_path: Path) -> None:
    with Explainer(tiny("bert"), store=tmp_path) as explainer:
        explainer.precompute([CORPUS[0]], unit="token", progress=False)
        assert explainer.precompute([CORPUS[0]], unit="token", progress=False, ids=["late"]).built == 0
        assert explainer.store.forget(["late"]) == 1


def test_wrong_ids_are_refused() -> None:
    with Explainer(tiny("bert")) as explainer:
        with pytest.raises(InvalidInput, match="one id"):
            explainer.explain_many(QUERY, CORPUS, ids=["a"])
        with pytest.raises(InvalidInput, match="one id"):
            explainer.explain_many(QUERY, ["x", "y"], ids="ab")
        with pytest.raises(InvalidInput, match="list"):
            explainer.precompute("one text")
        with pytest.raises(InvalidInput, match="list"):
            explainer.explain_many(QUERY, None)  # type: ignore[arg-type]  # the mistake under test
        assert explainer.explain_many(QUERY, []) == []


@pytest.mark.parametrize("ids", [[17], [b"a"], 17, ["a", "b"], [], "a"])
def test_ids_that_no_store_could_find_again_are_refused_at_once(ids: Any) -> None:
    with Explainer(tiny("bert")) as explainer:
        for texts in (CORPUS[:1], (text for text in CORPUS[:1])):
            with pytest.raises(InvalidInput, match="id"):
                explainer.precompute(texts, unit="token", progress=False, ids=ids)
        if isinstance(ids, list):
            with pytest.raises(InvalidInput, match="id"):
                explainer.precompute(CORPUS[:1], unit="token", progress=False, ids=iter(ids))
        with pytest.raises(InvalidInput, match="id"):
            explainer.explain_many(QUERY, CORPUS[:1], ids=ids)
        assert explainer.store.info()["memory"] == Store().info()["memory"]


def test_precompute_counts_what_was_built_kept_and_failed(caplog: pytest.LogCaptureFixture) -> None:
    with Explainer(tiny("bert")) as explainer:
        texts = [CORPUS[0], None, *CORPUS, "\ud800", CORPUS[0]]
        assert explainer.precompute(texts, unit="token", progress=False) == Precomputed(built=5, kept=7, failed=2)  # type: ignore[arg-type]
        assert "a text must be a string, not NoneType" in caplog.text
        assert len(caplog.records) == 1
        done = explainer.precompute([*CORPUS, "moon"], unit="token", progress=False)
        assert done == Precomputed(built=1, kept=6, failed=0)
        assert str(done) == "1 texts were built now, 6 of those given are in the store, none failed"


def test_precompute_does_not_say_that_a_small_store_keeps_all() -> None:
    texts = [f"{sentence} {number}" for number in range(20) for sentence in CORPUS]
    with Explainer(tiny("bert"), store=Store(memory_bytes=20_000)) as explainer:
        done = explainer.precompute(texts, unit="token", progress=False)
        explained = explainer.explain_many(QUERY, texts)
        assert done.built == 100
        assert 0 < done.kept == paths(explained).count("memory") < 100


@pytest.mark.parametrize("stage", ["read", "factor"])
def test_a_text_that_makes_the_model_fail_does_not_stop_the_others(
    stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    explainer = Explainer(tiny("bert"))
    owner: Any = explainer.scorer if stage == "read" else explainer.method
    right = getattr(owner, stage)

    def poisoned(first: Any, *more: Any) -> Any:
        passages = first if stage == "read" else first.passages
        if any("moon" in passage.text for passage in passages):
            raise RuntimeError("moonstruck")
        return right(first, *more)

    monkeypatch.setattr(owner, stage, poisoned)
    assert explainer.precompute([*CORPUS, CORPUS[0]]) == Precomputed(built=4, kept=4, failed=2)
    assert "6/6" in capsys.readouterr().err


def test_alignment_counts_a_text_without_words_as_failed() -> None:
    explainer = Explainer(tiny("bert"), "alignment")
    assert explainer.precompute(["", *CORPUS], unit="token", progress=False) == Precomputed(built=5, kept=5, failed=1)


def test_threads_build_each_document_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Explainer(tiny("bert")) as explainer:
        built: list[str] = []
        factor = explainer.method.factor

        def counted(batch, unit):
            if batch.role == "document":
                built.extend(passage.text for passage in batch.passages)
            return factor(batch, unit)

        monkeypatch.setattr(explainer.method, "factor", counted)
        texts = ["moon", "cat", "dog"]
        threads = [threading.Thread(target=explainer.explain_many, args=(LONG, texts)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(built) == sorted(texts)


@pytest.mark.parametrize("memory_bytes", [0, 3000])
def test_threads_share_what_one_of_them_built_where_nothing_is_kept(
    memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    wanted: list[bytes] = []
    all_want = threading.Event()
    with Store(memory_bytes=memory_bytes) as store, Explainer(tiny("bert"), store=store) as explainer:
        factor, hold = explainer.method.factor, store._building.hold

        def counted(batch, unit):
            if batch.role == "document":
                assert all_want.wait(300)
                built.extend(passage.text for passage in batch.passages)
            return factor(batch, unit)

        def heard(keys):
            wanted.extend(keys)
            if len(wanted) == 12:
                all_want.set()
            return hold(keys)

        monkeypatch.setattr(explainer.method, "factor", counted)
        monkeypatch.setattr(store._building, "hold", heard)
        threads = [threading.Thread(target=explainer.explain_many, args=(LONG, ["moon", "cat"])) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(built) < len(wanted) == 12  # those that waited took the result, though the store kept nothing


def test_documents_that_are_forgotten_while_they_are_built_do_not_look_like_a_full_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Store() as store, Explainer(tiny("bert"), store=store) as explainer:
        factor = explainer.method.factor

        def forgotten(batch, unit):
            store.forget(["a", "b"])
            return factor(batch, unit)

        monkeypatch.setattr(explainer.method, "factor", forgotten)
        found = explainer.precompute(["moon", "cat"], ids=["a", "b"], progress=False)
        assert (found.built, found.kept, found.failed) == (2, 0, 0)


def test_a_store_that_was_given_open_stays_open(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        with Explainer(tiny("bert"), store=store) as explainer:
            explainer.precompute(CORPUS[:1], unit="token", progress=False)
        assert store.info()["disk"]["rows"] == 1
        with Explainer(tiny("bert"), store=store) as explainer:
            assert paths(explainer.explain_many(QUERY, CORPUS[:1])) == ["memory"]


@pytest.mark.parametrize("unit", ["token", "word", "sentence"])
def test_every_path_says_the_same_about_what_was_not_read(unit: Unit, tmp_path: Path) -> None:
    model = tiny("bert")
    model.max_seq_length = 12
    document = f"🐝 xyzzy {CORPUS[0]} {CORPUS[1]}"
    with Explainer(model, store=tmp_path) as explainer:
        found = [explainer.explain(QUERY + " 🚗", document, unit=unit) for _ in range(12)]
        # The rows of a few sentences cost no more than one look, and are built at once.
        assert set(paths(found)) == {"built", "memory"} | (set() if unit == "sentence" else {"cold"})
    with Explainer(model, store=tmp_path) as explainer:
        found.append(explainer.explain(QUERY + " 🚗", document, unit=unit))
        assert paths(found)[-1] == "disk"
    expected = [(UNKNOWN, "query"), (UNKNOWN, "document"), (TRUNCATED, "document")]
    assert [(notice.code, notice.side) for notice in found[0].notices] == expected
    assert {one.notices for one in found} == {found[0].notices}


def test_what_was_just_explained_is_compared_without_asking_the_store_again(monkeypatch: Any) -> None:
    explainer = Explainer(tiny("bert"))
    explainer.precompute(CORPUS, ids=[str(number) for number in range(len(CORPUS))], progress=False)
    fresh = explainer.document_vectors(CORPUS)
    explainer.explain_many(QUERY, CORPUS, unit="sentence")
    asked: list[Any] = []
    get = explainer.store.get
    monkeypatch.setattr(explainer.store, "get", lambda *args: asked.append(args) or get(*args))
    np.testing.assert_array_equal(explainer.document_vectors(CORPUS), fresh)
    assert not asked
    explainer.store.forget(["0"])  # nothing of it is kept by what it was explained with
    np.testing.assert_allclose(explainer.document_vectors(CORPUS), fresh, atol=1e-6)
    assert asked
