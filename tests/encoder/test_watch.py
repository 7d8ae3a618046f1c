"""A model that is changed after its Explainer was made is noticed before an answer is given."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from peft import LoraConfig
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from torch import nn

from rag_explain import Explainer
from rag_explain.errors import ModelChanged, UnsupportedModel
from tests.encoder.test_identity import LORA, Scaled, _with_lora
from tests.support.models import TEXTS, tiny


def _plain() -> SentenceTransformer:
    return tiny("bert", after=lambda: [Scaled(factor=2.0)])


def _assign(model):
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()}, assign=True)


def _replace_parameter(model):
    layer = model[0].auto_model.encoder.layer[0].intermediate.dense
    layer.weight = nn.Parameter(layer.weight * 2)


def _replace_module(model):
    torch.manual_seed(5)
    model[0].auto_model.encoder.layer[1].output.dense = nn.Linear(32, 16).to(torch.float64)


def _append_module(model):
    model.append(Dense(16, 16).to(torch.float64))


def _add_tokens(model):
    model.tokenizer.add_tokens(["barking loudly"])
    model[0].auto_model.resize_token_embeddings(len(model.tokenizer), mean_resizing=False)


def _lower(model):
    model.tokenizer.backend_tokenizer.normalizer = None


def _attribute(path: str, value):
    def change(model):
        *parents, name = path.split(".")
        owner = model
        for parent in parents:
            owner = owner[int(parent)] if parent.isdigit() else getattr(owner, parent)
        setattr(owner, name, value)

    change.__name__ = path
    return change


def _hook(model):
    return model[1].register_forward_hook(
        lambda module, args, output: {**output, "sentence_embedding": output["sentence_embedding"] + 1.0}
    )


def _encode(model):
    encode = model.encode
    model.encode = lambda *args, **kwargs: encode(*args, **kwargs) + 1.0


class Mirrored(Scaled):
    """Has the parts of the class that it is put in place of."""

    def forward(self, features):
        features["sentence_embedding"] = features["sentence_embedding"].relu()
        return super().forward(features)


def _class(model):
    model[2].__class__ = Mirrored


def _similarity(model):
    model.similarity_fn_name = "cosine"
    model._similarity = lambda one, other: -torch.cdist(*map(torch.atleast_2d, map(torch.as_tensor, (one, other))))


CHANGES = {
    "assigned weights": _assign,
    "a class": _class,
    "a function that compares": _similarity,
    "a replaced parameter": _replace_parameter,
    "a replaced module": _replace_module,
    "an appended module": _append_module,
    "an adapter": lambda model: model.add_adapter(LoraConfig(init_lora_weights=False, **LORA)),
    "pooling": _attribute("1.pooling_mode", "cls"),
    "similarity": _attribute("similarity_fn_name", "dot"),
    "a tokenizer's limit": _attribute("tokenizer.model_max_length", 5),
    "the length limit": _attribute("max_seq_length", 5),
    "a prompt": lambda model: model.prompts.update(query="search: "),
    "other prompts": _attribute("prompts", {"query": "search: "}),
    "dimensions": _attribute("truncate_dim", 8),
    "tokens": _add_tokens,
    "a normaliser": _lower,
    "a plain attribute": _attribute("2.factor", 3.0),
    "an attribute of an object": _attribute("2.settings.power", 3.0),
    "an activation": _attribute("2.act", torch.relu),
    "a scaling": _attribute("0.auto_model.encoder.layer.1.attention.self.scaling", 2.0),
    "forward": _attribute("2.forward", lambda features: features),
    "a hook that changes the output": _hook,
    "encode itself": _encode,
    "a buffer": lambda model: model[2].register_buffer("shift", torch.ones(16, dtype=torch.float64)),
    "half precision": lambda model: model.to(torch.float32),
}
UNEXPLAINED = (_hook, _encode, _similarity)  # refused by a new Explainer too


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_model_is_refused_or_explained_as_it_is_now(change):
    model = _plain()
    explainer = Explainer(model)
    before = explainer.explain(*TEXTS).score
    explainer.precompute([TEXTS[1]], progress=False)
    change(model)
    query, document = model.encode_query(TEXTS[0]), model.encode_document(TEXTS[1])
    now = float(model.similarity(query, document))
    try:
        explained = explainer.explain(*TEXTS).score
    except ModelChanged:
        with pytest.raises(ModelChanged, match="make a new one"):
            explainer.scorer.embed(TEXTS, "query")
        explained = now if change in UNEXPLAINED else Explainer(model).explain(*TEXTS).score
    assert explained == pytest.approx(now, abs=1e-5)
    assert change is CHANGES["half precision"] or abs(now - before) > 1e-6  # the change is one


ADAPTED = {
    "disabled": lambda model: model.disable_adapters(),
    "another alpha": lambda model: model[0].auto_model.encoder.layer[0].attention.self.query.scaling.update(a=9.0),
    "another adapter": lambda model: (model.disable_adapters(), model.enable_adapters(), model.delete_adapter("a")),
}


@pytest.mark.parametrize("change", ADAPTED.values(), ids=ADAPTED)
def test_an_adapter_that_is_changed_is_noticed(change):
    model = _with_lora()
    explainer = Explainer(model)
    explainer.explain(*TEXTS)
    change(model)
    with pytest.raises(ModelChanged):
        explainer.explain(*TEXTS)


IN_PLACE = {
    "a buffer": lambda model: model[2].shift.add_(0.5),
    "a weight": lambda model: next(model.parameters()).mul_(1.5),
    "a weight through .data": lambda model: [one.data.mul_(1.5) for one in model.parameters()],
}


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
def test_what_is_written_in_place_is_another_model_and_explained_as_it_is(write):
    model = _plain()
    explainer = Explainer(model)
    explainer.precompute([TEXTS[1]], progress=False)
    before = explainer.explain(*TEXTS)
    with torch.no_grad():
        write(model)
    after = explainer.explain(*TEXTS)
    own = float(model.similarity(model.encode_query(TEXTS[0]), model.encode_document(TEXTS[1])))
    assert after.score == pytest.approx(own, abs=1e-6)
    assert abs(own - before.score) > 1e-6
    assert after.fingerprint != before.fingerprint


HARMLESS = {
    "it is used": lambda model: (model.encode(TEXTS), model.similarity(model.encode("a"), model.encode("b"))),
    "its tokenizer is used": lambda model: model.tokenizer(TEXTS, truncation=True, max_length=3, padding=True),
    "it is put into training": lambda model: model.train(),
    "a hook only looks": lambda model: model[1].register_forward_hook(lambda module, args, output: None),
    "an attribute gets its own value again": _attribute("2.factor", 2.0),
    "a prompt that no role uses": lambda model: model.prompts.update(other="x: "),
    "it is moved where it is": lambda model: model.to("cpu"),
    "gradients are asked for": lambda model: model.requires_grad_(False),
    "gradient checkpointing": lambda model: model[0].auto_model.gradient_checkpointing_enable(),
    "an attribute that nothing reads": lambda model: (setattr(model, "step", 1), setattr(model[2], "note", "x")),
    "an attribute that nothing reads changes": lambda model: [setattr(model, "step", 1 + model.step)],
    "an equal tokenizer": lambda model: _copy_tokenizer(model[0]),
    "attentions are asked for once": lambda model: model[0].auto_model(
        **model.tokenizer(TEXTS[0], return_tensors="pt"), output_attentions=True
    ),
}


def _copy_tokenizer(transformer):
    transformer.processor = transformer.input_formatter.processor = copy.deepcopy(transformer.processor)


@pytest.mark.parametrize("use", HARMLESS.values(), ids=HARMLESS)
def test_what_changes_nothing_is_not_refused(use):
    model = _plain()
    model.step = 0
    explainer = Explainer(model)
    before = explainer.explain(*TEXTS)
    use(model)
    after = explainer.explain(*TEXTS)
    assert after.score == pytest.approx(before.score, abs=1e-6)
    assert after.fingerprint == before.fingerprint


class Reading(nn.Module):
    """Reads an attribute that it does not have at first; `by_name` in a way that its own code does not show."""

    def __init__(self, by_name):
        super().__init__()
        self.by_name = by_name

    def forward(self, features):
        gain = getattr(self, "".join(["ga", "in"]), 1.0) if self.by_name else getattr(self, "gain", 1.0)
        features["sentence_embedding"] = features["sentence_embedding"] + gain
        return features


@pytest.mark.parametrize("by_name", [False, True])
def test_an_attribute_that_is_read_is_a_change_however_it_is_read(by_name):
    model = tiny("bert", after=lambda: [Reading(by_name)])
    explainer = Explainer(model)
    model[2].gain = 1.0  # which changes nothing yet
    try:
        before = explainer.explain(*TEXTS).score
    except ModelChanged:
        explainer = Explainer(model)
        before = explainer.explain(*TEXTS).score
    model[2].gain = 2.0
    with pytest.raises(ModelChanged, match="gain"):
        explainer.explain(*TEXTS)
    assert abs(Explainer(model).explain(*TEXTS).score - before) > 1e-4


def test_modules_in_another_order_are_another_model():
    model = tiny("bert", after=lambda: [Scaled(factor=2.0), Dense(16, 16)])
    explainer = Explainer(model)
    own = model.__dict__["_modules"]
    own["2"] = own.pop("2")  # runs last from now on
    with pytest.raises(ModelChanged):
        explainer.explain(*TEXTS)


@pytest.mark.parametrize("name", ["qwen3", "modernbert", "bert"])
def test_a_model_in_another_precision_is_explained_in_it(name):
    model = tiny(name, dtype=torch.float32)
    explainer = Explainer(model)
    before = explainer.explain(*TEXTS)
    model.to(torch.bfloat16)
    own = float(model.similarity(model.encode_query(TEXTS[0]), model.encode_document(TEXTS[1])))
    after = explainer.explain(*TEXTS)
    assert after.score == pytest.approx(own, abs=5e-2)
    assert after.fingerprint != before.fingerprint


def test_buffers_that_moved_with_their_values_are_the_same_model():
    model = _plain()
    explainer = Explainer(model)
    before = explainer.explain(*TEXTS)
    model[2].shift = model[2].shift.clone()  # as `to` does on a move to another device and back
    assert explainer.explain(*TEXTS).fingerprint == before.fingerprint


def test_a_buffer_that_was_replaced_by_an_equal_one_is_still_shared():
    model = _plain()
    explainer = Explainer(model)
    explainer.explain(*TEXTS)
    model.to(torch.float32).to(torch.float64)  # every buffer is a new tensor, and holds what it held
    explainer.explain(*TEXTS)
    model[2].shift.add_(0.5)
    own = float(model.similarity(model.encode_query(TEXTS[0]), model.encode_document(TEXTS[1])))
    assert explainer.explain(*TEXTS).score == pytest.approx(own, abs=1e-6)


class Holding(nn.Module):
    """A module that people might write: what it computes is in things that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = np.arange(8)
        self.number = np.float32(0.0)
        self.tensors = [torch.zeros(8, dtype=torch.float64)]
        shift = torch.zeros(8, dtype=torch.float64)
        self.function, self.shift_of_function = (lambda x: torch.tanh(x) + shift), [shift]

    def forward(self, features):
        x = features["sentence_embedding"][:, torch.as_tensor(self.kept)] + float(self.number) + self.tensors[0]
        features["sentence_embedding"] = self.function(x)
        return features


