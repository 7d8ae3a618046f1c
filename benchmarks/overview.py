"""Which words of a query nothing speaks to: how often the overview names one that is foreign, or one that is there.

    python benchmarks/overview.py --data FOLDER [--data FOLDER] [--queries 40]    minutes; writes results/overview.json

Each FOLDER holds Cranfield or SciFact; --keep FOLDER keeps embeddings for the next run.

To each query a word is added that is in no document of the collection ("refund", "violin", ...), and its five nearest
documents are looked at. It should be named: the share that is named is the first figure. What should not be named is a
word of the query that stands in one of these documents: the share that its weight alone would name is the second (the
overview names none that stands there). Every second query chooses the threshold, the others report.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from data_sets import collection_in, embedded, shuffled
from transformers.utils import logging

from rag_explain import Explainer
from rag_explain.results import overview
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit, Hits
from rag_explain.texts.segments import word_spans

FOREIGN = (
    "refund",
    "violin",
    "marmalade",
    "umbrella",
    "wedding",
    "kangaroo",
    "mortgage",
    "football",
    "pyramid",
    "guitar",
)
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
HITS = 5
RESULT = Path(__file__).parent / "results" / "overview.json"
Looked = tuple[Hits, Explanation, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True, help="a folder; may be given again")
    parser.add_argument("--queries", type=int, default=40, help="of each collection")
    parser.add_argument("--keep", type=Path, help="folder for embeddings")
    options = parser.parse_args()
    logging.disable_progress_bar()
    looked: list[Looked] = []
    with Explainer("all-MiniLM-L6-v2") as explainer:
        for folder in options.data:
            looked += asked(explainer, folder, options)
    result: dict[str, Any] = {
        "command": f"python benchmarks/overview.py {'--data FOLDER ' * len(options.data)}--queries {options.queries}",
        "queries": len(looked),
        "chosen on": table(looked[::2]),
        "reported": table(looked[1::2]),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def asked(explainer: Explainer, folder: Path, options: argparse.Namespace) -> list[Looked]:
    """Every query with its foreign word, its hits, and the query explained as a document."""
    collection = collection_in(folder)
    texts = list(collection.documents.values())
    known = {word for text in texts for word in words_of(text)}
    foreign = cycle([word for word in FOREIGN if word not in known])
    vectors = embedded(explainer.scorer, texts, options.keep)
    found = []
    for query, word in zip(shuffled(list(collection.queries.values()))[: options.queries], foreign, strict=False):
        text = f"{query.rstrip(' .?')} {word}"
        scores = vectors @ np.asarray(explainer.scorer.embed([text], "query"))[0]
        nearest = np.argsort(-scores)[:HITS]
        shown = explainer.explain_many(text, [texts[at] for at in nearest], unit="word")
        found.append((hits(shown), explainer.explain(text, text, unit="word"), word))
    return found


def hits(explanations: Sequence[Explanation]) -> Hits:
    return Hits(
        Hit(id=str(rank), text=one.document, rank=rank, score=one.score, metric="cosine", handle=Deferred.ready(one))
        for rank, one in enumerate(explanations, 1)
    )


def table(looked: Sequence[Looked]) -> list[dict[str, Any]]:
    """For each threshold, the shares of foreign words and of words that are there that are named."""
    rows = []
    kept = overview.SPOKEN
    for threshold in THRESHOLDS:
        overview.SPOKEN = threshold
        named, there, wrongly, others = 0, 0, 0, 0
        for found, itself, word in looked:
            silent = overview.unspoken(itself.query_tokens, overview.Overview.of(found, itself).rows, itself) or ()
            read = {one for hit in found for one in words_of(hit.text or "")}
            present = {one for one in words_of(itself.query or "") if one in read}
            named += word in silent
            there += len(present)
            wrongly += sum(one.casefold() in present for one in silent)
            others += sum(one.casefold() not in present and one != word for one in silent)
        figures = {"foreign named": named / len(looked), "present named": wrongly / there}
        rows.append({"threshold": threshold, **{k: round(v, 4) for k, v in figures.items()}, "others named": others})
    overview.SPOKEN = kept
    return rows


def words_of(text: str) -> list[str]:
    return [text[start:end].casefold() for start, end in word_spans(text)]


if __name__ == "__main__":
    main()
