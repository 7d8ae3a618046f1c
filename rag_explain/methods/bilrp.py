"""BiLRP and its baseline without rules, as linear algebra.

BiLRP (Eberle et al. 2020; for transformers Vasileiou & Eberle 2024) explains a dot product of embeddings
y = <phi(x), phi(x')> by the relevance of pairs of input features,

    R_ii' = sum_m  LRP_i(phi_m, x) * LRP_i'(phi_m, x')

with one LRP pass per embedding dimension m. With the rules of Ali et al. (2022) the network is affine once its
coefficients are frozen at the text (attention probabilities, norm denominators, activation ratios), and LRP-0 is
gradient times input of that frozen map. Hence R = rows(x) rows(x')^T, where rows[t] is the image of token t's input
under the map, which takes one tangent per token to compute instead of one backward pass per dimension.

The map is affine, not linear: the encoder's biases contribute too. By default each is counted for the token at whose
position it enters, so that rows sum to the embedding but for what enters after pooling; `biases="apart"` keeps all of
them in the rest, as the papers do.

`hxp`, Hessian times product, is the same with true derivatives: gradient times input, no rules.
"""

from typing import Any, Literal

import torch

from rag_explain.errors import InvalidInput
from rag_explain.linear import ATTN_LRP, JACOBIAN, LRP, Rules
from rag_explain.methods.checks import check_sum
from rag_explain.methods.frozen import FrozenMethod
from rag_explain.scorers.base import Scorer

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def known_rules(name: str) -> Rules:
    """The rules of this name; another one is refused."""
    known = {"lrp": LRP, "attnlrp": ATTN_LRP}
    if name not in known:
        raise InvalidInput(f"rules must be one of {', '.join(known)}, not {name!r}")
    return known[name]


class BiLRP(FrozenMethod):
    """`bilrp`: exact second-order LRP. The rest is computed from the biases, so the sum is a check that can fail.

    `rules` are those of the BiLRP papers (default), or AttnLRP's. `biases` are counted for the token at whose position
    they enter ("position"), or in the rest ("apart", as in the papers). With `precision` tangents are in "fp16" or
    "bf16": the error of each text is measured and kept, and one above 2 % is refused.
    """

    name = "bilrp"
    computes_rest = True

    def __init__(
        self,
        scorer: Scorer,
        layer: int | None = None,
        *,
        rules: Literal["lrp", "attnlrp"] = "lrp",
        biases: Literal["position", "apart"] = "position",
        precision: Literal["fp16", "bf16"] | None = None,
    ) -> None:
        super().__init__(scorer, layer)
        if biases not in ("position", "apart"):
            raise InvalidInput(f"biases must be 'position' or 'apart', not {biases!r}")
        if precision is not None and precision not in _DTYPES:
            raise InvalidInput(f"precision must be 'fp16' or 'bf16', or None for the model's own, not {precision!r}")
        self.precision, self.dtype = precision, _DTYPES.get(precision or "")
        self.rules, self.biases_by_position = known_rules(rules), biases == "position"

    @property
    def settings(self) -> dict[str, Any]:
        biases = "position" if self.biases_by_position else "apart"
        lower = {} if self.precision is None else {"precision": self.precision}
        return {"layer": self.layer, "rules": self.rules.name, "biases": biases, **lower}

    def check(self) -> None:
        """Sum of rows + rest = embedding, and embedding = what the encoder says without the recorder."""
        check_sum(self)
        super().check()


class HessianProduct(FrozenMethod):
    """`hxp`: gradient times input on both sides. The rest is what remains, so the sum checks nothing."""

    name = "hxp"
    rules = JACOBIAN
    computes_rest = False
