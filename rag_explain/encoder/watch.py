"""Has the user's model changed since the working copy was made? Asked before every answer, so it must cost little.

Weights written in place are shared with the copy: they are another model, which the copy is too. Anything else that is
changed on the model (a module, an adapter, a prompt, a tokenizer's setting) is not seen by the copy, and is refused.

A glance compares what is kept where with what was there before, object by object. Only where that differs are the facts
compared as plain data, since much of what changes decides nothing: a default that was filled in, a moved buffer.
"""

import copy
import operator
import types
import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rag_explain._torch import PARTS, forward_hooks, hooks_made, parts, written
from rag_explain.encoder.identity import (
    Facts,
    backend_of,
    differing,
    facts,
    is_data,
    is_unread,
    places,
    plain,
    tensors,
    tokenizers_of,
)
from rag_explain.encoder.probing import attributes_decide, hooks_decide
from rag_explain.errors import ModelChanged

_MISSING = object()
_MODEL_SETTINGS = (
    *("unk_token", "max_input_chars_per_word", "continuing_subword_prefix", "end_of_word_suffix"),
    *("dropout", "fuse_unk", "byte_fallback", "ignore_merges"),
)


class Glance:
    """What stands where in a model, compared with what stood there when it was last looked at. Keeps no model alive.

    It tells that something moved, and not whether that matters.
    """

    sampled: ClassVar[int] = 2  # elements of a weight: each is far from all others in memory
    compared_whole: ClassVar[int] = 0  # weights with fewer elements are compared whole

    def __init__(self, model: Any, fleeting: frozenset[str] = frozenset()) -> None:
        self._model = weakref.ref(model)
        self.fleeting = fleeting  # the paths of what changes whenever the model encodes, and so decides nothing
        self.writes = self.moves = 0  # how often weights were seen to be written to, and anything else to have moved
        self._look(model)

    @property
    def model(self) -> Any:
        """The user's own; None where it is gone."""
        return self._model()

    def state(self) -> tuple[int, int]:
        """How often it was written to, and how often anything else moved: equal as long as nothing did."""
        is_written = written(self._tensors) != self._written or not np.array_equal(self._sample(), self._sampled)
        self.writes += is_written
        model = self.model
        if model is not None and self._has_moved(model):
            self._settle(model)
        elif is_written:
            self._sample_from(self._tensors)
        return self.writes, self.moves

    def leave_out(self, fleeting: frozenset[str]) -> None:
        """From now on these paths are not looked at."""
        if self.model is not None and not fleeting <= self.fleeting:
            self.state()
            self.fleeting |= fleeting
            self._look(self.model)

    def _settle(self, model: Any) -> None:
        """Something has moved: remember it as it is now."""
        self.moves += 1
        self._look(model)

    def _look(self, model: Any) -> None:
        """Remember everything as it is now."""
        every = [(own, key, own[key]) for path, own, key in places(model) if path not in self.fleeting]
        # Not by its dictionary: the model's own refers to the model, which must not be kept alive.
        self._top = {key: plain(value) for own, key, value in every if own is model.__dict__}
        self._top_size = len(model.__dict__)
        kept = [one for one in every if one[0] is not model.__dict__]
        inside = [own for module in model.modules() for own in parts(module)]
        # Most is compared by identity. What can be changed in place is compared with a copy: of data, or of its facts.
        self._same = [one for one in kept if not _is_mutable(one[2])]
        self._same += [(own, key, value) for own in inside for key, value in own.items()]
        others = [module for module in model.modules() if module is not model]
        self._same += [(module.__dict__, name, module.__dict__[name]) for module in others for name in PARTS]
        self._same_columns = tuple(zip(*self._same, strict=True)) or ((), (), ())
        self._modules, self._classes = others, list(map(type, others))
        self._top_parts, self._top_class = parts(model), type(model)
        lasting = [one for one in kept if _is_mutable(one[2])]
        self._equal = [(own, key, copy.deepcopy(value)) for own, key, value in lasting if is_data(value)]
        self._alike = [(own, key, plain(value)) for own, key, value in lasting if not is_data(value)]
        hooks = [own for module in model.modules() for own in forward_hooks(module)]
        self._hooks, self._hooks_made = [(own, list(own.values())) for own in hooks], hooks_made()
        self._hooked = [one for one in self._hooks if one[1]]
        self._sized: list[dict[Any, Any]] = [*(module.__dict__ for module in others), *inside]
        self._sizes = list(map(len, self._sized))
        self._ordered = [own for module in model.modules() if len(own := parts(module)[2]) > 1]
        self._order = list(chain.from_iterable(self._ordered))
        self._similarity = _own_similarity(model)
        self._tokenizers = tokenizers_of(model)
        self._splitting = list(map(_splitting, self._tokenizers))
        self._tensors = tensors(model, self.fleeting)
        self._sample_from(self._tensors)

    def _has_moved(self, model: Any) -> bool:
        # A thousand of each: without a loop of Python's own.
        owners, keys, values = self._same_columns
        return (
            not all(map(operator.is_, map(dict.get, owners, keys), values))
            or list(map(len, self._sized)) != self._sizes
            or list(chain.from_iterable(self._ordered))
            != self._order  # a chain of modules runs in the order of its dictionary
            or list(map(type, self._modules)) != self._classes
            or len(model.__dict__) != self._top_size
            or type(model) is not self._top_class
            or _own_similarity(model) != self._similarity
            or any(now is not before for now, before in zip(parts(model), self._top_parts, strict=True))
            or any(plain(model.__dict__.get(key, _MISSING)) != value for key, value in self._top.items())
            or any(own.get(key, _MISSING) != value for own, key, value in self._equal)
            or any(plain(own.get(key, _MISSING)) != value for own, key, value in self._alike)
            or self._has_other_hooks()
            or list(map(_splitting, self._tokenizers)) != self._splitting
        )

    def _has_other_hooks(self) -> bool:
        """Modules without hooks are looked at only where some hook was made since."""
        made = hooks_made()
        looked_at = self._hooks if made != self._hooks_made else self._hooked
        is_other = any(list(own.values()) != hooks for own, hooks in looked_at)
        if not is_other:  # else it is refused, and must be the next time too
            self._hooks_made = made
        return is_other

    def _sample_from(self, weights: list[Tensor]) -> None:
        self._written = written(weights)
        views = (_bits(tensor) for tensor in weights)
        self._views = [
            view if len(view) < self.compared_whole else view[:: max(1, len(view) // self.sampled)]
            for view in views
            if view is not None
        ]
        self._sampled = self._sample()

    def _sample(self) -> NDArray[Any]:
        """Some elements of each large weight: torch does not count what is written through `.data`."""
        return np.concatenate(self._views) if self._views else np.empty(0)


class Watch(Glance):
    """Looks whether a model is still the one that a working copy was made of.

    Attributes:
        facts: what decides an embedding, as `identity.facts` tells it, but for what changes with every encoding.

    Args:
        model: the user's own.
        is_shared: whether the copy has the model's own tensors, so that writes in place are seen by both.
        adopt: puts a tensor into the copy in place of another one.
    """

    sampled, compared_whole = 16, 256

    def __init__(
        self,
        model: Any,
        fleeting: frozenset[str] = frozenset(),
        *,
        is_shared: bool,
        adopt: Callable[[Tensor, Tensor], None] = lambda old, new: None,
    ) -> None:
        self._is_shared, self._adopt = is_shared, adopt
        super().__init__(model, fleeting)

    def state(self) -> tuple[int, int]:
        """Something that changes when weights are written in place; raises `ModelChanged` for any other change."""
        writes = self.writes
        found = super().state()
        if found[0] != writes and not self._is_shared:
            self.writes = writes
            self._written = ([], [])  # so that the next look sees it too
            raise ModelChanged.because("its weights were written to, and this Explainer computes on another device")
        return found

    def _look(self, model: Any) -> None:
        self.facts = self._facts(model)
        super()._look(model)

    def _settle(self, model: Any) -> None:
        """Something was touched: refuse the model if that can matter, else remember it as it is now."""
        now = self._facts(model)
        changed = differing(now, self.facts)
        if _own_similarity(model) != self._similarity:
            raise ModelChanged.because("it compares by another function")
        unread = {path for path in changed if is_unread(model, path)}
        for path in sorted(changed - unread) or (sorted(unread) if unread and attributes_decide(model, unread) else ()):
            raise ModelChanged.because(
                f"{path.strip('.:')}: {_short(self.facts.get(path))}, now {_short(now.get(path))}"
            )
        for own, key, value in self._same:
            if own.get(key) is not value and _is_opaque(value) and not _is_tokenizer(own.get(key)):
                raise ModelChanged.because(f"{key} is another object")
        fresh = tensors(model, self.fleeting)
        moved = [(old, new) for old, new in zip(self._tensors, fresh, strict=False) if old is not new]
        # A buffer moved to another device or precision is a new tensor with the same values, and on some devices a
        # weight that is moved there is one too: the copy takes it over.
        is_same = all(_may_be_taken_over(old, new) and _holds(new, old) for old, new in moved)
        if len(fresh) != len(self._tensors) or not is_same or (moved and not self._is_shared):
            raise ModelChanged.because("one of its weights was replaced by another tensor")
        for old, new in moved:
            self._adopt(old, new)
        self.writes += bool(moved)
        if any(list(own.values()) != hooks for own, hooks in self._hooks) and hooks_decide(model):
            raise ModelChanged.because("a hook changes what it computes")
        self._look(model)

    def _facts(self, model: Any) -> Facts:
        return {path: value for path, value in facts(model).items() if path not in self.fleeting}


def _is_mutable(value: Any) -> bool:
    """Whether a value can change and stay the same object: it is compared with a copy, or by its facts."""
    if isinstance(value, types.FunctionType):
        return value.__closure__ is not None
    return isinstance(value, dict | list | set | np.ndarray | partial | types.MethodType)


def _is_opaque(value: Any) -> bool:
    """Whether the facts know no more of a value than its class."""
    return not isinstance(value, Tensor | nn.Module | dict | type) and not callable(value) and not is_data(value)


def _own_similarity(model: Any) -> Any:
    """A function of the user's own by which the model compares; None for those of its library, which have names."""
    function = vars(model).get("_similarity")
    is_own = function is not None and not str(getattr(function, "__module__", "")).startswith("sentence_transformers")
    return plain(function) if is_own else None


def _is_tokenizer(value: Any) -> bool:
    """Whether the facts tell how a value splits texts: another one that does the same is as good."""
    return backend_of(value) is not None


def _may_be_taken_over(old: Tensor, new: Tensor) -> bool:
    """Whether a tensor in another one's place may be the same one, moved."""
    return not isinstance(new, nn.Parameter) or (new.device != old.device and new.dtype == old.dtype)


def _holds(new: Tensor, old: Tensor) -> bool:
    """Whether a tensor has the values of another one, in its own precision."""
    return new.shape == old.shape and torch.equal(old.cpu().to(new.dtype), new.cpu())


def _bits(tensor: Tensor) -> NDArray[Any] | None:
    """(elements,) as whole numbers, where they can be read without a copy, else None."""
    if tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
        return None
    return tensor.detach().flatten().view(torch.uint8).numpy().view(f"u{min(8, tensor.element_size())}")


def _splitting(tokenizer: Any) -> tuple[Any, ...]:
    """How the tokenizer splits texts, as far as that can be read at once: of its vocabulary only the size."""
    backend = backend_of(tokenizer)
    if backend is None:  # such a model is refused
        return (id(tokenizer),)
    # Each call of a tokenizer of transformers sets these; another one keeps them.
    kept = [backend.truncation, backend.padding] if backend is tokenizer else []
    steps = (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    states = [None if step is None else step.__getstate__() for step in steps]
    settings = [getattr(backend.model, name, None) for name in _MODEL_SETTINGS]
    kept.append(getattr(tokenizer, "chat_template", None))
    return id(tokenizer), backend.get_vocab_size(with_added_tokens=True), *states, *settings, *kept


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
