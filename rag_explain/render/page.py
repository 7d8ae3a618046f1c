"""Explanations as a self-contained page to explore, with a little script.

The page carries its data as JSON in a block that no browser runs; one script, named by its hash in the page's
Content-Security-Policy, turns it into text nodes. Nothing in a document becomes markup, nothing is fetched.
"""

import base64
import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import InvalidInput
from rag_explain.render import notebook
from rag_explain.render.blocks import Line, Table, View
from rag_explain.render.sentences import (
    adds_up,
    all_visible,
    background_line,
    balance,
    facts,
    missing,
    names,
    notices,
    returned,
    source,
    trust,
    units,
    unread,
    without_it,
)
from rag_explain.render.views.explanation import in_unit, pieces, terms
from rag_explain.render.views.overview import grid, said
from rag_explain.render.views.stages import load_stages, stages_view
from rag_explain.results.deferred import load
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit, Hits
from rag_explain.results.serialization import to_json
from rag_explain.texts.tokens import Role

Item: TypeAlias = Explanation | Hit | Sequence[Explanation]
"""What a page shows: an explanation, a hit, or several explanations of one pair by different methods."""

# A document with more words than this is shown by sentences beside its text, a shorter one by all its pairs.
LONG = 60
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_page(items: Iterable[Item], path: str | Path | None = None) -> str:
    """A page for explanations, hits, or groups of explanations of one pair; also written to `path`, if given."""
    return _page(_sections(items), path)


def write_answers(answers: Iterable[tuple[Sequence[str], Iterable[Item]]]) -> str:
    """A page for several answers, each with lines that say which it is and its items, which stay apart from others."""
    sections: list[dict[str, Any]] = []
    for about, items in answers:
        found = _sections(items) or [_section()]
        found[0]["about"] = list(about)
        sections += found
    return _page(sections, None)


def _page(sections: Sequence[dict[str, Any]], path: str | Path | None) -> str:
    style, script = _asset("page.css"), _asset("page.js")
    data = {"open": sum(len(section["cards"]) for section in sections) == 1, "sections": sections}
    body = _asset("explore.html").format(data=_json(data), script=script)
    sources = f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    return _written("Why these documents?", sources, body, path)


def write_view(view: View, path: str | Path | None = None, title: str = "Where to look") -> str:
    """A page of blocks without anything to explore, and so without a script; also written to `path`, if given."""
    body = f'<h1>{title}</h1>\n<div class="answer">{notebook.draw(view)}</div>'
    return _written(title, "style-src 'unsafe-inline'", body, path)


def _written(title: str, sources: str, body: str, path: str | Path | None) -> str:
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    page = _asset("page.html").format(policy=policy, title=title, style=_asset("page.css"), body=body)
    if path is not None:
        Path(path).write_text(page, encoding="utf-8")
    return page


def _section() -> dict[str, Any]:
    return {"about": [], "unread": [], "methods": [], "cards": [], "hits": [], "overview": None}


def _sections(items: Iterable[Item]) -> list[dict[str, Any]]:
    """One card for each item, in one section for each run of items of one query."""
    items = list(items)
    load(item.handle for item in items if isinstance(item, Hit))
    load_stages(item for item in items if isinstance(item, Hit))
    sections: list[dict[str, Any]] = []
    query: str | None = None
    found = [item for item in items if isinstance(item, Hit)]
    line = background_line(found) if len(found) == len(items) else None
    for at, item in enumerate(items):
        explanations = _explanations(item)
        asked = explanations[0].query if explanations else query  # without one, it stays with the query before it
        if not sections or asked != query:
            sections.append(_section())
            query = asked
        about = [text for one in explanations if asked is not None for text in unread(one, "query")]
        for name, values in (("unread", about), ("methods", [one.method for one in explanations])):
            said = sections[-1][name]
            said += dict.fromkeys(value for value in values if value not in said)
        card: dict[str, Any] = {"shown": [_shown_data(one) for one in explanations]}
        if isinstance(item, Hit):
            card |= {"rank": item.rank, "title": item.id, "text": item.text or ""}
            card |= {"facts": facts(item), "missing": missing(item), "stages": _stages(item)}
            card |= {"line": line[1]} if line is not None and line[0] == at else {}
            card |= {"whatIf": _what_if(item, explanations)}
            sections[-1]["hits"].append(item)
        sections[-1]["cards"].append(card)
    for section in sections:
        section["overview"] = _overview(section.pop("hits"))
    return sections


