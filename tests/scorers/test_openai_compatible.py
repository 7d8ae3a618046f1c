"""A remote model over HTTP: right results whatever the service does, nothing lost, the budget kept, the key nowhere."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_explain import Explainer
from rag_explain.errors import BudgetSpent, EmbedderStopped, EmbeddingFailed, InvalidInput, RagExplainError
from rag_explain.log import ExplanationLog
from rag_explain.retrieval import HitExplainer, RetrievedDocument
from rag_explain.scorers import BlackBox, OpenAICompatible
from tests.support.embedders import Asked
from tests.support.embedding_server import KEY, EmbeddingServer
from tests.support.models import CORPUS, tiny

QUERY = "the cat, or paris?"
DOCUMENTS = ["The cat looked at the moon. Paris is old! A dog (small) barked.", *CORPUS]
MAKING = 5  # four probes, and one again
QUICK = {"first_wait": 0.01, "timeout": 30.0}  # a busy machine may take its time
IMPATIENT = 2.0  # where a call that is never answered is to be given up


def embed(texts: list[str]) -> Any:
    return asked(texts, "document")


asked = Asked(tiny("bert"))


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EmbeddingServer]]:
    """Starts servers, which end with the test."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    running = []

    def start(*faults: str, **options: Any) -> EmbeddingServer:
        context = EmbeddingServer(embed, faults, **options).running()
        server = context.__enter__()
        running.append(context)
        return server

    yield start
    gc.collect()  # clients close their connections
    for context in running:
        context.__exit__(None, None, None)


def client(server: EmbeddingServer, **options: Any) -> OpenAICompatible:
    return OpenAICompatible(server.url, "tiny", **{**QUICK, **options})


def check(explainer: Explainer) -> None:
    """All documents are explained as by the function that is behind the server."""
    local = Explainer(embed)
    for one, other in zip(explainer.explain_many(QUERY, DOCUMENTS), local.explain_many(QUERY, DOCUMENTS), strict=True):
        np.testing.assert_allclose(one.matrix, other.matrix, atol=2e-6)
        assert one.document_tokens == other.document_tokens
        assert one.score == pytest.approx(other.score, abs=1e-6)


def test_a_service_is_named_by_its_address_and_its_model(serve: Any) -> None:
    server = serve()
    explainer = Explainer(f"openai-compatible:{server.url}#tiny")
    assert explainer.scorer.name == "tiny"
    assert len(server.texts) == MAKING
    check(explainer)
    assert {call["model"] for call in server.calls} == {"tiny"}
    assert len(server.texts) == len(set(server.texts)) + 1 == explainer.scorer.budget.sent


FAULTS = ["429", "429 after 0.02", "500", "slow", "drop", "reordered", "base64"]


@pytest.mark.parametrize("fault", FAULTS)
def test_results_are_right_whatever_happens_on_the_way(serve: Any, fault: str) -> None:
    server = serve()
    asking = client(server, timeout=IMPATIENT) if fault == "slow" else client(server)
    explainer = Explainer(BlackBox(asking, batch_size=4, concurrency=1))
    server.faults += [fault, "", fault]
    check(explainer)
    assert not server.faults
    # Each text that was sent is counted, and those of a failed call were sent again.
    assert explainer.scorer.budget.sent == len(server.texts)
    repeated = len(server.texts) - len(set(server.texts)) - 1
    assert repeated == (0 if fault in ("reordered", "base64") else 4 + 1)  # the query's first call and its second


def test_faults_of_all_kinds_among_calls_side_by_side_lose_nothing(serve: Any) -> None:
    server = serve()
    asking = client(server, attempts=20, timeout=IMPATIENT)
    explainer = Explainer(BlackBox(asking, batch_size=2, concurrency=3))
    server.faults += FAULTS * 2
    check(explainer)
    assert not server.faults
    assert explainer.scorer.budget.sent == len(server.texts)


def test_no_more_calls_run_at_once_than_was_said(serve: Any) -> None:
    server = serve()
    explainer = Explainer(BlackBox(client(server), batch_size=1, concurrency=2))
    server.faults += ["at once"] * 8
    check(explainer)
    assert server.most_at_once == 2


