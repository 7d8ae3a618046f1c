"""What the user's model gives for the probes, by its own public functions: the truth that everything is held to."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rag_explain.encoder.identity import Facts, differing, facts
from rag_explain.encoder.reading import reads_pairs
from rag_explain.encoder.working_copy import drop_hooks, share
from rag_explain.errors import UnsupportedModel, in_words
from rag_explain.probes import TEXTS, Probes

# What a cross-encoder reads of the probes: each as the document of the first.
PAIRS = tuple((TEXTS[0], text) for text in TEXTS)
_ANOTHER = "Another text, which is no probe."


def tolerance(dtype: torch.dtype) -> float:
    """What may be rounding in this precision, as a share of an embedding; a wrong rule misses by far more."""
    return 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2


def probed(model: Any) -> tuple[Probes, NDArray[np.float32]]:
    """`encode_query` and then `encode_document` of every probe, and (P, P) the model's own `similarity` of them.

    Of a cross-encoder, its logits for pairs of them, and no similarities. It fills the model's caches: ask a copy.
    """
    with in_words(UnsupportedModel, "the model itself cannot encode a short text"):
        if reads_pairs(model):
            return Probes.of([_logits(model, PAIRS)]), np.zeros((0, 0), np.float32)
        # One by one: an embedding that depends on padding has its own refusal.
        query, document = (
            encode(list(TEXTS), batch_size=1, show_progress_bar=False, **dense(model))
            for encode in (model.encode_query, model.encode_document)
        )
        similarities = _to_numpy(model.similarity(query, document))
    return Probes.of(map(_to_numpy, (*query, *document))), similarities


def dense(model: Any) -> dict[str, bool]:
    """What to tell a model so that its embeddings have a number in every dimension."""
    return {"convert_to_sparse_tensor": False} if hasattr(model, "max_active_dims") else {}


def _logits(model: Any, pairs: Iterable[tuple[str, str]]) -> NDArray[np.float32]:
    """(P, labels): what `predict` gives for each pair, before the model's activation."""
    options = {"activation_fn": torch.nn.Identity(), "batch_size": 1, "show_progress_bar": False}
    logits = _to_numpy(model.predict(list(pairs), **options))
    return logits.reshape(len(logits), -1)


def _to_numpy(value: Any) -> NDArray[np.float32]:
    found: NDArray[np.float32] = torch.as_tensor(value).float().cpu().numpy()
    return found


@dataclass(frozen=True)
class Observed:
    """What a copy of the user's model showed when it was used."""

    probes: Probes
    similarities: NDArray[np.float32]  # (P, P), of the probes as queries and as documents
    facts: Facts  # what decides an embedding, as it is once the model was used: caches are filled
    each_time: frozenset[str]  # the paths of facts that every encoding changes, and that decide nothing: counters, say
    fleeting: frozenset[str]  # these, and the paths of facts that the first encoding has changed


def observe(copied: Any) -> Observed:
    """Use a copy of the user's model, and see what that changes in it."""
    new = facts(copied)
    probes, similarities = probed(copied)
    used = facts(copied)
    _use(copied)
    again = facts(copied)
    each_time = differing(used, again)
    lasting = {path: value for path, value in again.items() if path not in each_time}
    return Observed(probes, similarities, lasting, each_time, each_time | differing(new, used))


def _use(copied: Any) -> None:
    if reads_pairs(copied):
        _logits(copied, [(_ANOTHER, _ANOTHER)])
    else:
        copied.encode_query(_ANOTHER, show_progress_bar=False, **dense(copied))


def hooks_decide(model: Any) -> bool:
    """Whether the model computes something else with its hooks than without them."""
    return _decides(model, drop_hooks, tolerance(next(model.parameters()).dtype))


def attributes_decide(model: Any, paths: Iterable[str]) -> bool:
    """Whether the model computes something else with these attributes of its modules than without them."""

    def delete(copied: Any) -> None:
        for owner, _, key in (path.rpartition(".") for path in paths):
            vars(copied.get_submodule(owner)).pop(key, None)

    return _decides(model, delete, 0.0)


def _decides(model: Any, undo: Callable[[Any], None], allowed: float) -> bool:
    """Whether a copy of the model computes something else than it does after `undo`."""
    copied, _ = share(model)
    probes, _ = probed(copied)
    undo(copied)
    return not probes.distance(probed(copied)[0]) <= allowed
