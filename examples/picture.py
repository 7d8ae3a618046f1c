"""Makes the pictures of the README and of docs/questions.md, docs/*.png, from real answers about the demo's documents.

pip install ".[test]" && apt-get install chromium && python examples/picture.py
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from rag_explain import Explainer
from rag_explain.cli.demo import corpus
from rag_explain.faiss import FaissRetriever
from rag_explain.retrieval.hybrid import HybridRetriever

SLOW, BEES = "my laptop is slow", "How do bees find their way home?"
POLICY = (
    "# Refunds at Acme Corp\n\nCustomers get their money back within thirty days. Shipping is not paid back. "
    "Write to the shop where you bought it."
)
DOCS = Path(__file__).parent.parent / "docs"
MARGIN, COLOURS = 16, 128


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not installed: run  apt-get install chromium", file=sys.stderr)
        return 1
    DOCS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        with Explainer("all-MiniLM-L6-v2") as explainer:
            pages = written(explainer, Path(folder))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        picture(browser, pages["hits"], "page.png", 1120, to=".card")
        picture(browser, pages["hits"], "page-dark.png", 1120, to=".card", scheme="dark")
        picture(browser, pages["hits"], "how-sure.png", 1120, only=".card, .line", to=".card >> nth=1")
        picture(browser, pages["hybrid"], "hybrid.png", 1120, only=".card", to=".card")
        picture(browser, pages["why-not"], "why-not.png", 900, to=".answer > div > div >> nth=4")
        for name in ("where-to-read", "what-if", "x-ray"):
            picture(browser, pages[name], f"{name}.png", 900, to=".answer")
        browser.close()
    return 0


def written(explainer: Explainer, folder: Path) -> dict[str, Path]:
    """The page of every answer, by its name."""
    texts = {one["id"]: one["text"] for one in corpus()}
    retriever = FaissRetriever.from_texts(list(texts.values()), explainer, ids=list(texts))
    retriever.calibrate()
    hits = retriever.search(SLOW, k=5).load("what_if")
    document = " ".join(texts[name] for name in ("laptop-battery", "laptop-slow", "server-disk"))
    answers: dict[str, Any] = {
        "hits": hits,
        "hybrid": HybridRetriever(retriever).search(SLOW, k=3),
        "why-not": retriever.why_not(BEES, "bees-dance", k=4),
        "where-to-read": explainer.evidence(SLOW, document),
        "what-if": hits[0].what_if(),
        "x-ray": explainer.x_ray(POLICY),
    }
    for name, answer in answers.items():
        answer.to_html(folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in answers}


def picture(
    browser: Any, page_file: Path, name: str, width: int, *, to: str, only: str = "", scheme: str = "light"
) -> None:
    """The page from its top, or from the first element of `only`, to the end of `to`; few colours keep it small."""
    page = browser.new_page(viewport={"width": width, "height": 800}, device_scale_factor=2, color_scheme=scheme)
    page.goto(page_file.as_uri())
    page.wait_for_timeout(300)
    last = page.locator(to).first.bounding_box()
    top = page.locator(only).first.bounding_box()["y"] - MARGIN if only else 0
    clip = {"x": 0, "y": top, "width": width, "height": last["y"] + last["height"] + MARGIN - top}
    taken = Image.open(io.BytesIO(page.screenshot(full_page=True, clip=clip))).convert("RGB")
    taken.quantize(COLOURS, kmeans=1, dither=Image.Dither.NONE).save(DOCS / name, optimize=True)
    print(f"docs/{name}: {(DOCS / name).stat().st_size / 1000:.0f} KB")
    page.close()


if __name__ == "__main__":
    sys.exit(main())
