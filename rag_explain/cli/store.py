"""rag-explain store info | verify | prune | export | forget: look after a folder of documents' factors."""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from rag_explain.errors import InvalidInput, StoreError, in_words

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def add(commands: Any) -> None:
    command = commands.add_parser("store", help="look after kept factors: info, verify, prune, export, forget")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run, help_text in (
        ("info", _info, "what is kept, and where"),
        ("verify", _verify, "read every row; delete damaged ones; exit code 1 when there were any"),
        ("prune", _prune, "drop the factors that were used longest ago"),
        ("export", _export, "copy every healthy row to another store"),
        ("forget", _forget, "erase documents by id, from every tier"),
    ):
        action = actions.add_parser(name, help=help_text)
        action.add_argument("store", help="the store's folder, or a bucket (s3://, gs://, az://, file://)")
        action.add_argument("--remote", help="the bucket that is asked after the folder")
        if name == "prune":
            action.add_argument("--max-size", required=True, help="bytes to keep, for example 500M or 2G")
        if name == "export":
            action.add_argument("target", help="folder or bucket to copy to")
        if name == "forget":
            action.add_argument("ids", nargs="*", help="ids of documents; - reads one per line from standard input")
        action.set_defaults(run=run)


def _open(arguments: argparse.Namespace, *, readonly: bool = False) -> Any:
    """The store, which must exist; of a bucket, that is not known before it is asked."""
    from rag_explain.store import Store
    from rag_explain.store.remote import Bucket

    place = arguments.store
    if "://" in place:
        return Store(remote=Bucket(place, make=False), readonly=readonly)
    with in_words(StoreError, f"the store at {place} may not be read by this user"):
        found = Path(place).is_dir() and any(name.startswith("factors.sqlite") for name in os.listdir(place))
    if not found:
        raise StoreError(f"there is no store at {place}: give the folder that an Explainer was given as `store`")
    remote = None if arguments.remote is None else Bucket(arguments.remote, make=False)
    return Store(place, remote=remote, readonly=readonly)


def _info(arguments: argparse.Namespace) -> None:
    with _open(arguments, readonly=True) as store:
        print(json.dumps({tier: about for tier, about in store.info().items() if about}, indent=2))


def _verify(arguments: argparse.Namespace) -> int:
    with _open(arguments, readonly=True) as store:
        report = store.verify()
    if any(counts["damaged"] for counts in report.values()):
        with _open(arguments) as store:  # to delete the damaged rows
            report = store.verify()
    for tier, counts in report.items():
        print(f"{tier}: {counts['rows']} rows, {counts['damaged']} damaged")
    return int(any(counts["damaged"] for counts in report.values()))


def _prune(arguments: argparse.Namespace) -> None:
    size = parse_size(arguments.max_size)
    with _open(arguments) as store:
        print(f"{store.prune(size)} rows dropped")


def _export(arguments: argparse.Namespace) -> None:
    from rag_explain.store import Store

    with _open(arguments, readonly=True) as store:
        place = arguments.target
        with Store(remote=place) if "://" in place else Store(place) as target:
            print(f"{store.export(target)} rows copied to {place}")


def _forget(arguments: argparse.Namespace) -> None:
    ids = _read_ids() if arguments.ids == ["-"] else arguments.ids
    if not ids:
        raise InvalidInput("give the ids of the documents to forget, or - to read them from standard input")
    with _open(arguments) as store:
        print(f"{store.forget(ids)} rows erased")


def _read_ids() -> list[str]:
    """One id per line of standard input, which may be closed or hold anything."""
    if sys.stdin is None:
        raise InvalidInput("standard input is closed: give the ids of the documents to forget as arguments")
    with in_words(InvalidInput, "the ids on standard input cannot be read", ": give one per line, in UTF-8"):
        return [line.rstrip("\n") for line in sys.stdin]


def parse_size(text: str) -> int:
    """Bytes from "500M", "2.5 GB", "1000"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)b?\s*", text.lower())
    if match is None:
        raise InvalidInput(f"{text!r} is not a size: write for example 500M or 2G")
    return int(float(match[1]) * _UNITS[match[2]])
