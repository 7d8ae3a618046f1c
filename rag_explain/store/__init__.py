"""Where the factors of documents are kept: memory, SQLite, and remote tiers.

`Store("folder")` is what `Explainer(store="folder")` opens; `Store()` keeps factors in memory only.
"""

from rag_explain.store.key import factors_key
from rag_explain.store.store import KeptFactors, NewFactors, Store

__all__ = ["KeptFactors", "NewFactors", "Store", "factors_key"]
