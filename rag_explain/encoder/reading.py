"""How a model reads a text: its prompts, its tokenizer, its length limit, and offsets into the caller's own text."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rag_explain.encoder.batch import Batch, used_positions
from rag_explain.encoder.towers import Tower
from rag_explain.encoder.unread import reading_notices
from rag_explain.errors import InvalidInput
from rag_explain.texts.passage import Passage, check_text
from rag_explain.texts.tokens import Part, Role, Token

_PROMPTS: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
_WANTED = {"text": {"return_offsets_mapping": True, "return_special_tokens_mask": True}}


class Reader:
    """Reads texts as `encode_query` and `encode_document` do, with the tokenizer of the working copy.

    `first` is the module of the copy that reads them. `max_length` is how many tokens it reads, special ones included;
    None when it has no limit.
    """

    def __init__(self, copy: Any, first: Any, tokenizing: threading.Lock) -> None:
        self._copy, self._tokenizing = copy, tokenizing
        self.max_length: int | None = first.max_seq_length
        self._tokenizer = first.tokenizer
        backend = self._tokenizer.backend_tokenizer.model
        self._unknown = {self._tokenizer.unk_token, getattr(backend, "unk_token", None)} - {None}

    def read(self, passages: Sequence[Passage], role: Role) -> Batch:
        """The texts with the prompt in front and the end cut off where the model cuts it."""
        prompt = self.prompt(role) or ""
        # Calling a tokenizer sets its padding and truncation, which two threads at once must not do.
        with self._tokenizing:
            output: Any = self._copy.preprocess(
                [passage.string for passage in passages], prompt=prompt or None, task=role, processing_kwargs=_WANTED
            )
        offsets, special = output.pop("offset_mapping"), output.pop("special_tokens_mask")
        mask = used_positions(output)
        # A multi-vector query is expanded after the tokenizer, which reports nothing for those positions.
        missing = mask.shape[1] - offsets.shape[1]
        tokens, places, notices = [], [], []
        for index, passage in enumerate(passages):
            kept = mask[index].nonzero().squeeze(-1).tolist()
            if not kept:
                raise InvalidInput("the text has no tokens: give a text that is not empty")
            pieces = self._tokenizer.convert_ids_to_tokens(output["input_ids"][index].tolist())
            spans = offsets[index].tolist() + [[0, 0]] * missing
            frames = special[index].tolist() + [1] * missing
            tokens.append(own_tokens(passage, len(prompt), [(pieces[at], spans[at], frames[at]) for at in kept]))
            cut = self._tokenizer.truncation_side if output.encodings[index].overflowing else None
            notices.append(reading_notices(tokens[-1], passage, role, self._unknown, cut))
            places.append(tuple((spans[at][0] - len(prompt), spans[at][1] - len(prompt)) for at in kept))
        return Batch(
            passages=tuple(passages),
            role=role,
            tokens=tuple(tokens),
            notices=tuple(notices),
            spans=tuple(places),
            features=dict(output),
        )

    def prompt(self, role: Role) -> str | None:
        """What sentence-transformers puts in front of a text in this role, if anything."""
        return role_prompt(self._copy, role)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each token of the whole text stands: no prompt, no special token, nothing cut off."""
        check_text(text)
        with self._tokenizing:
            output = self._tokenizer(
                text, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False
            )
        return [(start, end) for start, end in output["offset_mapping"]]


