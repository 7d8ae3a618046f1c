"""What do the pairs of `ij` sum to, for a document that belongs to a query and for one that does not?

    python benchmarks/references.py [--data FOLDER] [--sets demo cranfield xquad stsb] [--queries 200] [--json FILE]

FOLDER holds the folders that `data_sets.py` names. Each query stands beside a document that belongs to it and beside
one of another query. The set `demo`, the only one without FOLDER, is a question beside every document of the demo, and
beside a text of 142 tokens. Sums of pairs follow from equation 2 of Moeller et al. (2024) without any integral, so that
many can be had: the embeddings of both texts and of both references say it all.

  pairs   f(a, b) - f(a, r_b) - f(r_a, b) + f(r_a, r_b), equation 2 as it stands (`along_reference="pairs"`)
  rest    f'(a, b), of the embeddings without what lies along each text's own reference (`along_reference="rest"`)
  shared  equation 2 with one reference for both texts, of 128 tokens: f(r, r) = 1

For each: |sum - score|; and how often the document that belongs has the larger sum. For the references: f(r_a, r_b),
its mean and least, and how often |f(a, r_b)| or |f(r_a, b)| is above 0.1.
"""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import choices
import measures
import numpy as np
from numpy.typing import NDArray

from rag_explain import Explainer
from rag_explain.encoder.model import Encoder
from rag_explain.encoder.reference import REFERENCES, Reference
from rag_explain.methods.integration_path import IntegrationPath
from rag_explain.methods.jacobian import TRUSTED_REFERENCE
from rag_explain.texts.tokens import Role

Vector = NDArray[np.float64]
LONG = "a " * 140  # 142 tokens
QUESTIONS = (
    "home bees",
    "How do bees find their way home?",
    "How many vacation days do I have, and until when may I take them?",
)
SHARED = "a " * 126  # with the two tokens that frame it 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--sets", nargs="+", help="demo, cranfield, xquad, stsb: all that there is data for")
    parser.add_argument("--queries", type=int, default=200, help="at most this many of each set")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    encoder = Explainer(options.model, "pooled").scorer.encoder
    sets = options.sets or ["demo", *(["cranfield", "xquad", "stsb"] if options.data else [])]
    rows = []
    if "demo" in sets:
        rows += demo(encoder)
        print(json.dumps(rows, indent=1))
    for name in sets:
        if name == "demo":
            continue
        pairs = choices.OWN_DOCUMENTS[name](options.data / choices.folder_of(name))[: options.queries]
        for reference in REFERENCES:
            rows.append(
                {"set": name, "reference": reference, "queries": len(pairs), **measured(encoder, pairs, reference)}
            )
            print(line(rows[-1]))
    if options.json:
        data = "--data FOLDER " if options.data else ""
        command = f"python benchmarks/references.py {data}--sets {' '.join(sets)} --queries {options.queries}"
        result = {"command": command, "model": encoder.name, "bounds": "95 %, of resampled queries", "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def demo(encoder: Encoder) -> list[dict[str, Any]]:
    """f(r_a, r_b) of a question with every document of the demo, and what its pairs sum to with the least alike one."""
    lines = files("rag_explain.cli").joinpath("corpus.jsonl").read_text(encoding="utf-8").splitlines()
    found = [ends(encoder, json.loads(line)["text"], "document", "padding") for line in lines if line]
    _, long = ends(encoder, LONG, "document", "padding")
    return [asked(encoder, question, found, long) for question in QUESTIONS]


def asked(encoder: Encoder, question: str, found: list[tuple[Vector, Vector]], long: Vector) -> dict[str, Any]:
    a, r_a = ends(encoder, question, "query", "padding")
    terms = [float(r_a @ r_b) for _, r_b in found]
    b, r_b = found[int(np.argmin([a @ b for b, _ in found]))]
    return {
        "set": "demo",
        "reference": "padding",
        "question": question,
        "documents": len(found),
        "f(r_a, r_b)": {"mean": float(np.mean(terms)), "least": min(terms)},
        "f(r_a, r_b) with 142 tokens": float(r_a @ long),
        "the document that is least like it": {
            "score": float(a @ b),
            "sum of pairs": float((a - r_a) @ (b - r_b)),
            "rest": float(across(a, r_a) @ across(b, r_b)),
        },
    }


def line(row: dict[str, Any]) -> str:
    """The row for people."""
    sums = {name: found["unrelated"]["mean"] for name, found in row["|sum - score|"].items()}
    missed = ", ".join(f"{name} {value:.3f}" for name, value in sums.items())
    terms = "mean {mean:.2f}, least {least:.2f}".format(**row["f(r_a, r_b)"])
    return (
        f"{row['set']}, {row['reference']}: f(r_a, r_b) {terms}; above 0.1: {row['said']:.0%}; "
        f"unrelated |sum - score|: {missed}"
    )


def measured(encoder: Encoder, pairs: list[tuple[str, str]], reference: Reference) -> dict[str, Any]:
    queries = [ends(encoder, query, "query", reference) for query, _ in pairs]
    documents = [ends(encoder, document, "document", reference) for _, document in pairs]
    _, shared = ends(encoder, SHARED, "document", reference)
    places = np.arange(len(pairs))
    kinds = {"related": places, "unrelated": (places + 2) % len(pairs)}
    missed: dict[str, dict[str, Any]] = {}
    found: dict[tuple[str, str], Vector] = {}
    for kind, others in kinds.items():
        for (a, r_a), (b, r_b) in zip(queries, [documents[place] for place in others], strict=True):
            sums = {
                "pairs": (a - r_a) @ (b - r_b),
                "rest": across(a, r_a) @ across(b, r_b),
                "shared": (a - shared) @ (b - shared),
            }
            terms = {"score": a @ b, "f(r_a, r_b)": r_a @ r_b, "larger": max(abs(a @ r_b), abs(r_a @ b))}
            for name, value in {**sums, **terms}.items():
                found[name, kind] = np.append(found.get((name, kind), np.zeros(0)), value)
    for name in ("pairs", "rest", "shared"):
        missed[name] = {
            kind: measures.bounded(abs(found[name, kind] - found["score", kind]).tolist()) for kind in kinds
        }
        missed[name]["sum, unrelated"] = float(found[name, "unrelated"].mean())
        missed[name]["larger if related"] = float((found[name, "related"] > found[name, "unrelated"]).mean())
    both = {name: np.concatenate([found[name, kind] for kind in kinds]) for name in ("f(r_a, r_b)", "larger")}
    return {
        "score": {kind: float(found["score", kind].mean()) for kind in kinds},
        "f(r_a, r_b)": {"mean": float(both["f(r_a, r_b)"].mean()), "least": float(both["f(r_a, r_b)"].min())},
        "said": float((both["larger"] > TRUSTED_REFERENCE).mean()),
        "|sum - score|": missed,
    }


def ends(encoder: Encoder, text: str, role: Role, reference: Reference) -> tuple[Vector, Vector]:
    """The unit embeddings of a text and of its reference."""
    with encoder.computing():
        how: dict[str, Any] = {"reference": reference, "normalises": True, "across": False, "spreads": True}
        path = IntegrationPath(encoder, encoder.read([text], role), 0, **how)
        return path.embedding.double().numpy(), path.reference.double().numpy()


def across(vector: Vector, direction: Vector) -> Vector:
    return vector - (vector @ direction) * direction


if __name__ == "__main__":
    main()
