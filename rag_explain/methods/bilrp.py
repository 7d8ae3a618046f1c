"""BiLRP and its baseline without rules, as linear algebra.

BiLRP (Eberle et al. 2020; for transformers Vasileiou & Eberle 2024) explains a dot product of embeddings
y = <phi(x), phi(x')> by the relevance of pairs of input features,

    R_ii' = sum_m  LRP_i(phi_m, x) * LRP_i'(phi_m, x')

with one LRP pass per embedding dimension m. With the rules of Ali et al. (2022) the network is affine once its
coefficients are frozen at the text (attention probabilities, norm denominators, activation ratios), and LRP-0 is
gradient times input of that frozen map. Hence R = rows(x) rows(x')^T, where rows[t] is the image of token t's input
under the map, which takes one tangent per token to compute instead of one backward pass per dimension.

`hxp`, Hessian times product, is the same with true derivatives: gradient times input, no rules.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from rag_explain.encoder import Batch, Encoder
from rag_explain.errors import CheckFailed, InvalidInput
from rag_explain.linear import ATTN_LRP, DEFAULT_MAX_BYTES, JACOBIAN, LRP, AffineMap, Recorder, Rules
from rag_explain.methods.base import ColdDocument, Method, to_numpy, tolerance
from rag_explain.types import Factors

_CHECK_TEXT = "Why was this short text found?"


def freeze(encoder: Encoder, batch: Batch, layer: int, rules: Rules, at: Tensor | None = None) -> AffineMap:
    """The affine map from block `layer`'s input to the embedding that the encoder is at these texts.

    `at` (D, n, h) puts the block's input somewhere else than where the texts themselves put it.
    """
    with Recorder(rules) as recorder:

        def visit(block: int, hidden: Tensor) -> Tensor:
            if block == layer:
                # What other parts of the model do to the original is not the block's business.
                hidden = (hidden if at is None else at).clone()
                recorder.mark(hidden)
            return hidden

        embedding = encoder.run(batch, visit, recorder.enter)
    return recorder.freeze(embedding)


class FrozenMethod(Method):
    """Rows are images of the tokens' inputs under the frozen encoder."""

    embeds = True  # the forward pass is recorded, not rewritten
    rules: Rules
    computes_rest: ClassVar[bool]

    def check(self) -> None:
        self.check_route()

    def factor(self, batch: Batch) -> list[Factors]:
        frozen = self._freeze(batch)
        rows, rest = (part.to(frozen.embedding.dtype) for part in frozen.rows(self.budget or DEFAULT_MAX_BYTES))
        norms = self.encoder.norms(frozen.embedding)
        result = []
        for index in range(len(batch)):
            own = rows[index, batch.positions(index)]
            bias = rest[index] if self.computes_rest else frozen.embedding[index] - own.sum(dim=0)
            result.append(self.build(batch, index, own, bias, frozen.embedding[index], norms[index]))
        return result

    def cold(self, query: Factors, batch: Batch) -> list[ColdDocument]:
        """Pull the query's rows and rest through each document: n_q + 1 cotangents, whatever the document's length."""
        frozen = self._freeze(batch)
        documents = frozen.embedding
        half = torch.as_tensor(np.vstack([query.rows, query.rest])).to(documents)
        cotangents = half[:, None, :].expand(-1, len(batch), -1)
        found = frozen.relevance(cotangents.to(frozen.hidden.dtype), self.budget or DEFAULT_MAX_BYTES)
        tokens, rest = (part.to(documents.dtype) for part in found)
        if not self.computes_rest:
            rest = torch.einsum("ce,de->cd", half, documents) - tokens.sum(dim=-1)
        norms = self.encoder.norms(documents) * query.norm
        scores = documents @ torch.as_tensor(query.embedding.copy()).to(documents) / norms
        result = []
        for index in range(len(batch)):
            own = tokens[:, index, batch.positions(index)]
            matrix = torch.cat([own, rest[:, index, None]], dim=1) / norms[index]
            result.append(
                ColdDocument(batch.tokens[index], to_numpy(matrix), float(scores[index]), batch.truncated[index])
            )
        return result

    def _freeze(self, batch: Batch) -> AffineMap:
        return freeze(self.encoder, batch, self.layer, self.rules)


class BiLRP(FrozenMethod):
    """`bilrp`: exact second-order LRP. The rest is computed from the biases, so the sum is a check that can fail.

    Args:
        rules: the rules of the BiLRP papers (default), or AttnLRP's.
        budget: bytes that tangents on their way may take.
    """

    name = "bilrp"
    computes_rest = True

    def __init__(
        self,
        encoder: Encoder,
        layer: int | None = None,
        *,
        rules: Literal["lrp", "attnlrp"] = "lrp",
        budget: int | None = None,
    ) -> None:
        super().__init__(encoder, layer, budget=budget)
        known = {"lrp": LRP, "attnlrp": ATTN_LRP}
        if rules not in known:
            raise InvalidInput(f"rules must be one of {', '.join(known)}, not {rules!r}")
        self.rules = known[rules]

    @property
    def settings(self) -> dict[str, Any]:
        return {"layer": self.layer, "rules": self.rules.name}

    def check(self) -> None:
        """Sum of rows + rest = embedding, and embedding = what the encoder says without the recorder."""
        batch = self.encoder.tokenize([_CHECK_TEXT], "document")
        (factors,) = self.factor(batch)
        plain = to_numpy(self.encoder.run(batch)[0])
        error = max(factors.error, float(np.linalg.norm(plain - factors.embedding) / np.linalg.norm(plain)))
        if not error <= tolerance(self.encoder.dtype):
            raise CheckFailed(
                f"sum of rows + rest misses the embedding of {self.encoder.name} by {error:.1%}: "
                "an operation of this encoder is treated wrongly, and it is not explained; please report the model"
            )
        super().check()


class HessianProduct(FrozenMethod):
    """`hxp`: gradient times input on both sides. The rest is what remains, so the sum checks nothing."""

    name = "hxp"
    rules = JACOBIAN
    computes_rest = False
