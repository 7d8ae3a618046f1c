"""What it costs to look, before every answer, whether the model is still the one that was loaded.

    python benchmarks/watch.py      a minute; writes benchmarks/results/watch.json

A warm explanation of a new query of 13 tokens is timed, and the looks at the model that it takes; the share is of both
measured in one run. The explanation is also timed without its looks, taking turns.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

from transformers.utils import logging

from rag_explain import Explainer
from rag_explain.encoder.loading import load

WORDS = ["apple", "river", "stone", "cloud", "tiger", "paper", "window", "garden", "music", "silver", "ocean", "forest"]
DOCUMENT = "A forager steers by the sun and by landmarks, and returns to the hive she left."
RESULT = Path(__file__).parent / "results" / "watch.json"


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    logging.disable_progress_bar()
    model, _ = load("all-MiniLM-L6-v2")
    explainer = Explainer(model)
    explainer.precompute([DOCUMENT], progress=False)
    watch = explainer.scorer.encoder.watch
    look, known = watch.state, watch.state()
    queries = (f"how do bees find the way to the {one} {other}?" for one, other in product(WORDS, WORDS))
    looks, timed = 0, {"with": [], "without": []}

    def counted() -> object:
        nonlocal looks
        looks += 1
        return look()

    for number, query in enumerate(queries):
        kind = ("with", "without")[number % 2]
        watch.state = counted if kind == "with" else lambda: known
        timed[kind].append(seconds(lambda query=query: explainer.explain(query, DOCUMENT)))
    explained = statistics.median(timed["with"])
    one_look = statistics.median(seconds(look) for _ in range(2000))
    per_answer = looks / len(timed["with"])
    result = {
        "command": "python benchmarks/watch.py",
        "looks per explanation": per_answer,
        "look / explanation": one_look / explained,
        "all looks / explanation": per_answer * one_look / explained,
        "explanation with looks / without": explained / statistics.median(timed["without"]),
        "tokens of the query": len(explainer.scorer.encoder.read([query], "query").tokens[0]),
        "what is looked at": len(watch._same)
        + len(watch._equal)
        + len(watch._sizes)
        + len(watch._classes)
        + len(watch._tensors),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
