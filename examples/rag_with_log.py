"""A complete small RAG whose every answer can be asked "why?" months later.

    python examples/rag_with_log.py "How do bees find their way home?"

Retrieval is FAISS with all-MiniLM-L6-v2; the answerer is a few lines that pick the best sentence, and a language model
takes its place by giving `Rag` another function. Answer, sources and explanations end in a log; the page is made
from the log, not from memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rag_explain import Explainer, Hit
from rag_explain.faiss import FaissRetriever
from rag_explain.log import ExplanationLog, find
from rag_explain.texts.segments import sentence_spans

DOCUMENTS = {
    "bees-navigation": "Honeybees find their way back to the hive by the position of the sun and by landmarks they "
    "learned on earlier flights. On a cloudy day they read the pattern of polarised light in the sky instead.",
    "bees-dance": "A forager that has discovered a good meadow dances on the comb when she returns. The angle of her "
    "waggle tells the others in which direction to fly, and its length how far.",
    "home-insurance": "Our home insurance pays for damage by fire, water and storms. Damage by insects is not covered.",
    "pigeons": "Homing pigeons carry a map of smells. Near their loft they follow roads and rivers that they know.",
    "bakery": "The bakery on the corner is closed on Mondays. On Sundays it sells bread until noon.",
    "bread": "Bread keeps longest in a clay pot with a lid. In the fridge it goes stale within a day.",
}

Answerer = Callable[[str, Sequence[Hit]], str]


class Rag:
    """Retrieve, answer, log.

    Args:
        answerer: makes an answer from a question and its sources. A language model goes here:
            `lambda question, hits: client.complete(prompt(question, [hit.text for hit in hits]))`.
    """

    def __init__(self, model: str, log: ExplanationLog, answerer: Answerer | None = None) -> None:
        self.explainer = Explainer(model)
        self.retriever = FaissRetriever.from_texts(list(DOCUMENTS.values()), self.explainer, ids=list(DOCUMENTS))
        self.answerer = answerer or self.best_sentence
        self.log = log

    def ask(self, question: str) -> tuple[str, str]:
        """The answer and the id of its record. Explanations are computed afterwards, by the log."""
        hits = self.retriever.search(question, k=3)
        answer = self.answerer(question, hits)
        return answer, self.log.record(query=question, answer=answer, hits=hits, metadata={"app": "rag_with_log"})

    def best_sentence(self, question: str, hits: Sequence[Hit]) -> str:
        """The sentence among the sources that is closest to the question."""
        sentences = [hit.text[start:end] for hit in hits if hit.text for start, end in sentence_spans(hit.text)]
        (asked,) = self.explainer.scorer.embed([question], "query")
        scores = self.explainer.scorer.embed(sentences, "document") @ asked
        return sentences[int(scores.argmax())]


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask, log, and make a page from the log."""
    parser = argparse.ArgumentParser(description="A small RAG whose answers can be explained later.")
    parser.add_argument("question", nargs="?", default="How do bees find their way home?")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--log", default="rag-log", type=Path)
    parser.add_argument("--page", default="why.html", type=Path)
    given = parser.parse_args(arguments)
    with ExplanationLog(given.log, matrices=True) as log:
        answer, record_id = Rag(given.model, log).ask(given.question)
        print(f"{given.question}\n  {answer}\n")
    record = find(given.log, record_id)
    for index, hit in enumerate(record.hits):
        words = ", ".join(f"{pair.query.label} ~ {pair.document.label}" for pair in record.pairs(index)[:3])
        print(f"  {hit.id}  {hit.score:.3f}  {words}")
    record.hits.to_html(given.page)
    print(f"\nrecord {record_id} in {given.log}, page {given.page}")
    print(f"later: rag-explain log show {given.log} {record_id}")


if __name__ == "__main__":
    main()