def _with_default(x, by=3.0):
    return torch.tanh(x) * by + 1.0


HELD = {
    "an array": lambda held: setattr(held, "kept", np.arange(8, 16)),
    "an array in place": lambda held: held.kept.__iadd__(8),
    "a number of numpy": lambda held: setattr(held, "number", np.float32(3.0)),
    "a tensor in a list": lambda held: held.tensors[0].add_(3.0),
    "another tensor in a list": lambda held: held.tensors.__setitem__(0, held.tensors[0] + 3.0),
    "a function of the same place": lambda held: setattr(held, "function", lambda x: torch.relu(x) + 1.0),
    "a function with a default": lambda held: setattr(held, "function", _with_default),
    "a closure's tensor": lambda held: held.shift_of_function[0].add_(3.0),
    "its dictionary of buffers": lambda held: held.__dict__.update(_buffers={"more": torch.ones(1)}),
}


@pytest.mark.parametrize("change", HELD.values(), ids=HELD)
def test_what_torch_does_not_know_is_watched_too(change):
    model = tiny("bert", after=lambda: [Holding()])
    explainer = Explainer(model)
    assert Explainer(model).scorer.fingerprint == explainer.scorer.fingerprint
    explainer.explain(*TEXTS)
    change(model[2])
    with pytest.raises(ModelChanged):
        explainer.explain(*TEXTS)


