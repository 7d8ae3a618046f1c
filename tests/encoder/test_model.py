"""What is explained is what the model encodes: every pooling, prompt and module behind it."""

from __future__ import annotations

import copy
import threading
from typing import ClassVar

import numpy as np
import pytest
import torch
from sentence_transformers.base.modules import Dense, Normalize, Router
from torch import nn

from rag_explain import Explainer
from rag_explain.encoder.model import Encoder
from rag_explain.errors import CheckFailed, InvalidInput, UnsupportedModel, UnsupportedOperation
from rag_explain.linear import LRP, operations
from rag_explain.methods.frozen import freeze
from rag_explain.texts.passage import Passage
from tests.support.models import ARCHITECTURES, TEXTS, tiny

POOLINGS = [
    "mean",
    "cls",
    "lasttoken",
    "weightedmean",
    "mean_sqrt_len_tokens",
    "max",
    ("mean", "max"),
    ("cls", "mean", "lasttoken"),
]


class AttentionPooling(nn.Module):
    """Pools with softmax weights from learned queries, keys and values: linear once its weights are frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(width))
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, features):
        tokens, mask = features["token_embeddings"], features["attention_mask"]
        scores = (self.key(tokens) @ self.query).masked_fill(mask == 0, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        features["sentence_embedding"] = torch.bmm(weights.unsqueeze(1), self.value(tokens)).squeeze(1)
        return features


class SortPooling(nn.Module):
    """Something no rule knows."""

    def forward(self, features):
        features["sentence_embedding"] = torch.sort(features["token_embeddings"], dim=1).values[:, 0]
        return features


def _check_equal_to_the_model(model, role="document", **tolerance) -> None:
    explainer = Explainer(model)
    encode = model.encode_query if role == "query" else model.encode_document
    expected = encode(TEXTS)
    for factors, vector in zip(explainer.factor(TEXTS, role), expected, strict=True):
        scale = np.linalg.norm(vector) / np.linalg.norm(factors.embedding)
        np.testing.assert_allclose(factors.embedding * scale, vector, atol=1e-5)
        assert factors.error < 1e-5
    if explainer.scorer.measure == "cosine":
        similarity = model.similarity(model.encode_query(TEXTS[:1]), model.encode_document(TEXTS))[0]
        scores = [explanation.score for explanation in explainer.explain_many(TEXTS[0], TEXTS)]
        np.testing.assert_allclose(scores, similarity, atol=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
@pytest.mark.parametrize("architecture", ["bert", "qwen3"])
def test_the_explained_embedding_is_the_encoded_one(architecture, pooling):
    _check_equal_to_the_model(tiny(architecture, pooling, dtype=torch.float32))


@pytest.mark.parametrize(
    "after",
    [
        lambda: [Normalize()],
        lambda: [Dense(16, 8)],
        lambda: [Dense(16, 8, bias=False, activation_function=nn.Identity()), Normalize()],
        lambda: [Dense(16, 16, use_residual=True), Dense(16, 6, activation_function=nn.ReLU(), use_residual=True)],
        lambda: [Normalize(), Dense(16, 8, activation_function=nn.GELU())],
        lambda: [AttentionPooling(16), Normalize()],
    ],
    ids=["normalize", "dense-tanh", "dense-normalize", "residual", "normalize-dense", "attention-pooling"],
)
def test_modules_behind_the_pooling(after):
    _check_equal_to_the_model(tiny("bert", after=after, dtype=torch.float32))


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("role", ["query", "document"])
def test_prompts_are_read_as_the_model_reads_them(role, include_prompt):
    prompts = {"query": "the old question: ", "document": "text found: "}
    model = tiny("bert", dtype=torch.float32, prompts=prompts, include_prompt=include_prompt)
    _check_equal_to_the_model(model, role)
    (tokens,) = Encoder(model).read(TEXTS[:1], role).tokens
    assert {token.part for token in tokens} == {"special", "prompt", "text"}
    assert all(token.start == token.end and token.text == "" for token in tokens if token.part != "text")
    assert all(token.text == TEXTS[0][token.start : token.end] != "" for token in tokens if token.part == "text")


def test_a_truncated_dimension_and_a_dot_product():
    _check_equal_to_the_model(tiny("bert", dtype=torch.float32, truncate_dim=6))
    model = tiny("bert", dtype=torch.float32, similarity_fn_name="dot")
    explanation = Explainer(model).explain(*TEXTS)
    expected = float(model.encode_query(TEXTS[0]) @ model.encode_document(TEXTS[1]))
    assert explanation.score == pytest.approx(expected, abs=1e-5)
    assert explanation.gap == pytest.approx(0, abs=1e-5)


def test_a_distance_is_marked_as_a_surrogate():
    explanation = Explainer(tiny("bert", similarity_fn_name="euclidean")).explain(*TEXTS)
    assert "euclidean" in explanation.surrogate


class ByTask(nn.Module):
    """A module that people might write: it reads the task, as sentence-transformers lets any module do."""

    forward_kwargs: ClassVar[set[str]] = {"task"}

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.query, self.document = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, features, task=None):
        layer = {"query": self.query, "document": self.document}[task]
        features["sentence_embedding"] = layer(features["sentence_embedding"])
        return features


def _router() -> Router:
    return Router.for_query_document([Dense(16, 16)], [Dense(16, 16), Dense(16, 16)])


@pytest.mark.parametrize("after", [lambda: [ByTask()], lambda: [_router()], lambda: [_router(), Normalize(), ByTask()]])
def test_modules_that_read_the_task_are_given_it(after):
    model = tiny("bert", after=after)
    for role in ("query", "document"):
        _check_equal_to_the_model(model, role)
    explanation = Explainer(model).explain(*TEXTS)
    own = model.similarity(model.encode_query(TEXTS[0]), model.encode_document(TEXTS[1]))
    assert explanation.score == pytest.approx(float(own), abs=1e-6)
    swapped = model.similarity(model.encode_document(TEXTS[0]), model.encode_query(TEXTS[1]))
    assert abs(float(swapped) - explanation.score) > 1e-3


def test_truncation_is_reported():
    model = tiny("bert", dtype=torch.float32)
    model.max_seq_length = 8
    explanation = Explainer(model).explain("cat", "the cat sat on the mat and looked at the moon")
    assert explanation.truncated == ("document",)
    assert len(explanation.document_tokens) == 8


def test_metadata_in_front_of_the_text():
    string = "title: moon\n\nthe cat sat on the mat"
    passage = Passage(string, start=string.index("the cat"))
    explanation = Explainer(tiny("bert")).explain("cat", passage)
    assert explanation.document == "the cat sat on the mat"
    parts = [token.part for token in explanation.document_tokens]
    assert parts[1] == "metadata"
    assert parts.count("text") >= 6
    for token in explanation.document_tokens:
        assert token.text == explanation.document[token.start : token.end]


def test_an_operation_without_a_rule_is_refused_by_name():
    with pytest.raises(UnsupportedOperation, match=r"aten\.sort.*SortPooling"):
        Explainer(tiny("bert", after=lambda: [SortPooling()]))


def test_an_activation_that_is_not_zero_at_zero_is_refused():
    with pytest.raises(UnsupportedOperation, match=r"sigmoid.*0\.5 at zero"):
        Explainer(tiny("bert", after=lambda: [Dense(16, 8, activation_function=nn.Sigmoid())]))


def test_a_wrong_rule_is_caught_by_the_check(monkeypatch):
    right = operations.Scale.run

    def one_per_cent_too_much(self, space, spent, *tangents):
        return right(self, space, spent, *tangents) * 1.01

    monkeypatch.setattr(operations.Scale, "run", one_per_cent_too_much)
    with pytest.raises(CheckFailed, match="misses the embedding"):
        Explainer(tiny("bert"))


def test_a_forgotten_bias_is_caught_by_the_check(monkeypatch):
    monkeypatch.setattr(operations.Center, "constant", property(lambda self: None, lambda self, value: None), False)
    with pytest.raises(CheckFailed, match="misses the embedding"):
        Explainer(tiny("bert"))


def test_other_models_are_refused_by_name():
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import BoW

    model = SentenceTransformer(modules=[BoW(["moon", "cat"]), Dense(2, 4)])
    with pytest.raises(UnsupportedModel, match="begins with BoW"):
        Explainer(model)
    with pytest.raises(InvalidInput, match="not dict"):
        Explainer({"model": "text-embedding-3-small"})


# ---------------------------------------------------------------------- nothing is left behind


def _state(model):
    hooks = [
        (name, len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
        for name, module in model.named_modules()
    ]
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    classes = {name: type(module) for name, module in model.named_modules()}
    config = copy.deepcopy(model[0].auto_model.config.to_dict())
    flags = [(p.requires_grad, p._version) for p in model.parameters()]
    return hooks, attributes, classes, config, model[0].auto_model.config._attn_implementation, flags, model.training


@pytest.mark.parametrize("architecture", ["bert", "albert", "qwen3"])
def test_the_model_is_untouched_even_after_an_exception(architecture):
    model = tiny(architecture)
    model.train()
    before = _state(model)
    encoder = Encoder(model)
    batch = encoder.read(TEXTS, "document")

    def fail(block, hidden):
        if block == 1:
            raise RuntimeError("in the middle")
        return hidden

    with pytest.raises(RuntimeError, match="in the middle"), torch.no_grad():
        encoder.run(batch, fail)
    with torch.no_grad():
        freeze(encoder, batch, 0, LRP)[0].rows()
    assert _state(model) == before
    from torch.overrides import _get_current_function_mode
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    assert _get_current_function_mode() is None
    assert _get_current_dispatch_mode() is None


def test_weights_are_shared_and_a_change_changes_the_fingerprint():
    model = tiny("bert")
    encoder = Encoder(model)
    shared = {parameter.data_ptr() for parameter in encoder.whole.parameters()}
    assert shared == {parameter.data_ptr() for parameter in model.parameters()}
    before = encoder.fingerprint
    assert before == Encoder(tiny("bert")).fingerprint
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    assert encoder.fingerprint != before


def test_the_fingerprint_sees_everything_that_decides_an_embedding():
    prints = {Encoder(tiny(name)).fingerprint for name in ARCHITECTURES}
    prints.add(Encoder(tiny("bert", "cls")).fingerprint)
    prints.add(Encoder(tiny("bert", prompts={"query": "q: "})).fingerprint)
    short = tiny("bert")
    short.max_seq_length = 8
    prints.add(Encoder(short).fingerprint)
    prints.add(Encoder(tiny("bert", dtype=torch.float32)).fingerprint)
    assert len(prints) == len(ARCHITECTURES) + 4


def test_threads_explain_while_another_encodes():
    model = tiny("bert", dtype=torch.float32)
    explainer = Explainer(model)
    texts = [f"{text} {i}" for i in range(4) for text in TEXTS]
    expected = [explainer.explain("the moon", text).matrix for text in texts]
    encoded = model.encode(texts)
    failures: list[str] = []

    def explain() -> None:
        for _ in range(5):
            # Cold, built and kept factors round differently, and which path serves depends on the thread.
            found = [explainer.explain("the moon", text).matrix for text in texts]
            if not all(np.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True)):
                failures.append("explanation")

    def encode() -> None:
        if not all(np.array_equal(model.encode(texts), encoded) for _ in range(20)):
            failures.append("encode")

    threads = [threading.Thread(target=target) for target in (explain, explain, encode)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_callers_torch_modes_do_not_reach_in():
    explainer = Explainer(tiny("bert", dtype=torch.float32))
    plain = explainer.explain(*TEXTS).matrix
    explainer.close()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = explainer.explain(*TEXTS).matrix
    np.testing.assert_allclose(plain, inside, atol=1e-5)  # bfloat16 would be off by 1e-2
    with torch.enable_grad():
        np.testing.assert_allclose(plain, explainer.explain(*TEXTS).matrix, atol=1e-5)


class InPlaceActivation(nn.Module):
    """nn.ReLU(inplace=True) and friends: followed, since nothing else looks at the memory."""

    def forward(self, features):
        x = features["sentence_embedding"] * 2.0
        features["sentence_embedding"] = torch.relu_(x)
        return features


class WritesIntoABuffer(nn.Module):
    """out[:, :4] = x: a value that depends on the tokens hidden in one that does not."""

    def forward(self, features):
        x = features["sentence_embedding"]
        out = torch.zeros_like(x)
        out[:, :4] = x[:, :4]
        features["sentence_embedding"] = out
        return features


def test_in_place_operations_are_followed_or_refused():
    _check_equal_to_the_model(tiny("bert", after=lambda: [InPlaceActivation()], dtype=torch.float32))
    with pytest.raises(UnsupportedOperation, match=r"writes into a tensor with aten\.copy_"):
        Explainer(tiny("bert", after=lambda: [WritesIntoABuffer()]))


class SequenceFirst(nn.Module):
    """nn.MultiheadAttention works on (tokens, documents, dimensions) inside: documents do not lead there."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        nn.init.normal_(self.attention.in_proj_bias)
        nn.init.normal_(self.attention.out_proj.bias)

    def forward(self, features):
        x, blind = features["token_embeddings"], features["attention_mask"] == 0
        mixed, _ = self.attention(x, x, x, key_padding_mask=blind, need_weights=True)
        keep = features["attention_mask"].unsqueeze(-1).to(x.dtype)
        features["sentence_embedding"] = (mixed * keep).sum(dim=1) / keep.sum(dim=1)
        return features


