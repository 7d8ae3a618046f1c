"""A small client of services that embed as OpenAI's does: POST URL/embeddings, on this machine or far away.

The key is read from the environment for each call, and is in no attribute, message, log or fingerprint.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from typing import Any, Self
from weakref import finalize

import numpy as np

from rag_explain.budget import Budget
from rag_explain.errors import EmbedderStopped, EmbeddingFailed, InvalidInput, ProcessBound, first_line, import_extra
from rag_explain.scorers.sources import Source
from rag_explain.texts.tokens import Role

PREFIX = "openai-compatible:"
_KEY = "OPENAI_API_KEY"
_EXTRA = "remote-embeddings"
_GIVE = f"give the address and the model as {PREFIX}http://localhost:8080/v1#model"
_SECRET = re.compile("key|token|secret|passw|auth|sig", re.IGNORECASE)  # names of what is asked for in an address
# What a server may say to everybody for a while.
_BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
# What it would say of every text.
_REFUSED = {401: "refuses the key", 403: "refuses the key", 404: "knows no such model or address"}
_LONGEST_WAIT = 60.0  # seconds, however long a server asks to wait


class _TryAgain(EmbedderStopped):
    """What may be another answer in a while; `after` so many seconds, where the server said so."""

    def __init__(self, said: str, after: float = 0.0) -> None:
        super().__init__(said)
        self.after = after


class OpenAICompatible(ProcessBound):
    """An embedding model behind an address.

    Args:
        url: what comes before "/embeddings", such as "http://localhost:8080/v1".
        model: what the service calls it.
        key_from: the environment variable that holds the key; None: OPENAI_API_KEY, if there is one.
        prompts: what is put in front of a "query" or a "document", where the index was built so.
        dimensions: asked of models that can give fewer.
        timeout: seconds for each call.
        attempts: how often a text is sent at most while the service is busy; waits grow from `first_wait` seconds.
        batch_size, concurrency: texts in one call, and calls at the same time.
    """

    instead = "make it anew where it is unpickled"

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key_from: str | None = None,
        prompts: Mapping[Role, str] | None = None,
        dimensions: int | None = None,
        timeout: float = 30.0,
        attempts: int = 6,
        first_wait: float = 0.5,
        batch_size: int = 64,
        concurrency: int = 4,
    ) -> None:
        self._http = import_extra("httpx", "httpx", _EXTRA)
        self._tenacity = import_extra("tenacity", "tenacity", _EXTRA)
        try:
            address = self._http.URL(url)
        except (self._http.InvalidURL, TypeError):
            raise InvalidInput(_GIVE) from None
        if address.scheme not in ("http", "https") or not address.host or not model:
            raise InvalidInput(_GIVE)
        # httpx logs each address that it asks.
        if address.userinfo or any(map(_SECRET.search, address.params)):
            raise InvalidInput("leave passwords and keys out of the address: name an environment variable in key_from")
        self.model, self._key_from, self._prompts, self._dimensions = model, key_from, dict(prompts or {}), dimensions
        self._address = address.copy_with(path=f"{address.path.rstrip('/')}/embeddings", fragment=None)
        self._attempts, self._first_wait = attempts, first_wait
        self._client = self._http.Client(timeout=timeout)
        finalize(self, self._client.close)
        self.source = Source(model, self._embed, bool(self._prompts), batch_size, concurrency)

    @classmethod
    def named(cls, name: str) -> Self:
        """From "openai-compatible:URL#model"."""
        url, _, model = name.removeprefix(PREFIX).rpartition("#")
        return cls(url, model)

    def __repr__(self) -> str:
        return f"OpenAICompatible({self.model!r} at {self._address.host})"

    def _embed(self, texts: list[str], role: Role, budget: Budget) -> np.ndarray[Any, Any]:
        """One call, made again while the service is busy; what is sent again counts again."""
        asked = [self._prompts.get(role, "") + text for text in texts]
        again = self._tenacity.Retrying(
            retry=self._tenacity.retry_if_exception_type(_TryAgain),
            stop=self._tenacity.stop_after_attempt(self._attempts),
            wait=self._wait,
            reraise=True,
        )
        for attempt in again:
            with attempt:
                if attempt.retry_state.attempt_number > 1:
                    budget.take(len(texts))
                return self._vectors(self._answer(asked), len(texts))
        raise AssertionError("the last attempt raises")

    def _wait(self, state: Any) -> float:
        error = state.outcome.exception()
        grown: float = self._tenacity.wait_random_exponential(self._first_wait, _LONGEST_WAIT)(state)
        return float(min(max(grown, error.after), _LONGEST_WAIT))

    def _answer(self, texts: list[str]) -> Any:
        """What the service says, as plain data."""
        wanted: dict[str, Any] = {"model": self.model, "input": texts, "encoding_format": "float"}
        wanted |= {} if self._dimensions is None else {"dimensions": self._dimensions}
        try:
            response = self._client.post(self._address, json=wanted, headers=self._headers())
        except self._http.TransportError as error:
            raise _TryAgain(self._told(f"does not answer ({type(error).__name__}): is that the address?")) from None
        if response.status_code == 200:
            try:
                return response.json()
            except ValueError as error:
                raise EmbeddingFailed(self._told(f"does not answer in JSON ({first_line(error)})")) from None
        raise self._refusal(response)

    def _refusal(self, response: Any) -> EmbeddingFailed:
        status, said = response.status_code, _said(response)
        quote = f"({status}{': ' if said else ''}{self._without_key(said)})"
        if status in _BUSY and "insufficient_quota" not in said:
            return _TryAgain(self._told(f"is busy {quote}: go on later"), _seconds(response.headers.get("retry-after")))
        if response.has_redirect_location:  # where the key is not sent after it
            return EmbedderStopped(self._told(f"is at another address ({status}): give that one"))
        if status in _REFUSED or status in _BUSY:
            hint = f": set the environment variable {self._key_from or _KEY}" if status in (401, 403) else ""
            return EmbedderStopped(self._told(f"{_REFUSED.get(status, 'has no quota left')} {quote}{hint}"))
        return EmbeddingFailed(self._told(f"does not embed these texts {quote}"))

    def _headers(self) -> dict[str, str]:
        key = self._key
        if self._key_from is not None and not key:
            raise InvalidInput(f"the environment variable {self._key_from}, which key_from names, is not set")
        if not (key.isascii() and key.isprintable()):  # httpx would log it
            raise InvalidInput(f"the environment variable {self._key_from or _KEY} holds characters that no key has")
        return {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def _key(self) -> str:
        return os.environ.get(self._key_from or _KEY, "").strip()

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def _told(self, what: str) -> str:
        return f"{self.model} at {self._address.host} {what}"

    def _vectors(self, answer: Any, count: int) -> np.ndarray[Any, Any]:
        """(D, e) in the order of the texts: a service may answer in any."""
        try:
            found = {item.get("index", place): _vector(item["embedding"]) for place, item in enumerate(answer["data"])}
            vectors = [found[place] for place in range(count)]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            told = self._told(f"does not give one vector for each of {count} texts ({first_line(error)})")
            raise EmbeddingFailed(told) from None
        if len(found) != count:
            raise EmbeddingFailed(self._told(f"gives {len(found)} vectors for {count} texts"))
        widths = sorted({len(vector) for vector in vectors})
        if len(widths) > 1:
            raise EmbeddingFailed(self._told(f"gives vectors of different lengths ({widths}) at once"))
        if self._dimensions not in (None, *widths):
            raise EmbeddingFailed(self._told(f"gives {widths[0]} dimensions when asked for {self._dimensions}"))
        return np.stack(vectors)


def _vector(value: Any) -> np.ndarray[Any, Any]:
    """Numbers, or the bytes of float32 in base64, which some services give whatever is asked for."""
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value), "<f4")
    return np.asarray(value, np.float32)


def _said(response: Any) -> str:
    """What a service says of an error, in one short line."""
    text = " ".join(response.text[:2000].split())
    try:
        error = response.json()["error"]
        text = error if isinstance(error, str) else f"{error.get('message', '')} {error.get('code') or ''}".strip()
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    return text[:200]


def _seconds(value: str | None) -> float:
    try:
        return max(0.0, float(value or 0))
    except ValueError:  # a date: the waits grow by themselves
        return 0.0
