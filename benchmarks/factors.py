"""How fast factors are, as ratios measured in one run.

    python benchmarks/factors.py              everything, a few minutes; writes benchmarks/results/factors.{md,json,png}
    python benchmarks/factors.py --quick      counts operations for all-MiniLM-L6-v2, and fails when they are too many

The papers' way is one ordinary backward pass per embedding dimension through a copy of the model that follows the same
rules (`tests/support/references.py`): the same model, text and machine, and the same numbers, which are compared first.
`--quick` reads no clock: floating-point operations are the same on every machine, however busy it is.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from rag_explain import Explainer, _torch
from rag_explain.devices import BatchSize
from rag_explain.encoder import loading as models
from rag_explain.encoder.batch import Batch
from rag_explain.encoder.model import Encoder
from rag_explain.linear import LRP, Recorder
from rag_explain.methods.frozen import freeze
from rag_explain.store import Store
from tests.support.operation_count import operations, operations_of_the_papers
from tests.support.references import rows_by_dimension, ruled_copy

QUERY = "how do bees find the way back to their hive?"
DOCUMENT = (
    "Honeybees find their way home by a mixture of senses. A forager that leaves the hive for the first time flies in "
    "widening loops and looks back at the entrance, learning the landmarks around it: a tree, a wall, the edge of a "
    "wood. On longer flights she steers by the position of the sun, and by the pattern of polarised light in the sky "
    "when clouds hide it, and she keeps count of the distance by how fast the ground moves past her eyes. Back at the "
    "hive she tells the others about the way with a dance."
)
RESULTS = Path(__file__).parent / "results"
# Counted on all-MiniLM-L6-v2: 26.9, 3.8 and 25.5.
LEAST = {"query": 25.5, "document": 3.6, "cold_pair": 24.0}


@dataclass(frozen=True)
class Case:
    """One model, with the texts cut to the sizes that are compared."""

    name: str
    model: SentenceTransformer
    encoder: Encoder
    measured: int  # of the embedding's dimensions, in the papers' way; the time is scaled to all of them
    repeats: int

    def batch(self, text: str, tokens: int, role: str = "document") -> Batch:
        """The text, repeated or cut until it has this many tokens."""
        self.encoder.whole.max_seq_length = tokens
        return self.encoder.read([" ".join([text] * (1 + tokens // 20))], role)


def seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Median time of a few runs, after one that is not counted; a single run is long enough to need none."""
    if repeats > 1:
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def interleaved(repeats: int, **runs: Callable[[], object]) -> dict[str, float]:
    """Median times of several things that take turns, so that a machine that slows down does so for all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:  # the first is not counted
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def papers_way(case: Case, batch: Batch) -> tuple[float, torch.Tensor]:
    """Seconds for one backward pass per dimension, and the rows it gives. The copy is made before the clock starts."""
    ruled = ruled_copy(case.model, gated=False)
    with torch.enable_grad():
        start = time.perf_counter()
        rows = rows_by_dimension(ruled, batch.features, 0, case.measured)
        scale = case.model.get_embedding_dimension() / case.measured
        return (time.perf_counter() - start) * scale, rows


def large_product(width: int) -> tuple[float, Callable[[], object]]:
    """The largest kind of product that a push makes, done as a push does it, and how many operations it is.

    How fast it runs is the machine's peak, as far as a push is concerned.
    """
    left, right = torch.randn(4096, width), torch.randn(width, 4 * width)
    out, size = torch.empty(4096, 4 * width), 2 * 4096 * width * 4 * width
    if _torch.has_onednn(left):
        return size, lambda: _torch.onednn_product(left, right)
    return size, lambda: torch.mm(left, right, out=out)


class Peak:
    """The largest resident memory of this process while a block runs, above what it had before, in MB."""

    def __enter__(self) -> Peak:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed and kept would be used without being seen
        self._before, self.most = self._resident(), 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.most = max(self.most, self._resident() - self._before)

    @staticmethod
    def _resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


# ---------------------------------------------------------------------- the comparisons


def compare_factors(case: Case, text: str, tokens: int, role: str) -> dict[str, Any]:
    """Factors of one text: ours, recording included, against one backward pass per dimension."""
    batch = case.batch(text, tokens, role)
    frozen = freeze(case.encoder, batch, 0, LRP)[0]
    slow, oracle = papers_way(case, batch)
    rows, _ = frozen.rows()
    count, width = len(batch.tokens[0]), case.model.get_embedding_dimension()
    size, product = large_product(width)
    taken = interleaved(
        case.repeats, fast=lambda: freeze(case.encoder, batch, 0, LRP)[0].rows(), push=frozen.rows, product=product
    )
    fast, peak = taken["fast"], size / taken["product"]
    return {
        "tokens": count,
        "papers_seconds": slow,
        "seconds": fast,
        "ratio": slow / fast,
        "difference": float((rows[..., : case.measured] - oracle).norm() / oracle.norm()),
        "dimensions_measured": case.measured,
        "share_of_matmul_peak": operations(frozen.rows) / taken["push"] / peak,
        "matmul_peak_gflops": peak / 1e9,
    }


def count_operations(case: Case) -> dict[str, float]:
    """How many times fewer floating-point operations ours are than the papers', recording included."""
    batches = case.batch(QUERY, 13, "query"), case.batch(DOCUMENT, 105)
    width = case.model.get_embedding_dimension()
    papers = [operations_of_the_papers(case.model, batch.features, width) for batch in batches]
    ours = [operations(lambda batch=batch: freeze(case.encoder, batch, 0, LRP)[0].rows()) for batch in batches]
    cotangents = torch.zeros(14, 1, width)  # the query's rows and rest
    pull = operations(lambda: freeze(case.encoder, batches[1], 0, LRP)[0].relevance(cotangents))
    return {
        "query": papers[0] / ours[0],
        "document": papers[1] / ours[1],
        "cold_pair": sum(papers) / (ours[0] + pull),
    }


