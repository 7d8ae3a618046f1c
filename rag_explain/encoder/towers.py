"""Which modules read a query and which a document: the same ones, unless the model begins with a `Router`.

A `Router` of sentence-transformers holds several chains of modules, and takes one by the task that it is told and by
what it is given. Here its chains are taken apart once, in the model's own way, so that each role has one plain list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from torch import nn

from rag_explain.texts.tokens import Role


@dataclass(frozen=True, eq=False)
class Tower:
    """What a text of one role goes through, one module after the other, by their names in the model.

    Attributes:
        normalises: whether a final normalisation was taken off `modules`, which is left to the score.
    """

    modules: tuple[tuple[str, nn.Module], ...]
    normalises: bool = False

    @property
    def first(self) -> Any:
        """The module that reads texts."""
        return self.modules[0][1]

    @property
    def ends_normalised(self) -> bool:
        """Whether the last module divides an embedding by its length."""
        return type(self.modules[-1][1]).__name__ == "Normalize"

    @property
    def is_static(self) -> bool:
        return is_static(self.first)

    def without_normalisation(self) -> Tower:
        return Tower(self.modules[:-1], normalises=True)


def towers_of(model: Any) -> dict[Role, Tower]:
    """The tower of each role: one and the same where nothing tells queries from documents before the last modules."""
    found: dict[Role, Tower] = {}
    for role in get_args(Role):
        task = getattr(model, "tasks", {}).get(role, role)  # a framework may tell no task, or another one
        (name, first), *after = model.named_children()
        found[role] = Tower((*_chain(name, first, task), *after))
    chains = [[id(module) for _, module in tower.modules] for tower in found.values()]
    return found if chains[0] != chains[1] else dict.fromkeys(found, found["document"])


def input_modules(model: Any) -> list[Any]:
    """Every module of a model that may read texts: those that its routes begin with, in any role."""
    return list(_inputs(model[0]))


def is_router(module: Any) -> bool:
    return hasattr(module, "sub_modules")


def is_static(module: Any) -> bool:
    """Whether a module is a table of word vectors, which reads no word's surroundings."""
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    return isinstance(module, StaticEmbedding)


def _chain(name: str, module: Any, task: str | None) -> Iterator[tuple[str, nn.Module]]:
    """A module, or those of the route that a router takes for this task, which may begin with a router again."""
    if not is_router(module):
        yield name, module
        return
    route = module._resolve_route(task=task, modality="text")  # a private name: routers tell it in no other way
    (first, inner), *after = module.sub_modules[route].named_children()
    place = f"{name}.sub_modules.{route}"
    yield from _chain(f"{place}.{first}", inner, task)
    yield from ((f"{place}.{number}", one) for number, one in after)


def _inputs(module: Any) -> Iterator[Any]:
    if not is_router(module):
        yield module
        return
    for route in module.sub_modules.values():
        yield from _inputs(route[0])
