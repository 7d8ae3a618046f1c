"""Each example is short, runs, and prints an answer with its explained sources."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = {
    "faiss_search.py": "faiss",
    "haystack_pipeline.py": "haystack_integrations.components.embedders.sentence_transformers",
    "langchain_chain.py": "langchain_core",
    "llama_index_engine.py": "llama_index.embeddings.huggingface",
}


def installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.slow
@pytest.mark.parametrize(("name", "needs"), EXAMPLES.items())
def test_an_example_runs_and_explains(name: str, needs: str) -> None:
    if not installed(needs):
        pytest.skip(f"{needs} is not installed")
    paths = [ROOT, *(ROOT / "integrations" / name for name in ("haystack", "langchain", "llama_index"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "bees-navigation" in done.stdout
    assert "Honeybees" in done.stdout
    assert "Answer" in done.stdout
    assert "Traceback" not in done.stderr
