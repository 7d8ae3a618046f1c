"""How a framework embeds texts with its model, seen rather than guessed, and a copy of the model that does the same.

Frameworks call `encode` each in their own way: with a prompt or without, an instruction in front of the text, line
breaks replaced, fewer dimensions. None of their names is known here. The embedding object is copied with a spy in
place of its model and asked for the vector of a probe; the spy notes how it is called and ends the call there. Nothing
is computed or cached, and neither the object nor the model is touched.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from rag_explain.retrieval.holders import fixed, held_model, holder_state, with_model
from rag_explain.texts.tokens import Role

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

logger = logging.getLogger("rag_explain.retrieval")

_PROBE = "Why was this\nshort text found?"
# Arguments of `encode` that change no number, and the values of others under which it returns embeddings as they are.
_HARMLESS = {"batch_size", "show_progress_bar", "convert_to_numpy", "convert_to_tensor", "device", "pool", "chunk_size"}
_DECIDING = ("prompts", "default_prompt_name", "truncate_dim", "_similarity_fn_name")
_PLAIN = {"precision": (None, "float32"), "output_value": ("sentence_embedding",)}


@dataclass(frozen=True, slots=True)
class Reading:
    """How texts of one role are embedded."""

    prompt: str  # what the model puts in front of a text; its pooling may leave that out
    prefix: str  # what the framework itself puts there
    joins_lines: bool  # whether line breaks become blanks
    normalises: bool
    truncate_dim: int | None
    task: str | None  # what modules that tell queries from documents are told

    def string(self, text: str) -> str:
        """What is given to the model for a text."""
        return self.prefix + (text.replace("\n", " ") if self.joins_lines else text)


@dataclass(frozen=True, slots=True)
class Usage:
    """How a framework uses a model."""

    query: Reading
    document: Reading
    max_length: int | None
    similarity: str | None  # how the vectors compare: a dot product of vectors of length one is a cosine

    @property
    def arguments(self) -> str:
        """What a SentenceTransformer that does the same is made with."""
        prompts = {role: getattr(self, role).prompt + getattr(self, role).prefix for role in ("query", "document")}
        shorter = "" if self.query.truncate_dim is None else f", truncate_dim={self.query.truncate_dim}"
        return f"prompts={prompts}{shorter}"


@dataclass(frozen=True, eq=False)
class Embedder:
    """A framework's embedding object, and how it is asked for the vector of a text: `calls[role](holder, text)`.

    `uncached` gives what is asked for vectors of edited texts where no model is here: the object, past a cache of its
    own, which is the user's and for the user's texts.
    """

    holder: object
    calls: Mapping[Role, Callable[[Any, str], Any]]
    uncached: Callable[[Any], Any] = lambda holder: holder
    _seen: list[tuple[Any, Usage | None]] = field(default_factory=list, init=False, repr=False)

    @property
    def name(self) -> str:
        return type(self.holder).__name__

    @property
    def model(self) -> SentenceTransformer | None:
        """The model that it embeds with, where that is here."""
        return held_model(self.holder)

    @property
    def is_black_box(self) -> bool:
        """Whether it embeds strings, and holds no model that can be looked into."""
        return self.model is None and self.asked_model is not None

    @property
    def asked_model(self) -> str | None:
        """What it says of the model that it asks for vectors; None where it embeds no strings."""
        from rag_explain.scorers.sources import asked_model, embeds_strings

        asked = self.uncached(self.holder)
        return asked_model(asked) if embeds_strings(asked) else None

    def vector(self, query: str) -> NDArray[np.float64]:
        """(e,): what the framework searches with."""
        return np.asarray(self.calls["query"](self.holder, query), np.float64)

    def usage(self, *, is_anew: bool = False) -> Usage | None:
        """How it uses its model, as of now; None where it has none, or does what cannot be told in these words.

        Unless it `is_anew`, seen again only where an attribute on the way to the model, or of the model, is another.
        """
        return self.seen(is_anew=is_anew)[1]

    def seen(self, *, is_anew: bool = False) -> tuple[SentenceTransformer | None, Usage | None]:
        """The model, and how it is used."""
        model = self.model
        if model is None:
            return None, None
        own = {name: value for name, value in vars(model).items() if name in _DECIDING or callable(value)}
        state = type(model), fixed(own), model.max_seq_length, holder_state(self.holder, model)
        seen = self._seen[:1]
        if is_anew or not seen or seen[0][0] != state:
            # What stands in the place of the model's own `encode` may do anything, elsewhere too.
            seen = [(state, None if "encode" in own else self._used(model))]
            self._seen[:] = seen
        return model, seen[0][1]

    def _used(self, model: SentenceTransformer) -> Usage | None:
        spy: Any = _as(_Spy, model)
        query, document = self._reading("query", model, spy), self._reading("document", model, spy)
        if query is None or document is None or query.truncate_dim != document.truncate_dim:
            return None
        similarity = spy.similarity_fn_name  # asking sets a default: not on the caller's model
        if similarity == "dot" and query.normalises and document.normalises:
            similarity = "cosine"
        return Usage(query, document, model.max_seq_length, similarity)

    def _reading(self, role: Role, model: SentenceTransformer, spy: object) -> Reading | None:
        try:
            copied = with_model(self.holder, model, spy)
            if copied is not None:
                self.calls[role](copied, _PROBE)
        except _Noted as noted:
            return noted.reading(model)
        except Exception as error:
            logger.debug("how %s embeds cannot be seen: %s: %s", self.name, type(error).__name__, error)
        return None


def has_model(embedder: Embedder | None) -> TypeGuard[Embedder]:
    """Whether there is an embedding object whose model is here."""
    return embedder is not None and embedder.model is not None


def model_as_used(model: SentenceTransformer, usage: Usage) -> SentenceTransformer:
    """A model whose `encode_query` and `encode_document` embed as the framework does; all modules are shared."""
    used: Any = _as(_AsUsed, model)
    used.used = {"query": usage.query, "document": usage.document}
    used.prompts = {role: reading.prompt + reading.prefix for role, reading in used.used.items()}
    used.tasks = {role: reading.task for role, reading in used.used.items()}
    used.made_from = ref(model)
    used.default_prompt_name = None
    used.truncate_dim = usage.query.truncate_dim
    used.similarity_fn_name = usage.similarity
    result: SentenceTransformer = used
    return result


class _Noted(BaseException):
    """Ends a call that was only to be seen. No error: what retries or reports errors must let it pass."""

    def __init__(self, inputs: object, options: dict[str, Any]) -> None:
        self.inputs, self.options = inputs, options

    def reading(self, model: SentenceTransformer) -> Reading | None:
        """What the call says about the role; None for what a `Reading` cannot express."""
        options = {name: value for name, value in self.options.items() if name not in _HARMLESS}
        texts = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        text = texts[0] if isinstance(texts, list) and len(texts) == 1 else None
        if any(options.pop(name, plain[0]) not in plain for name, plain in _PLAIN.items()) or not isinstance(text, str):
            return None
        name, prompt = options.pop("prompt_name", None), options.pop("prompt", None)
        if prompt is None:
            prompt = model.prompts.get((model.default_prompt_name or "") if name is None else name)
        shown = next((shown for shown in (_PROBE, _PROBE.replace("\n", " ")) if text.endswith(shown)), None)
        truncated, task = options.pop("truncate_dim", None), options.pop("task", None)
        normalises = bool(options.pop("normalize_embeddings", False))
        if shown is None or options:
            return None
        truncate_dim = model.truncate_dim if truncated is None else truncated
        return Reading(prompt or "", text.removesuffix(shown), shown != _PROBE, normalises, truncate_dim, task)


class _Spy:
    """Goes before a model's class: whatever embeds ends in `encode`."""

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        inner: Any = super()
        bound = inspect.signature(inner.encode).bind(*args, **kwargs).arguments
        inputs, more = bound.pop(next(iter(bound))), bound.pop("kwargs", {})
        raise _Noted(inputs, {**bound, **more})

    def encode_multi_process(self, inputs: Any, pool: Any = None, **kwargs: Any) -> Any:
        return self.encode(inputs, **kwargs)

    def start_multi_process_pool(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}  # no process need be started


