"""The frozen affine encoder: rules that make an encoder linear at a text, and maps to run on tangents."""

from rag_explain.linear import arithmetic as arithmetic  # fills the table of operations, with what it imports
from rag_explain.linear import attention as attention
from rag_explain.linear.affine import DEFAULT_BUDGET as DEFAULT_MAX_BYTES
from rag_explain.linear.affine import AffineMap
from rag_explain.linear.rules import ATTN_LRP, JACOBIAN, LRP, Rules
from rag_explain.linear.trace import Recorder

__all__ = ["ATTN_LRP", "DEFAULT_MAX_BYTES", "JACOBIAN", "LRP", "AffineMap", "Recorder", "Rules"]
