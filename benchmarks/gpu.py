"""What a device computes and how fast: first checked against the CPU, then one table.

    python benchmarks/gpu.py --device cuda [--model NAME] [--documents 1000] [--precision fp16] [--json FILE]

Works on any device that torch knows, the CPU among them. The numbers of every kind of work below must be the CPU's to
1e-4 of the largest cell (in half precision to 2 %), else nothing is timed. Texts are made up, of 20 to 200 words, so
that no data is needed. Seconds are the least of `--rounds`, with the device waited for before and after; `encodes` are
the seconds of a document in those that a plain embedding of one of ten takes, which other machines can be compared by;
peak memory is what torch held for the work beside what was there before it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from rag_explain import Explainer
from rag_explain.devices import described, missing
from rag_explain.encoder.loading import DEFAULT_MODEL, load

_WORDS = """
the river bank was flooded in spring and nobody remembers a higher level since that old gauge was built by an
engineer who measured water every morning before breakfast while honeybees navigate by sun or landmarks they have
learned paris is capital of france berlin germany account password reset link arrives within five minutes
"""
QUERY = "how high was the water at the old bridge in spring"
EXACT, HALF = 1e-4, 0.02
_UNITS = ("sentence", "word", "token")


def main() -> int:
    options, console = parse(), Console()
    if (reason := missing(options.device)) is not None:
        console.print(f"nothing can be measured on {options.device}: {reason}")
        return 1
    model, _ = load(options.model)
    texts = documents(options.documents)
    if not (miss := check(model, options, texts)) <= (bound := HALF if options.precision else EXACT):
        console.print(f"the device {options.device} computes other numbers than the CPU: off by {miss:.1e}")
        return 1
    console.print(f"the numbers are the CPU's: off by {miss:.1e} at most, where {bound:.0e} is allowed")
    rows = timed(model, options, texts)
    show(rows, options, console)
    if options.json:
        about = {
            "command": " ".join(["python benchmarks/gpu.py", *sys.argv[1:]]),
            "torch": torch.__version__,
            "device": described(options.device),
            "miss": miss,
        }
        options.json.write_text(json.dumps({**about, "work": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=["fp16", "bf16"], default=None)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def documents(count: int) -> list[str]:
    """Texts of a few sentences; the same in every run."""
    chosen = random.Random(0)

    def sentence() -> str:
        return " ".join(chosen.choices(_WORDS.split(), k=chosen.randint(8, 20))).capitalize() + "."

    return [" ".join(sentence() for _ in range(chosen.randint(2, 10))) + f" {number}" for number in range(count)]


def made(model: Any, options: argparse.Namespace, device: str | None = None) -> Explainer:
    lower = {"precision": options.precision} if options.precision and device is None else {}
    return Explainer(model, device=device or options.device, **lower)


def check(model: Any, options: argparse.Namespace, texts: list[str]) -> float:
    """The largest difference from the CPU in every kind of work, as a share of the largest cell."""
    some, missed = texts[:6], list[float]()
    here, there = made(model, options, "cpu"), made(model, options)
    for unit in _UNITS:
        for one, other in zip(here.factor(some, unit=unit), there.factor(some, unit=unit), strict=True):
            missed.append(_off(one.block, other.block))
        for _ in range(2):  # cold or built, and then warm
            pairs = [explainer.explain_many(QUERY, some, unit=unit) for explainer in (here, there)]
            missed += [_off(one.matrix, other.matrix) for one, other in zip(*pairs, strict=True)]
    lit = [explainer.highlight_many(QUERY, some) for explainer in (here, there)]
    for one, other in zip(*lit, strict=True):
        missed.append(
            _off(np.array([span.value for span in one.spans]), np.array([span.value for span in other.spans]))
        )
    return max(map(float, missed))


def _off(one: np.ndarray, other: np.ndarray) -> float:
    off = float(np.abs(one - other).max() / max(np.abs(one).max(), 1e-12))
    return off if math.isfinite(off) else math.inf


def timed(model: Any, options: argparse.Namespace, texts: list[str]) -> list[dict[str, Any]]:
    """Every kind of work, with its seconds, how many documents those are for, and the memory that it took."""
    device, ten = options.device, texts[:10]
    every = made(model, options)
    every.precompute(texts, progress=False)
    numbers = iter(range(10**6))

    def ask() -> str:  # nothing of it is kept
        return f"{QUERY} {next(numbers)}"

    def anew(run: Callable[[Explainer], object]) -> Callable[[], object]:
        """`run` with nothing kept of documents."""

        def with_empty_store() -> object:
            fresh = Explainer(every.scorer, precision=options.precision)
            _wait(device)
            start = time.perf_counter()
            run(fresh)
            _wait(device)
            return time.perf_counter() - start

        return with_empty_store

    work: dict[str, tuple[int, Callable[[], object]]] = {
        "plain embedding": (10, lambda: every.scorer.embed(ten, "document")),
        "query factors": (1, lambda: every.factor([ask()], "query")),
        **{f"document factors by {unit}": (10, lambda unit=unit: every.factor(ten, unit=unit)) for unit in _UNITS},
        "cold pair": (1, anew(lambda fresh: fresh.explain(QUERY, texts[0], unit="word"))),
        "highlights": (10, anew(lambda fresh: fresh.highlight_many(QUERY, ten))),
        "warm top 10": (10, lambda: every.explain_many(QUERY, ten, unit="sentence")),
        "warm top 10, new query": (10, lambda: every.explain_many(ask(), ten, unit="sentence")),
        f"warm top {len(texts)}": (len(texts), lambda: every.explain_many(QUERY, texts, unit="sentence")),
        f"precompute {len(texts)}": (len(texts), anew(lambda fresh: fresh.precompute(texts, progress=False))),
    }
    rows = [
        {"work": name, "documents": count, **_measured(run, device, options.rounds)}
        for name, (count, run) in work.items()
    ]
    for row in rows:
        row["encodes"] = row["seconds"] / row["documents"] / (rows[0]["seconds"] / rows[0]["documents"])
    return rows


def _measured(run: Callable[[], object], device: str, rounds: int) -> dict[str, Any]:
    run()
    module = torch.get_device_module(device)
    counts = torch.device(device).type != "cpu" and hasattr(module, "max_memory_allocated")
    before = module.memory_allocated(device) if counts else 0
    if counts:
        module.reset_peak_memory_stats(device)
    seconds = math.inf
    for _ in range(rounds):
        _wait(device)
        start = time.perf_counter()
        own = run()
        _wait(device)
        seconds = min(seconds, own if isinstance(own, float) else time.perf_counter() - start)
    return {"seconds": seconds, "peak_bytes": module.max_memory_allocated(device) - before if counts else None}


def _wait(device: str) -> None:
    if torch.device(device).type != "cpu":
        torch.get_device_module(device).synchronize()


def show(rows: list[dict[str, Any]], options: argparse.Namespace, console: Console) -> None:
    table = Table(
        title=f"{options.model} on {described(options.device)}, torch {torch.__version__}", title_justify="left"
    )
    for column in ("work", "ms", "documents a second", "encodes", "peak MB"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for row in rows:
        peak = "not told" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.1f}"
        speed, encodes = f"{row['documents'] / row['seconds']:.0f}", f"{row['encodes']:.2f}"
        table.add_row(row["work"], f"{row['seconds'] * 1e3:.2f}", speed, encodes, peak)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
