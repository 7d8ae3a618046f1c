"""Tiny encoders with random weights, one per architecture, saved and loaded as real sentence-transformers models."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rank_bm25 import BM25Okapi
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router
from sentence_transformers.base.modules.transformer import Transformer as BaseTransformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from rag_explain.scorers import BM25

CORPUS = [
    "the cat sat on the mat and looked at the moon",
    "a small dog ran over the old bridge, barking loudly!",
    "paris is the capital of france; berlin is the capital of germany.",
    "why was this short text found? because words met words.",
    "honeybees navigate by the sun and by landmarks they have learned",
]
TEXTS = ["The cat looked at the moon.", "A dog in Paris, barking loudly at old bridges!"]


@dataclass(frozen=True)
class Architecture:
    """How to build one: its transformers classes, its sizes, its kind of tokenizer."""

    model: str
    config: str
    sizes: dict[str, Any]
    tokenizer: str = "wordpiece"
    gated: bool = False
    tolerance: float = 1e-9  # agreement in float64; less where the model itself casts to float32


_BERT = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
_DECODER = {**_BERT, "num_key_value_heads": 1, "head_dim": 8}
_POSITIONS = {"max_position_embeddings": 128}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2}

ARCHITECTURES = {
    "bert": Architecture("BertModel", "BertConfig", {**_BERT, **_POSITIONS}),
    "roberta": Architecture("RobertaModel", "RobertaConfig", {**_BERT, **_POSITIONS}, "bytes"),
    "xlm-roberta": Architecture("XLMRobertaModel", "XLMRobertaConfig", {**_BERT, **_POSITIONS}, "unigram"),
    "mpnet": Architecture("MPNetModel", "MPNetConfig", {**_BERT, **_POSITIONS}),
    "distilbert": Architecture(
        "DistilBertModel",
        "DistilBertConfig",
        {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 32, **_POSITIONS},
    ),
    "electra": Architecture("ElectraModel", "ElectraConfig", {**_BERT, "embedding_size": 8, **_POSITIONS}),
    "albert": Architecture("AlbertModel", "AlbertConfig", {**_BERT, "embedding_size": 8, **_POSITIONS}, "unigram"),
    "nomic_bert": Architecture("NomicBertModel", "NomicBertConfig", {**_BERT, **_POSITIONS}, gated=True),
    "modernbert": Architecture(
        "ModernBertModel",
        "ModernBertConfig",
        {**_BERT, "local_attention": 4, **_POSITIONS},
        "bytes",
        gated=True,
        tolerance=1e-6,
    ),
    "gpt_neo": Architecture(
        "GPTNeoModel",
        "GPTNeoConfig",
        {
            "hidden_size": 16,
            "num_layers": 3,
            "num_heads": 2,
            "intermediate_size": 32,
            "attention_types": [[["global", "local", "global"], 1]],
            "window_size": 4,
            **_POSITIONS,
        },
        "bytes",
        tolerance=1e-6,
    ),
    "qwen3": Architecture("Qwen3Model", "Qwen3Config", _DECODER, "bytes", gated=True, tolerance=1e-6),
    "mistral": Architecture("MistralModel", "MistralConfig", _DECODER, "bytes", gated=True, tolerance=1e-6),
    "gemma3_text": Architecture("Gemma3TextModel", "Gemma3TextConfig", _DECODER, "unigram", gated=True, tolerance=1e-6),
    "t5": Architecture("T5EncoderModel", "T5Config", {**_T5, "feed_forward_proj": "relu"}, "unigram", tolerance=1e-6),
    "t5-gated": Architecture(
        "T5EncoderModel", "T5Config", {**_T5, "feed_forward_proj": "gated-gelu"}, "unigram", gated=True, tolerance=1e-6
    ),
}
BERT_FAMILY = ("bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "electra")


@functools.cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one of the three families: "wordpiece", "bytes" (BPE) or "unigram".

    They were trained on `CORPUS` once and are kept as files: training breaks ties by hash, so that every run would get
    other pieces and every test other numbers.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(Path(__file__).parent / "tokenizers" / f"{kind}.json")),
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
    )


@functools.cache
def folder(name: str) -> Path:
    """Where a tiny transformer of this architecture is saved, with random weights and biases that matter."""
    architecture = ARCHITECTURES[name]
    words = tokenizer(architecture.tokenizer)
    torch.manual_seed(0)
    config = getattr(transformers, architecture.config)(
        vocab_size=len(words), pad_token_id=0, bos_token_id=2, eos_token_id=3, **architecture.sizes
    )
    model = getattr(transformers, architecture.model)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights large enough that attention and activations are far from linear; biases that are not zero.
            parameter.normal_(mean=1.0 if parameter.ndim == 1 and (parameter == 1).all() else 0.0, std=0.3)
    where = Path(tempfile.mkdtemp(prefix=f"tiny-{name}-"))
    model.save_pretrained(where)
    words.save_pretrained(where)
    return where


def tiny(
    name: str = "bert",
    pooling: str | tuple[str, ...] = "mean",
    *,
    after: Callable[[], list[torch.nn.Module]] | None = None,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> SentenceTransformer:
    """A SentenceTransformer of this architecture; `after` makes the modules behind its pooling."""
    transformer = Transformer(str(folder(name)))
    torch.manual_seed(1)
    width = transformer.get_embedding_dimension()
    include_prompt = settings.pop("include_prompt", True)
    modules = [transformer, Pooling(width, pooling, include_prompt=include_prompt), *(after() if after else [])]
    return SentenceTransformer(modules=modules, device="cpu", **settings).to(dtype)


def colbert(architecture: str = "bert", expansion: dict[str, Any] | None = None, **settings: Any) -> MultiVectorEncoder:
    """A late-interaction encoder of this architecture, with a projection and, for BERT, marks that are skipped."""
    torch.manual_seed(2)
    transformer = BaseTransformer(str(folder(architecture)), query_expansion=expansion)
    modules = [
        transformer,
        Dense(16, 12, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings"),
        MultiVectorMask(skiplist_words=[",", "!"] if architecture == "bert" else None),
        Normalize(module_input_name="token_embeddings"),
    ]
    return MultiVectorEncoder(modules=modules, device="cpu", **settings).to(torch.float64)


@functools.cache
def masked_folder(name: str = "bert") -> Path:
    """Where a tiny masked language model is saved, with random weights and a head for each word."""
    architecture = ARCHITECTURES[name]
    words = tokenizer(architecture.tokenizer)
    torch.manual_seed(5)
    config = getattr(transformers, architecture.config)(
        vocab_size=len(words), pad_token_id=0, bos_token_id=2, eos_token_id=3, **architecture.sizes
    )
    model = getattr(transformers, architecture.model.replace("Model", "ForMaskedLM"))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=1.0 if parameter.ndim == 1 and (parameter == 1).all() else 0.0, std=0.3)
    where = Path(tempfile.mkdtemp(prefix=f"tiny-masked-{name}-"))
    model.save_pretrained(where)
    words.save_pretrained(where)
    return where


def splade(
    name: str = "bert", pooling: Any = "max", activation: Any = "relu", *, free: bool = False, **settings: Any
) -> SparseEncoder:
    """A SparseEncoder of this architecture; `free`: queries are read by a table of weights, some of them zero."""
    transformer = BaseTransformer(str(masked_folder(name)), transformer_task="fill-mask")
    modules: list[Any] = [transformer, SpladePooling(pooling, activation)]
    if free:
        torch.manual_seed(6)
        table = SparseStaticEmbedding(transformer.tokenizer, torch.rand(len(transformer.tokenizer)).sub(0.2).relu())
        modules = [Router.for_query_document(query_modules=[table], document_modules=modules)]
    return SparseEncoder(modules=modules, device="cpu", **settings).to(torch.float64)


@functools.cache
def cross_encoder_folder() -> Path:
    """Where a tiny cross-encoder is saved: BERT with one output and random weights."""
    words = tokenizer("wordpiece")
    torch.manual_seed(3)
    config = transformers.BertConfig(vocab_size=len(words), pad_token_id=0, num_labels=1, **_BERT, **_POSITIONS)
    model = transformers.BertForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=1.0 if parameter.ndim == 1 and (parameter == 1).all() else 0.0, std=0.3)
    where = Path(tempfile.mkdtemp(prefix="tiny-cross-encoder-"))
    model.save_pretrained(where)
    words.save_pretrained(where)
    return where


class QKVPooling(torch.nn.Module):
    """The pooling of Vasileiou & Eberle (2024), section 4.2, which sentence-transformers does not have.

    Queries, keys and values of the token vectors, softmax(Q K^T / sqrt(h)) as the weights with which values are
    aggregated at each place, and the mean of all places.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(width, width) for _ in range(3))

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        tokens = features["token_embeddings"]
        mask = features["attention_mask"].to(tokens)
        scores = self.query(tokens) @ self.key(tokens).transpose(1, 2) / tokens.shape[-1] ** 0.5
        weights = torch.softmax(scores.masked_fill(mask[:, None] == 0, float("-inf")), dim=-1)
        places = (weights @ self.value(tokens)) * mask[..., None]
        features["sentence_embedding"] = places.sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return features


