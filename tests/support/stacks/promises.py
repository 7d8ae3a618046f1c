"""What must be true of every store, as one test each, for the frameworks' own test modules to call."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from rag_explain.results.notices import UNCHECKED
from tests.support.models import CORPUS, tiny
from tests.support.stacks import HEADER, Corpus, Stack

QUERIES = ["the cat?", "boats and the moon", "a recipe for the summer"]


def corpus_of(folder: Path, header: str = "") -> Corpus:
    """A few texts, and a tiny model in a folder."""
    tiny("bert").save(str(folder / "model"))
    return Corpus(CORPUS, str(folder / "model"), folder, header)


def hold_what_was_scored(framework: ModuleType, stack: Stack, folder: Path) -> None:
    """Same texts, order and scores; scores are the explained similarity; `precompute()` lists what is in the store."""
    if not stack.is_installed:
        pytest.skip(f"{stack.package} is not installed")
    with stack.made(corpus_of(folder), stack.setting) as plain:
        seen = framework.seen(plain, QUERIES)
    assert seen.wrapped == seen.found
    assert seen.metrics == {stack.metric}
    assert seen.reasons == frozenset()
    assert UNCHECKED not in seen.notes
    assert max(abs(gap) for gap in seen.gaps if gap is not None) < 1e-3
    assert None not in seen.gaps
    assert seen.built == {"built": len(CORPUS), "kept": len(CORPUS), "failed": 0}


def mark_other_vectors(framework: ModuleType, stack: Stack, folder: Path) -> None:
    """An index that was filled with a header in front of each text is not what is explained."""
    if not stack.is_installed:
        pytest.skip(f"{stack.package} is not installed")
    with stack.made(corpus_of(folder, HEADER), stack.setting) as plain:
        seen = framework.seen(plain, QUERIES)
    assert seen.wrapped == seen.found
    assert all(seen.stand_ins)
