"""What a first look at ten hits costs, as a multiple of plainly encoding the same ten documents, in one run.

    python benchmarks/first_look.py --data FOLDER [--rounds 5] [--json FILE]

FOLDER holds `xquad`, whose paragraphs of 150 to 256 tokens are the documents and whose questions the queries. Cold:
nothing is kept. Warm: token rows, or sentence rows, are. A search's first look is what `rag-explain search` shows
before any pair: the highlights of its hits, compared with the index. Every round runs everything once, in turns;
medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data_sets
from rich.console import Console
from rich.table import Table

from rag_explain import Explainer
from rag_explain.faiss import FaissRetriever
from rag_explain.planner import DocumentPlanner
from rag_explain.store import Store
from rag_explain.texts.passage import as_passage

COUNT = 10


def main() -> None:
    options = parse()
    explainer = Explainer("all-MiniLM-L6-v2")
    questions = data_sets.xquad(options.data / "xquad/xquad.en.json")
    query, documents = chosen(explainer, questions)
    asked = explainer.scorer.read([as_passage(query)], "query").tokens[0]
    lengths = [len(one) for one in explainer.scorer.read(list(map(as_passage, documents)), "document").tokens]
    seconds: dict[str, list[float]] = {}
    kept = {unit: Explainer(explainer.scorer) for unit in ("token", "sentence")}
    for unit, one in kept.items():
        one.precompute(documents, unit=unit, progress=False)
    every = calls(explainer, kept, query, documents)
    for number in range(options.rounds + 1):
        for name, call in every.items():
            start = time.perf_counter()
            call()
            if number:  # the first round warms up
                seconds.setdefault(name, []).append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    plain = medians.pop("encode the documents")
    plain_query = medians.pop("encode the query")
    words, tokens = (medians[f"cold, pairs of {unit}"] for unit in ("words", "tokens"))
    rows = {unit: len(explainer.factor([query], "query", unit)[0].rows) + 1 for unit in ("word", "token")}
    result = {
        "command": f"python benchmarks/first_look.py --data FOLDER --rounds {options.rounds}",
        "query tokens": len(asked),
        "document tokens": lengths,
        "cotangents of a cold pair, by unit": rows,
        "in plain encodes of the documents": {name: round(value / plain, 3) for name, value in medians.items()},
        "warm, in plain encodes of the query": {
            name: round(value / plain_query, 2) for name, value in medians.items() if name.startswith("warm")
        },
        "token pairs over word pairs, cold": round(tokens / words, 2),
    }
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def chosen(explainer: Explainer, questions: list[tuple[str, str]]) -> tuple[str, list[str]]:
    """Ten paragraphs of about 200 tokens, and a question of 13 tokens about one of them."""
    paragraphs = list(dict.fromkeys(paragraph for _, paragraph in questions))
    lengths = [len(one) for one in explainer.scorer.read([as_passage(p) for p in paragraphs], "document").tokens]
    documents = [p for p, n in zip(paragraphs, lengths, strict=True) if 150 <= n < 256][:COUNT]
    texts = [question for question, paragraph in questions if paragraph in documents]
    sizes = [len(one) for one in explainer.scorer.read([as_passage(text) for text in texts], "query").tokens]
    return min(zip(texts, sizes, strict=True), key=lambda pair: abs(pair[1] - 13))[0], documents


def calls(
    cold: Explainer, kept: dict[str, Explainer], query: str, documents: list[str]
) -> dict[str, Callable[[], object]]:
    def fresh(call: Callable[[Explainer], object]) -> Callable[[], object]:
        """With nothing kept from the last round."""

        def run() -> object:
            cold._prepared.cache_clear()
            cold._planner = DocumentPlanner(cold.scorer, cold.method, Store())
            return call(cold)

        return run

    def anew(one: Explainer, unit: str) -> Callable[[], object]:
        def run() -> object:
            one._prepared.cache_clear()  # a query that was not asked before
            return one.explain_many(query, documents, unit=unit)

        return run

    retriever = FaissRetriever.from_texts(documents, cold)
    return {
        "encode the documents": lambda: cold.scorer.embed(documents, "document"),
        "encode the query": lambda: cold.scorer.embed([query], "query"),
        "cold, highlights": fresh(lambda one: one.highlight_many(query, documents)),
        "cold, a search and its first look": fresh(lambda one: retriever.search(query, COUNT).load("highlights")),
        "cold, evidence": fresh(lambda one: one.evidence_many(query, documents)),
        "cold, sentences": fresh(lambda one: one.explain_many(query, documents, unit="sentence")),
        "cold, pairs of words": fresh(lambda one: one.explain_many(query, documents, unit="word")),
        "cold, pairs of tokens": fresh(lambda one: one.explain_many(query, documents)),
        "warm, sentences": anew(kept["sentence"], "sentence"),
        "warm, pairs of words": anew(kept["token"], "word"),
        "warm, pairs of tokens": anew(kept["token"], "token"),
    }


def show(result: dict[str, Any]) -> None:
    table = Table("", "plain encodes of the ten documents", "of the query")
    warm = result["warm, in plain encodes of the query"]
    for name, ratio in result["in plain encodes of the documents"].items():
        table.add_row(name, f"{ratio:.3f}", f"{warm[name]:.2f}" if name in warm else "")
    console = Console()
    console.print(table)
    rows = result["cotangents of a cold pair, by unit"]
    ratio = result["token pairs over word pairs, cold"]
    console.print(f"cold, {rows['token']} cotangents by token take {ratio} times as long as {rows['word']} by word")


if __name__ == "__main__":
    main()
