"""What a page with many hits weighs, and when a browser first shows something of it, beside a page with one hit.

    python benchmarks/page.py [--hits 50] [--rounds 7]    a minute; writes results/page.json

The hits are of the demo's documents. Every round opens both pages in a new window of Chromium, in turns; medians. Times
are of one machine; what is to be compared is their ratio.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from rag_explain import Explainer
from rag_explain.cli.demo import corpus
from rag_explain.faiss import FaissRetriever

QUERY = "my laptop is slow"
RESULT = Path(__file__).parent / "results" / "page.json"
# When the first text was painted, and when the script had drawn everything.
TIMES = """() => new Promise((resolve) => {
  const done = () => {
    const painted = performance.getEntriesByName("first-contentful-paint")[0];
    if (!painted) return requestAnimationFrame(done);
    resolve([painted.startTime, performance.getEntriesByType("navigation")[0].domContentLoadedEventEnd]);
  };
  done();
})"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hits", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not installed: run  apt-get install chromium", file=sys.stderr)
        return 1
    texts = {one["id"]: one["text"] for one in corpus()}
    with tempfile.TemporaryDirectory() as folder, Explainer("all-MiniLM-L6-v2") as explainer:
        hits = FaissRetriever.from_texts(list(texts.values()), explainer, ids=list(texts)).search(QUERY, k=options.hits)
        pages = {"one hit": hits[:1], f"{len(hits)} hits": hits}
        files = {name: Path(folder) / f"{len(one)}.html" for name, one in pages.items()}
        sizes = {name: page.to_html(files[name]).encode() for name, page in pages.items()}
        times = opened(chromium, files, options.rounds)
    result: dict[str, Any] = {"command": f"python benchmarks/page.py --hits {options.hits} --rounds {options.rounds}"}
    for name, page in sizes.items():
        painted, drawn = (statistics.median(values) for values in zip(*times[name], strict=True))
        kilobytes = {"KB": round(len(page) / 1000, 1), "KB compressed": round(len(gzip.compress(page)) / 1000, 1)}
        result[name] = {**kilobytes, "first paint, ms": round(painted, 1), "drawn, ms": round(drawn, 1)}
    one, many = (result[name] for name in sizes)
    result["many over one"] = {what: round(many[what] / one[what], 2) for what in one}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    return 0


def opened(chromium: str, files: dict[str, Path], rounds: int) -> dict[str, list[list[float]]]:
    """For each page, in each round, when it was first painted and when it was drawn, in milliseconds."""
    found: dict[str, list[list[float]]] = {name: [] for name in files}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for number in range(rounds + 1):
            for name, file in files.items():
                context = browser.new_context(viewport={"width": 1280, "height": 900})
                page = context.new_page()
                page.goto(file.as_uri())
                times = page.evaluate(TIMES)
                if number:  # the first round warms up
                    found[name].append(times)
                context.close()
        browser.close()
    return found


if __name__ == "__main__":
    sys.exit(main())
