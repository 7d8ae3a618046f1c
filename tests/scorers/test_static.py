"""Static word vectors: exact by one line, watched, kept and searched like any other model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Router
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from rag_explain import Explainer
from rag_explain.cli import main
from rag_explain.errors import CheckFailed, InvalidInput, ModelChanged, UnsupportedModel
from rag_explain.faiss import FaissRetriever
from rag_explain.results.notices import TRUNCATED, UNKNOWN
from rag_explain.retrieval.usage import Reading, Usage, model_as_used
from tests.support.models import CORPUS, TEXTS, static, tiny

QUERY, DOCUMENT = TEXTS
PROMPTS = {"query": "the cat: ", "document": "paris: "}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"truncate_dim": 5},
    {"similarity_fn_name": "dot"},
    {"similarity_fn_name": "dot", "truncate_dim": 5},
    {"prompts": PROMPTS},
]


def own(model: SentenceTransformer, query: str, document: str) -> float:
    return float(model.similarity(model.encode_query(query), model.encode_document(document)))


@pytest.mark.parametrize("after", [[], [Normalize()]], ids=["alone", "normalised"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "unigram"])
def test_each_token_gives_its_own_vector_over_their_number(kind: str, settings: Any, after: Any) -> None:
    model = static(*after, kind=kind, **settings)
    explanation = Explainer(model).explain(QUERY, DOCUMENT)
    # e(x) = 1 / n  sum_t W[id_t], from the ids and the table alone.
    rows = {}
    for role, text in (("query", QUERY), ("document", DOCUMENT)):
        ids = model[0].tokenizer.encode((model.prompts.get(role) or "") + text, add_special_tokens=False).ids
        table = model[0].embedding.weight.detach().double().numpy()[ids] / len(ids)
        if after:
            table = table / np.linalg.norm(table.sum(axis=0))
        table = table[:, : settings.get("truncate_dim")]
        is_dot = settings.get("similarity_fn_name") == "dot"
        rows[role] = table if is_dot else table / np.linalg.norm(table.sum(axis=0))
    np.testing.assert_allclose(explanation.pairs, rows["query"] @ rows["document"].T, atol=1e-6)
    assert not explanation.matrix[-1].any()
    assert explanation.score == pytest.approx(own(model, QUERY, DOCUMENT), abs=1e-6)
    assert explanation.gap == pytest.approx(0, abs=1e-6)
    assert explanation.method == "static"
    assert explanation.trust.doubts == () or not any("block" in one for one in explanation.trust.doubts)


def test_a_prompt_has_its_own_tokens_and_offsets_are_the_callers() -> None:
    explanation = Explainer(static(prompts=PROMPTS)).explain(QUERY, DOCUMENT)
    parts = [token.part for token in explanation.query_tokens]
    assert parts[:3] == ["prompt"] * 3
    assert set(parts[3:]) == {"text"}
    for token in explanation.document_tokens:
        assert token.part == "prompt" or DOCUMENT[token.start : token.end] == token.text != ""


def test_a_word_counts_alike_wherever_it_stands() -> None:
    explainer = Explainer(static())
    one, other = explainer.explain_many("moon", ["cat dog", "dog cat"])
    np.testing.assert_allclose(one.pairs[0], other.pairs[0, ::-1], atol=1e-7)


def test_a_frameworks_own_prefix_and_normalisation_are_read_as_it_embeds() -> None:
    reading = Reading(prompt="", prefix="find: ", joins_lines=True, normalises=True, truncate_dim=None, task=None)
    model = static()
    used = model_as_used(model, Usage(reading, reading, None, "cosine"))
    explanation = Explainer(used).explain("the\nmoon", DOCUMENT)
    vectors = model.encode(["find: the moon", f"find: {DOCUMENT}"], normalize_embeddings=True)
    assert explanation.score == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-6)
    assert [token.text for token in explanation.query_tokens if token.part == "text"] == ["the", "mo", "on"]


def words_only() -> SentenceTransformer:
    """A vocabulary of whole words, with a token for all others."""
    vocabulary = {word: at for at, word in enumerate(["[UNK]", "the", "moon", "cat", "short", "not"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    return SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=4)], device="cpu")


def test_words_that_have_no_vector_are_said() -> None:
    explanation = Explainer(words_only()).explain("the moon", "The cat and the xylophone")
    (notice,) = explanation.notices
    assert (notice.code, notice.side) == (UNKNOWN, "document")
    assert "2 of 5 words of the document are unknown" in notice.text
    assert explanation.gap == pytest.approx(0, abs=1e-6)


def test_words_that_the_tokenizer_drops_are_said() -> None:
    words = Tokenizer(models.BPE({letter: at for at, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}, []))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    explainer = Explainer(SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=4)], device="cpu"))
    found = explainer.explain("moon", "the moon 月")
    assert "1 of 3 words of the document is unknown" in next(one.text for one in found.notices if one.code == UNKNOWN)
    with pytest.raises(InvalidInput, match="no tokens"):
        explainer.explain("moon", "月")


def test_nothing_is_cut_unless_the_tokenizer_cuts_it() -> None:
    long = " ".join(CORPUS * 40)
    whole = Explainer(static()).explain(QUERY, long)
    assert whole.truncated == ()
    assert whole.document_tokens[-1].end == len(long)
    model = static()
    model[0].tokenizer.enable_truncation(8)
    explanation = Explainer(model).explain("the moon", long)
    assert explanation.truncated == ("document",)
    assert [notice.code for notice in explanation.notices] == [TRUNCATED]
    assert len(explanation.document_tokens) == 8
    assert explanation.score == pytest.approx(own(model, "the moon", long), abs=1e-6)


# ---------------------------------------------------------------------- which model it is


def test_a_changed_weight_is_another_model_and_is_explained_as_it_is_now() -> None:
    model = static()
    explainer = Explainer(model)
    before = explainer.explain(QUERY, DOCUMENT)
    with torch.no_grad():
        model[0].embedding.weight[40:] *= 1.5
    after = explainer.explain(QUERY, DOCUMENT)
    assert after.fingerprint != before.fingerprint == Explainer(static()).scorer.fingerprint
    assert after.score == pytest.approx(own(model, QUERY, DOCUMENT), abs=1e-6)
    assert after.score != pytest.approx(before.score, abs=1e-6)
    assert after.fingerprint == Explainer(model).scorer.fingerprint


def _lowercase(model: Any) -> None:
    model[0].tokenizer.normalizer = None


def _word(model: Any) -> None:
    model[0].tokenizer.add_tokens(["honeybees navigate"])


def _other_tokenizer(model: Any) -> None:
    model[0].tokenizer = static(kind="bytes")[0].tokenizer


def _mode(model: Any) -> None:
    model[0].embedding.mode = "sum"


CHANGES: dict[str, Callable[[Any], Any]] = {
    "the tokenizer's normaliser": _lowercase,
    "a new token": _word,
    "another tokenizer": _other_tokenizer,
    "truncation": lambda model: model[0].tokenizer.enable_truncation(4),
    "padding": lambda model: model[0].tokenizer.enable_padding(length=40),
    "the mode of the mean": _mode,
    "a prompt": lambda model: model.prompts.update(query="find: "),
    "another table": lambda model: setattr(model[0], "embedding", torch.nn.EmbeddingBag(150, 8)),
    "a module behind it": lambda model: model.append(Normalize()),
    "a hook": lambda model: model[0].register_forward_hook(
        lambda module, args, out: {**out, "sentence_embedding": out["sentence_embedding"] + 1}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_other_change_of_the_model_is_noticed(change: str) -> None:
    model = static()
    explainer = Explainer(model)
    explainer.explain(QUERY, DOCUMENT)
    CHANGES[change](model)
    with pytest.raises(ModelChanged):
        explainer.explain(QUERY, DOCUMENT)
    with pytest.raises(ModelChanged):
        explainer.scorer.embed([DOCUMENT], "document")


def test_an_equal_tokenizer_is_as_good() -> None:
    model = static()
    explainer = Explainer(model)
    before = explainer.explain(QUERY, DOCUMENT)
    model[0].tokenizer = static()[0].tokenizer
    assert explainer.explain(QUERY, DOCUMENT).fingerprint == before.fingerprint


@pytest.mark.parametrize("change", ["the tokenizer's normaliser", "a new token", "truncation", "padding"])
def test_models_that_split_texts_otherwise_have_other_fingerprints(change: str) -> None:
    model = static()
    CHANGES[change](model)
    assert Explainer(model).scorer.fingerprint != Explainer(static()).scorer.fingerprint


# ---------------------------------------------------------------------- what is refused


def test_what_is_no_mean_of_its_word_vectors_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Dense and Normalize behind its StaticEmbedding"):
        Explainer(static(Dense(8, 4), Normalize()))
    model = static()
    model[0].embedding.mode = "sum"
    with pytest.raises(CheckFailed, match="not the mean of its word vectors"):
        Explainer(model)
    model = static()
    model.encode_query = lambda *args, **kwargs: np.ones((4, 8), np.float32)
    with pytest.raises(UnsupportedModel, match="encodes a short text otherwise"):
        Explainer(model)


@pytest.mark.parametrize("method", ["bilrp", "ij", "alignment", "pooled"])
def test_methods_that_look_into_blocks_or_contexts_are_refused_with_the_one_to_use(method: str) -> None:
    with pytest.raises(InvalidInput, match="use static"):
        Explainer(static(), method)


def test_the_method_is_refused_for_other_models() -> None:
    with pytest.raises(UnsupportedModel, match="use bilrp"):
        Explainer(tiny(), "static")


def test_towers_that_differ_are_refused_with_what_they_are() -> None:
    transformer = list(tiny(dtype=torch.float32).children())
    words = static(width=16)[0]
    router = Router.for_query_document(query_modules=[words], document_modules=transformer)
    with pytest.raises(UnsupportedModel, match=r"a Router.*query by StaticEmbedding and document by Transformer"):
        Explainer(SentenceTransformer(modules=[router], device="cpu"))


# ---------------------------------------------------------------------- what works over it


def test_factors_are_kept_by_words_and_sentences(tmp_path: Path) -> None:
    model, documents = static(), [f"{text}. And the moon." for text in CORPUS]
    with Explainer(model, store=tmp_path) as explainer:
        cold = explainer.explain_many(QUERY, documents)
        assert explainer.precompute(documents, unit="token", progress=False).built == len(documents)
    with Explainer(model, store=tmp_path) as explainer:
        warm = explainer.explain_many(QUERY, documents)
        assert {one.provenance["path"] for one in warm} == {"disk"}
        for one, other in zip(cold, warm, strict=True):
            np.testing.assert_allclose(one.matrix, other.matrix, atol=2e-3)
        sentences = explainer.explain(QUERY, documents[0], unit="sentence")
        assert len(sentences.document_tokens) == 2
        assert sentences.gap == pytest.approx(0, abs=2e-3)
        (slice_, rest) = explainer.subspaces(QUERY, documents[0], {"first": (0, 3)}).values()
        assert slice_.score + rest.score == pytest.approx(cold[0].score, abs=1e-6)


def test_evidence_and_highlights() -> None:
    document = "Nobody barked. The cat looked at the moon. It was late."
    explainer = Explainer(static())
    (sentence,) = explainer.evidence(QUERY, document, k=1)
    assert sentence.text == "The cat looked at the moon."
    highlights = explainer.highlight(QUERY, document)
    assert sum(one.value for one in highlights) == pytest.approx(highlights.score, abs=1e-5)


def test_an_index_over_it_is_searched_explained_saved_and_refused_for_another_table(tmp_path: Path) -> None:
    model = static(Normalize())
    retriever = FaissRetriever.from_texts(CORPUS, Explainer(model))
    hits = retriever.search(QUERY, 3)
    for hit in hits:
        assert hit.explanation is not None
        assert hit.gap == pytest.approx(0, abs=1e-5)
        assert hit.explanation.surrogate is None
    retriever.save(tmp_path / "index")
    assert [hit.id for hit in FaissRetriever.load(tmp_path / "index", Explainer(model)).search(QUERY, 3)] == [
        hit.id for hit in hits
    ]
    with torch.no_grad():
        model[0].embedding.weight[50] += 1
    with pytest.raises(InvalidInput, match="build the index again"):
        FaissRetriever.load(tmp_path / "index", Explainer(model))


def test_the_command_line_takes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, data = tmp_path / "model", tmp_path / "a.txt"
    static(Normalize()).save(str(folder), create_model_card=False)
    data.write_text(" ".join(f"{text.capitalize()}." for text in CORPUS), encoding="utf-8")
    assert main(["doctor", str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "150 word vectors of 8 dimensions" in shown
    assert "static: its own score" in shown
    index = ["--index", str(tmp_path / "index")]
    assert main(["index", str(data), *index, "--chunk", "20", "--model", str(folder)]) == 0
    assert main(["search", "the moon", *index, "-k", "2", "--json"]) == 0
    hits = json.loads(capsys.readouterr().out)
    assert len(hits) == 2
    assert all(abs(hit["gap"]) < 1e-5 for hit in hits)
