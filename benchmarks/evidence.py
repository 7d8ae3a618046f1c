"""Where to look: how often is the best sentence the one that answers a question, or proves a claim?

    python benchmarks/evidence.py --data FOLDER [--limit 240] [--json benchmarks/results/evidence.json]

FOLDER holds `xquad/xquad.en.json` (the answer's sentence is wanted) and `scifact/` (any rationale sentence of a claim's
abstract is wanted). Every way to rank sentences is measured on both halves: articles of even and odd number, claims of
even and odd number. What is chosen on the first half is reported on the second. Abstracts that are longer than the
encoder reads at once stand apart, with "first window only" beside them: what reading only the beginning would find.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rag_explain import Explainer
from rag_explain.evidence import matches
from rag_explain.scorers import Scorer
from rag_explain.texts.passage import as_passage
from rag_explain.texts.segments import Span, sentence_spans
from rag_explain.texts.units import text_units

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A query, a document, and which of its sentences are wanted."""

    half: int
    query: str
    document: str
    wanted: tuple[bool, ...]


@dataclass(frozen=True)
class Looked:
    """What was computed of a case: each query token's best match by sentence, the words of the tokens, cosines."""

    case: Case
    best: Values
    words: NDArray[np.intp]
    is_mark: NDArray[np.bool_]
    cosines: Values
    read: NDArray[np.bool_]  # which sentences the first window holds whole


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=240, help="questions, and claims, of all there are")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    scorer = Explainer(options.model).scorer
    rows: list[dict[str, Any]] = []
    for name, cases in (("XQuAD", questions(options.data)), ("SciFact", claims(options.data))):
        chosen = spaced([case for case in cases if len(case.wanted) > 1 and any(case.wanted)], options.limit)
        looked = [look(scorer, case) for case in progress(chosen)]
        for fits in (True, False):
            some = [one for one in looked if bool(one.read.all()) == fits]
            rows += table(f"{name}, {'fits' if fits else 'longer than the window'}", some)
    for row in rows:
        print("{set:<32} {way:<28} {cases:4} {chosen_on:.3f} {reported:.3f} ± {standard_error:.3f}".format(**row))
    if options.json:
        command = f"python benchmarks/evidence.py --data FOLDER --limit {options.limit} --model {options.model}"
        options.json.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def questions(data: Path) -> Iterator[Case]:
    articles = json.loads((data / "xquad" / "xquad.en.json").read_text(encoding="utf-8"))["data"]
    for number, article in enumerate(articles):
        for paragraph in article["paragraphs"]:
            text = paragraph["context"]
            for asked in paragraph["qas"]:
                at = asked["answers"][0]["answer_start"]
                wanted = tuple(start <= at < end for start, end in sentence_spans(text))
                yield Case(number % 2, asked["question"], text, wanted)


