"""Cross-encoders as they are loaded, read and watched: the score is the model's own, and the model is left alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from torch import nn

from rag_explain import Explainer
from rag_explain.errors import InvalidInput, ModelChanged, UnsupportedModel
from rag_explain.log import ExplanationLog, records
from rag_explain.log.verify import verify
from rag_explain.methods.checks import examine
from rag_explain.retrieval import HitExplainer, RetrievedDocument
from rag_explain.scorers import resolve
from rag_explain.texts.passage import Passage
from tests.support.cross_encoders import HEADS, cross, cross_folder
from tests.support.models import tiny

QUERY = "the cat looked"
DOCUMENTS = ["a dog sat on the moon", "The cat looked at the moon, and the dog ran.", "berlin"]


@pytest.mark.parametrize("name", HEADS)
def test_what_the_model_returned_is_that_of_predict(name: str) -> None:
    model = cross(name)
    explainer = Explainer(model)
    own = model.predict([(QUERY, document) for document in DOCUMENTS])
    logits = model.predict([(QUERY, document) for document in DOCUMENTS], activation_fn=nn.Identity())
    explanations = explainer.explain_many(QUERY, DOCUMENTS)
    np.testing.assert_allclose([one.returned for one in explanations], own, atol=1e-6)
    np.testing.assert_allclose([one.score for one in explanations], logits, atol=1e-5)
    np.testing.assert_allclose(explainer.scorer.returned(QUERY, DOCUMENTS), own, atol=1e-6)
    np.testing.assert_allclose(explainer.scorer.score(QUERY, DOCUMENTS), logits, atol=1e-5)
    order = [int(one["corpus_id"]) for one in model.rank(QUERY, DOCUMENTS)]
    assert np.argsort([-one.score for one in explanations]).tolist() == order


@pytest.mark.parametrize(
    ("labels", "activation"),
    [(1, nn.Identity()), (1, nn.Sigmoid()), (1, nn.Tanh()), (3, nn.Identity()), (3, nn.Softmax(dim=-1)), (3, None)],
    ids=str,
)
def test_every_activation_is_the_models_own(labels: int, activation: nn.Module | None) -> None:
    model = cross("bert", labels, activation_fn=activation)
    own = np.atleast_2d(model.predict([(QUERY, DOCUMENTS[0])]))
    for label in range(labels):
        explanation = Explainer(model, label=label).explain(QUERY, DOCUMENTS[0])
        assert explanation.returned == pytest.approx(float(own[0, label]), abs=1e-6)
    is_same = isinstance(activation, nn.Identity) or activation is None
    assert ("the model returned" in str(explanation)) == (not is_same)


def test_an_activation_that_gives_no_number_for_each_label_is_refused() -> None:
    model = cross("bert", 3, activation_fn=lambda scores: scores.argmax(dim=-1))
    with pytest.raises(UnsupportedModel, match="does not give one number for each label"):
        Explainer(model, label=0)


def test_of_several_labels_one_must_be_chosen() -> None:
    model = cross("bert", 3)
    with pytest.raises(InvalidInput, match="one of its 3 labels by label=: label 0, label 1, label 2"):
        Explainer(model)
    for label in (3, -1, "contradiction", True, 1.0):
        with pytest.raises(InvalidInput, match=f"has no label {label!r}: choose one of its 3 labels"):
            Explainer(model, label=label)  # type: ignore[arg-type]  # what people may give
    by_name, by_number = (Explainer(model, label=label).explain(QUERY, DOCUMENTS[0]) for label in ("label 1", 1))
    assert by_name.score == by_number.score
    assert by_name.settings["label"] == by_number.settings["label"] == "label 1"
    assert "label" not in Explainer(cross("bert")).explain(QUERY, DOCUMENTS[0]).settings


def test_labels_of_one_name_are_known_by_number() -> None:
    model = cross("bert", 3)
    model[0].auto_model.config.id2label = dict.fromkeys(range(3), "same")
    assert Explainer(model, label="2").explain(QUERY, DOCUMENTS[0]).settings["label"] == "2"


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_a_folder_of_transformers_alone_is_known_by_its_head(name: str) -> None:
    explanation = Explainer(cross_folder(name)).explain(QUERY, DOCUMENTS[0])
    assert explanation.measure == "logit"
    assert explanation.model == cross_folder(name).name


def test_a_folder_that_a_cross_encoder_was_saved_in_is_known_by_what_it_says(tmp_path: Path) -> None:
    cross("qwen3-chat").save_pretrained(str(tmp_path / "reranker"))
    tiny("bert").save_pretrained(str(tmp_path / "encoder"))
    assert Explainer(str(tmp_path / "reranker")).explain(QUERY, DOCUMENTS[0]).measure == "logit"
    assert Explainer(str(tmp_path / "encoder")).explain(QUERY, DOCUMENTS[0]).measure == "cosine"


def test_a_model_of_transformers_alone_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidInput, match="not BertForSequenceClassification: load a transformers model by sentence-"):
        Explainer(cross("bert")[0].auto_model)


def test_the_model_is_left_as_it_was() -> None:
    model = cross("bert")
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    explained = Explainer(model).explain(QUERY, DOCUMENTS[0])
    assert model.training
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert model[0].tokenizer.padding_side == cross("bert")[0].tokenizer.padding_side
    assert explained.score == pytest.approx(Explainer(cross("bert")).explain(QUERY, DOCUMENTS[0]).score)


def test_weights_written_in_place_are_another_model() -> None:
    model = cross("bert")
    explainer = Explainer(model)
    before = explainer.explain(QUERY, DOCUMENTS[0])
    with torch.no_grad():
        model[0].auto_model.classifier.weight.mul_(2)
    after = explainer.explain(QUERY, DOCUMENTS[0])
    assert before.fingerprint != after.fingerprint
    assert after.returned == pytest.approx(float(model.predict([(QUERY, DOCUMENTS[0])])[0]), abs=1e-6)
    assert before.score != pytest.approx(after.score)


def _hook(model: CrossEncoder) -> None:
    model[0].register_forward_hook(lambda module, args, out: {**out, "scores": out["scores"] + 1})


CHANGES: dict[str, Any] = {
    "activation_fn": lambda model: setattr(model, "activation_fn", nn.Identity()),
    "prompts": lambda model: model.prompts.update(find="find: "),
    "max_seq_length": lambda model: setattr(model, "max_seq_length", 8),
    "classifier": lambda model: setattr(model[0].auto_model, "classifier", nn.Linear(16, 1).double()),
    "hook": _hook,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_is_refused(name: str) -> None:
    model = cross("bert", prompts={"find": ""}, default_prompt_name="find")
    explainer = Explainer(model)
    explainer.explain(QUERY, DOCUMENTS[0])
    CHANGES[name](model)
    with pytest.raises(ModelChanged):
        explainer.explain(QUERY, DOCUMENTS[0])


def test_another_chat_template_is_another_model() -> None:
    model = cross("qwen3-chat")
    explainer = Explainer(model)
    model[0].tokenizer.chat_template += " "
    with pytest.raises(ModelChanged, match="chat_template"):
        explainer.explain(QUERY, DOCUMENTS[0])
    assert Explainer(model).scorer.fingerprint != resolve(cross("qwen3-chat")).fingerprint


def test_what_cannot_matter_is_passed_over() -> None:
    model = cross("bert")
    explainer = Explainer(model)
    before = explainer.scorer.fingerprint
    model.step_that_nothing_reads = 1
    model[0].tokenizer.chat_template = "which this model does not read"
    model.predict([(QUERY, DOCUMENTS[0])])
    assert explainer.explain(QUERY, DOCUMENTS[0]).fingerprint == before


def test_a_model_that_scores_otherwise_than_its_modules_is_refused() -> None:
    model = cross("bert")
    _hook(model)
    with pytest.raises(UnsupportedModel, match="remove the hook, wrapper or override"):
        Explainer(model)


def test_two_models_are_not_one_and_one_is_always_itself() -> None:
    one, again, other = resolve(cross("bert")), resolve(cross("bert")), resolve(cross("electra"))
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert one.probes.distance(again.probes) == 0
    assert one.probes.distance(one.own_probes) < 1e-6
    prompted = resolve(cross("bert", prompts={"find": "find: "}, default_prompt_name="find"))
    assert prompted.fingerprint != one.fingerprint
    assert prompted.probes.distance(one.probes) > 1e-3


@pytest.mark.parametrize(
    ("name", "dtype"), [("bert", torch.float32), ("bert", torch.bfloat16), ("qwen3", torch.float16)]
)
def test_other_precisions_add_up_as_far_as_they_can(name: str, dtype: torch.dtype) -> None:
    model = cross(name, dtype=dtype)
    explanation = Explainer(model).explain(QUERY, DOCUMENTS[0])
    size = np.abs(explanation.matrix).sum()
    assert abs(explanation.gap or 0.0) < (1e-5 if dtype == torch.float32 else 2e-2) * size
    wide = Explainer(cross(name)).explain(QUERY, DOCUMENTS[0])
    assert np.abs(explanation.matrix - wide.matrix).max() < (1e-4 if dtype == torch.float32 else 5e-2) * size


def test_threads_get_what_one_thread_gets() -> None:
    explainer = Explainer(cross("bert"))
    wanted = {document: explainer.explain(QUERY, document).matrix for document in DOCUMENTS}
    barrier = threading.Barrier(4)

    def ask(number: int) -> bool:
        barrier.wait()
        found = [explainer.explain(QUERY, DOCUMENTS[(number + k) % 3]) for k in range(6)]
        return all(np.allclose(one.matrix, wanted[str(one.document)], atol=1e-7) for one in found)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(4)))


def test_the_callers_autograd_and_autocast_do_not_reach_in() -> None:
    explainer = Explainer(cross("bert"))
    wanted = explainer.explain(QUERY, DOCUMENTS[0])
    with torch.inference_mode():
        assert np.array_equal(explainer.explain(QUERY, DOCUMENTS[0]).matrix, wanted.matrix)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert np.array_equal(explainer.explain(QUERY, DOCUMENTS[0]).matrix, wanted.matrix)


def test_hits_and_the_log_keep_what_the_model_returned(tmp_path: Path) -> None:
    explainer = Explainer(cross("bert", 3, activation_fn=nn.Softmax(dim=-1)), label="label 2")
    documents = [RetrievedDocument(id=str(index), text=text) for index, text in enumerate(DOCUMENTS)]
    hits = HitExplainer(explainer).hits(QUERY, documents)
    with ExplanationLog(tmp_path) as log:
        log.record(query=QUERY, answer="yes", hits=hits)
    (record,) = records(tmp_path)
    for hit, logged in zip(hits, record.hits, strict=True):
        assert logged.explanation is not None
        assert hit.explanation is not None
        assert logged.explanation.returned == pytest.approx(hit.explanation.returned)
        assert logged.explanation.measure == "logit"

    def again(logged: Any) -> Explainer:
        return Explainer(explainer.scorer, logged.method, **logged.settings)

    assert {verdict.outcome for verdict in verify(tmp_path, again)} == {"holds"}


def test_the_doctor_knows_a_cross_encoder() -> None:
    findings = {one.subject: one for one in examine(resolve(cross("bert")))}
    assert all(one.ok for one in findings.values())
    assert findings["labels"].seen == "LABEL_0"
    assert findings["returns"].seen == "Sigmoid"
    assert "lrp" in findings["supported"].seen


def test_a_pair_is_read_in_two_parts() -> None:
    scorer = resolve(cross("bert"))
    pair = scorer.read_pair(*(Passage(text) for text in (QUERY, DOCUMENTS[0])))
    assert [token.label for token in pair.tokens[0]] == ["[CLS]", "the", "cat", "look", "ed", "[SEP]"]
    assert [token.label for token in pair.tokens[1]][-1] == "[SEP]"
    with pytest.raises(InvalidInput, match="reads each text by itself, and not in pairs"):
        resolve(tiny("bert")).read_pair(*(Passage(text) for text in (QUERY, DOCUMENTS[0])))
