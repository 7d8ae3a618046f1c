"""BTI as algorithm 1 of Malkiel et al. (2022) writes it, line by line, by autograd on the model itself.

Only the words of a text are taken from outside: which tokens belong to one is a matter of the tokenizer. Nothing else
is shared with the library. Names are the paper's, in small letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import cosine_similarity as C  # as the paper calls it

from tests.support.references_jacobian import _pass

Pair = tuple[int, int, float]


def propagated(model: SentenceTransformer, text: str, task: str, layer: int) -> tuple[Tensor, Tensor]:
    """E(p) and B(p), both (tokens of the text, h), without CLS, SEP and PAD; B depends on E by autograd."""
    features: dict[str, Any] = dict(model.preprocess([text], task=task))
    own = _own(model, text, task)
    if layer == 3:  # every model here has three blocks: E is B
        output = model[0](dict(features))["token_embeddings"].detach().requires_grad_()
        return output, output[0, own]
    hidden, _ = _pass(model, dict(features), layer, None)
    embeddings = hidden.detach().requires_grad_()
    caught: list[Tensor] = []
    handle = model[1].register_forward_pre_hook(lambda _module, args: caught.append(args[0]["token_embeddings"]))
    _pass(model, dict(features), layer, embeddings)
    handle.remove()
    return embeddings, caught[0][0, own]


def f_p(b_p: Tensor) -> Tensor:  # function F_p, Eq. 1
    return b_p.mean(dim=0)


def token_saliency(f_p1: Tensor, e_p2: Tensor, b_p2: Tensor, own: Tensor, kind: str) -> Tensor:
    """function TokenSaliency(p_1, p_2), Eq. 3 and 4; `kind` is "product", or one of the paper's ablations."""
    (g,) = torch.autograd.grad(C(f_p1.detach(), f_p(b_p2), dim=0), e_p2, retain_graph=True)  # Eq. 3
    inside = {"product": e_p2 * g, "gradient": g, "activation": e_p2}[kind]
    s = torch.relu(inside)[0, own].sum(dim=-1)  # Eq. 4
    return ((s - s.min()) / (s.max() - s.min())).detach()  # NRM: min-max


def word_piece_inverse(
    members: Sequence[Sequence[int]],
    b_p: Tensor,
    s: Tensor,
) -> tuple[list[Tensor], list[float]]:
    """function WordPiece^-1: a word's latent representation is the mean of its tokens', its saliency the maximum."""
    return [b_p[inside].mean(dim=0) for inside in members], [float(s[inside].max()) for inside in members]


def match_words(
    w1: Sequence[Tensor], w2: Sequence[Tensor], s1: Sequence[float], s2: Sequence[float], is_reversed: bool
) -> list[Pair]:
    """function MatchWords, Eq. 5 and 6: the word of the other side with the largest cosine."""
    pairs = []
    for i in range(len(w1)):
        m, c = 0, C(w1[i], w2[0], dim=0)
        for j in range(1, len(w2)):
            c_hat = C(w1[i], w2[j], dim=0)
            if c <= c_hat:
                m, c = j, c_hat
        score = s1[i] * s2[m] * float(c)
        pairs.append((m, i, score) if is_reversed else (i, m, score))
    return pairs


def top_words(pairs: dict[tuple[int, int], float], clusters: int | None) -> dict[tuple[int, int], float]:
    """function TopWords: pairs in the top clusters of all scores; with `clusters` 3 its "S_i <= top_k" for top_k 2."""
    scores = list(pairs.values())
    if clusters is None or len(set(scores)) < 2:
        return pairs
    centroids = mean_shift(scores, bandwidth(scores))
    nearest = [min(range(len(centroids)), key=lambda c: abs(centroids[c] - score)) for score in scores]  # S
    return {pair: score for (pair, score), c in zip(pairs.items(), nearest, strict=True) if c < clusters}


def mean_shift(points: Sequence[float], radius: float) -> list[float]:
    """The centroids, largest first: each point climbs to the mean of what is around it; of near ones the fullest."""
    found = []
    for mean in points:
        moved = float("inf")
        while moved > 1e-3 * radius:
            around = [point for point in points if abs(point - mean) <= radius]
            mean, moved = sum(around) / len(around), abs(sum(around) / len(around) - mean)
        found.append((len(around), mean))
    modes: list[float] = []
    for _, mean in sorted(found, reverse=True):
        if all(abs(mean - mode) > radius for mode in modes):
            modes.append(mean)
    return sorted(modes, reverse=True)


def bandwidth(points: Sequence[float]) -> float:
    """The mean distance to the farthest of the nearest 3 in 10 points (two at least), the point itself counted."""
    near = max(2, int(0.3 * len(points) + 1e-9))
    found = sum(sorted(abs(point - other) for other in points)[near - 1] for point in points) / len(points)
    ordered = sorted(set(points))
    return found or min(b - a for a, b in pairwise(ordered))


def algorithm_1(
    model: SentenceTransformer,
    texts: tuple[str, str],
    members: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
    layer: int,
    kind: str,
    clusters: int | None,
) -> tuple[dict[tuple[int, int], float], Tensor, float]:
    """The pairs that are left with their scores, the words' cosines, and C(F_p1, F_p2)."""
    sides = list(zip(texts, ("query", "document"), strict=True))
    (e1, b1), (e2, b2) = (propagated(model, text, task, layer) for text, task in sides)
    own = [_own(model, text, task) for text, task in sides]
    s1 = token_saliency(f_p(b2), e1, b1, own[0], kind)  # line 1
    s2 = token_saliency(f_p(b1), e2, b2, own[1], kind)  # line 2
    w1, w1_s = word_piece_inverse(members[0], b1.detach(), s1)  # line 3
    w2, w2_s = word_piece_inverse(members[1], b2.detach(), s2)  # line 4
    m1 = match_words(w1, w2, w1_s, w2_s, is_reversed=False)  # line 5
    m2 = match_words(w2, w1, w2_s, w1_s, is_reversed=True)  # line 6
    both = {(i, j): score for i, j, score in m1 + m2}  # a union: a pair that both sides find is in it once
    found = top_words(both, clusters)  # line 7
    cosines = torch.stack([torch.stack([C(one, other, dim=0) for other in w2]) for one in w1])
    return found, cosines, float(C(f_p(b1), f_p(b2), dim=0).detach())


def _own(model: SentenceTransformer, text: str, task: str) -> Tensor:
    ids = model.preprocess([text], task=task)["input_ids"][0]
    return (ids != model.tokenizer.cls_token_id) & (ids != model.tokenizer.sep_token_id)
