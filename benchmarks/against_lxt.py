"""Highlights against lxt (AttnLRP) on the same pairs: time, faithfulness, and whether the values sum to the score.

    python benchmarks/against_lxt.py --data FOLDER [--pairs 100] [--rounds 5] [--json FILE]

FOLDER holds `xquad`: questions and their paragraphs that fit the encoder's window, scored above 0.2, in a fixed random
order. Ours is `explainer.highlight`, with nothing kept of the query or the document. lxt is one call from the two texts
to a value per word: the query's forward pass, the document's with a graph, the backward pass of the cosine, gradient x
word embedding summed by token, then by the words of our highlights, which it is given.

  time          of each pair in turns in one process, in the other order every other round, after both have explained
                every pair once. For each pair the median of the rounds; quartiles over pairs of the ratio of two
  faithfulness  the share of the score that is lost without the top 5, 10 and 20 % of the document's words
  exactness     |score - sum of values|, those of special tokens and of our rest included

lxt 2.1 cannot be imported beside transformers 5: its BERT is a copy of an older one. Its functions can, and `patched`
puts them where that copy has them: LayerNorm with its deviation held fixed, GELU by the identity rule, attention (sdpa)
by the uniform rule on both products. They replace methods of one model's modules, not classes of the whole process; it
is checked that our embeddings do not change by a bit, and that both models give the same scores. The division of the
cosine by the document's length is held fixed too, as lxt does in every norm: the plain derivative of a cosine, which
does not change with length, gives values that sum to about zero. That stands beside it as "lxt, plain cosine".
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
OURS, LXT, PLAIN, ENCODE, FORWARD = "ours", "lxt", "lxt, plain cosine", "ours, plain score", "lxt, forward only"
RATIOS = ((OURS, LXT), (OURS, ENCODE), (LXT, FORWARD), (ENCODE, FORWARD))
GAP = "|score - sum of values|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if find_spec("lxt") is None:
        sys.exit("lxt is what this compares with, and it is not installed: pip install lxt (--no-deps is enough)")
    explainer = Explainer(MODEL)
    pairs = chosen(explainer, options)
    texts = [text for pair in pairs for text in pair]
    before = explainer.scorer.embed(texts, "document")
    lxt = Lxt()
    if not np.array_equal(before, explainer.scorer.embed(texts, "document")):
        sys.exit("lxt's patches have changed our model, too: there is nothing to compare")
    values: dict[str, dict[str, list[float]]] = {}  # by measure and label, one per pair
    words = [judge(explainer, lxt, *pair, number, values) for number, pair in enumerate(pairs)]
    gaps = values.pop(GAP)
    result = {
        "command": f"python benchmarks/against_lxt.py --data FOLDER --pairs {options.pairs} --rounds {options.rounds}",
        "model": explainer.scorer.name,
        "versions": {name: version(name) for name in PACKAGES},
        "pairs": len(pairs),
        "words of a document, median": float(np.median([len(spans) for spans in words])),
        **times(explainer, lxt, list(zip(pairs, words, strict=True)), options.rounds),
        "faithfulness": {
            measure: {label: measures.bounded(several) for label, several in found.items()}
            | {f"ours - {label}": measures.difference(found[OURS], found[label]) for label in (LXT, PLAIN)}
            for measure, found in values.items()
        },
        GAP: {label: {"median": float(np.median(several)), "largest": max(several)} for label, several in gaps.items()},
    }
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def chosen(explainer: Explainer, options: argparse.Namespace) -> list[tuple[str, str]]:
    """Pairs whose document is read to its end, and which have a score to lose."""
    scorer = explainer.scorer
    pairs = data_sets.xquad(options.data / "xquad/xquad.en.json")
    fitting = (pair for pair in pairs if not scorer.read([as_passage(pair[1])], "document").truncated[0])
    return list(islice((pair for pair in fitting if scorer.score(pair[0], [pair[1]])[0] > FLOOR), options.pairs))


class Lxt:
    """A model with lxt's rules, which nobody else uses, and what is done with one."""

    def __init__(self) -> None:
        self.model = patched(load(MODEL, "cpu")[0].eval().requires_grad_(False))  # no gradients of weights

    def forward(self, query: str, document: str, *, plain: bool = False) -> tuple[Tensor, Tensor, list[Span]]:
        """The document's word embeddings (1, n, h), the score as a function of them, and where its tokens stand."""
        with torch.no_grad():
            asked = self.model(self._read(query))["sentence_embedding"][0]
        features = self._read(document)
        spans = [(start, end) for start, end in features.pop("offset_mapping")[0].tolist()]
        transformer, pooling = self.model[0].auto_model, self.model[1]
        inputs = transformer.get_input_embeddings()(features.pop("input_ids")).requires_grad_()
        states = transformer(inputs_embeds=inputs, **features).last_hidden_state
        pooled = pooling({"token_embeddings": states, **features})["sentence_embedding"][0]
        length = pooled.norm() if plain else pooled.norm().detach()
        return inputs, pooled @ asked / length, spans

    def explain(
        self, query: str, document: str, words: Sequence[Span], *, plain: bool = False
    ) -> tuple[measures.Values, float, float]:
        """What each word has, the sum of all tokens, and the score."""
        inputs, score, spans = self.forward(query, document, plain=plain)
        (gradient,) = torch.autograd.grad(score, inputs)
        values = (inputs.detach() * gradient).sum(dim=-1)[0].double().numpy()
        found, index = group(spans, words, join=False, clip=False)
        assert len(found) == len(words), "every word of ours has a token of lxt's"
        by_word = np.zeros(len(words) + 1)  # the last: of no word
        np.add.at(by_word, index, values)
        return by_word[:-1], float(values.sum()), score.item()

    def _read(self, text: str) -> dict[str, Any]:
        settings = {"return_tensors": "pt", "return_offsets_mapping": True, "truncation": True}
        return dict(self.model.tokenizer([text], max_length=self.model.max_seq_length, **settings))


