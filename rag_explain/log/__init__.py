"""Explanations beside RAG answers: `ExplanationLog` writes them, `records` and `find` read them back."""

from rag_explain.log.erasure import erase
from rag_explain.log.lookup import LogSource, explain_again, find_explanation
from rag_explain.log.reader import find, records, summaries
from rag_explain.log.record import Record, Summary
from rag_explain.log.redaction import Redactor, patterns
from rag_explain.log.writer import Counts, ExplanationLog

__all__ = ["Counts", "ExplanationLog", "LogSource", "Record", "Redactor", "Summary"]
__all__ += ["erase", "explain_again", "find", "find_explanation", "patterns", "records", "summaries"]
