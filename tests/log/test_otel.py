"""The trace export, through the real SDK. Beside OpenInference's tracing of LangChain: see the integration's tests."""

from __future__ import annotations

import json
import sys

import pytest
from openinference.semconv.trace import DocumentAttributes, OpenInferenceSpanKindValues, SpanAttributes
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rag_explain.errors import MissingExtra
from rag_explain.log import ExplanationLog, patterns
from rag_explain.log.otel import TraceExport, content_is_captured
from rag_explain.results.deferred import Deferred
from rag_explain.results.notices import UNKNOWN, Notice
from tests.support.answers import DOCUMENTS, QUERY, hit, hits


@pytest.fixture
def spans():
    return InMemorySpanExporter()


@pytest.fixture
def provider(spans):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    yield provider
    provider.shutdown()


def ours(spans):
    (span,) = [span for span in spans.get_finished_spans() if span.name == "rag_explain.explanation"]
    return span


def test_a_span_in_openinference_words_below_the_callers_span(tmp_path, spans, provider):
    tracer = provider.get_tracer("host")
    with ExplanationLog(tmp_path, export=TraceExport(provider)) as log:
        with tracer.start_as_current_span("answer") as parent:
            record_id = log.record(query=QUERY, answer="By the sun.", hits=hits())
        log.flush()
    span = ours(spans)
    assert span.parent.span_id == parent.get_span_context().span_id
    assert span.context.trace_id == parent.get_span_context().trace_id
    found = dict(span.attributes)
    assert found[SpanAttributes.OPENINFERENCE_SPAN_KIND] == OpenInferenceSpanKindValues.RETRIEVER.value
    assert found[SpanAttributes.INPUT_VALUE] == QUERY
    prefix = f"{SpanAttributes.RETRIEVAL_DOCUMENTS}.0."
    assert found[prefix + DocumentAttributes.DOCUMENT_ID] == "doc-0"
    assert found[prefix + DocumentAttributes.DOCUMENT_CONTENT] == DOCUMENTS[0]
    assert found[prefix + DocumentAttributes.DOCUMENT_SCORE] == pytest.approx(hits()[0].score)
    assert json.loads(found[prefix + DocumentAttributes.DOCUMENT_METADATA]) == {"source": "bees.md"}
    assert found["rag_explain.record.id"] == record_id
    assert found["rag_explain.method"] == "bilrp"
    explained = json.loads(found["rag_explain.documents.0.explanation"])
    best = hits()[0].explanation.by_word().top_pairs(1)[0]
    assert explained["pairs"][0][:2] == [best.query.text, best.document.text]
    assert explained["pairs"][0][2] == pytest.approx(best.value, rel=1e-5)
    assert explained["gap"] == pytest.approx(1e-7, abs=1e-9)


def test_without_content_capture_no_text_leaves(tmp_path, spans, provider):
    with ExplanationLog(tmp_path, export=TraceExport(provider, capture_content=False)) as log:
        log.record(query=QUERY, hits=hits())
    span = ours(spans)
    text = json.dumps(dict(span.attributes)).lower()
    words = {word.strip("?.").lower() for word in f"{QUERY} {' '.join(DOCUMENTS)} bees.md".split()}
    assert not [word for word in words if len(word) > 3 and word in text]
    assert json.loads(span.attributes["rag_explain.documents.0.explanation"])["score"]
    assert span.attributes["rag_explain.explained"] == 3


@pytest.mark.parametrize(
    ("name", "value", "captured"),
    [
        ("OPENINFERENCE_HIDE_INPUTS", "true", False),
        ("OPENINFERENCE_HIDE_RETRIEVAL_DOCUMENTS", "True", False),
        ("OPENINFERENCE_HIDE_OUTPUT_TEXT", "false", True),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "false", False),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "NO_CONTENT", False),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY", True),
        ("SOMETHING_ELSE", "true", True),
    ],
)
def test_the_environment_switches_content_off(tmp_path, spans, provider, monkeypatch, name, value, captured):
    assert content_is_captured({name: value}) is captured
    monkeypatch.setenv(name, value)
    with ExplanationLog(tmp_path, export=TraceExport(provider)) as log:
        log.record(query=QUERY, hits=hits())
    assert ("input.value" in ours(spans).attributes) is captured


def test_what_is_redacted_or_not_kept_is_not_on_the_trace(tmp_path, spans, provider):
    with ExplanationLog(tmp_path / "a", export=TraceExport(provider), redact=patterns("(?i)bees")) as log:
        log.record(query=QUERY, hits=hits())
    assert "bees" not in json.dumps(dict(ours(spans).attributes)).lower().replace("bees.md", "")
    spans.clear()
    with ExplanationLog(tmp_path / "b", export=TraceExport(provider), keep_text=False) as log:
        log.record(query=QUERY, hits=hits())
    assert "input.value" not in ours(spans).attributes


def test_many_long_documents_stay_within_the_default_limits(tmp_path, spans, provider):
    long = " ".join(DOCUMENTS * 50)
    with ExplanationLog(tmp_path, export=TraceExport(provider)) as log:
        log.record(query=QUERY, hits=[hit(long, rank) for rank in range(40)])
    span = ours(spans)
    assert span.dropped_attributes == 0
    assert len(span.attributes) <= 128
    assert span.attributes["rag_explain.documents"] == 40
    assert sum(len(str(value)) for value in span.attributes.values()) < 24_000


def test_what_was_not_read_stands_beside_the_pairs_with_and_without_content(tmp_path, spans, provider):
    why = hits()[0].explanation.with_notices(Notice(UNKNOWN, "All words are unknown.", side="query"))
    for capture in (True, False):
        spans.clear()
        with ExplanationLog(tmp_path, export=TraceExport(provider, capture_content=capture)) as log:
            log.record(query=QUERY, hits=[hit(handle=Deferred.ready(why))])
        explained = json.loads(ours(spans).attributes["rag_explain.documents.0.explanation"])
        assert explained["unread"] == ["All words are unknown."]
        assert ("pairs" in explained) == capture


def test_a_failed_explanation_has_its_state(tmp_path, spans, provider):
    with ExplanationLog(tmp_path, export=TraceExport(provider), background=False) as log:
        log.record(query=QUERY, hits=[hit(handle=Deferred(None, status="failed", reason="no"), score=float("nan"))])
    assert ours(spans).attributes["rag_explain.documents.0.explanation"] == '{"status":"failed"}'


def test_an_exporter_that_raises_costs_no_record(tmp_path, caplog):
    class Broken:
        def context(self):
            return None

        def export(self, record, context):
            raise OSError(record.query)

    with ExplanationLog(tmp_path, export=Broken()) as log:
        log.record(query=QUERY)
        log.flush()
        assert log.counts.written == 1
    assert "OSError" in caplog.text
    assert QUERY not in caplog.text


def test_the_extra_is_named_when_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    for name in ("rag_explain.log.otel", "rag_explain.log.sinks.otel"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtra, match=r"rag-explain\[otel\]"):
        import rag_explain.log.otel  # noqa: F401