def test_retries_are_paid_from_the_budget(serve: Any) -> None:
    server = serve()
    explainer = Explainer(BlackBox(client(server), batch_size=3, concurrency=1, max_calls=MAKING + 5 + 6))
    server.faults += ["", "", "500", "500"]  # the query takes two calls
    with pytest.raises(BudgetSpent):
        explainer.explain(QUERY, DOCUMENTS[0])
    assert len(server.texts) == MAKING + 5 + 6


@pytest.mark.parametrize("faults", [[], ["429", "", "500", "drop", "", "429"] * 4])
def test_threads_together_send_no_text_more_than_may_be_sent(serve: Any, faults: list[str]) -> None:
    server = serve()
    box = BlackBox(client(server, first_wait=0.001), batch_size=3, concurrency=4, max_calls=60)
    explainer = Explainer(box)
    server.faults += faults
    texts = [f"The cat saw {number} dogs. Paris has {number}! The moon: {number}." for number in range(24)]
    together = threading.Barrier(8)

    def explain(mine: list[str]) -> list[str]:
        together.wait()
        found = []
        for text in mine:
            try:
                found.append(str(explainer.explain(QUERY, text).provenance["path"]))
            except BudgetSpent:
                found.append("spent")
        return found

    with ThreadPoolExecutor(8) as pool:
        paths = {path for found in pool.map(explain, [texts[at::8] for at in range(8)]) for path in found}
    assert len(server.texts) == box.budget.sent == 60
    assert "spent" in paths


def test_a_busy_service_is_given_up_after_some_attempts_and_what_is_there_is_kept(serve: Any, tmp_path: Path) -> None:
    server = serve()
    with Explainer(BlackBox(client(server, attempts=3), batch_size=64), store=tmp_path) as explainer:
        texts = [f"The cat saw {number} dogs. Paris has {number}! The moon: {number}." for number in range(40)]
        server.faults += ["", *["429"] * 3]
        came = explainer.precompute(texts, progress=False)
        assert (came.built, came.failed) == (16, 0)
        assert "is busy (429: slow down)" in came.stopped
        calls = len(server.calls)
        came = explainer.precompute(texts, progress=False)
        assert (came.built, came.kept, came.stopped) == (24, 40, "")
        assert len(server.calls) == calls + 2


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ("short", EmbeddingFailed, "does not give one vector for each"),
        ("ragged", EmbeddingFailed, "vectors of different lengths"),
        ("wide", EmbeddingFailed, "32 dimensions after 16"),
        ("no json", EmbeddingFailed, "does not answer in JSON"),
        ("400", EmbeddingFailed, r"does not embed these texts \(400: it is 400\)"),
        ("quota", EmbedderStopped, "has no quota left"),
        ("307", EmbedderStopped, r"is at another address \(307\): give that one"),
    ],
)
def test_a_wrong_answer_is_refused_in_one_sentence(serve: Any, fault: str, kind: Any, reason: str) -> None:
    server = serve()
    explainer = Explainer(client(server))
    calls = len(server.calls)
    server.faults.append(fault)
    with pytest.raises(kind, match=reason):
        explainer.explain(QUERY, DOCUMENTS[0])
    assert len(server.calls) == calls + 1  # asking again would change nothing
    assert abs(explainer.explain(QUERY, DOCUMENTS[0]).gap or 0.0) < 1e-6


def test_dimensions_that_were_asked_for_are_looked_at(serve: Any) -> None:
    server = serve()
    with pytest.raises(EmbeddingFailed, match="gives 16 dimensions when asked for 8"):
        Explainer(client(server, dimensions=8))
    assert server.calls[0]["dimensions"] == 8


def test_prompts_stand_in_front_of_texts_and_are_left_in(serve: Any) -> None:
    server = serve()
    explainer = Explainer(client(server, prompts={"query": "query: ", "document": "passage: "}))
    explainer.explain("the cat", "Paris is old. The moon.")
    assert server.texts[9:] == [
        *("query: the cat", "query: cat", "query: the"),
        *("passage: Paris is old. The moon.", "passage: The moon.", "passage: Paris is old."),
    ]


