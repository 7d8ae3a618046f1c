"""At which block should `ij` look? A perturbation test on pairs of STS benchmark sentences.

    python benchmarks/layers.py --data FOLDER_WITH_STSBENCHMARK [--pairs 40] [--words 12] [--json layers.json]

For each pair of sentences an explanation says what each word carries. The words of one sentence are deleted one by one,
those that carry most first, while the other sentence stays whole; then the other way round. The encoder scores every
step. A faithful explanation makes the score fall fast: the figure is the mean of score / first score over the steps and
both sides, lower is better. Only one side is deleted at a time because taking a word and its match from both sentences
leaves them alike: under that test random pairs win. `bilrp` and `random` stand beside the layers of `ij`. Deleting
words takes sentences away from what the encoder was trained on, as in every test of this kind; the comparison is
between rankings under the same deletions. Bounds hold 95 % (bootstrap over pairs, seed fixed).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import data_sets
import measures
import numpy as np
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
            start = time.process_time()
            explanation = explainer.explain(query, document).by_word()
            seconds[run] += time.process_time() - start
            areas[run].append(area(model, explanation))
        print(f"{number} of {len(pairs)} pairs", file=sys.stderr)
        if options.json and number > 1:
            data = {"command": command, "pairs": number, "rows": table(areas, seconds), "areas": areas}
            data["seconds"] = seconds
            options.json.write_text(json.dumps(data) + "\n", encoding="utf-8")
    print(f"{len(pairs)} pairs of STSb dev, {name}; area under the perturbation curve, lower is better")
    for row in table(areas, seconds):
        area_of, less = ("{mean:.3f} ({low:.3f} to {high:.3f})".format(**row[key]) for key in ("area", "minus_bilrp"))
        print(f"{row['ranking']:<14} {area_of:<24} {less:<26} {row['seconds_per_pair']:.2f} processor seconds a pair")


def table(areas: dict[str, list[float]], seconds: dict[str, float]) -> list[dict[str, Any]]:
    """One row per ranking; differences to `bilrp` are paired, so their bounds are closer than those of the areas."""
    return [
        {
            "ranking": run,
            "area": measures.bounded(values),
            "minus_bilrp": measures.difference(values, areas["bilrp"]),
            "seconds_per_pair": seconds[run] / len(values),
        }
        for run, values in areas.items()
    ]


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
            left = measures.without(query if is_query else document, [tokens[index] for index in order[:count]])
            texts += [left, document] if is_query else [query, left]
    vectors = model.encode(texts, normalize_embeddings=True)
    scores = (vectors[::2] * vectors[1::2]).sum(axis=1)
    return float((scores[1:] / scores[0]).mean())


if __name__ == "__main__":
    main()
