"""How a model reads a text: its prompts, its tokenizer, its length limit, and offsets into the caller's own text."""

import threading
from collections.abc import Sequence
from typing import Any

from rag_explain.encoder.batch import Batch, used_positions
from rag_explain.encoder.unread import reading_notices
from rag_explain.errors import InvalidInput
from rag_explain.texts.passage import Passage, check_text
from rag_explain.texts.tokens import Part, Role, Token

_PROMPTS: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
_WANTED = {"text": {"return_offsets_mapping": True, "return_special_tokens_mask": True}}


class Reader:
    """Reads texts as `encode_query` and `encode_document` do, with the tokenizer of the working copy.

    `max_length` is how many tokens the model reads, special ones included; None when it has no limit.
    """

    def __init__(self, copy: Any) -> None:
        self._copy = copy
        self.max_length: int | None = copy.max_seq_length
        self._tokenizer = copy[0].tokenizer
        backend = self._tokenizer.backend_tokenizer.model
        self._unknown = {self._tokenizer.unk_token, getattr(backend, "unk_token", None)} - {None}
        self._tokenizing = threading.Lock()

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


def role_prompt(model: Any, role: Role) -> str | None:
    """What `encode_query` or `encode_document` of a model puts in front of a text, if anything."""
    prompts = model.prompts or {}
    return next(
        (prompts[name] or None for name in (*_PROMPTS[role], model.default_prompt_name) if name in prompts), None
    )


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
