"""Which method finds the words and sentences that the score is lost without, and what each costs in embeddings?

    python benchmarks/occlusion.py --data FOLDER [--paragraphs 0 1 2 ...] [--pairs 60] [--short 24] [--json FILE]

FOLDER holds `xquad/xquad.en.json`: paragraphs and the questions that they answer, of which three are asked of each. Of
each method, the share of the score that is lost when the top 5, 10 and 20 % of a paragraph's words are left out, and
when its best sentence is; and how many embeddings of texts a paragraph takes ("best possible" tries every sentence).
Articles of even number are apart from those of odd number, so that what is chosen on the first half can be reported on
the second. A value is the mean of a paragraph's questions, since what they ask of is the same text. `--paragraphs` are
places in an order that is random but always the same: the first 20, unless told otherwise.

It also holds `msr_rte_align`: pairs whose words people aligned. Of each method, the average precision of its cells and
the F1 of those that are the best of their row and of their column, beside last-layer cosine and equal words.

Last, whether it pays that each order of `shapley` is taken backwards too: of short questions, whose Shapley values are
computed from all subsets of their words, how far the values of as many orders are off (root mean square, score units).

What edits texts asks the model as a black box, through its vectors alone. Differences are paired, with the first of the
methods. Bounds hold 95 % (bootstrap, seed fixed). With `--json` what is known is written after each step; the tables of
docs/methods.md are printed at the end.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import comb
from pathlib import Path
from typing import Any

import data_sets
import measures
import numpy as np
from choices import Trial, row
from numpy.typing import NDArray

from rag_explain import Explainer, Explanation
from rag_explain.results.spans import ValuedSpan
from rag_explain.scorers import BlackBox, Scorer
from rag_explain.texts.edits import is_empty, without
from rag_explain.texts.segments import Span, part_spans, sentence_spans
from rag_explain.types import Unit

METHODS: dict[str, dict[str, Any]] = {
    "occlusion": {"method": "occlusion"},
    "bilrp": {"method": "bilrp"},
    "ij": {"method": "ij"},
    "occlusion best=2": {"method": "occlusion", "best": 2},
    "shapley samples=4": {"method": "shapley", "samples": 4},
    "shapley samples=8": {"method": "shapley", "samples": 8},
    "shapley samples=4 best=1": {"method": "shapley", "samples": 4, "best": 1},
    "random": {"method": "random"},
}
SHARES = (0.05, 0.1, 0.2)
HALVES = ("chosen on", "reported")
ASKED = 3  # questions of each paragraph
COSTLY = "shapley samples=8"  # tried by word on short texts alone
ORDERS, DRAWS = (4, 8, 16), 200
SHORT = range(4, 10)  # words of a question
Case = tuple[int, str, list[str]]


@dataclass
class Tried:
    """The methods, and the scorers that they share: one that is looked into, one that is only asked."""

    inside: Scorer
    asked: Scorer
    methods: dict[str, Explainer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for label, options in METHODS.items():
            by_edits = options["method"] in self.asked.methods
            self.methods[label] = Explainer(self.asked if by_edits else self.inside, **options)

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """What the model gives; a text in which no word is left scores nothing."""
        found = iter(self.asked.score(query, [text for text in documents if not is_empty(text)]).tolist())
        return [0.0 if is_empty(text) else next(found) for text in documents]


def main() -> None:
    options = parse()
    inside = Explainer(options.model).scorer
    tried = Tried(inside, BlackBox(inside.embed, name=inside.name, batch_size=512))
    trial = Trial(inside, tried.methods)
    pairs = data_sets.shuffled(data_sets.msr_alignments(options.data / "msr_rte_align" / "RTE2_dev_M.align.json"))
    cases = paragraphs(options.data / "xquad" / "xquad.en.json")
    short = [(one, text) for _, text, several in cases for one in several if len(part_spans(one)) in SHORT]
    for steps in (
        samplers(trial, tried, short[: options.short]),
        aligned(trial, tried, pairs[: options.pairs]),
        deletions(trial, tried, [cases[place] for place in options.paragraphs]),
    ):
        for number, _ in enumerate(steps, 1):
            print(f"{steps.__name__} {number}", flush=True)
            if options.json:
                options.json.write_text(results(options, trial), encoding="utf-8")
    print(tables(rows_of(trial)))


def paragraphs(path: Path) -> list[Case]:
    """(half, paragraph, questions) of each paragraph that the model reads whole, shuffled."""
    data = json.loads(path.read_text(encoding="utf-8"))["data"]
    cases = [
        (number % 2, paragraph["context"], [one["question"] for one in paragraph["qas"]][:ASKED])
        for number, article in enumerate(data)
        for paragraph in article["paragraphs"]
        if len(paragraph["context"]) < 1000
    ]
    return data_sets.shuffled(cases)


# What is lost without what a method found


def deletions(trial: Trial, tried: Tried, cases: Sequence[Case]) -> Iterator[None]:
    for half, document, several in cases:
        found: dict[tuple[str, str], list[float]] = {}
        for query in several:
            for measure, label, value in lost(tried, query, document):
                found.setdefault((measure, label), []).append(value)
        for (measure, label), values in found.items():
            for name in (HALVES[half], "all"):
                trial.note(f"xquad, {name}", measure, label, float(np.mean(values)))
        yield


def lost(tried: Tried, query: str, document: str) -> Iterator[tuple[str, str, float]]:
    """(measure, label, value) of every method."""
    words, sentences = part_spans(document), sentence_spans(document)
    counts = measures.top_counts(len(words), SHARES)
    by_one = [losses(tried, query, document, [[span]])[0] for span in sentences]
    yield "lost without the best sentence", "best possible", max(by_one)
    yield "lost without the best sentence", "random", float(np.mean(by_one))
    for label, explainer in tried.methods.items():
        parts = []
        if label != COSTLY:
            parts = carried(explainer, query, document)
            ranked = [(one.start, one.end) for one in sorted(parts, key=lambda one: -one.value)]
            several = losses(tried, query, document, [ranked[:count] for count in counts])
            for share, value in zip(SHARES, several, strict=True):
                yield f"lost without the top {share:.0%} of words", label, value
            if explainer.method.edits:
                yield "embeddings by word", label, cost(tried, label, document, "word", len(parts))
        if label != "random" and "best" not in METHODS[label]:
            best = max(sentences, key=partial(summed, by_sentence(explainer, query, document, parts)))
            yield "lost without the best sentence", label, by_one[sentences.index(best)]
            if explainer.method.edits:
                yield "embeddings by sentence", label, cost(tried, label, document, "sentence")


def carried(explainer: Explainer, query: str, document: str) -> list[ValuedSpan]:
    """What each word carries over the whole query; marks by themselves are no words."""
    return [one for one in explainer.highlight(query, document, unit="word").spans if not is_empty(one.text)]


def by_sentence(explainer: Explainer, query: str, document: str, words: Sequence[ValuedSpan]) -> Sequence[ValuedSpan]:
    """By sentences, or by the words that sum to the same."""
    return explainer.highlight(query, document, unit="sentence").spans if explainer.method.edits else words


def summed(parts: Sequence[ValuedSpan], span: Span) -> float:
    return sum(one.value for one in parts if span[0] <= one.start and one.end <= span[1])


def losses(tried: Tried, query: str, document: str, several: Sequence[Sequence[Span]]) -> list[float]:
    """The share of the score that is lost without each list of parts."""
    before, *after = tried.score(query, [document, *(without(document, spans) for spans in several)])
    return [measures.lost(before, score) for score in after]


def cost(tried: Tried, label: str, document: str, unit: Unit, words: int = 0) -> float:
    """How many embeddings the document takes, with the whole."""
    method = tried.methods[label].method
    # Planned for a scorer that keeps no vectors at hand, so that nothing is free.
    with Explainer(tried.inside, **{**METHODS[label], "best": None}) as fresh:
        if not method.narrows(unit):
            return float(fresh.plan([document], unit=unit).embeddings)
        by_words = words * METHODS[label].get("samples", 1)  # at most
        return float(fresh.plan([document], unit="sentence").embeddings + by_words)


# Which words belong together, to people


def aligned(trial: Trial, tried: Tried, pairs: Sequence[data_sets.AlignedPair]) -> Iterator[None]:
    cosines = Explainer(tried.inside, "alignment")
    for pair in pairs:
        tables = {"equal words": measures.exact_matches(pair.query, pair.document)}
        for label, explainer in tried.methods.items():
            if (
                "best" not in METHODS[label] and label != COSTLY
            ):  # the words of one sentence or two: the same as without
                explanation = explainer.explain(pair.query, pair.document, unit="word")
                tables[label] = measures.regrouped(explanation, explanation.pairs, np.add)
        last: Explanation = cosines.explain(pair.query, pair.document).by_word()
        assert last.similarities is not None
        tables["last-layer cosine"] = measures.regrouped(last, last.similarities, np.maximum)
        wanted = measures.marked(pair.aligned, tables["equal words"].shape)
        for label, values in tables.items():
            trial.note("msr", "AP of cells", label, measures.average_precision(values, wanted))
            f1 = measures.precision_recall_f1(measures.mutual_best(values), wanted)[2]
            trial.note("msr", "F1 of mutual best", label, f1)
        yield


# Orders that are taken backwards too, or as many that are drawn by themselves


def samplers(trial: Trial, tried: Tried, cases: Sequence[tuple[str, str]]) -> Iterator[None]:
    chance = np.random.default_rng(measures.SEED)
    for question, paragraph in cases:
        worth, n = subset_scores(tried, question, paragraph)
        exact = exact_values(worth, n)
        for count in ORDERS:
            off = {"and backwards": list[float](), "by themselves": list[float]()}
            for _ in range(DRAWS):
                drawn = [chance.permutation(n).tolist() for _ in range(count)]
                both = [order for one in drawn[: count // 2] for order in (one, one[::-1])]
                for label, orders in (("and backwards", both), ("by themselves", drawn)):
                    off[label].append(float(np.mean((estimated(worth, n, orders) - exact) ** 2)))
            for label, squares in off.items():
                trial.note("short questions", f"off, {count} orders", label, float(np.sqrt(np.mean(squares))))
        yield


def subset_scores(tried: Tried, question: str, paragraph: str) -> tuple[NDArray[np.float64], int]:
    """(2^n,): what the paragraph scores for each subset of the question's words; a bit for each word."""
    words = part_spans(question)
    texts = [
        without(question, [span for at, span in enumerate(words) if not subset >> at & 1])
        for subset in range(1 << len(words))
    ]
    vectors = tried.inside.embed([text for text in texts if not is_empty(text)], "query").astype(np.float64)
    (document,) = tried.inside.embed([paragraph], "document").astype(np.float64)
    cosines = vectors @ document / np.linalg.norm(vectors, axis=1) / np.linalg.norm(document)
    found = iter(cosines.tolist())
    return np.array([0.0 if is_empty(text) else next(found) for text in texts]), len(words)


