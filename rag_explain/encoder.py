"""A sentence-transformers bi-encoder, seen as tokens with offsets, blocks, and one embedding per text.

The user's model is never touched: the encoder works on a twin of it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rag_explain.errors import InvalidInput, UnsupportedModel
from rag_explain.reference import in_reference, reference_features
from rag_explain.twin import find_blocks, first_module, make_twin, reading
from rag_explain.types import Embedded, Part, Role, Token

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Visitor = Callable[[int, Tensor], Tensor]
# Texts that are tokenized together, and positions that are embedded together: they bound what is in memory at once.
_EMBEDDED_AT_ONCE, _EMBEDDED_TOKENS = 512, 4096
_VERSION = attrgetter("_version")  # torch counts how often a tensor was written to
_PROMPTS: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}


@dataclass(frozen=True, eq=False)
class Batch:
    """Texts as the encoder reads them.

    Attributes:
        features: what the encoder's modules take: `input_ids` (D, n), `attention_mask` (D, n) and so on.
        tokens: for each text, the tokens that are not padding.
        truncated: for each text, whether the encoder sees only its beginning.
    """

    texts: tuple[Embedded, ...]
    role: Role
    features: dict[str, Any]
    tokens: tuple[tuple[Token, ...], ...]
    truncated: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def positions(self, index: int) -> Tensor:
        """(n_tokens,) the positions of text `index` that are not padding."""
        return used_positions(self.features)[index].nonzero().squeeze(-1)

    def select(self, indices: Sequence[int]) -> Batch:
        """Some of the texts, with no more padding than they need."""
        mask = used_positions(self.features)[list(indices)]
        used = mask.any(dim=0).nonzero().squeeze(-1)
        start, stop = int(used[0]), int(used[-1]) + 1
        size = (len(self), self.features["attention_mask"].shape[1])
        features = {
            name: value[list(indices), start:stop]
            if isinstance(value, Tensor) and tuple(value.shape[:2]) == size
            else value
            for name, value in self.features.items()
        }
        return Batch(
            tuple(self.texts[i] for i in indices),
            self.role,
            features,
            tuple(self.tokens[i] for i in indices),
            tuple(self.truncated[i] for i in indices),
        )

    def buckets(self, tokens: int) -> Iterator[list[int]]:
        """Indices of texts of like length, so that each bucket has at most `tokens` positions and little padding."""
        bucket: list[int] = []
        for index in sorted(range(len(self)), key=lambda i: len(self.tokens[i])):
            length = len(self.tokens[index])
            crowded = length * (len(bucket) + 1) > tokens
            if bucket and (crowded or length > 1.25 * len(self.tokens[bucket[0]]) + 4):
                yield bucket
                bucket = []
            bucket.append(index)
        if bucket:
            yield bucket


def used_positions(features: dict[str, Any]) -> Tensor:
    """(D, n) whether a position holds a token: not padding, or padding that a multi-vector query is expanded with."""
    mask: Tensor = features["attention_mask"].bool()
    expansion = features.get("query_expansion_positions")
    return mask if expansion is None else mask | expansion.bool()


class Encoder:
    """A bi-encoder whose embedding can be taken as a function of any block's input.

    Attributes:
        name: what the model is called, for people.
        blocks: the number of encoder blocks.
        metric: "cosine" or "dot", how the model compares embeddings.
        is_multivector: whether it gives one vector per token and no embedding of the whole.
        surrogate: why explanations of this model are not of its own similarity, or None when they are.
    """

    is_multivector = False

    def __init__(self, model: SentenceTransformer, *, name: str = "", device: str | torch.device | None = None) -> None:
        self.name = name or model.model_card_data.base_model or type(model).__name__
        self._twin = make_twin(model, device)
        self._transformer = first_module(self._twin)
        self._modules = list(self._twin.named_children())
        # The final normalisation is left to the score, unless something is cut off behind it.
        self._truncate_dim: int | None = getattr(self._twin, "truncate_dim", None)
        self._normalizes = type(self._modules[-1][1]).__name__ == "Normalize" and self._truncate_dim is None
        if self._normalizes:
            self._modules.pop()
        self._visitor: ContextVar[_Visit | None] = ContextVar("rag_explain_visitor", default=None)
        for block in find_blocks(self._transformer):
            block.register_forward_pre_hook(self._enter_block, with_kwargs=True)
        similarity = self._twin.similarity_fn_name  # asking sets a default: not on the caller's model
        self.metric = "dot" if similarity == "dot" else "cosine"
        self.surrogate: str | None = None
        if similarity in ("euclidean", "manhattan"):
            self.surrogate = f"the model compares by {similarity} distance; the cosine is explained instead"
        self._tokenizing = threading.Lock()
        # The module tree does not change any more; walking it on every call would cost as much as a short query.
        self._parameters, self._buffers = list(self._twin.parameters()), list(self._twin.buffers())
        self._fingerprint: tuple[tuple[Any, ...], str] | None = None
        self._original = weakref.ref(model)
        self._reading = reading(model)
        self.blocks = self._count_blocks()
        if not self.blocks:
            raise UnsupportedModel(f"no block of {type(self.transformer).__name__} was seen at work")

    # ------------------------------------------------------------------ texts to tokens

    def tokenize(self, texts: Sequence[str | Embedded], role: Role) -> Batch:
        """Read the texts as `encode_query` or `encode_document` does: prompt in front, end cut off."""
        passages = as_passages(texts)
        original = self._original()
        if original is not None and reading(original) != self._reading:
            raise InvalidInput(
                "the model's length limit, dimensions or prompts were changed after the Explainer was made: "
                "make a new one"
            )
        prompt = self.prompt(role)
        # Calling a tokenizer sets its padding and truncation: two threads at once would trip over each other.
        with self._tokenizing:
            output: Any = self._twin.preprocess(
                [passage.string for passage in passages],
                prompt=prompt,
                task=role,
                processing_kwargs={"text": {"return_offsets_mapping": True, "return_special_tokens_mask": True}},
            )
        offsets, special = output.pop("offset_mapping"), output.pop("special_tokens_mask")
        mask = used_positions(output)
        # Expansion of a multi-vector query comes after the tokenizer, which knows nothing of those positions.
        missing = mask.shape[1] - offsets.shape[1]
        tokens, truncated = [], []
        for index, passage in enumerate(passages):
            encoding = output.encodings[index]
            kept = mask[index].nonzero().squeeze(-1).tolist()
            if not kept:
                raise InvalidInput("the text has no tokens: give a text that is not empty")
            tokens.append(
                _tokens(
                    passage,
                    prompt or "",
                    self._transformer.tokenizer.convert_ids_to_tokens(output["input_ids"][index].tolist()),
                    offsets[index].tolist() + [[0, 0]] * missing,
                    special[index].tolist() + [1] * missing,
                    kept,
                )
            )
            truncated.append(bool(encoding.overflowing))
        features = {name: _to(value, self.device) for name, value in output.items()}
        return Batch(passages, role, features, tuple(tokens), tuple(truncated))

    def prompt(self, role: Role) -> str | None:
        """What sentence-transformers puts in front of a text in this role, if anything."""
        prompts = self._twin.prompts
        for name in (*_PROMPTS[role], self._twin.default_prompt_name):
            if name in prompts:
                return prompts[name] or None
        return None

    def reference(self, batch: Batch) -> Batch:
        """The same batch with nothing said: special tokens kept, padding between, positions and mask as they were."""
        return replace(batch, features=reference_features(batch.features, self._transformer))

    # ------------------------------------------------------------------ tokens to embeddings

    def run(self, batch: Batch, visit: Visitor | None = None, enter: Callable[[str], None] | None = None) -> Tensor:
        """(D, e): the embeddings of a batch, before the final normalisation.

        `visit(k, hidden)` sees the input (D, n, h) of every block and returns what the block is to work on instead;
        k = `blocks` is the output of the last block. `enter(name)` is told which module runs.
        """
        self._follow_device()
        features = dict(batch.features)
        # As `encode` runs it: what a module keeps from one pass is then fit for the next, recorded or not.
        mode = torch.inference_mode(not torch.is_grad_enabled())
        with mode, self._visiting(visit) as visit_state:
            for name, module in self._modules:
                if enter is not None:
                    enter(f"{type(module).__name__} (module {name})")
                features = module(features)
                if module is self._transformer and visit is not None:
                    features["token_embeddings"] = visit(visit_state.calls, features["token_embeddings"])
        embedding: Tensor = features["sentence_embedding"]
        if self._truncate_dim is not None:
            embedding = embedding[:, : self._truncate_dim]
        return embedding

    def token_vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(D, n, h) what the last block says of each token, and (D, n) which of them are words of the texts."""
        caught: list[Tensor] = []

        def visit(block: int, hidden: Tensor) -> Tensor:
            if block == self.blocks:
                caught.append(hidden)
            return hidden

        self.run(batch, visit)
        words = torch.zeros_like(batch.features["attention_mask"], dtype=torch.bool)
        for index, tokens in enumerate(batch.tokens):
            words[index, batch.positions(index)] = torch.tensor(
                [token.part == "text" for token in tokens], device=words.device
            )
        return caught[0], words

    def norms(self, embeddings: Tensor) -> Tensor:
        """(D,): what each embedding is divided by in the score."""
        if self.is_cosine:
            lengths: Tensor = torch.linalg.vector_norm(embeddings, dim=-1)
            return lengths.clamp_min(torch.finfo(embeddings.dtype).tiny)
        return torch.ones_like(embeddings[:, 0])

    def embed(self, texts: Sequence[str | Embedded], role: Role) -> NDArray[np.float32]:
        """(D, e): what `encode_query` or `encode_document` gives."""
        found: list[Tensor] = [torch.empty(0)] * len(texts)
        with torch.inference_mode():
            for first in range(0, len(texts), _EMBEDDED_AT_ONCE):
                batch = self.tokenize(texts[first : first + _EMBEDDED_AT_ONCE], role)
                for bucket in batch.buckets(_EMBEDDED_TOKENS):
                    for index, embedding in zip(bucket, self.run(batch.select(bucket)), strict=True):
                        found[first + index] = embedding
            return self.vectors(torch.stack(found))

    def vectors(self, embeddings: Tensor) -> NDArray[np.float32]:
        """(D, e): embeddings as `encode_query` and `encode_document` hand them out."""
        if self._normalizes:
            embeddings = embeddings / self.norms(embeddings)[:, None]
        result: NDArray[np.float32] = embeddings.to("cpu", torch.float32).numpy()
        return result

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each token of the whole text stands: no prompt, no special token, nothing cut off."""
        _check_text(text)
        with self._tokenizing:
            output = self._transformer.tokenizer(
                text, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False
            )
        return [(start, end) for start, end in output["offset_mapping"]]

    @property
    def max_length(self) -> int | None:
        """How many tokens the encoder reads, special ones included; None when it has no limit."""
        limit: int | None = self._twin.max_seq_length
        return limit

    @property
    def is_cosine(self) -> bool:
        """Whether the score compares directions: embeddings are divided by their length."""
        return self.metric == "cosine" or self._normalizes

    @property
    def is_shifted(self) -> bool:
        """Whether the model subtracts its reference's embedding (`ShiftedEncoder`): its own is then zero."""
        return bool(getattr(self._transformer, "is_shifted", False))

    @property
    def transformer(self) -> nn.Module:
        """The transformer itself, for people who want to know what it is."""
        model: nn.Module = self._transformer.auto_model
        return model

    @property
    def modules(self) -> str:
        """The modules behind the transformer, in a few words."""
        names = []
        for module in list(self._twin.children())[1:]:
            mode = getattr(module, "pooling_mode", None)
            names.append(type(module).__name__ + (f" ({mode})" if mode else ""))
        return " + ".join(names) or "no further module"

    @property
    def device(self) -> torch.device:
        return self._parameters[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self._parameters[0].dtype

    # ------------------------------------------------------------------ identity

    @property
    def fingerprint(self) -> str:
        """A digest of everything that decides an embedding; recomputed when weights were changed in place."""
        versions = (self.dtype, *map(_VERSION, self._parameters), *map(Tensor.data_ptr, self._parameters))
        if self._fingerprint is None or self._fingerprint[0] != versions:
            self._fingerprint = (versions, self._digest())
        return self._fingerprint[1]

    def _digest(self) -> str:
        tokenizer = self._transformer.tokenizer
        description = {
            "modules": [(type(module).__name__, _config(module)) for module in self._twin.children()],
            "model": {k: v for k, v in self._transformer.config.to_dict().items() if not k.startswith("_")},
            "tokenizer": hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
            "prompts": [self.prompt("query"), self.prompt("document")],
            "lengths": [self._twin.max_seq_length, self._truncate_dim],
            "metric": self.metric,
        }
        digest = hashlib.blake2b(json.dumps(description, sort_keys=True, default=str).encode(), digest_size=16)
        # hashlib lets go of the interpreter lock: large weights are read by several threads at once.
        with ThreadPoolExecutor() as pool:
            for part in pool.map(_tensor_digest, self._twin.state_dict().values()):
                digest.update(part)
        return digest.hexdigest()

    # ------------------------------------------------------------------ the twin's hooks

    def _enter_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        visit = self._visitor.get()
        if visit is None or in_reference():
            return None
        if args:
            return (visit(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": visit(kwargs["hidden_states"])}

    @contextmanager
    def _visiting(self, visit: Visitor | None) -> Iterator[_Visit]:
        state = _Visit(visit)
        token = self._visitor.set(state)
        try:
            yield state
        finally:
            self._visitor.reset(token)

    def _count_blocks(self) -> int:
        with torch.no_grad(), self._visiting(None) as state:
            batch = self.tokenize(["a"], "query")
            try:
                self._transformer(dict(batch.features))
            except Exception as error:
                raise UnsupportedModel(f"the model failed on a one-letter text: {error}") from error
        return state.calls

    def _follow_device(self) -> None:
        """Weights moved by `model.to(...)` are shared; the twin's own buffers must go along."""
        device = self.device
        for buffer in self._buffers:
            if buffer.device != device:
                buffer.data = buffer.data.to(device)


class _Visit:
    """Counts the blocks of one forward pass: some encoders call one module again and again."""

    def __init__(self, visit: Visitor | None) -> None:
        self.visit = visit
        self.calls = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return hidden if self.visit is None else self.visit(self.calls - 1, hidden)


@contextmanager
def quiet_torch(encoder: Encoder) -> Iterator[None]:
    """No autograd, no inference mode and no autocast of the caller's reaches into the computation. All thread-local."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(encoder.device.type, enabled=False):
        yield


def as_passages(texts: Sequence[str | Embedded]) -> tuple[Embedded, ...]:
    """The texts with the strings that are really embedded; what cannot be read is refused."""
    passages = tuple(text if isinstance(text, Embedded) else Embedded(text) for text in texts)
    for passage in passages:
        _check_text(passage.string)
    return passages


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidInput(f"a text must be a string, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"the text has a lone surrogate at position {error.start}, which is not valid Unicode: "
            "clean it with text.encode('utf-8', 'replace').decode()"
        ) from None


def _tokens(
    passage: Embedded,
    prompt: str,
    pieces: Sequence[str],
    offsets: Sequence[Sequence[int]],
    special: Sequence[int],
    kept: Sequence[int],
) -> tuple[Token, ...]:
    """Tokens with offsets into the caller's own text, which begins behind the prompt and perhaps behind metadata."""
    begin, end = len(prompt) + passage.start, len(prompt) + passage.end
    text = passage.text
    cursor = 0
    tokens = []
    for position in kept:
        start, stop = offsets[position]
        part: Part = "text"
        if special[position]:
            part = "special"
        elif stop <= len(prompt) and prompt:
            part = "prompt"
        elif stop <= begin or start >= end:
            part = "metadata" if (passage.start, passage.end) != (0, len(passage.string)) else "text"
        if part == "text":
            start = min(max(start - begin, 0), len(text))
            stop = min(max(stop - begin, start), len(text))
            cursor = stop
            tokens.append(Token(text[start:stop], start, stop, part, pieces[position]))
        else:
            tokens.append(Token("", cursor, cursor, part, pieces[position]))
    return tuple(tokens)


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _config(module: nn.Module) -> Any:
    get = getattr(module, "get_config_dict", None)
    return get() if callable(get) else None


def _tensor_digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    header = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    raw = flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)
    return hashlib.blake2b(raw.numpy().data, key=hashlib.blake2b(header, digest_size=32).digest()).digest()
