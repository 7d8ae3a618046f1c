"""Methods whose rows are images of the tokens' inputs under the frozen encoder."""

from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rag_explain import pairing
from rag_explain.devices import to_host
from rag_explain.encoder.batch import Batch, Side
from rag_explain.encoder.model import Encoder, check_hidden
from rag_explain.errors import CheckFailed
from rag_explain.factors import Array, Factors
from rag_explain.linear import AffineMap, Recorder, Rules, Structures
from rag_explain.methods.base import EncoderMethod, ExplainedPair, explained, to_numpy
from rag_explain.scorers.base import Scorer
from rag_explain.scorers.checks import check_route
from rag_explain.texts.tokens import Unit
from rag_explain.texts.units import WHOLE

# How far rows and rest may miss the embedding in a lower precision than the model's.
HALF_TOLERANCE = 0.02


def freeze(
    encoder: Encoder,
    batch: Batch,
    layer: int,
    rules: Rules,
    *,
    at: Tensor | None = None,
    shares: Tensor | None = None,
    **options: bool,
) -> tuple[AffineMap, Tensor]:
    """The affine map that the encoder is at these texts, from block `layer`'s input to its output; and (D, e) the
    embeddings.

    The output is the embedding, or with `shares` (D, n) the sum of the last block's vectors weighted by them. `at`
    (D, n, h) puts the block's input somewhere else than where the texts themselves put it. Options are those of
    `AffineMap`.
    """
    output: list[Tensor] = []
    with Recorder(rules) as recorder:

        def visit(block: int, hidden: Tensor) -> Tensor:
            if block == layer:
                check_hidden(hidden, batch)
                # A copy: what other parts of the model do to the original is not part of the block's input.
                hidden = (hidden if at is None else at).clone()
                recorder.mark(hidden)
            if shares is not None and block == encoder.n_blocks:
                output.append((hidden * shares[..., None]).sum(dim=1))
            return hidden

        embeddings = encoder.run(batch, visit, recorder.enter)
    return recorder.freeze(output[0] if output else embeddings, **options), embeddings


