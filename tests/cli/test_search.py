"""rag-explain index, search and demo, as a user runs them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from rag_explain.cli import main
from rag_explain.cli.demo import corpus
from rag_explain.cli.index import read_documents
from rag_explain.errors import InvalidInput
from tests.support.models import CORPUS, cross_encoder_folder, tiny


@cache
def model_folder(where: Path) -> Path:
    tiny(dtype=torch.float32).save(str(where / "model"), create_model_card=False)
    return where / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(model_folder(tmp_path_factory.mktemp("cli")))


def test_index_and_search_files(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    (data / ".hidden").mkdir()
    (data / ".hidden" / "secret.txt").write_text("not for you")
    (data / "a.txt").write_text("\ufeff" + " ".join(f"{text.capitalize()}." for text in CORPUS), encoding="utf-8")
    (data / "deep" / "b.md").write_text("# Moon\n\nThe old moon looked at Paris.")
    (data / "c.jsonl").write_text(
        '{"_id": "x1", "text": "a dog", "lang": "en"}\n\n{"abstract": ["the cat.", "it sat."]}\n'
    )
    (data / "picture.png").write_bytes(b"\x89PNG")
    index = tmp_path / "index"
    assert main(["index", str(data), "--index", str(index), "--chunk", "20", "--model", model]) == 0
    assert "documents are in" in capsys.readouterr().err

    assert main(["search", "the moon", "--index", str(index), "-k", "99", "--explain", "1", "--json"]) == 0
    hits = json.loads(capsys.readouterr().out)
    texts = {"a.txt": (data / "a.txt").read_text(encoding="utf-8-sig"), "deep/b.md": (data / "deep/b.md").read_text()}
    assert {hit["metadata"]["source"] for hit in hits} == {"a.txt", "deep/b.md", "x1", "c.jsonl:3"}
    for hit in hits:
        where = hit["metadata"]
        if where["source"] in texts:
            assert texts[where["source"]][where["start"] : where["end"]] == hit["text"]
            assert hit["id"] == f"{where['source']}:{where['start']}-{where['end']}"
    assert [hit["status"] for hit in hits] == ["ready"] + ["skipped"] * (len(hits) - 1)
    assert hits[0]["gap"] == pytest.approx(0.0, abs=1e-5)
    assert next(hit for hit in hits if hit["metadata"]["source"] == "x1")["metadata"]["lang"] == "en"

    page = tmp_path / "page.html"
    assert main(["search", "the moon", "--index", str(index), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"written to {page}\n"
    assert page.stat().st_size > 1000
    assert main(["search", "the moon", "--index", str(index), "--top", "1", "--by", "sentence"]) == 0
    assert "score" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", b"%PDF", "not a text file"),
        ("a.txt", b"\xff\xfe\xff", "not UTF-8 at byte 0"),
        ("a.jsonl", b"{", "a.jsonl:1 is not JSON"),
        ("a.jsonl", b'{"title": "x"}', "a.jsonl:1 has no text"),
        ("a.jsonl", b'{"text": 3}', "text must be a string, not int"),
    ],
)
def test_unreadable_files_are_one_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=message):
        list(read_documents(tmp_path / name))


def test_missing_files_and_folders_without_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        list(read_documents(tmp_path / "none.txt"))
    with pytest.raises(InvalidInput, match=r"there is no \.txt"):
        list(read_documents(tmp_path))


def test_search_without_an_index_says_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "moon", "--index", str(tmp_path)]) == 2
    assert "rag-explain index FILE" in capsys.readouterr().err


def test_files_that_hold_no_text(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(" \n ")
    assert main(["index", str(tmp_path), "--index", str(tmp_path / "i"), "--model", model]) == 2
    assert "hold no text" in capsys.readouterr().err


def test_the_demo_searches_its_own_corpus(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "my laptop is slow", "--model", model, "-k", "2"]) == 0
    assert "56 paragraphs were searched" in capsys.readouterr().out


def test_the_demo_fuses_words_and_vectors(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "my laptop is slow", "--hybrid", "--model", model, "-k", "2"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("BM25", "FAISS", "HybridRetriever", "56 paragraphs were searched"))
    assert main(["demo", "my laptop is slow", "--hybrid", "--model", model, "-k", "2", "--json"]) == 0
    hits = json.loads(capsys.readouterr().out)
    for hit in hits:
        assert [stage["name"] for stage in hit["stages"]] == ["BM25", "FAISS", "HybridRetriever"]
        assert sum(stage["contribution"] for stage in hit["stages"][:2]) == pytest.approx(hit["score"], abs=1e-12)


def test_search_fuses_and_reranks(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "notes.jsonl"
    data.write_text("".join(json.dumps({"_id": f"n{n}", "text": text}) + "\n" for n, text in enumerate(CORPUS)))
    index, reranker = str(tmp_path / "index"), str(cross_encoder_folder())
    assert main(["index", str(data), "--index", index, "--model", model]) == 0
    asked = ["search", "the moon", "--index", index, "--hybrid", "--rerank", reranker, "-k", "3"]
    capsys.readouterr()
    assert main([*asked, "--json"]) == 0
    hits = json.loads(capsys.readouterr().out)
    assert [hit["stages"][-1]["name"] for hit in hits] == ["CrossEncoder"] * 3
    assert [hit["score"] for hit in hits] == sorted((hit["score"] for hit in hits), reverse=True)
    assert {stage["explanation"] is not None for hit in hits for stage in hit["stages"][-1:]} == {True}
    assert main(asked) == 0
    assert "CrossEncoder" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert main([*asked, "--html", str(page)]) == 0
    assert "HybridRetriever" in page.read_text(encoding="utf-8")
    for wrong, said in (
        (["--rerank", reranker], "--rerank ranks what --hybrid finds: give both"),
        (["--hybrid", "--rerank", str(tmp_path / "nothing")], "cannot be loaded as a cross-encoder"),
    ):
        capsys.readouterr()
        assert main(["search", "the moon", "--index", index, *wrong]) == 2
        assert said in capsys.readouterr().err


def test_the_corpus_is_varied_and_short() -> None:
    documents = corpus()
    assert 40 <= len(documents) <= 60
    assert (
        len({document["id"] for document in documents})
        == len({document["text"] for document in documents})
        == len(documents)
    )
    assert len({document["topic"] for document in documents}) >= 10
    assert max(len(document["text"]) for document in documents) < 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("How do bees find their way home?", ["bees-navigation", "home-insurance"]),
        ("I forgot my bank password", ["bank-password", "river-bank"]),
        ("Does the tablet help against migraine?", ["drug-works", "drug-fails"]),
        ("my laptop is slow", ["laptop-slow"]),
        ("how to sort a python list", ["python-list", "python-snake"]),
    ],
)
def test_the_demo_finds_the_answer_first_and_its_trap_after(
    query: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", query, "-k", "5", "--json", "--explain", "1"]) == 0
    hits = json.loads(capsys.readouterr().out)
    assert hits[0]["id"] == expected[0]
    assert set(expected) <= {hit["id"] for hit in hits}
    assert hits[0]["explanation"]["gap"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("command", ["explain a b", "index DOCS --index NEW", "demo", "search a"])
@pytest.mark.parametrize("device", ["foo", "", "cuda:99"])
def test_a_device_that_is_not_there_is_one_line(
    command: str, device: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(CORPUS[0])
    main(["index", str(tmp_path), "--index", str(tmp_path / "index"), "--model", model])
    capsys.readouterr()
    places = {"DOCS": str(tmp_path / "a.txt"), "NEW": str(tmp_path / "new")}
    arguments = [places.get(word, word) for word in command.split()]
    arguments += ["--index", str(tmp_path / "index")] if "search" in arguments else []
    assert main([*arguments, "--model", model, "--device", device]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rag-explain: this machine cannot compute on the device '{device}'")
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_an_index_that_is_a_file_is_refused_before_anything_is_embedded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(CORPUS[0])
    assert main(["index", str(tmp_path), "--index", str(tmp_path / "a.txt"), "--model", "no such model"]) == 2
    assert "a.txt is a file: give a folder" in capsys.readouterr().err
    assert (tmp_path / "a.txt").read_text() == CORPUS[0]


def test_a_store_that_is_a_url_or_a_file_is_one_line(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    for place in ("s3://bucket", "file", "file/below", ""):
        assert main(["explain", "a", "b", "--model", model, "--store", place]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_lines_of_json_may_hold_other_line_ends(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four\x1cfive"
    lines = [json.dumps({"text": text}, ensure_ascii=False), "", json.dumps({"text": "last", "id": "z"})]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
    assert [(one.name, one.text) for one in read_documents(tmp_path / "a.jsonl")] == [
        ("a.jsonl:1", text),
        ("z", "last"),
    ]


def test_what_no_command_expects_is_still_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    assert main(["index", str(tmp_path), "--index", str(tmp_path / "i")]) == 2
    assert "deep.jsonl:1 is not JSON" in capsys.readouterr().err

    def broken(path: Path) -> object:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("rag_explain.cli.index.read_documents", broken)
    assert main(["index", str(tmp_path), "--index", str(tmp_path / "i")]) == 2
    assert capsys.readouterr().err == "rag-explain: index failed: OSError: [Errno 5] Input/output error\n"


@pytest.fixture(scope="module")
def index(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("asked")
    lines = [{"id": f"d{number}", "text": text, "lang": "de" if number else "en"} for number, text in enumerate(CORPUS)]
    (where / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["index", str(where / "data.jsonl"), "--index", str(where / "index"), "--model", model]) == 0
    return where / "index"


def test_contrast_climbs_the_ladder(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["contrast", "the old dog", "--index", str(index), "-k", "2"]
    assert main([*asked, "--wanted", "nobody"]) == 0
    assert "is not in this index" in capsys.readouterr().out

    assert main(["search", "the old dog", "--index", str(index), "-k", "5", "--json"]) == 0
    names = [hit["metadata"]["source"] for hit in json.loads(capsys.readouterr().out)]
    assert main([*asked, "--wanted", names[3]]) == 0
    printed = capsys.readouterr().out
    assert "It stands at rank 4 of 5, and 2 were returned." in printed
    assert printed.index("word of the query") < printed.index("query · document")

    assert main([*asked, "--wanted", names[3], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["reason"], found["rank"]) == ("cut", 4)
    assert found["contrast"]["format"] == "rag_explain.contrast"

    other = "en" if names[0] != "d0" else "de"
    assert main([*asked, "--wanted", names[0], "--filter", f"lang={other}"]) == 0
    assert "the filter leaves it out" in capsys.readouterr().out.lower()

    page = tmp_path / "why.html"
    assert main([*asked, "--wanted", names[3], "--html", str(page)]) == 0
    assert "It stands at rank 4" in page.read_text(encoding="utf-8")
    capsys.readouterr()

    assert main(["search", "the old dog", "--index", str(index), "-k", "5", "--hybrid", "--json"]) == 0
    fused = [hit["id"] for hit in json.loads(capsys.readouterr().out)]
    assert main([*asked, "--wanted", fused[4], "--hybrid"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "HybridRetriever has it at rank 5, and 2 were returned." in printed
    assert main([*asked, "--wanted", names[3], "--hybrid", "--min-score", "0.1"]) == 2
    assert "--filter and --min-score are of a search by vectors alone" in capsys.readouterr().err

    assert main([*asked, "--wanted", names[0], "--got", names[4]]) == 2
    assert "was not returned for this query" in capsys.readouterr().err
    assert main([*asked, "--wanted", names[0], "--filter", "lang"]) == 2
    assert "--filter takes NAME=VALUE" in capsys.readouterr().err


def test_search_computes_what_if_where_it_is_asked_to(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["search", "the old dog", "--index", str(index), "-k", "2", "--what-if"]
    assert main(asked) == 0
    assert capsys.readouterr().out.count("without “dog”") >= 2
    assert main([*asked, "--json"]) == 0
    hits = json.loads(capsys.readouterr().out)
    assert [hit["what_if"]["rank"] for hit in hits] == [1, 2]
    assert main([*asked, "--html", str(tmp_path / "page.html")]) == 0
    assert "without it the score is" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_explain_computes_what_if(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "the old dog", CORPUS[1], "--what-if", "--model", model]) == 0
    assert "real: by how much" in capsys.readouterr().out
    assert main(["explain", "the old dog", CORPUS[1], "--what-if", "--json", "--model", model]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "rag_explain.what_if"
