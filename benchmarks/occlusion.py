"""Which method finds the words and sentences that the score is lost without, and what each costs in embeddings?

    python benchmarks/occlusion.py --data FOLDER [--limit 98] [--words 24] [--pairs 24] [--json FILE]

FOLDER holds `xquad/xquad.en.json`: questions and the paragraphs that answer them. Of each method, the share of the
score that is lost when the top fifth of a paragraph's words is left out, and when its best sentence is; and how many
embeddings of texts its factors take (what methods that look inside the model take is in `benchmarks/precompute.py`).
Articles of even number are apart from those of odd number, so that what is chosen on the first half can be reported on
the second. "best possible" tries every sentence; "occlusion best 2" leaves out the words of the two best sentences.

It also holds `msr_rte_align`: pairs whose words people aligned. Of each method, the average precision of its cells and
the F1 of those that are the best of their row and of their column, as in `benchmarks/choices.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import data_sets
import measures
import numpy as np

from rag_explain import Explainer, Explanation
from rag_explain.texts.edits import is_empty, without
from rag_explain.texts.segments import Span, part_spans, sentence_spans
from rag_explain.types import Unit

METHODS: tuple[dict[str, Any], ...] = (
    {"method": "bilrp"},
    {"method": "ij"},
    {"method": "occlusion"},
    {"method": "occlusion", "best": 2},
    {"method": "shapley", "samples": 4},
    {"method": "shapley", "samples": 8},
    {"method": "random"},
)
COSTLY = 8  # as many samples by word take hours
SHARE = 0.2
Case = tuple[int, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=98, help="questions by sentence, of all there are")
    parser.add_argument("--words", type=int, default=24, help="questions by word, of those")
    parser.add_argument("--pairs", type=int, default=24, help="pairs whose words people aligned")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--methods", nargs="*", help="only these of the methods")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = questions(arguments.data / "xquad" / "xquad.en.json", arguments.limit)
    pairs = data_sets.shuffled(data_sets.msr_alignments(arguments.data / "msr_rte_align" / "RTE2_dev_M.align.json"))
    scorer = Explainer(arguments.model).scorer
    found = [best_possible(scorer, cases)]
    for options in METHODS:
        if not arguments.methods or options["method"] in arguments.methods:
            print(json.dumps(found[-1]), flush=True)
            found.append(measured(scorer, options, cases, spread(cases, arguments.words)))
            found[-1] |= aligned(scorer, options, pairs[: arguments.pairs])
    print(json.dumps(found[-1]))
    if arguments.json is not None:
        sizes = f"--limit {arguments.limit} --words {arguments.words} --pairs {arguments.pairs}"
        only = f" --methods {' '.join(arguments.methods)}" if arguments.methods else ""
        command = f"python benchmarks/occlusion.py --data FOLDER {sizes}{only}"
        text = json.dumps({"command": command, "rows": found}, indent=1)
        arguments.json.write_text(f"{text}\n", encoding="utf-8")


def questions(path: Path, limit: int) -> list[Case]:
    """(half, question, paragraph), spread over all articles."""
    data = json.loads(path.read_text(encoding="utf-8"))["data"]
    cases = [
        (number % 2, one["question"], paragraph["context"])
        for number, article in enumerate(data)
        for paragraph in article["paragraphs"]
        for one in paragraph["qas"][:1]
        if len(paragraph["context"]) < 1000  # what the model reads whole
    ]
    return spread(cases, limit)


def spread(cases: list[Case], limit: int) -> list[Case]:
    step = max(1, len(cases) // max(1, limit))
    return cases[::step][:limit]


def measured(scorer: Any, options: dict[str, Any], cases: list[Case], by_word: list[Case]) -> dict[str, Any]:
    """What is lost by halves, and the embeddings that are paid for a document."""
    lost: dict[str, list[float]] = {f"{unit} {half}": [] for unit in ("words", "sentence") for half in (0, 1)}
    paid: dict[str, list[int]] = {"word": [], "sentence": []}
    by_sentence = [] if "best" in options else cases
    by_word = [] if options.get("samples") == COSTLY else by_word
    with Explainer(scorer, **options) as explainer:
        for unit, name, asked in (("word", "words", by_word), ("sentence", "sentence", by_sentence)):
            for half, query, document in asked:
                explanation = explainer.explain(query, document, unit=unit)
                if explainer.method.edits:
                    paid[unit].append(cost(explainer, unit, document, explanation))
                lost[f"{name} {half}"].append(loss(scorer, query, document, chosen(explanation)))
    figures = {name: summary(values) for name, values in lost.items() if values}
    costs = {f"embeddings by {unit}": round(float(np.mean(counts)), 1) for unit, counts in paid.items() if counts}
    label = " ".join(
        str(one) for name, value in options.items() for one in ([] if name == "method" else [name]) + [value]
    )
    return {"method": label, **figures, **costs}


def cost(explainer: Explainer, unit: Unit, document: str, explanation: Explanation) -> int:
    """How many embeddings a document takes, with the whole."""
    with Explainer(explainer.scorer, **explainer.method.kept_settings, method=explainer.method.name) as fresh:
        if not explainer.method.narrows(unit):
            return fresh.plan([document], unit=unit).embeddings
        return fresh.plan([document], unit="sentence").embeddings + len(explanation.document_tokens)


def aligned(scorer: Any, options: dict[str, Any], pairs: Sequence[data_sets.AlignedPair]) -> dict[str, Any]:
    """How well the cells find what people aligned."""
    if "best" in options or options.get("samples") == COSTLY:  # words of one sentence or two: the same as without
        return {}
    precision, f1 = list[float](), list[float]()
    with Explainer(scorer, **options) as explainer:
        for pair in pairs:
            explanation = explainer.explain(pair.query, pair.document, unit="word")
            values = measures.regrouped(explanation, explanation.pairs, np.add)
            wanted = measures.marked(pair.aligned, values.shape)
            precision.append(measures.average_precision(values, wanted))
            f1.append(measures.precision_recall_f1(measures.mutual_best(values), wanted)[2])
    return {"AP of cells": summary(precision), "F1 of mutual best": summary(f1)} if pairs else {}


def chosen(explanation: Explanation) -> list[Span]:
    """The top fifth of the words, or the best sentence."""
    carried = list(zip(explanation.document_tokens, explanation.document_saliency().tolist(), strict=True))
    texts = [(token, value) for token, value in carried if token.part == "text" and not is_empty(token.text)]
    ranked = sorted(texts, key=lambda one: -one[1])
    document = explanation.document or ""
    count = round(SHARE * len(part_spans(document))) if explanation.unit == "word" else 1
    return [(token.start, token.end) for token, _ in ranked[:count]]


def loss(scorer: Any, query: str, document: str, spans: Sequence[Span]) -> float:
    """The share of the score that is lost without these parts."""
    left = without(document, spans)
    before, *after = scorer.score(query, [document] if is_empty(left) else [document, left])
    return float((before - (after[0] if after else 0.0)) / before)


def best_possible(scorer: Any, cases: Sequence[Case]) -> dict[str, Any]:
    lost: dict[str, list[float]] = {"sentence 0": [], "sentence 1": []}
    for half, query, document in cases:
        spans = sentence_spans(document)
        lost[f"sentence {half}"].append(max(loss(scorer, query, document, [span]) for span in spans))
    return {"method": "best possible", **{name: summary(values) for name, values in lost.items()}}


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard error and number."""
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
    return {"mean": round(float(np.mean(values)), 4), "error": round(error, 4), "n": len(values)}


if __name__ == "__main__":
    main()
