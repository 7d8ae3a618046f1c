"""How each kind of non-linear operation is made linear at the text at hand.

| kind | `LRP` (Ali et al. 2022, used by BiLRP) | `ATTN_LRP` (Achtibat et al. 2024) | `JACOBIAN` (no rules) |
|---|---|---|---|
| softmax | frozen: attention probabilities are coefficients | Taylor; its constant goes to the rest | derivative |
| activation f(x) | x * f(x)/x, the ratio frozen | the same | derivative |
| norm | denominator frozen, mean subtracted | the same | derivative |
| gate * signal (GeGLU, SwiGLU) | gate frozen | half to each | product rule |
| product of two matrices | refused | half to each | product rule |

Gated MLPs: the papers behind BiLRP have none. We give everything to the signal and freeze the gate, the "signal takes
all" rule that Arras et al. (2017, 2019) found best among the conserving rules for LSTM gates, and which is what
`frozen softmax` does to attention: the gate decides how much passes, the signal is what passes. Where it cannot be told
which factor is the gate (both or neither went through an activation), each gets half.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rules:
    """One choice per kind of operation; see the table above."""

    name: str
    softmax: Literal["frozen", "taylor"]
    activation: Literal["ratio", "derivative"]
    norm: Literal["frozen", "derivative"]
    gate: Literal["signal", "half", "product"]
    matrices: Literal["refused", "half", "product"]


LRP = Rules("lrp", "frozen", "ratio", "frozen", "signal", "refused")
ATTN_LRP = Rules("attnlrp", "taylor", "ratio", "frozen", "half", "half")
JACOBIAN = Rules("jacobian", "taylor", "derivative", "derivative", "product", "product")
