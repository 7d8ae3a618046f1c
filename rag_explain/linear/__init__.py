"""The frozen affine encoder: rules that make an encoder linear at a text, and maps to run on tangents."""

from rag_explain.linear import handlers as handlers  # fills the registry
from rag_explain.linear.affine_map import AffineMap
from rag_explain.linear.recorder import Recorder
from rag_explain.linear.rules import ATTN_LRP, JACOBIAN, LRP, Rules
from rag_explain.linear.structure import Structures

__all__ = ["ATTN_LRP", "JACOBIAN", "LRP", "AffineMap", "Recorder", "Rules", "Structures"]
