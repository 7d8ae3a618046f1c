"""How an index of words reads a text: its terms, and where in the caller's text each of them stands.

An analyser changes what it reads: small letters, stems, words left out. Where it is a pattern with settings, as bm25s
has it, it is run here as it is there, with the places. Any other function is asked again for parts of the text: when
the terms of all words, one after the other, are the terms of the text, each term stands where its word does.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any

from rag_explain.errors import InvalidInput, in_words
from rag_explain.texts.segments import Span, part_spans, word_spans

# A term, and where it stands in the text; None where that cannot be told.
Placed = tuple[str, Span | None]
_CHUNK = re.compile(r"\S+")


class Analyser(ABC):
    """Reads a text as an index read it. `name` is what to call it."""

    name: str

    @property
    def description(self) -> str:
        """What is known of how it reads, for the identity of scores."""
        return self.name

    @abstractmethod
    def placed(self, text: str) -> list[Placed]:
        """The terms of a text in the index's order, each with its place."""


@dataclass(frozen=True)
class PatternAnalyser(Analyser):
    """A regular expression in the text in small letters, without stop words, stemmed.

    `stem` takes a list of words and gives one stem for each.
    """

    name: str
    pattern: re.Pattern[str]
    lower: bool = True
    stopwords: frozenset[str] = frozenset()
    stem: Callable[[list[str]], Any] | None = None

    @property
    def description(self) -> str:
        return repr((self.name, self.pattern.pattern, self.lower, sorted(self.stopwords), self.stem is not None))

    def placed(self, text: str) -> list[Placed]:
        read, places = _lowered(text) if self.lower else (text, range(len(text) + 1))
        which = self.pattern.groups  # findall, which bm25s calls, gives the group where there is one
        found = [(match[which], match.span(which)) for match in self.pattern.finditer(read)]
        words = [(word, (places[a], places[b])) for word, (a, b) in found if word not in self.stopwords]
        distinct = list(dict.fromkeys(word for word, _ in words))
        stems = distinct
        if self.stem is not None and distinct:
            with in_words(InvalidInput, f"the stemmer of {self.name} failed"):
                stems = _strings(self.stem(distinct), self.name)
        terms = dict(zip(distinct, stems, strict=True))
        return [(terms[word], span) for word, span in words]


class FunctionAnalyser(Analyser):
    """Any function from a text to its terms. It is asked for parts of the text too, to find where terms stand."""

    def __init__(self, call: Callable[[str], Any], name: str) -> None:
        self._call, self.name = call, name

    def placed(self, text: str) -> list[Placed]:
        terms = lru_cache(None)(self._terms)  # a text says many words several times
        whole = terms(text)
        chunks = [match.span() for match in _CHUNK.finditer(text)]
        if whole == _joined(terms(text[a:b]) for a, b in chunks):
            return [one for a, b in chunks for one in _in_chunk(text, (a, b), terms)]
        found = _in_turn(text, whole)
        return list(zip(whole, found or _by_words(text, whole, terms), strict=True))

    def _terms(self, text: str) -> list[str]:
        with in_words(InvalidInput, f"the analyser {self.name} failed on a text"):
            given = self._call(text)
            if hasattr(given, "ids") and hasattr(given, "vocab"):  # what bm25s.tokenize gives
                words = {number: word for word, number in given.vocab.items()}
                given = [words[number] for number in given.ids[0]]
            given = given if isinstance(given, str) else list(given)
            # Of one text, some give a list of one list.
            return _strings(given[0] if len(given) == 1 and isinstance(given[0], list) else given, self.name)


def as_analyser(given: Any) -> Analyser:
    """The analyser that a user's object is: a tokenizer of bm25s, its `tokenize` with settings, or any function."""
    if isinstance(given, Analyser):
        return given
    name = getattr(given, "__qualname__", None) or type(given).__name__
    if callable(getattr(given, "splitter", None)) and hasattr(given, "stopwords"):
        return _of_tokenizer(given, name)
    function, settings = (given.func, given.keywords) if isinstance(given, partial) else (given, {})
    if isinstance(given, partial):
        name = getattr(function, "__qualname__", name)
    if getattr(function, "__module__", "") == "bm25s.tokenization" and getattr(function, "__name__", "") == "tokenize":
        return of_settings(settings, "bm25s.tokenize")
    if not callable(given):
        raise InvalidInput(f"an analyser is a function from a text to its words, not {name}")
    return FunctionAnalyser(given, name)


