"""Models that read queries and documents with different modules: each half is that of its own tower."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Router
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

from rag_explain import Explainer, ShiftedEncoder
from rag_explain.cli import main
from rag_explain.encoder.model import Encoder
from rag_explain.errors import InvalidInput, ModelChanged, RagExplainError, UnsupportedModel
from rag_explain.faiss import FaissRetriever
from rag_explain.linear import LRP
from rag_explain.methods.frozen import freeze
from rag_explain.methods.jacobian import IntegratedJacobians
from rag_explain.results.notices import TRUNCATED
from rag_explain.scorers.bi_encoder import BiEncoder
from rag_explain.store import Store
from rag_explain.texts.tokens import Role
from tests.support.models import CORPUS, TEXTS, colbert, folder, routed, static, tiny
from tests.support.references import gradient_rows, lrp_rows, lrp_rows_with_biases
from tests.support.references_bti import C, match_words, token_saliency, word_piece_inverse
from tests.support.references_jacobian import integrated_jacobian
from tests.support.references_occlusion import matrix as occluded

QUERY, DOCUMENT = TEXTS
PROMPTS = {"query": "the cat: ", "document": "paris: "}
ROLES: tuple[Role, ...] = ("query", "document")
Model = SentenceTransformer


def dense(**options: Any) -> list[torch.nn.Module]:
    torch.manual_seed(7)
    return [Dense(16, 12, **options)]


def towers(kind: str) -> tuple[Model, Model]:
    """Two models that give embeddings of one width: what reads queries, and what reads documents."""
    found: dict[str, Callable[[], tuple[Model, Model]]] = {
        "two encoders": lambda: (tiny("bert", after=dense), tiny("mpnet", "cls", after=dense)),
        "one tokenizer": lambda: (tiny("bert"), tiny("distilbert")),
        "static queries": lambda: (static(width=16).to(torch.float64), tiny("bert")),
        "static documents": lambda: (tiny("roberta", "max"), static(width=16, kind="bytes").to(torch.float64)),
    }
    return found[kind]()


TWO = ["two encoders", "one tokenizer"]
MIXED = ["static queries", "static documents"]


def own(model: Model, query: str = QUERY, document: str = DOCUMENT) -> float:
    return float(model.similarity(model.encode_query(query), model.encode_document(document)))


def rows_of(model: Model, text: str, how: Callable[..., Any]) -> torch.Tensor:
    """(n, e) from the equations, of a tower as a model of its own: a table of word vectors has W[id_t] / n."""
    if isinstance(model[0], StaticEmbedding):
        ids = model[0].tokenizer.encode(text, add_special_tokens=False).ids
        table: torch.Tensor = model[0].embedding.weight.detach()[ids] / len(ids)
        return table
    features = dict(model.preprocess([text]))
    found = how(model, features)
    return (found[0] if isinstance(found, tuple) else found)[0].detach()


ORACLES: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "bilrp": ({}, lambda model, features: lrp_rows_with_biases(model, features, 0, gated=False)),
    "bilrp apart": ({"biases": "apart"}, lambda model, features: lrp_rows(model, features, 0, gated=False)),
    "bilrp block 1": (
        {"biases": "apart", "layer": 1},
        lambda model, features: lrp_rows(model, features, 1, gated=False),
    ),
    "hxp": ({}, lambda model, features: gradient_rows(model, features, 0)),
}


@pytest.mark.parametrize("measure", ["cosine", "dot"])
@pytest.mark.parametrize("kind", [*TWO, *MIXED])
@pytest.mark.parametrize("how", ORACLES)
def test_each_side_is_one_backward_pass_per_dimension_through_its_own_tower(kind: str, how: str, measure: str) -> None:
    options, oracle = ORACLES[how]
    query, document = towers(kind)
    model = routed(query, document, similarity_fn_name=measure)
    explainer = Explainer(model, how.split()[0], **options)
    explanation = explainer.explain(QUERY, DOCUMENT)
    asked, found = rows_of(query, QUERY, oracle), rows_of(document, DOCUMENT, oracle)
    # y = <phi(x), phi'(x')>, phi' the other tower; R_ii' = sum_m LRP_i([phi]_m, x) LRP_i'([phi']_m, x')
    one, other = (
        model.encode_query(QUERY, convert_to_tensor=True),
        model.encode_document(DOCUMENT, convert_to_tensor=True),
    )
    norms = one.norm() * other.norm() if measure == "cosine" else 1
    wanted = (asked @ found.T / norms).numpy()
    np.testing.assert_allclose(explanation.pairs, wanted, rtol=2e-6, atol=2e-6 * float(np.abs(wanted).max()))
    assert explanation.score == pytest.approx(float(one @ other / norms), rel=1e-6, abs=1e-7)
    assert explanation.gap == pytest.approx(0, abs=1e-5 * max(1, abs(explanation.score)))
    assert explanation.notices == ()


@torch.no_grad()
@pytest.mark.parametrize("kind", [*TWO, *MIXED])
def test_rows_and_rest_sum_to_what_encode_gives_in_double_precision(kind: str) -> None:
    query, document = towers(kind)
    model = routed(query, document)
    encoder = Encoder(model)
    halves = []
    for role, text in zip(ROLES, TEXTS, strict=True):
        batch = encoder.read([text], role)
        for layer in range(encoder.n_blocks):
            rows, rest = freeze(encoder, batch, layer, LRP, biases_by_position=True)[0].rows()
            encode = model.encode_query if role == "query" else model.encode_document
            wanted = encode([text], convert_to_tensor=True)
            assert torch.allclose(rows.sum(dim=1) + rest, wanted, atol=1e-9)
        halves.append(torch.cat([rows[0], rest]))
    # sum of the matrix = score = encode_query . encode_document
    score = model.encode_query(QUERY, convert_to_tensor=True) @ model.encode_document(DOCUMENT, convert_to_tensor=True)
    assert float((halves[0] @ halves[1].T).sum()) == pytest.approx(float(score), rel=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("kind", TWO)
@pytest.mark.parametrize("reference", ["padding", "zero"])
def test_integrated_jacobians_start_from_the_reference_of_their_own_tower(kind: str, reference: str) -> None:
    query, document = towers(kind)
    options: Any = {"tolerance": 1e-14, "max_nodes": 4, "reference": reference}
    scorer = BiEncoder(Encoder(routed(query, document)))
    method = IntegratedJacobians(scorer, 1, **options)
    for role, model, text in (("query", query, QUERY), ("document", document, DOCUMENT)):
        path = method.path(scorer.encoder.read([text], role), 0)  # type: ignore[arg-type]  # one of both roles
        wanted = integrated_jacobian(model, text, 1, normalise=True, nodes=4, across=True, filler=reference, task=role)
        assert (path.rows(2**24) - wanted.rows).abs().max() < 1e-9
        assert torch.allclose(path.reference, wanted.reference, atol=1e-9)
        assert torch.allclose(path.embedding, wanted.embedding, atol=1e-9)


@pytest.mark.parametrize("kind", TWO)
def test_pairs_of_ij_sum_to_the_score_but_for_what_references_share(kind: str) -> None:
    model = routed(*towers(kind))
    for method in ("ij", "ij-exact"):
        explanation = Explainer(model, method, tolerance=1e-5).explain(QUERY, DOCUMENT)
        assert explanation.gap == pytest.approx(0, abs=1e-4)
        if method == "ij":
            assert explanation.score == pytest.approx(own(model), abs=1e-6)
        else:
            assert "shifted" in (explanation.surrogate or "")


def test_a_tower_of_word_vectors_has_no_text_that_says_nothing() -> None:
    for kind, plural in zip(MIXED, ("queries", "documents"), strict=True):
        for method in ("ij", "ij-exact", "integrated-gradients"):
            with pytest.raises(UnsupportedModel, match=f"StaticEmbedding reads {plural}.*use bilrp"):
                Explainer(routed(*towers(kind)), method)


@pytest.mark.parametrize("kind", [*TWO, *MIXED])
def test_alignment_compares_the_last_vectors_of_both_towers_and_says_so(kind: str) -> None:
    query, document = towers(kind)
    explanation = Explainer(routed(query, document), "alignment").explain(QUERY, DOCUMENT)
    x, y = (last_vectors(model, text) for model, text in zip((query, document), TEXTS, strict=True))
    cosines = torch.nn.functional.normalize(x, dim=1) @ torch.nn.functional.normalize(y, dim=1).T
    maxsim = cosines.max(dim=1).values.sum()  # S = sum_i max_j E_qi E_dj^T
    assert explanation.score == pytest.approx(float(maxsim), abs=1e-5)
    assert any("read by different modules" in notice.text for notice in explanation.notices)


def last_vectors(model: Model, text: str) -> torch.Tensor:
    """(n, h) of the tokens of the text, without those that frame it."""
    if isinstance(model[0], StaticEmbedding):
        ids = model[0].tokenizer.encode(text, add_special_tokens=False).ids
        return model[0].embedding.weight.detach()[ids]
    features = dict(model.preprocess([text]))
    ids = features["input_ids"][0]
    inside = (ids != model.tokenizer.cls_token_id) & (ids != model.tokenizer.sep_token_id)
    found: torch.Tensor = model[0](features)["token_embeddings"][0, inside].detach()
    return found


def test_bti_matches_words_by_the_output_of_both_towers() -> None:
    query, document = tiny("bert").eval(), tiny("distilbert").eval()
    explainer = Explainer(routed(query, document), "bti", clusters=None)
    found = explainer.explain(QUERY, DOCUMENT)
    (e1, b1, own1), (e2, b2, own2) = (
        _propagated(model, text) for model, text in ((query, QUERY), (document, DOCUMENT))
    )
    s1 = token_saliency(b2.mean(dim=0), e1, b1, own1, "product")  # lines 1 and 2 of algorithm 1
    s2 = token_saliency(b1.mean(dim=0), e2, b2, own2, "product")
    members = [
        [[k for k, token in enumerate(tokens) if word.start <= token.start < word.end] for word in words]
        for tokens, words in zip(_tokens(explainer), (found.query_tokens, found.document_tokens), strict=True)
    ]
    w1, w1_s = word_piece_inverse(members[0], b1.detach(), s1)  # lines 3 and 4
    w2, w2_s = word_piece_inverse(members[1], b2.detach(), s2)
    wanted = np.zeros(found.pairs.shape)
    for i, j, score in match_words(w1, w2, w1_s, w2_s, False) + match_words(w2, w1, w2_s, w1_s, True):
        wanted[i, j] = score
    np.testing.assert_allclose(found.pairs, wanted, atol=1e-5)
    cosines = [[float(C(one, other, dim=0)) for other in w2] for one in w1]
    np.testing.assert_allclose(found.similarities, cosines, atol=1e-5)


def _tokens(explainer: Explainer) -> list[list[Any]]:
    read = [explainer.scorer.encoder.read([text], role).tokens[0] for role, text in zip(ROLES, TEXTS, strict=True)]
    return [[token for token in tokens if token.part == "text"] for tokens in read]


def _propagated(model: Model, text: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from tests.support.references_bti import _own, propagated

    hidden, output = propagated(model, text, "document", 0)
    return hidden, output, _own(model, text, "document")


@pytest.mark.parametrize("method", ["alignment", "bti", "embeddings"])
def test_vectors_of_tokens_of_other_widths_are_not_compared(method: str) -> None:
    model = routed(static(width=12).to(torch.float64), tiny("bert", after=dense))
    with pytest.raises(UnsupportedModel, match=r"of a query has 12 dimensions .* document 16.*use bilrp"):
        Explainer(model, method)
    explainer = Explainer(model)
    assert explainer.explain(QUERY, DOCUMENT).gap == pytest.approx(0, abs=1e-6)
    with pytest.raises(UnsupportedModel, match="cannot be compared"):
        explainer.evidence(QUERY, DOCUMENT)


@pytest.mark.parametrize("kind", [*TWO, *MIXED])
def test_occlusion_asks_each_tower_again(kind: str) -> None:
    model = routed(*towers(kind))
    explanation = Explainer(model, "occlusion").explain("the cat", "The moon. A dog barked.", unit="sentence")
    wanted = occluded(
        lambda text: model.encode_query(text).astype(np.float64).tolist(),
        lambda text: model.encode_document(text).astype(np.float64).tolist(),
        ("the cat", ["cat", "the"]),
        ("The moon. A dog barked.", ["A dog barked.", "The moon."]),
    )
    np.testing.assert_allclose(explanation.matrix, wanted, atol=1e-6)


@pytest.mark.parametrize("method", ["pooled", "embeddings", "gradient", "random", "shapley"])
@pytest.mark.parametrize("kind", [*TWO, *MIXED])
def test_every_other_method_explains_the_score_of_the_model(kind: str, method: str) -> None:
    model = routed(*towers(kind))
    assert Explainer(model, method).explain(QUERY, DOCUMENT).score == pytest.approx(own(model), abs=1e-6)


@pytest.mark.parametrize("kind", [*TWO, *MIXED])
def test_highlights_sum_to_the_score_and_evidence_is_found(kind: str) -> None:
    explainer = Explainer(routed(*towers(kind)))
    document = "Nobody barked. The cat looked at the moon. It was late."
    found = explainer.highlight(QUERY, document)
    assert sum(one.value for one in found) + found.unattributed == pytest.approx(found.score, abs=1e-5)
    by_word = explainer.explain(QUERY, document, unit="word")
    np.testing.assert_allclose([one.value for one in found], by_word.document_saliency(), atol=1e-5)
    evidence = explainer.evidence(QUERY, document, k=1)
    assert len(evidence) == 1
    assert any("read by different modules" in notice.text for notice in evidence.notices)


@pytest.mark.parametrize("kind", [*TWO, *MIXED])
def test_queries_of_one_length_share_a_structure(kind: str) -> None:
    model = routed(*towers(kind))
    explainer = Explainer(model)
    for text in ("the old dog", "the old cat", "the old moon", "the old mat"):
        assert explainer.explain(text, DOCUMENT).score == pytest.approx(own(model, text), abs=1e-6)
        assert explainer.explain(text, DOCUMENT).gap == pytest.approx(0, abs=1e-6)


def test_towers_of_unlike_depth_share_the_blocks_of_the_shallower_one() -> None:
    shallow = tiny("bert")
    shallow[0].auto_model.encoder.layer = shallow[0].auto_model.encoder.layer[:2]
    shallow[0].auto_model.config.num_hidden_layers = 2
    deep = tiny("mpnet")
    explainer = Explainer(routed(shallow, deep), "bilrp", layer=1)
    assert explainer.scorer.encoder.n_blocks == 2
    assert explainer.explain(QUERY, DOCUMENT).gap == pytest.approx(0, abs=1e-6)
    with pytest.raises(InvalidInput, match="layer must be between 0 and 1"):
        Explainer(routed(shallow, deep), layer=2)
    # The output of the last block is that of each tower, whatever its number there.
    found = Explainer(routed(shallow, deep), "alignment").explain(QUERY, DOCUMENT)
    x, y = last_vectors(shallow, QUERY), last_vectors(deep, DOCUMENT)
    cosines = torch.nn.functional.normalize(x, dim=1) @ torch.nn.functional.normalize(y, dim=1).T
    assert found.score == pytest.approx(float(cosines.max(dim=1).values.sum()), abs=1e-5)


# ---------------------------------------------------------------------- how texts are read


def test_each_tower_reads_with_its_own_tokenizer_prompt_and_limit() -> None:
    query, document = tiny("bert", dtype=torch.float32), tiny("roberta", dtype=torch.float32)
    document[0].max_seq_length = 20
    model = routed(query, document, prompts=PROMPTS)
    explanation = Explainer(model).explain(DOCUMENT, DOCUMENT)
    assert explanation.score == pytest.approx(own(model, DOCUMENT), abs=1e-6)
    assert [(one.code, one.side) for one in explanation.notices] == [(TRUNCATED, "document")]
    for role, tower, tokens in (
        ("query", query, explanation.query_tokens),
        ("document", document, explanation.document_tokens),
    ):
        ids = tower.preprocess([PROMPTS[role] + DOCUMENT])["input_ids"][0].tolist()
        assert [token.piece for token in tokens] == tower.tokenizer.convert_ids_to_tokens(ids)
        assert {token.part for token in tokens} == {"special", "prompt", "text"}
        for token in tokens:
            assert token.part != "text" or DOCUMENT[token.start : token.end] == token.text != ""


def test_one_transformer_with_a_projection_for_each_role() -> None:
    model = tiny("bert", dtype=torch.float32)
    shared = list(model.children())
    torch.manual_seed(9)
    router = Router.for_query_document([*shared, Dense(16, 8)], [*shared, Dense(16, 8)])
    both = SentenceTransformer(modules=[router], device="cpu")
    explanation = Explainer(both).explain(QUERY, DOCUMENT)
    assert explanation.score == pytest.approx(own(both), abs=1e-6)
    assert explanation.gap == pytest.approx(0, abs=1e-6)


def test_a_router_to_the_same_modules_is_as_good_as_none() -> None:
    model = tiny("bert", dtype=torch.float32)
    same = routed(model, model)
    np.testing.assert_allclose(
        Explainer(same).explain(QUERY, DOCUMENT).matrix, Explainer(model).explain(QUERY, DOCUMENT).matrix, atol=1e-6
    )
    assert Explainer(same).scorer.encoder.roles == ("document",)


@pytest.mark.parametrize("ends", ["neither", "query", "document", "both", "after"])
@pytest.mark.parametrize("measure", ["cosine", "dot"])
@pytest.mark.parametrize("kind", ["two encoders", "static queries"])
def test_normalisation_in_a_tower_and_behind_it(kind: str, measure: str, ends: str) -> None:
    query, document = towers(kind)
    if ends in ("query", "both"):
        query.append(Normalize())
    if ends in ("document", "both"):
        document.append(Normalize())
    model = routed(query, document, *([Normalize()] if ends == "after" else []), similarity_fn_name=measure)
    explainer = Explainer(model)
    explanation = explainer.explain(QUERY, DOCUMENT)
    assert explanation.score == pytest.approx(own(model), rel=1e-5)
    assert explanation.gap == pytest.approx(0, abs=1e-5)
    np.testing.assert_allclose(explainer.query_vector(QUERY), model.encode_query(QUERY), atol=1e-6)
    np.testing.assert_allclose(explainer.document_vectors([DOCUMENT])[0], model.encode_document(DOCUMENT), atol=1e-6)


def test_routes_are_found_as_the_model_finds_them() -> None:
    query, document = tiny("bert", dtype=torch.float32), tiny("mpnet", dtype=torch.float32)
    chains = {"small": list(query.children()), "large": list(document.children()), "spare": list(query.children())}
    mappings = {("query", "text"): "small", ("document", None): "large", (None, None): "spare"}
    model = SentenceTransformer(modules=[Router(chains, route_mappings=mappings)], device="cpu")
    assert Explainer(model).explain(QUERY, DOCUMENT).score == pytest.approx(own(model), abs=1e-6)
    inner = Router(chains, route_mappings=mappings)
    nested = Router.for_query_document([inner], list(document.children()))
    model = SentenceTransformer(modules=[nested], device="cpu")
    assert Explainer(model).explain(QUERY, DOCUMENT).score == pytest.approx(own(model), abs=1e-6)


def test_a_router_without_a_route_for_a_role_is_refused_with_its_own_words() -> None:
    chains = {"other": list(tiny("bert").children())}
    model = SentenceTransformer(modules=[Router(chains, default_route=None, allow_empty_key=False)], device="cpu")
    with pytest.raises(UnsupportedModel, match="No route found for task type 'query'"):
        Explainer(model)


def test_two_tables_of_word_vectors_are_explained_by_bare_words() -> None:
    query, document = static(width=8), static(Normalize(), width=8, kind="bytes")
    model = routed(query, document)
    explanation = Explainer(model).explain(QUERY, DOCUMENT)
    asked, found = rows_of(query, QUERY, lambda: None), rows_of(document, DOCUMENT, lambda: None)
    wanted = asked @ found.T / asked.sum(dim=0).norm() / found.sum(dim=0).norm()
    np.testing.assert_allclose(explanation.pairs, wanted, atol=1e-6)
    assert explanation.method == "static"
    assert explanation.score == pytest.approx(own(model), abs=1e-6)
    assert explanation.gap == pytest.approx(0, abs=1e-6)


def test_a_late_interaction_encoder_with_two_towers() -> None:
    query, document = list(colbert().children()), list(colbert("roberta").children())
    model = MultiVectorEncoder(modules=[Router.for_query_document(query, document)], device="cpu")
    explanation = Explainer(model).explain(QUERY, DOCUMENT)
    wanted = model.similarity(model.encode_query([QUERY]), model.encode_document([DOCUMENT]))
    assert explanation.score == pytest.approx(float(wanted), abs=1e-5)
    assert explanation.gap == pytest.approx(0, abs=1e-5)
    assert explanation.notices == ()


# ---------------------------------------------------------------------- what is refused


def test_a_tower_that_cannot_be_explained_is_named() -> None:
    odd = torch.nn.Identity()
    odd.preprocess = lambda *args, **kwargs: {}  # type: ignore[assignment]
    model = SentenceTransformer(
        modules=[Router.for_query_document([odd], list(tiny("bert").children()))],  # type: ignore[list-item]
        device="cpu",
    )
    with pytest.raises(RagExplainError, match="what reads queries in the model begins with Identity"):
        Explainer(model)


def test_a_table_that_shares_the_tokenizer_of_a_transformer_is_refused() -> None:
    document = tiny("bert", dtype=torch.float32)
    words = StaticEmbedding(document.tokenizer, embedding_dim=16)
    with pytest.raises(UnsupportedModel, match=r"shares its tokenizer.*give it a copy"):
        Explainer(routed(SentenceTransformer(modules=[words], device="cpu"), document))


def test_one_shifted_tower_is_refused_and_two_are_explained() -> None:
    def shifted(name: str) -> Model:
        return SentenceTransformer(modules=[ShiftedEncoder(str(folder(name))), tiny(name)[1]], device="cpu")

    with pytest.raises(UnsupportedModel, match="shift both"):
        Explainer(routed(shifted("bert"), tiny("mpnet", dtype=torch.float32)))
    model = routed(shifted("bert"), shifted("distilbert"))
    explanation = Explainer(model, "ij-exact").explain(QUERY, DOCUMENT)
    assert explanation.score == pytest.approx(own(model), abs=1e-5)
    assert explanation.surrogate is None
    with pytest.raises(InvalidInput, match="use ij-exact"):
        Explainer(model, "ij")


# ---------------------------------------------------------------------- which model it is


def _weights(number: int) -> Callable[[Any], None]:
    def write(model: Any) -> None:
        first = list(model[0].sub_modules.values())[number][0]
        with torch.no_grad():
            table = next(first.parameters())
            table[len(table) // 2 :] *= 1.5

    return write


def _lowercase(number: int) -> Callable[[Any], None]:
    def write(model: Any) -> None:
        first = list(model[0].sub_modules.values())[number][0]
        tokenizer = getattr(first.tokenizer, "backend_tokenizer", first.tokenizer)
        tokenizer.normalizer = None

    return write


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", ["two encoders", "static queries", "static documents"])
def test_weights_of_either_tower_are_part_of_which_model_it_is(kind: str, number: int) -> None:
    model = routed(*towers(kind))
    explainer = Explainer(model)
    before = explainer.explain(QUERY, DOCUMENT)
    _weights(number)(model)
    after = explainer.explain(QUERY, DOCUMENT)
    assert after.fingerprint != before.fingerprint
    assert after.score == pytest.approx(own(model), abs=1e-6)
    assert after.score != pytest.approx(before.score, abs=1e-6)
    assert Explainer(model).scorer.fingerprint == after.fingerprint
    assert Explainer(routed(*towers(kind))).scorer.fingerprint == before.fingerprint


def _tokenizer(number: int) -> Callable[[Any], None]:
    def write(model: Any) -> None:
        list(model[0].sub_modules.values())[number][0].processor = tiny("xlm-roberta").tokenizer

    return write


CHANGES: dict[str, Callable[[Any], Any]] = {
    "the first normaliser": _lowercase(0),
    "the second normaliser": _lowercase(1),
    "the second tokenizer": _tokenizer(1),
    "a module in a tower": lambda model: model[0].sub_modules["document"].append(Normalize()),
    "the way to the towers": lambda model: model[0].route_mappings.update({("query", None): "document"}),
    "the limit of a tower": lambda model: setattr(model[0].sub_modules["document"][0], "max_seq_length", 6),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_other_change_of_either_tower_is_noticed(change: str) -> None:
    model = routed(tiny("bert", dtype=torch.float32), tiny("mpnet", dtype=torch.float32))
    explainer = Explainer(model)
    before = explainer.explain(QUERY, DOCUMENT).fingerprint
    CHANGES[change](model)
    with pytest.raises(ModelChanged):
        explainer.explain(QUERY, DOCUMENT)
    assert Explainer(model).scorer.fingerprint != before


# ---------------------------------------------------------------------- what works over it


@pytest.mark.parametrize("kind", ["two encoders", "static queries"])
def test_factors_of_documents_are_kept_and_served_to_queries_of_the_other_tower(kind: str, tmp_path: Path) -> None:
    model, documents = routed(*towers(kind)), [f"{text}. And the moon." for text in CORPUS]
    with Explainer(model, store=tmp_path) as explainer:
        cold = explainer.explain_many(QUERY, documents)
        assert explainer.precompute(documents, unit="token", progress=False).built == len(documents)
    with Explainer(model, store=Store(tmp_path)) as explainer:
        warm = explainer.explain_many(QUERY, documents)
        assert {one.provenance["path"] for one in warm} == {"disk"}
        for one, other, text in zip(cold, warm, documents, strict=True):
            np.testing.assert_allclose(one.matrix, other.matrix, atol=2e-3)
            assert one.score == pytest.approx(own(model, QUERY, text), abs=1e-6)
        sentences = explainer.explain(QUERY, documents[0], unit="sentence")
        assert len(sentences.document_tokens) == 2
        parts = explainer.subspaces(QUERY, documents[0], {"first": (0, 3)})
        assert sum(part.score for part in parts.values()) == pytest.approx(cold[0].score, abs=1e-5)
        contrast = explainer.contrast(QUERY, documents[0], documents[1])
        assert contrast.wanted.score == pytest.approx(cold[0].score, abs=2e-3)


@pytest.mark.parametrize("kind", ["two encoders", "static queries"])
def test_an_index_over_it_is_searched_explained_and_loaded_again(kind: str, tmp_path: Path) -> None:
    model = routed(*towers(kind), Normalize())
    retriever = FaissRetriever.from_texts(CORPUS, Explainer(model))
    hits = retriever.search(QUERY, 3)
    for hit in hits:
        assert hit.explanation is not None
        assert hit.score == pytest.approx(own(model, QUERY, hit.text), abs=1e-5)
        assert hit.gap == pytest.approx(0, abs=1e-5)
        assert hit.explanation.surrogate is None
    retriever.save(tmp_path / "index")
    again = FaissRetriever.load(tmp_path / "index", Explainer(model)).search(QUERY, 3)
    assert [hit.id for hit in again] == [hit.id for hit in hits]


@pytest.mark.parametrize("kind", ["two encoders", "static queries"])
def test_the_command_line_takes_a_folder(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where, data = tmp_path / "model", tmp_path / "a.txt"
    routed(*(tower.to(torch.float32) for tower in towers(kind))).save(str(where), create_model_card=False)
    data.write_text(" ".join(f"{text.capitalize()}." for text in CORPUS), encoding="utf-8")
    assert main(["doctor", str(where)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "queries:" in shown
    assert "documents:" in shown
    assert shown.count("rows + rest = embedding") == 2
    index = ["--index", str(tmp_path / "index")]
    assert main(["index", str(data), *index, "--chunk", "20", "--model", str(where)]) == 0
    capsys.readouterr()
    assert main(["search", "the moon", *index, "-k", "2", "--json"]) == 0
    hits = json.loads(capsys.readouterr().out)
    assert len(hits) == 2
    assert all(abs(hit["gap"]) < 1e-5 for hit in hits)
