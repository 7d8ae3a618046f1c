"""The question and the answer of a run, in what a framework's runs take and give.

That is a text in the framework's own words (a string, a message), or a state that holds one: a mapping, a dataclass, a
pydantic model. Only where a text stands tells what it is, so one under another key is never taken for it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_explain.errors import InvalidInput

_LOGGER = logging.getLogger("rag_explain.log")

# Where a text stands in a state: under a name, or where a function of the state finds it.
Key = str | Callable[[Any], Any]
# The names under which it is looked for unless the user says where it stands: the first that holds a text.
QUESTION_KEYS = ("question", "query", "input", "messages")
ANSWER_KEYS = ("answer", "output", "result", "generation", "response", "messages")
_FIELDS = ("model_fields", "__dataclass_fields__", "__attrs_attrs__", "_fields")  # pydantic, dataclass, attrs, tuple


@dataclass(frozen=True)
class Lookup:
    """How a run's question, or its answer, is found.

    Args:
        option: what the user knows `key` by.
        key: where the user says that it stands.
        names: where it is looked for otherwise, and inside of what is found.
        text: what the framework itself knows as a text; None for all else.
    """

    option: str
    key: Key | None
    names: Sequence[str]
    text: Callable[[Any], str | None]

    def __post_init__(self) -> None:
        if not (self.key is None or isinstance(self.key, str) or callable(self.key)):
            kind = type(self.key).__name__
            raise InvalidInput(f"{self.option} must be the name of a key or a function of the state, not {kind}")

    def find(self, state: Any, counts: Callable[[str], bool] = lambda name: True) -> str | None:
        """The text, as far as it can be told; `counts` says of a name whether what stands there is of this run."""
        if state is None:  # it failed, or gives nothing
            return None
        try:
            if callable(self.key):
                return self._text(self.key(state))
            return self._text(state, [name for name in ([self.key] if self.key else self.names) if counts(name)])
        except Exception as error:  # the user's function, or a state that cannot be read
            kinds = type(state).__name__, type(error).__name__  # a message may quote the text
            _LOGGER.warning("%s: nothing can be told from a %s: %s", self.option, *kinds)
            return None

    def _text(self, state: Any, names: Sequence[str] | None = None) -> str | None:
        text = self.text(state)
        if text is not None:
            return text
        if type(state) is tuple:  # such as an answer and its documents
            texts = [text for one in state if (text := self._text(one)) is not None]
            return texts[0] if len(texts) == 1 else None
        held = (member(state, name) for name in (self.names if names is None else names))
        return next((text for value in held if value is not None and (text := self._text(value)) is not None), None)


def member(state: Any, name: str) -> Any:
    """What a state holds under a name; None where it holds nothing, or is no state."""
    if isinstance(state, Mapping):
        return state.get(name)
    return getattr(state, name, None) if any(hasattr(type(state), mark) for mark in _FIELDS) else None
