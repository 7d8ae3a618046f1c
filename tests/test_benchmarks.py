"""The measures that defaults are chosen by, on data where the right answer is known."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import data_sets, measures
from rag_explain import Explainer, Explanation
from rag_explain.encoder.model import Encoder
from rag_explain.results.contrast import Contrast
from rag_explain.texts.tokens import Token
from tests.support.models import TEXTS, tiny
from tests.support.references_jacobian import integrated_jacobian

ROOT = Path(__file__).parent.parent


def words_of(text: str) -> tuple[Token, ...]:
    return tuple(Token(text[start:end], start, end) for start, end in measures.blank_spans(text))


def by_words(query: str, document: str, matrix: Any, score: float = 1.0) -> Explanation:
    return Explanation(
        query=query,
        document=document,
        query_tokens=words_of(query),
        document_tokens=words_of(document),
        matrix=np.array(matrix, dtype=np.float32),
        score=score,
        method="bilrp",
        unit="word",
    )


FOX = by_words("red fox", "a fox ran", [[0, 0.5, -0.25, 0], [0, 1, 0.5, 0], [0.75, 0, 0, 0.125]], score=2.0)


def test_saliency_over_the_whole_query_also_counts_what_no_query_word_carries() -> None:
    assert measures.over_query_words(FOX).tolist() == [0, 1.5, 0.25]
    assert measures.over_whole_query(FOX).tolist() == [0.75, 1.5, 0.25]
    assert measures.no_pair(FOX) == 0.25
    assert measures.no_word(FOX) == -0.5


def test_a_contrast_counts_when_no_word_outweighs_the_difference() -> None:
    wanted = by_words("a", "b", [[0.5, 0], [0, -0.25]], score=0.25)
    same_pair = by_words("a", "b", [[0.5, 0], [0, 0.25]], score=0.75)  # all of the difference, and not more
    assert measures.exceeds_difference(Contrast(wanted, same_pair), measures.no_pair) == 0.0
    less_pair = by_words("a", "b", [[0.25, 0], [0, 0.25]], score=0.5)  # 0.5 of a difference of 0.25
    assert measures.exceeds_difference(Contrast(wanted, less_pair), measures.no_pair) == 1.0


def test_words_are_left_out_without_a_trace() -> None:
    order = measures.largest_first(measures.over_query_words(FOX))
    assert order == [1, 2, 0]
    assert measures.deletions(FOX, order, measures.every_count(3)) == ["a ran", "a"]
    assert measures.deletions(FOX, [0], [1]) == ["fox ran"]


@pytest.mark.parametrize(("curve", "expected"), [([2, 2, 2], 1.0), ([1, 0], 0.5), ([4, 2, 0], 0.5), ([4, 0, 0], 0.25)])
def test_the_area_under_a_known_curve(curve: list[float], expected: float) -> None:
    assert measures.area(curve) == expected


def test_a_share_of_the_words_is_at_least_one_and_never_all() -> None:
    assert measures.top_counts(100, (0.05, 0.1, 0.2)) == [5, 10, 20]
    assert measures.top_counts(3, (0.05, 0.9)) == [1, 2]
    assert measures.lost(0.5, 0.125) == 0.75


def test_tokens_come_back_in_steps_of_a_twenty_fifth() -> None:
    shares = measures.fractions()
    assert len(shares) == 26
    assert shares[[0, 1, 25]].tolist() == [0.0, 0.04, 1.0]
    assert measures.added(25, shares) == list(range(26))
    assert measures.added(2, shares) == [0] * 7 + [1] * 12 + [2] * 7  # one from 0.28 on, both from 0.76 on
    assert measures.added(50, shares)[:3] == [0, 2, 4]


def test_the_first_in_the_order_come_back_first() -> None:
    there = measures.restored([2, 0, 1], [0, 1, 2, 3])
    assert there.astype(int).tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1]]


def test_the_area_under_known_distances() -> None:
    # From (3, 4) away to nothing: 5 in the beginning, 0 at the end.
    assert measures.distances(np.array([[3.0, 4.0], [0.0, 0.0]]), np.zeros(2)).tolist() == [5.0, 0.0]
    shares = measures.fractions()
    assert measures.area_over(shares, 5 * (1 - shares)) == pytest.approx(2.5)  # a triangle
    assert measures.area_over(shares, np.full(26, 3.0)) == pytest.approx(3.0)
    # All in the first step: half a step of the triangle from 5 to 0.
    assert measures.area_over(shares, [5.0, *[0.0] * 25]) == pytest.approx(0.1)


def test_average_precision_of_two_by_two() -> None:
    wanted = np.array([[True, False], [False, True]])
    assert measures.average_precision(np.array([[0.9, 0.1], [0.2, 0.8]]), wanted) == 1.0
    # Ranked: wanted, not, wanted, not: (1 / 1 + 2 / 3) / 2.
    assert measures.average_precision(np.array([[0.9, 0.8], [0.1, 0.5]]), wanted) == pytest.approx((1 + 2 / 3) / 2)
    assert measures.average_precision(np.zeros((2, 2)), wanted) == 0.5  # equal cells are ranked together


def test_average_precision_is_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    generator = np.random.default_rng(0)
    for _ in range(50):
        values, wanted = generator.integers(0, 4, (4, 5)).astype(float), generator.random((4, 5)) < 0.3
        wanted[0, 0] = True
        expected = metrics.average_precision_score(wanted.ravel(), values.ravel())
        assert measures.average_precision(values, wanted) == pytest.approx(expected)


def test_mutual_best_cells_and_their_f1() -> None:
    chosen = measures.mutual_best(np.array([[0.9, 0.8], [0.7, 0.1], [-1, -0.5]]))
    assert chosen.tolist() == [[True, False], [False, False], [False, False]]
    wanted = np.array([[True, False], [False, True], [False, False]])
    assert measures.precision_recall_f1(chosen, wanted) == (1.0, 0.5, pytest.approx(2 / 3))
    assert measures.precision_recall_f1(~wanted & chosen, wanted) == (0.0, 0.0, 0.0)


def test_words_of_the_library_are_summed_to_words_between_blanks() -> None:
    text = "Italy's U.S. x"
    words = tuple(Token(text[a:b], a, b) for a, b in ((0, 5), (5, 7), (8, 11), (11, 12)))  # the last one was not read
    explanation = Explanation(
        query="q", document=text, query_tokens=(Token("q", 0, 1),), document_tokens=words,
        matrix=np.array([[1, 2, 4, 8, 0], [0] * 5]), score=15, method="bilrp", unit="word",
    )  # fmt: skip
    assert measures.regrouped(explanation, explanation.pairs, np.add).tolist() == [[3, 12, 0]]
    assert measures.regrouped(explanation, explanation.pairs, np.maximum).tolist() == [[2, 8, 0]]


def test_bounds_hold_the_mean_and_are_the_same_every_time() -> None:
    values = np.random.default_rng(1).normal(3.0, 1.0, 400).tolist()
    found = measures.bounded(values)
    normal = 1.96 * np.std(values) / 20
    assert found["low"] == pytest.approx(np.mean(values) - normal, abs=0.02)
    assert found["high"] == pytest.approx(np.mean(values) + normal, abs=0.02)
    assert measures.bounded(values) == found
    assert measures.difference(values, [value - 1 for value in values]) == pytest.approx(
        {"mean": 1.0, "low": 1.0, "high": 1.0}
    )


def write_data(folder: Path) -> None:
    """A folder as the public data sets lie in it, with next to nothing in it."""
    for name in ("cranfield", "stsbenchmark", "xquad", "msr_rte_align", "edinburgh_pp"):
        (folder / name).mkdir()
    documents = ("wings carry aircraft", "the boundary layer of a wing", "boundary layer")
    records = "".join(f".I {place}\n.T\nx\n.W\n{text}\n" for place, text in enumerate(documents, 1))
    (folder / "cranfield" / "cran.all.1400").write_text(records)
    (folder / "cranfield" / "cran.qry").write_text(".I 007\n.W\nwhat is a boundary layer\n")
    (folder / "cranfield" / "cranqrel").write_text("1 1 2\n")
    rows = ["g\tf\t2012\t1\t5.0\tA man plays.\tA man is playing.", "g\tf\t2012\t2\t0.0\tA man plays.\tTax law."]
    (folder / "stsbenchmark" / "sts-dev.csv").write_text("\n".join(rows) + "\n")
    questions = [{"question": "Who ate the cake?"}, {"question": "What did Ann eat?"}]
    paragraph = {"context": "Ann ate the cake. It rained.", "qas": questions}
    (folder / "xquad" / "xquad.en.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    pair = {"source": "Ann ate a cake .", "target": "Ann ate .", "sureAlign": "0-0 1-1 4-2"}
    items = [pair, {**pair, "sureAlign": ""}]
    (folder / "msr_rte_align" / "RTE2_dev_M.align.json").write_text(json.dumps(items))
    (folder / "edinburgh_pp" / "gold.train.sure.json").write_text(json.dumps([pair, pair]))


def test_data_sets_are_read_as_they_are_published(tmp_path: Path) -> None:
    write_data(tmp_path)
    collection = data_sets.collection_in(tmp_path / "cranfield")
    assert collection.documents["3"] == "boundary layer"
    assert collection.queries == {"1": "what is a boundary layer"}
    assert collection.relevant == {"1": {"1"}}
    assert data_sets.sts_benchmark(tmp_path / "stsbenchmark" / "sts-dev.csv")[1] == ("A man plays.", "Tax law.", 0.0)
    assert len(data_sets.xquad(tmp_path / "xquad" / "xquad.en.json")) == 2
    (pair,) = data_sets.msr_alignments(tmp_path / "msr_rte_align" / "RTE2_dev_M.align.json")
    assert (pair.query, pair.document) == ("Ann ate .", "Ann ate a cake .")
    assert pair.aligned == {(0, 0), (1, 1), (2, 4)}


def run(script: str, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """What a benchmark writes and prints."""
    out = folder / "out.json"
    command = [sys.executable, f"benchmarks/{script}", "--data", str(folder), "--json", str(out), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert str(folder) not in out.read_text()
    return json.loads(out.read_text()), done.stdout


@pytest.mark.slow
def test_settings_are_compared_on_the_same_pairs(tmp_path: Path) -> None:
    write_data(tmp_path)
    settings = ['one={"method": "bilrp"}', 'same={"method": "bilrp"}', 'other={"method": "hxp"}']
    result, printed = run("choices.py", tmp_path, "--settings", *settings)
    rows = {(row["set"], row["measure"]): row for row in result["rows"]}
    counts = {name: row["n"] for (name, _), row in rows.items()}
    assert counts == {"all": 6, "cranfield": 1, "stsb": 1, "xquad": 2, "msr": 1}  # two explanations of a contrast
    for row in rows.values():
        assert row["labels"]["same"]["difference"] == pytest.approx({"mean": 0, "low": 0, "high": 0}, abs=1e-6)
    assert rows["all", "unattributed, pairs"]["labels"]["other"]["difference"]["mean"] > 1e-3
    assert rows["msr", "AP of cells"]["labels"]["equal words"]["mean"] == 1.0
    assert "AP of cells" in printed


@pytest.fixture
def faithfulness(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command as a module, which finds its neighbours where it is run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("faithfulness")


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_matches_by_output_are_those_of_bti_and_by_input_are_others(
    monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bti: Any = importlib.import_module("bti")
    scorer = Explainer(tiny(architecture)).scorer
    found = Explainer(scorer, "bti", clusters=None).explain(*TEXTS)
    by_output = bti.cosines(scorer.encoder, *TEXTS, scorer.encoder.n_blocks)
    np.testing.assert_allclose(by_output, found.similarities, atol=1e-5)
    by_input = bti.cosines(scorer.encoder, *TEXTS, 0)
    row = bti.compared(scorer.encoder, *TEXTS)
    assert row["cosine moves by at most"] == pytest.approx(float(np.abs(by_output - by_input).max()))
    pairs = [
        {(i, int(table[i].argmax())) for i in range(len(table))}
        | {(int(column.argmax()), j) for j, column in enumerate(table.T)}
        for table in (by_input, by_output)
    ]
    assert row["share of the pairs that stay"] == pytest.approx(len(pairs[0] & pairs[1]) / len(pairs[0]))


def test_references_of_the_demos_documents_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    references: Any = importlib.import_module("references")
    model = tiny("bert")
    encoder = Encoder(model)
    for row in references.demo(encoder):
        assert row["documents"] == 56
        assert row["f(r_a, r_b)"]["least"] < row["f(r_a, r_b)"]["mean"] < 1
        one, other = (
            integrated_jacobian(model, text, 0, normalise=True, nodes=1, task=role)
            for text, role in ((row["question"], "query"), (references.LONG, "document"))
        )
        expected = float(one.reference @ other.reference)
        assert row["f(r_a, r_b) with 142 tokens"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_a_sentence_starts_as_mask_tokens_between_the_tokens_that_frame_it(
    faithfulness: Any, architecture: str
) -> None:
    model = tiny(architecture)
    encoder = Encoder(model)
    text = "The cat sat"
    n = len(encoder.read([text], "document").tokens[0])
    kept = np.zeros((n + 1, n), dtype=bool)
    kept[:, [0, -1]] = True
    for count in range(n + 1):
        kept[count, 1 : 1 + count] = True
    vectors, whole = faithfulness.masked(encoder, text, "document", kept)
    features = model.preprocess([text])
    for there, vector in zip(kept, vectors, strict=True):
        ids = features["input_ids"].clone()
        ids[0, ~torch.as_tensor(there)] = model.tokenizer.mask_token_id
        with torch.no_grad():
            wanted = model({**features, "input_ids": ids})["sentence_embedding"][0]
        np.testing.assert_allclose(vector, wanted.numpy(), atol=1e-6)
    np.testing.assert_allclose(vectors[-1], whole, atol=1e-9)


@pytest.mark.parametrize("unit", ["token", "word"])
def test_the_area_of_a_sentence_is_that_of_the_steps_by_hand(faithfulness: Any, unit: str) -> None:
    """Two words: 13 of the 25 steps begin with one of them and 7 with both, whose distance is zero."""
    encoder = Encoder(tiny("bert"))
    explainer = Explainer(tiny("bert"), "bilrp")
    tokens = explainer.explain("The cat", "A dog barked")
    shown = tokens if unit == "token" else tokens.by_word()
    texts = [token.part == "text" for token in tokens.query_tokens]
    own = [place for place, is_text in enumerate(texts) if is_text]
    assert len(own) == 2  # "The" and "cat" are a token each here, so that tokens are words
    first = max(own, key=lambda place: float(tokens.pairs[place].sum()))
    kept = np.array([[not is_text for is_text in texts]] * 2)
    kept[1, first] = True
    vectors, whole = faithfulness.masked(encoder, "The cat", "query", kept)
    none, one = np.linalg.norm(vectors - whole, axis=1)
    found, _ = faithfulness.added_back(encoder, shown, tokens, "query")
    # 0 to 0.24 none, a slope to 0.28, one to 0.72, a slope to 0.76
    assert found == pytest.approx(0.24 * none + 0.04 * (none + one) / 2 + 0.44 * one + 0.04 * one / 2, rel=1e-5)


@pytest.mark.slow
def test_two_protocols_of_faithfulness_run_on_the_same_pairs(tmp_path: Path) -> None:
    write_data(tmp_path)
    settings = ['one={"method": "bilrp"}', 'same={"method": "bilrp"}', 'other={"method": "random"}']
    result, printed = run("faithfulness.py", tmp_path, "--settings", *settings)
    rows = {(row["set"], row["measure"]): row for row in result["rows"]}
    assert rows["added back", "tokens, embedding"]["n"] == 2
    assert rows["deletion", "words"]["n"] == 1  # the other pair's score is too low
    for row in rows.values():
        assert row["labels"]["same"]["difference"] == pytest.approx({"mean": 0, "low": 0, "high": 0}, abs=1e-6)
    assert "added back" in printed


@pytest.mark.slow
def test_an_unrelated_document_is_measured_beside_its_own(tmp_path: Path) -> None:
    write_data(tmp_path)
    settings = ['papers={"method": "ij", "layer": 5, "along_reference": "pairs"}', 'ij={"method": "ij", "layer": 5}']
    result, _ = run("choices.py", tmp_path, "--settings", *settings, "--sets", "unrelated-xquad", "unrelated-cranfield")
    rows = {(row["set"], row["measure"]): row for row in result["rows"]}
    left = rows["unrelated-xquad", "|sum of pairs - score|, related"]["labels"]
    assert left["ij"]["mean"] < 0.1 < left["papers"]["mean"]
    order = rows["unrelated-xquad", "order of the related pairs, with the first"]["labels"]
    assert order["papers"]["mean"] == 1.0


@pytest.mark.slow
def test_ways_to_link_words_are_compared_on_two_halves(tmp_path: Path) -> None:
    pytest.importorskip("ot")
    write_data(tmp_path)
    result, _ = run("links.py", tmp_path)
    rows = {(row["set"], row["half"], row["way"]): row for row in result["rows"]}
    assert {(name, half) for name, half, _ in rows} == {
        ("msr", "choose"), ("edinburgh", "choose"), ("edinburgh", "report"),
    }  # fmt: skip
    assert rows["edinburgh", "report", "links"]["recall"] == 1.0  # "Ann ate ." in both texts
