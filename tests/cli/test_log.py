"""rag-explain log, as a person types it."""

from __future__ import annotations

import json

import pytest

from rag_explain import Explainer
from rag_explain.cli import main
from rag_explain.log import ExplanationLog, records
from rag_explain.results.deferred import Deferred
from rag_explain.results.hits import Hit
from rag_explain.results.notices import SPELLED, UNKNOWN, Notice
from tests.support.answers import DOCUMENTS, QUERY, hit, hits, reranked
from tests.support.models import tiny


@pytest.fixture
def folder(tmp_path):
    with ExplanationLog(tmp_path / "log") as log:
        for number in range(3):
            log.record(query=f"{QUERY} {number}", answer="By the\nsun.", hits=hits())
        log.record(query="\x1b[31mred", hits=[hit(id="other")])
    return tmp_path / "log"


def lines(capsys, *arguments) -> list[str]:
    assert main(["log", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_list(folder, capsys):
    out = lines(capsys, "list", folder)
    assert len(out) == 4
    assert out[0].endswith(f"  3/3  {QUERY} 0")
    assert "\x1b" not in out[-1]
    assert len(lines(capsys, "list", folder, "--limit", 2)) == 2
    assert len(lines(capsys, "list", folder, "--document", "doc-1")) == 3
    assert json.loads(lines(capsys, "list", folder, "--json")[0])["documents"] == ["doc-0", "doc-1", "doc-2"]


def test_show(folder, capsys):
    record_id = lines(capsys, "list", folder)[0].split()[0]
    out = lines(capsys, "show", folder, record_id, "--pairs", 2)
    assert out[1] == f"query   {QUERY} 0"
    assert out[2] == "answer  By the sun."
    best = hits()[0].explanation.by_word().top_pairs(1)[0]
    assert f"   {best.value:+.4f}  {best.share:6.1%} of |pairs|  {best.query.text} ~ {best.document.text}" in out
    assert json.loads(lines(capsys, "show", folder, record_id, "--json")[0])["id"] == record_id
    newest = lines(capsys, "list", folder)[-1].split()[0]
    assert lines(capsys, "show", folder, "last")[0].startswith(newest)


def test_show_without_text_gives_offsets(tmp_path, capsys):
    with ExplanationLog(tmp_path, keep_text=False) as log:
        record_id = log.record(query=QUERY, hits=[*hits(), hit(handle=Deferred(None, status="skipped", reason="no"))])
    out = "\n".join(lines(capsys, "show", tmp_path, record_id))
    assert "(no text)" in out
    assert "] ~ [" in out
    assert "not explained: skipped" in out  # a reason may quote the text


def test_show_says_what_was_not_read(tmp_path, capsys):
    about = [Notice(UNKNOWN, "Of the query.", side="query"), Notice(SPELLED, "Of the document.", side="document")]
    found = [hit(handle=Deferred.ready(one.explanation.with_notices(*about))) for one in hits()[:2]]
    with ExplanationLog(tmp_path, keep_text=False) as log:
        record_id = log.record(query=QUERY, hits=found)
    out = lines(capsys, "show", tmp_path, record_id)
    assert out[3] == "! Of the query."
    assert out.count("! Of the query.") == 1
    assert out.count("   ! Of the document.") == 2


def test_export_can_be_read_again(folder, tmp_path, capsys):
    lines(capsys, "export", folder, "-o", tmp_path / "all.jsonl")
    assert lines(capsys, "list", tmp_path / "all.jsonl") == lines(capsys, "list", folder)
    assert "\n".join(lines(capsys, "export", folder)) + "\n" == (tmp_path / "all.jsonl").read_text()
    record_id = lines(capsys, "list", folder)[1].split()[0]
    (line,) = lines(capsys, "export", folder, "--id", record_id)
    assert json.loads(line)["id"] == record_id


def test_export_as_a_page(folder, tmp_path, capsys):
    lines(capsys, "export", folder, "--format", "html", "-o", tmp_path / "why.html")
    page = (tmp_path / "why.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "Honeybees" in page
    sections = json.loads(page.split('type="application/json" id="rag-explain-data">')[1].split("</script>")[0])[
        "sections"
    ]
    assert len(sections) == 4  # each answer apart from the others, also those of one question
    for section, record in zip(sections, records(folder), strict=True):
        when, question, *answer = section["about"]
        assert record.id in when
        assert question.startswith("Question: ")
        assert answer == ([] if record.answer is None else [f"Answer: {record.answer}"])
    assert "\n".join(lines(capsys, "export", folder, "--format", "html")).strip() == page.strip()


def test_erase(folder, capsys):
    assert lines(capsys, "erase", folder, "--document", "doc-1") == ["3 records changed"]
    assert not lines(capsys, "list", folder, "--document", "doc-1")


def test_verify_and_diff_with_a_real_model(tmp_path, capsys):
    model = tiny("bert")
    model.save(str(tmp_path / "encoder"))
    explainer = Explainer(str(tmp_path / "encoder"))
    found = explainer.explain_many(QUERY, DOCUMENTS)
    for name, order in (("a", (0, 1, 2)), ("b", (1, 0, 2))):
        with ExplanationLog(tmp_path / name) as log:
            ranked = [
                Hit(
                    id=f"d{i}",
                    text=DOCUMENTS[i],
                    rank=rank,
                    score=0.5,
                    metric="cosine",
                    handle=Deferred.ready(found[i]),
                )
                for rank, i in enumerate(order)
            ]
            log.record(query=QUERY, hits=ranked)
    out = lines(capsys, "verify", tmp_path / "a", "--model", tmp_path / "encoder")
    assert out[-1] == "3 holds"
    assert lines(capsys, "verify", tmp_path / "a", "--no-model")[-1] == "3 holds"
    (tmp_path / "documents.jsonl").write_text(json.dumps({"id": "d0", "text": "else"}) + "\n")
    changed = ["log", "verify", str(tmp_path / "a"), "--no-model", "--documents", str(tmp_path / "documents.jsonl")]
    assert main(changed) == 1
    assert "1 changed, 2 holds" in capsys.readouterr().out
    out = lines(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert "  d1: rank 1 -> rank 0, 0.5000 -> 0.5000" in out
    assert out[-1] == "2 of 3 documents moved"
    moves = [json.loads(line) for line in lines(capsys, "diff", tmp_path / "a", tmp_path / "b", "--json", "--all")]
    assert len(moves) == 3


def test_errors_are_one_line(tmp_path, capsys):
    for arguments in (
        ["list", str(tmp_path / "nowhere")],
        ["show", str(tmp_path), "123"],
        ["erase", str(tmp_path)],
        ["verify", str(tmp_path), "--documents", str(tmp_path / "nowhere")],
        ["verify", str(tmp_path), "--key-file", str(tmp_path / "nowhere")],
    ):
        assert main(["log", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("rag-explain: ")
        assert error.count("\n") == 1


def test_show_says_what_a_document_was_found_by_where_that_was_not_the_question(tmp_path, capsys):
    with ExplanationLog(tmp_path) as log:
        record = log.record(query="and those insects?", hits=[hit()])
        same = log.record(query=QUERY, hits=[hit()])
    assert f"   found by asking: {QUERY}" in lines(capsys, "show", tmp_path, record)
    assert "found by asking" not in "\n".join(lines(capsys, "show", tmp_path, same))


def test_show_names_the_stage_that_ranked_a_document(tmp_path, capsys):
    with ExplanationLog(tmp_path) as log:
        record = log.record(query=QUERY, hits=[reranked(hit())])
    shown = "\n".join(lines(capsys, "show", tmp_path, record))
    assert "rank 1 by Reranker (2.0000); before that rank 3 by VectorIndexRetriever (" in shown
    assert "explained instead: the documents were ranked by Reranker" in shown


def test_a_damaged_file_is_said_on_stderr_and_everything_else_is_shown(tmp_path, capsys):
    with ExplanationLog(tmp_path, max_bytes=1) as log:
        for number in range(3):
            log.record(query=f"{QUERY} {number}", hits=hits())
            log.flush()
    damaged = min(tmp_path.glob("log-*.gz"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    kept = lines(capsys, "list", tmp_path / "log.jsonl")[0].split()[0]
    for arguments, shown in (
        (["list", tmp_path], 2),
        (["list", tmp_path, "--json"], 2),
        (["export", tmp_path], 2),
        (["diff", tmp_path, tmp_path, "--json", "--all"], 6),
    ):
        assert main(["log", *map(str, arguments)]) == 0
        out, err = capsys.readouterr()
        assert len(out.splitlines()) == shown
        assert err.count(damaged.name) == err.count("\n") == (2 if arguments[0] == "diff" else 1)
    assert lines(capsys, "show", tmp_path, kept)[1] == f"query   {QUERY} 2"
    assert main(["log", "verify", str(tmp_path), "--no-model"]) == 1
    out = capsys.readouterr().out
    assert damaged.name in out
    assert out.splitlines()[-1] == "1 damaged, 6 holds"
    assert main(["log", "erase", str(tmp_path), "--document", "doc-0"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("rag-explain: 2 records of the log")
    assert err.count("\n") == 1
    assert damaged.name in err


def test_commands_that_read_create_nothing(folder, tmp_path, capsys):
    (folder / "log.lock").unlink()
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    record_id = lines(capsys, "list", folder)[0].split()[0]
    lines(capsys, "show", folder, record_id)
    lines(capsys, "export", folder)
    lines(capsys, "verify", folder, "--no-model")
    lines(capsys, "diff", folder, folder)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    nowhere = tmp_path / "nowhere"
    commands = [["list"], ["show", record_id], ["export"], ["verify", "--no-model"], ["diff", str(folder)], ["erase"]]
    for name, *rest in commands:
        more = ["--document", "x"] if name == "erase" else rest
        assert main(["log", name, str(nowhere), *more]) == 2
    assert not nowhere.exists()
