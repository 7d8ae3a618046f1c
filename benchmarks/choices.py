"""Which settings of a method are better? Each is tried on the same real pairs, and the differences are paired.

    python benchmarks/choices.py --data FOLDER [--settings 'LABEL={"method": ...}' ...] [--pairs 60] [--json FILE]

FOLDER holds the folders that `data_sets.py` names. A setting is a label and the keyword arguments of an `Explainer`, as
JSON. The first is what the others are compared with. Explanations are by words.

  all        |unattributed|: what no pair of words carries (score - pairs.sum()), and what no word of the document does
             over the whole query; score units
  cranfield  contrasts of a query's best relevant document with one that is not relevant and ranks above it: how often
             "no word" differs by more than the scores do
  stsb       deletion: words of the document are left out one by one, those that carry most first, and the model scores
             what is left. The area under score / first score, lower is better. Pairs that the model scores above 0.5
  xquad      the share of the score that is lost without the top 5, 10 and 20 % of the document's words: of a question's
  abstracts  paragraph, or of an abstract of Cranfield that answers a query. Pairs that the model scores above 0.2
  msr        agreement with people: average precision of all cells against the words that people aligned, and F1 of the
  edinburgh  cells that are the best of their row and column. Last-layer cosine and equal words stand beside it
  unrelated  each query beside a document that belongs to it and one drawn from the others: what the pairs sum to less
  -xquad     the score, and the sum of |pairs|, of both; how often the sum of pairs (of |pairs|) of the one that belongs
  -cranfield is the larger (1 / 0); and of that one, the rank correlation (Spearman) of its pairs with those of the
  -stsb      first setting

Deletion goes by what words carry over the query's words, and by what they carry over the whole query (special tokens
and rest included); a random order stands beside both. Bounds hold 95 % (bootstrap over pairs, seed fixed). `--keep
FOLDER` keeps the corpus as vectors for the next run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import data_sets
import measures
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rag_explain import Explainer, Explanation
from rag_explain.results.contrast import Contrast
from rag_explain.scorers import Scorer

DEFAULTS = ['bilrp={"method": "bilrp"}', 'attnlrp={"method": "bilrp", "rules": "attnlrp"}']
PACKAGES = ("rag-explain", "numpy", "sentence-transformers", "torch", "transformers")
SHARES = (0.05, 0.1, 0.2)
SALIENCIES = {"query words": measures.over_query_words, "whole query": measures.over_whole_query}
LEFT = {"pairs": measures.no_pair, "words": measures.no_word}


@dataclass
class Trial:
    """The settings, and what was measured of them: one value per pair, by data set, measure and label."""

    scorer: Scorer
    explainers: dict[str, Explainer]
    values: dict[tuple[str, str], dict[str, list[float]]] = field(default_factory=dict)

    def note(self, data_set: str, measure: str, label: str, value: float) -> None:
        self.values.setdefault((data_set, measure), {}).setdefault(label, []).append(value)

    def explain(self, query: str, documents: Sequence[str]) -> dict[str, list[Explanation]]:
        """By every setting; what no word carries is noted."""
        found = {label: one.explain_many(query, documents, unit="word") for label, one in self.explainers.items()}
        for label, explanations in found.items():
            for explanation in explanations:
                for name, left in LEFT.items():
                    self.note("all", f"unattributed, {name}", label, abs(left(explanation)))
        return found


def main() -> None:
    options = parse()
    scorer = Explainer(options.model).scorer
    explainers = {label: Explainer(scorer, **arguments) for label, arguments in map(setting, options.settings)}
    trial = Trial(scorer, explainers)
    for data_set in options.sets:
        with progress(data_set, options.pairs) as advance:
            for _ in SETS[data_set](trial, options.data / folder_of(data_set), options):
                advance()
    rows = [row(*key, values, next(iter(explainers))) for key, values in trial.values.items()]
    Console(width=150).print(table(rows))  # wide enough for a file, too
    if options.json:
        result = {
            "command": command(options),
            "model": scorer.name,
            "settings": dict(map(setting, options.settings)),
            "versions": {name: version(name) for name in PACKAGES},
            "bounds": f"95 %, {measures.RESAMPLES} resamples of the pairs, seed {measures.SEED}",
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


# The data sets


def contrasts(trial: Trial, folder: Path, options: argparse.Namespace) -> Iterator[None]:
    collection = data_sets.cranfield(folder)
    names = [name for name, text in collection.documents.items() if text]
    vectors = data_sets.embedded(trial.scorer, [collection.documents[name] for name in names], options.keep)
    asked = trial.scorer.embed(list(collection.queries.values()), "query")
    misses = []
    for place, (number, query) in enumerate(collection.queries.items()):
        ranking = [names[index] for index in np.argsort(-(vectors @ asked[place]), kind="stable")]
        miss = first_miss(ranking, collection.relevant.get(number, set()))
        if miss is not None:
            misses.append((query, [collection.documents[name] for name in miss]))
    for query, documents in data_sets.shuffled(misses)[: options.pairs]:
        for label, (wanted, got) in trial.explain(query, documents).items():
            contrast = Contrast(wanted, got)
            for name, left in LEFT.items():
                value = measures.exceeds_difference(contrast, left)
                trial.note("cranfield", f"exceeds the difference, {name}", label, value)
        yield


def first_miss(ranking: Sequence[str], relevant: set[str]) -> tuple[str, str] | None:
    """The best-ranked relevant document below the top-ranked one that is not relevant, and that one."""
    got = next((place for place, name in enumerate(ranking) if name not in relevant), len(ranking))
    wanted = next((name for name in ranking[got:] if name in relevant), None)
    return None if wanted is None else (wanted, ranking[got])


def areas(trial: Trial, folder: Path, options: argparse.Namespace) -> Iterator[None]:
    pairs = [(one, other) for one, other, _ in data_sets.sts_benchmark(folder / "sts-dev.csv")]
    chosen = islice(scored_above(trial.scorer, data_sets.shuffled(pairs), 0.5), options.pairs)
    for number, (query, document) in enumerate(chosen):
        explained = {label: found[0] for label, found in trial.explain(query, [document]).items()}
        words = len(next(iter(explained.values())).document_tokens)
        if words > 1:
            delete(trial, "stsb", explained, number, measures.every_count(words), note_area)
        yield


def losses(name: str, trial: Trial, folder: Path, options: argparse.Namespace) -> Iterator[None]:
    pairs = OWN_DOCUMENTS[FOLDERS.get(name, name)](folder)
    for number, (query, document) in enumerate(islice(scored_above(trial.scorer, pairs, 0.2), options.pairs)):
        explained = {label: found[0] for label, found in trial.explain(query, [document]).items()}
        words = len(next(iter(explained.values())).document_tokens)
        delete(trial, name, explained, number, measures.top_counts(words, SHARES), note_losses)
        yield


def scored_above(scorer: Scorer, pairs: Iterable[tuple[str, str]], floor: float) -> Iterator[tuple[str, str]]:
    """The pairs that the model scores above the floor: a score near zero has nothing to lose."""
    return (pair for pair in pairs if scorer.score(pair[0], [pair[1]])[0] > floor)


def delete(
    trial: Trial,
    data_set: str,
    explained: dict[str, Explanation],
    number: int,
    counts: Sequence[int],
    note: Callable[[Trial, str, str, str, list[float]], None],
) -> None:
    """Delete words by each setting and each saliency, and in a random order; every text is scored once."""
    first = next(iter(explained.values()))
    assert first.query is not None
    assert first.document is not None
    texts: dict[tuple[str, str], list[str]] = {}
    chance = np.random.default_rng([measures.SEED, number]).permutation(len(first.document_tokens)).tolist()
    for name, saliency in SALIENCIES.items():
        for label, explanation in explained.items():
            order = measures.largest_first(saliency(explanation))
            texts[name, label] = measures.deletions(explanation, order, counts)
        texts[name, "random"] = measures.deletions(first, chance, counts)
    distinct = list(dict.fromkeys([first.document, *(text for several in texts.values() for text in several)]))
    scores = dict(zip(distinct, trial.scorer.score(first.query, distinct).tolist(), strict=True))
    for (name, label), several in texts.items():
        note(trial, data_set, name, label, [scores[text] for text in (first.document, *several)])


def note_area(trial: Trial, data_set: str, saliency: str, label: str, scores: list[float]) -> None:
    trial.note(data_set, f"area, {saliency}", label, measures.area(scores))


def note_losses(trial: Trial, data_set: str, saliency: str, label: str, scores: list[float]) -> None:
    for share, score in zip(SHARES, scores[1:], strict=True):
        trial.note(data_set, f"lost without top {share:.0%}, {saliency}", label, measures.lost(scores[0], score))


def msr(trial: Trial, folder: Path, options: argparse.Namespace) -> Iterator[None]:
    return people(trial, "msr", data_sets.msr_alignments(folder / "RTE2_dev_M.align.json"), options)


def edinburgh(trial: Trial, folder: Path, options: argparse.Namespace) -> Iterator[None]:
    return people(trial, "edinburgh", data_sets.edinburgh_alignments(folder / "gold.train.sure.json"), options)


def people(
    trial: Trial, data_set: str, pairs: Sequence[data_sets.AlignedPair], options: argparse.Namespace
) -> Iterator[None]:
    cosines = Explainer(trial.scorer, "alignment")
    for pair in data_sets.shuffled(pairs)[: options.pairs]:
        tables = {"equal words": measures.exact_matches(pair.query, pair.document)}
        for label, (explanation,) in trial.explain(pair.query, [pair.document]).items():
            tables[label] = measures.regrouped(explanation, explanation.pairs, np.add)
        last = cosines.explain(pair.query, pair.document).by_word()
        assert last.similarities is not None
        tables["last-layer cosine"] = measures.regrouped(last, last.similarities, np.maximum)
        wanted = measures.marked(pair.aligned, tables["equal words"].shape)
        for label, values in tables.items():
            trial.note(data_set, "AP of cells", label, measures.average_precision(values, wanted))
            f1 = measures.precision_recall_f1(measures.mutual_best(values), wanted)[2]
            trial.note(data_set, "F1 of mutual best", label, f1)
        yield


def own_xquad(folder: Path) -> list[tuple[str, str]]:
    return data_sets.xquad(folder / "xquad.en.json")


def own_cranfield(folder: Path) -> list[tuple[str, str]]:
    collection = data_sets.cranfield(folder)
    pairs = [
        (query, collection.documents[min(found, key=int)])
        for number, query in collection.queries.items()
        if (found := {name for name in collection.relevant.get(number, ()) if collection.documents.get(name)})
    ]
    return data_sets.shuffled(pairs)


def own_stsb(folder: Path) -> list[tuple[str, str]]:
    alike = [(one, other) for one, other, gold in data_sets.sts_benchmark(folder / "sts-dev.csv") if gold >= 3]
    return data_sets.shuffled(alike)


# Queries, and a document that belongs to each.
OWN_DOCUMENTS = {"xquad": own_xquad, "cranfield": own_cranfield, "stsb": own_stsb}


def strangers(name: str, trial: Trial, folder: Path, options: argparse.Namespace) -> Iterator[None]:
    """Each query with its own document, and with the document of the query after the next: chance put them together."""
    pairs = OWN_DOCUMENTS[name](folder)
    for place, (query, own) in enumerate(pairs[: options.pairs]):
        other = pairs[(place + 2) % len(pairs)][1]
        first: Explanation | None = None
        for label, (related, unrelated) in trial.explain(query, [own, other]).items():
            first = related if first is None else first
            for kind, explanation in (("related", related), ("unrelated", unrelated)):
                summed, size = measures.pair_sums(explanation)
                trial.note(
                    f"unrelated-{name}", f"|sum of pairs - score|, {kind}", label, abs(summed - explanation.score)
                )
                trial.note(f"unrelated-{name}", f"sum of |pairs|, {kind}", label, size)
                trial.note(f"unrelated-{name}", f"sum of pairs, {kind}", label, summed)
            ahead = np.greater(measures.pair_sums(related), measures.pair_sums(unrelated))
            for measure, value in zip(("sum of pairs", "sum of |pairs|"), ahead, strict=True):
                trial.note(f"unrelated-{name}", f"{measure} is larger if related", label, float(value))
            order = measures.rank_correlation(related.pairs, first.pairs)
            trial.note(f"unrelated-{name}", "order of the related pairs, with the first", label, order)
        yield


SETS = {
    **{f"unrelated-{name}": partial(strangers, name) for name in OWN_DOCUMENTS},
    "cranfield": contrasts,
    "stsb": areas,
    "xquad": partial(losses, "xquad"),
    "abstracts": partial(losses, "abstracts"),
    "msr": msr,
    "edinburgh": edinburgh,
}
FOLDERS = {"abstracts": "cranfield", "stsb": "stsbenchmark", "msr": "msr_rte_align", "edinburgh": "edinburgh_pp"}


def folder_of(data_set: str) -> str:
    name = data_set.removeprefix("unrelated-")
    return FOLDERS.get(name, name)


# Settings and results


def setting(text: str) -> tuple[str, dict[str, Any]]:
    """A label and keyword arguments, of 'label={...}'."""
    label, _, arguments = text.partition("=")
    try:
        found = json.loads(arguments)
    except ValueError:
        found = None
    if not label or not isinstance(found, dict):
        sys.exit(f'a setting is written as label={{"method": "bilrp"}}, not as {text}')
    return label, found


def row(data_set: str, measure: str, values: dict[str, list[float]], first: str) -> dict[str, Any]:
    """One measure on one data set: each label's mean, the largest value, and the paired difference to the first."""
    return {
        "set": data_set,
        "measure": measure,
        "n": len(values[first]),
        "labels": {
            label: {
                **measures.bounded(several),
                "largest": max(several),
                "difference": None if label == first else measures.difference(several, values[first]),
            }
            for label, several in values.items()
        },
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    result = Table("set", "measure", "n", "setting", "mean", "95 %", "largest", "less the first", "95 %")
    for one in rows:
        head = (one["set"], one["measure"], str(one["n"]))
        for label, found in one["labels"].items():
            change = found["difference"]
            paired = ("", "") if change is None else (f"{change['mean']:+.4f}", interval(change))
            result.add_row(*head, label, f"{found['mean']:.4f}", interval(found), f"{found['largest']:.3f}", *paired)
            head = ("", "", "")
        result.add_section()
    return result


def interval(found: dict[str, float]) -> str:
    return f"{found['low']:.4f} to {found['high']:.4f}"


def command(options: argparse.Namespace, script: str = "choices.py") -> str:
    """What was asked for, without the folders of the machine it ran on."""
    sets = ["--sets", *options.sets] if "sets" in options else []
    given = ["--settings", *options.settings, *sets, "--pairs", str(options.pairs)]
    return shlex.join(["python", f"benchmarks/{script}", "--data", "FOLDER", "--model", options.model, *given])


@contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr."""
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", default=DEFAULTS, metavar="LABEL=JSON")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["cranfield", "stsb", "xquad", "msr"])
    parser.add_argument("--pairs", type=int, default=60, help="at most this many of each set")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--keep", type=Path, help="folder for the corpus as vectors")
    parser.add_argument("--json", type=Path, help="write the figures here, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
