"""A FAISS index of your own, wrapped: the same rows, the same scores, and why each was found.

pip install ".[demo]" && python examples/faiss_search.py
"""

from __future__ import annotations

import faiss

from rag_explain import Explainer
from rag_explain.cli.demo import corpus
from rag_explain.faiss import FaissRetriever

QUERY = "How do bees find their way home?"

documents = corpus()
texts = [document["text"] for document in documents]

with Explainer("all-MiniLM-L6-v2") as explainer:
    # Any index will do: this one stands for yours, filled with vectors of the same model.
    vectors = explainer.scorer.embed(texts, "document")
    index = faiss.IndexHNSWFlat(vectors.shape[1], 16)
    index.add(vectors)

    retriever = FaissRetriever(index, texts, explainer, ids=[document["id"] for document in documents])
    hits = retriever.search(QUERY, k=3).load()  # all explanations in one batch; without load, each when it is looked at

    print(f"{QUERY}\n\nAnswer, from the best source: {hits[0].text}\n\nSources:")
    for hit in hits:
        explanation = hit.explanation
        if explanation is None:
            print(f"{hit.rank}. {hit.id}: {hit.reason}")
            continue
        pairs = ", ".join(
            f"{pair.query.text}–{pair.document.text} {pair.value:+.2f}" for pair in explanation.by_word().top_pairs(3)
        )
        print(f"{hit.rank}. {hit.id}: {hit.metric} {hit.score:.3f}, similarity {hit.similarity:.3f}, because {pairs}")

    wanted = next(document["text"] for document in documents if document["id"] == "bees-dance")
    print(
        f"\nWhy was the bees' dance not the second source?\n\n{explainer.contrast(QUERY, wanted, hits[1].text or '')}"
    )
