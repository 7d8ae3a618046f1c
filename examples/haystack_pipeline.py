"""A Haystack pipeline whose sources say why they were found; documents, scores and the prompt stay what they were.

pip install ".[demo]" ./integrations/haystack sentence-transformers-haystack
python examples/haystack_pipeline.py
"""

from __future__ import annotations

from haystack import Document, Pipeline, component
from haystack.components.builders import PromptBuilder
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack_integrations.components.embedders.sentence_transformers import (
    SentenceTransformersDocumentEmbedder,
    SentenceTransformersTextEmbedder,
)
from haystack_integrations.components.explainers.rag_explain import DocumentExplainer

from rag_explain.cli.demo import corpus
from rag_explain.encoder.loading import packaged_path

QUERY = "How do bees find their way home?"
PROMPT = "{{ query }}\n---\n{% for one in documents %}{{ one.content }}\n{% endfor %}"


@component
class FirstSource:
    """Answers with the first source of the prompt; your LLM goes here."""

    @component.output_types(replies=list[str])
    def run(self, prompt: str) -> dict[str, list[str]]:
        return {"replies": [prompt.split("---\n")[1].split("\n")[0]]}


model = str(packaged_path() or "sentence-transformers/all-MiniLM-L6-v2")
documents = [Document(id=one["id"], content=one["text"], meta={"topic": one["topic"]}) for one in corpus()]
store = InMemoryDocumentStore()
store.write_documents(SentenceTransformersDocumentEmbedder(model=model).run(documents)["documents"])

pipeline = Pipeline()
pipeline.add_component("embedder", SentenceTransformersTextEmbedder(model=model))
pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=3))
pipeline.add_component("explainer", DocumentExplainer())  # the one component
pipeline.add_component("prompt", PromptBuilder(PROMPT, required_variables="*"))
pipeline.add_component("llm", FirstSource())
pipeline.connect("embedder.embedding", "retriever.query_embedding")
pipeline.connect("retriever.documents", "explainer.documents")
pipeline.connect("explainer.documents", "prompt.documents")
pipeline.connect("prompt", "llm")

asked = {"embedder": {"text": QUERY}, "explainer": {"query": QUERY}, "prompt": {"query": QUERY}}
outputs = pipeline.run(asked)
print(f"{QUERY}\n\nAnswer: {outputs['llm']['replies'][0]}\n")
for hit in outputs["explainer"]["hits"]:
    print(f"{hit.id}, score {hit.score:.3f}\n{hit.explanation}\n")