def exact_values(worth: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """(n,): the Shapley value of each word, from all subsets."""
    subsets = np.arange(1 << n)
    sizes = np.array([int(subset).bit_count() for subset in subsets])
    shares = np.array([1 / (n * comb(n - 1, size)) if size < n else 0.0 for size in range(n + 1)])
    found = []
    for at in range(n):
        less = subsets[(subsets >> at & 1) == 0]
        found.append(float((shares[sizes[less]] * (worth[less | 1 << at] - worth[less])).sum()))
    return np.array(found)


def estimated(worth: NDArray[np.float64], n: int, orders: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """(n,): what each word adds on the average over these orders."""
    found = np.zeros(n)
    for order in orders:
        grown = np.cumsum([0, *(1 << at for at in order)])
        for at, (before, after) in zip(order, pairwise(grown), strict=True):
            found[at] += worth[after] - worth[before]
    return found / len(orders)


# Results


def rows_of(trial: Trial) -> list[dict[str, Any]]:
    first = next(iter(METHODS))
    return [row(*key, values, first if first in values else next(iter(values))) for key, values in trial.values.items()]


def results(options: argparse.Namespace, trial: Trial) -> str:
    places = " ".join(map(str, options.paragraphs))
    sizes = f"--paragraphs {places} --pairs {options.pairs} --short {options.short}"
    found = {
        "command": f"python benchmarks/occlusion.py --data FOLDER --model {options.model} {sizes}",
        "bounds": f"95 %, {measures.RESAMPLES} resamples, seed {measures.SEED}",
        "rows": rows_of(trial),
    }
    return json.dumps(found, indent=1) + "\n"


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown: a row for each method, and the mean of each measure, its bounds, and its paired difference."""
    lines = list[str]()
    for name in dict.fromkeys(one["set"] for one in rows):
        of_set = [one for one in rows if one["set"] == name]
        lines += ["", "| " + " | ".join([f"{name} (n = {of_set[0]['n']})", *(one["measure"] for one in of_set)]) + " |"]
        lines.append("|---" * (len(of_set) + 1) + "|")
        for label in dict.fromkeys(label for one in of_set for label in one["labels"]):
            cells = [_cell(one["labels"].get(label)) for one in of_set]
            lines.append("| " + " | ".join([f"`{label}`", *cells]) + " |")
    return "\n".join(lines)


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    less = found["difference"]
    paired = "" if less is None else f"; {less['mean']:+.3f} ({less['low']:+.3f} to {less['high']:+.3f})"
    return f"{found['mean']:.3f} ({found['low']:.3f} to {found['high']:.3f}){paired}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--paragraphs", type=int, nargs="+", default=list(range(20)), help="of which questions are asked"
    )
    parser.add_argument("--pairs", type=int, default=60, help="pairs whose words people aligned")
    parser.add_argument("--short", type=int, default=24, help="short questions, for the orders of shapley")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
