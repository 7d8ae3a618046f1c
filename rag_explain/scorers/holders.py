"""What holds a BM25 index: the index itself, or a retriever of LangChain or LlamaIndex, known by what it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_explain.errors import InvalidInput
from rag_explain.scorers.analyser import Analyser, as_analyser, of_settings
from rag_explain.scorers.bm25s_index import BM25S
from rag_explain.scorers.term_index import RankBM25, TermIndex

# Whose stop words LlamaIndex was told to leave out when it made the index, it does not keep: the first that fits.
_LANGUAGES = ("en", "de", "fr", "es", "it", "nl", "pt", "ru", "sv", "no", "da", "tr", "zh", "ko", "en_plus", None)


@dataclass(frozen=True)
class Held:
    """An index and how texts are read for it.

    Attributes:
        index: gives the index that is held now.
        query: reads queries.
        documents: ways in which documents may have been read: the first by which a text is one of the index's.
        vocabulary: gives the numbers of words, for an index that was made of numbers.
        weights: gives what each document's score is multiplied by, where the retriever does that.
    """

    index: Callable[[], Any]
    query: Analyser
    documents: tuple[Analyser, ...]
    vocabulary: Callable[[], Mapping[str, int] | None] = lambda: None
    weights: Callable[[], Sequence[float] | None] = lambda: None


def kind_of(index: Any) -> type[TermIndex] | None:
    """How to look into an index; None where it is no BM25 index that is known here."""
    return next((kind for kind in (BM25S, RankBM25) if kind.is_one(index)), None)


def is_held(model: Any) -> bool:
    """Whether this is a BM25 index, or holds one."""
    return not isinstance(model, type | str) and any(kind_of(one) for one in (model, *_inside(model)))


def held(model: Any, analyser: Any = None) -> Held:
    """The index in this object, with the retriever's own analyser or the one given."""
    name = type(model).__name__
    if kind_of(model) is None:
        if analyser is not None:
            raise InvalidInput(f"{name} has its own analyser: leave out analyser=, or give the index inside it")
        return _of_langchain(model) if hasattr(model, "vectorizer") else _of_llama_index(model)
    given = getattr(model, "tokenizer", None) if analyser is None else analyser
    if given is None:
        raise InvalidInput(
            f"{name} does not keep how texts are split into words: give analyser=, what split them when the index was "
            "made, such as str.split, a Tokenizer of bm25s, or functools.partial(bm25s.tokenize, stemmer=...)"
        )
    read = as_analyser(given)
    return Held(lambda: model, read, (read,), getattr(given, "get_vocab_dict", lambda: None))


def _inside(model: Any) -> list[Any]:
    """The index in a retriever: LangChain's calls it `vectorizer`, LlamaIndex's `bm25`."""
    by_name = (("vectorizer", "preprocess_func"), ("bm25", "token_pattern"))
    return [getattr(model, index) for index, reads in by_name if hasattr(model, index) and hasattr(model, reads)]


def _of_langchain(retriever: Any) -> Held:
    read = as_analyser(retriever.preprocess_func)
    return Held(lambda: retriever.vectorizer, read, (read,))


def _of_llama_index(retriever: Any) -> Held:
    """It splits queries by the settings that it keeps, and documents by these and the stop words of a language."""
    stemmer = None if getattr(retriever, "skip_stemming", False) else retriever.stemmer
    kept = {"stemmer": stemmer, "token_pattern": retriever.token_pattern}
    name = type(retriever).__name__
    documents = (of_settings({**kept, "stopwords": language}, name) for language in _LANGUAGES)
    return Held(
        lambda: retriever.bm25,
        of_settings(kept, name),
        tuple(documents),
        weights=lambda: getattr(retriever, "corpus_weight_mask", None),
    )
