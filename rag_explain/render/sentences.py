"""The words of every view, computed once: numbers, names, whether it adds up, what a reader must know."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rag_explain.results.calibration import LINE
from rag_explain.results.contrast import NO_WORD, StageDifference
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit
from rag_explain.results.metric import Metric
from rag_explain.results.notices import METHOD, READING, STAND_INS
from rag_explain.results.stages import Stage, first_of, fused, legs_of
from rag_explain.results.what_if import Change
from rag_explain.texts.tokens import Role, Token, Unit

# Control characters move cursors and colour terminals, overrides turn text around: shown as such, not obeyed.
_ACTING = (*range(9), *range(11, 32), *range(0x7F, 0xA0), 0x202D, 0x202E, *range(0xD800, 0xE000))
_CONTROLS = dict.fromkeys(_ACTING, 0xFFFD)
# What turns a part of a text around until it is closed: a line that is cut may have lost the closing one.
_DIRECTIONS = dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)])
_MET = 3
UNKNOWN_WORD = "unknown to this encoder, which takes all such words for one: no match"
_ASKED = 40


def visible(text: str) -> str:
    """`text` without anything that acts instead of being seen."""
    return text.replace("\r\n", "\n").replace("\r", "\n").translate(_CONTROLS)


def all_visible(value: Any) -> Any:
    """The same value with every string in it visible, inside tuples, lists and dictionaries."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, tuple | list):
        return type(value)(map(all_visible, value))
    return {key: all_visible(item) for key, item in value.items()} if isinstance(value, dict) else value


def one_line(text: str | None, width: int | None = None) -> str:
    """Visible text on one line of at most `width` characters; what is cut off is marked."""
    if text is None:
        return "(no text)"
    flat = " ".join(visible(text.translate(_DIRECTIONS)).split())
    return flat if width is None or len(flat) <= width else f"{flat[: width - 1]}…"


def name(token: Token, index: int, width: int | None = None) -> str:
    """What to call a token; by its number where its text is not kept."""
    return one_line(token.label, width) or f"{index + 1}"


def names(tokens: Iterable[Token], width: int | None = None) -> list[str]:
    """What to call the tokens of one side."""
    return [name(token, index, width) for index, token in enumerate(tokens)]


def number(value: float) -> str:
    """A signed number in score units."""
    return f"{value:+.4f}"


def units(explanation: Explanation) -> str:
    """What the numbers of an explanation are: parts of its score only where they are meant to add up to it."""
    return "score units" if explanation.additive else f"{explanation.method} values"


def parts(total: float, unattributed: float, unit: Unit) -> str:
    """What to write after a total: the sum of what pairs of this unit carry and what no pair carries."""
    return f" = {number(total - unattributed)} {unit}s {number(unattributed)} no {unit}"


def returned(score: float, measure: str, value: float | None) -> str:
    """What the model gave, where that is made of the score; nothing where it is the score itself."""
    is_same = value is None or abs(value - score) <= 1e-6 * max(1.0, abs(score))
    return "" if is_same else f"the model returned {value:.4f}, made of this {measure}"


def balance(explanation: Explanation) -> str:
    """Whether it adds up, in one sentence."""
    gap = explanation.gap
    if gap is None:
        return f"{explanation.method} ranks pairs and does not claim to add up to the score"
    return f"{'adds up to the score' if adds_up(explanation) else 'does not add up to the score'}, gap {gap:+.1e}"


def adds_up(explanation: Explanation) -> bool:
    """Whether what it is made of is the score, up to rounding."""
    size = max(1.0, float(np.abs(explanation.matrix, dtype=np.float64).sum()))
    return explanation.gap is not None and abs(explanation.gap) <= 1e-4 * size


def trust(explanation: Explanation) -> str:
    """How far the numbers are to be trusted, on one line; nothing when all is well."""
    found = explanation.trust
    sums = f"pairs {found.positive:+.2f} {found.negative:+.2f}; " if explanation.additive else ""
    return f"Trust: {sums}{'; '.join(found.doubts)}" if found.doubts else ""


