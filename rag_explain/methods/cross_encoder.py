"""How a cross-encoder's logit comes from the tokens of both texts.

A cross-encoder reads query and document as one sequence of tokens x_1 ... x_n and gives a logit. Frozen at the pair by
the rules of `bilrp`, it is an affine map, and one cotangent that is pulled from the logit back to the tokens splits it:

    logit = sum_j R_j + rest,        R_j = <g_j, x_j> + what biases contribute where they enter at position j

(g_j: the cotangent at token j). As pairs it is cut at the input of a middle block, where the hidden state is
h_p = sum_j T_pj x_j, so that

    M[p, j] = <g_p, T_pj x_j>        what the logit takes from position p that this position had read from token j

(g_p: the cotangent there; T_pj x_j: token j's tangent, as far as it reached position p). For token i of the query and
token j of the document

    matrix[i, j] = M[i, j] + M[j, i]

what i read from j and j from i. Every pair is in the relevance of both of its tokens, so the last row and column hold
the relevance of each token less its pairs, and the last cell the rest and the sum of all pairs:

    matrix[rest, j] = R_j - sum_i matrix[i, j]    matrix[i, rest] = R_i - sum_j matrix[i, j]
    matrix[rest, rest] = rest + sum_ij matrix[i, j]

Then each token's column, or row, sums to its relevance, and the whole to the logit. It takes one tangent and one
cotangent for each token of the query; the relevance alone takes one cotangent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rag_explain.devices import Device, to_host
from rag_explain.encoder.batch import Batch, Side
from rag_explain.encoder.model import check_hidden
from rag_explain.encoder.pair_reading import Pairs
from rag_explain.encoder.probing import tolerance
from rag_explain.errors import CheckFailed, InvalidInput, UnsupportedModel, whole_number
from rag_explain.linear import JACOBIAN, AffineMap, Recorder
from rag_explain.methods.base import ExplainedPair, Method, explained, to_numpy
from rag_explain.methods.bilrp import known_rules
from rag_explain.methods.frozen import freeze
from rag_explain.results.notices import METHOD, Notice
from rag_explain.scorers.base import Scorer
from rag_explain.scorers.checks import PROBE, check_route
from rag_explain.scorers.cross_encoder import CrossEncoder
from rag_explain.texts.passage import Passage, as_passages
from rag_explain.texts.units import WHOLE

_WITHIN = Notice(
    METHOD,
    "Pairs hold what words of one text read of the other; what they read of their own text is in no pair, but in what "
    "each word carries.",
    "note",
)


class PairRelevance(Method):
    """`lrp`: each token's relevance for the logit, and what tokens of one text read from those of the other.

    `rules` are those of `bilrp` (default), or AttnLRP's; a bias is counted for the token at whose position it enters.
    `cut` is the block at whose input pairs are formed; None: the middle one.
    """

    name = "lrp"
    has_factors = False
    linear = False
    computes_rest: ClassVar[bool] = True

    def __init__(
        self,
        scorer: Scorer,
        layer: int | None = None,
        *,
        rules: Literal["lrp", "attnlrp"] = "lrp",
        cut: int | None = None,
    ) -> None:
        self.encoder = scorer.pair_encoder  # refused in words by a scorer that has none
        assert isinstance(scorer, CrossEncoder)
        self.scorer: CrossEncoder = scorer
        super().__init__(scorer, layer)
        if self.encoder.n_blocks < 2:
            raise UnsupportedModel(f"{self.encoder.name} has one block, and pairs are formed between two")
        self.rules = known_rules(rules)
        self.cut = self.encoder.n_blocks // 2 if cut is None else whole_number(cut, "cut")
        if not 0 < self.cut < self.encoder.n_blocks:
            raise InvalidInput(f"cut must be between 1 and {self.encoder.n_blocks - 1} for this model, not {cut}")

    @property
    def settings(self) -> dict[str, Any]:
        label = self.scorer.label_name
        settings = {"rules": self.rules.name, "cut": self.cut}
        return settings if label is None else {**settings, "label": label}

    @property
    def asks_whole(self) -> bool:
        return True

    def whole(self, query: Batch) -> Batch:
        return replace(query, tokens=((WHOLE,),))

    def check(self) -> None:
        """The tokens' relevance and the rest sum to the logit, and nothing goes past the blocks that are looked at."""
        pairs = self.scorer.read_pairs(Passage(PROBE), as_passages([PROBE, f"{PROBE} {PROBE}"]))
        alone = pairs.select([0])
        plain = self.encoder.run(alone)
        (relevance, rest), logits = self._relevance(alone)
        (pair,) = self._as_pairs(alone)
        found = torch.stack([relevance.sum() + rest.sum(), torch.tensor(float(pair.matrix.sum())).to(rest)])
        misses = (found - self.scorer.chosen(plain)).abs().max(), (logits - plain).abs().max()
        error = float(max(misses) / (relevance.abs().sum() + rest.abs().sum()))
        if not error <= tolerance(self.encoder.dtype):
            raise CheckFailed(
                f"the relevance of the tokens and the rest miss the logit of {self.scorer.name} by {error:.1%}: an "
                "operation of this model is treated wrongly, and it is not explained; please report the model"
            )
        for block in (0, self.cut):
            check_route(self.encoder, block, pairs)

    def cold(self, query: Batch, documents: Batch) -> list[ExplainedPair]:
        pairs = self.scorer.read_pairs(query.passages[0], documents.passages)
        compute = self._as_a_whole if query.tokens[0] == (WHOLE,) else self._as_pairs
        found = pairs.in_buckets(Device(lambda: self.scorer.device).size(), compute)
        return [found[index] for index in range(len(pairs))]

    def _as_a_whole(self, pairs: Pairs) -> list[ExplainedPair]:
        """The query as one row."""
        (relevance, rest), logits = self._relevance(pairs)
        relevance, rest, *ends = to_host(relevance, rest, logits, self.scorer.shown(logits))
        explain, result = self._explained(pairs, *ends), []
        for index in range(len(pairs)):
            (query, asked), (_, found) = (pairs.text(index, side) for side in (0, 1))
            matrix = relevance.new_zeros(2, len(found) + 1)
            matrix[0, :-1] = relevance[index, found]
            matrix[0, -1], matrix[1, -1] = relevance[index, asked].sum(), rest[index]
            result.append(explain(index, query._replace(tokens=(WHOLE,)), matrix))
        return result

    def _as_pairs(self, pairs: Pairs) -> list[ExplainedPair]:
        lower, upper, logits = self._halves(pairs)
        cotangent = self._cotangent(logits, upper)
        entered = cotangent.new_zeros(1, *lower.hidden.shape[:2])
        slopes = upper.pull(cotangent, entered=entered)
        relevance = (entered + lower.by_token(slopes, self.max_bytes))[0]
        rest = self._rest(upper, cotangent, relevance, logits)
        cells = self._cells(lower, slopes[0], self._numbers(pairs))
        relevance, rest, cells, *ends = to_host(relevance, rest, cells, logits, self.scorer.shown(logits))
        explain, result = self._explained(pairs, *ends), []
        for index in range(len(pairs)):
            (query, asked), (_, found) = (pairs.text(index, side) for side in (0, 1))
            own = cells[: len(asked), index, found]
            by_query, by_document = relevance[index, asked], relevance[index, found]
            last = torch.cat([by_document - own.sum(dim=0), (rest[index] + own.sum())[None]])
            matrix = torch.cat([torch.cat([own, (by_query - own.sum(dim=1))[:, None]], dim=1), last[None]])
            result.append(replace(one := explain(index, query, matrix), notices=(*one.notices, _WITHIN)))
        return result

    def _cells(self, lower: AffineMap, slopes: Tensor, numbers: Tensor) -> Tensor:
        """(n_q, D, n): what each token of the query and each position read from one another at the cut.

        `slopes` (D, n, h) are the cotangents there, `numbers` (D, n) those of the query's tokens, -1 elsewhere.
        """
        count = int(numbers.max()) + 1
        cells = slopes.new_zeros(count, *numbers.shape)
        if not count:  # an empty query
            return cells

        def take(start: int, images: Tensor) -> None:
            stop = min(start + len(images), count)  # the rest is no token's
            cells[start:stop] += (images[: stop - start] * slopes).sum(dim=-1)

        lower.push_groups(numbers, take, self.max_bytes)
        step, numbers = lower.chunk(self.max_bytes, count), numbers.to(slopes.device)
        for start in range(0, count, step):
            index = torch.arange(start, min(start + step, count), device=numbers.device)[:, None, None]
            places = slopes * (numbers == index).unsqueeze(-1)
            cells[start : start + step] += lower.by_token(places, self.max_bytes)
        return cells

    def _numbers(self, pairs: Pairs) -> Tensor:
        """(D, n): which token of the query is at each position, -1 where there is none."""
        numbers = torch.full_like(pairs.features["input_ids"], -1)
        for index in range(len(pairs)):
            _, asked = pairs.text(index, 0)
            numbers[index, asked] = torch.arange(len(asked), device=numbers.device)
        return numbers

    def _relevance(self, pairs: Pairs) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """(D, n) what each token carries and (D,) what none does; and (D, labels) the logits."""
        frozen, logits = freeze(self.encoder, pairs, 0, self.rules, biases_by_position=self.computes_rest)
        cotangent = self._cotangent(logits, frozen)
        relevance = frozen.by_token(cotangent)[0]
        return (relevance, self._rest(frozen, cotangent, relevance, logits)), logits

    def _cotangent(self, logits: Tensor, frozen: AffineMap) -> Tensor:
        """(1, D, labels): one at the label that is explained."""
        cotangent = frozen.hidden.new_zeros(1, *logits.shape)
        self.scorer.chosen(cotangent[0]).fill_(1)
        return cotangent

    def _rest(self, frozen: AffineMap, cotangent: Tensor, relevance: Tensor, logits: Tensor) -> Tensor:
        """(D,): what biases contribute that no token owns; of a method that does not know it, what remains."""
        if self.computes_rest:
            return frozen.rest(cotangent)[0]
        return self.scorer.chosen(logits).to(relevance) - relevance.sum(dim=-1)

    def _halves(self, pairs: Pairs) -> tuple[AffineMap, AffineMap, Tensor]:
        """The model frozen at these pairs, up to the cut and from there; and (D, labels) the logits."""
        middle: list[Tensor] = []
        with Recorder(self.rules) as recorder:

            def visit(block: int, hidden: Tensor) -> Tensor:
                if block == 0:
                    check_hidden(hidden, pairs)
                    hidden = hidden.clone()
                    recorder.mark(hidden)
                elif block == self.cut:
                    hidden = hidden.clone()
                    middle.append(hidden)
                return hidden

            logits = self.encoder.run(pairs, visit, recorder.enter)
        return *recorder.freeze_halves(middle[0], logits, biases_by_position=self.computes_rest), logits

    def _explained(self, pairs: Pairs, logits: Tensor, shown: Tensor) -> Callable[[int, Side, Tensor], ExplainedPair]:
        """Makes of a matrix and what the query's rows are what is said of a pair."""
        scores, returned = (self.scorer.chosen(one).tolist() for one in (logits, shown))

        def explain(index: int, query: Side, matrix: Tensor) -> ExplainedPair:
            document, _ = pairs.text(index, 1)
            return explained(query, document, to_numpy(matrix), scores[index], returned=returned[index])

        return explain


class PairGradient(PairRelevance):
    """`gradient-input`: the same without rules. The rest is what remains, so that the sum checks nothing."""

    name = "gradient-input"
    computes_rest = False

    def __init__(self, scorer: Scorer, layer: int | None = None, *, cut: int | None = None) -> None:
        super().__init__(scorer, layer, cut=cut)
        self.rules = JACOBIAN

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in super().settings.items() if name != "rules"}
