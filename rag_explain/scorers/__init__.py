"""What people rank by: each kind of model behind one interface. `resolve` alone asks what kind a model is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rag_explain.encoder import loading
from rag_explain.encoder.cross_encoder import PairEncoder
from rag_explain.encoder.model import Encoder
from rag_explain.encoder.static import StaticEncoder
from rag_explain.encoder.towers import towers_of
from rag_explain.errors import InvalidInput, UnsupportedModel, in_words
from rag_explain.scorers.base import Scorer
from rag_explain.scorers.bi_encoder import BiEncoder
from rag_explain.scorers.bm25 import BM25
from rag_explain.scorers.checks import check_encoding, check_similarity
from rag_explain.scorers.cross_encoder import CrossEncoder
from rag_explain.scorers.embedder import BlackBox
from rag_explain.scorers.holders import is_held
from rag_explain.scorers.multi_vector import MultiVector
from rag_explain.scorers.openai_compatible import PREFIX, OpenAICompatible
from rag_explain.scorers.sources import source_of
from rag_explain.scorers.sparse import sparse_of
from rag_explain.scorers.static import Static

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

__all__ = ["BM25", "BlackBox", "CrossEncoder", "OpenAICompatible", "Scorer", "resolve"]


@in_words(UnsupportedModel, "this model cannot be explained", ": use another model, or load this one another way")
def resolve(
    model: Any,
    device: str | None = None,
    max_calls: int | None = None,
    analyser: Any = None,
    label: int | str | None = None,
) -> Scorer:
    """The scorer of a name, a folder, a loaded model, or something else that embeds strings; a scorer is its own.

    `max_calls` is how many texts are sent to what only embeds strings, `analyser` what splits texts for a BM25 index;
    `label` chooses one of a cross-encoder's.
    """
    return _resolved(model, device, max_calls, analyser).labelled(label)


def _resolved(model: Any, device: str | None, max_calls: int | None, analyser: Any) -> Scorer:
    if is_held(model):
        if device is not None or max_calls is not None:
            raise InvalidInput("a BM25 index counts words where it is: leave out device and max_calls")
        return BM25(model, analyser)
    if analyser is not None:
        raise InvalidInput("analyser= splits texts for a BM25 index: this model reads them by itself")
    if isinstance(model, Scorer):
        if device is not None:
            raise InvalidInput("a scorer stays on its device: give the model itself to choose another")
        if max_calls is not None:
            raise InvalidInput("a scorer has its own max_calls: give it to the scorer")
        return model
    if isinstance(model, str) and (model.startswith(PREFIX) or "://" in model):
        model = OpenAICompatible.named(model)
    # A torch model has modules, and is looked into.
    source = None if hasattr(model, "named_modules") else source_of(model)
    if source is not None:
        if device is not None:
            raise InvalidInput(f"{source.name} computes where it is: leave out the device")
        return BlackBox(source, max_calls=max_calls)
    if max_calls is not None:
        raise InvalidInput("max_calls limits what is sent to something that embeds strings: this model computes here")
    from sentence_transformers import CrossEncoder as PairModel
    from sentence_transformers import MultiVectorEncoder, SparseEncoder

    loaded, name = loading.load(model, device)
    if isinstance(loaded, SparseEncoder):
        return _checked(sparse_of(loaded, name, device))
    if isinstance(loaded, PairModel):
        return _checked(CrossEncoder(PairEncoder(loaded, name=name, device=device)))
    if all(tower.is_static for tower in towers_of(loaded).values()):
        return _checked(Static(StaticEncoder(cast("SentenceTransformer", loaded), name=name, device=device)))
    # A MultiVectorEncoder has all of a SentenceTransformer that an Encoder reads, but for the embedding.
    encoder = Encoder(cast("SentenceTransformer", loaded), name=name, device=device)
    return _checked(MultiVector(encoder, loaded) if isinstance(loaded, MultiVectorEncoder) else BiEncoder(encoder))


def _checked(scorer: BiEncoder | MultiVector | CrossEncoder) -> Scorer:
    """The scorer, if it computes what the model itself computes."""
    if isinstance(scorer, BiEncoder):
        check_similarity(scorer)
    check_encoding(scorer)
    return scorer
