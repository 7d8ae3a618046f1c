"""What people get: explanations, hits, contrasts, comparisons. Frozen, serialisable, and without torch."""