def test_settings_of_the_tokenizers_model_are_watched():
    model = tiny("bert")
    explainer = Explainer(model)
    model.tokenizer.backend_tokenizer.model.max_input_chars_per_word = 3
    with pytest.raises(ModelChanged):
        explainer.explain(*TEXTS)


def test_small_weights_are_compared_whole():
    model = tiny("bert")
    explainer = Explainer(model)
    before = explainer.explain(*TEXTS)
    model[0].auto_model.encoder.layer[1].output.LayerNorm.weight.data[3] = 9.0
    after = explainer.explain(*TEXTS)
    own = float(model.similarity(model.encode_query(TEXTS[0]), model.encode_document(TEXTS[1])))
    assert after.fingerprint != before.fingerprint
    assert after.score == pytest.approx(own, abs=1e-6)


def test_hooks_and_what_they_hold_are_not_copied():
    class Monitor:
        def __init__(self):
            self.lock, self.seen = threading.Lock(), 0

        def __call__(self, module, args, output):
            self.seen += 1

        def __deepcopy__(self, memo):
            raise AssertionError("the host's own object was copied")

    model, monitor = _plain(), Monitor()
    explainer = Explainer(model)
    before = explainer.explain(*TEXTS)
    handle = model[1].register_forward_hook(monitor)
    assert explainer.explain(*TEXTS).fingerprint == before.fingerprint
    handle.remove()
    assert explainer.explain(*TEXTS).fingerprint == before.fingerprint


