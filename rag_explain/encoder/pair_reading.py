"""How a cross-encoder reads a query and a document: both in one sequence, and which of its tokens is whose."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, Self

from torch import Tensor

from rag_explain.encoder.batch import Batch, Side
from rag_explain.encoder.reading import Reader, own_tokens, pair_prompt
from rag_explain.encoder.unread import reading_notices
from rag_explain.errors import InvalidInput, UnsupportedModel
from rag_explain.results.notices import Notice
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Role, Token

SIDES: tuple[Role, Role] = ("query", "document")
_WANTED = {"text": {"return_offsets_mapping": True, "return_special_tokens_mask": True}}
_TOLD = ("offset_mapping", "special_tokens_mask")  # by these, and not read by the model
Found = tuple[str, Sequence[int], int]  # the piece, the span and the special mark of a token
# Settings of a chat template that are not the template's.
_SIZES = ("padding", "truncation", "max_length", "return_tensors", "restore_suffix")
# Stand for the two texts in a chat template, to see where it puts them. No text has them: they are for private use.
_MARKS = ("\ue0f1", "\ue0f2")


@dataclass(frozen=True, eq=False, kw_only=True)
class Pairs(Batch):
    """A query with each of several documents, as a cross-encoder reads them: one sequence per pair.

    Attributes:
        query: the text that all pairs have in common; `passages` are the documents.
        sides: for each pair, whose each of its tokens is: 0 the query's, 1 the document's. A special token belongs to
            the text before it, and those before the first text to that one.
    """

    query: Passage
    sides: tuple[tuple[int, ...], ...]

    def select(self, indices: Sequence[int]) -> Self:
        return replace(super().select(indices), sides=tuple(self.sides[index] for index in indices))

    def text(self, index: int, side: int) -> tuple[Side, Tensor]:
        """One text of a pair, and (n,) the positions of its tokens."""
        own = [at for at, whose in enumerate(self.sides[index]) if whose == side]
        notices = tuple(one for one in self.notices[index] if (one.side == SIDES[1]) == bool(side))
        return Side(tuple(self.tokens[index][at] for at in own), notices), self.positions(index)[own]


class _Sequence(NamedTuple):
    """One pair in one sequence, without padding."""

    found: Sequence[Found]
    whose: Sequence[int | None]  # None: a special token's
    starts: tuple[int, int]  # for each text where it begins in the string that the spans of its tokens are places in
    is_cut: tuple[bool, bool]  # for each text whether only a part of it is in the sequence


class PairReader(Reader):
    """Reads pairs as `predict` of a cross-encoder does, with the tokenizer of the working copy."""

    def __init__(self, copy: Any) -> None:
        super().__init__(copy, copy[0], threading.Lock())
        self._chats = "message" in copy[0].modality_config

    def prompt(self, role: Role) -> str | None:
        """What stands in front of a pair, and so of the query."""
        return pair_prompt(self._copy) if role == "query" else None

    def read(self, passages: Sequence[Passage], role: Role) -> Batch:
        """Each text by itself, for how long it is: what the model reads are pairs."""
        offsets = [self.token_offsets(one.string)[: self.max_length] for one in passages]
        tokens = [
            own_tokens(one, 0, [("", span, 0) for span in spans]) for one, spans in zip(passages, offsets, strict=True)
        ]
        nothing: tuple[Notice, ...] = ()
        return Batch(passages=tuple(passages), role=role, tokens=tuple(tokens), notices=(nothing,) * len(passages))

    def read_pairs(self, query: Passage, documents: Sequence[Passage]) -> Pairs:
        """The query with each document."""
        prompt = self.prompt("query") or ""
        texts = [(query.string, document.string) for document in documents]
        with self._tokenizing:
            wanted = None if self._chats else _WANTED
            output: Any = self._copy.preprocess(texts, prompt=prompt or None, processing_kwargs=wanted)
            read = self._chatted if self._chats else self._plain
            sequences = list(read(output, texts, prompt))
        features = {name: value for name, value in output.items() if name not in _TOLD}
        tokens, sides, notices = [], [], []
        for document, sequence in zip(documents, sequences, strict=True):
            if not sequence.found:
                raise InvalidInput("the query and the document have no tokens: give texts that are not empty")
            whose = _owned(sequence.whose)
            own: list[tuple[Token, ...]] = []
            told: tuple[Notice, ...] = ()
            for side, passage in enumerate((query, document)):
                found = [one for one, at in zip(sequence.found, whose, strict=True) if at == side]
                own.append(own_tokens(passage, sequence.starts[side], found))
                cut = self._tokenizer.truncation_side if sequence.is_cut[side] else None
                told += reading_notices(own[side], passage, SIDES[side], self._unknown, cut)
            left = [iter(one) for one in own]
            tokens.append(tuple(next(left[side]) for side in whose))
            sides.append(tuple(whose))
            notices.append(told)
        return Pairs(
            query=query,
            passages=tuple(documents),
            role="document",
            tokens=tuple(tokens),
            sides=tuple(sides),
            notices=tuple(notices),
            features=features,
        )

    def _plain(self, output: Any, texts: Sequence[tuple[str, str]], prompt: str) -> Iterator[_Sequence]:
        """Both texts one after the other, with special tokens around them."""
        for index, (query, document) in enumerate(texts):
            encoding, whose = output.encodings[index], output.sequence_ids(index)
            kept = output["attention_mask"][index].nonzero().squeeze(-1).tolist()
            pieces = self._tokenizer.convert_ids_to_tokens(output["input_ids"][index].tolist())
            found = [(pieces[at], encoding.offsets[at], int(whose[at] is None)) for at in kept]
            is_cut = [False, False]
            if encoding.overflowing:
                alone = self._tokenizer([prompt + query, document], add_special_tokens=False, verbose=False)
                is_cut = [len(ids) > whose.count(side) for side, ids in enumerate(alone["input_ids"])]
            yield _Sequence(found, [whose[at] for at in kept], (len(prompt), 0), (is_cut[0], is_cut[1]))

    def _chatted(self, output: Any, texts: Sequence[tuple[str, str]], prompt: str) -> Iterator[_Sequence]:
        """Both texts inside a chat template, which the tokenizer reads as one string."""
        template = self._rendered(_MARKS, prompt)
        for pair, ids, mask in zip(texts, output["input_ids"], output["attention_mask"], strict=True):
            string = self._rendered(pair, prompt)
            places = _places(template, string, pair)
            whole = self._tokenizer(string, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            spans, whose = whole["offset_mapping"], [_side(places, *span) for span in whole["offset_mapping"]]
            kept = _kept(whole["input_ids"], ids[mask.bool()].tolist())
            pieces = self._tokenizer.convert_ids_to_tokens(whole["input_ids"])
            left = [whose[at] for at in kept]
            is_cut = (left.count(0) < whose.count(0), left.count(1) < whose.count(1))
            found = [(pieces[at], spans[at], int(whose[at] is None)) for at in kept]
            yield _Sequence(found, left, (places[0].start, places[1].start), is_cut)

    def _rendered(self, pair: tuple[str, str], prompt: str) -> str:
        """The string that the chat template makes of a pair."""
        first = self._copy[0]
        form = first.input_formatter
        messages = [form.pair_to_messages(pair)]
        (messages,) = form.prepend_prompt_to_messages(messages, prompt) if prompt else messages
        options = {k: v for k, v in first.processing_kwargs.get("chat_template", {}).items() if k not in _SIZES}
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _owned(whose: Sequence[int | None]) -> list[int]:
    """Whose each token is: a special one is of the text before it, or of the first text."""
    current = next((side for side in whose if side is not None), 0)
    owners = []
    for side in whose:
        current = current if side is None else side
        owners.append(current)
    return owners


class _Place(NamedTuple):
    """Where a text is in the string that a chat template made: [begin, end), and where its first character would be
    had the template not trimmed it.
    """

    begin: int
    end: int
    start: int


def _places(template: str, string: str, pair: tuple[str, str]) -> tuple[_Place, _Place]:
    """Where both texts of a pair are, given what the template makes of the marks."""
    parts = re.split("|".join(_MARKS), template)
    if len(parts) == 3 and set(_MARKS) <= set(template):
        order = sorted((0, 1), key=lambda side: template.index(_MARKS[side]))
        for one, other in product(_forms(pair[order[0]]), _forms(pair[order[1]])):
            if "".join((parts[0], one, parts[1], other, parts[2])) == string:
                begins = len(parts[0]), len(parts[0] + one + parts[1])
                found = [
                    _Place(begin, begin + len(form), begin - pair[side].index(form))
                    for begin, form, side in zip(begins, (one, other), order, strict=True)
                ]
                return found[order[0]], found[order[1]]
    raise UnsupportedModel(
        "the chat template of this model does not put both texts into its prompt as they are, so that tokens cannot be "
        "found in them: use a template that does"
    )


def _forms(text: str) -> tuple[str, ...]:
    """A text as it is, and trimmed."""
    return tuple(dict.fromkeys((text, text.strip())))


def _side(places: tuple[_Place, _Place], start: int, end: int) -> int | None:
    """The text that a token covers a part of; None where it is the template's."""
    return next((side for side, one in enumerate(places) if start < one.end and end > one.begin), None)


def _kept(ids: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Which of the tokens were kept: from the front and, where the template's end was put back, from there."""
    front = next((at for at, (a, b) in enumerate(zip(ids, kept, strict=False)) if a != b), min(len(ids), len(kept)))
    chosen = [*range(front), *range(len(ids) - len(kept) + front, len(ids))]
    if [ids[at] for at in chosen] != list(kept):
        raise UnsupportedModel("the model reads other tokens than its chat template makes: use another model")
    return chosen
