"""rag-explain log list | show | export | verify | diff | erase"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_explain.cli.explain import load_explainer
from rag_explain.cli.output import count
from rag_explain.errors import InvalidInput, LogError
from rag_explain.log import erase, find, records, summaries
from rag_explain.log.diff import Move, diff
from rag_explain.log.record import LoggedHit, Record
from rag_explain.log.verify import Explainers, verify
from rag_explain.render.page import write_answers
from rag_explain.render.sentences import one_line, ranked, unread

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer


def add(commands: Any) -> None:
    command = commands.add_parser("log", help="read, check, compare and erase logged explanations")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    action = _action(actions, "list", _list, "one line per record, the newest last")
    action.add_argument("--limit", type=count, default=None, help="only the newest records")
    action.add_argument("--document", default=None, help="only records in which this document was retrieved")
    action.add_argument("--json", action="store_true", help="one JSON object per line")

    action = _action(actions, "show", _show, "one record: answer, documents, strongest word pairs")
    action.add_argument("id", help="the record's id, or enough of its beginning, or last")
    action.add_argument("--pairs", type=count, default=5, help="word pairs per document (default: 5)")
    action.add_argument("--json", action="store_true", help="print the record as it stands in the log")

    action = _action(actions, "export", _export, "records as JSON lines, or as one HTML page")
    action.add_argument("--id", default=None, help="only this record; last: the newest")
    action.add_argument("--format", choices=("jsonl", "html"), default="jsonl")
    action.add_argument("-o", "--output", default=None, help="a file (default: standard output)")

    action = _action(actions, "verify", _verify, "check digests and hashes, and compute explanations again")
    action.add_argument("--id", default=None, help="only this record")
    action.add_argument("--model", default=None, help="the encoder at hand (default: the one each record names)")
    action.add_argument("--device", default=None, help="where to compute, for example cpu or cuda")
    action.add_argument("--no-model", action="store_true", help="check digests and hashes only")
    action.add_argument("--documents", default=None, help='today\'s texts: JSON lines with "id" and "text"')
    tolerance = "relative to the sum of |pairs| or |score| (default: 1e-4)"
    action.add_argument("--tolerance", type=float, default=1e-4, help=tolerance)
    action.add_argument("--key-file", default=None, help="the key of keyed hashes")

    action = _action(actions, "diff", _diff, "compare two logs of the same queries")
    action.add_argument("after", help="the later log")
    action.add_argument("--all", action="store_true", help="also documents whose rank is the same")
    action.add_argument("--pairs", type=count, default=5, help="word pairs per document (default: 5)")
    action.add_argument("--json", action="store_true", help="one JSON object per line")

    action = _action(actions, "erase", _erase, "remove records or documents for good")
    action.add_argument("--record", action="append", default=[], metavar="ID", help="a whole record")
    action.add_argument("--document", action="append", default=[], metavar="ID", help="a document, in every record")


def _action(actions: Any, name: str, run: Any, about: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=about, description=about)
    action.add_argument("path", help="the log's folder, or one file of it")
    action.set_defaults(run=partial(_warning, run))
    return action


def _warning(run: Callable[[argparse.Namespace], int | None], arguments: argparse.Namespace) -> int | None:
    """Run an action, with the log's warnings on standard error: which files could not be read whole."""
    logger, handler = logging.getLogger("rag_explain.log"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("rag-explain: %(message)s"))
    logger.addHandler(handler)
    try:
        return run(arguments)
    finally:
        logger.removeHandler(handler)


def _list(arguments: argparse.Namespace) -> None:
    wanted = arguments.document
    found = [summary for summary in summaries(arguments.path) if wanted is None or wanted in summary.documents]
    for summary in found if arguments.limit is None else found[max(0, len(found) - arguments.limit) :]:
        if arguments.json:
            print(json.dumps({**asdict(summary), "time": summary.time.isoformat()}))
            continue
        if summary.dropped:
            print(f"{'':32}  {summary.dropped} records are missing here: they were dropped")
        time = summary.time.strftime("%Y-%m-%d %H:%M:%S")
        explained = f"{summary.explained}/{len(summary.documents)}"
        print(f"{summary.id}  {time}  {explained:>5}  {one_line(summary.query, 70)}")


def _show(arguments: argparse.Namespace) -> None:
    record = find(arguments.path, arguments.id)
    if arguments.json:
        print(record.to_json())
        return
    print(f"{record.id}  {record.time:%Y-%m-%d %H:%M:%S} UTC")
    print(f"query   {one_line(record.query, 300)}")
    print(f"answer  {one_line(record.answer, 300)}")
    explained = (hit.explanation.outline for hit in record.logged_hits if hit.explanation is not None)
    for sentence in dict.fromkeys(text for one in explained for text in unread(one, "query")):
        print(f"! {one_line(sentence, 300)}")
    for hit in record.logged_hits:
        print("", *_hit_lines(hit, arguments.pairs), sep="\n")