def test_the_watch_keeps_no_model_alive():
    model = _plain()
    explainer, known = Explainer(model), weakref.ref(model)
    before = explainer.explain(*TEXTS).score
    del model
    gc.collect()
    assert known() is None
    assert explainer.explain(*TEXTS).score == pytest.approx(before, abs=1e-6)


def test_hooks_of_the_caller_do_not_run_in_explanations():
    model, seen = _plain(), []
    model[0].register_forward_hook(lambda module, args, output: seen.append(module))
    explainer = Explainer(model)
    at_load = len(seen)
    explainer.explain(*TEXTS)
    explainer.precompute(TEXTS, progress=False)
    assert len(seen) == at_load


def test_a_hook_that_changes_what_is_computed_is_refused():
    model = _plain()
    _hook(model)
    with pytest.raises(UnsupportedModel, match="otherwise than its modules"):
        Explainer(model)


def test_a_hook_that_changes_what_is_computed_is_refused_as_long_as_it_is_there():
    model = _plain()
    explainer = Explainer(model)
    before = explainer.explain(*TEXTS)
    handle = _hook(model)
    for _ in range(3):
        with pytest.raises(ModelChanged, match="a hook changes"):
            explainer.explain(*TEXTS)
    handle.remove()
    assert explainer.explain(*TEXTS).score == pytest.approx(before.score, abs=1e-6)


class Doubled(SentenceTransformer):
    """Encodes by a way of its own."""

    def encode(self, *args, **kwargs):
        return super().encode(*args, **kwargs) + 1.0


def test_an_override_of_encode_is_refused():
    with pytest.raises(UnsupportedModel, match="override"):
        Explainer(Doubled(modules=list(tiny("bert"))))


class Squared(SentenceTransformer):
    """Compares by a function of its own, under the name of another."""

    @property
    def similarity(self):
        return lambda a, b: torch.as_tensor(a) @ torch.as_tensor(b).T


def test_a_similarity_that_is_not_what_it_is_called_is_refused():
    with pytest.raises(UnsupportedModel, match="similarity"):
        Explainer(Squared(modules=list(tiny("bert"))))
    assert Explainer(Squared(modules=list(tiny("bert")), similarity_fn_name="dot")).explain(*TEXTS).measure == "dot"


def test_a_copy_on_another_device_does_not_see_writes_and_says_so():
    from rag_explain.encoder.watch import Watch

    model = _plain()
    watch = Watch(model, is_shared=False, fleeting=frozenset())
    watch.state()
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(ModelChanged, match="another device"):
        watch.state()


def test_a_model_that_is_being_trained_is_explained_as_it_is():
    model = tiny("bert", dtype=torch.float32)
    explainer = Explainer(model)
    scores = []
    with torch.no_grad():
        for _ in range(3):
            next(model.parameters()).mul_(1.01)
            scores.append(explainer.explain(*TEXTS).score)
            own = model.similarity(model.encode_query(TEXTS[0]), model.encode_document(TEXTS[1]))
            assert scores[-1] == pytest.approx(float(own), abs=1e-5)
    assert len(np.unique(scores)) == 3
