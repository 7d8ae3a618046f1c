"""A LangChain RAG chain whose sources say why they were found; the prompt stays what it was.

pip install ".[demo]" ./integrations/langchain && python examples/langchain_chain.py
"""

from __future__ import annotations

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_explain import ExplainingRetriever, get_explanation
from sentence_transformers import SentenceTransformer

from rag_explain.cli.demo import corpus
from rag_explain.encoder.loading import packaged_path

QUERY = "How do bees find their way home?"


class LocalEmbeddings(Embeddings):
    """Any embeddings that hold a SentenceTransformer will do, such as HuggingFaceEmbeddings."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.client = model

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [list(map(float, vector)) for vector in self.client.encode_document(texts)]

    def embed_query(self, text: str) -> list[float]:
        return list(map(float, self.client.encode_query(text)))


store = InMemoryVectorStore(LocalEmbeddings(SentenceTransformer(str(packaged_path() or "all-MiniLM-L6-v2"))))
store.add_documents([Document(one["text"], id=one["id"], metadata={"topic": one["topic"]}) for one in corpus()])
retriever = ExplainingRetriever(vectorstore=store, k=3)  # the one line

prompt = ChatPromptTemplate.from_template("Answer from these sources:\n{sources}\n\nQuestion: {question}")
model = RunnableLambda(lambda value: value.to_string().splitlines()[1])  # your chat model goes here
answer = RunnablePassthrough.assign(sources=lambda value: "\n".join(d.page_content for d in value["documents"]))
chain = RunnablePassthrough.assign(documents=lambda value: retriever.invoke(value["question"])).assign(
    answer=answer | prompt | model
)
result = chain.invoke({"question": QUERY})
print(f"{QUERY}\n\nAnswer: {result['answer']}\n")
for document in result["documents"]:
    (pair,) = get_explanation(document).by_word().top_pairs(1)
    hit = document.hit
    print(f"{hit.id}: {hit.metric} {hit.score:.3f}, above all because {pair.query.text} met {pair.document.text}")

tool = create_retriever_tool(retriever, "notes", "Search the notes.", response_format="content_and_artifact")
message = tool.invoke({"type": "tool_call", "id": "1", "name": "notes", "args": {"query": "my laptop is slow"}})
print(f"\nFor the agent: {message.content[:60]}...\nFor you:\n{get_explanation(message.artifact[0])}")
