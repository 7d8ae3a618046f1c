"""Whatever model is drawn and whatever is done to it afterwards: what is explained is true, or refused, or marked.

Fifty draws of each; `pytest tests/test_changes.py --draws 500` makes more.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from rag_explain import Explainer
from rag_explain.errors import RagExplainError
from rag_explain.store import Store
from tests.support.changes import change, draw_model, truth
from tests.support.models import TEXTS

QUERY, DOCUMENT = TEXTS


def verdict(explainer: Explainer, own: float | None) -> str:
    """ "true", "refused", "marked", or what is wrong."""
    try:
        explanation = explainer.explain(QUERY, DOCUMENT)
    except RagExplainError as error:
        return "refused" if str(error) else "an error without words"
    if own is None:
        return f"{explanation.score} of a model that cannot encode"
    if explanation.surrogate:
        return "marked"
    return "true" if abs(explanation.score - own) <= 1e-4 * max(1.0, abs(own)) else f"{explanation.score} for {own}"


@pytest.mark.slow
def test_a_model_that_is_changed_under_its_explainer(draws: int) -> None:
    seen: Counter[str] = Counter()
    wrong = []
    for number in range(draws):
        model = draw_model(number)
        try:
            explainer = Explainer(model)
        except RagExplainError:
            seen["refused at once"] += 1
            continue
        assert verdict(explainer, truth(model, QUERY, DOCUMENT)) in ("true", "marked")
        explainer.precompute([DOCUMENT], progress=False)
        assert verdict(explainer, truth(model, QUERY, DOCUMENT)) in ("true", "marked")
        what = change(number, model)
        found = verdict(explainer, truth(model, QUERY, DOCUMENT))
        seen[found] += 1
        if found not in ("true", "refused", "marked"):
            wrong.append((number, what, found))
    print(dict(seen))  # noqa: T201  # with -s, how the draws went
    assert wrong == []
    assert seen["true"] + seen["marked"] > draws / 10
    assert seen["refused at once"] < draws / 5


def keep(number: int, folder: str) -> None:
    """In one process: precompute with the model as it is drawn."""
    try:
        with Explainer(draw_model(number), store=Store(folder, precision="fp32")) as explainer:
            explainer.precompute([DOCUMENT], progress=False)
    except RagExplainError:
        return


def serve(number: int, folder: str) -> tuple[str, str]:
    """In another one: explain with the changed model from the same store."""
    model = draw_model(number)
    what = change(number, model)
    own = truth(model, QUERY, DOCUMENT)
    try:
        with Explainer(model, store=Store(folder, precision="fp32")) as explainer:
            return verdict(explainer, own), what
    except RagExplainError:
        return "refused", what


@pytest.mark.slow
def test_a_changed_model_in_another_process_over_the_same_store(draws: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as builder, ProcessPoolExecutor(1, context) as server:
        folders = [str(tmp_path / str(number)) for number in range(draws)]
        list(builder.map(keep, range(draws), folders))
        found = list(server.map(serve, range(draws), folders))
    wrong = [(number, *one) for number, one in enumerate(found) if one[0] not in ("true", "refused", "marked")]
    assert wrong == []
    assert sum(one == "true" for one, _ in found) > draws / 4
