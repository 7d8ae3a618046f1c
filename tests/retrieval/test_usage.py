"""How an embedding object uses its model is seen without running or touching it, and a copy of the model does it."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from rag_explain.explainer import Explainer
from rag_explain.results.notices import UNCHECKED
from rag_explain.retrieval import Embedder, HitExplainer, RetrievedDocument
from rag_explain.retrieval.holders import with_model
from rag_explain.retrieval.usage import model_as_used
from tests.support.models import CORPUS, tiny

PROMPTS = {"query": "where: ", "document": "the moon: ", "other": "a cat: "}
QUERY = "where is\nthe cat?"


@cache
def model(include_prompt: bool = True) -> SentenceTransformer:
    return tiny("roberta", prompts=PROMPTS, include_prompt=include_prompt)


class Own:
    """Someone's own embeddings: `way` is how they call their model."""

    def __init__(self, encoder: SentenceTransformer, way: Any) -> None:
        self.encoder, self.way = encoder, way

    def embed(self, text: str, role: str) -> Any:
        return self.way(self.encoder, text, role)


def embedder(way: Any, encoder: SentenceTransformer | None = None) -> Embedder:
    calls = {
        "query": lambda one, text: one.embed(text, "query"),
        "document": lambda one, text: one.embed(text, "document"),
    }
    return Embedder(Own(encoder or model(), way), calls)  # type: ignore[arg-type]


WAYS: dict[str, Any] = {
    "encode": lambda m, text, role: m.encode(text),
    "a list": lambda m, text, role: m.encode([text], batch_size=1, show_progress_bar=False)[0],
    "by role": lambda m, text, role: m.encode_query(text) if role == "query" else m.encode_document(text),
    "one role for both": lambda m, text, role: m.encode_query([text])[0],
    "named": lambda m, text, role: m.encode(text, "other"),
    "prompt": lambda m, text, role: m.encode(text, prompt=f"{role}! "),
    "in the text": lambda m, text, role: m.encode(f"{role}! {text}"),
    "both": lambda m, text, role: m.encode(f"{role}! " + text.replace("\n", " "), prompt_name="other"),
    "truncated": lambda m, text, role: m.encode(text, truncate_dim=8, normalize_embeddings=True),
    "tensors": lambda m, text, role: m.encode(text, convert_to_tensor=True).numpy(),
}


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_as_used_embeds_and_reads_as_the_embeddings_do(way: str, include_prompt: bool) -> None:
    mine = embedder(WAYS[way], model(include_prompt))
    usage = mine.usage()
    assert usage is not None
    used = model_as_used(model(include_prompt), usage)
    explainer = Explainer(used)
    for role in ("query", "document"):
        wanted = np.asarray(mine.calls[role](mine.holder, QUERY))  # type: ignore[index]
        np.testing.assert_allclose(getattr(used, f"encode_{role}")(QUERY), wanted, atol=1e-9)
        np.testing.assert_allclose(getattr(used, f"encode_{role}")([QUERY])[0], wanted, atol=1e-9)
        own = explainer.scorer.embed([QUERY], role)[0].astype(np.float64)  # type: ignore[arg-type]
        np.testing.assert_allclose(own / np.linalg.norm(own), wanted / np.linalg.norm(wanted), atol=1e-6)
        tokens = explainer.scorer.encoder.read([QUERY], role).tokens[0]  # type: ignore[arg-type]
        assert all(QUERY[one.start : one.end] == one.text for one in tokens if one.part == "text")
        seen = {place for one in tokens if one.part == "text" for place in range(one.start, one.end)}
        assert {place for place, letter in enumerate(QUERY) if letter.strip()} <= seen
        has_prompt = bool(getattr(usage, role).prompt + getattr(usage, role).prefix)
        assert ("prompt" in {one.part for one in tokens}) == has_prompt


