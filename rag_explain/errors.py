"""Everything this library raises on purpose."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar, NoReturn, Self, SupportsIndex


class RagExplainError(Exception):
    """Base of every error raised on purpose by rag_explain."""


class InvalidInput(RagExplainError, ValueError):
    """A text or an argument that cannot be explained."""


class UnsupportedModel(RagExplainError):
    """An encoder whose embedding cannot be taken apart exactly."""


class UnsupportedOperation(UnsupportedModel):
    """An operation inside the encoder, which is named, has no rule."""


class ModelChanged(InvalidInput):
    """The model is not the one that an Explainer was made of any more."""

    @classmethod
    def because(cls, what: str) -> Self:
        return cls(f"the model was changed after the Explainer was made ({what}): make a new one")


class EmbeddingFailed(RagExplainError):
    """What embeds strings for us failed, or gave something else than one vector for each of them."""


class EmbedderStopped(EmbeddingFailed):
    """What embeds strings cannot be asked any more for now, for any text."""


class BudgetSpent(EmbedderStopped):
    """No more texts may be sent to what embeds them: `max_calls` is spent."""


class CheckFailed(RagExplainError):
    """Sum of rows + rest missed the embedding by more than the tolerance: the explanation would be wrong."""


class DeviceFull(RagExplainError):
    """The device that computes has no room for one text, however little of it is computed at once."""


class MissingExtra(RagExplainError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f'{package} is not installed: run  pip install "rag-explain[{extra}]"')


def import_extra(module: str, package: str, extra: str) -> Any:
    """A module of an optional dependency; `MissingExtra` says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(package, extra) from error


class FormatError(RagExplainError, ValueError):
    """A serialised object that this version cannot read."""


class StoreError(RagExplainError):
    """The factor store could not do what was asked of it."""


class LogError(RagExplainError):
    """The log of explanations could not do what was asked of it."""


@contextmanager
def in_words(kind: type[RagExplainError], what: str, advice: str = "") -> Iterator[None]:
    """What is raised inside becomes one sentence of this kind, with the original as its cause; our own errors stay."""
    try:
        yield
    except RagExplainError:
        raise
    except Exception as error:
        raise kind(f"{what} ({first_line(error)}){advice}") from error


def first_line(error: Exception) -> str:
    """What an exception of another library says, short enough for a sentence."""
    said = str(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def whole_number(value: object, name: str) -> int:
    """The value as an int, of numpy's kinds too; anything but a whole number is refused."""
    if type(value) is int:  # every passage is asked for two: a protocol is slow to ask
        return value
    if not isinstance(value, bool) and isinstance(value, SupportsIndex):
        try:
            return operator.index(value)
        except TypeError:  # an array of several numbers looks like one
            pass
    raise InvalidInput(f"{name} must be a whole number, not {value!r}")


class ProcessBound:
    """An object of one process, with threads, locks and a model: a copy of it is itself, and it cannot be pickled."""

    instead: ClassVar[str]  # what to do instead of pickling it

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise InvalidInput(f"{type(self).__name__} cannot be pickled: {self.instead}")
