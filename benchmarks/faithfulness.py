"""How faithful are methods? Two protocols on the same sentences of the STS benchmark.

    python benchmarks/faithfulness.py --data FOLDER [--settings 'LABEL={"method": ...}' ...] [--pairs 40] [--json FILE]

FOLDER holds `stsbenchmark/sts-dev.csv`. A setting is a label and the keyword arguments of an `Explainer`, as JSON; the
first is what the others are compared with. Both protocols perturb one sentence of a pair and then the other, and the
figure of a pair is the mean of the two areas. Lower is better.

  added back  the protocol of Vasileiou & Eberle (2024), section 4.3 and appendix B. Elements of a sentence are ordered
              by their interaction scores, summed over the other sentence, from highest to lowest. The sentence starts
              as mask tokens (as the token of a blank, where the tokenizer has none), and elements come back in steps of
              fractions of 0.04 until it is whole. The curve is the Euclidean distance of its representation from that
              of the whole sentence; the figure is the area under it over the fraction that is there (AUPC)
  deletion    words are left out of the text one by one, and the model scores what is left: the area under score / first
              score. Pairs that the model scores above 0.5, as in `choices.py`

What appendix B leaves open: elements are the tokens of the text, or its words, whose tokens come back together; tokens
that frame a text and prompts stay, as nothing was said with them; the fraction f of n elements is f n, rounded. The
representation is the embedding before normalisation (as in the paper, whose models have none), and beside it the unit
vector that a cosine compares. Bounds hold 95 % (bootstrap over pairs, seed fixed).
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import choices
import data_sets
import measures
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from rag_explain import Explainer, Explanation
from rag_explain.encoder.model import Encoder
from rag_explain.texts.tokens import Role, Unit

DEFAULTS = [
    'bilrp={"method": "bilrp"}',
    'ij, block 3={"method": "ij", "layer": 3}',
    'ij, block 5={"method": "ij", "layer": 5}',
    'ij, block 3, papers={"method": "ij", "layer": 3, "along_reference": "pairs"}',
    'ij, block 5, papers={"method": "ij", "layer": 5, "along_reference": "pairs"}',
    'hxp={"method": "hxp"}',
    'embeddings={"method": "embeddings"}',
    'gradient={"method": "gradient"}',
    'random={"method": "random"}',
]
UNITS: tuple[Unit, ...] = ("token", "word")
SIDES: tuple[Role, ...] = ("query", "document")
SHARES = measures.fractions()


def main() -> None:
    options = parse()
    scorer = Explainer(options.model).scorer
    explainers = {label: Explainer(scorer, **given) for label, given in map(choices.setting, options.settings)}
    trial = choices.Trial(scorer, explainers)
    pairs = [(one, other) for one, other, _ in data_sets.sts_benchmark(options.data / "stsbenchmark" / "sts-dev.csv")]
    with choices.progress("stsb", options.pairs) as advance:
        for query, document in data_sets.shuffled(pairs)[: options.pairs]:
            perturb(trial, query, document)
            advance()
    rows = [choices.row(*key, values, next(iter(explainers))) for key, values in trial.values.items()]
    Console(width=150).print(choices.table(rows))
    if options.json:
        result = {
            "command": choices.command(options, "faithfulness.py"),
            "model": scorer.name,
            "settings": dict(map(choices.setting, options.settings)),
            "versions": {name: version(name) for name in choices.PACKAGES},
            "bounds": f"95 %, {measures.RESAMPLES} resamples of the pairs, seed {measures.SEED}",
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def perturb(trial: choices.Trial, query: str, document: str) -> None:
    """By every setting and both protocols."""
    score = float(trial.scorer.score(query, [document])[0])
    for label, explainer in trial.explainers.items():
        explanation = explainer.explain(query, document)
        by_word = explanation.by_word()
        for unit, found in zip(UNITS, (explanation, by_word), strict=True):
            areas = [added_back(trial.scorer.encoder, found, explanation, role) for role in SIDES]
            for name, area in zip(("embedding", "unit vector"), np.mean(areas, axis=0), strict=True):
                trial.note("added back", f"{unit}s, {name}", label, float(area))
        if score > 0.5:
            both = [deletion(trial, by_word, role) for role in SIDES]
            trial.note("deletion", "words", label, float(np.mean(both)))


def saliency(explanation: Explanation, role: Role) -> NDArray[np.float64]:
    """Interaction scores of one sentence's elements, sum-pooled over the other sentence."""
    return explanation.pairs.sum(axis=1 if role == "query" else 0, dtype=np.float64)


def added_back(encoder: Encoder, explanation: Explanation, tokens: Explanation, role: Role) -> tuple[float, float]:
    """The area of one sentence, whose elements are those of `explanation` and whose `tokens` another one has."""
    text = explanation.query if role == "query" else explanation.document
    elements = explanation.query_tokens if role == "query" else explanation.document_tokens
    parts = tokens.query_tokens if role == "query" else tokens.document_tokens
    assert text is not None
    owners = [
        next((place for place, one in enumerate(elements) if one.start <= part.start and part.end <= one.end), -1)
        if part.part == "text"
        else -1
        for part in parts
    ]
    own = [place for place, element in enumerate(elements) if element.part == "text"]
    values = saliency(explanation, role)[own]
    there = measures.restored(measures.largest_first(values), measures.added(len(own), SHARES))
    columns = np.array([own.index(owner) if owner >= 0 else -1 for owner in owners])
    kept = np.where(columns >= 0, there[:, columns], True)
    vectors, whole = masked(encoder, text, role, kept)
    curves = (measures.distances(*found) for found in ((vectors, whole), (unit(vectors), unit(whole[None])[0])))
    one, other = (measures.area_over(SHARES, curve) for curve in curves)
    return one, other


def masked(
    encoder: Encoder, text: str, role: Role, kept: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(k, e) the embeddings of a text with only some of its tokens (k, n), and (e,) that of the whole text."""
    with encoder.computing():
        batch = encoder.read([text], role)
        copies = batch.select([0] * len(kept))
        ids = copies.features["input_ids"]
        places = torch.ones_like(ids, dtype=torch.bool)
        places[:, batch.positions(0)] = torch.as_tensor(kept)
        copies.features["input_ids"] = torch.where(places, ids, filler(encoder))
        return encoder.run(copies).double().numpy(), encoder.run(batch)[0].double().numpy()


def filler(encoder: Encoder) -> int:
    """The masking token, or the one that stands for a blank where no token masks."""
    tokenizer = encoder.whole.tokenizer
    found = tokenizer.mask_token_id
    return int(tokenizer.convert_tokens_to_ids("\u0120") if found is None else found)


def unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def deletion(trial: choices.Trial, explanation: Explanation, role: Role) -> float:
    """The area when one sentence loses its words and the other stays; the last word stays, too."""
    query, document = explanation.query, explanation.document
    assert query is not None
    assert document is not None
    is_query = role == "query"
    tokens = explanation.query_tokens if is_query else explanation.document_tokens
    order = measures.largest_first(saliency(explanation, role))
    text = query if is_query else document
    cut = [[tokens[place] for place in order[:count]] for count in range(1, len(order))]
    left = [text, *(measures.without(text, words) for words in cut)]
    scores = trial.scorer.scores(left, [document])[:, 0] if is_query else trial.scorer.score(query, left)
    return measures.area(scores.tolist()) if len(left) > 1 else 1.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", default=DEFAULTS, metavar="LABEL=JSON")
    parser.add_argument("--pairs", type=int, default=40, help="at most this many")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--json", type=Path, help="write the figures here, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