class TorchsOwnLayer(nn.Module):
    """nn.TransformerEncoderLayer is one fused operation in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, features):
        mixed = self.layer(features["token_embeddings"], src_key_padding_mask=features["attention_mask"] == 0)
        keep = features["attention_mask"].unsqueeze(-1).to(mixed.dtype)
        features["sentence_embedding"] = (mixed * keep).sum(dim=1) / keep.sum(dim=1)
        return features


def test_fused_layers_of_torch_are_followed():
    _check_equal_to_the_model(tiny("bert", after=lambda: [TorchsOwnLayer()], dtype=torch.float32))


class ReadsTheTextItself(nn.Module):
    """A way past the blocks: what it adds would look like a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 16)

    def forward(self, features):
        words = self.words(features["input_ids"]) * features["attention_mask"].unsqueeze(-1)
        features["sentence_embedding"] = features["sentence_embedding"] + words.sum(dim=1)
        return features


def test_biases_belong_to_their_own_document_whatever_the_layout():
    explainer = Explainer(tiny("bert", after=lambda: [SequenceFirst()]))
    documents = [*TEXTS, "moon"]
    together = explainer.explain_many("the capital of france", documents)
    for document, explanation in zip(documents, together, strict=True):
        assert explanation.gap == pytest.approx(0, abs=1e-5)
        explainer.close()
        alone = explainer.explain("the capital of france", document)
        np.testing.assert_allclose(explanation.matrix, alone.matrix, atol=1e-5)


