"""Public data sets that the benchmarks read, each from a folder that the user names. None of them is in the repository.

| folder | file | what |
|---|---|---|
| cranfield | cran.all.1400, cran.qry, cranqrel | abstracts, queries, and which answer which |
| scifact | corpus.jsonl, claims_train.jsonl | abstracts, claims, and which are cited for which |
| stsbenchmark | sts-dev.csv | pairs of sentences, and how alike people found them |
| xquad | xquad.en.json | questions and the paragraphs that answer them |
| msr_rte_align | RTE2_dev_M.align.json | hypotheses and texts, and which words people aligned |
| edinburgh_pp | gold.train.sure.json | paraphrases, and which words people aligned |
"""

from __future__ import annotations

import csv
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rag_explain.scorers import Scorer

T = TypeVar("T")


@dataclass(frozen=True)
class Collection:
    """A corpus, its queries, and the ids of the documents that answer each query."""

    name: str
    documents: dict[str, str]
    queries: dict[str, str]
    relevant: dict[str, set[str]]


@dataclass(frozen=True)
class AlignedPair:
    """Two texts, and which words of them people aligned; words are what stands between blanks, counted from zero."""

    query: str
    document: str
    aligned: frozenset[tuple[int, int]]


def collection_in(folder: Path) -> Collection:
    """Whichever collection the folder holds."""
    if (folder / "cran.qry").exists():
        return cranfield(folder)
    if (folder / "claims_train.jsonl").exists():
        return scifact(folder)
    sys.exit(f"{folder} holds neither Cranfield (cran.qry) nor SciFact (claims_train.jsonl)")


def cranfield(folder: Path) -> Collection:
    """Queries are numbered by their place in the file: that is what the judgements refer to."""
    documents = {}
    for record in re.split(r"^\.I ", (folder / "cran.all.1400").read_text(encoding="latin-1"), flags=re.M)[1:]:
        number, text = record.split("\n", 1)
        documents[number.strip()] = " ".join(text.split("\n.W\n", 1)[1].split())
    records = re.split(r"^\.I ", (folder / "cran.qry").read_text(encoding="latin-1"), flags=re.M)[1:]
    queries = {str(place): " ".join(record.split(".W", 1)[1].split()) for place, record in enumerate(records, 1)}
    relevant: dict[str, set[str]] = {}
    for line in (folder / "cranqrel").read_text().splitlines():
        query, document, *_ = line.split()
        relevant.setdefault(query, set()).add(document)
    return Collection("Cranfield", documents, queries, relevant)


def scifact(folder: Path) -> Collection:
    documents = {}
    for line in (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        documents[str(record["doc_id"])] = " ".join([record["title"], *record["abstract"]])
    claims = [json.loads(line) for line in (folder / "claims_train.jsonl").read_text(encoding="utf-8").splitlines()]
    return Collection(
        "SciFact",
        documents,
        {str(claim["id"]): claim["claim"] for claim in claims},
        {str(claim["id"]): {str(one) for one in claim["cited_doc_ids"]} for claim in claims},
    )


def sts_benchmark(path: Path) -> list[tuple[str, str, float]]:
    """Two sentences, and how alike they are: 0 to 5."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row[5], row[6], float(row[4])) for row in rows]


def xquad(path: Path) -> list[tuple[str, str]]:
    """A question and its paragraph: one question of every paragraph, shuffled, then a second one of each, and so on."""
    articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    found = [
        (turn, item["question"], paragraph["context"])
        for article in articles
        for paragraph in article["paragraphs"]
        for turn, item in enumerate(paragraph["qas"])
    ]
    return [(question, paragraph) for _, question, paragraph in sorted(shuffled(found), key=lambda one: one[0])]


def msr_alignments(path: Path) -> list[AlignedPair]:
    """The hypothesis is the query: it is short, and the text says more than it."""
    return [_aligned(item, query="target", document="source") for item in _items(path)]


def edinburgh_alignments(path: Path) -> list[AlignedPair]:
    return [_aligned(item, query="source", document="target") for item in _items(path)]


def _items(path: Path) -> list[dict[str, Any]]:
    """The pairs of a file in which people aligned a word at all."""
    return [item for item in json.loads(path.read_text(encoding="utf-8")) if item["sureAlign"].split()]


def _aligned(item: dict[str, Any], *, query: str, document: str) -> AlignedPair:
    places = [tuple(map(int, link.split("-"))) for link in item["sureAlign"].split()]
    sides = {"source": 0, "target": 1}
    links = frozenset((place[sides[query]], place[sides[document]]) for place in places)
    return AlignedPair(item[query], item[document], links)


def shuffled(items: Sequence[T]) -> list[T]:
    """The items in an order that is random but always the same, so that a larger sample begins with a smaller one."""
    return random.Random(0).sample(items, len(items))


def embedded(scorer: Scorer, texts: Sequence[str], keep: Path | None) -> NDArray[np.float32]:
    """(D, e): a corpus as vectors, from the folder `keep` where an earlier run left them."""
    path = None if keep is None else keep / f"{scorer.fingerprint}-{len(texts)}.npy"
    if path is not None and path.exists():
        return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]
    vectors = scorer.embed(texts, "document")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, vectors)
    return vectors
