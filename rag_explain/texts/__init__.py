"""Texts and their parts: passages, tokens, words, sentences, chunks. Knows no model."""
