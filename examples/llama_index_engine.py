"""A LlamaIndex query engine whose source nodes say why they were found; prompt, scores and hashes stay what they were.

pip install ".[demo]" ./integrations/llama_index llama-index-embeddings-huggingface
python examples/llama_index_engine.py
"""

from __future__ import annotations

from llama_index.core import VectorStoreIndex
from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.retrievers.rag_explain import ExplainingRetriever

from rag_explain.cli.demo import corpus
from rag_explain.encoder.loading import packaged_path

QUERY = "How do bees find their way home?"


class FirstSource(CustomLLM):
    """Answers with the first source of the prompt; your LLM goes here."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata()

    def complete(self, prompt: str, formatted: bool = False, **kwargs: object) -> CompletionResponse:
        return CompletionResponse(text=prompt.split("---------------------\n")[1].split("\n\n")[1])

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: object):  # type: ignore[no-untyped-def]
        yield self.complete(prompt)


embedding = HuggingFaceEmbedding(str(packaged_path() or "sentence-transformers/all-MiniLM-L6-v2"))
nodes = [TextNode(text=one["text"], id_=one["id"], metadata={"topic": one["topic"]}) for one in corpus()]
index = VectorStoreIndex(nodes, embed_model=embedding)

retriever = ExplainingRetriever(index.as_retriever(similarity_top_k=3))  # the one line
engine = RetrieverQueryEngine.from_args(retriever, llm=FirstSource())

response = engine.query(QUERY)
print(f"{QUERY}\n\nAnswer: {response}\n")
for source in response.source_nodes:
    print(f"{source.node_id}, score {source.score:.3f}\n{source.explanation}\n")
