"""At which block should `ij` look? A perturbation test on pairs of STS benchmark sentences.

    python benchmarks/layers.py --data FOLDER_WITH_STSBENCHMARK [--pairs 40] [--words 12] [--json layers.json]

For each pair of sentences an explanation says what each word carries. The words of one sentence are deleted one by one,
those that carry most first, while the other sentence stays whole; then the other way round. The encoder scores every
step. A faithful explanation makes the score fall fast: the figure is the mean of score / first score over the steps and
both sides, lower is better. Only one side is deleted at a time because taking a word and its match from both sentences
leaves them alike: under that test random pairs win. `bilrp` and `random` stand beside the layers of `ij`. Deleting
words takes sentences away from what the encoder was trained on, as in every test of this kind; the comparison is
between rankings under the same deletions.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
from measures import without
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from rag_explain import Explainer, Explanation
from rag_explain.encoder.loading import load


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds sts-dev.csv")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--words", type=int, default=12, help="leave out longer sentences: block 0 takes long on them")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    model, name = load(options.model)
    assert isinstance(model, SentenceTransformer)
    pairs = read_pairs(options.data / "sts-dev.csv", options.pairs, options.words)
    blocks = Explainer(model, "ij").scorer.encoder.n_blocks
    runs = {f"ij, block {layer}": Explainer(model, "ij", layer=layer) for layer in range(blocks)}
    runs |= {"bilrp": Explainer(model, "bilrp"), "random": Explainer(model, "random")}
    areas: dict[str, list[float]] = {run: [] for run in runs}
    seconds = dict.fromkeys(runs, 0.0)
    command = f"python benchmarks/layers.py --pairs {options.pairs} --words {options.words} --model {name}"
    if options.json and options.json.exists():  # a long run that was stopped goes on where it was
        before = json.loads(options.json.read_text(encoding="utf-8"))
        if before["command"] == command:
            areas, seconds = before["areas"], before["seconds"]
    done = len(areas["random"])
    for number, (query, document) in enumerate(pairs[done:], start=done + 1):
        for run, explainer in runs.items():
            start = time.perf_counter()
            explanation = explainer.explain(query, document).by_word()
            seconds[run] += time.perf_counter() - start
            areas[run].append(area(model, explanation))
        print(f"{number} of {len(pairs)} pairs", file=sys.stderr)
        if options.json and number > 1:
            data = {"command": command, "pairs": number, "rows": table(areas, seconds), "areas": areas}
            data["seconds"] = seconds
            options.json.write_text(json.dumps(data) + "\n", encoding="utf-8")
    print(f"{len(pairs)} pairs of STSb dev, {name}; area under the perturbation curve, lower is better")
    print(f"{'ranking':<14} {'area':>6} {'± s.e.':>7} {'minus best':>11} {'± s.e.':>7} {'s / pair':>9}")
    for row in table(areas, seconds):
        print("{:<14} {:6.3f} {:7.3f} {:11.3f} {:7.3f} {:9.2f}".format(*row.values()))


def table(areas: dict[str, list[float]], seconds: dict[str, float]) -> list[dict[str, Any]]:
    """One row per ranking; differences to the best are paired, so their error is smaller than that of the areas."""
    best = min(areas, key=lambda run: float(np.mean(areas[run])))
    rows = []
    for run, values in areas.items():
        difference = np.array(values) - np.array(areas[best])
        rows.append(
            {
                "ranking": run,
                "area": float(np.mean(values)),
                "standard_error": spread(values),
                "minus_best": float(difference.mean()),
                "minus_best_standard_error": spread(difference),
                "seconds_per_pair": seconds[run] / len(values),
            }
        )
    return rows


def read_pairs(path: Path, count: int, words: int) -> list[tuple[str, str]]:
    """Similar pairs (gold score of at least 3 of 5, so that there is a score to lose), spread evenly over the file."""
    alike = [(one, other) for one, other, gold in data_sets.sts_benchmark(path) if gold >= 3]
    short = [pair for pair in alike if max(len(text.split()) for text in pair) <= words]
    return short[:: max(1, len(short) // count)][:count]


def area(model: SentenceTransformer, explanation: Explanation) -> float:
    """The mean of score / first score while one sentence loses its words, those that carry most first; both sides."""
    query, document = explanation.query, explanation.document
    assert query is not None
    assert document is not None
    texts = [query, document]
    for values, tokens, is_query in (
        (explanation.query_saliency(), explanation.query_tokens, True),
        (explanation.document_saliency(), explanation.document_tokens, False),
    ):
        order = np.argsort(-values, kind="stable")
        for count in range(1, len(order)):  # the last word stays: an empty text has no meaning to compare
            left = without(query if is_query else document, [tokens[index] for index in order[:count]])
            texts += [left, document] if is_query else [query, left]
    vectors = model.encode(texts, normalize_embeddings=True)
    scores = (vectors[::2] * vectors[1::2]).sum(axis=1)
    return float((scores[1:] / scores[0]).mean())


def spread(values: Sequence[float] | NDArray[np.float64]) -> float:
    """The standard error of the mean."""
    array = np.asarray(values)
    return float(array.std(ddof=1) / math.sqrt(len(array)))


if __name__ == "__main__":
    main()
