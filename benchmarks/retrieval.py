"""What wrapping a retriever costs: `python benchmarks/retrieval.py --data FOLDER [--json retrieval.json]`.

FOLDER holds `cran.all.1400`, `cran.qry` and `cranqrel` (Cranfield), or `corpus.jsonl` and `claims_train.jsonl`
(SciFact). The whole corpus is embedded and searched exactly with FAISS; factors are built only for what the measured
queries return.

  plain    the model's `encode_query` and `index.search`, as one would write it without this library
  off      FaissRetriever.search(explain="off")
  warm     top 10 with all explanations, documents' factors in memory, the query seen for the first time
  cold     the same with nothing kept

Rounds are interleaved, so that a machine busy with other things is so for all of them; figures are medians, by length
of the query in tokens. nDCG@10 is that of the whole set of queries, with and without the wrapper. With --cpu-time one
thread is timed by the processor time that it got. --keep FOLDER keeps embeddings and factors for the next run.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
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
from tests.support.operation_count import operations

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
        measure(length, queries, plain, retriever, arguments.rounds, model) for length, queries in chosen.items()
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
    model: SentenceTransformer,
) -> dict[str, Any]:
    """Medians over queries and rounds of what each way takes, in milliseconds; each round does all of them in turn."""
    taken: dict[str, list[float]] = {"plain": [], "off": [], "warm": [], "cold": []}
    for query in queries:
        retriever.search(query, TOP, explain="eager")  # factors that were kept on disk come to memory
    for number in range(rounds):
        for query in queries:
            taken["plain"].append(Watch.time(lambda query=query: plain(query))[0])  # type: ignore[misc]
            taken["off"].append(Watch.time(lambda query=query: retriever.search(query, TOP, explain="off"))[0])  # type: ignore[misc]
            retriever.explainer.close()  # forgets queries; the store was given open and stays so
            seconds, hits = Watch.time(lambda query=query: retriever.search(query, TOP, explain="eager"))  # type: ignore[misc]
            assert all(hit.explanation.provenance["path"] == "memory" for hit in hits)
            taken["warm"].append(seconds)
            if number == 0:
                taken["cold"].append(cold(retriever, query))
    row = {f"{name}_ms": 1000 * statistics.median(values) for name, values in taken.items()}
    ratios = {f"{name}_ratio": row[f"{name}_ms"] / row["plain_ms"] for name in ("warm", "cold")}
    print(f"{length[0]:>2} to {length[1]} tokens ({len(queries)} queries): plain {row['plain_ms']:.1f} ms, "
          f"off {row['off_ms']:.1f} ms, warm {row['warm_ms']:.0f} ms ({ratios['warm_ratio']:.1f}x), "
          f"cold {row['cold_ms']:.0f} ms ({ratios['cold_ratio']:.0f}x)")  # fmt: skip
    possible = limit(model, retriever.explainer, queries, row["plain_ms"])
    return {"tokens": list(length), "queries": len(queries), **row, **ratios, **possible}


@torch.inference_mode()
def limit(
    model: SentenceTransformer, explainer: Explainer, queries: Sequence[str], plain_ms: float
) -> dict[str, float]:
    """What the factors of these queries take at least on this machine."""
    encode, factors, rows, rates = [], [], [], []
    for query in queries:
        batch = explainer.scorer.read([as_passage(query)], "query")
        encode.append(operations(lambda query=query: model.encode_query([query], show_progress_bar=False)))  # type: ignore[misc]
        # Counted where it runs on its own: the counter and the tape of a recording would each see the other.
        for _ in range(3):  # from the third of a length on, nothing is recorded
            explainer.method.prepare(batch, "word")
        factors.append(operations(lambda batch=batch: explainer.method.prepare(batch, "word")))  # type: ignore[misc]
        made = explainer.method.prepare(batch, "word")
        rows.append(len(made.rows) * len(batch.tokens[0]))
    weight = max((one.weight for one in model.modules() if isinstance(one, torch.nn.Linear)), key=torch.numel).detach()
    for number in (1, 2, 4):
        left, right = torch.randn(number * int(statistics.median(rows)), weight.shape[1]), weight.T.contiguous()
        seconds = min(Watch.time(lambda left=left, right=right: left @ right)[0] for _ in range(50))  # type: ignore[misc]
        rates.append(2 * len(left) * right.numel() / seconds)
    least = 1000 * statistics.median(factors) / max(rates)
    found = {
        "encode_mflop": statistics.median(encode) / 1e6,
        "factors_mflop": statistics.median(factors) / 1e6,
        "gflop_per_second": max(rates) / 1e9,
        "least_ms": least,
        "least_ratio": 1 + least / plain_ms,
    }
    print(f"   encoding {found['encode_mflop']:.0f} MFLOP, factors {found['factors_mflop']:.0f} MFLOP; at "
          f"{found['gflop_per_second']:.0f} GFLOP/s {least:.0f} ms at least: {found['least_ratio']:.1f}x")  # fmt: skip
    return found


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
