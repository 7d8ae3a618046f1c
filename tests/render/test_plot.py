"""Figures: drawn, saved, and as harmless as the rest."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from rag_explain.errors import InvalidInput, MissingExtra
from rag_explain.results.explanation import Explanation
from tests.support.samples import DOCUMENT, HOSTILE, explain

LONG = " ".join(f"Sentence number {k} is about a bank and a password." for k in range(12))
SVG = {"svg", "metadata", "RDF", "Work", "type", "date", "format", "creator", "Agent", "title", "defs", "style", "g"}
SVG |= {"path", "use", "clipPath", "rect", "image"}


def names(path: Path) -> set[str]:
    return {node.tag.rpartition("}")[2] for node in ET.parse(path).iter()}


@pytest.mark.parametrize("kind", ["heatmap", "connections"])
@pytest.mark.parametrize("document", [DOCUMENT, LONG, "one"])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_figures_are_saved_at_paper_width(kind: str, document: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"figure.{suffix}"
    figure = explain(document=document).plot(kind, path)  # type: ignore[arg-type]  # the literals above
    assert figure.get_size_inches()[0] == 6.75
    assert path.stat().st_size > 3000
    # Every label is inside the figure.
    box = figure.get_tightbbox()
    assert box.x0 > -0.05
    assert box.x1 < 6.8
    assert box.y0 > -0.05
    assert box.y1 < figure.get_size_inches()[1] + 0.05


def labels(explanation: Explanation) -> list[str]:
    figure = explanation.plot()
    return [
        label.get_text() for axes in figure.axes[:1] for label in (*axes.get_xticklabels(), *axes.get_yticklabels())
    ]


def test_the_heatmap_shows_words_of_short_texts_and_sentences_of_long_ones() -> None:
    assert "password" in labels(explain())
    assert "Sentence number 3 is about a bank and a password." in labels(explain(document=LONG))


def test_the_caption_says_whether_it_adds_up() -> None:
    text = explain().plot().texts[0].get_text()
    assert "no word; adds up to the score, gap" in text


@pytest.mark.parametrize("kind", ["heatmap", "connections"])
def test_hostile_texts_add_no_element_to_the_svg(kind: str, tmp_path: Path) -> None:
    for number, text in enumerate(HOSTILE):
        path = tmp_path / f"{number}.svg"
        explain(query=text, document=text, model=text).plot(kind, path)  # type: ignore[arg-type]  # as above
        assert names(path) <= SVG
        for node in ET.parse(path).iter():
            assert not any(name.startswith("on") for name in node.attrib)


def test_the_host_keeps_its_settings(tmp_path: Path) -> None:
    code = (
        "import sys, matplotlib as mpl\nfrom tests.support import samples\n"
        "mpl.rcParams['font.family'] = ['serif']\n"
        "samples.explain().plot('connections', sys.argv[1])\n"
        "assert mpl.rcParams['font.family'] == ['serif']\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    command = [sys.executable, "-c", code, str(tmp_path / "figure.png")]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path}, timeout=120)


def test_mistakes_are_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="use 'heatmap' or 'connections'"):
        explain().plot("pie")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(InvalidInput, match="no pair to draw"):
        explain(query="").plot()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r'pip install "rag-explain\[plot\]"'):
        explain().plot()


def test_a_notebook_shows_the_figure_and_not_its_name() -> None:
    figure = explain().plot()
    image, metadata = figure._repr_png_()  # type: ignore[attr-defined]
    assert image.startswith(b"\x89PNG")
    width = int.from_bytes(image[16:20], "big")
    assert width == 2 * metadata["width"] == 6.75 * 200
    copy = pickle.loads(pickle.dumps(figure))
    assert copy._repr_png_()[0].startswith(b"\x89PNG")
