"""Anything that embeds strings, here or far away: of its model nothing is seen but vectors.

What can be known of it is measured when it is made, with four short texts in each role and one of them again: how its
vectors look, how far two vectors of one text are apart (its noise), and who it is. Afterwards a probe goes along with
what is sent anyway, once an hour or a thousand texts: a model that answers otherwise is another one.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rag_explain.budget import Budget, at_most
from rag_explain.encoder.batch import Batch
from rag_explain.errors import (
    EmbeddingFailed,
    InvalidInput,
    ModelChanged,
    ProcessBound,
    RagExplainError,
    first_line,
    whole_number,
)
from rag_explain.probes import TEXTS, Probes
from rag_explain.results.notices import TAKEN, Notice
from rag_explain.scorers.base import Scorer
from rag_explain.scorers.sources import Source, source_of
from rag_explain.texts.passage import Passage, as_passages
from rag_explain.texts.segments import part_spans
from rag_explain.texts.tokens import Role, Token

Vector = NDArray[np.float32]
Key = tuple[Role, str]

# Vectors that are kept at hand: what is asked for twice is sent once. 24 MB at 1536 dimensions.
_KEPT = 4096
_EVERY, _EVERY_TEXTS = 3600.0, 1000  # seconds, or texts, after which a probe is sent along again
# Servers compute the last digits otherwise each time, with whatever else is in their batch.
_ROUNDING = 1e-3
_MOST_NOISE = 0.25
# Keys that a service, or what asks it, may quote in an error: it is shown, and logged.
_KEYS = re.compile(r"""(?i)(\bbearer |\bsk-|(?<![a-z])key(?: provided)?[=:] ?['"]?|token=['"]?)[^\s'"&,;)]+""")
_TAKEN = Notice(
    TAKEN,
    "The embedding of the whole document is the vector that the index keeps for it, and was not paid for again: such "
    "vectors were compared with this model's for another document of the index.",
    "note",
    "document",
)


class BlackBox(Scorer, ProcessBound):
    """Something that embeds strings, compared by cosine or dot product.

    Args:
        embed: a function of a list of texts (and of `role`, where it takes that), or an object with LangChain's,
            LlamaIndex's or sentence-transformers' methods.
        name: what to call it.
        measure: how an index compares its vectors.
        batch_size, concurrency: how many texts are given at once, and how many calls run at the same time.
        max_calls: how many texts are sent at most, retries included; None: no limit.
    """

    instead = "make it anew where it is unpickled"
    is_metered = True

    def __init__(
        self,
        embed: Any,
        *,
        name: str | None = None,
        measure: Literal["cosine", "dot"] = "cosine",
        batch_size: int | None = None,
        concurrency: int | None = None,
        max_calls: int | None = None,
    ) -> None:
        source = embed if isinstance(embed, Source) else source_of(embed)
        if source is None:
            raise InvalidInput(f"{type(embed).__name__} does not embed strings: give a function of a list of texts")
        if measure not in ("cosine", "dot"):
            raise InvalidInput(f"measure must be 'cosine' or 'dot', not {measure!r}")
        self._source, self.name, self.measure = source, name or source.name, measure
        self.made_for: object = embed  # kept as long as this is
        self._batch_size = _positive(batch_size, source.batch_size, "batch_size")
        self._concurrency = _positive(concurrency, source.concurrency, "concurrency")
        self.methods = ("occlusion", "shapley")
        self.budget = Budget(max_calls)
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self._concurrency)  # of all threads together
        self._kept: OrderedDict[Key, Vector] = OrderedDict()
        self._taken: set[Key] = set()  # those of them that an index gave
        self._width: int | None = None
        self._changed: str | None = None
        self._probed, self.noise = self._measured()
        self._kept.update(self._probed)
        self.tolerance = max(_ROUNDING, 4 * self.noise)
        self._next_look, self._next_count = self._after()
        self._digest = hashlib.blake2b(repr((source.name, measure, self._width)).encode(), digest_size=16).hexdigest()

    @property
    def fingerprint(self) -> str:
        if self._changed is not None:
            raise ModelChanged.because(self._changed)
        return self._digest

    @property
    def probes(self) -> Probes:
        return Probes.of(self._probed[self._key(text, role)] for role in get_args(Role) for text in TEXTS)

    def at_most(self, max_calls: int | None) -> AbstractContextManager[None]:
        """Inside the block no more than this many texts are sent: for one query, say."""
        return at_most(max_calls)

    def describe(self) -> dict[str, str]:
        roles = "queries and documents each in their own way" if self._source.has_roles else "all texts alike"
        noise = f"off by {self.noise:.1e} of its length" if self.noise > _ROUNDING else "the same again"
        return {**super().describe(), "embeds": roles, "a text's vector": noise, "texts sent": str(self.budget.sent)}

    def read(self, passages: Sequence[Passage], role: Role) -> Batch:
        """By words, which are all that is known of how it reads."""
        for passage in passages:
            if not passage.string.strip():
                raise InvalidInput("the text has no words: give a text that is not empty")
        tokens = tuple(
            tuple(Token(passage.text[a:b], a, b) for a, b in part_spans(passage.text)) for passage in passages
        )
        taken = [role == "document" and self._key(passage.string, role) in self._taken for passage in passages]
        notices = tuple((_TAKEN,) if is_taken else () for is_taken in taken)
        return Batch(passages=tuple(passages), role=role, tokens=tokens, notices=notices, fingerprint=self.fingerprint)

    def score(self, query: str, documents: Sequence[str | Passage]) -> NDArray[np.float64]:
        asked = self.embed([query], "query")[0].astype(np.float64)
        found = self.embed(documents, "document").astype(np.float64)
        product: NDArray[np.float64] = found @ asked
        if self.measure == "cosine":
            product /= np.maximum(np.linalg.norm(found, axis=1) * np.linalg.norm(asked), np.finfo(np.float32).tiny)
        return product

    def embed(self, passages: Sequence[str | Passage], role: Role) -> NDArray[np.float32]:
        """Each text once, as long as its vector is at hand; what came before something failed is kept."""
        if not passages:
            return np.zeros((0, self._width or 0), np.float32)
        keys = [self._key(passage.string, role) for passage in as_passages(passages)]
        found = self._at_hand(keys)
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing:
            found |= self._sent(self._with_probe(missing))
        return np.stack([found[key] for key in keys])

    def take(self, passages: Sequence[Passage], vectors: Sequence[Any]) -> None:
        for passage, vector in zip(passages, vectors, strict=True):
            key, given = self._key(passage.string, "document"), np.array(vector, np.float32)
            if given.shape == (self._width,) and np.isfinite(given).all():
                with self._lock:
                    if key not in self._kept:
                        self._taken.add(key)
                        self._keep({key: given})

    def at_hand(self, passages: Sequence[Passage], role: Role) -> list[Vector | None]:
        keys = [self._key(passage.string, role) for passage in passages]
        found = self._at_hand(keys)
        return [found.get(key) for key in keys]

    @property
    def texts_left(self) -> int | None:
        return None if math.isinf(left := self.budget.left) else int(left)

    def _key(self, text: str, role: Role) -> Key:
        return (role if self._source.has_roles else "document"), text

    def _at_hand(self, keys: Sequence[Key]) -> dict[Key, Vector]:
        with self._lock:
            found = {key: self._kept[key] for key in keys if key in self._kept}
            for key in found:
                self._kept.move_to_end(key)
        return found

    def _sent(self, keys: Sequence[Key]) -> dict[Key, Vector]:
        """The vectors of these texts, sent in batches; the first trouble is raised when all calls have ended."""
        batches = self._batches(keys)
        found: dict[Key, Vector] = {}
        if self._concurrency == 1 or len(batches) == 1:
            for batch in batches:
                found |= self._answer(batch)
            return found
        with ThreadPoolExecutor(self._concurrency, "rag_explain") as pool:
            jobs = [pool.submit(copy_context().run, self._answer, batch) for batch in batches]
            try:
                for job in jobs:
                    found |= job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return found

    def _batches(self, keys: Sequence[Key]) -> list[Sequence[Key]]:
        return [keys[first : first + self._batch_size] for first in range(0, len(keys), self._batch_size)]

    def _answer(self, keys: Sequence[Key]) -> dict[Key, Vector]:
        """One call; of texts that may not all be sent, the first ones are."""
        granted = self.budget.grant(len(keys))
        found = self._asked(keys[:granted]) if granted else {}
        self._look(found)
        with self._lock:
            self._keep(found)
        if granted < len(keys):
            raise self.budget.spent()
        return found

    def _keep(self, found: Mapping[Key, Vector]) -> None:
        """At hand from now on, in place of what was longest not asked for."""
        self._kept.update(found)
        while len(self._kept) > _KEPT:
            self._taken.discard(self._kept.popitem(last=False)[0])

    def _asked(self, keys: Sequence[Key]) -> dict[Key, Vector]:
        """What the source gives for texts of one role, checked."""
        role, texts = keys[0][0], [text for _, text in keys]
        try:
            with self._slots:
                given = self._source.call(texts, role, self.budget)
            vectors = np.array(given, dtype=np.float32)  # a copy: a function may use its memory again
        except RagExplainError:
            raise
        except Exception as error:
            said = _KEYS.sub(r"\1***", first_line(error))
            raise EmbeddingFailed(f"{self.name} failed ({said})") from error
        if vectors.ndim != 2 or len(vectors) != len(texts) or not vectors.size:
            shape = " x ".join(map(str, vectors.shape)) or "one number"
            raise EmbeddingFailed(f"{self.name} must give one vector for each of {len(texts)} texts, not {shape}")
        if self._width not in (None, vectors.shape[1]):
            raise EmbeddingFailed(f"{self.name} gave vectors of {vectors.shape[1]} dimensions after {self._width}")
        if not np.isfinite(vectors).all():
            raise EmbeddingFailed(f"{self.name} gave a vector with NaN or infinity in it")
        self._width = vectors.shape[1]
        return dict(zip(keys, vectors, strict=True))

    def _measured(self) -> tuple[dict[Key, Vector], float]:
        """What it gives for the probes in each role, and how far it is off when one of them is asked for again."""
        roles: tuple[Role, ...] = get_args(Role) if self._source.has_roles else ("document",)
        found: dict[Key, Vector] = {}
        again = [self._key(TEXTS[0], "document")]
        for batch in [*(one for role in roles for one in self._batches([(role, text) for text in TEXTS])), again]:
            self.budget.take(len(batch))
            before, answer = found, self._asked(batch)
            found = {**answer, **found}
        noise = Probes.of(before[key] for key in again).distance(Probes.of(answer.values()))
        if not noise <= _MOST_NOISE:
            raise EmbeddingFailed(
                f"{self.name} gives a text another vector each time (off by {noise:.0%}): no difference means anything"
            )
        if len({vector.tobytes() for vector in found.values()}) == 1:
            raise EmbeddingFailed(f"{self.name} gives every text the same vector: no difference means anything")
        return found, noise

    def _with_probe(self, keys: Sequence[Key]) -> list[Key]:
        """The texts, and now and then a probe along with them."""
        with self._lock:
            if time.monotonic() < self._next_look and self.budget.sent < self._next_count:
                return list(keys)
            self._next_look, self._next_count = self._after()
        return [self._key(TEXTS[0], keys[0][0]), *keys]

    def _after(self) -> tuple[float, int]:
        """When a probe is to be sent along: at this time, or when so many texts were sent."""
        return time.monotonic() + _EVERY, self.budget.sent + _EVERY_TEXTS

    def _look(self, found: dict[Key, Vector]) -> None:
        """Compare a probe that was sent along with what was given for it when this was made."""
        for key in found.keys() & self._probed.keys():
            off = Probes.of([self._probed[key]]).distance(Probes.of([found[key]]))
            if not off <= self.tolerance:
                self._changed = f"it gives a text another vector than then, off by {off:.1%}"
                raise ModelChanged.because(self._changed)


def _positive(value: int | None, otherwise: int, name: str) -> int:
    number = otherwise if value is None else whole_number(value, name)
    if number < 1:
        raise InvalidInput(f"{name} must be at least 1, not {number}")
    return number
