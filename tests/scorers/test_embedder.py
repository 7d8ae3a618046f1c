"""Anything that embeds strings is explained by its own vectors: right numbers, as few texts as can be, who it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr

from rag_explain import Explainer
from rag_explain.budget import Budget, at_most
from rag_explain.errors import BudgetSpent, EmbeddingFailed, FormatError, InvalidInput, ModelChanged, RagExplainError
from rag_explain.faiss import FaissRetriever
from rag_explain.log import ExplanationLog, records
from rag_explain.probes import TEXTS
from rag_explain.retrieval import HitExplainer, RetrievedDocument
from rag_explain.scorers import BlackBox
from rag_explain.texts.segments import part_spans
from tests.support.embedders import PROMPTS, Asked
from tests.support.models import CORPUS, tiny
from tests.support.references_occlusion import matrix

QUERY = "the cat, or paris?"
LESS_QUERY = ["cat, or paris?", "the, or paris?", "the cat, paris?", "the cat, or?"]
DOCUMENT = "The cat looked at the moon. Paris is old! A dog (small) barked."
LESS_SENTENCES = [
    "Paris is old! A dog (small) barked.",
    "The cat looked at the moon. A dog (small) barked.",
    "The cat looked at the moon. Paris is old!",
]
MAKING = 9  # four probes in each role, and one again


class ForChains(Embeddings):
    """As people write them for LangChain."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.model = asked, "tiny-2"

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.asked(texts, "document").tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.asked([text], "query")[0].tolist()


class ForIndexes(BaseEmbedding):
    """As people write them for LlamaIndex."""

    _asked: Asked = PrivateAttr()

    def __init__(self, asked: Asked) -> None:
        super().__init__(model_name="tiny-3")
        self._asked = asked

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._asked([query], "query")[0].tolist()

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._asked([text], "document")[0].tolist()

    async def _aget_query_embedding(self, query: str) -> list[float]:
        raise NotImplementedError


def wanted(asked: Asked) -> Any:
    model = asked.model

    def embed(role: str) -> Any:
        return lambda text: getattr(model, f"encode_{role}")(text, show_progress_bar=False).astype(float).tolist()

    return matrix(embed("query"), embed("document"), (QUERY, LESS_QUERY), (DOCUMENT, LESS_SENTENCES))


@pytest.mark.parametrize("kind", [lambda asked: asked, ForChains, ForIndexes], ids=["function", "langchain", "llama"])
def test_it_is_explained_by_its_own_vectors(kind: Any) -> None:
    asked = Asked()
    explanation = Explainer(kind(asked)).explain(QUERY, DOCUMENT)
    assert [token.text for token in explanation.query_tokens] == ["the", "cat", "or", "paris"]
    assert len(explanation.document_tokens) == 3
    np.testing.assert_allclose(explanation.matrix, wanted(asked), atol=2e-6)
    assert len(asked.texts) == MAKING + 1 + 4 + 1 + 3


def test_a_function_without_a_role_is_asked_for_all_texts_alike() -> None:
    asked = Asked()
    explainer = Explainer(lambda texts: asked(texts, "document"))
    assert len(asked.texts) == 5
    before, after = explainer.scorer.score(QUERY, [DOCUMENT, LESS_SENTENCES[0]])
    explanation = explainer.explain(QUERY, DOCUMENT)
    assert explanation.document_saliency()[0] == pytest.approx(before - after, abs=1e-6)
    # The same text in both roles is one text.
    explainer.explain(DOCUMENT, DOCUMENT)
    assert asked.texts.count(DOCUMENT) == 1


def test_what_has_only_encode_is_taken_as_it_is() -> None:
    class Static:
        def __init__(self) -> None:
            self.asked = Asked()

        def encode(self, sentences: list[str], show: bool = False) -> Any:
            return self.asked(sentences, "document").astype(np.float16)

    explanation = Explainer(Static()).explain(QUERY, DOCUMENT)
    assert explanation.model == "Static"
    assert abs(explanation.gap or 0.0) < 1e-6


