"""Which model it is: every fact that decides an embedding, and a digest of them all.

A fact is anything a module tree holds that is not a tensor: classes, what stands where, plain attributes (of modules
that people wrote too), configuration, adapters and their scaling, the tokenizer. Facts are found by walking, not by a
list of names, so that a module nobody foresaw is not the same model as another.
"""

import copy
import hashlib
import json
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import lru_cache, partial
from inspect import unwrap
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from rag_explain._torch import COMPILED, parts
from rag_explain.encoder.reading import pair_prompt, reads_pairs, role_prompt

Facts = dict[str, Any]  # by the path of each in the model

_DEPTH = 3  # objects inside objects; deeper ones are known by their class
# What torch keeps of every module, but for its tensors and parts, which are looked at one by one.
_TORCH = frozenset(nn.Module().__dict__)
# They say where a model came from, or what it did last, and nothing about what it computes.
_NOT_DECISIVE = frozenset(
    [
        *("model_card_data", "trust_remote_code", "generation_config", "transformers_version", "dtype", "verbose"),
        *("files_loaded", "init_inputs", "init_kwargs", "deprecation_warnings", "warnings_issued", "peft_config"),
        *("_target_device", "_is_hf_initialized", "_prompt_length_mapping", "_similarity", "_similarity_pairwise"),
        *("_chat_template_suffix_cache", "_method_signature_cache", "_model_card_text", "_model_card_vars"),
        *("_accelerate_placement_hook", "_hf_hook", "_require_grads_hook", "_require_grads_hooks"),
        *("_output_capturing_hooks_installed", "_is_accelerate_prepared", "gradient_checkpointing"),
        *("_gradient_checkpointing_func", "chat_template", COMPILED),
    ]
)
_NOT_DECISIVE_ENDINGS = ("name_or_path", "_file", "_folder", "_dir")
_TRAINING = ".fit_mixin"  # where sentence-transformers keeps what trains a model, and embeds nothing
_SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, Enum)
_CLOSED = (*_SIMPLE, nn.Module, Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, partial)


class Place(NamedTuple):
    """Where a fact is kept: `owner[key]`, an attribute of the module or object at `path`."""

    path: str
    owner: dict[str, Any]
    key: str