def _hit_lines(hit: LoggedHit, count: int) -> Iterator[str]:
    score = "no score" if hit.score is None else f"{hit.score:.4f}"
    name = one_line(hit.id, 80) or "(erased)"
    yield f"{hit.rank}. {name}  {one_line(hit.metric, 40)} {score}  {one_line(hit.text, 80)}"
    if hit.query is not None:
        yield f"   found by asking: {one_line(hit.query, 300)}"
    if ranked(hit.stages):
        yield f"   {one_line(ranked(hit.stages), 300)}"
    why = hit.explanation
    if why is None:
        yield f"   not explained: {one_line(hit.reason or hit.status, 300)}"
        return
    yield from (f"   ! {one_line(sentence, 300)}" for sentence in unread(why.outline, "document"))
    gap = "not additive" if why.gap is None else f"gap {why.gap:+.1e}"
    figures = f"score {why.outline.score:.4f}, {gap}, unattributed {why.unattributed:+.4f}"
    yield f"   {why.outline.method}, {one_line(why.outline.model, 80)}: {figures}"
    if why.outline.surrogate:
        yield f"   explained instead: {one_line(why.outline.surrogate, 300)}"
    for pair in why.pairs[:count]:
        sides = (one_line(token.label or f"[{token.start}:{token.end}]", 40) for token in (pair.query, pair.document))
        yield f"   {pair.value:+.4f}  {pair.share:6.1%} of |pairs|  {' ~ '.join(sides)}"


def _export(arguments: argparse.Namespace) -> None:
    if arguments.format == "html" and arguments.output is None and sys.stdout.isatty():
        raise InvalidInput("a page is not for the terminal: give -o FILE")
    found = iter([find(arguments.path, arguments.id)]) if arguments.id else records(arguments.path)
    texts: Iterable[str] = (record.to_json() + "\n" for record in found)
    if arguments.format == "html":
        texts = [write_answers((_about(record), record.hits) for record in found)]
    if arguments.output is None:
        sys.stdout.writelines(texts)
        return
    try:
        with Path(arguments.output).open("w", encoding="utf-8") as file:
            file.writelines(texts)
    except OSError as error:
        raise LogError(f"{arguments.output} cannot be written: {error.strerror}") from error


def _about(record: Record) -> list[str]:
    """What a page says of a record: when, which, what was asked and answered."""
    answer = [] if record.answer is None else [f"Answer: {record.answer}"]
    return [f"{record.time:%Y-%m-%d %H:%M:%S} UTC · {record.id}", f"Question: {record.query}", *answer]


def _verify(arguments: argparse.Namespace) -> int:
    """Exit code 1 when something does not hold; 0 when everything that could be checked does."""
    explainers = None if arguments.no_model else _explainers(arguments.model, arguments.device)
    documents = {} if arguments.documents is None else _read_documents(arguments.documents)
    key = None if arguments.key_file is None else _read_key(arguments.key_file)
    chosen = {"record_id": arguments.id, "tolerance": arguments.tolerance}
    outcomes: Counter[str] = Counter()
    for verdict in verify(arguments.path, explainers, documents=documents, hash_key=key, **chosen):
        outcomes[verdict.outcome] += 1
        shift = "" if verdict.shift is None else f"  moved by {verdict.shift:.1e}"
        reason = f"  {one_line(verdict.reason, 300)}" if verdict.reason else ""
        print(f"{verdict.outcome:8} {verdict.record:32} {one_line(verdict.document, 80)}{shift}{reason}")
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())) or "nothing to check")
    return int(any(outcomes[outcome] for outcome in ("moved", "changed", "damaged")))


def _explainers(model: str | None, device: str | None) -> Explainers:
    """One Explainer for each model, method and settings that the records name."""

    @cache
    def made(name: str, method: str, settings: str) -> Explainer:
        return load_explainer(name, method, device=device, **json.loads(settings))  # settings are options by name

    return lambda logged: made(model or logged.model, logged.method, json.dumps(dict(logged.settings), sort_keys=True))


def _read_documents(path: str) -> dict[str, str]:
    try:
        with Path(path).open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        return {str(row["id"]): str(row["text"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f'{path} must hold JSON lines with "id" and "text": {error}') from error


def _read_key(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidInput(f"the key file {path} cannot be read: {error.strerror}") from error


def _diff(arguments: argparse.Namespace) -> None:
    compared = moved = 0
    query = None
    for move in diff(arguments.path, arguments.after, top=arguments.pairs):
        compared += 1
        moved += move.moved
        if not (arguments.all or move.moved):
            continue
        if arguments.json:
            print(json.dumps(asdict(move)))
            continue
        if move.query != query:
            query = move.query
            print(f"\n{one_line(query, 100)}")
        print(*_move_lines(move), sep="\n")
    if not arguments.json:
        print(f"\n{moved} of {compared} documents moved")


def _move_lines(move: Move) -> Iterator[str]:
    ranks = _both("rank {}", move.rank_before, move.rank_after, "not retrieved")
    is_scored = move.score_before is not None and move.score_after is not None
    scores = ", " + _both("{:.4f}", move.score_before, move.score_after) if is_scored else ""
    note = ", the text has changed" if move.same_text is False else ""
    yield f"  {one_line(move.document, 80)}: {ranks}{scores}{note}"
    for pair in move.pairs:
        values = _both("{:+.4f}", pair.before, pair.after, "not kept")
        yield f"    {pair.change:+.4f}  {one_line(pair.query, 40)} ~ {one_line(pair.document, 40)}  ({values})"


def _both(form: str, before: float | None, after: float | None, missing: str = "") -> str:
    return " -> ".join(missing if value is None else form.format(value) for value in (before, after))


def _erase(arguments: argparse.Namespace) -> None:
    print(f"{erase(arguments.path, records=arguments.record, documents=arguments.document)} records changed")