def source(explanation: Explanation) -> str:
    """Which method on which model, with its settings."""
    settings = [f"{key} {value}" for key, value in explanation.settings.items() if value is not None]
    return " · ".join(part for part in [explanation.method, explanation.model, *settings] if part)


def unread(explanation: Explanation, side: Role | None = None) -> list[str]:
    """What the encoder could not read, of one side or of both: what every view says first.

    A query that is shown once for several hits has it said there, one that is not kept beside each of its hits.
    """
    found = (notice for notice in explanation.notices if notice.code in READING)
    return [notice.text for notice in found if side is None or (notice.side or "document") == side]


def notices(explanation: Explanation) -> list[str]:
    """What else a reader must know before trusting the numbers."""
    found = [] if explanation.surrogate is None else [f"Stand-in: {explanation.surrogate}"]
    told = [notice for notice in explanation.notices if notice.code not in (*READING, *STAND_INS)]
    found += [f"Note: {one.text}" if one.code == METHOD or one.level == "note" else one.text for one in told]
    if explanation.query is None or explanation.document is None:
        found.append("The texts were not kept: words are shown by their numbers.")
    if explanation.references:
        found.append("References: " + ", ".join(f"{key} {value:.4g}" for key, value in explanation.references.items()))
    return found


def facts(hit: Hit) -> str:
    """What ranked this hit and with what score, and what its similarity is exactly where that differs."""
    last = _standing(hit.stages, len(hit.stages) - 1) if len(hit.stages) > 1 else ""
    found = [last or ("no score of its own" if hit.score is None else f"{hit.score:.4f} {hit.metric}")]
    if hit.similarity is not None and (hit.score is None or abs(hit.similarity - hit.score) > 5e-5):
        found.append(f"exact similarity {hit.similarity:.4f}")
    if hit.gap is not None and abs(hit.gap) > 5e-5:
        found.append(f"the index differs by {hit.gap:+.4f}")
    found += [standing(hit)] if hit.standing is not None else []
    return " · ".join(found)


def standing(hit: Hit) -> str:
    """Where a hit stands among unrelated pairs, where that was measured."""
    share = hit.standing
    if share is None or hit.calibration is None:
        return ""
    if share >= 1:
        return f"above all {hit.calibration.pairs:,} unrelated pairs"
    above = f"above {math.floor(1000 * share) / 10:g} % of unrelated pairs"
    return (
        above if share >= LINE else f"no better than chance: {100 * (1 - share):.2g} % of unrelated pairs score as high"
    )


def background(standings: Sequence[float | None]) -> int | None:
    """Before which of the hits background begins, by its place; None where it does not."""
    below = [share is not None and share < LINE for share in standings]
    return next((at for at in range(len(below)) if all(below[at:])), None)


def background_line(hits: Sequence[Hit]) -> tuple[int, str] | None:
    """The same, and how to say so."""
    start = background([hit.standing for hit in hits])
    calibration = None if start is None else hits[start].calibration
    if start is None or calibration is None:
        return None
    score = Metric.named(calibration.metric).score(calibration.line())
    where = f"similarity {calibration.line():.4f}" if score is None else f"{score:.4f} {calibration.metric}"
    better = "above" if Metric.named(calibration.metric).is_distance else "below"
    told = f"{LINE:.0%} of unrelated pairs are {better} {where}"
    if calibration.source == "sentences":
        told += ", measured with sentences of other documents"
    return start, f"background begins here: {told}"


def without_it(change: Change) -> str:
    """What the score and the rank really are without a part."""
    if change.score is None or change.change is None:
        return "without it no text would be left"
    rank = "" if change.rank is None else f", rank {change.rank:,}"
    by = number(change.change).replace("-", "−")  # as the page writes its own numbers
    return f"without it the score is {change.score:.4f} ({by}){rank}"


