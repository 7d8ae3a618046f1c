"""BTI (Malkiel et al. 2022): salient words of both texts, matched with one another.

1. E, the tokens' vectors at the input of block `layer` (Eq. 2). With `layer` 0 that is the embedding output, after
   positions were added and after the embedding norm where the encoder has one.
2. F, the mean over the tokens of the text of B, the vectors that the encoder puts out (Eq. 1); special tokens and
   prompts are left out, so the cosine C of the two F is close to the encoder's own similarity but not the same number.
3. Saliency of a token: sum over dimensions of ReLU(E * dC/dE), scaled to [0, 1] over the text (min-max; Eq. 3 and 4);
   1 where all tokens of a text are equally salient, as a single one is.
4. Words: the mean of their tokens' vectors B, the maximum of their tokens' saliencies (lines 3 and 4 of algorithm 1).
5. Each word is matched with the word of the other text whose vector has the largest cosine, from both sides (Eq. 5).
6. The score of a matched pair is cosine * saliency * saliency (Eq. 6). MeanShift clusters the scores of all matched
   pairs, one that is matched from both sides counted once, and the pairs of the top clusters are the explanation.

The scores rank pairs of words and add up to nothing. The paper's ablations are `saliency="gradient"` (ReLU(dC/dE)
alone), `saliency="activation"` (ReLU(E) alone) and `layer=` the number of blocks (the last layer's output for E).
"""

from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_explain import pairing
from rag_explain.devices import to_host
from rag_explain.encoder.batch import Batch
from rag_explain.errors import InvalidInput, import_extra
from rag_explain.factors import Array
from rag_explain.linear import JACOBIAN, AffineMap
from rag_explain.methods.base import ExplainedPair, PairMethod, explained, to_numpy
from rag_explain.methods.baselines import cosine_gradients, similarities
from rag_explain.methods.frozen import freeze
from rag_explain.scorers.base import Scorer
from rag_explain.texts.tokens import Token
from rag_explain.texts.units import text_units

Saliency = Literal["product", "gradient", "activation"]
_CLUSTERING = ("sklearn.cluster", "scikit-learn", "bti")


