"""Finding a model inside the objects that hold it, and copying such an object with another model in its place."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_DEPTH = 4  # the holder itself, what it keeps, and two steps further
_SMALL = 32  # entries of a list or dictionary that are looked at one by one; larger ones are no settings
_ATOMS = frozenset((str, bytes, int, float, bool, type(None)))
_PLAIN = (type, ModuleType, str, bytes, int, float, list, tuple, dict, set)


def held_model(*holders: object) -> SentenceTransformer | None:
    """The SentenceTransformer that one of these is, or holds in an attribute, so that the user need not name it again.

    Frameworks and people's own classes call the attribute `client`, `_client`, `_model` and so on: the class of its
    value decides, and no name can go out of date. An object around such a holder is looked into too. None where there
    is none, or more than one at the same depth.
    """
    module = sys.modules.get("sentence_transformers")
    if module is None:  # a model cannot be held before its library is loaded
        return None
    level = list(holders)
    for _ in range(_DEPTH):
        found = {id(value): value for value in level if isinstance(value, module.SentenceTransformer)}
        if found:
            return next(iter(found.values())) if len(found) == 1 else None
        level = [value for holder in level for value in attributes(holder).values()]
    return None


def inside(holder: object, is_wanted: Callable[[object], bool], passed: tuple[type, ...]) -> list[Any]:
    """What is wanted of all that an object is or holds: the nearest first, and each once.

    It is looked for in attributes, lists and dictionaries of what is `passed` through, however deep, and one step into
    anything else: a retriever may keep its store in an object of any class. What is found is not looked into.
    """
    found, seen = list[Any](), dict[int, object]()

    def is_kept(value: object) -> bool:
        return isinstance(value, passed) or is_wanted(value)

    level = [holder]
    while level:
        fresh = {id(one): one for one in level if id(one) not in seen}
        seen |= fresh
        kept, others = list[object](), list[object]()
        for one in fresh.values():
            if is_wanted(one):
                found.append(one)
                continue
            for value in _held(one, is_kept):
                (kept if is_kept(value) else others).append(value)
        level = kept + [value for one in others for value in _held(one, is_kept) if is_kept(value)]
    return found


def models_inside(holder: object, passed: tuple[type, ...]) -> list[SentenceTransformer]:
    """The models that an object holds, also in lists of what is passed through; or the one that is deeper in it."""
    module = sys.modules.get("sentence_transformers")
    kind = () if module is None else module.SentenceTransformer
    found = inside(holder, lambda one: isinstance(one, kind), passed)
    return found or [model for model in (held_model(holder),) if model is not None]


def _held(holder: object, is_kept: Callable[[object], bool]) -> list[object]:
    """What an object keeps in attributes; entries of lists and dictionaries, of long ones if the first is wanted."""
    values = list[object]()
    for value in attributes(holder).values():
        if type(value) in _ATOMS:  # most are
            continue
        if not isinstance(value, (list, tuple, dict)):
            values.append(value)
            continue
        entries: Iterable[object] = value.values() if isinstance(value, dict) else value
        if len(value) <= _SMALL or is_kept(next(iter(entries))):
            values += entries
    return values


def with_model(holder: object, model: object, other: object) -> Any:
    """A copy of the holder that holds `other` in place of the model; None where that cannot be done.

    Only the objects on the way to the model are copied, and nothing of the holder's own is changed.
    """
    replaced = (_replaced(holder, model, other, depth) for depth in range(1, _DEPTH + 1))
    return next((one for one in replaced if one is not None), None)


def holder_state(holder: object, model: object) -> list[Any]:
    """What an object, and what it holds on the way to its model, consist of: two of the same state are equal.

    Plain data counts by its value, anything else by which object it is.
    """
    state: list[Any] = []
    level = [holder]
    for _ in range(_DEPTH):
        if any(one is model for one in level):
            break
        kept = [(type(one), attributes(one)) for one in level]
        # Settings and methods of its classes decide too, where an object has none of its own.
        state += [(fixed(own), [_identities(vars(one)) for one in kind.__mro__[:-1]]) for kind, own in kept if own]
        level = [value for _, own in kept for value in own.values()]
    return state


def _identities(names: Mapping[str, object]) -> tuple[list[int], list[object]]:
    """Which objects these are. They are kept, so that no other object gets the id of one."""
    values = [value for name, value in names.items() if name != "__slotnames__"]  # `copy` writes it down once
    return list(map(id, values)), values


def fixed(value: object) -> object:
    """Something that equals itself as long as the value is the same: a copy of small data, or which object it is."""
    if isinstance(value, (str, bytes, int, float, type(None))):
        return value
    if isinstance(value, dict) and len(value) <= _SMALL:
        return {name: fixed(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)) and len(value) <= _SMALL:
        return [fixed(one) for one in value]
    return id(value), value  # kept, so that no other object gets its id


def attributes(holder: object) -> dict[str, object]:
    """What an object keeps in itself, by name: of plain data, classes and modules nothing. No property is called.

    Names like `__this__` are a framework's own, for where the object belongs, and say nothing of how it embeds.
    """
    if isinstance(holder, _PLAIN):
        return {}
    kind: Any = type(holder)
    kept = {name: getattr(holder, name, None) for name in _slots(kind)}
    kept |= getattr(holder, "__dict__", {})
    kept |= getattr(holder, "__pydantic_private__", None) or {}
    return {name: value for name, value in kept.items() if not name[:2] == "__" == name[-2:]}


@lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...]:
    told = (one.__dict__.get("__slots__", ()) for one in kind.__mro__)
    names = (name for slots in told for name in ((slots,) if isinstance(slots, str) else slots))
    return tuple(name for name in names if not name[:2] == "__" == name[-2:])


def _replaced(holder: object, model: object, other: object, depth: int) -> Any:
    if holder is model:
        return other
    if depth == 1 or hasattr(type(holder), "__del__"):  # a copy that cleaned up would clean up for the original
        return None
    kept = {name: _replaced(value, model, other, depth - 1) for name, value in attributes(holder).items()}
    found = {name: value for name, value in kept.items() if value is not None}
    if not found:
        return None
    copied = copy.copy(holder)
    for name, value in found.items():
        for space in (getattr(copied, "__pydantic_private__", None), getattr(copied, "__dict__", None)):
            if space is not None and name in space:
                space[name] = value
                break
        else:
            object.__setattr__(copied, name, value)
    return copied
