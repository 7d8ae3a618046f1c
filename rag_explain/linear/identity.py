"""Which tensor a value is, and which memory it lies in: equality of tensors is about their elements."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from torch import Tensor

V = TypeVar("V")


class IdentityMap(Generic[V]):
    """Values by tensor. It keeps the tensors alive, so that no other object gets the id of one of them."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[Tensor, V]] = {}

    def __setitem__(self, tensor: Tensor, value: V) -> None:
        self._items[id(tensor)] = tensor, value

    def __getitem__(self, tensor: Tensor) -> V:
        return self._items[id(tensor)][1]

    def get(self, tensor: object) -> V | None:
        item = self._items.get(id(tensor))
        return None if item is None else item[1]

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._items

    def __iter__(self) -> Iterator[Tensor]:
        return (tensor for tensor, _ in self._items.values())


def storage_of(tensor: Tensor) -> int:
    """The address of the memory that the tensor is a view of."""
    return tensor.untyped_storage().data_ptr()
