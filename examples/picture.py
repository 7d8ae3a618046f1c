"""Makes the pictures of the README: docs/page.png and docs/page-dark.png, from a real explanation.

pip install ".[test]" && apt-get install chromium && python examples/picture.py
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from rag_explain import Explainer, Hit, Hits
from rag_explain.results.deferred import Deferred

QUERY = "How do bees find their way home?"
DOCUMENTS = {
    "bees.md": "Honeybees navigate back to the hive by the position of the sun and by landmarks they have learned. "
    "A bee that was carried away in a dark box still flies straight home when it is released, as long as it can "
    "see the sky.",
    "insurance.md": "Our home insurance covers damage by insects, but not the loss of bees.",
}
DOCS = Path(__file__).parent.parent / "docs"


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not installed: run  apt-get install chromium", file=sys.stderr)
        return 1
    with Explainer("all-MiniLM-L6-v2") as explainer:
        explanations = explainer.explain_many(QUERY, list(DOCUMENTS.values()))
    hits = Hits(
        Hit(id=name, text=text, rank=rank, score=found.score, metric="cosine", handle=Deferred.ready(found))
        for rank, ((name, text), found) in enumerate(zip(DOCUMENTS.items(), explanations, strict=True), 1)
    )
    DOCS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "page.html"
        hits.to_html(page_file)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for scheme, name in (("light", "page.png"), ("dark", "page-dark.png")):
            page = browser.new_page(
                viewport={"width": 1120, "height": 800},
                device_scale_factor=2,
                color_scheme="dark" if scheme == "dark" else "light",
            )
            page.goto(page_file.as_uri())
            page.locator(".text .w", has_text="Honeybees").first.hover()
            page.wait_for_timeout(300)
            bottom = page.locator(".card").last.bounding_box()
            assert bottom is not None
            height = bottom["y"] + bottom["height"] + 16
            page.screenshot(path=DOCS / name, full_page=True, clip={"x": 0, "y": 0, "width": 1120, "height": height})
            print(DOCS / name)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
