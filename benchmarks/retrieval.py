"""What wrapping a retriever costs: `python benchmarks/retrieval.py --data FOLDER [--json retrieval.json]`.

FOLDER holds `cran.all.1400`, `cran.qry` and `cranqrel` (Cranfield), or `corpus.jsonl` and `claims_train.jsonl`
(SciFact). The whole corpus is embedded and searched exactly with FAISS; factors are built only for what the measured
queries return.

  plain    the model's `encode_query` and `index.search`, as one would write it without this library
  off      FaissRetriever.search(explain="off")
  warm     top 10 with all explanations, documents' factors in memory, the query seen for the first time
  cold     the same with nothing kept

Rounds are interleaved, so that a machine busy with other things is so for all of them; figures are medians, by length
of the query in tokens. Of a warm search it also says what its parts take: the frozen forward pass, which embeds it
too, the push of one tangent per word, and all else (the index, hits, kept factors, comparisons); and what the matrix
products of the first two take alone. nDCG@10 is that of the whole set of queries, with and without the wrapper. With
--cpu-time one thread is timed by the processor time that it got. --keep FOLDER keeps embeddings and factors for the
next run.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import torch
from data_sets import Collection, collection_in, embedded
from sentence_transformers import SentenceTransformer

sys.path.insert(0, str(Path(__file__).parents[1]))
from rag_explain import Explainer
from rag_explain.encoder.loading import DEFAULT_MODEL, packaged_path
from rag_explain.faiss import FaissRetriever
from rag_explain.store import Store
from rag_explain.texts.passage import as_passage, as_passages
from tests.support.operation_count import operations, products

TOP = 10
LENGTHS = ((1, 13), (14, 20), (21, 64))


def ndcg(found: Sequence[str], relevant: Iterable[str]) -> float:
    wanted = set(relevant)
    best = sum(1 / math.log2(rank + 2) for rank in range(min(TOP, len(wanted))))
    return (
        sum(1 / math.log2(rank + 2) for rank, name in enumerate(found[:TOP]) if name in wanted) / best if best else 0.0
    )


class Watch:
    """Times calls, by the clock on the wall or by the processor time of the process."""

    clock = staticmethod(time.perf_counter)

    @classmethod
    def time(cls, call: Callable[[], Any]) -> tuple[float, Any]:
        start = cls.clock()
        result = call()
        return cls.clock() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--queries", type=int, default=6, help="measured queries per length")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="folder for embeddings and factors")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.cpu_time:
        torch.set_num_threads(1)
        faiss.omp_set_num_threads(1)
        Watch.clock = staticmethod(time.process_time)

    collection = collection_in(arguments.data)
    model = SentenceTransformer(str(packaged_path() or DEFAULT_MODEL), device="cpu")
    explainer = Explainer(model, store=Store(arguments.keep))
    names, texts = list(collection.documents), list(collection.documents.values())
    vectors = embedded(explainer.scorer, texts, arguments.keep)
    print(f"{collection.name}: {len(texts)} documents, {len(collection.queries)} queries", flush=True)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    retriever = FaissRetriever(index, texts, explainer, ids=names)

    def plain(query: str) -> list[str]:
        _, rows = index.search(model.encode_query([query], show_progress_bar=False), TOP)
        return [names[row] for row in rows[0]]

    result: dict[str, Any] = {"collection": collection.name, **rank(collection, plain, retriever)}
    print(f"nDCG@10 plain {result['ndcg_plain']:.4f}, wrapped {result['ndcg_wrapped']:.4f}; "
          f"queries with another ranking: {result['other_rankings']}")  # fmt: skip

    chosen = choose(collection, explainer, arguments.queries)
    measured = [query for queries in chosen.values() for query in queries]
    returned = {hit.id for query in measured for hit in retriever.search(query, TOP, explain="off")}
    print(explainer.precompute([collection.documents[name] for name in returned], progress=False), flush=True)
    result["lengths"] = [
        measure(length, queries, plain, retriever, arguments.rounds) for length, queries in chosen.items()
    ]
    result["off_overhead_ms"] = statistics.median(row["off_ms"] - row["plain_ms"] for row in result["lengths"])
    print(f"explanations off: {result['off_overhead_ms']:+.2f} ms per call against plain")
    result["machine"] = f"{torch.get_num_threads()} threads, {platform.machine()}, torch {torch.__version__}"
    if arguments.json:
        given = f"--queries {arguments.queries} --rounds {arguments.rounds}" + " --cpu-time" * arguments.cpu_time
        command = f"python benchmarks/retrieval.py --data {collection.name.upper()} {given}"
        text = json.dumps({"command": command, **result}, indent=1) + "\n"
        arguments.json.write_text(text, encoding="utf-8")


def rank(collection: Collection, plain: Callable[[str], list[str]], retriever: FaissRetriever) -> dict[str, Any]:
    """nDCG@10 both ways, and how many queries rank otherwise."""
    scores: list[tuple[float, float]] = []
    others = 0
    for name, query in collection.queries.items():
        ours, theirs = [hit.id for hit in retriever.search(query, TOP)], plain(query)
        others += ours != theirs
        relevant = collection.relevant.get(name, set())
        scores.append((ndcg(theirs, relevant), ndcg(ours, relevant)))
    before, after = (statistics.mean(column) for column in zip(*scores, strict=True))
    return {"ndcg_plain": before, "ndcg_wrapped": after, "other_rankings": others}


def choose(collection: Collection, explainer: Explainer, count: int) -> dict[tuple[int, int], list[str]]:
    """The first `count` queries of each length, special tokens included."""
    lengths = {
        query: len(explainer.scorer.read(as_passages([query]), "query").tokens[0])
        for query in collection.queries.values()
    }
    return {
        (low, high): [query for query, length in lengths.items() if low <= length <= high][:count]
        for low, high in LENGTHS
    }


def measure(
    length: tuple[int, int],
    queries: Sequence[str],
    plain: Callable[[str], list[str]],
    retriever: FaissRetriever,
    rounds: int,
) -> dict[str, Any]:
    """Medians over queries and rounds of what each way takes, in milliseconds; each round does all of them in turn."""
    taken: dict[str, list[float]] = {name: [] for name in ("plain", "off", "warm", "forward", "push", "cold")}
    for query in queries:
        retriever.search(query, TOP, explain="eager")  # factors that were kept on disk come to memory
    for number, query in ((number, query) for number in range(rounds) for query in queries):
        taken["plain"].append(Watch.time(lambda query=query: plain(query))[0])  # type: ignore[misc]
        taken["off"].append(Watch.time(lambda query=query: retriever.search(query, TOP, explain="off"))[0])  # type: ignore[misc]
        retriever.explainer.close()  # forgets queries; the store was given open and stays so
        with watched(retriever.explainer.method) as parts:
            seconds, hits = Watch.time(lambda query=query: retriever.search(query, TOP, explain="eager"))  # type: ignore[misc]
        taken["forward"] += parts["forward"]
        taken["push"] += parts["push"]
        assert all(hit.explanation.provenance["path"] == "memory" for hit in hits)
        taken["warm"].append(seconds)
        if number == 0:
            taken["cold"].append(cold(retriever, query))
    row = {f"{name}_ms": 1000 * statistics.median(values) for name, values in taken.items()}
    ratios = {f"{name}_ratio": row[f"{name}_ms"] / row["plain_ms"] for name in ("warm", "cold")}
    print(f"{length[0]:>2} to {length[1]} tokens ({len(queries)} queries): plain {row['plain_ms']:.1f} ms, "
          f"off {row['off_ms']:.1f} ms, warm {row['warm_ms']:.0f} ms ({ratios['warm_ratio']:.1f}x), "
          f"cold {row['cold_ms']:.0f} ms ({ratios['cold_ratio']:.0f}x)")  # fmt: skip
    row["rest_ms"] = row["warm_ms"] - row["forward_ms"] - row["push_ms"]
    possible = arithmetic(retriever.explainer, queries, row)
    return {"tokens": list(length), "queries": len(queries), **row, **ratios, **possible}


@contextmanager
def watched(method: Any) -> Iterator[dict[str, list[float]]]:
    """What the two parts of factors take while they are computed in searches, by name."""
    taken: dict[str, list[float]] = {"forward": [], "push": []}

    def timed(name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        seconds, result = Watch.time(lambda: call(*args, **kwargs))
        taken[name].append(seconds)
        return result

    def freeze(batch: Any) -> Any:
        frozen, embeddings = timed("forward", type(method).freeze, method, batch)
        if batch.role == "query":
            frozen.rows = partial(timed, "push", frozen.rows)
        else:
            taken["forward"].pop()
        return frozen, embeddings

    method.freeze = freeze
    try:
        yield taken
    finally:
        del method.freeze


def arithmetic(explainer: Explainer, queries: Sequence[str], row: dict[str, float]) -> dict[str, float]:
    """What the matrix products of the parts take alone, medians over queries.

    They are the products that occur, in the shapes that occur, each done again by itself: nothing that computes the
    same by them is faster.
    """
    each = [products_of(explainer, query) for query in queries]
    found = {name: statistics.median(one[name] for one in each) for name in each[0]}
    found["push_gflop_per_second"] = found["push_mflop"] / found["push_products_ms"]
    found["least_ratio"] = 1 + found["push_products_ms"] / row["plain_ms"]
    for name in ("forward", "push"):
        print(f"   {name} {row[f'{name}_ms']:.1f} ms, of which {found[f'{name}_products_ms']:.1f} ms are "
              f"{found[f'{name}_mflop']:.0f} MFLOP of products")  # fmt: skip
    print(f"   all else {row['rest_ms']:.1f} ms; plain retrieval and the products of {found['tangents']:.0f} tangents, "
          f"at {found['push_gflop_per_second']:.0f} GFLOP/s, are {found['least_ratio']:.1f}x")  # fmt: skip
    return found


@torch.inference_mode()
def products_of(explainer: Explainer, query: str) -> dict[str, float]:
    """The products in one query's factors: how many operations they are, and the least that they took of many times."""
    method: Any = explainer.method
    batch = explainer.scorer.read([as_passage(query)], "query")
    units, groups = batch.groups("word")
    for _ in range(3):  # from the third of a length on, nothing is recorded
        frozen, _ = method.freeze(batch)
    parts = {"forward": lambda: method.freeze(batch), "push": lambda: frozen.rows(method.max_bytes, groups=groups)}
    found: dict[str, float] = {"tangents": len(units[0])}
    for name, run in parts.items():
        found[f"{name}_mflop"] = operations(run) / 1e6
        alike: dict[Any, list[Callable[[], object]]] = {}
        for product, shapes in products(run):
            alike.setdefault(shapes, []).append(product)
        # Those of all layers one after the other, each with its own weights.
        found[f"{name}_products_ms"] = sum(1000 * least(same) for same in alike.values())
    return found


def least(calls: Sequence[Callable[[], object]]) -> float:
    return min(Watch.time(lambda: [call() for call in calls])[0] for _ in range(30))


def cold(retriever: FaissRetriever, query: str) -> float:
    """The same search with an empty store and an unknown query."""
    warm, retriever.explainer._planner = retriever.explainer._planner, _empty(retriever.explainer)
    retriever.explainer.close()
    try:
        return Watch.time(lambda: retriever.search(query, TOP, explain="eager"))[0]
    finally:
        retriever.explainer._planner = warm


def _empty(explainer: Explainer) -> Any:
    return type(explainer._planner)(explainer.scorer, explainer.method, Store())


if __name__ == "__main__":
    main()
