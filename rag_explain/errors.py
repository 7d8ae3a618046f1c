"""Everything this library raises on purpose.

RagExplainError
├── InvalidInput            a text or an argument that cannot be explained (also a ValueError)
├── UnsupportedModel        an encoder whose embedding this library cannot take apart
│   └── UnsupportedOperation    ... because of one operation inside it, which is named
├── CheckFailed             sum of rows + rest missed the embedding: the explanation would be wrong
├── MissingExtra            an optional dependency is not installed (also an ImportError)
├── FormatError             a serialised object that this version cannot read (also a ValueError)
├── StoreError              the factor store could not do what was asked of it
└── LogError                the log of explanations could not do what was asked of it
"""

from __future__ import annotations


class RagExplainError(Exception):
    """Base of every error raised on purpose by rag_explain."""


class InvalidInput(RagExplainError, ValueError):
    """A text or an argument that cannot be explained."""


class UnsupportedModel(RagExplainError):
    """An encoder whose embedding cannot be taken apart exactly."""


class UnsupportedOperation(UnsupportedModel):
    """An operation inside the encoder for which there is no rule."""


class CheckFailed(RagExplainError):
    """Sum of rows + rest missed the embedding by more than the tolerance."""


class MissingExtra(RagExplainError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f'{package} is not installed: run  pip install "rag-explain[{extra}]"')


class FormatError(RagExplainError, ValueError):
    """A serialised object that this version cannot read."""


class StoreError(RagExplainError):
    """The factor store could not do what was asked of it."""


class LogError(RagExplainError):
    """The log of explanations could not do what was asked of it."""
