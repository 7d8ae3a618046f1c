"""Explainer: from a query and documents to explanations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rag_explain.comparing import answer_of, asked_methods
from rag_explain.errors import InvalidInput, ProcessBound, UnsupportedModel, in_words
from rag_explain.evidence import Backend, find_evidence
from rag_explain.factors import Factors
from rag_explain.methods import ExplainedPair, Method, make
from rag_explain.methods.base import by_unit
from rag_explain.methods.slices import Slices, split
from rag_explain.planner import DocumentPlanner
from rag_explain.probes import Probes
from rag_explain.progress import progress_bar
from rag_explain.query import PreparedQuery
from rag_explain.results.comparison import Comparison
from rag_explain.results.contrast import Contrast
from rag_explain.results.evidence import Evidence
from rag_explain.results.explanation import Explanation
from rag_explain.results.highlights import Highlights
from rag_explain.results.notices import merged
from rag_explain.results.plan import Plan
from rag_explain.results.precomputed import Precomputed
from rag_explain.results.what_if import WhatIf
from rag_explain.results.x_ray import XRay
from rag_explain.scorers import Scorer, resolve
from rag_explain.store import Store
from rag_explain.texts.passage import Passage, as_passage, as_passages, checked_ids, many_passages, named
from rag_explain.texts.tokens import Role, Unit, known_unit
from rag_explain.what_if import Part, Ranks, Replacements, Texts, agreements, answer, changed_texts, what_matters
from rag_explain.x_ray import x_rayed

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer

T = TypeVar("T")
Names = Sequence[str | None]
Embeds = Callable[..., Any] | object  # a function that embeds strings, or an object with methods that do

# Hits of one query may be explained one by one when they are looked at: what the query needs is kept that long.
_RECENT_QUERIES = 32
# A computation that has begun cannot be stopped at a time limit: those that go on may occupy two threads.
_background_pool = partial(ThreadPoolExecutor, 2, "rag_explain")


class Explainer(ProcessBound):
    """Explains why documents match a query under one scorer and one method.

        explainer = Explainer("all-MiniLM-L6-v2")
        print(explainer.explain("capital of France", "Paris is the capital and largest city of France."))

    Safe to use from several threads; the model it was given is never changed.

    Args:
        model: a name, a folder, or a loaded SentenceTransformer, MultiVectorEncoder, SparseEncoder or CrossEncoder,
            whose weights are then shared; or another explainer's `scorer`; or anything that embeds strings: a function
            `embed(texts)` or `embed(texts, role=...)`, an embedding object of LangChain or LlamaIndex, a static model,
            or a service as "openai-compatible:URL#model", whose key is in the environment variable OPENAI_API_KEY; or a
            BM25 index of bm25s or rank_bm25, or a retriever that holds one.
        method: a name from docs/methods.md; None: the scorer's first.
        layer: attribute to the input of encoder block `layer`; 0 is the embedding output. None: the method's default.
        device: where to compute; None: where the model is.
        store: a folder in which documents' factors are kept, or a `Store`; None keeps them in memory only.
        label: of a cross-encoder with several labels, the one whose logit is explained: its name or number.
        max_calls: how many texts are sent at most to something that only embeds strings, retries included.
        analyser: what split the texts of a BM25 index into words, where the index does not keep it.
        options: options of the method; an unknown one raises.
    """

    instead = "pickle what it is made from (model, method and options), and make a new one where it is unpickled"

    def __init__(
        self,
        model: str | Path | SentenceTransformer | MultiVectorEncoder | CrossEncoder | Scorer | Embeds,
        method: str | type[Method] | None = None,
        *,
        layer: int | None = None,
        device: str | None = None,
        store: str | Path | Store | None = None,
        max_calls: int | None = None,
        analyser: Any = None,
        label: int | str | None = None,
        **options: Any,
    ) -> None:
        self.scorer = resolve(model, device, max_calls, analyser, label)
        with in_words(InvalidInput, f"the method {method or self.scorer.methods[0]} cannot be made with these options"):
            self.method = make(method, self.scorer, layer, options)
        self._prepared = lru_cache(_RECENT_QUERIES)(partial(PreparedQuery, self.method))
        self._probes = lru_cache(1)(lambda fingerprint: self.scorer.probes)  # without another look at the model
        self._pool = _background_pool()
        self._pool_lock = threading.Lock()
        what = f"{self.method.name} cannot explain {self.scorer.name}"
        with self.scorer.computing(), in_words(UnsupportedModel, what, ": choose another method or model"):
            self.method.check()
        self._owns_store = not isinstance(store, Store)
        self.store = store if isinstance(store, Store) else Store(store)
        self._planner = DocumentPlanner(self.scorer, self.method, self.store)

    def explain(self, query: str, document: str | Passage, *, unit: Unit | None = None) -> Explanation:
        """Why `document` scores what it does for `query`."""
        return self.explain_many(query, [document], unit=unit)[0]

    def explain_many(
        self, query: str, documents: Sequence[str | Passage], *, unit: Unit | None = None, ids: Names | None = None
    ) -> list[Explanation]:
        """One explanation per document, in the order given; what the query needs is computed once.

        Documents that the store has are explained by one product. `unit` is what the cells are of: tokens, words, or
        sentences of the document and words of the query; None is the method's own choice, which is tokens for all but
        `occlusion`. `ids` are the caller's names of the documents, under which `store.forget(ids)` erases what is kept
        of them.
        """
        passages = many_passages(documents, "explain_many takes a list of documents: use explain for one")
        return self._explained(query, passages, self.method.grain(unit), ids)

    def highlight(self, query: str, document: str | Passage, *, unit: Unit | None = None) -> Highlights:
        """What each word of `document` carries over the whole query: the score, split by its words.

        With `occlusion` what is lost without each sentence, unless words are asked for.
        """
        return self.highlight_many(query, [document], unit=unit)[0]

    def highlight_many(
        self, query: str, documents: Sequence[str | Passage], *, unit: Unit | None = None, ids: Names | None = None
    ) -> list[Highlights]:
        """Highlights of each document, in the order given: one cotangent each, where pairs take one per query word."""
        passages = many_passages(documents, "highlight_many takes a list of documents: use highlight for one")
        grain = self.method.grain(unit, None if self.method.edits else "word")
        return [
            Highlights.of(one) for one in self._explained(query, passages, grain, ids, whole=self.method.asks_whole)
        ]

    def _explained(
        self, query: str, passages: tuple[Passage, ...], unit: Unit, ids: Names | None, *, whole: bool = False
    ) -> list[Explanation]:
        """Explanations in this unit; with `whole`, of the query as a whole, whose words have no rows then."""
        ids = None if ids is None else checked_ids(ids, len(passages))
        if not passages:
            return []
        if self.method.narrows(unit):
            sentences = self._explained(query, passages, "sentence", ids, whole=True)
            both = zip(passages, sentences, strict=True)
            passages = tuple(self.method.narrowed(passage, Highlights.of(one).spans) for passage, one in both)
        # Factors of a linear method are pushed and pulled by word or sentence; other results are grouped afterwards.
        grouped = unit if self.method.linear else "token"
        # Read once, before anything is computed: a model that changes meanwhile must not name numbers it did not make.
        fingerprint = self.scorer.fingerprint
        probes = self._probes(fingerprint)
        with self.scorer.computing():
            asked = as_passage(query)
            query_in = partial(self._prepared(asked, fingerprint).by, "whole" if whole else grouped)
            prepared = self._planner.device.with_room(query_in)
            planned = self._planner.explain(prepared, passages, ids, grouped)
        explanations = [
            self._explanation(query, passage, by_unit(pair, passage, grouped), fingerprint, probes)
            for passage, pair in zip(passages, planned, strict=True)
        ]
        return explanations if unit == grouped else [one.grouped(unit) for one in explanations]

    def evidence(self, query: str, document: str | Passage, k: int = 2, *, backend: Backend | None = None) -> Evidence:
        """The `k` sentences of `document` to read for `query`: where to look, which is not what carried the score."""
        return self.evidence_many(query, [document], k, backend=backend)[0]

    def evidence_many(
        self, query: str, documents: Sequence[str | Passage], k: int = 2, *, backend: Backend | None = None
    ) -> list[Evidence]:
        """The sentences to read in each document, in the order given; one pass over each, and nothing is kept.

        `backend(query, sentences)` gives one number per sentence instead: a trained highlighter, say.
        """
        passages = many_passages(documents, "evidence_many takes a list of documents: use evidence for one")
        return find_evidence(self.scorer, as_passage(query), passages, k, backend)

    def contrast(self, query: str, wanted: str | Passage, got: str | Passage) -> Contrast:
        """Why `got` and not `wanted`: which words made the difference between their scores."""
        one, other = self.explain_many(query, [wanted, got], unit="word")
        return Contrast(one, other)

    def what_if(
        self,
        query: str,
        document: str | Passage,
        *,
        without: Part | Sequence[Part] | None = None,
        replace: Replacements | None = None,
        ranks: Ranks | None = None,
    ) -> WhatIf:
        """What the score is without a part of either text, or with others in its place: computed again, not predicted.

        Args:
            without: a word, a sentence or any piece of either text, or a list of them, each tried by itself.
            replace: another query; or a mapping of such parts to what is to stand in their place.
            ranks: gives the document's rank for what was tried; a retriever does, by its index.

        Without either, the parts that matter are tried: every word of the query, what carries most in the document, and
        what the encoder did not read of it.
        """
        with self.scorer.computing():
            texts = Texts(self.scorer, as_passage(query).text, as_passage(document))
            is_named = without is not None or replace is not None
            tried = changed_texts(texts, without, replace) if is_named else []
            if tried and self.method.edits:  # to leave parts out to explain costs more than what was asked for
                return answer(texts, None, tried, ranks)
        why = self.explain(query, document, unit=self.parts_unit)
        with self.scorer.computing():
            return answer(texts, why, tried or what_matters(texts, why), ranks)

    @property
    def parts_unit(self) -> Unit | None:
        """The unit in which parts of a text are looked at: words, or what the method leaves out."""
        return None if self.method.edits else "word"

    def x_ray(self, document: str | Passage, *, unit: Unit | None = None) -> XRay:
        """What the vector of `document` is about: the share of each part of it. Free where its factors are kept.

        By words, or by sentences: None is what is kept, else words; or sentences, where parts are left out.
        """
        if not self.method.linear:
            raise InvalidInput(
                f"{self.method.name} has no rows that sum to an embedding: use bilrp, pooled or occlusion"
            )
        passage = as_passage(document)
        kept = self._planner.kept([passage])[0] if unit is None else None
        asked = self.method.grain(unit, self.parts_unit)
        factors = kept or self.factor([passage], unit=asked)[0]
        with self.scorer.computing():
            spans = self.scorer.read((passage,), "document").spans
        return x_rayed(factors, passage, spans[0] if spans else None, self.scorer.name)

    def precompute(
        self,
        texts: Iterable[str | Passage],
        *,
        unit: Unit | None = None,
        ids: Iterable[str | None] | None = None,
        progress: bool = True,
    ) -> Precomputed:
        """Build and keep the factors of documents before they are searched for; how many were built, kept, failed.

        By sentences, a few passes over each document, unless told otherwise: what every answer is explained by. Tokens
        take one pass each, and serve words too. A method that chooses among tokens keeps tokens.
        Documents that the store has are left alone, so that an interrupted run goes on where it stopped. A text that
        cannot be explained does not stop the others.
        """
        if isinstance(texts, (str, Passage)) or not isinstance(texts, Iterable):
            raise InvalidInput("precompute takes a list of texts")
        if not self.method.has_factors:
            raise InvalidInput(f"{self.method.name} computes every pair anew: there is nothing to precompute")
        unit = self.method.grain(unit, "sentence" if self.method.linear else "token")
        total = len(texts) if isinstance(texts, Sized) else None
        if ids is not None and total is not None:  # refused before anything is computed
            ids = checked_ids(ids, total)
        pairs = ((text, None) for text in texts) if ids is None else named(texts, ids)
        with self.scorer.computing(), progress_bar("factors", total, shown=progress) as advance:
            return self._planner.precompute(pairs, advance, unit)

    def plan(
        self, texts: Sequence[str | Passage], *, query: str | Passage | None = None, unit: Unit | None = None
    ) -> Plan:
        """How many embeddings `precompute(texts)`, or `explain_many(query, texts)`, will cost: nothing is embedded."""
        passages = many_passages(texts, "plan takes a list of texts")
        asked = None if query is None else as_passage(query)
        with self.scorer.computing():
            return self._planner.plan(passages, asked, self.method.grain(unit))

    def subspaces(self, query: str, document: str | Passage, slices: Slices) -> dict[str, Explanation]:
        """The explanation of a pair split by named slices of the embedding, which sum to the whole.

        `slices` maps names to `slice` objects or to (start, stop); dimensions in none of them come last. Each slice's
        score is its part of the whole score.
        """
        if not self.method.linear:
            raise InvalidInput(f"{self.method.name} is not a product of factors, so it has no parts by dimension")
        asked, passage = self.factor([query], "query")[0], as_passage(document)
        parts = split(asked, self.factor([passage])[0], slices)
        fingerprint, probes = asked.fingerprint, self._probes(asked.fingerprint)
        return {
            name: self._explanation(query, passage, replace(part, provenance={"subspace": name}), fingerprint, probes)
            for name, part in parts.items()
        }

    def compare(
        self,
        query: str,
        document: str | Passage,
        methods: Sequence[str | Mapping[str, Any]] | None = None,
        *,
        layers: Iterable[int] | None = None,
    ) -> Comparison:
        """The same pair under several methods, side by side, with how far they agree.

        A method is a name, or a mapping with "method" and its options, such as {"method": "ij", "layer": 5}. None: all
        methods that split this scorer's score. One that refuses the model is listed with its reason. With `layers`,
        each method is asked at each of these blocks: whether it says the same wherever it is asked. All are held
        against what the score really loses, which takes an encoding for each word or sentence of both texts.
        """
        asked = asked_methods(self.scorer.methods if methods is None else methods, layers)
        rows = [answer_of(partial(Explainer, self.scorer), query, document, options) for options in asked]
        with self.scorer.computing():
            explanations = [row.explanation for row in rows]
            return Comparison.of(rows, *agreements(self.scorer, query, as_passage(document), explanations))

    def factor(self, texts: Sequence[str | Passage], role: Role = "document", unit: Unit = "token") -> list[Factors]:
        """Each text's half of every explanation, always computed here and now.

        By word or sentence, one tangent is pushed per unit instead of one per token.
        """
        if role not in ("query", "document"):
            raise InvalidInput(f"role must be 'query' or 'document', not {role!r}")
        passages = many_passages(texts, "factor takes a list of texts")
        if not passages:
            return []
        with self.scorer.computing():
            batch, unit = self.scorer.read(passages, role), known_unit(unit)
            device, passes = self._planner.device, self.method.passes(batch, unit)
            factors = batch.in_buckets(device.size(), device.sharing(partial(self.method.factor, unit=unit)), passes)
        return [factors[index] for index in range(len(texts))]

    def query_vector(self, query: str) -> NDArray[np.float32]:
        """(e,): what the model's `encode_query` gives, where possible from the pass that explanations need anyway."""
        # Factors keep float32: of a model in double precision they do not know the last bits.
        if not self.method.embeds or self.scorer.encoder.dtype == torch.float64:
            vectors = self.scorer.embed([query], "query")
        else:
            encoder = self.scorer.encoder
            with self.scorer.computing():
                embedding = self._prepared(as_passage(query), self.scorer.fingerprint).embedding.copy()
                vectors = encoder.vectors(torch.as_tensor(embedding).to(encoder.device, encoder.dtype)[None], "query")
        vector: NDArray[np.float32] = vectors[0]
        return vector

    def document_vectors(self, documents: Sequence[str | Passage]) -> NDArray[np.float32]:
        """(D, e): what the model's `encode_document` gives. Documents whose factors are kept are not encoded again."""
        passages = many_passages(documents, "document_vectors takes a list of documents")
        kept = self._planner.kept(passages) if self.method.embeds else [None] * len(passages)
        missing = [index for index, factors in enumerate(kept) if factors is None]
        found = dict(zip(missing, self.scorer.embed([passages[index] for index in missing], "document"), strict=True))
        for index, factors in enumerate(kept):
            if factors is not None:
                found[index] = self.scorer.encoder.vectors(torch.tensor(factors.embedding)[None], "document")[0]
        return np.stack([found[index] for index in range(len(passages))])

    def vectors_at_hand(self, documents: Sequence[str | Passage]) -> list[NDArray[np.float32] | None]:
        """(e,) of each document, where that costs nothing: up to its length, where the score is a cosine."""
        if not self.scorer.is_metered:
            return list(self.document_vectors(documents))
        passages = as_passages(documents)
        both = zip(self.scorer.at_hand(passages, "document"), self._planner.kept(passages), strict=True)
        return [factors.embedding if one is None and factors else one for one, factors in both]

    def _explanation(
        self, query: str, passage: Passage, pair: ExplainedPair, fingerprint: str, probes: Probes
    ) -> Explanation:
        return Explanation(
            **{**vars(pair), "notices": merged(self.method.notices, pair.notices)},
            query=query,
            document=passage.text,
            method=self.method.name,
            additive=self.method.additive,
            settings=self.method.settings,
            model=self.scorer.name,
            fingerprint=fingerprint,
            probes=probes,
            measure=self.method.measure,
        )

    def in_background(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a call on threads of this explainer: made on first use, few, and ended by `close`."""
        with self._pool_lock:
            return self._pool.submit(call, *arguments)

    def close(self) -> None:
        """Release what is kept between calls, and close the store unless it was given open."""
        with self._pool_lock:
            pool, self._pool = self._pool, _background_pool()
        pool.shutdown(wait=False, cancel_futures=True)
        self._prepared.cache_clear()
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> Explainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Explainer({self.scorer.name!r}, method={self.method.name!r}, layer={self.method.layer})"
