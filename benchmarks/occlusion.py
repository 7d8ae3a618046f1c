"""Which method finds the words and sentences that the score is lost without, and what each costs in embeddings?

    python benchmarks/occlusion.py --data FOLDER [--limit 120] [--json benchmarks/results/occlusion.json]

FOLDER holds `xquad/xquad.en.json`: questions and the paragraphs that answer them. Of each method, the share of the
score that is lost when the top fifth of a paragraph's words is left out, and when its best sentence is; and how many
embeddings of texts its factors take (what methods that look inside the model take is in `benchmarks/precompute.py`).
Articles of even number are apart from those of odd number, so that what is chosen on the first half can be reported on
the second. "best possible" tries every sentence.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rag_explain import Explainer, Explanation
from rag_explain.texts.edits import is_empty, without
from rag_explain.texts.segments import Span, part_spans, sentence_spans

METHODS: tuple[dict[str, Any], ...] = (
    {"method": "bilrp"},
    {"method": "ij"},
    {"method": "occlusion"},
    {"method": "shapley", "samples": 4},
    {"method": "shapley", "samples": 8},
    {"method": "random"},
)
SHARE = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=120, help="questions, of all there are")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--methods", nargs="*", help="only these of the methods")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = questions(arguments.data / "xquad" / "xquad.en.json", arguments.limit)
    scorer = Explainer(arguments.model).scorer
    found = [best_possible(scorer, cases)]
    for options in METHODS:
        if not arguments.methods or options["method"] in arguments.methods:
            print(json.dumps(found[-1]), flush=True)
            found.append(measured(scorer, options, cases))
    print(json.dumps(found[-1]))
    if arguments.json is not None:
        command = f"python benchmarks/occlusion.py {' '.join(sys.argv[1:])}"
        text = json.dumps({"command": command, "rows": found}, indent=1)
        arguments.json.write_text(f"{text}\n", encoding="utf-8")


def questions(path: Path, limit: int) -> list[tuple[int, str, str]]:
    """(half, question, paragraph), spread over all articles."""
    data = json.loads(path.read_text(encoding="utf-8"))["data"]
    cases = [
        (number % 2, one["question"], paragraph["context"])
        for number, article in enumerate(data)
        for paragraph in article["paragraphs"]
        for one in paragraph["qas"][:1]
        if len(paragraph["context"]) < 1000  # what the model reads whole
    ]
    step = max(1, len(cases) // limit)
    return cases[::step][:limit]


def measured(scorer: Any, options: dict[str, Any], cases: Sequence[tuple[int, str, str]]) -> dict[str, Any]:
    """What is lost by halves, and the embeddings that were paid."""
    lost: dict[str, list[float]] = {f"{unit} {half}": [] for unit in ("words", "sentence") for half in (0, 1)}
    paid: dict[str, list[int]] = {"word": [], "sentence": []}
    with Explainer(scorer, **options) as explainer:
        for half, query, document in cases:
            for unit, name in (("word", "words"), ("sentence", "sentence")):
                if explainer.method.edits:
                    paid[unit].append(explainer.plan([document], unit=unit).embeddings)
                explanation = explainer.explain(query, document, unit=unit)
                lost[f"{name} {half}"].append(loss(scorer, query, document, chosen(explanation)))
    figures = {name: summary(values) for name, values in lost.items()}
    cost = {f"embeddings by {unit}": float(np.mean(counts)) for unit, counts in paid.items() if counts}
    return {"method": " ".join(f"{value}" for value in options.values()), **figures, **cost}


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


def best_possible(scorer: Any, cases: Sequence[tuple[int, str, str]]) -> dict[str, Any]:
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
