"""Read-only arrays and mappings, and how the objects that hold them travel through pickle."""

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rag_explain.results.serialization import to_plain


class ReadOnly:
    """A dataclass of read-only arrays and mappings that can be pickled, although such mappings cannot.

    Arrays come out of a pickle writeable, and the constructor makes them read-only again.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        made = [item.name for item in fields(self) if item.init]  # type: ignore[arg-type]  # a dataclass
        values = {name: getattr(self, name) for name in made}
        plain = {name: dict(value) if isinstance(value, MappingProxyType) else value for name, value in values.items()}
        return partial(type(self), **plain), ()


def readonly(array: NDArray[Any]) -> NDArray[np.float32]:
    """`array` as float32 that cannot be written to; a copy only where its memory still could be."""
    result = np.asarray(array, dtype=np.float32)
    if result is array or result.base is not None:
        owner: Any = result
        while isinstance(owner, np.ndarray) and not owner.flags.writeable:
            owner = owner.base
        # A read-only view of an array that can still be written to is not read-only.
        result = result if owner is None or isinstance(owner, bytes) else result.copy()
    result.flags.writeable = False
    return result


def readonly_mapping(mapping: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A read-only copy that holds only what JSON can carry, so that a round trip gives it back equal."""
    return None if mapping is None else MappingProxyType(to_plain(mapping))