@pytest.mark.parametrize(
    "way",
    [
        lambda m, text, role: m.encode(text.upper()),
        lambda m, text, role: m.encode(text + " please"),
        lambda m, text, role: m.encode(text, precision="int8"),
        lambda m, text, role: m.encode([text, text])[0],
        lambda m, text, role: m.encode(text, truncate_dim=8 if role == "query" else 12),
        lambda m, text, role: m[0].tokenizer(text),
        lambda m, text, role: text["no such thing"],
    ],
)
def test_what_these_words_cannot_tell_is_not_guessed(way: Any) -> None:
    assert embedder(way).usage() is None


def test_seeing_runs_nothing_and_leaves_everything_as_it_was() -> None:
    cache: dict[str, Any] = {}
    forwards = 0

    def way(encoder: SentenceTransformer, text: str, role: str) -> Any:
        try:
            cache[text] = encoder.encode(text)
        except Exception:  # what reports or retries errors
            cache[text] = "failed"
        return cache[text]

    mine = embedder(way)
    before = {name: copy.copy(value) for name, value in vars(model()).items() if not name.startswith("_")}

    def count(*args: Any) -> None:
        nonlocal forwards
        forwards += 1

    handle = model().register_forward_hook(count)
    assert mine.usage() is not None
    handle.remove()
    assert (forwards, cache) == (0, {})
    assert {name: value for name, value in vars(model()).items() if not name.startswith("_")} == before
    assert mine.holder.encoder is model()  # type: ignore[attr-defined]


def test_no_process_is_started_to_see_how_several_would_be_used() -> None:
    def way(encoder: SentenceTransformer, text: str, role: str) -> Any:
        pool = encoder.start_multi_process_pool()
        return encoder.encode_multi_process([text], pool)[0]

    usage = embedder(way).usage()
    assert usage is not None
    assert usage.query.prompt == ""


def test_what_cleans_up_after_itself_is_not_copied() -> None:
    class Closing(Own):
        closed = 0

        def __del__(self) -> None:
            type(self).closed += 1

    holder = Closing(model(), WAYS["encode"])
    assert with_model(holder, model(), None) is None
    assert Closing.closed == 0


def test_a_dot_product_of_vectors_of_length_one_is_a_cosine() -> None:
    dot = tiny(similarity_fn_name="dot")
    for normalise, similarity in ((True, "cosine"), (False, "dot")):
        usage = embedder(lambda m, text, role, n=normalise: m.encode(text, normalize_embeddings=n), dot).usage()
        assert usage is not None
        assert Explainer(model_as_used(dot, usage)).scorer.measure == similarity
    assert dot.similarity_fn_name == "dot"


def documents() -> list[RetrievedDocument]:
    return [RetrievedDocument(id="a", text=CORPUS[0])]


def test_wrappers_share_an_explainer_for_each_way_to_use_a_model() -> None:
    encoder = tiny(dtype=torch.float32)
    plain, other = embedder(WAYS["encode"], encoder), embedder(WAYS["in the text"], encoder)
    assert HitExplainer(plain).explainer is HitExplainer(embedder(WAYS["encode"], encoder)).explainer
    one, two = HitExplainer(plain), HitExplainer(other)
    assert one.explainer is not two.explainer
    assert one.explainer is one.explainer
    plain.holder.way = WAYS["in the text"]  # type: ignore[attr-defined]
    assert one.explainer is two.explainer
    plain.holder.encoder = tiny(dtype=torch.float32)  # type: ignore[attr-defined]
    assert one.explainer is not two.explainer


def test_the_model_and_its_copy_go_with_the_last_wrapper() -> None:
    encoder = tiny(dtype=torch.float32)
    wrapper = HitExplainer(embedder(WAYS["in the text"], encoder))
    (hit,) = wrapper.hits(QUERY, documents())
    assert hit.explanation is not None
    alive = [weakref.ref(encoder), weakref.ref(wrapper.explainer)]
    del encoder, wrapper, hit
    for _ in range(2):  # the Explainer first; then the model, in a cycle with its model card, which the copy held
        gc.collect()
    assert [one() for one in alive] == [None, None]


