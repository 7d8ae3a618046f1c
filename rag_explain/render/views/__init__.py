"""Views: each module has a function from a result to sections of blocks, which any drawer can draw."""
