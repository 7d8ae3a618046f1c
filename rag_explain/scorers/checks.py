"""Is a model read and run as a method needs it? Checked when an Explainer is made, and by the doctor."""

from dataclasses import dataclass, replace

import numpy as np

from rag_explain.encoder.batch import Batch
from rag_explain.encoder.model import Encoder
from rag_explain.encoder.probing import tolerance
from rag_explain.errors import UnsupportedModel
from rag_explain.probes import TEXTS
from rag_explain.scorers.base import Scorer
from rag_explain.scorers.bi_encoder import BiEncoder

PROBE = TEXTS[0]


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis: what was looked at, what was seen, and whether it is as it should be."""

    subject: str
    seen: str
    ok: bool = True


def check_encoding(scorer: Scorer) -> None:
    """Refuse a model that is not computed here as its own `encode_query` and `encode_document` compute it."""
    here, own = scorer.probes, scorer.own_probes
    if scorer.measure == "cosine":  # a model that divides by the length afterwards compares the same directions
        here, own = here.directions(), own.directions()
    miss = here.distance(own)
    if not miss <= scorer.tolerance:
        raise UnsupportedModel(
            f"{scorer.name} itself encodes a short text otherwise than its modules do one after the other (off by "
            f"{miss:.1%}): remove the hook, wrapper or override that changes it, or use another model"
        )


def check_similarity(scorer: BiEncoder) -> None:
    """Refuse a model whose own `similarity` is not the cosine or inner product that is explained."""
    observed = scorer.observed
    vectors = np.stack(observed.probes.values)
    queries, documents = np.split(vectors, 2)
    own = np.stack([scorer.compare(query, documents) for query in queries])
    if not scorer.notices and not np.abs(own - observed.similarities).max() <= scorer.tolerance * np.abs(own).max():
        raise UnsupportedModel(
            f"the `similarity` of {scorer.name} is not the {scorer.measure} that its name promises: "
            "remove the override, or set similarity_fn_name to 'cosine' or 'dot'"
        )


def check_route(encoder: Encoder, layer: int, batch: Batch | None = None) -> None:
    """Refuse an encoder in which a text reaches the embedding past the block that it is attributed to.

    `batch` is a short and a longer text, or pair, as the encoder reads them.

    What goes past would be counted as a constant, and no sum would show it. So the block is given the hidden state of
    one text while the model reads another: the embedding must not move. It must not depend on padding either, or
    factors would depend on which texts shared a batch.
    """
    texts = [PROBE, f"{PROBE} {PROBE}"]
    for one in [encoder.read(texts, role) for role in encoder.roles] if batch is None else [batch]:
        _check_route(encoder, layer, one)


def _check_route(encoder: Encoder, layer: int, batch: Batch) -> None:
    alone, together = batch.select([0]), encoder.run(batch)[:1]
    hidden, plain = encoder.hidden(alone, layer)
    ids = alone.features["input_ids"].clone()
    words = [index for index, token in enumerate(alone.tokens[0]) if token.part == "text"]
    if not words:
        raise UnsupportedModel("the model's prompt and special tokens leave no room for a text: raise max_seq_length")
    ids[0, alone.positions(0)[words]] = int(ids[0, alone.positions(0)[words[0]]])  # one word, again and again
    other = replace(alone, features={**alone.features, "input_ids": ids})
    moved = encoder.run(other, lambda block, value: hidden if block == layer else value)
    allowed = tolerance(encoder.dtype) * plain.norm()
    if not (moved - plain).norm() <= allowed:
        raise UnsupportedModel(
            f"in this model a text reaches the embedding past the input of block {layer}, so that it cannot "
            "be attributed there" + ("" if layer == 0 else ": try layer=0")
        )
    if not (together - plain).norm() <= allowed:
        raise UnsupportedModel(
            "the embeddings of this model depend on padding, so that a text has no embedding of its own: "
            "pad on the other side, or use another model"
        )