def _overview(hits: Sequence[Hit]) -> dict[str, Any] | None:
    """The grid of words by hits as plain data, where there are several hits."""
    found = Hits(hits).overview() if len(hits) > 1 else None
    drawn = () if found is None else grid(found)
    if found is None or not drawn:
        return None
    columns = found.columns(len(drawn[0].heads))
    return {**asdict(drawn[0]), "columns": columns, "said": [[line.text, line.tone] for line in said(found)]}


def _what_if(hit: Hit, explanations: Sequence[Explanation]) -> dict[str, dict[int, str]]:
    """For words of either side, what was computed of the score and the rank without them; nothing is computed here."""
    found = hit.peek_what_if()
    said: dict[str, dict[int, str]] = {"query": {}, "document": {}}
    for why in map(in_unit, explanations) if found is not None else ():
        for change in found.changes if found is not None else ():
            tokens = why.query_tokens if change.role == "query" else why.document_tokens
            for index, token in enumerate(tokens):
                if change.kind == "without" and change.spans == ((token.start, token.end),):
                    said[change.role][index] = without_it(change)
    return said


def _explanations(item: Item) -> tuple[Explanation, ...]:
    """The explanations of one card, by different methods; none for a hit that has none."""
    if isinstance(item, Hit):
        return () if item.explanation is None else (item.explanation,)
    group = (item,) if isinstance(item, Explanation) else tuple(item)
    if len({(one.query, one.document) for one in group}) != 1:
        raise InvalidInput("explanations shown as one must be of the same query and document")
    return group


def _shown_data(explanation: Explanation) -> dict[str, Any]:
    shown = in_unit(explanation)
    return {
        **{name: getattr(shown, name) for name in ("method", "unit", "score", "measure", "unattributed", "additive")},
        "returned": returned(shown.score, shown.measure, shown.returned),
        "balance": balance(shown),
        "checked": adds_up(shown),
        "trust": trust(shown),
        "units": units(shown),
        "source": source(shown),
        "unread": unread(shown, None if shown.query is None else "document"),
        "notices": notices(shown),
        "query": _pieces(shown, "query"),
        "document": _pieces(shown, "document"),
        "queryNames": names(shown.query_tokens),
        "documentNames": names(shown.document_tokens),
        "pairs": _rounded(shown.pairs),
        "querySums": _rounded(shown.query_saliency()[None])[0],
        "documentSums": _rounded(shown.document_saliency()[None])[0],
        "similarities": None if shown.similarities is None else _rounded(shown.similarities),
        "sentences": _sentences(shown),
        "terms": _terms(shown),
    }


def _stages(hit: Hit) -> dict[str, Any] | None:
    """The table of stages, as everywhere, and what is not known of some."""
    blocks = stages_view(hit)
    for table in blocks:
        if isinstance(table, Table):
            lines = [line.text for line in blocks if isinstance(line, Line)]
            return {"heads": [[one.title, int(one.is_number)] for one in table.columns], "rows": table.rows} | {
                "notes": lines
            }
    return None


def _terms(shown: Explanation) -> dict[str, Any] | None:
    """The table of terms, as everywhere: its columns, and whether each holds numbers."""
    for table in terms(shown):
        heads = [[one.title, int(one.is_number)] for one in table.columns]
        return {"title": table.title, "heads": heads, "rows": table.rows}
    return None


def _sentences(shown: Explanation) -> dict[str, Any] | None:
    if shown.unit == "word" and shown.can_be_grouped and len(shown.document_tokens) > LONG:
        grouped = shown.by_sentence()
        if len(grouped.document_tokens) > 1:
            sums = _rounded(grouped.document_saliency()[None])[0]
            texts, pairs = names(grouped.document_tokens), _rounded(grouped.pairs)
            starts = [word.start for word in shown.document_tokens]
            first = [bisect_left(starts, sentence.start) for sentence in grouped.document_tokens]
            return {"texts": texts, "pairs": pairs, "sums": sums, "first": first}
    return None


def _pieces(shown: Explanation, side: Role) -> list[list[Any]]:
    found = pieces(shown, side)
    return [
        [piece.text, -1 if piece.token is None else piece.token, int(piece.is_read), *([] if piece.is_known else [0])]
        for piece in found
    ]


def _rounded(values: NDArray[np.float32]) -> list[list[float]]:
    """Enough digits for what is shown; half the size of all of them."""
    return [[float(f"{value:.5g}") for value in row] for row in values.tolist()]


def _json(data: dict[str, Any]) -> str:
    """JSON that can stand inside a script element whatever it holds: no character of it can end the element."""
    return to_json(all_visible(data), compact=True).translate(_ESCAPES)


@cache
def _asset(file: str) -> str:
    return resources.files("rag_explain.render").joinpath(file).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
