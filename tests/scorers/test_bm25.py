"""BM25: every index is explained by its own statistics, and its own scores are what the cells sum to."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pytest
import Stemmer
from bm25s.tokenization import Tokenizer
from rank_bm25 import BM25L, BM25Okapi, BM25Plus

from rag_explain import Explainer, Explanation
from rag_explain.errors import InvalidInput
from rag_explain.faiss import FaissRetriever
from rag_explain.log import ExplanationLog, records
from rag_explain.retrieval import HitExplainer, RetrievedDocument
from rag_explain.scorers import BM25
from tests.support import references_bm25 as oracle

DOCUMENTS = (
    "The quick brown fox jumps over the lazy dogs, running fast.",
    "A dog ran. The dog was running after other dogs!",
    "Paris is the capital of France; Berlin is the capital of Germany.",
    "Laptops are slow; my notebook is slower.",
    "the and of",
)
QUERY = "dogs running dogs the zebra capital"
VARIANTS = ("lucene", "robertson", "atire", "bm25l", "bm25+")
RANKED: dict[str, Callable[..., Any]] = {"Okapi": BM25Okapi, "L": BM25L, "Plus": BM25Plus}
ENGLISH = functools.partial(bm25s.tokenize, stopwords="en", stemmer=Stemmer.Stemmer("english"), show_progress=False)


def small(text: str) -> list[str]:
    return text.lower().split()


def read(analyser: Any, text: str) -> list[str]:
    return analyser(text, return_ids=False)[0] if analyser is ENGLISH else analyser(text)


def bm25s_index(documents: Sequence[str] = DOCUMENTS, **settings: Any) -> Any:
    index = bm25s.BM25(**settings)
    index.index(ENGLISH(list(documents)), show_progress=False)
    return index


def own_scores(index: Any, query: str) -> Any:
    """By document, what bm25s gives when it is searched."""
    tokens = ENGLISH([query])
    found, scores = index.retrieve(tokens, k=index.scores["num_docs"], show_progress=False)
    return dict(zip(found[0].tolist(), scores[0].tolist(), strict=True))


def chance(seed: int) -> tuple[list[str], str]:
    """Documents of few words, so that many are shared, and a query with repeated and unknown words."""
    draw = random.Random(seed)
    words = ["amber", "birch", "cedar", "delta", "ember", "fjord"]
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 12))) for _ in range(9)]
    return list(dict.fromkeys(texts)), " ".join(draw.choices(["amber", "birch", "cedar", "zinc"], k=5))


def compare(
    explanation: Explanation, corpus: oracle.Corpus, method: str, query: list[str], document: list[str], rel: float
) -> None:
    """With the equations: cells of the words that are looked for, the score, and the terms."""
    wanted = np.array(oracle.cells(corpus, method, query, document))
    rows = [at for at, token in enumerate(explanation.query_tokens) if token.piece]
    columns = [at for at, token in enumerate(explanation.document_tokens) if token.piece]
    assert [explanation.query_tokens[at].piece for at in rows] == query
    assert [explanation.document_tokens[at].piece for at in columns] == document
    matrix = explanation.matrix
    np.testing.assert_allclose(matrix[np.ix_([*rows, -1], [*columns, -1])], wanted, rtol=max(rel, 1e-6), atol=1e-6)
    assert abs(explanation.score - wanted.sum()) <= rel * max(1.0, abs(wanted.sum()))
    assert abs(explanation.gap or 0.0) <= rel * max(1.0, abs(wanted.sum()))
    for term in explanation.terms:
        if term.numbers:
            assert term.numbers["idf"] == pytest.approx(oracle.idf(corpus, method, term.text), rel=1e-6)
            assert term.numbers["frequency"] == document.count(term.text)
        if "length factor" in term.numbers:
            assert term.numbers["length factor"] == pytest.approx(corpus.length_factor(document), rel=1e-4)
        assert term.numbers.get("constant", 0.0) == pytest.approx(
            query.count(term.text) * oracle.constant(corpus, method, term.text), rel=1e-6, abs=1e-9
        )
    adds = sum(term.value + term.numbers.get("constant", 0.0) for term in explanation.terms)
    assert adds == pytest.approx(explanation.score, rel=rel, abs=rel)


@pytest.mark.parametrize("method", VARIANTS)
def test_bm25s_is_explained_to_the_precision_that_it_keeps(method: str) -> None:
    index = bm25s_index(method=method)
    explainer, own = Explainer(index, analyser=ENGLISH), own_scores(index, QUERY)
    terms = [read(ENGLISH, text) for text in DOCUMENTS]
    corpus = oracle.Corpus(terms)
    for number, text in enumerate(DOCUMENTS):
        explanation = explainer.explain(QUERY, text)
        assert explanation.score == own[number]
        compare(explanation, corpus, method, read(ENGLISH, QUERY), terms[number], 1e-6)


@pytest.mark.parametrize("kind", RANKED)
def test_rank_bm25_is_explained_to_nine_digits(kind: str) -> None:
    terms = [small(text) for text in DOCUMENTS]
    index = RANKED[kind](terms)
    explainer, own = Explainer(index, analyser=small), index.get_scores(small(QUERY))
    corpus = oracle.Corpus(terms, delta=getattr(index, "delta", 0.0))
    for number, text in enumerate(DOCUMENTS):
        explanation = explainer.explain(QUERY, text)
        assert explanation.score == own[number]
        compare(explanation, corpus, kind, small(QUERY), terms[number], 1e-9)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("method", [*VARIANTS, *RANKED])
def test_documents_that_chance_drew_are_found_and_explained(method: str, seed: int) -> None:
    texts, query = chance(seed)
    terms = [text.split() for text in texts]
    settings = {"k1": 0.9 + 0.3 * seed, "b": 0.2 * (seed % 5)}
    if method in RANKED:
        index: Any = RANKED[method](terms, **settings)
        delta = getattr(index, "delta", 0.0)
    else:
        index, delta = bm25s.BM25(method=method, delta=0.7, **settings), 0.7
        index.index(terms, show_progress=False)
    explainer = Explainer(index, analyser=str.split)
    corpus = oracle.Corpus(terms, delta=delta, **settings)
    for text, own in zip(texts, terms, strict=True):
        tell = [term for term in {*own} if oracle.idf(corpus, method, term)]
        alike = {round(oracle.weight(corpus, method, (tell or own)[0], one), 9) for one in terms if {*one} == {*own}}
        if method not in RANKED and len(alike) > len(tell) == 1:
            # "amber" and "amber amber" differ in nothing that bm25s keeps but the score
            with pytest.raises(InvalidInput, match="which of them it is cannot be told"):
                explainer.explain(query, text)
            continue
        explanation = explainer.explain(query, text)
        compare(explanation, corpus, method, query.split(), own, 1e-9 if method in RANKED else 2e-6)


def test_documents_of_one_word_are_told_apart_by_the_corpus() -> None:
    texts = ["amber", "amber amber", "birch and amber"]
    index = bm25s.BM25(corpus=texts)
    index.index([text.split() for text in texts], show_progress=False)
    explainer = Explainer(index, analyser=str.split)
    scores = index.get_scores(["amber"])
    assert [explainer.explain("amber", text).score for text in texts] == [pytest.approx(float(one)) for one in scores]


def test_a_mixed_idf_is_read_from_the_index() -> None:
    index = bm25s_index(method="atire", idf_method="lucene")
    (dog, *_) = Explainer(index, analyser=ENGLISH).explain("dogs", DOCUMENTS[1]).terms
    terms = [read(ENGLISH, text) for text in DOCUMENTS]
    assert dog.numbers["idf"] == pytest.approx(oracle.idf(oracle.Corpus(terms), "lucene", "dog"))
    assert dog.numbers["length factor"] == pytest.approx(oracle.Corpus(terms).length_factor(terms[1]), rel=1e-4)


def test_words_stand_where_the_caller_wrote_them() -> None:
    explanation = Explainer(bm25s_index(), analyser=ENGLISH).explain(QUERY, DOCUMENTS[1])
    assert [(token.text, token.piece) for token in explanation.document_tokens] == [
        *(("A", ""), ("dog", "dog"), ("ran", "ran"), ("The", ""), ("dog", "dog"), ("was", ""), ("running", "run")),
        *(("after", "after"), ("other", "other"), ("dogs", "dog")),
    ]
    assert all(token.text == DOCUMENTS[1][token.start : token.end] for token in explanation.document_tokens)
    dog = explanation.terms[0]
    assert (dog.text, dog.query, dog.document) == ("dog", ("dogs",), ("dog", "dogs"))
    rows = [at for at, token in enumerate(explanation.query_tokens) if token.piece == "dog"]
    np.testing.assert_array_equal(explanation.matrix[rows[0]], explanation.matrix[rows[1]])
    assert explanation.by_sentence().pairs.shape == (6, 2)
    assert abs(explanation.by_word().gap or 0.0) < 1e-6


def test_words_that_are_not_looked_for_carry_nothing_and_are_counted() -> None:
    explanation = Explainer(bm25s_index(method="bm25+"), analyser=ENGLISH).explain(QUERY, DOCUMENTS[1])
    by_text = dict(zip((token.text for token in explanation.query_tokens), explanation.matrix, strict=False))
    assert not by_text["the"].any()
    assert not by_text["zebra"].any()
    assert not by_text["capital"][:-1].any()  # no word of this document; every document gets the constant
    assert by_text["capital"][-1] > 0
    assert [notice.text for notice in explanation.notices] == [
        "1 of 6 words of the query is left out by the analyser, and is not looked for.",
        "1 of 6 words of the query is in no document of the index, and is not looked for.",
    ]
    assert [term.document for term in explanation.terms if term.text in ("zebra", "capit")] == [(), ()]


@pytest.mark.parametrize("query", ["", "   ", "the of", "zebra", "?!"])
def test_a_query_without_a_known_word_scores_nothing(query: str) -> None:
    for index, analyser in (
        (bm25s_index(method="bm25l"), ENGLISH),
        (BM25Plus([small(one) for one in DOCUMENTS]), small),
    ):
        explanation = Explainer(index, analyser=analyser).explain(query, DOCUMENTS[0])
        assert (explanation.score, explanation.gap) == (0.0, 0.0) or query == "the of"
        assert str(explanation)


def test_a_text_that_is_no_document_of_the_index_is_refused() -> None:
    for explainer in (
        Explainer(bm25s_index(), analyser=ENGLISH),
        Explainer(BM25Okapi([small(text) for text in DOCUMENTS]), analyser=small),
    ):
        for text in ("A new text.", f"{DOCUMENTS[0]} jumps", DOCUMENTS[0].replace("lazy ", ""), "zebra"):
            with pytest.raises(InvalidInput, match="none of the 5 documents of"):
                explainer.explain(QUERY, text)
        assert explainer.explain(QUERY, DOCUMENTS[0]).score > 0


def test_an_analyser_that_did_not_make_the_index_is_found_out() -> None:
    explainer = Explainer(bm25s_index(), analyser=small)
    with pytest.raises(InvalidInput, match="with the analyser that split it"):
        explainer.explain(QUERY, DOCUMENTS[0])


def test_documents_that_say_the_same_score_the_same() -> None:
    index = BM25Okapi([small(text) for text in (*DOCUMENTS, DOCUMENTS[1])])
    scores = index.get_scores(small(QUERY))
    assert scores[1] == scores[5] == Explainer(index, analyser=small).explain(QUERY, DOCUMENTS[1]).score


def tokenized(tokenizer: Tokenizer, form: str) -> Any:
    made = tokenizer.tokenize(list(DOCUMENTS), show_progress=False, return_as="tuple" if form == "tuple" else form)
    return (made.ids, made.vocab) if form == "tuple" else made


@pytest.mark.parametrize("form", ["ids", "tuple", "string"])
@pytest.mark.parametrize("stemmer", [None, Stemmer.Stemmer("english")], ids=["plain", "stemmed"])
def test_a_tokenizer_of_bm25s_is_an_analyser_and_learns_nothing(form: str, stemmer: Any) -> None:
    tokenizer = Tokenizer(stemmer=stemmer)
    index = bm25s.BM25(method="bm25+")
    index.index(tokenized(tokenizer, form), show_progress=False)
    words = dict(tokenizer.word_to_id)
    asked = tokenizer.tokenize(
        [QUERY], update_vocab="never", show_progress=False, return_as="ids" if form == "ids" else "string"
    )
    known = [one for one in asked[0] if form == "ids" or one in index.vocab_dict]
    found, scores = index.retrieve([known], k=5, show_progress=False)
    explainer = Explainer(index, analyser=tokenizer)
    for number, score in zip(found[0], scores[0], strict=True):
        explanation = explainer.explain(QUERY, DOCUMENTS[number])
        assert explanation.score == pytest.approx(float(score), rel=1e-6)
        assert abs(explanation.gap or 0.0) < 1e-5
    assert tokenizer.word_to_id == words


def test_a_saved_index_is_the_same_one_mapped_from_the_file_or_not(tmp_path: Path) -> None:
    index = bm25s_index(method="bm25l")
    index.save(tmp_path, show_progress=False)
    made = Explainer(index, analyser=ENGLISH)
    for mmap in (False, True):
        loaded = Explainer(bm25s.BM25.load(tmp_path, mmap=mmap), analyser=ENGLISH)
        assert loaded.scorer.fingerprint == made.scorer.fingerprint
        assert loaded.scorer.probes.id == made.scorer.probes.id
        for text in DOCUMENTS:
            np.testing.assert_array_equal(loaded.explain(QUERY, text).matrix, made.explain(QUERY, text).matrix)
    with pytest.raises(InvalidInput, match="load the index with its vocabulary"):
        Explainer(bm25s.BM25.load(tmp_path, load_vocab=False), analyser=ENGLISH)


def test_an_index_is_known_whatever_the_order_of_its_vocabulary() -> None:
    def made(order: int, texts: Sequence[str] = DOCUMENTS) -> str:
        terms = [read(ENGLISH, text) for text in texts]
        words = sorted({word for one in terms for word in one})[::order]
        numbers = {word: number for number, word in enumerate(words)}
        index = bm25s.BM25()
        index.index(([[numbers[word] for word in one] for one in terms], numbers), show_progress=False)
        return Explainer(index, analyser=ENGLISH).scorer.fingerprint

    assert made(1) == made(-1)
    assert len({made(1), made(1, DOCUMENTS[1:]), made(1, DOCUMENTS[::-1]), made(1, (*DOCUMENTS[:4], "and"))}) >= 3


def test_an_index_that_changes_is_explained_as_it_is_under_another_name() -> None:
    index = bm25s_index()
    explainer = Explainer(index, analyser=ENGLISH)
    before, fingerprint = explainer.explain(QUERY, DOCUMENTS[1]), explainer.scorer.fingerprint
    index.scores["data"] *= 2  # no BM25 any more
    assert len({fingerprint, explainer.scorer.fingerprint}) == 2
    with pytest.raises(InvalidInput, match="none of the 5 documents"):
        explainer.explain(QUERY, DOCUMENTS[1])
    index.index(ENGLISH(["zebra dogs", "another cat"]), show_progress=False)
    with pytest.raises(InvalidInput, match="none of the 2 documents"):
        explainer.explain(QUERY, DOCUMENTS[1])
    after = explainer.explain(QUERY, "zebra dogs")
    assert after.score == pytest.approx(own_scores(index, QUERY)[0])
    assert len({fingerprint, before.fingerprint, after.fingerprint}) == 2


def test_a_change_of_rank_bm25_is_seen() -> None:
    index = BM25Okapi([small(text) for text in DOCUMENTS])
    explainer = Explainer(index, analyser=small)
    before = explainer.explain(QUERY, DOCUMENTS[1])
    index.k1 = 0.5
    after = explainer.explain(QUERY, DOCUMENTS[1])
    assert after.score == pytest.approx(index.get_scores(small(QUERY))[1])
    assert abs(after.gap or 0.0) < 1e-9
    assert before.fingerprint != after.fingerprint


class Odd(BM25Okapi):
    """A class of the user's own, with a score of its own."""

    def get_scores(self, query: list[str]) -> Any:
        return super().get_scores(query) + 1