def test_nothing_is_sent_twice() -> None:
    asked = Asked()
    explainer = Explainer(asked)
    explainer.explain_many(QUERY, [DOCUMENT, CORPUS[0]])
    sent = len(asked.texts)
    assert sent == explainer.scorer.budget.sent == MAKING + 5 + 4 + 1  # one sentence, and nothing is left without it
    explainer.explain_many(QUERY, [CORPUS[0], DOCUMENT])
    explainer.highlight(QUERY, DOCUMENT)
    assert len(asked.texts) == sent
    explainer.highlight("the dog", DOCUMENT)
    assert len(asked.texts) == sent + 1
    explainer.explain("the dog", DOCUMENT)
    assert len(asked.texts) == sent + 3
    assert len(set(asked.calls[-1][1])) == len(asked.calls[-1][1])


def test_documents_of_one_query_share_their_calls() -> None:
    asked = Asked()
    explainer = Explainer(asked)
    asked.calls.clear()
    explainer.explain_many(QUERY, [DOCUMENT, *CORPUS])
    assert [role for role, _ in asked.calls] == ["query", "document"]


@pytest.mark.parametrize(("batch_size", "concurrency"), [(1, 4), (3, 2), (2, 1)])
def test_batches_and_threads_change_no_number(batch_size: int, concurrency: int) -> None:
    asked = Asked()
    scorer = BlackBox(asked, batch_size=batch_size, concurrency=concurrency)
    np.testing.assert_allclose(Explainer(scorer).explain(QUERY, DOCUMENT).matrix, wanted(asked), atol=2e-6)
    assert max(len(texts) for _, texts in asked.calls) <= batch_size


@pytest.mark.parametrize("text", ["東京は日本の首都です。人口は多い。", "กรุงเทพเป็นเมืองหลวง", "I read 東京は日本 today"])
def test_scripts_without_spaces_are_left_out_three_characters_at_a_time(text: str) -> None:
    explanation = Explainer(Asked()).explain("東京", text, unit="word")
    found = [(token.start, token.end) for token in explanation.document_tokens]
    assert found == part_spans(text)
    assert all(text[a:b] == token.text for (a, b), token in zip(found, explanation.document_tokens, strict=True))
    assert len(found) < len(text) / 2


def test_a_function_that_uses_its_memory_again_is_not_misread() -> None:
    asked, memory = Asked(), np.zeros((64, 16))

    def embed(texts: list[str], role: str) -> Any:
        memory[: len(texts)] = asked(texts, role)
        return memory[: len(texts)]

    np.testing.assert_allclose(Explainer(embed).explain(QUERY, DOCUMENT).matrix, wanted(asked), atol=2e-6)


async def later(texts: list[str]) -> list[list[float]]:
    return [[1.0]] * len(texts)


class Later:
    async def __call__(self, texts: list[str]) -> list[list[float]]:
        return [[1.0]] * len(texts)


@pytest.mark.parametrize(
    ("embed", "reason"),
    [
        (lambda texts: [[1.0, 2.0]], "one vector for each of 4 texts, not 1 x 2"),
        (lambda texts: [1.0] * len(texts), "one vector for each"),
        (lambda texts: [[float("nan")]] * len(texts), "NaN or infinity"),
        (lambda texts: [[1.0] * (len(text) % 7 + 1) for text in texts], "failed"),
        (lambda texts: [[1.0] * len(texts)] * len(texts), "1 dimensions after 4"),
        (lambda texts: "no vectors", "failed"),
        (lambda texts: texts[9], "failed.*IndexError"),
        (later, "is asynchronous"),
        (Later(), "is asynchronous"),
    ],
)
def test_what_gives_no_vectors_is_refused_in_a_sentence(embed: Any, reason: str) -> None:
    with pytest.raises(RagExplainError, match=reason):
        Explainer(embed)


@pytest.mark.parametrize(
    "said", ["Incorrect API key provided: {}.", "Bearer {}", "POST https://x/v1?api-key={}&b=1 failed", "key='{}'"]
)
def test_a_key_that_an_error_quotes_is_not_shown(said: str) -> None:
    def embed(texts: list[str]) -> Any:
        raise RuntimeError(said.format("sk-0123456789"))

    with pytest.raises(EmbeddingFailed, match=r"embed failed \(RuntimeError: .*\*\*\*") as caught:
        Explainer(embed)
    assert "0123456789" not in str(caught.value)


