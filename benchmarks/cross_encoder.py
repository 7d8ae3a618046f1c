"""Does what `lrp` says of a cross-encoder hold, and at which block are its pairs best cut?

    python examples/train_cross_encoder.py --data FOLDER/stsbenchmark --out MODEL
    python benchmarks/cross_encoder.py --data FOLDER --model MODEL [--pairs 60] [--json FILE]

FOLDER holds `stsbenchmark/sts-dev.csv` and `edinburgh_pp/gold.train.sure.json`. Two measures:

  deletion    words of the document are left out one by one, those that carry most first, and the model scores what is
              left: the area under score / first score, of what `predict` returns. Lower is better. Pairs that the model
              scores above 0.5; the document is the second sentence
  alignment   average precision of the word pairs, ranked by their values, against those that people aligned, by block
              at which the pairs are cut; and the share of the sum of |values| that is in pairs. Higher is better

Bounds hold 95 % (bootstrap over pairs, seed fixed), differences are paired.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import choices
import data_sets
import measures
import numpy as np
from rich.console import Console

from rag_explain import Explainer
from rag_explain.scorers import CrossEncoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True, help="the folder of a cross-encoder")
    parser.add_argument("--pairs", type=int, default=60, help="at most this many of each set")
    parser.add_argument("--json", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    scorer = Explainer(options.model).scorer
    assert isinstance(scorer, CrossEncoder)
    rows = [*deletion(scorer, options), *alignment(scorer, options)]
    Console(width=150).print(choices.table(rows))
    if options.json:
        result = {
            "command": f"python benchmarks/cross_encoder.py --data FOLDER --model MODEL --pairs {options.pairs}",
            "model": "all-MiniLM-L6-v2, fine-tuned by examples/train_cross_encoder.py",
            "versions": {name: version(name) for name in choices.PACKAGES},
            "bounds": f"95 %, {measures.RESAMPLES} resamples of the pairs, seed {measures.SEED}",
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def deletion(scorer: CrossEncoder, options: argparse.Namespace) -> list[dict[str, object]]:
    """The area, by what each word carries and by nothing."""
    settings = {"lrp": {}, "attnlrp": {"rules": "attnlrp"}, "gradient-input": {"method": "gradient-input"}}
    explainers = {label: Explainer(scorer, **given) for label, given in settings.items()}
    found = data_sets.sts_benchmark(options.data / "stsbenchmark" / "sts-dev.csv")
    areas: dict[str, list[float]] = {label: [] for label in ("lrp", "attnlrp", "gradient-input", "pairs", "random")}
    generator = np.random.default_rng(measures.SEED)
    with choices.progress("deletion", options.pairs) as advance:
        for query, document, _ in data_sets.shuffled(found):
            score = float(scorer.returned(query, [document])[0])
            if score <= 0.5:
                continue
            explained = {label: one.explain(query, document, unit="word") for label, one in explainers.items()}
            words = len(explained["lrp"].document_tokens)
            if words < 2:
                continue
            values = {label: measures.over_whole_query(one) for label, one in explained.items()}
            values["pairs"] = measures.over_query_words(explained["lrp"])
            orders = {label: measures.largest_first(one) for label, one in values.items()}
            orders["random"] = generator.permutation(words).tolist()
            counts = measures.every_count(words)
            left = {label: measures.deletions(explained["lrp"], one, counts) for label, one in orders.items()}
            texts = list(dict.fromkeys(text for several in left.values() for text in several))
            scores = dict(zip(texts, scorer.returned(query, texts).tolist(), strict=True))
            for label, several in left.items():
                areas[label].append(measures.area([score, *(scores[text] for text in several)]))
            advance()
            if len(areas["lrp"]) == options.pairs:
                break
    return [choices.row("stsb", "deletion area", areas, "lrp")]


def alignment(scorer: CrossEncoder, options: argparse.Namespace) -> list[dict[str, object]]:
    """Average precision and the share in pairs, at every block."""
    blocks = scorer.pair_encoder.n_blocks
    explainers = {f"cut {cut}": Explainer(scorer, cut=cut) for cut in range(1, blocks)}
    chosen = f"cut {blocks // 2}"
    explainers = {chosen: explainers.pop(chosen), **explainers}
    precision: dict[str, list[float]] = {label: [] for label in explainers}
    share: dict[str, list[float]] = {label: [] for label in explainers}
    pairs = data_sets.shuffled(data_sets.edinburgh_alignments(options.data / "edinburgh_pp" / "gold.train.sure.json"))
    with choices.progress("alignment", options.pairs) as advance:
        for pair in pairs[: options.pairs]:
            for label, explainer in explainers.items():
                explanation = explainer.explain(pair.query, pair.document, unit="word")
                values = measures.regrouped(explanation, explanation.pairs, np.add)
                precision[label].append(measures.average_precision(values, measures.marked(pair.aligned, values.shape)))
                sizes = np.abs(explanation.matrix, dtype=np.float64)
                share[label].append(float(sizes[:-1, :-1].sum() / sizes.sum()))
            advance()
    return [
        choices.row("edinburgh", "average precision", precision, chosen),
        choices.row("edinburgh", "share in pairs", share, chosen),
    ]


if __name__ == "__main__":
    main()