def compare_early_pooling(case: Case) -> list[dict[str, Any]]:
    """What pooling early saves: rows without it against rows with it, counted and timed."""
    points = []
    for text, tokens, role in ((QUERY, 13, "query"), (DOCUMENT, 105, "document")):
        with Recorder(LRP) as recorder:

            def visit(block: int, hidden: torch.Tensor, recorder: Recorder = recorder) -> torch.Tensor:
                if block == 0:
                    recorder.mark(hidden)
                return hidden

            embedding = case.encoder.run(case.batch(text, tokens, role), visit)
        early, late = recorder.freeze(embedding), recorder.freeze(embedding, early_pooling=False)
        taken = interleaved(15 if tokens < 50 else 5, early=early.push_rows, late=late.push_rows)
        points.append(
            {
                "blocks": case.encoder.n_blocks,
                "tokens": tokens,
                "operations_without": operations(late.push_rows) / operations(early.push_rows),
                "time_without": taken["late"] / taken["early"],
            }
        )
    return points


def compare_cold_pair(case: Case, query: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """A cold pair (nothing kept): query factors and a pull through the document, against the papers' way for both."""
    asked = case.batch(QUERY, query["tokens"], "query")
    found = case.batch(DOCUMENT, document["tokens"])
    explainer = Explainer(case.model)

    def pair() -> None:
        (half,) = explainer.method.factor(asked, "token")
        explainer.method.cold(half, found)

    fast = seconds(pair, case.repeats)
    return {"seconds": fast, "ratio": (query["papers_seconds"] + document["papers_seconds"]) / fast}


def compare_warm_pair(case: Case) -> dict[str, Any]:
    """A new query and a document whose factors are kept, against plain encodes of the same query."""
    explainer = Explainer(case.model, store=Store())
    explainer.precompute([DOCUMENT], unit="token", progress=False)

    def new_query() -> None:
        explainer.close()  # forgets queries; the store was given open and stays so
        assert explainer.explain(QUERY, DOCUMENT).provenance["path"] == "memory"

    taken = interleaved(
        30,
        encode=lambda: case.model.encode_query(QUERY),
        new=new_query,
        known=lambda: explainer.explain(QUERY, DOCUMENT),
    )
    return {
        "tokens": len(explainer.scorer.encoder.read([QUERY], "query").tokens[0]),
        "encode_seconds": taken["encode"],
        "new_query_encodes": taken["new"] / taken["encode"],
        "known_query_encodes": taken["known"] / taken["encode"],
    }


def compare_untouched(case: Case) -> dict[str, Any]:
    """Encoding with a model that an Explainer was made of, against the same model without one."""
    alone, _ = models.load(models.DEFAULT_MODEL, "cpu")
    explainer = Explainer(case.model)
    explainer.explain(QUERY, DOCUMENT)
    taken = interleaved(60, alone=lambda: alone.encode_query(QUERY), explained=lambda: case.model.encode_query(QUERY))
    return {"encode_with_explainer": taken["explained"] / taken["alone"]}


def compare_batches(case: Case) -> dict[str, Any]:
    """Documents per second: one by one, padded to the longest, in buckets of like length."""
    words = DOCUMENT.split()
    texts = [" ".join(words[: 6 + 7 * (i % 12)]) for i in range(48)]
    case.encoder.whole.max_seq_length = 128
    explainer = Explainer(case.model)
    batch = case.encoder.read(texts, "document")
    (half,) = explainer.method.factor(case.encoder.read([QUERY], "query"), "token")
    cold = explainer.method.cold
    taken = interleaved(
        3,
        alone=lambda: [cold(half, batch.select([i])) for i in range(len(texts))],
        padded=lambda: cold(half, batch),
        bucketed=lambda: [cold(half, batch.select(bucket)) for bucket in batch.buckets(BatchSize(2048))],
    )
    return {
        "documents": len(texts),
        "documents_per_second_one_by_one": len(texts) / taken["alone"],
        "padded_over_one_by_one": taken["alone"] / taken["padded"],
        "bucketed_over_one_by_one": taken["alone"] / taken["bucketed"],
    }


def growth(case: Case, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Push against pull for a growing number of tokens, with the memory each takes."""
    points = []
    width = case.model.get_embedding_dimension()
    for size in sizes:
        batch = case.batch(DOCUMENT, size)
        frozen = freeze(case.encoder, batch, 0, LRP)[0]
        count = len(batch.tokens[0])
        repeats = 3 if size <= 64 else 1
        with Peak() as pushed:
            push = seconds(frozen.push_rows, repeats)
        with Peak() as pulled:
            pull = seconds(frozen.pull_rows, repeats)
        points.append(
            {
                "tokens": count,
                "push_seconds": push,
                "pull_seconds": pull,
                "push_mb": round(pushed.most, 1),
                "pull_mb": round(pulled.most, 1),
                "chosen": "pull" if count + 1 > width else "push",
            }
        )
        print(
            f"  {count:4d} tokens: push {push:7.3f} s {pushed.most:6.0f} MB   pull {pull:7.3f} s {pulled.most:6.0f} MB"
        )
    return points


def growth_of_model(widths: Sequence[int], depths: Sequence[int], tokens: int = 32) -> list[dict[str, Any]]:
    """Push time by embedding dimension and by depth, on random BERTs."""
    points = []
    for width, depth in [*((width, 6) for width in widths), *((384, depth) for depth in depths)]:
        case = random_bert(width, depth)
        frozen = freeze(case.encoder, case.batch(DOCUMENT, tokens), 0, LRP)[0]
        with Peak() as memory:
            push = seconds(frozen.rows, 3)
        points.append({"width": width, "depth": depth, "push_seconds": push, "push_mb": round(memory.most, 1)})
    return points


# ---------------------------------------------------------------------- models, report


def minilm() -> Case:
    model, name = models.load(models.DEFAULT_MODEL, "cpu")
    return Case(name, model, Encoder(model, name=name), measured=model.get_embedding_dimension(), repeats=5)


def random_bert(width: int = 768, depth: int = 12) -> Case:
    """A BERT with random weights and the tokenizer of the default model."""
    base, _ = models.load(models.DEFAULT_MODEL, "cpu")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(base.tokenizer),
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config).save_pretrained(folder)
        base.tokenizer.save_pretrained(folder)
        model = SentenceTransformer(modules=[Transformer(folder, max_seq_length=512), Pooling(width)], device="cpu")
    name = f"random BERT ({width} x {depth})"
    return Case(name, model, Encoder(model, name=name), measured=min(width, 48), repeats=2)


def plot(results: dict[str, Any], path: Path) -> None:
    """Cost against tokens, dimensions and depth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    points = results["growth"]
    tokens = [point["tokens"] for point in points]
    left.loglog(tokens, [point["push_seconds"] for point in points], "o-", color="#0072b2", label="push")
    left.loglog(tokens, [point["pull_seconds"] for point in points], "s--", color="#d55e00", label="pull")
    left.axvline(results["width"], color="grey", linewidth=0.8)
    left.text(results["width"], left.get_ylim()[0] * 1.2, " tokens = dimensions", rotation=90, fontsize=8, color="grey")
    left.set(xlabel="tokens", ylabel="seconds per document", title="all-MiniLM-L6-v2")
    left.legend(frameon=False)
    by_width = [point for point in results["growth_of_model"] if point["depth"] == 6]
    middle.plot([p["width"] for p in by_width], [p["push_seconds"] for p in by_width], "o-", color="#0072b2")
    middle.set(xlabel="dimensions", ylabel="seconds", title="6 blocks, 32 tokens", ylim=0)
    by_depth = [point for point in results["growth_of_model"] if point["width"] == 384]
    by_depth = sorted({p["depth"]: p for p in by_depth}.values(), key=lambda p: p["depth"])
    right.plot([p["depth"] for p in by_depth], [p["push_seconds"] for p in by_depth], "o-", color="#0072b2")
    right.set(xlabel="blocks", ylabel="seconds", title="384 dimensions, 32 tokens", ylim=0)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def table(results: dict[str, Any]) -> str:
    lines = [
        "# Factors: ratios of one run",
        "",
        f"`{results['command']}` on {results['machine']}",
        "",
        "| model | what | tokens | times faster than the papers' way | its dimensions measured | share of matmul peak "
        "| same numbers to |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in results["models"].items():
        for what in ("query", "document"):
            row = case[what]
            peak, same = f"{row['share_of_matmul_peak']:.0%}", f"{row['difference']:.0e}"
            timed = row["dimensions_measured"]
            lines.append(f"| {name} | {what} | {row['tokens']} | {row['ratio']:.1f} | {timed} | {peak} | {same} |")
        sizes = f"{case['query']['tokens']} x {case['document']['tokens']}"
        lines.append(f"| {name} | cold pair | {sizes} | {case['cold_pair']['ratio']:.1f} | | | |")
    if "warm_pair" in results:
        warm, many = results["warm_pair"], results["batches"]
        lines += [
            "",
            f"- Warm pair, new query of {warm['tokens']} tokens: {warm['new_query_encodes']:.1f} plain encodes of the "
            f"query; known query: {warm['known_query_encodes']:.2f}.",
            f"- Encoding with a model that is being explained: {results['untouched']['encode_with_explainer']:.2f} "
            "times as long as with one that is not.",
            f"- {many['documents']} documents of 6 to 83 words, cold: in buckets "
            f"{many['bucketed_over_one_by_one']:.2f} times as fast as one by one, padded to the longest "
            f"{many['padded_over_one_by_one']:.2f} times.",
            "",
            "| blocks | tokens | operations of a push without early pooling | its time |",
            "|---|---|---|---|",
            *(
                f"| {p['blocks']} | {p['tokens']} | {p['operations_without'] - 1:+.1%} | {p['time_without'] - 1:+.1%} |"
                for p in results["early_pooling"]
            ),
            "",
            "| tokens | push, seconds | pull, seconds | push, MB | pull, MB | chosen |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {p['tokens']} | {p['push_seconds']:.3f} | {p['pull_seconds']:.3f} | {p['push_mb']:.0f} | "
            f"{p['pull_mb']:.0f} | {p['chosen']} |"
            for p in results["growth"]
        ]
        lines += ["", "![cost by tokens, dimensions and depth](factors.png)"]
    return "\n".join(lines) + "\n"


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only count operations, and fail if they are too many")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    first = minilm()
    counted = count_operations(first)
    print("times fewer operations than the papers' way:", {name: round(ratio, 1) for name, ratio in counted.items()})
    if arguments.quick:
        return 0 if all(counted[name] >= least for name, least in LEAST.items()) else 1
    results: dict[str, Any] = {
        "command": "python benchmarks/factors.py",
        "machine": f"{torch.get_num_threads()} threads, {platform.machine()}, torch {torch.__version__}",
        "width": first.model.get_embedding_dimension(),
        "operations": counted,
        "models": {},
    }
    for case in (first, random_bert()):
        query = compare_factors(case, QUERY, 13, "query")
        document = compare_factors(case, DOCUMENT, 105, "document")
        pair = compare_cold_pair(case, query, document)
        results["models"][case.name] = {"query": query, "document": document, "cold_pair": pair}
        print(case.name, f"query {query['ratio']:.1f}x, document {document['ratio']:.1f}x, pair {pair['ratio']:.1f}x")
    results["early_pooling"] = compare_early_pooling(first) + compare_early_pooling(random_bert(384, 12))
    results["warm_pair"] = compare_warm_pair(first)
    results["untouched"] = compare_untouched(first)
    results["batches"] = compare_batches(first)
    results["growth"] = growth(first, (8, 16, 32, 64, 128, 256, 512))
    results["growth_of_model"] = growth_of_model((128, 256, 384, 512, 768), (2, 4, 8, 12))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "factors.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "factors.md").write_text(table(results))
    plot(results, RESULTS / "factors.png")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
