"""The forms in which a command shows what it found."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

from rag_explain import Explainer
from rag_explain.cli import explain as explain_command
from rag_explain.cli import main
from rag_explain.cli.output import add_output_arguments, write
from rag_explain.errors import InvalidInput
from rag_explain.results.evidence import Evidence
from rag_explain.results.explanation import Explanation
from tests.support.models import tiny
from tests.support.samples import explain, hits


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_output_arguments(parser, top=4)
    return parser.parse_args(words)


def test_the_terminal_shows_as_many_pairs_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    write(explain(), parsed())
    assert len(re.findall(r"\.\d%", capsys.readouterr().out)) == 4
    write(explain(), parsed("--top", "2", "--by", "token"))
    text = capsys.readouterr().out
    assert len(re.findall(r"\.\d%", text)) == 2
    assert "tokens" in text
    write(hits(), parsed("--top", "1"))
    assert "doc-2" in capsys.readouterr().out


def test_json_is_one_line_that_can_be_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    write(explain(), parsed("--json"))
    [line] = capsys.readouterr().out.splitlines()
    assert Explanation.from_json(line).unit == "token"
    write(hits(), parsed("--json", "--by", "sentence"))
    found = json.loads(capsys.readouterr().out)
    assert [hit["id"] for hit in found] == ["doc-1", "doc-2"]
    assert Explanation.from_dict(found[0]["explanation"]).unit == "sentence"


def test_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "why.html"
    write(hits(), parsed("--html", str(path)))
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out == f"written to {path}\n"
    with pytest.raises(InvalidInput, match=r"cannot be written to .*: No such file"):
        write(explain(), parsed("--html", str(tmp_path / "no" / "why.html")))


def test_evidence_is_shown_in_every_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_command, "make_explainer", lambda arguments: Explainer(tiny("bert"), "pooled"))
    text = "A dog ran. The cat looked at the moon. Nobody came."
    for form in ([], ["--json"], ["--html", str(tmp_path / "page.html")]):
        assert main(["explain", "the cat", text, "--evidence", *form]) == 0
    terminal, line, written = capsys.readouterr().out.rsplit("\n", 3)[:3]
    assert "2 of 3 sentences; where to look" in " ".join(terminal.split())
    assert len(Evidence.from_dict(json.loads(line)).sentences) == 3
    assert written.startswith("written to")
    assert "where to look" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words", [["--top", "-1"], ["--top", "many"], ["--by", "page"], ["--json", "--html", "x.html"], ["--html", "x"]]
)
def test_mistakes_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*words)
    assert capsys.readouterr().err


@pytest.mark.parametrize(("by", "unit"), [(None, "sentence"), ("word", "word"), ("sentence", "sentence")])
def test_what_is_lost_is_computed_in_the_unit_that_is_shown(
    by: str | None, unit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny("bert").save(str(tmp_path / "tiny"))
    chosen = [] if by is None else ["--by", by]
    command = ["explain", "the cat", "The moon rose. A dog barked.", "--model", str(tmp_path / "tiny")]
    assert main([*command, "--method", "occlusion", "--json", *chosen]) == 0
    assert json.loads(capsys.readouterr().out)["unit"] == unit
    assert main([*command, "--method", "occlusion", *chosen]) == 0


def test_a_page_without_a_name_is_opened(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)  # no window on the machine of tests
    write(hits(), parsed("--html"))
    path = Path(capsys.readouterr().out.removeprefix("written to ").strip())
    assert opened == [path.as_uri()]
    assert path.read_text(encoding="utf-8") == hits().to_html()


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_command, "make_explainer", lambda arguments: Explainer(tiny("bert"), "pooled"))


@pytest.mark.usefixtures("pooled")
def test_a_document_comes_from_a_file_or_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "doc.txt"
    file.write_text("the cat sat", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat sat"))
    found = []
    for document in ("the cat sat", f"@{file}", "-"):
        assert main(["explain", "a cat", document, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["matrix"])
    assert found[0] == found[1] == found[2]


@pytest.mark.usefixtures("pooled")
def test_the_name_of_a_file_is_not_taken_for_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "doc.txt").write_text("text", encoding="utf-8")
    assert main(["explain", "a cat", str(tmp_path / "doc.txt")]) == 2
    assert "doc.txt to explain what is in it" in capsys.readouterr().err
    assert main(["explain", "a cat", "@nowhere.txt"]) == 2
    assert "nowhere.txt cannot be read" in capsys.readouterr().err


@pytest.mark.usefixtures("pooled")
def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explain_command, "write", interrupted)
    assert main(["explain", "a cat", "the cat sat"]) == 130
    assert capsys.readouterr().err == "rag-explain: interrupted\n"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "rag_explain", "demo", *words]
    return subprocess.run(command, capture_output=True, env={**os.environ, **environment}, check=False)


@pytest.mark.slow
def test_a_locale_of_ascii_and_a_full_disk_end_in_words() -> None:
    shown = run("naïve café", "-k", "1", PYTHONIOENCODING="ascii")
    assert shown.returncode == 0, shown.stderr
    assert b"na?ve caf?" in shown.stdout
    assert b"===" in shown.stdout  # bars
    assert b"sum of all |pairs|" in shown.stdout
    command = [sys.executable, "-m", "rag_explain", "demo", "-k", "1"]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert failed.returncode == 2
    assert b"No space left on device" in failed.stderr
    assert b"Traceback" not in failed.stderr
