"""What people rank by: each kind of model behind one interface."""

from __future__ import annotations

from rag_explain.scorers.base import Scorer
from rag_explain.scorers.resolve import resolve

__all__ = ["Scorer", "resolve"]
