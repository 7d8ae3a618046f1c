"""What keeping factors is worth: `python benchmarks/store.py --documents corpus.jsonl --queries claims.jsonl`.

One run measures, on real documents with the default model:
  1. ten documents explained from memory, from disk, cold, and the papers' way (one backward pass per dimension);
  2. the product for 1000 warm documents against what the machine can do, and the cost of the objects beside it;
  3. bytes per document;
  4. the policy on a Zipf-distributed stream of queries against never keeping and always building;
  5. explanations from fp16 and int8 factors against fp32: matrix error, top-10 pairs kept.

Documents: one JSON object per line with "text", or with "title" and "abstract" (a list of sentences), as in SciFact.
Queries: one JSON object per line with "text" or "claim". The documents' factors are kept in --store between runs.

On a machine that is busy with other things use --cpu-time: one thread, timed by the processor time that it got.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rag_explain import Explainer, Explanation
from rag_explain.encoder import loading as models
from rag_explain.factors import Factors
from rag_explain.pairing import Placed, multiply
from rag_explain.planner import DocumentPlanner
from rag_explain.ski_rental import SkiRental
from rag_explain.store import NewFactors, Store
from rag_explain.store.codec import decode, encode
from rag_explain.store.memory import Memory
from rag_explain.texts.passage import as_passages

WORDS = 75  # of each document, about 105 tokens
LOOKS = 60
CANDIDATES = 20


@dataclass
class Bench:
    """What every part of the run needs."""

    model: str
    explainer: Explainer
    documents: list[str]
    queries: list[str]
    factors: list[Factors]
    clock: Callable[[], float]

    def best(self, call: Callable[[], object], repeat: int = 15) -> float:
        """Seconds of the fastest of several runs."""
        seconds = []
        for _ in range(repeat):
            start = self.clock()
            call()
            seconds.append(self.clock() - start)
        return min(seconds)


class Never(SkiRental):
    def should_build(self, key: bytes, query_tokens: int, document_tokens: int) -> bool:
        return False


class Always(SkiRental):
    def should_build(self, key: bytes, query_tokens: int, document_tokens: int) -> bool:
        return True


def main() -> None:
    arguments = parse()
    if arguments.cpu_time:
        torch.set_num_threads(1)
    documents = [" ".join(text.split()[:WORDS]) for text in read(arguments.documents)[: arguments.count]]
    queries = read(arguments.queries)[: arguments.count]
    store = Store(arguments.store or tempfile.mkdtemp(), precision="fp32", memory_bytes=2**32)
    with torch.no_grad(), store, Explainer(arguments.model, store=store) as explainer:
        explainer.precompute(documents)
        bench = Bench(
            arguments.model,
            explainer,
            documents,
            queries,
            kept_factors(explainer, documents),
            time.thread_time if arguments.cpu_time else time.perf_counter,
        )
        tokens = [len(factors.tokens) for factors in bench.factors]
        print(f"Command: `python benchmarks/store.py {' '.join(quoted(sys.argv[1:]))}`\n")
        clock = "processor time of one thread" if arguments.cpu_time else "wall clock, fastest of several runs"
        print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__} with {torch.get_num_threads()}")
        print(f"thread(s); {clock}. {len(documents)} documents of {min(tokens)} to {max(tokens)} tokens,")
        print(f"mean {np.mean(tokens):.0f}; model {arguments.model}, method {explainer.method.name}.")
        ten_documents(bench)
        thousand_documents(bench)
        bytes_per_document(bench)
        zipf_stream(bench)
        fidelity(bench)


def ten_documents(bench: Bench) -> None:
    """Warm, from disk, cold, and the papers' way."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.support.references import lrp_rows

    query, documents = bench.queries[0], bench.documents[:10]
    encoder, method = bench.explainer.scorer.encoder, bench.explainer.method
    asked = encoder.read([query], "query")
    own = bench.best(lambda: method.factor(asked, "token"))

    def from_nothing(explainer: Explainer) -> list[Explanation]:
        explainer._queries.clear()  # the query's factors are part of the cost
        return explainer.explain_many(query, documents)

    warm = bench.best(lambda: from_nothing(bench.explainer))
    with tempfile.TemporaryDirectory() as folder:
        with Store(folder) as store:
            scorer = bench.explainer.scorer
            keys = DocumentPlanner(scorer, method, store)._keys(as_passages(documents), scorer.fingerprint, "token")
            store.put([NewFactors(key, factors) for key, factors in zip(keys, bench.factors, strict=False)])

        def opened() -> float:
            with Store(folder) as store:
                served = DocumentPlanner(bench.explainer.scorer, method, store)
                start = bench.clock()
                (half,) = method.factor(asked, "token")
                paths = {item.provenance["path"] for item in served.explain(half, as_passages(documents))}
                assert paths == {"disk"}
                return bench.clock() - start

        disk = min(opened() for _ in range(5))
    (half,) = method.factor(asked, "token")
    cold = min(seconds_of(bench, lambda: cold_path(bench, half, documents)) for _ in range(2))
    features = encoder.read(documents[:1], "document").features
    model, _ = models.load(bench.model, "cpu")
    with torch.enable_grad():
        papers = seconds_of(bench, lambda: lrp_rows(model, dict(features), 0, gated=False))
        papers_query = seconds_of(bench, lambda: lrp_rows(model, dict(asked.features), 0, gated=False))
    print(f"\n## Ten documents for a query of {len(half.tokens)} tokens\n")
    print("| path | seconds | against the query's own factors |\n|---|---|---|")
    for name, seconds in (
        ("the query's own factors alone", own),
        ("warm, from memory (with the query's factors)", warm),
        ("warm, from disk (with the query's factors)", disk),
        ("cold, batched (with the query's factors)", own + cold),
        ("the papers' way: one document measured, times ten, and the query", papers * 10 + papers_query),
    ):
        print(f"| {name} | {seconds:.4f} | {seconds / own:.2f} |")