def ranked(stages: Sequence[Stage]) -> str:
    """What every stage made of a hit, the last one first, legs in brackets; nothing where there was only the search."""
    return _ranked(stages, len(stages) - 1) if len(stages) > 1 else ""


def _ranked(stages: Sequence[Stage], index: int) -> str:
    """What the stage at `index` made of it, and those before."""
    ends, first = legs_of(stages, index), first_of(stages, index)
    if ends:
        legs = ", ".join(_ranked(stages, end) for end in ends)
        return f"{_standing(stages, index)}, of [{legs}]"
    more = "" if first == index else f"; before that {_ranked(stages, index - 1)}"
    return f"{_standing(stages, index)}{more}"


def _standing(stages: Sequence[Stage], index: int) -> str:
    stage, total = stages[index], fused(stages, index)
    if stage.is_missed:
        return f"not found by {stage.name}"
    how = "after" if stage.kind == "filter" else "by"
    where = f"{how} {stage.name}" if stage.rank is None else f"rank {stage.rank} {how} {stage.name}"
    unit = "" if stage.metric == "unknown" else f" {stage.metric}"
    share = "" if stage.contribution is None else f", adds {stage.contribution:.4f}"
    no_score = "" if stage.kind in ("filter", "merge") or share else "no score"
    score = no_score if stage.score is None else f"{stage.score:.4f}{unit}"
    score = f"sum {total:.4f}{unit}" if stage.score is None and total is not None else score
    told = f"{score}{share}".removeprefix(", ")
    return f"{where} ({told})" if told else where


def place(number: int | None) -> str:
    """A rank in words: 1st, 2nd, 11th."""
    if number is None:
        return "not found"
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def across(stages: Sequence[StageDifference]) -> list[str]:
    """Where each search had both documents, and what every stage after them made of that."""
    both = [(one, one.wanted, one.got) for one in stages]
    pairs = [(one, wanted, got) for one, wanted, got in both if wanted is not None and got is not None]
    searches = [(wanted, got) for _, wanted, got in pairs if wanted.kind == "search"]
    told = [
        f"{side} was " + " and ".join(_found(own[which].name, own[which]) for own in searches)
        for which, side in enumerate(("wanted", "got"))
        if searches
    ]
    return [*told, *(_put(*own) for own in pairs if own[1].kind not in ("search", "term"))]


def _found(name: str, stage: Stage) -> str:
    asked = "" if stage.query is None else f" “{one_line(stage.query, _ASKED)}”"
    how = f"{place(stage.rank)} by" if stage.is_missed else f"{place(stage.rank)} for"
    return f"{how} {name}{asked}"


def _put(one: StageDifference, wanted: Stage, got: Stage) -> str:
    where = "" if wanted.rank is None or got.rank is None else "below" if wanted.rank > got.rank else "above"
    said = f"{one.name} put wanted {place(wanted.rank)}, {where} got ({place(got.rank)})"
    why = one.contrast
    if why is None:
        return said
    side = 1 if where == "below" else -1
    words = [item for item in why.query_words() if item.query != NO_WORD and item.value * side > 0][:_MET]
    return f"{said}, for " + ", ".join(f"{item.query} {number(item.value)}" for item in words) if words else said


def missing(hit: Hit) -> str:
    """Why there is nothing to show."""
    return f"No explanation ({hit.status}): {hit.reason or 'no reason given'}"


def met(explanation: Explanation, side: Role, index: int) -> str:
    """What one token carries and the tokens of the other side it met most."""
    row = explanation.pairs[index] if side == "query" else explanation.pairs[:, index]
    others = explanation.document_tokens if side == "query" else explanation.query_tokens
    best = np.argsort(-np.abs(row), kind="stable")[:_MET]
    named = ", ".join(f"{name(others[k], int(k))} {number(float(row[k]))}" for k in best)
    return f"carries {number(float(row.sum()))} {units(explanation)}; met {named}" if named else ""