class _AsUsed:
    """Goes before a model's class: reads and embeds texts as `used` says."""

    used: dict[str, Reading]

    def encode_query(self, inputs: Any, **kwargs: Any) -> Any:
        return self._embedded(self.used["query"], inputs, kwargs)

    def encode_document(self, inputs: Any, **kwargs: Any) -> Any:
        return self._embedded(self.used["document"], inputs, kwargs)

    def _embedded(self, reading: Reading, inputs: Any, kwargs: dict[str, Any]) -> Any:
        model: Any = super()
        texts = reading.string(inputs) if isinstance(inputs, str) else [reading.string(text) for text in inputs]
        told = {} if reading.task is None else {"task": reading.task}
        options = {"prompt": reading.prompt, "normalize_embeddings": reading.normalises, **told}
        return model.encode(texts, **{**kwargs, **options})

    def preprocess(self, inputs: Any, prompt: str | None = None, **kwargs: Any) -> Any:
        """As `encode` would read them; a prompt in which the framework's own prefix is included is taken apart."""
        model: Any = super()
        reading = self.used.get(kwargs.get("task", ""))
        if reading is not None and (prompt or "") == reading.prompt + reading.prefix:
            inputs, prompt = [reading.string(text) for text in inputs], reading.prompt or None
            kwargs["task"] = reading.task
        return model.preprocess(inputs, prompt=prompt, **{name: one for name, one in kwargs.items() if one is not None})


def _as(mixin: type, model: SentenceTransformer) -> Any:
    """A copy of a model, of a class with `mixin` before its own; settings set on it are not the model's."""
    copied = copy.copy(model)
    copied.__class__ = _class(mixin, type(model))
    return copied


@lru_cache(maxsize=16)
def _class(mixin: type, kind: type) -> type:
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
