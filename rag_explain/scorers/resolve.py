"""From the user's object to its scorer: the one place that asks what kind a model is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from rag_explain.encoder import loading
from rag_explain.encoder.model import Encoder
from rag_explain.errors import InvalidInput
from rag_explain.scorers.base import Scorer
from rag_explain.scorers.bi_encoder import BiEncoder
from rag_explain.scorers.multi_vector import MultiVector

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer


def resolve(model: str | Path | SentenceTransformer | MultiVectorEncoder | Scorer, device: str | None = None) -> Scorer:
    """The scorer of a name, a folder or a loaded model; a scorer is its own."""
    if isinstance(model, Scorer):
        if device is not None:
            raise InvalidInput("a scorer stays on its device: give the model itself to choose another")
        return model
    from sentence_transformers import MultiVectorEncoder

    loaded, name = loading.load(model, device)
    # A MultiVectorEncoder has all of a SentenceTransformer that an Encoder reads, but for the embedding.
    encoder = Encoder(cast("SentenceTransformer", loaded), name=name, device=device)
    return MultiVector(encoder, loaded) if isinstance(loaded, MultiVectorEncoder) else BiEncoder(encoder)
