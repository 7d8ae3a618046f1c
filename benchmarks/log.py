"""What does logging add to an answer?

    python benchmarks/log.py [ANSWERS]

The time that `record` takes on the caller's thread, the processor time of all the work, and what is on disk; for
explanations that are there already, five documents an answer.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from rag_explain.log import ExplanationLog, find, summaries
from rag_explain.types import Explanation, Hit, Lazy, Token

_DOCUMENT_WORDS = 150


def make_hits(query: str, seed: int) -> list[Hit]:
    """Five documents of 150 words, explained."""
    random = np.random.default_rng(seed)
    query_tokens = tokens(query)
    found = []
    for rank in range(5):
        text = " ".join(f"{word}{random.integers(100)}" for word in random.choice(list("abcdefgh"), _DOCUMENT_WORDS))
        document_tokens = tokens(text)
        matrix = random.normal(scale=0.01, size=(len(query_tokens) + 1, len(document_tokens) + 1)).astype(np.float32)
        explanation = Explanation(
            query=query,
            document=text,
            query_tokens=query_tokens,
            document_tokens=document_tokens,
            matrix=matrix,
            score=float(matrix.sum()),
            method="bilrp",
            fingerprint="0" * 32,
        )
        found.append(
            Hit(id=f"doc-{rank}", text=text, rank=rank, score=0.5, metric="cosine", handle=Lazy.ready(explanation))
        )
    return found


def tokens(text: str) -> tuple[Token, ...]:
    """One token a word."""
    made, at = [], 0
    for word in text.split():
        made.append(Token(word, at, at + len(word), "text", word))
        at += len(word) + 1
    return tuple(made)


def measure(answers: int, background: bool) -> None:
    """Print one row."""
    query = "how do honeybees find their way back to the hive at night"
    prepared = [make_hits(query, seed) for seed in range(20)]
    taken = []
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "log"
        log = ExplanationLog(path, queue=answers, background=background)
        start = time.process_time()
        for number in range(answers):
            before = time.perf_counter()
            log.record(query=query, answer="By the sun.", hits=prepared[number % 20], metadata={"user": number})
            taken.append(time.perf_counter() - before)
        log.close(None)
        total = time.process_time() - start
        size = sum(file.stat().st_size for file in path.iterdir())
        start = time.perf_counter()
        listed = list(summaries(path))
        listing = time.perf_counter() - start
        start = time.perf_counter()
        find(path, listed[len(listed) // 2].id)
        finding = time.perf_counter() - start
    microseconds = sorted(second * 1e6 for second in taken)
    print(
        f"{'background' if background else 'synchronous':12} added to an answer: median "
        f"{statistics.median(microseconds):.0f} us, 99 % {microseconds[int(0.99 * answers)]:.0f} us; processor "
        f"time {total / answers * 1e3:.1f} ms an answer; {size / answers:.0f} bytes an answer; "
        f"listing {answers} records {listing:.2f} s, finding one {finding * 1e3:.0f} ms"
    )


def main() -> None:
    """Both ways to write."""
    answers = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    measure(answers, background=True)
    measure(answers, background=False)


if __name__ == "__main__":
    main()
