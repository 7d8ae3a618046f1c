"""One Explainer per model object, which nothing process-wide keeps alive."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from pydantic import BaseModel, PrivateAttr

from rag_explain import explainer as explainer_module
from rag_explain.errors import InvalidInput
from rag_explain.explainer import Explainer
from rag_explain.retrieval import HitExplainer, RetrievedDocument, held_model
from tests.support.models import CORPUS, tiny

QUERY = "where is the cat?"


def documents() -> list[RetrievedDocument]:
    return [RetrievedDocument(id="a", text=CORPUS[0])]


def test_wrappers_around_one_model_share_one_explainer_and_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, checks = tiny(dtype=torch.float32), []
    make = explainer_module.make

    def counted(*arguments: object) -> object:
        checks.append(arguments)
        return make(*arguments)

    monkeypatch.setattr(explainer_module, "make", counted)
    one, other = HitExplainer(model), HitExplainer(model)
    made: list[Explainer] = []
    threads = [threading.Thread(target=lambda w=w: made.append(w.explainer)) for w in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0] is made[1]
    assert len(checks) == 1
    assert one.precompute([CORPUS[0]], progress=False).built == 1
    assert other.precompute([CORPUS[0]], progress=False).built == 0
    assert HitExplainer(tiny(dtype=torch.float32)).explainer is not made[0]


def test_a_model_that_was_changed_gets_a_new_explainer_by_itself() -> None:
    model = tiny(dtype=torch.float32)
    one, other = HitExplainer(model), HitExplainer(model)
    before = one.explainer
    assert other.explainer is before
    model[1].pooling_mode = "cls"
    (hit,) = one.hits(QUERY, documents())
    own = float(model.similarity(model.encode_query(QUERY), model.encode_document(CORPUS[0])))
    assert hit.explanation is not None
    assert hit.explanation.score == pytest.approx(own, abs=1e-5)
    assert one.explainer is other.explainer is not before
    given = HitExplainer(before)  # the user's own is not replaced: it refuses
    (hit,) = given.hits(QUERY, documents())
    assert hit.explanation is None
    assert "make a new one" in (hit.reason or "")


def test_an_explainer_that_was_given_is_used_as_it_is() -> None:
    mine = Explainer(tiny(dtype=torch.float32))
    assert HitExplainer(mine).explainer is HitExplainer(mine).explainer is mine
    with pytest.raises(InvalidInput, match="explainer must be an Explainer or a model to make one from, not int"):
        HitExplainer(3).explainer  # type: ignore[arg-type]  # noqa: B018


def test_the_model_and_its_explainer_go_with_the_last_wrapper() -> None:
    model = tiny(dtype=torch.float32)
    wrapper = HitExplainer(model)
    (hit,) = wrapper.hits(QUERY, documents())
    assert hit.explanation is not None
    alive = [weakref.ref(model), weakref.ref(wrapper.explainer)]
    del model, wrapper
    gc.collect()
    assert all(one() is not None for one in alive)  # its evidence, say, may still be asked for
    assert hit.evidence is not None
    del hit
    gc.collect()
    assert [one() for one in alive] == [None, None]


def test_a_pending_hit_can_still_be_explained_when_its_wrapper_is_gone() -> None:
    (hit,) = HitExplainer(tiny(dtype=torch.float32)).hits(QUERY, documents())
    gc.collect()
    assert hit.explanation is not None


def test_the_model_is_found_inside_what_holds_it_whatever_the_attribute_is_called() -> None:
    class Private(BaseModel):
        _hidden: object = PrivateAttr(default=None)

    model = tiny(dtype=torch.float32)
    private = Private()
    private._hidden = model
    for holder in (model, private, SimpleNamespace(client=model), SimpleNamespace(anything=model, same=model)):
        assert held_model(holder) is model
    assert held_model(None, SimpleNamespace(client=model)) is model
    for holder in (None, SimpleNamespace(client="https://remote"), object(), {"client": model}):
        assert held_model(holder) is None
    assert held_model(SimpleNamespace(query=model, document=tiny(dtype=torch.float32))) is None  # which one?


class Slotted:
    """Keeps its model without a dictionary."""

    __slots__ = ("model",)

    def __init__(self, model: object) -> None:
        self.model = model


def test_a_model_is_found_inside_an_object_around_its_holder() -> None:
    model = tiny(dtype=torch.float32)
    inner = SimpleNamespace(_client=model, name="plain data is not looked into")
    assert held_model(SimpleNamespace(embeddings=inner)) is model
    assert held_model(SimpleNamespace(underlying=SimpleNamespace(embeddings=inner))) is model
    assert held_model(Slotted(model)) is model
    assert held_model(SimpleNamespace(text="no model", others=[model])) is None