def test_a_score_of_ones_own_does_not_add_up_silently() -> None:
    explanation = Explainer(Odd([small(text) for text in DOCUMENTS]), analyser=small).explain(QUERY, DOCUMENTS[0])
    assert explanation.gap == pytest.approx(1.0)
    assert "does not add up" in str(explanation)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Explainer(bm25s_index()), "give analyser="),
        (lambda: Explainer(bm25s_index(), analyser=3), "from a text to its words, not int"),
        (lambda: Explainer(bm25s_index(), analyser=ENGLISH, device="cpu"), "leave out device"),
        (lambda: Explainer(bm25s.BM25(), analyser=ENGLISH), "is empty"),
        (lambda: Explainer(bm25s_index(), "bilrp", analyser=ENGLISH), "use terms"),
        (lambda: Explainer(BM25(bm25s_index(), ENGLISH), analyser=ENGLISH), "analyser= splits texts for a BM25 index"),
        (lambda: Explainer(len, analyser=ENGLISH), "analyser= splits texts for a BM25 index"),
        (lambda: BM25(3), "int is no BM25 index"),
        (lambda: Explainer(bm25s_index(), analyser=lambda text: text).explain("a", "b"), "a list of strings"),
        (lambda: Explainer(bm25s_index(), analyser=lambda text: [1]).explain("a", "b"), "a list of strings"),
        (lambda: Explainer(bm25s_index(), analyser=lambda text: 1 / 0).explain("a", "b"), "failed on a text"),
        (
            lambda: Explainer(bm25s_index(), analyser=functools.partial(bm25s.tokenize, token_pattern="(a)(b)")),
            "groups",
        ),
        (lambda: Explainer(bm25s_index(), analyser=functools.partial(bm25s.tokenize, stopwords="xx")), "no stop words"),
    ],
)
def test_what_cannot_be_an_index_or_an_analyser_is_refused_in_words(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        make()


def test_what_words_cannot_do_is_refused_in_words() -> None:
    explainer = Explainer(bm25s_index(), analyser=ENGLISH)
    for call, words in (
        (lambda: explainer.evidence(QUERY, DOCUMENTS[0]), 'unit="sentence"'),
        (lambda: explainer.precompute(DOCUMENTS), "nothing to precompute"),
        (lambda: explainer.factor(DOCUMENTS), "no factors"),
        (lambda: explainer.plan(DOCUMENTS), "nothing to plan"),
        (lambda: explainer.query_vector(QUERY), "no vector per text"),
        (lambda: FaissRetriever.from_texts(DOCUMENTS, explainer), "no vector per text"),
        (lambda: explainer.subspaces(QUERY, DOCUMENTS[0], {}), "no parts by dimension"),
    ):
        with pytest.raises(InvalidInput, match=words):
            call()


def test_the_verbs_work_with_words() -> None:
    explainer = Explainer(bm25s_index(method="bm25+"), analyser=ENGLISH)
    highlights = explainer.highlight(QUERY, DOCUMENTS[1])
    assert highlights.top(1)[0].text in ("dog", "dogs")
    assert highlights.unattributed == pytest.approx(explainer.explain(QUERY, DOCUMENTS[1]).unattributed, abs=1e-6)
    contrast = explainer.contrast(QUERY, DOCUMENTS[0], DOCUMENTS[1])
    assert contrast.unattributed == pytest.approx(0.0, abs=1e-6)  # every document gets the same constants
    assert len(explainer.compare(QUERY, DOCUMENTS[0]).rows) == 1


def test_hits_views_and_the_log_show_the_terms(tmp_path: Path) -> None:
    found = [RetrievedDocument(id=str(index), text=text) for index, text in enumerate((*DOCUMENTS, "never seen"))]
    hits = HitExplainer(Explainer(bm25s_index(), analyser=ENGLISH)).hits(QUERY, found)
    hits.load("explanation")
    assert [hit.status for hit in hits] == ["ready"] * 5 + ["failed"]
    assert "none of the 5 documents" in (hits[5].reason or "")
    explanation = hits[1].explanation
    assert explanation is not None
    for shown in (str(explanation), explanation.to_html(), explanation._repr_html_()):
        assert "length factor" in shown
        assert "zebra" in shown
    assert Explanation.from_json(explanation.to_json()).terms == explanation.terms
    with ExplanationLog(tmp_path) as log:
        log.record(query=QUERY, answer="yes", hits=hits)
    (record,) = records(tmp_path)
    kept = record.hits[1].explanation
    assert kept is not None
    assert (kept.measure, kept.terms) == ("BM25", ())


def test_terms_leave_with_the_text_that_they_were_read_from() -> None:
    explanation = Explainer(bm25s_index(), analyser=ENGLISH).explain(QUERY, DOCUMENTS[1])
    data = explanation.to_dict()
    assert Explanation.from_dict({**data, "document": None}).terms == ()
    assert Explanation.from_dict({key: value for key, value in data.items() if key != "terms"}).terms == ()