class FrozenMethod(EncoderMethod):
    """Rows are images of the tokens' inputs under the frozen encoder."""

    embeds = True  # the forward pass is recorded, not rewritten
    pushes_rows = True
    rules: Rules
    # Whether the rest is computed from the biases, so that the sum is a check; else it is what remains.
    computes_rest: ClassVar[bool]
    # Whether a bias is counted for the token at whose position it enters, and not in the rest.
    biases_by_position: bool = False
    # Of tangents and coefficients, where that is not the model's own: half of the memory, and on many devices faster.
    dtype: torch.dtype | None = None

    def check(self) -> None:
        super().check()  # first: it names an operation that has no rule
        check_route(self.encoder, self.layer)

    def __init__(self, scorer: Scorer, layer: int | None = None) -> None:
        super().__init__(scorer, layer)
        self._structures = Structures()

    def freeze(self, batch: Batch) -> tuple[AffineMap, Tensor]:
        """The frozen encoder at these texts, and their embeddings (D, e)."""
        # A query is short, and recording costs as much as computing; a document hides that, and lengths differ more.
        alike, device = batch.alike() if batch.role == "query" else None, self.encoder.device
        there, by_position = batch.to(device), self.biases_by_position
        record = partial(freeze, self.encoder, there, self.layer, self.rules, biases_by_position=by_position)
        if alike is None:
            frozen, embeddings = record()
        else:
            frozen, embeddings = self._structures.freeze((alike, device), there.features["input_ids"], record)
        return (frozen if self.dtype is None else frozen.to(self.dtype)), embeddings

    def factor(self, batch: Batch, unit: Unit) -> list[Factors]:
        frozen, embeddings = self.freeze(batch)
        units, groups = batch.groups(unit)
        found, rest = frozen.rows(self.max_bytes, groups=groups)
        found, rest, embeddings = to_host(found, rest, embeddings)
        rows = batch.unpad(found) if groups is None else [found[index, : len(own)] for index, own in enumerate(units)]
        norms = self.encoder.norms(embeddings)
        result = []
        for index, (tokens, own, embedding) in enumerate(zip(units, rows, embeddings, strict=True)):
            bias = rest[index].to(embedding) if self.computes_rest else embedding - own.sum(dim=0)
            ends = {"rest": bias, "embedding": embedding, "norm": norms[index]}
            result.append(self.build(batch, index, rows=own.to(embedding), **ends, tokens=tokens, unit=unit))
            self._accepted(result[-1].error)
        return result

    def _accepted(self, error: float) -> float:
        """The error of one text; in a lower precision it may be too large for this one and small for another."""
        if self.dtype is not None and not error <= HALF_TOLERANCE:
            name = str(self.dtype).removeprefix("torch.")
            raise CheckFailed(
                f"{self.name} in {name} misses the embedding of a text by {error:.1%}, and {HALF_TOLERANCE:.0%} is the "
                "most that is shown: leave out precision, or use another one"
            )
        return error

    def whole(self, query: Batch) -> Factors:
        """The query as one row: its embedding, which takes a plain forward pass."""
        embedding = to_host(self.encoder.run(query)[0])[0]
        rows, rest, one = embedding[None], torch.zeros_like(embedding), {"tokens": (WHOLE,), "unit": "whole"}
        return self.build(query, 0, rows=rows, rest=rest, embedding=embedding, norm=self.encoder.norms(rows)[0], **one)

    def cold(self, query: Factors, documents: Batch) -> list[ExplainedPair]:
        """Pull the query's rows and rest through each document: n_q + 1 cotangents, whatever the document's length."""
        frozen, embeddings = self.freeze(documents)
        block = torch.as_tensor(query.block.copy()).to(embeddings)
        asked = block if query.rest.any() else block[:-1]  # nothing is not pulled back
        cotangents = asked[:, None, :].expand(-1, len(documents), -1)
        tokens, rest = self._relevance(frozen, cotangents, float(np.abs(query.block).max()))
        if not self.computes_rest:
            rest = pairing.product(asked, embeddings) - tokens.sum(dim=-1)
        cells = torch.cat([tokens, rest[..., None]], dim=-1)
        if len(asked) < len(block):
            cells = torch.cat([cells, torch.zeros_like(cells[:1])])
        cells, embeddings = to_host(cells, embeddings)
        norms = self.encoder.norms(embeddings) * query.norm
        scores = pairing.scores(torch.as_tensor(query.embedding.copy()).to(embeddings), embeddings, norms)
        result = []
        for index, own in enumerate(documents.unpad(cells[..., :-1].permute(1, 2, 0))):
            matrix = torch.cat([own.T, cells[:, index, -1:]], dim=1) / norms[index]
            pair = self.finish(query, documents.side(index), to_numpy(matrix), float(scores[index]))
            if self.dtype is not None:
                pair = replace(pair, error=self._accepted(_miss(query, matrix * norms[index], embeddings[index])))
            result.append(pair)
        return result

    def _relevance(self, frozen: AffineMap, cotangents: Tensor, size: float) -> tuple[Tensor, Tensor]:
        """`frozen.relevance` in the precision of the tangents; fp16 has no small numbers, so none are sent."""
        if self.dtype is None:
            tokens, rest = frozen.relevance(cotangents.to(frozen.hidden.dtype), self.max_bytes)
            return tokens.to(cotangents.dtype), rest.to(cotangents.dtype)
        tokens, rest = frozen.relevance((cotangents / size).to(self.dtype), self.max_bytes)
        return tokens.to(cotangents.dtype) * size, rest.to(cotangents.dtype) * size

    def finish(self, query: Factors, document: Factors | Side, matrix: Array, score: float) -> ExplainedPair:
        """As for every method; here also of a document whose factors were not built."""
        return explained(query, document, matrix, score)


def _miss(query: Factors, sums: Tensor, embedding: Tensor) -> float:
    """How far what the query's rows found in a document, (n_q + 1, n_d + 1), is from their products with its embedding.

    As a share of the two texts' lengths.
    """
    block = torch.as_tensor(query.block.copy()).to(embedding)
    return float((sums.sum(dim=1) - block @ embedding).norm() / (block.norm() * embedding.norm()).clamp_min(1e-30))