def of_settings(settings: dict[str, Any], name: str) -> PatternAnalyser:
    """`bm25s.tokenize` with these settings."""
    stem = settings.get("stemmer")
    return PatternAnalyser(
        name,
        _pattern(re.compile(settings.get("token_pattern", r"(?u)\b\w\w+\b"))),
        lower=bool(settings.get("lower", True)),
        stopwords=stop_words(settings.get("stopwords", "english")),
        stem=getattr(stem, "stemWords", stem),
    )


def stop_words(given: Any) -> frozenset[str]:
    """The stop words that bm25s knows by this name, or the ones given."""
    if given is None or given is False:
        return frozenset()
    if isinstance(given, str) or given is True:
        from bm25s import tokenization

        with in_words(InvalidInput, f"bm25s knows no stop words {given!r}"):
            given = tokenization._infer_stopwords(given)
    return frozenset(given)


def _of_tokenizer(tokenizer: Any, name: str) -> Analyser:
    """A bm25s Tokenizer, which is only read: it would learn the words of a text that it is asked for."""
    stem = tokenizer.stemmer
    every = None if stem is None else lambda words: [stem(word) for word in words]
    pattern = getattr(tokenizer.splitter, "__self__", None)
    stopwords = frozenset(tokenizer.stopwords or ())
    if isinstance(pattern, re.Pattern) and tokenizer.splitter.__name__ == "findall":
        return PatternAnalyser(name, _pattern(pattern), bool(tokenizer.lower), stopwords, every)

    def call(text: str) -> list[str]:
        words = tokenizer.splitter(text.lower() if tokenizer.lower else text)
        kept = [word for word in words if word not in stopwords]
        return kept if every is None else every(kept)

    return FunctionAnalyser(call, name)


def _pattern(pattern: re.Pattern[str]) -> re.Pattern[str]:
    if pattern.groups > 1:
        raise InvalidInput(f"the pattern {pattern.pattern!r} has several groups, so it finds no words: use (?:...)")
    return pattern


def _strings(given: Any, name: str) -> list[str]:
    if isinstance(given, str) or not all(isinstance(one, str) for one in given):
        raise InvalidInput(f"the analyser {name} must give a list of strings for a text")
    return [str(one) for one in given]


def _lowered(text: str) -> tuple[str, Sequence[int]]:
    """The text in small letters, and for each of its characters, and its end, the place in the text."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower, range(len(text) + 1)
    sizes = [len(character.lower()) for character in text]  # one letter may become two: İ
    places = [at for at, size in enumerate(sizes) for _ in range(size)]
    return lower, [*places, len(text)]


def _joined(parts: Iterable[Sequence[str]]) -> list[str]:
    return list(chain.from_iterable(parts))


def _in_chunk(text: str, chunk: Span, terms: Callable[[str], list[str]]) -> list[Placed]:
    """The terms of a part of the text without blanks: by its words, in turn, or all of them in all of it."""
    found = terms(text[slice(*chunk)])
    if len(found) == 1 and found[0].lower() == text[slice(*chunk)].lower():
        return [(found[0], chunk)]
    words = [(chunk[0] + a, chunk[0] + b) for a, b in word_spans(text[slice(*chunk)])]
    if found == _joined(terms(text[a:b]) for a, b in words):
        return [(term, (a, b)) for a, b in words for term in terms(text[a:b])]
    places = _in_turn(text[slice(*chunk)], found)
    if places is not None:
        return [(term, (chunk[0] + a, chunk[0] + b)) for term, (a, b) in zip(found, places, strict=True)]
    return [(term, chunk) for term in found]


def _in_turn(text: str, terms: Sequence[str]) -> list[Span] | None:
    """Where the terms stand in the text one after the other, in whichever letters; None where one is not found."""
    read, places = _lowered(text)
    at, found = 0, []
    for term in terms:
        small = term.lower()
        start = read.find(small, at) if small else -1
        if start < 0:
            return None
        at = start + len(small)
        found.append((places[start], places[at]))
    return found


def _by_words(text: str, whole: Sequence[str], terms: Callable[[str], list[str]]) -> list[Span | None]:
    """For each term the next word that has it when it is read by itself; None where no word is left that has."""
    places = defaultdict[str, list[Span]](list)
    for a, b in reversed(part_spans(text)):
        for term in terms(text[a:b]):
            places[term].append((a, b))
    return [places[term].pop() if places[term] else None for term in whole]
