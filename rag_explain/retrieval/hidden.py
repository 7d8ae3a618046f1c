"""Fusion inside a store, which tells nothing of its legs: they are asked for again, by those who want that."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.stages import Stage
from rag_explain.retrieval.trace import Combination, Found, Reader, Run

_AGAIN = "its legs were asked for in queries of their own, when this was looked at"


def asked_again(
    name: str, query: str, found: Sequence[Found], metric: str, combine: Callable[[], Combination]
) -> Callable[[int, Deferred[Explanation]], tuple[Stage, ...]]:
    """Tells the stages of a document by its place and the explanation of its hit.

    Args:
        name: of the stage that fused.
        found: what it returned.
        metric: what the scores of its first leg are, which ranks by the similarity that the hits explain.
        combine: asks for the legs, once, when the first stage is looked at.
    """

    def ask() -> tuple[Run, Reader]:
        given = combine()
        run = Run(name, None, query, found=found, inner=list(given.legs))
        return run, Reader(query, lambda run: given, lambda leg: metric if leg is given.legs[0] else "unknown")

    asked = Deferred(ask)

    def stages(index: int, handle: Deferred[Explanation]) -> tuple[Stage, ...]:
        known = asked.get()
        if known is None:
            note = f"its legs were asked for again, which failed: {asked.reason}"
            return (Stage(name, "search", index + 1, None, found[index].score, note=note, handle=handle),)
        run, reader = known
        own = replace(reader, handle=lambda leg, one: handle if leg is run.inner[0] else None)
        *legs, last = own.stages(run, index + 1, found[index])
        return (*legs, replace(last, note=last.note or _AGAIN))

    return stages