def claims(data: Path) -> Iterator[Case]:
    lines = (data / "scifact" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    abstracts = {str(one["doc_id"]): one["abstract"] for one in map(json.loads, lines)}
    lines = (data / "scifact" / "claims_train.jsonl").read_text(encoding="utf-8").splitlines()
    for number, claim in enumerate(map(json.loads, lines)):
        for document, evidence in claim["evidence"].items():
            sentences = [sentence.strip() for sentence in abstracts[document]]
            ends = np.cumsum([len(sentence) + 1 for sentence in sentences]) - 1
            gold = [(int(ends[at]) - len(sentences[at]), int(ends[at])) for one in evidence for at in one["sentences"]]
            text = " ".join(sentences)
            wanted = tuple(any(mostly(span, one) for one in gold) for span in sentence_spans(text))
            yield Case(number % 2, claim["claim"], text, wanted)


def mostly(span: Span, wanted: Span) -> bool:
    """Whether more than half of a sentence lies in a wanted one: boundaries are ours, not the data's."""
    return 2 * (min(span[1], wanted[1]) - max(span[0], wanted[0])) > span[1] - span[0]


def spaced(cases: list[Case], limit: int) -> list[Case]:
    return [cases[int(at)] for at in np.linspace(0, len(cases) - 1, min(limit, len(cases)))]


def progress(cases: list[Case]) -> Iterator[Case]:
    for number, case in enumerate(cases, start=1):
        yield case
        if number % 20 == 0:
            print(f"{number} of {len(cases)}", file=sys.stderr)


def look(scorer: Scorer, case: Case) -> Looked:
    (found,) = matches(scorer, as_passage(case.query), [as_passage(case.document)])
    tokens = [one for one in scorer.read([as_passage(case.query)], "query").tokens[0] if one.part == "text"]
    _, words = text_units(tokens, case.query, "word", truncated=False)
    batch = scorer.read([as_passage(case.document)], "document")
    last = max(token.end for token in batch.tokens[0])
    asked = scorer.embed([case.query], "query")[0]
    alone = scorer.embed([case.document[start:end] for start, end in found.sentences], "document")
    return Looked(
        case,
        found.best,
        words,
        np.array([not any(map(str.isalnum, token.text)) for token in tokens]),
        (alone @ asked).astype(np.float64),
        np.array([not batch.truncated[0] or end <= last for _, end in found.sentences]),
    )


def by_word(one: Looked) -> Values:
    """(n_words, n_sentences): the mean of a word's tokens."""
    return np.stack([one.best[one.words == word].mean(axis=0) for word in np.unique(one.words)])


def softmaxed(best: Values, temperature: float = 0.1) -> Values:
    powers = np.exp((best - best.max(axis=1, keepdims=True)) / temperature)
    return np.asarray((powers / powers.sum(axis=1, keepdims=True)).sum(axis=0))


def spread(best: Values) -> Values:
    return np.asarray((best * (best.max(axis=1) - best.mean(axis=1))[:, None]).sum(axis=0))


def standard(values: Values) -> Values:
    return (values - values.mean()) / (values.std() or 1.0)


WAYS: dict[str, Callable[[Looked], Values]] = {
    "maxsim": lambda one: one.best.sum(axis=0),
    "maxsim by word": lambda one: by_word(one).sum(axis=0),
    "maxsim without marks": lambda one: one.best[~one.is_mark].sum(axis=0),
    "softmaxed, 0.1": lambda one: softmaxed(one.best),
    "softmaxed by word, 0.1": lambda one: softmaxed(by_word(one)),
    "softmaxed, 0.2": lambda one: softmaxed(one.best, 0.2),
    "weighted by spread": lambda one: spread(one.best),
    "weighted by spread, by word": lambda one: spread(by_word(one)),
    "sentence cosine": lambda one: one.cosines,
    "maxsim + sentence cosine": lambda one: standard(one.best.sum(axis=0)) + standard(one.cosines),
    "softmaxed + sentence cosine": lambda one: standard(softmaxed(one.best)) + standard(one.cosines),
    "first window only": lambda one: np.where(one.read, one.best.sum(axis=0), -np.inf),
}


def table(name: str, looked: list[Looked]) -> list[dict[str, Any]]:
    """One row for each way to rank sentences: how often the best one is wanted, on either half."""
    rows = []
    halves = [[one for one in looked if one.case.half == half] for half in (0, 1)]
    if not all(halves):
        return []
    chance = [np.array([np.mean(one.case.wanted) for one in half]) for half in halves]
    found = {"chance": chance}
    for way, values in WAYS.items():
        finite = [(one, np.where(np.isfinite(table := values(one)), table, -np.inf)) for half in halves for one in half]
        hits = {id(one): float(one.case.wanted[int(table.argmax())]) for one, table in finite}
        found[way] = [np.array([hits[id(one)] for one in half]) for half in halves]
    for way, (first, second) in found.items():
        row = {"set": name, "way": way, "cases": len(second), "chosen_on": float(first.mean())}
        error = float(second.std(ddof=1) / np.sqrt(len(second))) if len(second) > 1 else 0.0
        rows.append({**row, "reported": float(second.mean()), "standard_error": error})
    return rows


if __name__ == "__main__":
    main()
