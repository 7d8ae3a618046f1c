"""What it costs to keep a corpus explained: building factors by sentence, word and token, against plainly encoding it.

    python benchmarks/precompute.py --data FOLDER [--documents 64] [--rounds 5] [--json FILE]

FOLDER holds `scifact` and `cranfield`. Both ways run in batches, in one run, in turns: ratios, not seconds. Then bytes
in the store, what rounding to fp16 and int8 does to explanations, and growth with length from 16 to 512 tokens (of a
model whose window is opened that far).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
from rich.console import Console
from rich.table import Table

from rag_explain import Explainer
from rag_explain.store import Store
from rag_explain.texts.passage import as_passage
from rag_explain.texts.tokens import Unit

UNITS: tuple[Unit, ...] = ("sentence", "word", "token")
LENGTHS = (16, 32, 64, 128, 256, 512)


def main() -> None:
    options, console = parse(), Console()
    explainer = Explainer("all-MiniLM-L6-v2")
    result: dict[str, Any] = {
        "command": "python benchmarks/precompute.py --data FOLDER "
        f"--documents {options.documents} --rounds {options.rounds}"
    }
    for name in ("scifact", "cranfield"):
        collection = data_sets.collection_in(options.data / name)
        texts = [text for text in data_sets.shuffled(list(collection.documents.values())) if text.strip()]
        with console.status(f"{name}: {options.documents} documents by each unit"):
            result[name] = corpus(explainer, texts[: options.documents], options.rounds)
    with console.status("precision: fp16 and int8 by each unit"):
        result["precision"] = precision(explainer, texts[:3], list(collection.queries.values())[:2])
    result["growth"] = growth(texts, console)
    show(result, console)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def corpus(explainer: Explainer, texts: list[str], rounds: int) -> dict[str, Any]:
    """Building cost in plain encodes of the same documents, rows and tokens per document; medians of rounds in turns.

    Rows by word and by token take minutes: these are of four of the documents, once.
    """
    batch = explainer.scorer.read(list(map(as_passage, texts)), "document")
    found: dict[str, Any] = {
        "documents": len(texts),
        "tokens per document": float(np.mean([len(one) for one in batch.tokens])),
    }
    explainer.scorer.embed(texts[:8], "document")  # warms up
    explainer.factor(texts[:4], unit="sentence")
    for unit in UNITS:
        some, times = (texts, rounds) if unit == "sentence" else (texts[:4], 1)
        ratios = []
        for _ in range(times):
            encode = timed(lambda some=some: explainer.scorer.embed(some, "document"))
            build = timed(lambda some=some, unit=unit: explainer.factor(some, unit=unit))
            ratios.append(build / encode)
        found[unit] = {
            "plain encodes": round(float(np.median(ratios)), 2),
            "least and most": f"{min(ratios):.2f} to {max(ratios):.2f}",
            "rows per document": round(float(np.mean(batch.rows(unit))), 1),
        }
    return found


def timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def precision(explainer: Explainer, texts: list[str], queries: list[str]) -> dict[str, Any]:
    """What keeping rows in fp16 or int8 does: the largest error of a cell, and how many of the ten first cells stay."""
    found: dict[str, Any] = {}
    exact = Explainer(explainer.scorer).explain_many
    for unit in UNITS:
        for kind in ("fp16", "int8"):
            with tempfile.TemporaryDirectory() as folder:
                with Explainer(explainer.scorer, store=Store(folder, precision=kind)) as made:
                    made.precompute(texts, unit=unit, progress=False)
                    size = made.store.info()["disk"]["bytes"] / len(texts)
                    made.store.close()
                errors, same = [], []
                with Explainer(explainer.scorer, store=Store(folder, precision=kind)) as kept:
                    for query in queries:
                        true, read = (explain(query, texts, unit=unit) for explain in (exact, kept.explain_many))
                        assert {one.provenance["path"] for one in read} <= {"disk", "memory"}
                        for one, other in zip(true, read, strict=True):
                            errors.append(np.abs(one.pairs - other.pairs).max() / np.abs(one.pairs).max())
                            same.append(len({*one.top_cells()} & {*other.top_cells()}) / max(1, len(one.top_cells())))
                    kept.store.close()
            found[f"{unit}, {kind}"] = {
                "KB per document": round(size / 1024, 1),
                "largest error, share of the largest cell": float(np.max(errors)),
                "ten first cells kept": round(float(np.mean(same)), 4),
            }
    return found


def growth(texts: list[str], console: Console) -> dict[str, Any]:
    """Building cost in plain encodes of the same text, by its number of tokens."""
    from sentence_transformers import SentenceTransformer

    from rag_explain.encoder.loading import load

    model, _ = load("all-MiniLM-L6-v2")
    assert isinstance(model, SentenceTransformer)
    model.max_seq_length = max(LENGTHS)
    opened, words = Explainer(model), " ".join(texts).split()
    found: dict[str, Any] = {}

    def tokens(number: int) -> int:
        return len(opened.scorer.read([as_passage(" ".join(words[:number]))], "document").tokens[0])

    for length in LENGTHS:
        number = next(one for one in range(length) if tokens(one) >= length)
        text = " ".join(words[:number])
        with console.status(f"growth: {tokens(number)} tokens by each unit"):
            encode = min(timed(lambda text=text: opened.scorer.embed([text], "document")) for _ in range(5))
            found[str(tokens(number))] = {
                unit: round(timed(lambda text=text, unit=unit: opened.factor([text], unit=unit)) / encode, 1)
                for unit in UNITS
            }
    return found


def show(result: dict[str, Any], console: Console) -> None:
    for name in ("scifact", "cranfield"):
        found = result[name]
        title = f"{name}: {found['documents']} documents of {found['tokens per document']:.0f} tokens"
        table = Table("rows by", *found["sentence"], title=title)
        for unit in UNITS:
            table.add_row(unit, *map(str, found[unit].values()))
        console.print(table)
    table = Table("kept", *next(iter(result["precision"].values())), title="precision")
    for name, figures in result["precision"].items():
        table.add_row(name, *(f"{value:.3g}" for value in figures.values()))
    console.print(table)
    table = Table("tokens", *UNITS, title="building cost in plain encodes of the text")
    for tokens, figures in result["growth"].items():
        table.add_row(tokens, *(str(figures[unit]) for unit in UNITS))
    console.print(table)


if __name__ == "__main__":
    main()