def test_a_text_that_goes_past_the_block_is_refused():
    with pytest.raises(UnsupportedModel, match="past the input of block 0"):
        Explainer(tiny("bert", after=lambda: [ReadsTheTextItself()]))
    with pytest.raises(UnsupportedModel, match="past the input of block 0"):
        Explainer(tiny("bert", after=lambda: [ReadsTheTextItself()]), "ij", layer=0)


def test_an_embedding_that_depends_on_padding_is_refused():
    model = tiny("bert")
    model.tokenizer.padding_side = "left"
    with pytest.raises(UnsupportedModel, match="depend on padding"):
        Explainer(model)


@pytest.mark.parametrize("method", ["bilrp", "hxp"])
@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.Hardtanh(inplace=True)])
def test_activations_in_place(activation, method):
    model = tiny("bert", after=lambda: [Dense(16, 8, activation_function=activation)])
    assert Explainer(model, method).explain(*TEXTS).gap == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_what_is_cut_off_behind_the_normalisation(similarity):
    settings = {"truncate_dim": 6, "similarity_fn_name": similarity}
    model = tiny("bert", after=lambda: [Normalize()], dtype=torch.float32, **settings)
    explanation = Explainer(model).explain(*TEXTS)
    expected = float(model.similarity(model.encode_query(TEXTS[0]), model.encode_document(TEXTS[1])))
    assert explanation.score == pytest.approx(expected, abs=1e-5)
    assert explanation.gap == pytest.approx(0, abs=1e-5)
    np.testing.assert_allclose(Encoder(model).embed(TEXTS, "query"), model.encode_query(TEXTS), atol=1e-6)