def thousand_documents(bench: Bench) -> None:
    """The product alone, its limit, and the objects beside it. Rows are random: the product does not look at them."""
    draw = np.random.default_rng(0)
    memory = Memory(2**33)
    residents: list[Placed] = []
    for number in range(1000):
        like = bench.factors[number % len(bench.factors)]
        fields = {name: getattr(like, name) for name in like.__dataclass_fields__}
        rows = draw.normal(size=like.rows.shape).astype(np.float32)
        residents.append(memory.put(number.to_bytes(4, "little"), Factors(**{**fields, "rows": rows})))
    (half,) = bench.explainer.factor(bench.queries[:1], "query")
    left = np.vstack([half.rows, half.rest])
    total = sum(len(resident.block) for resident in residents)
    flops = 2 * left.shape[0] * total * left.shape[1]
    size = total * left.shape[1] * 4
    product = bench.best(lambda: [None for _ in multiply(left, residents)])
    square = torch.randn(1500, 1500)
    peak = 2 * 1500**3 / bench.best(lambda: square @ square)
    flat = torch.randn(size // 4)
    bandwidth = size / bench.best(flat.sum)
    limit = max(flops / peak, size / bandwidth)
    binds = "matmul" if flops / peak > size / bandwidth else "memory"
    matrices = bench.best(lambda: bench.explainer.method.warm(half, residents), 5)
    passages = as_passages([bench.documents[number % len(bench.documents)] for number in range(1000)])
    pairs = bench.explainer.method.warm(half, residents)
    objects = bench.best(lambda: make_objects(bench, half, passages, pairs), 5)
    print(f"\n## 1000 warm documents, {total} rows, a query of {len(half.tokens)} tokens\n")
    print("| what | seconds | |\n|---|---|---|")
    print(f"| the product | {product:.4f} | {flops / product / 1e9:.0f} GFLOP/s, {size / product / 1e9:.1f} GB/s |")
    print(
        f"| the machine's limit | {limit:.4f} | {peak / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s; {binds} binds |"
    )
    print(f"| share of the limit | | {limit / product:.0%} |")
    print(f"| the product, a matrix and a score per document | {matrices:.4f} | |")
    print(f"| Explanation objects beside that | {objects:.4f} | {objects * 1e3:.0f} us each |")


def bytes_per_document(bench: Bench) -> None:
    print("\n## Bytes per document\n")
    print("| kept as | mean bytes | |\n|---|---|---|")
    for precision in ("fp32", "fp16", "int8"):
        sizes = [len(encode(bytes(32), factors, precision)) for factors in bench.factors]
        tokens = sum(len(factors.tokens) for factors in bench.factors)
        print(f"| {precision} | {np.mean(sizes):.0f} | {sum(sizes) / tokens:.0f} per token |")
    memory = Memory(2**33)
    resident = [memory.put(bytes([number]), factors).nbytes for number, factors in enumerate(bench.factors[:50])]
    print(f"| in memory | {np.mean(resident):.0f} | |")


def zipf_stream(bench: Bench) -> None:
    """Every strategy sees the same looks, and pays for them with real computation."""
    draw = random.Random(0)
    looks = draw.choices(range(CANDIDATES), [1 / rank for rank in range(1, CANDIDATES + 1)], k=LOOKS)
    halves = bench.explainer.factor(bench.queries[:8], "query")
    costs: dict[str, float] = {}
    paths: dict[str, str] = {}
    for name, policy in (("never keep", Never()), ("always build", Always()), ("ski-rental", SkiRental())):
        served = DocumentPlanner(bench.explainer.scorer, bench.explainer.method, Store(), policy)
        taken = []
        start = bench.clock()
        for number, look in enumerate(looks):
            passages = as_passages([bench.documents[look]])
            taken.append(served.explain(halves[number % len(halves)], passages)[0].provenance["path"])
        costs[name] = bench.clock() - start
        paths[name] = ", ".join(f"{taken.count(path)} {path}" for path in ("cold", "built", "memory"))
    better = min(costs["never keep"], costs["always build"])
    print(f"\n## {LOOKS} looks at {CANDIDATES} documents, Zipf-distributed\n")
    print("| strategy | seconds | against the better of the first two | looks |\n|---|---|---|---|")
    for name, seconds in costs.items():
        print(f"| {name} | {seconds:.1f} | {seconds / better:.2f} | {paths[name]} |")


def fidelity(bench: Bench) -> None:
    """Explanations from rounded factors against fp32."""
    halves = bench.explainer.factor(bench.queries[:3], "query")
    print(f"\n## Rounded factors against fp32: {len(bench.factors)} documents, {len(halves)} queries\n")
    print("| kept as | matrix error, mean | worst | top-10 pairs kept, mean | worst | gap added, worst |")
    print("|---|---|---|---|---|---|")
    for precision in ("fp16", "int8"):
        errors, kept, gaps = [], [], []
        for exact in bench.factors:
            rounded = decode(bytes(32), encode(bytes(32), exact, precision))
            for half in halves:
                one, two = (matrix_of(half, factors) for factors in (exact, rounded))
                errors.append(np.linalg.norm(two - one) / np.linalg.norm(one))
                kept.append(len(top_pairs(one) & top_pairs(two)) / 10)
                gaps.append(abs(float(one.sum() - two.sum())))
        print(
            f"| {precision} | {np.mean(errors):.1e} | {max(errors):.1e} "
            f"| {np.mean(kept):.1%} | {min(kept):.0%} | {max(gaps):.1e} |"
        )


# ---------------------------------------------------------------------- parts


def cold_path(bench: Bench, half: Factors, documents: list[str]) -> None:
    served = DocumentPlanner(bench.explainer.scorer, bench.explainer.method, Store(), Never())
    served.explain(half, as_passages(documents))


def make_objects(bench: Bench, half: Factors, passages: tuple, pairs: list) -> None:
    for passage, pair in zip(passages, pairs, strict=True):
        bench.explainer._explanation(bench.queries[0], passage, pair, half.fingerprint)


def kept_factors(explainer: Explainer, documents: list[str]) -> list[Factors]:
    """What precompute kept, in fp32."""
    keys = explainer._planner._keys(as_passages(documents), explainer.scorer.fingerprint, "token")
    assert explainer.store._disk is not None
    rows = explainer.store._disk.get(keys)
    return [decode(key, rows[key].data) for key in keys]


def matrix_of(query: Factors, document: Factors) -> np.ndarray:
    left = np.vstack([query.rows, query.rest]).astype(np.float64)
    return left @ np.vstack([document.rows, document.rest]).astype(np.float64).T / (query.norm * document.norm)


def top_pairs(matrix: np.ndarray) -> set[int]:
    return set(np.argsort(-np.abs(matrix[:-1, :-1]), axis=None)[:10].tolist())


def seconds_of(bench: Bench, call: Callable[[], object]) -> float:
    start = bench.clock()
    call()
    return bench.clock() - start


def read(path: Path) -> list[str]:
    texts = []
    for line in path.read_text("utf-8").splitlines():
        item = json.loads(line)
        texts.append(item.get("text") or item.get("claim") or " ".join([item["title"], *item["abstract"]]))
    return texts


def quoted(words: list[str]) -> list[str]:
    """The command without the folders of this machine."""
    return [Path(word).name if os.sep in word else word for word in words]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--queries", type=Path, required=True)
    parser.add_argument("--count", type=int, default=100, help="documents to use")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--store", type=Path, default=None, help="keep the documents' factors here between runs")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, timed by its processor time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
