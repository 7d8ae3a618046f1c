from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import TextNode
from sentence_transformers import SentenceTransformer

from rag_explain.log import ExplanationLog
from tests.support.models import CORPUS, tiny
from tests.support.postgres import stopped_postgres as stopped_postgres

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class LocalEmbedding(BaseEmbedding):
    """What HuggingFaceEmbedding is at heart: a SentenceTransformer in a private attribute."""

    _model: SentenceTransformer = PrivateAttr()

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self._model = model

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._model.encode_query(query).tolist()  # type: ignore[no-any-return]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._model.encode_document(text).tolist()  # type: ignore[no-any-return]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        await asyncio.sleep(random.random() * 0.02)  # so that queries overtake one another
        return self._get_query_embedding(query)


@pytest.fixture(scope="module")
def index() -> VectorStoreIndex:
    nodes = [TextNode(text=text, id_=f"id-{number}") for number, text in enumerate(CORPUS)]
    return VectorStoreIndex(nodes, embed_model=LocalEmbedding(tiny("bert")))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ExplanationLog]:
    with ExplanationLog(tmp_path / "log") as log:
        yield log