class StaticReader(Reader):
    """Reads texts as a `StaticEmbedding` does, and notes where its tokens stand."""

    def __init__(self, copy: Any, first: Any, _tokenizing: threading.Lock) -> None:
        self._copy = copy
        self._tokenizer = first.tokenizer
        self.max_length: int | None = (self._tokenizer.truncation or {}).get("max_length")
        self._unknown = {getattr(self._tokenizer.model, "unk_token", None)} - {None}
        self._noted = first.tokenizer = _Noting(self._tokenizer)

    def read(self, passages: Sequence[Passage], role: Role) -> Batch:
        """The texts with the prompt in front; no special token, and cut off only where the tokenizer cuts."""
        prompt = self.prompt(role) or ""
        self._copy.preprocess([passage.string for passage in passages], prompt=prompt or None, task=role)
        tokens, places, notices = [], [], []
        cut = (self._tokenizer.truncation or {}).get("direction")
        for passage, found in zip(passages, self._noted.last, strict=True):
            if not found.ids:
                raise InvalidInput("the text has no tokens: give a text with words that the model knows")
            pieces = zip(found.tokens, found.offsets, [0] * len(found.ids), strict=True)
            tokens.append(own_tokens(passage, len(prompt), list(pieces)))
            is_cut = cut if found.overflowing else None
            notices.append(reading_notices(tokens[-1], passage, role, self._unknown, is_cut))
            places.append(tuple((start - len(prompt), end - len(prompt)) for start, end in found.offsets))
        ids = [torch.tensor(found.ids) for found in self._noted.last]
        mask = [torch.ones_like(one) for one in ids]
        features = {"input_ids": ids, "attention_mask": mask}
        return Batch(
            passages=tuple(passages),
            role=role,
            tokens=tuple(tokens),
            notices=tuple(notices),
            spans=tuple(places),
            features={name: pad_sequence(values, batch_first=True) for name, values in features.items()},
        )

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each token of the whole text stands."""
        check_text(text)
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return [offset for part in (found, *found.overflowing) for offset in part.offsets]


class _Noting(threading.local):
    """Stands for a tokenizer that is asked for ids, and keeps what else it gave in this thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.last: Any = []

    def encode_batch(self, inputs: Sequence[str], **options: Any) -> Any:
        self.last = self._tokenizer.encode_batch(inputs, **options)
        return self.last


class Readers(Reader):
    """One reader for each role. What is asked of neither role is asked of documents, which are cut into chunks."""

    def __init__(self, by_role: Mapping[Role, Reader]) -> None:
        self._by_role, self.max_length = by_role, by_role["document"].max_length

    def read(self, passages: Sequence[Passage], role: Role) -> Batch:
        return self._by_role[role].read(passages, role)

    def prompt(self, role: Role) -> str | None:
        return self._by_role[role].prompt(role)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        return self._by_role["document"].token_offsets(text)


def reader_of(copy: Any, towers: Mapping[Role, Tower]) -> Reader:
    """What reads texts of both roles with the tokenizers of the working copy."""
    made: dict[int, Reader] = {}
    tokenizing = threading.Lock()  # towers may share a tokenizer
    for tower in towers.values():
        if id(tower.first) not in made:
            made[id(tower.first)] = (StaticReader if tower.is_static else Reader)(copy, tower.first, tokenizing)
    by_role = {role: made[id(tower.first)] for role, tower in towers.items()}
    return Readers(by_role) if len(made) > 1 else by_role["document"]


def role_prompt(model: Any, role: Role) -> str | None:
    """What `encode_query` or `encode_document` of a model puts in front of a text, if anything."""
    prompts = model.prompts or {}
    return next(
        (prompts[name] or None for name in (*_PROMPTS[role], model.default_prompt_name) if name in prompts), None
    )


def reads_pairs(model: Any) -> bool:
    """Whether a model of sentence-transformers reads both texts at once: a cross-encoder."""
    return hasattr(type(model), "predict") and not hasattr(type(model), "similarity")


def pair_prompt(model: Any) -> str | None:
    """What `predict` of a cross-encoder puts in front of a pair, if anything."""
    return (model.prompts or {}).get(model.default_prompt_name) or None


def own_tokens(passage: Passage, prompt: int, found: Sequence[tuple[str, Sequence[int], int]]) -> tuple[Token, ...]:
    """Tokens with offsets into the caller's own text, which begins after the prompt and perhaps after metadata.

    `prompt` is the length of the prompt; `found` are the piece, the span and the special mark of each token.
    """
    begin, end, text = prompt + passage.start, prompt + passage.end, passage.text
    cursor = 0  # tokens that are not part of the text stand where the last token of it ended
    tokens = []
    for piece, (start, stop), is_special in found:
        part: Part = "text"
        if is_special:
            part = "special"
        elif stop <= prompt and prompt:
            part = "prompt"
        elif (stop <= begin or start >= end) and any(passage.around):
            part = "metadata"
        if part == "text":
            start = min(max(start - begin, 0), len(text))
            cursor = min(max(stop - begin, start), len(text))
            tokens.append(Token(text[start:cursor], start, cursor, part, piece))
        else:
            tokens.append(Token("", cursor, cursor, part, piece))
    return tuple(tokens)
