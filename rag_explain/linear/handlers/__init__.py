"""What is known of torch's operations: importing this fills the registry."""

from rag_explain.linear.handlers import arithmetic as arithmetic
from rag_explain.linear.handlers import attention as attention
from rag_explain.linear.handlers import norms as norms
from rag_explain.linear.handlers import pointwise as pointwise
from rag_explain.linear.handlers import shapes as shapes