def static(*after: torch.nn.Module, kind: str = "wordpiece", width: int = 8, **settings: Any) -> SentenceTransformer:
    """Static word vectors with random values, and `after` behind them."""
    torch.manual_seed(4)
    # A copy: the module sets the padding of the tokenizer that it is given.
    words = StaticEmbedding(Tokenizer.from_str(tokenizer(kind).backend_tokenizer.to_str()), embedding_dim=width)
    return SentenceTransformer(modules=[words, *after], device="cpu", **settings)


def routed(
    query: SentenceTransformer, document: SentenceTransformer, *after: torch.nn.Module, **settings: Any
) -> SentenceTransformer:
    """A model that reads queries with the modules of one model and documents with those of another."""
    default = settings.pop("default_route", "document")
    router = Router.for_query_document(list(query.children()), list(document.children()), default_route=default)
    return SentenceTransformer(modules=[router, *after], device="cpu", **settings)


def word_index() -> BM25:
    """A BM25 index of some texts."""
    index = BM25Okapi([text.split() for text in (*CORPUS, *TEXTS, "The bank is closed.")])
    return BM25(index, str.split)


def pair_model() -> CrossEncoder:
    """A cross-encoder in double precision."""
    return CrossEncoder(str(cross_encoder_folder()), device="cpu").to(torch.float64)


# The methods of other kinds of models than bi-encoders.
OF_OTHERS = ("static", "terms", "lrp", "gradient-input")


def model_for(method: str) -> SentenceTransformer | CrossEncoder | BM25:
    """A tiny model that this method explains."""
    pairs = dict.fromkeys(("lrp", "gradient-input"), pair_model)
    kinds: dict[str, Callable[[], Any]] = {"static": static, "terms": word_index, **pairs}
    model: SentenceTransformer | CrossEncoder | BM25 = kinds.get(method, lambda: tiny("bert"))()
    return model