def test_no_framework_is_imported_to_know_its_objects() -> None:
    code = """
import sys
from rag_explain import Explainer

class Embeddings:
    def embed_query(self, text):
        return [1.0, len(text)]

    def embed_documents(self, texts):
        return [self.embed_query(text) for text in texts]

class Embedding:
    get_query_embedding = Embeddings.embed_query

    def get_text_embedding_batch(self, texts):
        return [self.get_query_embedding(text) for text in texts]

for kind in (Embeddings, Embedding):
    Explainer(kind()).explain("two words", "One is. Two is.")
frameworks = {"langchain_core", "langchain", "llama_index", "haystack", "openai", "model2vec", "onnxruntime"}
sys.exit(" ".join(frameworks & set(sys.modules)) or None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_asked_of_it_is_refused_in_words() -> None:
    explainer = Explainer(Asked())
    with pytest.raises(InvalidInput, match="no embedding to be taken apart: use occlusion, shapley"):
        Explainer(Asked(), "bilrp")
    with pytest.raises(InvalidInput, match="no vectors of tokens"):
        explainer.evidence(QUERY, DOCUMENT)
    with pytest.raises(InvalidInput, match="leave out the device"):
        Explainer(Asked(), device="cpu")
    with pytest.raises(InvalidInput, match="this model computes here"):
        Explainer(tiny("bert"), max_calls=3)
    with pytest.raises(InvalidInput, match="not empty"):
        explainer.explain(QUERY, " \n")
    with pytest.raises(InvalidInput, match="batch_size must be at least 1"):
        BlackBox(Asked(), batch_size=0)
    with pytest.raises(InvalidInput, match="does not embed strings"):
        BlackBox(3)
    with pytest.raises(InvalidInput, match="measure must be"):
        BlackBox(Asked(), measure="euclidean")  # type: ignore[arg-type]  # the mistake under test


def test_a_dot_product_is_explained_where_the_index_compares_by_one() -> None:
    asked = Asked()
    explanation = Explainer(BlackBox(asked, measure="dot")).explain(QUERY, DOCUMENT)
    (query,), (document,) = asked([QUERY], "query"), asked([DOCUMENT], "document")
    assert (explanation.measure, explanation.score) == ("dot", pytest.approx(float(query @ document), rel=1e-6))


def test_noise_is_measured_once_and_shown_beside_the_values_it_drowns() -> None:
    assert Explainer(Asked()).scorer.noise < 1e-6
    explainer = Explainer(Asked(noise=0.01))
    assert 0.003 < explainer.scorer.noise < 0.03
    explanation = explainer.explain(QUERY, DOCUMENT, unit="word")
    (told,) = [notice for notice in explanation.notices if "noise" in notice.text]
    limit = 2 * explainer.scorer.noise
    lost = int((np.abs(explanation.document_saliency()) < limit).sum())
    assert f"as {lost} of {len(explanation.document_tokens)}" in told.text
    assert told.level == ("warning" if lost else "note")
    with pytest.raises(EmbeddingFailed, match="no difference means anything"):
        Explainer(Asked(noise=1.0))


def test_a_model_that_changed_silently_is_another_one_for_store_and_log(tmp_path: Path) -> None:
    """A remote model keeps its name: only what it computes tells."""
    with Explainer(Asked(), store=tmp_path) as explainer:
        explainer.explain(QUERY, DOCUMENT)
    with Explainer(Asked(noise=1e-5), store=tmp_path) as explainer:  # the last digits
        assert explainer.explain(QUERY, DOCUMENT).provenance["path"] == "disk"
    with Explainer(Asked(shift=0.1), store=tmp_path) as explainer:
        assert explainer.explain(QUERY, DOCUMENT).provenance["path"] == "built"
    with Explainer(Asked(), store=tmp_path) as explainer:
        assert explainer.explain(QUERY, DOCUMENT).provenance["path"] == "disk"


def test_an_index_of_another_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    FaissRetriever.from_texts(CORPUS, Explainer(Asked())).save(tmp_path / "index")
    hits = FaissRetriever.load(tmp_path / "index", Explainer(Asked())).search(QUERY, k=2)
    assert [hit.status for hit in hits.load("explanation")] == ["ready", "ready"]
    with pytest.raises((InvalidInput, FormatError), match="built with"):
        FaissRetriever.load(tmp_path / "index", Explainer(Asked(shift=0.1)))


def test_a_model_that_changes_while_it_is_used_is_noticed_by_a_probe_sent_along() -> None:
    asked = Asked()
    explainer = Explainer(asked)
    scorer: Any = explainer.scorer
    explainer.explain(QUERY, DOCUMENT)
    assert not set(TEXTS) & {text for _, texts in asked.calls[4:] for text in texts}
    scorer._next_look = 0.0  # an hour has passed
    explainer.explain("a dog", DOCUMENT)
    assert asked.calls[-1] == ("query", [TEXTS[0], "a dog", "dog", "a"])
    explainer.explain("the moon", DOCUMENT)
    assert TEXTS[0] not in asked.calls[-1][1]
    scorer._next_count = 0  # many texts were sent
    explainer.explain("the sun", DOCUMENT)
    assert TEXTS[0] in asked.calls[-1][1]
    asked.shift, scorer._next_look = 0.1, 0.0
    with pytest.raises(ModelChanged, match="another vector than then"):
        explainer.explain("a bridge", DOCUMENT)
    with pytest.raises(ModelChanged, match="make a new one"):
        explainer.explain(QUERY, DOCUMENT)


def test_no_text_more_than_max_calls_is_sent_and_what_is_there_is_shown() -> None:
    asked = Asked()
    explainer = Explainer(asked, max_calls=MAKING + 5 + 4 + 3)
    first, second = explainer.explain_many(QUERY, [DOCUMENT, " ".join(LESS_SENTENCES)])
    assert len(asked.texts) == explainer.scorer.budget.max_calls
    np.testing.assert_allclose(first.matrix, wanted(asked), atol=2e-6)
    assert (first.provenance["path"], second.provenance["path"]) == ("memory", "partial")
    (told,) = [notice.text for notice in second.notices if notice.code == "partial"]
    assert "Only 2 of 6 sentences were left out" in told
    less = " ".join(LESS_SENTENCES).removeprefix("Paris is old! ")
    vectors = [asked.model.encode_query(QUERY), *asked.model.encode_document([" ".join(LESS_SENTENCES), less])]
    q, whole, without = (vector / np.linalg.norm(vector) for vector in vectors)
    assert second.document_saliency()[0] == pytest.approx(float(q @ (whole - without)), abs=1e-6)
    with pytest.raises(BudgetSpent, match="max_calls is spent"):
        explainer.explain(QUERY, CORPUS[0])
    assert len(asked.texts) == explainer.scorer.budget.max_calls
    assert explainer.explain(QUERY, DOCUMENT).provenance["path"] == "memory"


def test_what_is_partial_is_not_kept() -> None:
    asked = Asked()
    explainer = Explainer(asked, max_calls=MAKING + 5 + 2)
    assert explainer.explain(QUERY, DOCUMENT).provenance["path"] == "partial"
    assert not explainer.store.info()["memory"]
    explainer.scorer.budget.max_calls = None
    assert explainer.explain(QUERY, DOCUMENT).provenance["path"] == "built"
    assert len(asked.texts) == MAKING + 5 + 4


def test_precompute_stops_at_max_calls_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    texts = [f"The cat saw {number} dogs. Paris has {number}! The moon: {number}." for number in range(40)]
    asked = Asked()
    with Explainer(asked, store=tmp_path, max_calls=MAKING + 4 * 20 + 2) as explainer:
        came = explainer.precompute(texts, progress=False)
    assert (came.built, came.kept) == (20, 20)
    assert "max_calls is spent" in came.stopped
    assert "stopped: max_calls" in str(came)
    assert len(asked.texts) == MAKING + 4 * 20 + 2
    asked = Asked()
    with Explainer(asked, store=tmp_path) as explainer:
        came = explainer.precompute(texts, progress=False)
    assert (came.built, came.kept, came.failed, came.stopped) == (20, 40, 0, "")
    assert len(asked.texts) == MAKING + 4 * 20


def test_one_query_may_have_a_budget_of_its_own() -> None:
    asked = Asked()
    explainer = Explainer(asked)
    scorer: Any = explainer.scorer
    with scorer.at_most(6), pytest.raises(BudgetSpent, match="max_calls is spent"):
        explainer.explain_many(QUERY, [DOCUMENT, CORPUS[0]])
    assert len(asked.texts) == MAKING + 6
    with scorer.at_most(64):
        explainer.explain_many(QUERY, [DOCUMENT, CORPUS[0]])
    assert len(asked.texts) == MAKING + 5 + 4 + 1


def test_a_budget_inside_itself_counts_once() -> None:
    asked, budget = Asked(), Budget(MAKING + 6)
    with at_most(budget), at_most(budget):
        scorer = Explainer(asked).scorer
        with at_most(100), pytest.raises(BudgetSpent, match=rf"max_calls is spent \({MAKING + 6} texts\)"):
            scorer.embed([f"text {number}" for number in range(10)], "document")
    assert (budget.sent, budget.left, len(asked.texts)) == (MAKING + 6, 0, MAKING + 6)
    with at_most(0), pytest.raises(BudgetSpent):
        Explainer(Asked())


def test_hits_are_explained_as_far_as_the_budget_goes_and_no_search_fails(tmp_path: Path) -> None:
    explainer = Explainer(Asked(), max_calls=MAKING + 5 + 4)
    found = [RetrievedDocument(id=str(at), text=text) for at, text in enumerate([DOCUMENT, *CORPUS])]
    hits = HitExplainer(explainer, explain="eager").hits(QUERY, found)
    assert [hit.status for hit in hits] == ["ready"] + ["failed"] * 5
    assert "max_calls is spent" in (hits[1].reason or "")
    with ExplanationLog(tmp_path) as log:
        log.record(query=QUERY, answer="yes", hits=hits)
    (record,) = records(tmp_path)
    assert record.hits[0].explanation is not None


@pytest.mark.parametrize("unit", ["sentence", "word"])
def test_the_plan_is_what_is_then_paid(unit: Any, tmp_path: Path) -> None:
    asked = Asked()
    with Explainer(asked, store=tmp_path, max_calls=500) as explainer:
        explainer.precompute(CORPUS[:2], unit=unit, progress=False)
        sent = len(asked.texts)
        texts = [*CORPUS, DOCUMENT, DOCUMENT]
        plan = explainer.plan(texts, query=QUERY, unit=unit)
        assert len(asked.texts) == sent
        assert (plan.documents, plan.kept, plan.left) == (7, 2, 500 - sent)
        explainer.explain_many(QUERY, texts, unit=unit)
        paid = asked.texts[sent:]
        assert (plan.embeddings, plan.characters) == (len(paid), sum(map(len, paid)))
        assert plan.characters / 6 < plan.tokens < plan.characters / 2
        again = explainer.plan(texts, query=QUERY, unit=unit)
        assert (again.embeddings, again.kept) == (0, 7)
        assert str(plan).startswith(f"{plan.embeddings} embeddings")
    with pytest.raises(InvalidInput, match="bilrp sends no texts"):
        Explainer(tiny("bert")).plan(CORPUS)


@pytest.mark.parametrize("method", ["occlusion", "shapley"])
def test_two_steps_send_sentences_and_then_the_words_of_the_best(method: str) -> None:
    text = " ".join(f"The cat saw {number} dogs near the old moon." for number in range(8))
    asked = Asked()
    options: dict[str, Any] = {"samples": 4} if method == "shapley" else {}
    explainer = Explainer(asked, method, best=1, **options)
    plan = explainer.plan([text, DOCUMENT], query=QUERY, unit="word")
    assert str(plan).startswith("at most ")
    sent = len(asked.texts)
    explanations = explainer.explain_many(QUERY, [text, DOCUMENT], unit="word")
    paid = len(asked.texts) - sent
    assert paid <= plan.embeddings < explainer.plan([text], unit="word").embeddings + paid
    if method == "occlusion":
        assert paid == 5 + (1 + 8 + 9) + (1 + 3 + len(explanations[1].document_tokens))
    assert len(explanations[0].document_tokens) == 9
    explainer.explain_many(QUERY, [text, DOCUMENT], unit="word")
    assert len(asked.texts) == sent + paid
    assert explainer.plan([text], unit="word").is_most is False


def test_it_says_what_it_is() -> None:
    explainer = Explainer(ForChains(Asked()))
    assert explainer.scorer.name == "ForChains tiny-2"
    described = explainer.scorer.describe()
    assert described["embeds"] == "queries and documents each in their own way"
    assert described["texts sent"] == str(MAKING)
    assert PROMPTS["query"] not in str(described)