class BTI(PairMethod):
    """`bti`: the most salient pairs of words that are each other's like.

    `saliency` is what makes a token salient, `clusters` how many of the top clusters to keep; None: all matched pairs.
    """

    name = "bti"
    compares_tokens = True
    options = ("saliency", "clusters")

    def __init__(
        self, scorer: Scorer, layer: int | None = None, *, saliency: Saliency = "product", clusters: int | None = 2
    ) -> None:
        super().__init__(scorer, layer)
        if saliency not in get_args(Saliency):
            raise InvalidInput(f"saliency must be one of {', '.join(get_args(Saliency))}, not {saliency!r}")
        if clusters is not None and clusters < 1:
            raise InvalidInput(f"clusters must be at least 1, or None for all pairs, not {clusters}")
        self.saliency, self.clusters = saliency, clusters
        import_extra(*_CLUSTERING)

    @property
    def layers(self) -> range:
        # Unlike the input of a block, the output of the last one is an ablation of this method alone.
        return range(self.encoder.n_blocks + 1)

    def cold(self, query: Batch, documents: Batch) -> list[ExplainedPair]:
        left, own = self._freeze(query)
        right, embeddings = self._freeze(documents)
        (output, _), (outputs, _) = (self.encoder.hidden(batch, self.encoder.n_blocks) for batch in (query, documents))
        between, by_query, by_document = cosine_gradients(left.embedding[0], right.embedding)
        step = left.chunk(self.max_bytes, len(by_query))
        asked = torch.cat([left.pull(part) for part in by_query[:, None].split(step)])[:, 0]
        answers = right.pull(by_document[None])[0]  # documents do not meet in the pass
        salient = self._salient(left.hidden, asked), self._salient(right.hidden, answers)
        ends = between, similarities(self.encoder, own[0], embeddings)
        output, outputs, asking, answering, between, scores = to_host(output, outputs, *salient, *ends)
        result = []
        for index in range(len(documents)):
            words, vectors, saliency = self._words(query, 0, output[0], asking[index])
            others, their_vectors, their_saliency = self._words(documents, index, outputs[index], answering[index])
            cosines = _cosines(vectors, their_vectors)
            table = top_clusters(cosines * saliency[:, None] * their_saliency, matches(cosines), self.clusters)
            matrix = np.pad(table, ((0, 1), (0, 1)))  # no rest
            units = {"query_tokens": words, "document_tokens": others, "unit": "word"}
            more = {"references": {"cosine": float(between[index])}, "similarities": cosines, **units}
            result.append(explained(query.side(0), documents.side(index), matrix, float(scores[index]), **more))
        return result

    def _freeze(self, batch: Batch) -> tuple[AffineMap, Tensor]:
        """The encoder's derivative from E to F, and the encoder's own embeddings (D, e)."""
        words = batch.words().to(self.encoder.device, self.encoder.dtype)
        shares = words / words.sum(dim=1, keepdim=True).clamp_min(1)
        return freeze(self.encoder, batch, self.layer, JACOBIAN, shares=shares)

    def _salient(self, embeddings: Tensor, gradients: Tensor) -> Tensor:
        """(D, n): the saliency of each token, as it is."""
        kinds = {"product": embeddings * gradients, "gradient": gradients, "activation": embeddings}
        return kinds[self.saliency].relu().sum(dim=-1).expand(len(gradients), -1)

    def _words(
        self, batch: Batch, index: int, output: Tensor, salient: Tensor
    ) -> tuple[tuple[Token, ...], Array, Array]:
        """The w words of a text; their vectors (w, h), the means of their tokens'; their saliency (w,), the maxima.

        The saliency is scaled to [0, 1] over the text's tokens before they are joined.
        """
        tokens, text = batch.tokens[index], batch.passages[index].text
        words, owners = text_units(tokens, text, "word", truncated=batch.truncated[index])
        if not words:
            raise InvalidInput("the text has no words to explain: give a text that is not empty")
        here = batch.positions(index)
        vectors, saliency = to_numpy(output[here]), to_numpy(salient[here])
        inside = np.array([token.part == "text" for token in tokens])
        low, high = saliency[inside].min(), saliency[inside].max()
        scaled = (saliency - low) / (high - low) if high > low else np.ones_like(saliency)
        members = [owners == word for word in range(len(words))]
        means = np.stack([vectors[member].mean(axis=0) for member in members])
        return words, means, np.array([scaled[member].max() for member in members], dtype=np.float32)


def matches(cosines: Array) -> NDArray[np.bool_]:
    """(w_q, w_d): which words are the best match of the other, from either side; of equals the last (MatchWords)."""
    (rows, columns), found = cosines.shape, np.zeros(cosines.shape, dtype=bool)
    found[np.arange(rows), columns - 1 - cosines[:, ::-1].argmax(axis=1)] = True
    found[rows - 1 - cosines[::-1].argmax(axis=0), np.arange(columns)] = True
    return found


def top_clusters(scores: Array, matched: NDArray[np.bool_], clusters: int | None) -> Array:
    """(w_q, w_d): the scores of the matched pairs in the top clusters; all others are zero."""
    points: NDArray[np.float64] = scores[matched].astype(np.float64)[:, None]
    kept = np.ones(len(points), dtype=bool)
    values = np.unique(points)
    if clusters is not None and len(values) > 1:
        cluster = import_extra(*_CLUSTERING)
        # scikit-learn's own choice, but never from fewer than two neighbours: the first is the point itself.
        bandwidth = cluster.estimate_bandwidth(points, quantile=min(1.0, max(0.3, 2 / len(points))))
        if not bandwidth > 0:  # most scores are equal: as narrow as the closest two that are not
            bandwidth = float(np.diff(values).min())
        model = cluster.MeanShift(bandwidth=bandwidth).fit(points)
        kept = np.isin(model.labels_, np.argsort(-model.cluster_centers_[:, 0], kind="stable")[:clusters])
    table = np.zeros_like(scores, dtype=np.float32)
    table[matched] = np.where(kept, points[:, 0], 0)
    return table


def _cosines(left: Array, right: Array) -> Array:
    lengths = np.linalg.norm(left, axis=1)[:, None] * np.linalg.norm(right, axis=1)[None, :]
    return pairing.product(left, right, np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)
