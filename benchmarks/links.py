"""Which words do people link? `Explanation.links` and other ways to choose, against words that people aligned.

    python benchmarks/links.py --data FOLDER [--pairs 400] [--json FILE]

FOLDER holds `msr_rte_align` and `edinburgh_pp`. The pairs of each set are split in two halves: figures of the first may
be used to choose, those of the second are the result. Precision, recall and F1 of word links are means over pairs; the
differences in F1 to `links` are paired, with 95 % bounds. All ways but the last two use nothing but an explanation.

  links              what `Explanation.links` links, before words become phrases
  normalised         mutual best of cells divided by the root of their row's and column's sum of |values|
  ... + neighbours   the same with support of neighbours, without a least strength
  ... + least        the same with a least strength, without neighbours
  ... iterated       the same again among words that are not linked yet (SimAlign's IterMax)
  ... assignment     the one-to-one assignment with the largest sum
  mutual best        of cells as they are, above zero: XPLAINSIM's MaxAlign
  flow               optimal transport between uniform weights at cost 1 - sigmoid(cell), kept where at least 0.029
                     flows: XPLAINSIM's FlowAlign
  ... normalised     the same of normalised cells, kept where half a word or more flows
  cosine             mutual best of last-layer cosines
  bilrp x cosine     mutual best of their product
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import data_sets
import measures
import numpy as np
import ot
from choices import PACKAGES, interval, progress
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import linear_sum_assignment

from rag_explain import Explainer
from rag_explain.results.links import linked_words, strength, support

Values = NDArray[np.float64]
Chosen = NDArray[np.bool_]
Scores = tuple[float, float, float]


def links(cells: Values, cosines: Values) -> Chosen:
    return measures.marked(frozenset(linked_words(cells)), cells.shape)


def iterated(values: Values) -> Chosen:
    left, chosen = values.copy(), np.zeros(values.shape, dtype=bool)
    while (found := measures.mutual_best(left)).any():
        chosen |= found
        left[found.any(axis=1), :] = -1
        left[:, found.any(axis=0)] = -1
    return chosen


def assigned(values: Values) -> Chosen:
    chosen = np.zeros(values.shape, dtype=bool)
    rows, columns = linear_sum_assignment(-np.maximum(values, 0))
    chosen[rows, columns] = values[rows, columns] > 0
    return chosen


def flow(values: Values) -> Values:
    """(n_q, n_d): how much flows where, one in all."""
    rows, columns = (np.full(count, 1 / count) for count in values.shape)
    return np.asarray(ot.emd(rows, columns, 1 - 1 / (1 + np.exp(-values))))


WAYS: dict[str, Callable[[Values, Values], Chosen]] = {
    "links": links,
    "normalised": lambda cells, _: measures.mutual_best(strength(cells)),
    "normalised + neighbours": lambda cells, _: measures.mutual_best(support(strength(cells))),
    "normalised + least": lambda cells, _: (
        measures.mutual_best(strength(cells)) & (strength(cells) >= 1 / np.sqrt(cells.size))
    ),
    "normalised, iterated": lambda cells, _: iterated(strength(cells)),
    "normalised, assignment": lambda cells, _: assigned(strength(cells)),
    "mutual best (MaxAlign)": lambda cells, _: measures.mutual_best(cells),
    "flow (FlowAlign)": lambda cells, _: flow(cells) >= 0.029,
    "flow, normalised": lambda cells, _: flow(strength(cells)) * max(cells.shape) >= 0.5,
    "cosine": lambda _, cosines: measures.mutual_best(cosines),
    "bilrp x cosine": lambda cells, cosines: measures.mutual_best(np.maximum(cells, 0) * cosines),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=400, help="at most this many of each set")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--json", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()

    explainer = Explainer(options.model)
    cosines = Explainer(explainer.scorer, "alignment")
    sets = {
        "msr": data_sets.msr_alignments(options.data / "msr_rte_align" / "RTE2_dev_M.align.json"),
        "edinburgh": data_sets.edinburgh_alignments(options.data / "edinburgh_pp" / "gold.train.sure.json"),
    }
    rows = []
    for name, pairs in sets.items():
        few = data_sets.shuffled(pairs)[: options.pairs]
        with progress(name, len(few)) as advance:
            found = []
            for scores in scored(explainer, cosines, few):
                found.append(scores)
                advance()
        rows += [row for half in (0, 1) if found[half::2] for row in summary(name, half, found[half::2])]
    Console(width=150).print(table(rows))
    if options.json:
        command = f"python benchmarks/links.py --data FOLDER --pairs {options.pairs} --model {options.model}"
        versions = {package: version(package) for package in (*PACKAGES, "POT", "scipy")}
        result = {"command": command, "model": explainer.scorer.name, "versions": versions, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def scored(
    explainer: Explainer, cosines: Explainer, pairs: Sequence[data_sets.AlignedPair]
) -> Iterator[dict[str, Scores]]:
    """Precision, recall and F1 of each way, pair by pair."""
    for pair in pairs:
        explanation = explainer.explain(pair.query, pair.document, unit="word")
        similarities = cosines.explain(pair.query, pair.document).by_word().similarities
        assert similarities is not None
        cells, alike = explanation.pairs.astype(np.float64), similarities.astype(np.float64)
        result = {}
        for way, choose in WAYS.items():
            chosen = measures.regrouped(explanation, choose(cells, alike).astype(np.float64), np.maximum) > 0
            result[way] = measures.precision_recall_f1(chosen, measures.marked(pair.aligned, chosen.shape))
        yield result


def summary(name: str, half: int, found: Sequence[dict[str, Scores]]) -> Iterator[dict[str, Any]]:
    for way in WAYS:
        precision, recall, f1 = (np.array([one[way][index] for one in found]) for index in range(3))
        ours = [one["links"][2] for one in found]
        yield {
            "set": name,
            "half": ("choose", "report")[half],
            "way": way,
            "n": len(found),
            "precision": float(precision.mean()),
            "recall": float(recall.mean()),
            "f1": measures.bounded(f1.tolist()),
            "difference": None if way == "links" else measures.difference(f1.tolist(), ours),
        }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    result = Table("set", "half", "n", "way", "precision", "recall", "F1", "less links", "95 %")
    for row in rows:
        change = row["difference"]
        paired = ("", "") if change is None else (f"{change['mean']:+.3f}", interval(change))
        means = (f"{value:.3f}" for value in (row["precision"], row["recall"], row["f1"]["mean"]))
        result.add_row(row["set"], row["half"], str(row["n"]), row["way"], *means, *paired)
    return result


if __name__ == "__main__":
    main()
