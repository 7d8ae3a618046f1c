"""rag-explain log list | show | export | verify | diff | erase"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_explain.errors import InvalidInput, LogError
from rag_explain.render.sentences import one_line

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer
    from rag_explain.log.diff import Move
    from rag_explain.log.record import LoggedHit
    from rag_explain.log.verify import Explainers
    from rag_explain.results.explanation import Explanation


def add(commands: Any) -> None:
    """Register the command and what it can do."""
    command = commands.add_parser("log", help="read, check, compare and erase logged explanations")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    listing = _action(actions, "list", _list, "one line per record, the newest last")
    listing.add_argument("--limit", type=int, default=None, help="only the newest records")
    listing.add_argument("--document", default=None, help="only records in which this document was retrieved")
    listing.add_argument("--json", action="store_true", help="one JSON object per line")

    show = _action(actions, "show", _show, "one record: answer, documents, strongest word pairs")
    show.add_argument("id", help="the record's id, or enough of its beginning")
    show.add_argument("--pairs", type=int, default=5, help="word pairs per document (default: 5)")
    show.add_argument("--json", action="store_true", help="print the record as it stands in the log")

    export = _action(actions, "export", _export, "records as JSON lines, or as one HTML page")
    export.add_argument("--id", default=None, help="only this record")
    export.add_argument("--format", choices=("jsonl", "html"), default="jsonl")
    export.add_argument("-o", "--output", default=None, help="a file (default: standard output)")

    verify = _action(actions, "verify", _verify, "check digests and hashes, and compute explanations again")
    verify.add_argument("--id", default=None, help="only this record")
    verify.add_argument("--model", default=None, help="the encoder at hand (default: the one each record names)")
    verify.add_argument("--device", default=None, help="where to compute, for example cpu or cuda")
    verify.add_argument("--no-model", action="store_true", help="check digests and hashes only")
    verify.add_argument("--documents", default=None, help='today\'s texts: JSON lines with "id" and "text"')
    verify.add_argument("--tolerance", type=float, default=1e-4, help="in score units (default: 1e-4)")
    verify.add_argument("--key-file", default=None, help="the key of keyed hashes")

    diff = _action(actions, "diff", _diff, "compare two logs of the same queries")
    diff.add_argument("after", help="the later log")
    diff.add_argument("--all", action="store_true", help="also documents whose rank is the same")
    diff.add_argument("--pairs", type=int, default=5, help="word pairs per document (default: 5)")
    diff.add_argument("--json", action="store_true", help="one JSON object per line")

    erase = _action(actions, "erase", _erase, "remove records or documents for good")
    erase.add_argument("--record", action="append", default=[], metavar="ID", help="a whole record")
    erase.add_argument("--document", action="append", default=[], metavar="ID", help="a document, in every record")


def _action(actions: Any, name: str, run: Any, about: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=about, description=about)
    action.add_argument("path", help="the log's folder, or one file of it")
    action.set_defaults(run=run)
    return action


def _list(arguments: argparse.Namespace) -> int:
    from rag_explain.log import summaries

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
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from rag_explain.log import find

    record = find(arguments.path, arguments.id)
    if arguments.json:
        print(record.to_json())
        return 0
    print(f"{record.id}  {record.time:%Y-%m-%d %H:%M:%S} UTC")
    print(f"query   {one_line(record.query, 300)}")
    print(f"answer  {one_line(record.answer, 300)}")
    for hit in record.logged_hits:
        print("", *_hit_lines(hit, arguments.pairs), sep="\n")
    return 0


def _hit_lines(hit: LoggedHit, count: int) -> Iterator[str]:
    score = "no score" if hit.score is None else f"{hit.score:.4f}"
    name = one_line(hit.id, 80) or "(erased)"
    yield f"{hit.rank}. {name}  {one_line(hit.metric, 40)} {score}  {one_line(hit.text, 80)}"
    why = hit.explanation
    if why is None:
        yield f"   not explained: {one_line(hit.reason or hit.status, 300)}"
        return
    gap = "not additive" if why.gap is None else f"gap {why.gap:+.1e}"
    figures = f"score {why.outline.score:.4f}, {gap}, unattributed {why.unattributed:+.4f}"
    yield f"   {why.outline.method}, {one_line(why.outline.model, 80)}: {figures}"
    if why.outline.surrogate:
        yield f"   explained instead: {one_line(why.outline.surrogate, 300)}"
    for pair in why.pairs[:count]:
        sides = (one_line(token.label or f"[{token.start}:{token.end}]", 40) for token in (pair.query, pair.document))
        yield f"   {pair.value:+.4f}  {pair.share:6.1%} of |pairs|  {' ~ '.join(sides)}"


def _export(arguments: argparse.Namespace) -> int:
    from rag_explain.log import find, records

    found = iter([find(arguments.path, arguments.id)]) if arguments.id else records(arguments.path)
    texts: Iterable[str] = (record.to_json() + "\n" for record in found)
    if arguments.format == "html":
        from rag_explain.results.hits import Hits

        texts = [Hits(hit for record in found for hit in record.hits).to_html()]
    if arguments.output is None:
        sys.stdout.writelines(texts)
        return 0
    try:
        with Path(arguments.output).open("w", encoding="utf-8") as file:
            file.writelines(texts)
    except OSError as error:
        raise LogError(f"{arguments.output} cannot be written: {error.strerror}") from error
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    """Exit code 1 when something does not hold; 0 when everything that could be checked does."""
    from rag_explain.log.verify import verify

    explainers = None if arguments.no_model else _explainers(arguments.model, arguments.device)
    documents, key = _read_documents(arguments.documents), _read_key(arguments.key_file)
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
    made: dict[str, Explainer] = {}

    def explainer(logged: Explanation) -> Explainer:
        from transformers.utils import logging

        from rag_explain.explainer import Explainer

        logging.disable_progress_bar()
        name, settings = model or logged.model, dict(logged.settings)
        key = json.dumps([name, logged.method, settings], sort_keys=True)
        if key not in made:
            made[key] = Explainer(name, logged.method, device=device, **settings)  # settings are options by name
        return made[key]

    return explainer


def _read_documents(path: str | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        with Path(path).open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        return {str(row["id"]): str(row["text"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f'{path} must hold JSON lines with "id" and "text": {error}') from error


def _read_key(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidInput(f"the key file {path} cannot be read: {error.strerror}") from error


def _diff(arguments: argparse.Namespace) -> int:
    from rag_explain.log.diff import diff

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
    return 0


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


def _erase(arguments: argparse.Namespace) -> int:
    from rag_explain.log import erase

    changed = erase(arguments.path, records=arguments.record, documents=arguments.document)
    print(f"{changed} records changed")
    return 0
