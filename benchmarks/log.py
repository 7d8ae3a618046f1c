"""What does logging add to an answer?

    python benchmarks/log.py [ANSWERS]

First the time that `record` takes on the caller's thread, the processor time of all the work, and what is on disk, for
explanations that are there already, five documents an answer. Then a real search (FAISS, all-MiniLM-L6-v2) without a
log, with one that leaves explanations uncomputed, and with one that computes them in the background while the host goes
on searching: that is where the processors are shared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from rag_explain.log import ExplanationLog, find, summaries
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit
from rag_explain.texts.tokens import Token

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
            Hit(id=f"doc-{rank}", text=text, rank=rank, score=0.5, metric="cosine", handle=Deferred.ready(explanation))
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


def beside_a_search(searches: int) -> None:
    """Print how long a search takes while the log works."""
    from rag_explain import Explainer
    from rag_explain.faiss import FaissRetriever

    random = np.random.default_rng(0)
    words = ["bees", "hive", "sun", "home", "bread", "bakery", "storm", "pigeon", "river", "meadow", "sky", "winter"]
    texts = [" ".join(random.choice(words, 60)) for _ in range(200)]
    retriever = FaissRetriever.from_texts(texts, Explainer("all-MiniLM-L6-v2"))
    for pending in ("no log", "leave", "compute"):
        taken = []
        with tempfile.TemporaryDirectory() as name:
            log = None if pending == "no log" else ExplanationLog(name, pending=pending)
            for number in range(searches):
                query = " ".join(random.choice(words, 6))
                time.sleep(0.05)  # the user reads the answer
                start = time.perf_counter()
                hits = retriever.search(query, k=3)
                if log is not None:
                    log.record(query=query, answer=str(number), hits=hits)
                taken.append((time.perf_counter() - start) * 1e3)
            if log is not None:
                log.close(None, compute=False)
        taken.sort()
        print(
            f"{pending:12} a search and its record take {statistics.median(taken):.1f} ms in the median, "
            f"{taken[int(0.95 * searches)]:.1f} ms at 95 %"
        )


def main() -> None:
    """Both ways to write, then a real search."""
    answers = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    measure(answers, background=True)
    measure(answers, background=False)
    beside_a_search(min(100, answers))


if __name__ == "__main__":
    main()
