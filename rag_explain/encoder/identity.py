"""Which model it is: a digest of everything that decides an embedding."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from rag_explain._torch import writes


class Identity:
    """The fingerprint of a working copy, computed again when weights were changed in place.

    `parameters` are the copy's: walking the module tree on every call would cost as much as a short query. `settings`
    are what else decides an embedding: prompts, lengths, the measure.
    """

    def __init__(self, copy: Any, parameters: Sequence[Tensor], settings: dict[str, Any]) -> None:
        self._copy, self._parameters, self._settings = copy, parameters, settings
        self._known: tuple[tuple[Any, ...], str] | None = None

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits."""
        weights = self._parameters
        state = (weights[0].dtype, *map(writes, weights), *map(Tensor.data_ptr, weights))
        if self._known is None or self._known[0] != state:
            self._known = (state, self._digest())
        return self._known[1]

    def _digest(self) -> str:
        first = self._copy[0]
        description = {
            "modules": [
                (type(module).__name__, getattr(module, "get_config_dict", lambda: None)())
                for module in self._copy.children()
            ],
            "model": {k: v for k, v in first.config.to_dict().items() if not k.startswith("_")},
            "tokenizer": hashlib.blake2b(first.tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
            **self._settings,
        }
        digest = hashlib.blake2b(json.dumps(description, sort_keys=True, default=str).encode(), digest_size=16)
        # hashlib releases the interpreter lock: large weights are read by several threads at once.
        with ThreadPoolExecutor() as pool:
            for part in pool.map(_tensor_digest, self._copy.state_dict().values()):
                digest.update(part)
        return digest.hexdigest()


def _tensor_digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    header = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    raw = flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)
    return hashlib.blake2b(raw.numpy().data, key=hashlib.blake2b(header, digest_size=32).digest()).digest()
