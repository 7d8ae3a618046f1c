"""Every store that people run under LangChain and LlamaIndex, filled for real and wrapped in one line: what holds.

    python benchmarks/stores.py --data FOLDER [--documents 200] [--queries 20] [--only NAME] [--docs docs/stores.md]
        [--json FILE]

FOLDER holds Cranfield or SciFact. Each store is filled by its framework with all-MiniLM-L6-v2, searched with and
without the wrapper, and searched again after it was filled with a header in front of each text, which moves every
vector. --docs writes the table into that page, between its two marks. Fails where a promise is not held. Stores whose
packages are not installed are left out, and said.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import data_sets
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))
from rag_explain.encoder.loading import DEFAULT_MODEL, packaged_path
from rag_explain.results.metric import Metric
from tests.support.stacks import HEADER, Corpus, Seen, Stack, langchain, llama_index

FRAMEWORKS = {"LangChain": langchain, "LlamaIndex": llama_index}
BEGIN, END = "<!-- made by benchmarks/stores.py -->", "<!-- until here -->"
SIMILARITIES = {
    "cosine": "as it is",
    "inner product": "as it is",
    "negative inner product": "-s",
    "1 - inner product": "1 - s",
    "cosine distance": "1 - s",
    "L2": "1 - s²/2",
    "squared L2": "1 - s/2",
}


def main() -> int:
    options = parse()
    logging.getLogger("rag_explain").setLevel(logging.ERROR)  # marks are what is counted here
    collection = data_sets.collection_in(options.data)
    texts = [text for text in collection.documents.values() if text.strip()][: options.documents]
    queries = list(collection.queries.values())[: options.queries]
    console, rows = Console(), []
    kept: dict[str, Seen] = {}  # the first of each framework, whose model and factors all others use
    for framework, module in FRAMEWORKS.items():
        for stack in module.STACKS:
            if options.only is not None and options.only != stack.store:
                continue
            if not stack.is_installed:
                console.print(f"{framework}, {stack.name}: {stack.package} is not installed")
                continue
            with console.status(f"{framework}, {stack.name}"):
                own, other = (seen(module, stack, texts, queries, header) for header in ("", HEADER))
                kept.setdefault(framework, own)
                rows.append(row(framework, stack, own, other))
            console.print(*(f"{name}: {value}" for name, value in rows[-1].items()), sep="; ", soft_wrap=True)
    result = {
        "command": f"python benchmarks/stores.py --data FOLDER --documents {len(texts)} --queries {len(queries)}",
        "collection": collection.name,
        "rows": rows,
        "versions": versions(),
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.docs:
        before, _, rest = options.docs.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        options.docs.write_text(f"{before}{BEGIN}\n{markdown(result)}\n{END}{after}", encoding="utf-8")
    return 0 if all(is_held(one, len(queries), len(texts)) for one in rows) else 1


def seen(module: Any, stack: Stack, texts: list[str], queries: list[str], header: str) -> Seen:
    model = str(packaged_path() or f"sentence-transformers/{DEFAULT_MODEL}")
    with (
        tempfile.TemporaryDirectory() as folder,
        stack.made(Corpus(texts, model, Path(folder), header), stack.setting) as plain,
    ):
        found: Seen = module.seen(plain, queries)
    return found


def row(framework: str, stack: Stack, own: Seen, other: Seen) -> dict[str, Any]:
    gaps = [abs(gap) for gap in own.gaps if gap is not None]
    return {
        "framework": framework,
        "store": stack.store,
        "setting": stack.setting,
        "metric": ", ".join(sorted(own.metrics)),
        "is exact": stack.is_exact,
        "same results, queries": sum(map(lambda one, two: one == two, own.found, own.wrapped)),
        "scores told": len(gaps),
        "largest gap": max(gaps, default=None),
        "marked without cause, queries": sum(map(bool, own.stand_ins)),
        "other vectors marked, queries": sum(map(bool, other.stand_ins)),
        "not checked": "unchecked" in own.notes,
        "precomputed": own.built["kept"],
    }


def is_held(one: dict[str, Any], queries: int, documents: int) -> bool:
    same = one["same results, queries"] == one["other vectors marked, queries"] == queries
    is_near = one["largest gap"] is not None and (one["largest gap"] < 1e-3 or not one["is exact"])
    return same and is_near and not one["marked without cause, queries"] and one["precomputed"] == documents


def formula(metric: str) -> str:
    """The similarity that a score `s` stands for."""
    known = Metric.find(metric)
    if known is None or known.base not in SIMILARITIES:
        return "unknown"
    return (
        SIMILARITIES[known.base].replace("s", "d") + ", d = -log s"
        if known.is_exponential
        else SIMILARITIES[known.base]
    )


def markdown(result: dict[str, Any]) -> str:
    lines = [
        f"`{result['command']}` ({result['collection']}) made this table.",
        "",
        "| framework | store | setting | its scores | similarity | largest gap | same results | other vectors marked |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in result["rows"]:
        gap = "–" if one["largest gap"] is None else f"{one['largest gap']:.0e}"
        shown = [one["framework"], one["store"], f"`{one['setting']}`", one["metric"], formula(one["metric"]), gap]
        counts = [one["same results, queries"], one["other vectors marked, queries"]]
        lines.append("| " + " | ".join(map(str, shown + counts)) + " |")
    packages = ", ".join(f"{name} {one}" for name, one in result["versions"].items())
    return "\n".join([*lines, "", f"Versions: {packages}."])


def versions() -> dict[str, str]:
    """Of the packages that were run."""
    found = {stack.package.split(".")[0] for stack in langchain.STACKS} - {"langchain_core", "llama_index"}
    names = {name for package in found for name in packages_distributions().get(package, ())}
    engines = {"chromadb", "qdrant-client", "faiss-cpu", "pymilvus", "lancedb", "pgvector"}
    names |= engines | {"langchain-core", "llama-index-core"}
    return {name: version(name) for name in sorted(names)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--only", help="one store")
    parser.add_argument("--docs", type=Path, help="write the table into this page")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
