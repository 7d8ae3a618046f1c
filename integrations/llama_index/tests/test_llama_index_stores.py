"""Every store that people run under LlamaIndex: same results, and scores that are explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stacks import Stack
from tests.support.stacks import llama_index as framework
from tests.support.stacks.promises import hold_what_was_scored, mark_other_vectors


@pytest.mark.parametrize("stack", framework.STACKS, ids=lambda stack: stack.name)
def test_a_wrapped_store_returns_the_same_and_what_is_explained_is_what_it_scored(stack: Stack, tmp_path: Path) -> None:
    hold_what_was_scored(framework, stack, tmp_path)


@pytest.mark.parametrize("stack", framework.STACKS, ids=lambda stack: stack.name)
def test_vectors_of_other_texts_are_marked(stack: Stack, tmp_path: Path) -> None:
    mark_other_vectors(framework, stack, tmp_path)
