"""Does the stated share of unrelated documents lie below the line, for real queries that were not calibrated with?

    python benchmarks/calibration.py --data CRANFIELD SCIFACT --json benchmarks/results/calibration.json

Each collection is indexed by its titles and abstracts, and calibrated twice: with half of its queries, and with
sentences of its documents in place of queries. Then the other half of the queries, or all of them, are asked. Unrelated
is every document that was not judged relevant for a query. For each line (the similarity below which the calibration
says that a share of unrelated pairs is) the table has the share that really is below it, the mean over queries, with
the standard error of both together: of the calibration, which it states itself, and of the mean.

Relevant documents above the line are counted too, so that it is seen what the line is good for. --keep FOLDER keeps
embeddings for the next run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from data_sets import Collection, collection_in, embedded, shuffled
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
from rag_explain import Explainer
from rag_explain.encoder.loading import DEFAULT_MODEL, packaged_path
from rag_explain.faiss import FaissRetriever
from rag_explain.results.calibration import Calibration

SHARES = (0.5, 0.9, 0.95, 0.99, 0.999)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, nargs="+")
    parser.add_argument("--queries", type=int, default=400, help="queries of each collection, half of them to measure")
    parser.add_argument("--keep", type=Path, help="folder for embeddings")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with Explainer(str(packaged_path() or DEFAULT_MODEL), device="cpu") as explainer:
        found = [collection(collection_in(folder), explainer, arguments) for folder in arguments.data]
    if arguments.json:
        names = " ".join(one["collection"].upper() for one in found)
        command = f"python benchmarks/calibration.py --data {names} --queries {arguments.queries}"
        text = json.dumps({"command": command, "collections": found}, indent=1) + "\n"
        arguments.json.write_text(text, encoding="utf-8")


def collection(data: Collection, explainer: Explainer, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both calibrations of one collection, and what real queries say of them."""
    names, texts = list(data.documents), list(data.documents.values())
    vectors = embedded(explainer.scorer, texts, arguments.keep)
    retriever = FaissRetriever.from_vectors(vectors, texts, explainer, ids=names)
    judged = [name for name in data.queries if data.relevant.get(name)]
    chosen = shuffled(judged)[: arguments.queries]
    asked = [data.queries[name] for name in chosen]
    scores = explainer.scorer.embed(asked, "query") @ vectors.T
    places = {name: place for place, name in enumerate(names)}
    relevant = np.zeros(scores.shape, bool)
    for row, name in enumerate(chosen):
        relevant[row, [places[one] for one in data.relevant[name] if one in places]] = True
    half = len(chosen) // 2
    print(f"{data.name}: {len(texts)} documents, {len(chosen)} queries", flush=True)
    by_queries = retriever.calibrate(asked[:half])
    by_sentences = retriever.calibrate()
    return {
        "collection": data.name,
        "documents": len(texts),
        "own queries": lines(by_queries, scores[half:], relevant[half:]),
        "sentences": lines(by_sentences, scores, relevant),
    }


def lines(found: Calibration, scores: NDArray[Any], relevant: NDArray[np.bool_]) -> list[dict[str, float]]:
    """For each stated share, the real one, and how many relevant documents are above the line."""
    print(f"  calibrated with {found.queries} {found.source}, {found.pairs} pairs; {len(scores)} other queries asked")
    rows = []
    for share in SHARES:
        line = found.line(share)
        below = np.array([(row[~is_relevant] < line).mean() for row, is_relevant in zip(scores, relevant, strict=True)])
        error = math.hypot(found.error(share), float(below.std(ddof=1)) / math.sqrt(len(below)))
        row = {
            "stated": share,
            "line": line,
            "real": float(below.mean()),
            "error": error,
            "off_in_errors": (float(below.mean()) - share) / error,
            "relevant_above": float((scores[relevant] >= line).mean()),
        }
        rows.append(row)
        print(f"    stated {share:.1%} below {line:.4f}: really {row['real']:.2%} ± {error:.2%} "
              f"({row['off_in_errors']:+.1f} errors off); {row['relevant_above']:.0%} of relevant above")  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
