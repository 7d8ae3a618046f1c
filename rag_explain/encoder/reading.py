"""How a model reads a text: its prompts, its tokenizer, its length limit, and offsets into the caller's own text."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rag_explain.encoder.batch import Batch, used_positions
from rag_explain.errors import InvalidInput
from rag_explain.texts.passage import Passage, check_text
from rag_explain.texts.tokens import Part, Role, Token

_PROMPTS: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
_WANTED = {"text": {"return_offsets_mapping": True, "return_special_tokens_mask": True}}


class Reader:
    """Reads texts as `encode_query` and `encode_document` do, with the tokenizer of the working copy.

    The settings of the user's own model, `original`, may change after the copy was made: that is refused.
    """

    def __init__(self, copy: Any, original: Any) -> None:
        self._copy = copy
        self._tokenizer = copy[0].tokenizer
        self._original = weakref.ref(original)
        self._settings = reading_settings(original)
        self._tokenizing = threading.Lock()

    def read(self, passages: Sequence[Passage], role: Role, device: torch.device) -> Batch:
        """The texts with the prompt in front and the end cut off where the model cuts it."""
        original = self._original()
        if original is not None and reading_settings(original) != self._settings:
            raise InvalidInput(
                "the model's length limit, dimensions or prompts were changed after the Explainer was made: "
                "make a new one"
            )
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
        tokens, places = [], []
        for index, passage in enumerate(passages):
            kept = mask[index].nonzero().squeeze(-1).tolist()
            if not kept:
                raise InvalidInput("the text has no tokens: give a text that is not empty")
            pieces = self._tokenizer.convert_ids_to_tokens(output["input_ids"][index].tolist())
            spans = offsets[index].tolist() + [[0, 0]] * missing
            frames = special[index].tolist() + [1] * missing
            tokens.append(_tokens(passage, len(prompt), [(pieces[at], spans[at], frames[at]) for at in kept]))
            places.append(tuple((spans[at][0] - len(prompt), spans[at][1] - len(prompt)) for at in kept))
        return Batch(
            passages=tuple(passages),
            role=role,
            tokens=tuple(tokens),
            truncated=tuple(bool(output.encodings[index].overflowing) for index in range(len(passages))),
            spans=tuple(places),
            features={k: v.to(device) if isinstance(v, Tensor) else v for k, v in output.items()},
        )

    def prompt(self, role: Role) -> str | None:
        """What sentence-transformers puts in front of a text in this role, if anything."""
        names = (*_PROMPTS[role], self._copy.default_prompt_name)
        return next((self._copy.prompts[name] or None for name in names if name in self._copy.prompts), None)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each token of the whole text stands: no prompt, no special token, nothing cut off."""
        check_text(text)
        with self._tokenizing:
            output = self._tokenizer(
                text, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False
            )
        return [(start, end) for start, end in output["offset_mapping"]]

    @property
    def max_length(self) -> int | None:
        """How many tokens the model reads, special ones included; None when it has no limit."""
        limit: int | None = self._copy.max_seq_length
        return limit


def reading_settings(model: Any) -> tuple[Any, ...]:
    """What decides how a model reads a text, and is easily changed on it."""
    prompts = tuple(sorted((model.prompts or {}).items()))
    return model.max_seq_length, getattr(model, "truncate_dim", None), prompts, model.default_prompt_name


def _tokens(passage: Passage, prompt: int, found: Sequence[tuple[str, Sequence[int], int]]) -> tuple[Token, ...]:
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
