"""examples/rag_with_log.py, run as a person would run it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rag_explain.cli import main
from rag_explain.encoder.loading import DEFAULT_MODEL
from rag_explain.log import ExplanationLog, records
from tests.support.models import tiny

EXAMPLE = Path(__file__).parent.parent / "examples" / "rag_with_log.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rag_with_log", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model") / "encoder"
    tiny("bert").save(str(path))
    return str(path)


def test_the_answer_its_sources_and_the_explanations_are_in_the_log_and_on_the_page(example, model, tmp_path, capsys):
    question = "where do bees live?"
    example.main([question, "--model", model, "--log", str(tmp_path / "log"), "--page", str(tmp_path / "why.html")])
    printed = capsys.readouterr().out
    (record,) = records(tmp_path / "log")
    assert record.query == question
    assert record.answer in printed
    assert [hit.id for hit in record.hits] == [line.split()[0] for line in printed.splitlines()[3:6]]
    assert all(hit.text == example.DOCUMENTS[hit.id] for hit in record.hits)
    assert all(abs(hit.explanation.gap) < 1e-4 for hit in record.hits)
    page = (tmp_path / "why.html").read_text()
    assert all(hit.text.split(".")[0] in page for hit in record.hits)
    assert main(["log", "verify", str(tmp_path / "log"), "--model", model]) == 0
    assert "3 holds" in capsys.readouterr().out


def test_a_language_model_takes_the_answerers_place(example, model, tmp_path):
    with ExplanationLog(tmp_path) as log:
        rag = example.Rag(model, log, answerer=lambda question, hits: f"{question} See {hits[0].id}.")
        answer, record_id = rag.ask("bread?")
        record = log.find(record_id)
    assert record.answer == answer == f"bread? See {record.hits[0].id}."


@pytest.mark.slow
def test_with_the_real_encoder_the_right_page_is_cited(example, tmp_path, capsys):
    example.main(["--log", str(tmp_path / "log"), "--page", str(tmp_path / "why.html")])
    (record,) = records(tmp_path / "log")
    assert record.hits[0].id == "bees-navigation"
    assert record.answer.startswith("Honeybees find their way back")
    words = {(pair.query.text.lower(), pair.document.text.lower()) for pair in record.pairs(0)[:5]}
    assert any("bees" in query for query, _ in words)
    assert main(["log", "verify", str(tmp_path / "log"), "--model", DEFAULT_MODEL]) == 0
    assert "3 holds" in capsys.readouterr().out
