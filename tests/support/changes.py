"""Random small models and random changes of them, drawn from a number: any process can repeat a draw."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from peft import LoraConfig
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router
from torch import nn

from tests.support.models import tiny

SIZE = 16
ARCHITECTURES = ("bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "electra", "qwen3", "t5", "modernbert")
POOLINGS = ("mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")
ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (nn.Tanh, nn.ReLU, nn.GELU, nn.Identity, lambda: nn.LeakyReLU(0.2))


class Own(nn.Module):
    """A module that people might write: what it computes is in attributes, in buffers, and in the task."""

    forward_kwargs: ClassVar[set[str]] = {"task"}

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.options = {"power": 1.0, "shift": [0.1, 0.2]}
        self.register_buffer("kept", torch.full((SIZE,), 0.3, dtype=torch.float64))
        self.register_buffer("not_saved", torch.full((SIZE,), 0.2, dtype=torch.float64), persistent=False)
        self.calls = 0

    def forward(self, features: dict[str, Any], task: str | None = None) -> dict[str, Any]:
        self.calls += 1
        x = features["sentence_embedding"] * self.scale * self.options["power"]
        x = x * 1.5 if task == "query" else x
        shift = (self.kept + self.not_saved + sum(self.options["shift"])).to(x)
        features["sentence_embedding"] = x + shift
        return features


def draw_model(number: int) -> SentenceTransformer:
    """The model of this number: always the same one, in any process."""
    chance = random.Random(number)
    torch.manual_seed(number)

    def after() -> list[nn.Module]:
        modules: list[nn.Module] = []
        for _ in range(chance.randrange(3)):
            kind = chance.randrange(3)
            if kind == 0:
                modules.append(Dense(SIZE, SIZE, activation_function=chance.choice(ACTIVATIONS)()))
            elif kind == 1:
                modules.append(Own(chance.uniform(0.5, 2.0)))
            else:
                modules.append(Router.for_query_document([Dense(SIZE, SIZE)], [Dense(SIZE, SIZE)]))
        return [*modules, Normalize()] if chance.random() < 0.3 else modules

    settings: dict[str, Any] = {"similarity_fn_name": chance.choice(["cosine", "cosine", "dot"])}
    if chance.random() < 0.4:
        settings["prompts"] = {"query": chance.choice(["", "search: ", "query "]), "document": "text: "}
    if chance.random() < 0.2:
        settings["truncate_dim"] = 8
    architecture, pooling = chance.choice(ARCHITECTURES), chance.choice(POOLINGS)
    model = tiny(architecture, pooling, after=after, **settings)
    if chance.random() < 0.2 and architecture in ("bert", "roberta", "electra", "xlm-roberta"):
        _adapt(model, "a")
    return model.to(torch.float64)


def _adapt(model: SentenceTransformer, name: str) -> None:
    targets = ["q_proj", "v_proj", "query", "value", "q_lin", "q", "v", "Wqkv", "Wo"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own, about a second adapter
        model.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=targets), name)
    model.to(torch.float64)


def _choose(chance: random.Random, model: SentenceTransformer, least: int = 1) -> nn.Parameter:
    return chance.choice([one for one in model.parameters() if one.numel() >= least])


def _write(chance: random.Random, model: SentenceTransformer) -> None:
    with torch.no_grad():
        _choose(chance, model).add_(0.5)


def _write_data(chance: random.Random, model: SentenceTransformer) -> None:
    _choose(chance, model, 256).data.mul_(1.7)


def _replace(chance: random.Random, model: SentenceTransformer) -> None:
    linear = chance.choice([one for one in model.modules() if isinstance(one, nn.Linear)])
    linear.weight = nn.Parameter(linear.weight.detach() * 1.3)


def _assign(chance: random.Random, model: SentenceTransformer) -> None:
    state = {name: value * 1.1 if value.is_floating_point() else value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _buffer(chance: random.Random, model: SentenceTransformer) -> None:
    buffers = [one for one in model.buffers() if one.is_floating_point()]
    if buffers:
        chance.choice(buffers).add_(0.7)
    else:
        _append(chance, model)


def _new_buffer(chance: random.Random, model: SentenceTransformer) -> None:
    owners = [
        (one, name)
        for one in model.modules()
        for name, value in one.named_buffers(recurse=False)
        if value.is_floating_point()
    ]
    for one, name in owners:
        setattr(one, name, getattr(one, name) * 2)


def _append(chance: random.Random, model: SentenceTransformer) -> None:
    model.append(Dense(model[1].get_embedding_dimension(), SIZE).to(torch.float64))


def _swap(chance: random.Random, model: SentenceTransformer) -> None:
    dropouts = [
        (one, name)
        for one in model.modules()
        for name, child in one.named_children()
        if isinstance(child, nn.LayerNorm)
    ]
    if dropouts:
        owner, name = chance.choice(dropouts)
        setattr(owner, name, nn.Identity())


def _pooling(chance: random.Random, model: SentenceTransformer) -> None:
    model[1].pooling_mode = chance.choice(POOLINGS)


def _prompt(chance: random.Random, model: SentenceTransformer) -> None:
    model.prompts[chance.choice(["query", "document", "unused"])] = chance.choice(["", "the moon: "])


def _prompts(chance: random.Random, model: SentenceTransformer) -> None:
    model.prompts, model.default_prompt_name = {"x": "the cat: "}, chance.choice(["x", None])


def _similarity(chance: random.Random, model: SentenceTransformer) -> None:
    model.similarity_fn_name = chance.choice(["cosine", "dot", "euclidean"])


def _length(chance: random.Random, model: SentenceTransformer) -> None:
    model.max_seq_length = chance.choice([4, 6, 64])


def _tokenizer_length(chance: random.Random, model: SentenceTransformer) -> None:
    model.tokenizer.model_max_length = chance.choice([5, 64])


def _tokens(chance: random.Random, model: SentenceTransformer) -> None:
    model.tokenizer.add_tokens([chance.choice(["looked at", "unseen", "barking"])])
    model[0].auto_model.resize_token_embeddings(len(model.tokenizer), mean_resizing=False)


def _normalizer(chance: random.Random, model: SentenceTransformer) -> None:
    model.tokenizer.backend_tokenizer.normalizer = None


def _truncate(chance: random.Random, model: SentenceTransformer) -> None:
    model.truncate_dim = chance.choice([None, 4, 12])


def _attribute(chance: random.Random, model: SentenceTransformer) -> None:
    own = [one for one in model.modules() if isinstance(one, Own)]
    for one in own:
        chance.choice([lambda one=one: setattr(one, "scale", 3.0), lambda one=one: one.options["shift"].append(1.0)])()
    if not own:
        norm = next((one for one in model.modules() if hasattr(one, "eps")), None)
        if norm is not None:
            norm.eps = 0.5


def _slope(chance: random.Random, model: SentenceTransformer) -> None:
    for one in model.modules():
        if isinstance(one, nn.LeakyReLU):
            one.negative_slope = 0.9


def _adapters(chance: random.Random, model: SentenceTransformer) -> None:
    if not getattr(model[0].auto_model, "_hf_peft_config_loaded", False):
        _adapt(model, "late")
        return
    kind = chance.randrange(3)
    if kind == 0:
        model.disable_adapters()
    elif kind == 1:
        _adapt(model, "b")
        model.set_adapter("b")
    else:
        for one in model.modules():
            if isinstance(getattr(one, "scaling", None), dict):
                one.scaling["a"] = 9.0


def _hook(chance: random.Random, model: SentenceTransformer) -> None:
    name = "sentence_embedding"
    model[1].register_forward_hook(lambda module, args, out: {**out, name: out[name] + 1.0})


def _use(chance: random.Random, model: SentenceTransformer) -> None:
    model.encode(["another text", "and one more"], prompt="of course: ")
    model.train(chance.random() < 0.5)


def _precision(chance: random.Random, model: SentenceTransformer) -> None:
    model.to(torch.float32)


CHANGES = (
    _write,
    _write_data,
    _replace,
    _assign,
    _buffer,
    _new_buffer,
    _append,
    _swap,
    _pooling,
    _prompt,
    _prompts,
    _similarity,
    _length,
    _tokenizer_length,
    _tokens,
    _normalizer,
    _truncate,
    _attribute,
    _slope,
    _adapters,
    _hook,
    _use,
    _precision,
)


def change(number: int, model: SentenceTransformer) -> str:
    """Do to the model what this number says, and tell what that was."""
    chance = random.Random(f"change {number}")
    done = [chance.choice(CHANGES) for _ in range(chance.choice([1, 1, 2]))]
    torch.manual_seed(number)
    for one in done:
        one(chance, model)
    return ", ".join(one.__name__.strip("_") for one in done)


def truth(model: SentenceTransformer, query: str, document: str) -> float | None:
    """What the model itself says; None where two changes together have broken it."""
    try:
        return float(model.similarity(model.encode_query(query), model.encode_document(document)))
    except RuntimeError:
        return None