def test_a_length_limit_that_was_changed_on_the_model_is_followed() -> None:
    encoder = tiny(dtype=torch.float32)
    wrapper = HitExplainer(embedder(WAYS["encode"], encoder))
    (hit,) = wrapper.hits(QUERY, documents())
    assert hit.explanation is not None
    assert hit.explanation.truncated == ()
    encoder.max_seq_length = 6
    (hit,) = wrapper.hits(QUERY, documents())
    assert hit.explanation is not None
    assert "document" in hit.explanation.truncated


WHERE = [""]


def test_what_no_attribute_shows_is_said_when_it_is_first_looked_at() -> None:
    mine = embedder(lambda m, text, role: m.encode(WHERE[0] + text), tiny(dtype=torch.float32))
    wrapper = HitExplainer(mine)
    for prefix, expected in (("", None), ("where: ", "embeds otherwise than in the search"), ("where: ", None)):
        WHERE[0] = prefix
        (hit,) = wrapper.hits(QUERY, documents())
        assert hit.explanation is not None
        assert (hit.explanation.surrogate is None) == (expected is None)
        assert (expected or "") in (hit.explanation.surrogate or "")
    WHERE[0] = ""


def test_settings_and_methods_of_a_class_are_seen_in_the_search() -> None:
    class Settled(Own):
        prefix = ""

        def embed(self, text: str, role: str) -> Any:
            return self.encoder.encode(self.prefix + text)

    mine = Embedder(Settled(model(), None), embedder(None).calls)
    seen = [mine.usage()]
    Settled.prefix = "where: "
    seen.append(mine.usage())
    Settled.embed = lambda self, text, role: self.encoder.encode("moon: " + text)  # type: ignore[method-assign]
    seen.append(mine.usage())
    assert [one.query.prefix for one in seen if one is not None] == ["", "where: ", "moon: "]


def test_nothing_is_seen_twice_of_what_is_the_same() -> None:
    calls: list[str] = []
    mine = embedder(lambda m, text, role: calls.append(role) or m.encode(text))
    assert mine.usage() == mine.usage()
    assert calls == ["query", "document"]


def test_embeddings_are_compared_for_every_query_but_once_where_they_are_followed_and_scores_are_told() -> None:
    asked: list[str] = []

    def lowered(encoder: SentenceTransformer, text: str, role: str) -> Any:
        asked.append(text)
        return encoder.encode_query(text.lower())

    encoder = tiny(dtype=torch.float32)
    wrapper = HitExplainer(Explainer(encoder), embedder=embedder(lowered, encoder))
    for query, is_right in (("the cat?", True), ("The Cat?", True), ("the cat?", True)):  # this model reads no capitals
        (hit,) = wrapper.hits(query, documents())
        assert hit.explanation is not None
        assert (hit.explanation.surrogate is None) == is_right
        assert [notice.code for notice in hit.explanation.notices] == [UNCHECKED]
    assert [text for text in asked if "short text" not in text] == ["the cat?", "The Cat?", "the cat?"]
    asked.clear()
    followed = embedder(lambda m, text, role: asked.append(text) or m.encode(text), encoder)
    own = Explainer(encoder).explain("the cat?", CORPUS[0]).score
    for score, expected in ((own, ["the cat?"]), (None, ["the cat?", "The Cat?"])):
        asked.clear()
        wrapper = HitExplainer(followed, metric="cosine")
        for query in ("the cat?", "The Cat?"):
            for hit in wrapper.hits(query, [RetrievedDocument(id=name, text=CORPUS[0], score=score) for name in "ab"]):
                assert hit.explanation is not None
        assert [text for text in asked if "short text" not in text] == expected
        assert len(asked) - len(expected) <= 8  # probes: of both roles, when a query is first looked at
