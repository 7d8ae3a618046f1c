"""Why did the retriever return this document? Explanations for any Haystack pipeline."""

from haystack_integrations.components.explainers.rag_explain.explainer import DocumentExplainer
from haystack_integrations.components.explainers.rag_explain.hits import PipelineHit, PipelineHits

__all__ = ["DocumentExplainer", "PipelineHit", "PipelineHits"]