def patched(model: Any) -> Any:
    """The model, with lxt's functions as methods of its modules."""
    import lxt

    # An empty package in place of lxt's own, whose first line imports the copies of models.
    package = ModuleType("lxt.efficient")
    package.__path__ = [str(Path(lxt.__file__).parent / "efficient")]
    sys.modules[package.__name__] = package
    from lxt.efficient import patches, rules

    # A new name beside "sdpa", which stays what it is.
    AttentionInterface.register("lxt", patches.wrap_attention_forward(sdpa_attention_forward))
    AttentionMaskInterface.register("lxt", sdpa_mask)
    model[0].auto_model.set_attn_implementation("lxt")
    for module in model.modules():
        activation = getattr(module, "intermediate_act_fn", None)
        if isinstance(module, nn.LayerNorm):
            module.forward = MethodType(patches.layer_norm_forward, module)
        elif activation is not None:
            activation.forward = partial(rules.identity_rule_implicit, activation.forward)
    return model


def judge(
    explainer: Explainer, lxt: Lxt, query: str, document: str, number: int, values: dict[str, dict[str, list[float]]]
) -> list[Span]:
    """Note what is lost without the top words of each and what each leaves over; the words."""

    def note(measure: str, label: str, value: float) -> None:
        values.setdefault(measure, {}).setdefault(label, []).append(value)

    highlights = explainer.highlight(query, document)
    tokens = [Token(span.text, span.start, span.end) for span in highlights.spans]
    words = [(token.start, token.end) for token in tokens]
    assert highlights.gap is not None
    note(GAP, OURS, abs(highlights.gap))
    found = {OURS: np.array([span.value for span in highlights.spans])}
    for label in (LXT, PLAIN):
        found[label], total, score = lxt.explain(query, document, words, plain=label == PLAIN)
        if abs(score - highlights.score) > 1e-5:
            sys.exit(f"two models: lxt's gives {score} where ours gives {highlights.score}")
        note(GAP, label, abs(score - total))
    found["random"] = np.random.default_rng([measures.SEED, number]).random(len(words))
    counts = measures.top_counts(len(words), SHARES)
    texts = {}
    for label, carried in found.items():
        order = [tokens[index] for index in measures.largest_first(carried)]
        for share, count in zip(SHARES, counts, strict=True):
            texts[f"lost without top {share:.0%}", label] = measures.without(document, order[:count])
    distinct = list(dict.fromkeys([document, *texts.values()]))
    scores = dict(zip(distinct, explainer.scorer.score(query, distinct).tolist(), strict=True))
    for (measure, label), text in texts.items():
        note(measure, label, measures.lost(scores[document], scores[text]))
    return words


def times(
    explainer: Explainer, lxt: Lxt, cases: Sequence[tuple[tuple[str, str], list[Span]]], rounds: int
) -> dict[str, Any]:
    """How long each takes; its first half too: our model's plain score, and lxt's two forward passes."""
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in cases] for name in (ENCODE, OURS, FORWARD, LXT)}
    for number in range(rounds):
        for place, ((query, document), words) in enumerate(cases):
            calls: dict[str, Callable[[], object]] = {
                ENCODE: partial(explainer.scorer.score, query, [document]),
                OURS: partial(explainer.highlight, query, document),
                FORWARD: partial(lxt.forward, query, document),
                LXT: partial(lxt.explain, query, document, words),
            }
            for name in list(calls)[:: -1 if number % 2 else 1]:
                explainer._prepared.cache_clear()  # a query that was not asked before, a document that was never seen
                explainer._planner = DocumentPlanner(explainer.scorer, explainer.method, Store())
                start = time.perf_counter()
                calls[name]()
                seconds[name][place].append(time.perf_counter() - start)
    medians = {name: np.median(several, axis=1) for name, several in seconds.items()}
    quartiles = {f"{a} / {b}": np.percentile(medians[a] / medians[b], (50, 25, 75)).tolist() for a, b in RATIOS}
    return {
        "milliseconds, median": {name: round(1e3 * float(np.median(several)), 2) for name, several in medians.items()},
        "time": {name: dict(zip(("median", "low", "high"), three, strict=True)) for name, three in quartiles.items()},
    }


def show(result: dict[str, Any]) -> None:
    table = Table("", "", "", "bounds", title=f"{result['pairs']} pairs, {result['model']}")
    for name, one in result["time"].items():
        table.add_row("time, quartiles", name, f"{one['median']:.2f}", f"{one['low']:.2f} to {one['high']:.2f}")
    for measure, found in result["faithfulness"].items():
        table.add_section()
        for label, one in found.items():
            bounds = f"{one['low']:.4f} to {one['high']:.4f}"
            table.add_row(f"{measure}, 95 %", label, f"{one['mean']:.4f}", bounds)
    table.add_section()
    for label, one in result[GAP].items():
        table.add_row(f"{GAP}, median", label, f"{one['median']:.1e}", f"at most {one['largest']:.1e}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
