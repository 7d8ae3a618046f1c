"""The explanation methods: what a method is, and how one is found by name."""

from __future__ import annotations

from rag_explain.methods.base import EncoderMethod, ExplainedPair, Method, PairMethod, explained
from rag_explain.methods.registry import GROUP, METHODS, find, make

__all__ = ["GROUP", "METHODS", "EncoderMethod", "ExplainedPair", "Method", "PairMethod", "explained", "find", "make"]
