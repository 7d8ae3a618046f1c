"""How often the trust line speaks, and what it says, on pairs that belong together and on pairs that do not.

    python benchmarks/trust.py --data FOLDER [--methods ij ...]        minutes; writes benchmarks/results/trust.json

FOLDER holds stsbenchmark/sts-dev.csv. Also asked are three questions about every second of the demo's documents, most
of which have nothing to do with them. `ij` takes every seventh of both.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from rag_explain import Explainer, Explanation

QUESTIONS = (
    "How do bees find their way home?",
    "Can I get a refund after 30 days?",
    "How many vacation days do I have?",
)
METHODS: dict[str, dict[str, Any]] = {
    "bilrp": {},
    "bilrp, biases apart": {"method": "bilrp", "biases": "apart"},
    "hxp": {"method": "hxp"},
    "pooled": {"method": "pooled"},
    "ij": {"method": "ij"},
}
KINDS = {
    "cancels": "cancels",
    "above any score": "more than",
    "no word": "no word",
    "references": "references'",
    "not": "hardly counts",
}
RESULT = Path(__file__).parent / "results" / "trust.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds stsbenchmark/")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="others stay as they are")
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    logging.disable_progress_bar()
    corpus = files("rag_explain.cli").joinpath("corpus.jsonl").read_text(encoding="utf-8").split("\n")
    documents = [json.loads(line)["text"] for line in corpus if line.strip()][::2]
    with (options.data / "stsbenchmark" / "sts-dev.csv").open(encoding="utf-8", newline="") as file:
        alike = [row for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if float(row[4]) >= 3][::12]
    result: dict[str, Any] = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
    result["command"] = "python benchmarks/trust.py --data FOLDER"
    for name, chosen in ((name, METHODS[name]) for name in options.methods):
        step = 7 if name == "ij" else 1
        with Explainer("all-MiniLM-L6-v2", **chosen) as explainer:
            demo = [one for asked in QUESTIONS for one in explainer.explain_many(asked, documents[::step])]
            pairs = [explainer.explain(row[5], row[6]) for row in alike[::step]]
        result[name] = {
            "demo, score from 0.1 on": counted([one for one in demo if one.score >= 0.1]),
            "demo, score below 0.1": counted([one for one in demo if one.score < 0.1]),
            "STSb dev, judged 3 or more of 5": counted(pairs),
        }
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def counted(explanations: Sequence[Explanation]) -> dict[str, Any]:
    """How many say nothing, how many say each kind of thing, and what belongs to no word and to special tokens."""
    trusts = [one.trust for one in explanations]
    shares = [trust.no_word for trust in trusts if trust.no_word is not None]
    told = {kind: sum(any(word in doubt for doubt in one.doubts) for one in trusts) for kind, word in KINDS.items()}
    about = {"pairs": len(trusts), "quiet": sum(not trust.doubts for trust in trusts), **told}
    about |= {"no word, median": round(float(np.median(shares)), 3)} if shares else {}
    special = np.quantile([share_of_special_tokens(one) for one in explanations], (0.1, 0.5, 0.9))
    return about | {"special tokens, a tenth, median, nine tenths": [round(float(value), 3) for value in special]}


def share_of_special_tokens(explanation: Explanation) -> float:
    """The share of the sum of |pairs|, by tokens, that a special token on either side carries."""
    sizes = np.abs(explanation.pairs)
    rows, columns = (
        np.array([token.part == "text" for token in tokens])
        for tokens in (explanation.query_tokens, explanation.document_tokens)
    )
    return float(1 - sizes[np.ix_(rows, columns)].sum() / sizes.sum())


if __name__ == "__main__":
    main()
