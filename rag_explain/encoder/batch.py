"""Texts as a model reads them: tokens, features, and which positions are padding."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from rag_explain.devices import BatchSize
from rag_explain.results.notices import Notice, cut_sides
from rag_explain.texts.passage import Passage
from rag_explain.texts.segments import Span
from rag_explain.texts.tokens import Role, Token, Unit
from rag_explain.texts.units import all_units

T = TypeVar("T")


class Side(NamedTuple):
    """One text of a pair, as a method needs it to describe the pair."""

    tokens: tuple[Token, ...]
    notices: tuple[Notice, ...]
    unit: Unit = "token"


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """Texts as the model reads them.

    Attributes:
        tokens: for each text, the tokens that are not padding.
        notices: for each text, what the model could not read of it.
        spans: for each text, where its tokens stand in the passage's string; empty where that is not known.
        features: what the model's modules take: `input_ids` (D, n), `attention_mask` (D, n) and so on, in main memory
            until the model runs: which positions are whose is asked for there, and `to` moves them once. Empty for
            a scorer that is no torch model.
        fingerprint: of the model when it read them; "" where that was not asked for.
    """

    passages: tuple[Passage, ...]
    role: Role
    tokens: tuple[tuple[Token, ...], ...]
    notices: tuple[tuple[Notice, ...], ...]
    spans: tuple[tuple[Span, ...], ...] = ()
    features: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.passages)

    def side(self, index: int) -> Side:
        return Side(self.tokens[index], self.notices[index])

    @property
    def truncated(self) -> tuple[bool, ...]:
        """For each text, whether the model reads only a part of it."""
        return tuple(bool(cut_sides(notices)) for notices in self.notices)

    def groups(self, unit: Unit) -> tuple[list[tuple[Token, ...]], Tensor | None]:
        """The units of each text, and (D, n) the index of the unit that each position belongs to, -1 for padding.

        There are no groups of single tokens: None.
        """
        if unit == "token":
            return list(self.tokens), None
        mask = used_positions(self.features)
        groups = torch.full(mask.shape, -1, dtype=torch.long)
        found = []
        for index, (tokens, passage) in enumerate(zip(self.tokens, self.passages, strict=True)):
            spans = self.spans[index] if self.spans else None
            units, owners = all_units(tokens, passage, unit, truncated=self.truncated[index], spans=spans)
            found.append(units)
            groups[index, self.positions(index)] = torch.as_tensor(owners)
        return found, groups

    def words(self) -> Tensor:
        """(D, n), in main memory: which positions hold a token of the caller's own text."""
        words = torch.zeros_like(self.features["attention_mask"], dtype=torch.bool)
        for index, tokens in enumerate(self.tokens):
            is_text = [token.part == "text" for token in tokens]
            words[index, self.positions(index)] = torch.tensor(is_text)
        return words

    def positions(self, index: int) -> Tensor:
        """(n_tokens,) the positions of text `index` that are not padding."""
        return used_positions(self.features)[index].nonzero().squeeze(-1)

    def to(self, device: torch.device) -> Self:
        """The same texts with their features on the device, for what runs there."""
        if all(value.device == device for value in self.features.values() if isinstance(value, Tensor)):
            return self
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.features.items()}
        return replace(self, features=moved)

    def unpad(self, values: Tensor) -> list[Tensor]:
        """Values (D, n, ...) as one tensor (n_tokens, ...) per text, without those of padding."""
        return [values[index, self._used(index)] for index in range(len(self))]

    def _used(self, index: int) -> slice | Tensor:
        """`positions`, as a slice where they are side by side: a slice needs no transfer."""
        at = self.positions(index)
        if not len(at):  # a table of word vectors reads an empty text as no token
            return slice(0)
        first, last = int(at[0]), int(at[-1])
        return slice(first, last + 1) if last - first + 1 == len(at) else at

    def select(self, indices: Sequence[int]) -> Self:
        """Some of the texts, or one several times, with no more padding than they need."""
        return replace(
            self,
            passages=tuple(self.passages[i] for i in indices),
            tokens=tuple(self.tokens[i] for i in indices),
            notices=tuple(self.notices[i] for i in indices),
            spans=tuple(self.spans[i] for i in indices) if self.spans else (),
            features=self._selected(list(indices)) if self.features else {},
        )

    def _selected(self, indices: list[int]) -> dict[str, Any]:
        used = used_positions(self.features)[indices].any(dim=0).nonzero().squeeze(-1)
        start, stop = int(used[0]), int(used[-1]) + 1
        size = (len(self), self.features["attention_mask"].shape[1])
        return {
            name: value[indices, start:stop] if isinstance(value, Tensor) and tuple(value.shape[:2]) == size else value
            for name, value in self.features.items()
        }

    def alike(self) -> Hashable | None:
        """Equal for texts that one model reads alike but for their tokens: as many, with the same masks.

        None for several texts, which differ in more, and for features that cannot be compared.
        """
        others = {name: value for name, value in self.features.items() if name != "input_ids"}
        if len(self) != 1 or not self.fingerprint or "input_ids" not in self.features:
            return None
        ids = self.features["input_ids"]
        key: tuple[Hashable, ...] = (self.fingerprint, self.role, ids.shape, ids.dtype, ids.device)
        for name, value in sorted(others.items()):
            if isinstance(value, Tensor):
                key += (name, value.dtype, value.shape, *value.flatten().tolist())
            elif isinstance(value, (str, int, float, type(None))):
                key += (name, value)
            else:
                return None
        return key

    def buckets(self, size: BatchSize, rows: Sequence[int] | None = None) -> Iterator[list[int]]:
        """Indices of texts that are alike, so that each bucket is of at most this size and has little padding.

        `rows` is how many tangents run through each text at once: texts with as many are together then, and each
        counts that often.
        """
        lengths, rows = list(map(len, self.tokens)), [1] * len(self) if rows is None else rows
        bucket: list[int] = []
        shortest = longest = 0
        for index in sorted(range(len(self)), key=lambda i: (rows[i], lengths[i])):
            low, high = min(shortest, lengths[index]), max(longest, lengths[index])
            filled = high * rows[index] * (len(bucket) + 1)
            uneven = high > size.uneven * low + 4 or (bucket and rows[index] > size.uneven * rows[bucket[0]])
            if bucket and (filled > size.positions or (uneven and filled > size.unfilled)):
                yield bucket
                bucket = []
            shortest, longest = (low, high) if bucket else (lengths[index], lengths[index])
            bucket.append(index)
        if bucket:
            yield bucket

    def in_buckets(
        self, size: BatchSize, compute: Callable[[Self], Iterable[T]], rows: Sequence[int] | None = None
    ) -> dict[int, T]:
        """What `compute` gives for each text, by the text's index, in the order of the buckets it is given."""
        parts = ((bucket, compute(self.select(bucket))) for bucket in self.buckets(size, rows))
        return {index: one for bucket, part in parts for index, one in zip(bucket, part, strict=True)}

    def rows(self, unit: Unit) -> list[int]:
        """How many rows the factors of each text have in this unit."""
        return list(map(len, self.groups(unit)[0]))


def used_positions(features: dict[str, Any]) -> Tensor:
    """(D, n) whether a position holds a token: not padding, or padding that a multi-vector query is expanded with."""
    mask: Tensor = features["attention_mask"].bool()
    expansion = features.get("query_expansion_positions")
    return mask if expansion is None else mask | expansion.bool()