def test_the_key_is_in_nothing_that_anybody_can_see(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = serve()
    made = client(server)
    with Explainer(made, store=tmp_path / "store") as explainer, ExplanationLog(tmp_path / "log") as log:
        hits = HitExplainer(explainer).hits(QUERY, [RetrievedDocument(id="a", text=DOCUMENTS[0])])
        hits.load("explanation")
        log.record(query=QUERY, answer="", hits=hits)
        seen = [repr(made), repr(vars(made)), repr(explainer), explainer.scorer.fingerprint, str(hits[0].explanation)]
        seen += [str(explainer.scorer.describe()), repr(vars(explainer.scorer))]
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}-wrong")
    with pytest.raises(EmbedderStopped, match=r"refuses the key.*OPENAI_API_KEY") as caught:
        Explainer(client(server))
    assert "Bearer ***" in str(caught.value)
    seen += [str(caught.value), repr(caught.value.__cause__), caplog.text]
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text for text in seen if KEY in text]
    assert files
    assert not [data for data in files if KEY.encode() in data]


def test_a_key_may_be_in_another_variable_and_a_service_may_need_none(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.setenv("OTHER_KEY", KEY)
    assert Explainer(client(serve(), key_from="OTHER_KEY")).explain(QUERY, DOCUMENTS[0])
    assert Explainer(client(serve(key=None))).explain(QUERY, DOCUMENTS[0])
    with pytest.raises(InvalidInput, match="MISSING_KEY, which key_from names, is not set"):
        Explainer(client(serve(), key_from="MISSING_KEY"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("openai-compatible:http://localhost/v1", "give the address and the model"),
        ("openai-compatible:#tiny", "give the address and the model"),
        ("openai-compatible:ftp://localhost#tiny", "give the address and the model"),
        ("openai-compatible:http://localhost:port/v1#tiny", "give the address and the model"),
        ("http://localhost/v1", "give the address and the model"),
        ("openai-compatible:http://me:secret@localhost#tiny", "leave passwords and keys out"),
        ("openai-compatible:http://localhost/v1?api-key=secret#tiny", "leave passwords and keys out"),
    ],
)
def test_an_address_that_cannot_be_asked_is_refused(name: str, reason: str) -> None:
    with pytest.raises(RagExplainError, match=reason) as caught:
        Explainer(name)
    assert "secret" not in str(caught.value)


def test_what_is_no_secret_may_be_asked_for_in_the_address(serve: Any) -> None:
    server = serve()
    Explainer(f"openai-compatible:{server.url}?api-version=2024-10-21#tiny")
    assert server.paths == {"/v1/embeddings?api-version=2024-10-21"}


@pytest.mark.parametrize("around", ["{}\n", " {}"])
def test_blanks_around_a_key_are_no_part_of_it(serve: Any, monkeypatch: pytest.MonkeyPatch, around: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", around.format(KEY))
    assert Explainer(client(serve())).explain(QUERY, DOCUMENTS[0])


@pytest.mark.parametrize("inside", ["{}\nX-Other: 1", "{}\u2026"])
def test_a_key_that_cannot_be_one_is_refused_before_anything_logs_it(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, inside: str
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("OPENAI_API_KEY", inside.format(KEY))
    with pytest.raises(InvalidInput, match="OPENAI_API_KEY holds characters that no key has"):
        Explainer(client(serve()))
    assert KEY not in caplog.text


def test_a_service_that_is_not_there_is_said_to_be_so() -> None:
    with pytest.raises(EmbedderStopped, match=r"does not answer \(ConnectError\)"):
        Explainer(OpenAICompatible("http://127.0.0.1:9/v1", "tiny", attempts=2, first_wait=0.01))


def test_a_search_goes_on_without_the_service(serve: Any) -> None:
    server = serve()
    explainer = Explainer(client(server, attempts=1))
    server.faults += ["500"] * 20
    found = [RetrievedDocument(id=str(at), text=text) for at, text in enumerate(DOCUMENTS[:3])]
    hits = HitExplainer(explainer, explain="eager").hits(QUERY, found)
    assert [(hit.id, hit.status) for hit in hits] == [("0", "failed"), ("1", "failed"), ("2", "failed")]
    assert "is busy (500" in (hits[0].reason or "")


def test_the_same_model_at_another_address_finds_what_was_kept(serve: Any, tmp_path: Path) -> None:
    with Explainer(client(serve()), store=tmp_path) as explainer:
        explainer.explain(QUERY, DOCUMENTS[0])
    with Explainer(client(serve()), store=tmp_path) as explainer:
        assert explainer.explain(QUERY, DOCUMENTS[0]).provenance["path"] == "disk"
