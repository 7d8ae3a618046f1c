"""Every private name of Haystack that is used here, and for what. A test per name notices when one is renamed."""

from __future__ import annotations

from haystack import Pipeline


def owning_pipeline(component: object) -> Pipeline | None:
    """`__haystack_added_to_pipeline__`: the pipeline that a component is part of, None where it is in none."""
    return getattr(component, "__haystack_added_to_pipeline__", None)


def input_names(component: object) -> set[str]:
    """`__haystack_input__` and `_sockets_dict`: what a component takes; empty for what is no component."""
    sockets = getattr(component, "__haystack_input__", None)
    return set() if sockets is None else set(sockets._sockets_dict)
