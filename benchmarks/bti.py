"""Which words would `bti` match by what goes into the encoder, and not by what it puts out (Malkiel et al. 2022)?

    python benchmarks/bti.py [--data FOLDER] [--pairs 100] [--json benchmarks/results/bti.json]

Equation 5 and lines 3 and 4 of algorithm 1 match words by the means of B(p), the encoder's output vectors. E(p), the
input of the first block, serves saliency alone. What matching by E would change is measured: how far the cosine of two
words moves, and how many of the pairs of words that are each other's best from either side are the same. The texts are
the demo's: questions with the documents that score highest for them, and two gloves after figure 3 of the paper. With
FOLDER, which holds `stsbenchmark/sts-dev.csv`, pairs of sentences that people judged 3 or more of 5, too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import data_sets
import measures
import numpy as np
from numpy.typing import NDArray

from rag_explain import Explainer
from rag_explain.encoder.model import Encoder
from rag_explain.factors import Array
from rag_explain.methods.bti import matches
from rag_explain.texts.tokens import Role
from rag_explain.texts.units import text_units

QUESTIONS = (
    "How do bees find their way home?",
    "Can I get a refund after 30 days?",
    "How many vacation days do I have?",
)
GLOVES = (
    "Gloves in ribbed fabric. Tops of thumb, index, and middle fingers in touchscreen-compatible fabric.",
    "Running gloves with uppers in windproof functional fabric. Top of thumb and index finger made from "
    "smartphone-friendly material.",
)
BEST = 5  # documents of the demo beside each question


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder that holds stsbenchmark/")
    parser.add_argument("--pairs", type=int, default=100, help="at most this many of the STS benchmark")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    explainer = Explainer(options.model, "pooled")
    encoder = explainer.scorer.encoder
    sets = {"demo": demo(explainer), "gloves": [GLOVES]}
    command = "python benchmarks/bti.py"
    if options.data:
        rows = data_sets.sts_benchmark(options.data / "stsbenchmark" / "sts-dev.csv")
        sets["stsb"] = data_sets.shuffled([(one, other) for one, other, gold in rows if gold >= 3])[: options.pairs]
        command += f" --data FOLDER --pairs {options.pairs}"
    found = {name: measured([compared(encoder, *pair) for pair in pairs]) for name, pairs in sets.items()}
    result = {
        "command": command,
        "model": encoder.name,
        "bounds": f"95 %, {measures.RESAMPLES} resamples of the pairs, seed {measures.SEED}",
        "sets": found,
        "touchscreen-compatible is matched with": partner(encoder, "touchscreen-compatible"),
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def demo(explainer: Explainer) -> list[tuple[str, str]]:
    """Each question with the documents that score highest for it."""
    lines = files("rag_explain.cli").joinpath("corpus.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines if line]
    best = [np.argsort(-explainer.scorer.score(asked, texts))[:BEST] for asked in QUESTIONS]
    return [(asked, texts[place]) for asked, places in zip(QUESTIONS, best, strict=True) for place in places]


def compared(encoder: Encoder, query: str, document: str) -> dict[str, float]:
    """Cosines of words by E and by B, and the pairs that they match."""
    by_input, by_output = (cosines(encoder, query, document, block) for block in (0, encoder.n_blocks))
    moved = np.abs(by_output - by_input)
    before, after = matches(by_input), matches(by_output)
    return {
        "cosine moves by at most": float(moved.max()),
        "cosine moves by": float(moved.mean()),
        "share of the pairs that stay": float((before & after).sum() / before.sum()),
    }


def cosines(encoder: Encoder, query: str, document: str, block: int) -> Array:
    """(w_q, w_d): of the means of the vectors of each word's tokens at the input of a block, or at the output."""
    (_, one), (_, other) = words(encoder, query, "query", block), words(encoder, document, "document", block)
    lengths = np.linalg.norm(one, axis=1)[:, None] * np.linalg.norm(other, axis=1)
    return np.asarray(one @ other.T / lengths, dtype=np.float32)


def words(encoder: Encoder, text: str, role: Role, block: int) -> tuple[list[str], NDArray[np.float64]]:
    with encoder.computing():
        batch = encoder.read([text], role)
        vectors = encoder.hidden(batch, block)[0][0].double().numpy()
    found, owners = text_units(batch.tokens[0], text, "word", truncated=batch.truncated[0])
    return [word.text for word in found], np.stack([vectors[owners == at].mean(axis=0) for at in range(len(found))])


def partner(encoder: Encoder, word: str) -> dict[str, str]:
    """The best match of a word of the first gloves, by input and by output."""
    asked, others = (words(encoder, text, role, 0)[0] for text, role in zip(GLOVES, ("query", "document"), strict=True))
    tables = {name: cosines(encoder, *GLOVES, block) for name, block in (("E", 0), ("B", encoder.n_blocks))}
    return {name: others[int(table[asked.index(word)].argmax())] for name, table in tables.items()}


def measured(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Of each figure its mean with bounds, the least and the largest."""
    return {"pairs": len(rows)} | {
        name: measures.bounded(values) | {"least": min(values), "largest": max(values)}
        for name in rows[0]
        if (values := [row[name] for row in rows])
    }


if __name__ == "__main__":
    main()