@pytest.mark.parametrize("architecture", ["t5", "t5-gated"])
def test_t5_clamps_its_hidden_states_in_half_precision(architecture):
    assert abs(Explainer(tiny(architecture, dtype=torch.float16)).explain(*TEXTS).gap) < 0.05


def test_a_model_that_is_changed_afterwards_is_noticed():
    model = tiny("bert")
    explainer = Explainer(model)
    model.max_seq_length = 5
    with pytest.raises(InvalidInput, match="changed after the Explainer was made"):
        explainer.explain(*TEXTS)
    other = tiny("bert")
    encoder = Encoder(other)
    before = encoder.fingerprint
    other.to(torch.float32)
    assert encoder.fingerprint != before


class ParallelBlock(nn.Module):
    """A norm of the block's own input, read after attention has mixed it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.norm, self.dense = block, nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, hidden_states, *args, **kwargs):
        mixed = self.block(hidden_states, *args, **kwargs)
        return mixed + self.dense(self.norm(hidden_states))


def test_parallel_branches_are_run_in_one_order():
    model = tiny("bert")
    layers = model[0].auto_model.encoder.layer
    layers[0] = ParallelBlock(layers[0]).to(torch.float64)
    explainer = Explainer(model)
    assert explainer.factor(TEXTS)[0].error < 1e-6
    assert explainer.explain(*TEXTS).gap == pytest.approx(0, abs=1e-6)
