"""Highlights against lxt (AttnLRP) on the same pairs: time, faithfulness, and whether the values sum to the score.

    python benchmarks/against_lxt.py --data FOLDER [--pairs 100] [--rounds 5] [--json FILE]

FOLDER holds `xquad`: questions and their paragraphs that fit the encoder's window, scored above 0.2, at most one question of
a paragraph while there are others. Ours is `explainer.highlight`, with nothing kept of the query or the document. lxt is
one call from the two texts to a value per word: the query's forward pass, the document's with a graph, the cosine's
backward pass, gradient x word embedding summed by token, then by the words that our highlights have (it is given them).

  time          each pair is timed in turns in one process, in the other order every other round, after both have explained
                every pair once. Per pair the median of the rounds; then quartiles over pairs of the ratio
  faithfulness  the share of the score that is lost without the top 5, 10 and 20 % of the document's words
  exactness     |score - sum of all values|, special tokens and whatever else a method has a value for included

lxt 2.1 does not import beside transformers 5: its BERT is a copy of an older one. Its functions do, and `patched` puts them
where that copy has them: LayerNorm with its deviation held fixed, GELU by the identity rule, attention (sdpa) by the uniform
rule on both products. They replace methods of one model's modules instead of classes of the whole process, so that ours runs
as it always does; that its embeddings have not changed by a bit is checked, and that both models give the same score. The
cosine's division by the document's length is a normalisation and is held fixed, too, as lxt does in every other: else
the values sum to about zero, since a cosine does not change with length. That way stands beside it as "plain cosine".
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import data_sets
import measures
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rag_explain import Explainer, Token
from rag_explain.encoder.loading import load
from rag_explain.planner import DocumentPlanner
from rag_explain.store import Store
from rag_explain.texts.passage import as_passage
from rag_explain.texts.segments import Span, group

MODEL, SHARES, FLOOR = "all-MiniLM-L6-v2", (0.05, 0.1, 0.2), 0.2
PACKAGES = ("rag-explain", "lxt", "sentence-transformers", "torch", "transformers")
OURS, LXT, PLAIN, RANDOM = "ours", "lxt", "lxt, plain cosine", "random"

Pair = tuple[str, str]


def main() -> None:
    options = parse()
    explainer = Explainer(MODEL)
    pairs = chosen(explainer, data_sets.xquad(options.data / "xquad/xquad.en.json"), options.pairs)
    texts = [text for pair in pairs for text in pair]
    before = explainer.scorer.embed(texts, "document")
    lxt = Lxt()
    if not np.array_equal(before, explainer.scorer.embed(texts, "document")):
        sys.exit("patching lxt's model has changed ours: nothing that follows would be a comparison")
    lost: dict[str, list[list[float]]] = {}
    gaps: dict[str, list[float]] = {}
    words = [judge(explainer, lxt, pair, number, lost, gaps) for number, pair in enumerate(pairs)]
    result = {
        "command": f"python benchmarks/against_lxt.py --data FOLDER --pairs {options.pairs} --rounds {options.rounds}",
        "model": explainer.scorer.name,
        "versions": {name: version(name) for name in PACKAGES},
        "pairs": len(pairs),
        "words of a document, median": float(np.median([len(spans) for spans in words])),
        "time": times(explainer, lxt, pairs, words, options.rounds),
        "lost without the top words": {f"{share:.0%}": losses(lost, at) for at, share in enumerate(SHARES)},
        "|score - sum of values|": {
            name: {"median": float(np.median(several)), "largest": max(several)} for name, several in gaps.items()
        },
    }
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def chosen(explainer: Explainer, questions: Sequence[Pair], count: int) -> list[Pair]:
    """The first pairs, in their fixed order, that are read to their end and have a score to lose."""
    scorer, limit = explainer.scorer, explainer.scorer.encoder.reader.limit

    def fits(text: str) -> bool:
        return len(scorer.read([as_passage(text)], "document").tokens[0]) < limit

    wanted = (one for one in questions if fits(one[1]) and scorer.score(one[0], [one[1]])[0] > FLOOR)
    return list(islice(wanted, count))


# lxt


class Lxt:
    """A model of its own with lxt's rules, and what lxt's users do with one."""

    def __init__(self) -> None:
        model = load(MODEL, "cpu")[0]
        assert isinstance(model, SentenceTransformer)
        self.model = patched(model.requires_grad_(False))  # so that no gradient of a weight is computed

    def forward(self, query: str, document: str, *, plain: bool = False) -> tuple[Tensor, Tensor, list[Span]]:
        """The document's word embeddings (n, h), the score as a function of them, and the tokens' offsets."""
        with torch.no_grad():
            asked = self.model(self._read(query))["sentence_embedding"][0]
        features = self._read(document)
        offsets = features.pop("offset_mapping")[0].tolist()
        transformer = self.model[0].auto_model
        inputs = transformer.get_input_embeddings()(features.pop("input_ids")).requires_grad_()
        states = transformer(inputs_embeds=inputs, **features).last_hidden_state
        pooled = self.model[1]({"token_embeddings": states, **features})["sentence_embedding"][0]
        length = pooled.norm() if plain else pooled.norm().detach()
        return inputs, pooled @ asked / length, [(start, end) for start, end in offsets]

    def explain(
        self, query: str, document: str, words: Sequence[Span], *, plain: bool = False
    ) -> tuple[measures.Values, float, float]:
        """What each word has; the sum of all tokens, special ones too; the score."""
        inputs, score, offsets = self.forward(query, document, plain=plain)
        (gradient,) = torch.autograd.grad(score, inputs)
        values = (inputs.detach() * gradient).sum(dim=-1)[0].double().numpy()
        found, index = group(offsets, words, join=False, clip=False)
        assert len(found) == len(words)
        summed = np.bincount(np.array(index) + 1, values, minlength=len(words) + 1)[1:]  # place 0: of no word
        return summed, float(values.sum()), float(score)

    def _read(self, text: str) -> dict[str, Any]:
        limit = self.model.max_seq_length
        return dict(
            self.model.tokenizer(
                [text], return_tensors="pt", return_offsets_mapping=True, truncation=True, max_length=limit
            )
        )


def patched(model: SentenceTransformer) -> SentenceTransformer:
    spec = find_spec("lxt")
    if spec is None or spec.origin is None:
        sys.exit("lxt, which this compares with, is not installed: pip install lxt (--no-deps is enough)")
    # An empty package in place of lxt.efficient, whose own first lines import models that transformers 5 does not have.
    package = ModuleType("lxt.efficient")
    package.__path__ = [str(Path(spec.origin).parent / "efficient")]
    sys.modules[package.__name__] = package
    from lxt.efficient import patches, rules

    # A new name beside "sdpa": the others stay what they are.
    AttentionInterface.register("lxt", patches.wrap_attention_forward(sdpa_attention_forward))
    AttentionMaskInterface.register("lxt", sdpa_mask)
    model[0].auto_model.set_attn_implementation("lxt")
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.forward = MethodType(patches.layer_norm_forward, module)  # type: ignore[method-assign]
        elif isinstance(activation := getattr(module, "intermediate_act_fn", None), nn.Module):
            activation.forward = partial(rules.identity_rule_implicit, activation.forward)  # type: ignore[method-assign]
    return model.eval()


# Measures


def judge(
    explainer: Explainer,
    lxt: Lxt,
    pair: Pair,
    number: int,
    lost: dict[str, list[list[float]]],
    gaps: dict[str, list[float]],
) -> list[Span]:
    """Note what is lost without the top words of each, and what each leaves over; returns the words."""
    query, document = pair
    highlights = explainer.highlight(query, document)
    words = [(one.start, one.end) for one in highlights.spans]
    assert highlights.gap is not None
    gaps.setdefault(OURS, []).append(abs(highlights.gap))
    values = {OURS: np.array([one.value for one in highlights.spans])}
    for name in (LXT, PLAIN):
        values[name], total, score = lxt.explain(query, document, words, plain=name == PLAIN)
        if abs(score - highlights.score) > 1e-5:
            sys.exit(f"lxt's model scores {score} what ours scores {highlights.score}")
        gaps.setdefault(name, []).append(abs(score - total))
    values[RANDOM] = np.random.default_rng([measures.SEED, number]).random(len(words))
    tokens = [Token(one.text, one.start, one.end) for one in highlights.spans]
    for name, several in values.items():
        order = measures.largest_first(several)
        counts = measures.top_counts(len(words), SHARES)
        left = [measures.without(document, [tokens[at] for at in order[:count]]) for count in counts]
        scores = explainer.scorer.score(query, [document, *left]).tolist()
        lost.setdefault(name, []).append([measures.lost(scores[0], score) for score in scores[1:]])
    return words


def losses(lost: dict[str, list[list[float]]], at: int) -> dict[str, Any]:
    """Means with bounds, and the paired differences of ours to the others."""
    columns = {name: [row[at] for row in rows] for name, rows in lost.items()}
    found: dict[str, Any] = {name: measures.bounded(column) for name, column in columns.items()}
    return found | {f"ours - {name}": measures.difference(columns[OURS], columns[name]) for name in (LXT, PLAIN)}


def times(
    explainer: Explainer, lxt: Lxt, pairs: Sequence[Pair], words: Sequence[Sequence[Span]], rounds: int
) -> dict[str, Any]:
    seconds: dict[str, list[list[float]]] = {}
    for number in range(rounds):
        for place, ((query, document), spans) in enumerate(zip(pairs, words, strict=True)):
            calls: list[tuple[str, Callable[[], object]]] = [
                ("ours, plain encode", lambda q=query, d=document: encode(explainer, q, d)),  # type: ignore[misc]
                (OURS, partial(explainer.highlight, query, document)),
                ("lxt, forward only", partial(lxt.forward, query, document)),
                (LXT, partial(lxt.explain, query, document, spans)),
            ]
            for name, call in calls[:: -1 if number % 2 else 1]:
                explainer._prepared.cache_clear()  # a query that was not asked before, a document that was never seen
                explainer._planner = DocumentPlanner(explainer.scorer, explainer.method, Store())
                start = time.perf_counter()
                call()
                seconds.setdefault(name, [[] for _ in pairs])[place].append(time.perf_counter() - start)
    medians = {name: np.median(np.array(several), axis=1) for name, several in seconds.items()}
    ratios = [(OURS, LXT), (OURS, "ours, plain encode"), (LXT, "lxt, forward only"), (LXT, "ours, plain encode")]
    ratios.append(("lxt, forward only", "ours, plain encode"))
    return {
        "milliseconds, median": {name: round(float(np.median(several)) * 1e3, 2) for name, several in medians.items()},
        "ratios, quartiles": {
            f"{one} / {other}": np.percentile(medians[one] / medians[other], (25, 50, 75)).round(3).tolist()
            for one, other in ratios
        },
    }


def encode(explainer: Explainer, query: str, document: str) -> None:
    explainer.scorer.embed([query], "query")
    explainer.scorer.embed([document], "document")


def show(result: dict[str, Any]) -> None:
    table = Table("", "", "value", "bounds", title=f"{result['pairs']} pairs, {result['model']}")
    for name, value in result["time"]["milliseconds, median"].items():
        table.add_row("milliseconds, median", name, f"{value:.1f}", "")
    for name, (low, middle, high) in result["time"]["ratios, quartiles"].items():
        table.add_row("time, quartiles over pairs", name, f"{middle:.2f}", f"{low:.2f} to {high:.2f}")
    for share, found in result["lost without the top words"].items():
        table.add_section()
        for name, one in found.items():
            bounds = f"{one['low']:+.4f} to {one['high']:+.4f}"
            table.add_row(f"lost without top {share}, 95 %", name, f"{one['mean']:+.4f}", bounds)
    table.add_section()
    for name, one in result["|score - sum of values|"].items():
        table.add_row("|score - sum|, median; largest", name, f"{one['median']:.1e}", f"{one['largest']:.1e}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