def places(model: nn.Module) -> Iterator[Place]:
    """Every attribute of a model's modules, and of the objects in them, that can decide an embedding."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        yield from _places(f"{path}.", vars(module), seen, _TORCH)


def _places(path: str, owner: dict[str, Any], seen: set[int], hidden: Iterable[str], depth: int = _DEPTH) -> Any:
    seen.add(id(owner))
    for key, value in owner.items():
        if key in hidden or key in _NOT_DECISIVE or key.endswith(_NOT_DECISIVE_ENDINGS):
            continue
        yield Place(path + key, owner, key)
        # An object of the model's own: a configuration, a tokenizer, settings. Its private attributes are its own.
        inside = getattr(value, "__dict__", None) if not isinstance(value, _CLOSED) else None
        if inside and depth and id(inside) not in seen:
            private = [name for name in inside if name.startswith("_")]
            yield from _places(f"{path}{key}.", inside, seen, private, depth - 1)


def facts(model: Any) -> Facts:
    """What stands where in the model, and what is at each of its places, as plain data."""
    numbers = {id(module): number for number, module in enumerate(model.modules())}
    found: Facts = {}
    for path, module in model.named_modules():
        parameters, buffers, modules = parts(module)
        children = {name: numbers[id(child)] for name, child in modules.items() if child is not None}
        found[f"{path}:"] = [_name(type(module)), children, list(parameters), list(buffers)]
    found |= {path: plain(owner[key]) for path, owner, key in places(model)}
    # Of these the model may hold several forms that say the same, before and after it was used or saved.
    found[".module_kwargs"] = {name: taken for name, taken in (model.module_kwargs or {}).items() if taken}
    if reads_pairs(model):
        found[".prompts"] = pair_prompt(model)
    else:
        found[".prompts"] = [role_prompt(model, "query"), role_prompt(model, "document")]
        # Asking sets it: not on the model itself.
        found["._similarity_fn_name"] = str(copy.copy(model).similarity_fn_name)
    found.pop(".default_prompt_name", None)
    if "message" in getattr(model[0], "modality_config", ()):  # then it writes what the model reads
        found["chat_template"] = plain(getattr(model[0].tokenizer, "chat_template", None))
    found["tokenizer"] = hashlib.blake2b(_splitting(model[0].tokenizer).encode()).hexdigest()
    return found


def tensors(model: nn.Module, without: Collection[str] = ()) -> list[Tensor]:
    """Every parameter, every buffer, and every tensor that is an attribute, but for those at the paths `without`."""
    own = (owner[key] for path, owner, key in places(model) if path not in without)
    return [*model.parameters(), *model.buffers(), *(value for value in own if isinstance(value, Tensor))]


def plain(value: Any) -> Any:
    """A value as JSON can hold it; what is no data is known by its class or its name."""
    if isinstance(value, _SIMPLE):
        return value if value is None or isinstance(value, bool | int | float | str) else str(value)
    if isinstance(value, np.generic | np.ndarray):
        value = torch.as_tensor(value) if value.dtype.kind in "bfiu" else value.tolist()
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)} {_tensor_digest(value).hex()}"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, map(plain, value)))
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, partial):
        return ["partial", plain(value.func), plain(value.args), plain(value.keywords)]
    if isinstance(value, types.FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not value]
        given = [value.__defaults__, value.__kwdefaults__, held]
        return [_name(value), _code(value.__code__), plain(given)]
    if isinstance(value, types.MethodType):
        own = {} if isinstance(value.__self__, nn.Module) else getattr(value.__self__, "__dict__", {})
        return [_name(value), {key: plain(one) for key, one in own.items() if is_data(one) or isinstance(one, Tensor)}]
    if callable(value) and hasattr(value, "__qualname__"):
        return _name(value)
    return _name(type(value))


def _code(code: types.CodeType) -> list[Any]:
    """What a function does: two that were made in one place may differ in names and constants only."""
    constants = [_code(one) if isinstance(one, types.CodeType) else plain(one) for one in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]


def is_data(value: Any) -> bool:
    """Whether a value is plain data all through, so that two of it can be compared as they are."""
    if isinstance(value, Mapping):
        return all(map(is_data, value.values()))
    return all(map(is_data, value)) if isinstance(value, list | tuple | set | frozenset) else isinstance(value, _SIMPLE)


def backend_of(tokenizer: Any) -> Any:
    """The Rust tokenizer of a fast one of transformers, or the tokenizer where it is one itself; None for others."""
    return tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)


def _splitting(tokenizer: Any) -> str:
    """How a tokenizer splits texts. What each call of one of transformers sets, truncation and padding, is left out."""
    description = json.loads(backend_of(tokenizer).to_str())
    each_time = () if isinstance(tokenizer, Tokenizer) else ("truncation", "padding")
    return json.dumps({k: v for k, v in description.items() if k not in each_time}, sort_keys=True)


def is_unread(model: nn.Module, path: str) -> bool:
    """Whether a path is that of plain data in a module, under a name that no class in the model mentions."""
    owner, dot, key = path.rpartition(".")
    modules = dict(model.named_modules())
    kept = vars(modules[owner]).get(key) if owner in modules else nn.Module
    return (
        bool(dot)
        and key.isidentifier()
        and is_data(kept)
        and all(key not in _mentioned(kind) for kind in map(type, modules.values()))
    )


@lru_cache(maxsize=512)
def _mentioned(kind: type) -> frozenset[str]:
    """Every name and every string in the code of a class and of those that it is made from."""
    kinds = [one for one in kind.__mro__ if not one.__module__.endswith(_TRAINING)]
    values = [value for one in kinds for value in vars(one).values()]
    values += [getattr(value, name, None) for value in values for name in ("fget", "fset")]
    names: set[str] = {name for one in kinds for name in vars(one)}
    functions = [unwrap(one) for value in values if callable(one := getattr(value, "__func__", value))]
    codes = [function.__code__ for function in functions if isinstance(function, types.FunctionType)]
    while codes:
        code = codes.pop()
        names.update(code.co_names, (one for one in code.co_consts if isinstance(one, str)))
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return frozenset(names)


def differing(one: Facts, other: Facts) -> frozenset[str]:
    """The paths at which two descriptions of a model differ."""
    return frozenset(path for path in {*one, *other} if one.get(path) != other.get(path))


def digest(description: Any, values: Iterable[Tensor]) -> str:
    """32 hexadecimal digits of facts and tensors, by which a cache may know the model."""
    result = hashlib.blake2b(json.dumps(description, sort_keys=True).encode(), digest_size=16)
    # hashlib releases the interpreter lock: large weights are read by several threads at once.
    with ThreadPoolExecutor() as pool:
        for part in pool.map(_tensor_digest, values):
            result.update(part)
    return result.hexdigest()


def _tensor_digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    header = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    raw = flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)
    return hashlib.blake2b(raw.numpy().data, key=hashlib.blake2b(header, digest_size=32).digest()).digest()


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
