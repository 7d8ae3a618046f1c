"""Stages: what each part of a retrieval made of a hit, as a table; a leg stands indented above what it is put into."""

from collections.abc import Iterable, Sequence

from rag_explain.render.blocks import Block, Column, Line, Table
from rag_explain.render.sentences import number, one_line
from rag_explain.results.deferred import load
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit
from rag_explain.results.stages import Stage, depths, expanded, fused

_WORDS = 3  # pairs that are named of a stage
_QUERY = 40
_INDENT = "\N{EM SPACE}"  # which no medium collapses
_COLUMNS = (
    Column("stage", width=44),
    Column("rank", is_number=True),
    Column("score", is_number=True),
    Column("weight", is_number=True),
    Column("adds", is_number=True),
    Column("mostly by", width=44),
)


def load_stages(hits: Iterable[Hit]) -> None:
    """Compute what explains the stages of these hits, those of one leg in one batch."""
    stages = [stage for hit in hits if is_shown(hit.stages) for stage in hit.stages]
    load(stage.handle for stage in stages)
    load(stage.split for stage in stages)


def is_shown(stages: Sequence[Stage]) -> bool:
    """Whether there is more to say than what a line says."""
    return len(stages) > 1 or any(stage.kind == "mmr" for stage in stages)


def stages_view(hit: Hit) -> tuple[Block, ...]:
    """The table, and what is not known of some stages; nothing where there was only the search."""
    if not is_shown(hit.stages):
        return ()
    stages = expanded(hit.stages)
    rows = tuple(_row(stages, index, depth) for index, depth in enumerate(depths(stages)))
    used = [k for k, column in enumerate(_COLUMNS) if k < 2 or any(row[k] for row in rows)]
    notes = dict.fromkeys(stage.note for stage in stages if stage.note is not None)
    table = Table(tuple(_COLUMNS[k] for k in used), tuple(tuple(row[k] for k in used) for row in rows))
    return (table, *(Line(f"Note: {note}", "muted") for note in notes))


def _row(stages: Sequence[Stage], index: int, depth: int) -> tuple[str, ...]:
    stage = stages[index]
    asked = "" if stage.query is None else f" “{one_line(stage.query, _QUERY)}”"
    about = "" if stage.document is None else f" with {one_line(stage.document, _QUERY)}"
    return (
        f"{_INDENT * depth}{one_line(stage.name)}{asked}{about}",
        _rank(stage),
        _score(stages, index),
        "" if stage.weight is None else f"{stage.weight:.4g}",
        "" if stage.contribution is None else number(stage.contribution),
        _words(stage.handle.peek()),
    )


def _rank(stage: Stage) -> str:
    if stage.is_missed:
        return "not found"
    if stage.rank is None:
        return "" if stage.kind == "term" else "?"
    is_moved = stage.rank_before is not None and stage.rank_before != stage.rank
    return f"{stage.rank_before} → {stage.rank}" if is_moved else f"{stage.rank}"


def _score(stages: Sequence[Stage], index: int) -> str:
    stage, total = stages[index], fused(stages, index)
    unit = "" if stage.metric == "unknown" else f" {stage.metric}"
    if stage.score is not None:
        return f"{stage.score:.4f}{unit}"
    if total is not None:
        return f"(sum {total:.4f}{unit})"
    return "" if stage.is_missed or stage.kind in ("filter", "merge") else "no score"


def _words(explanation: Explanation | None) -> str:
    if explanation is None:
        return ""
    found = explanation.in_words().top_pairs(_WORDS)
    pairs = (f"{_pair(pair.query.label, pair.document.label)} {number(pair.value)}" for pair in found if pair.value)
    return one_line(", ".join(pairs))


def _pair(query: str, document: str) -> str:
    return query if query.casefold() == document.casefold() else f"{query}·{document}"
