"""Passes that make a frozen encoder cheaper to run without changing what it is."""
