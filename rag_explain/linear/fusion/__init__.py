"""Passes that make a frozen encoder cheaper to run without changing what it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fusion:
    """Which passes are made. `benchmarks/factors.py` says what each is worth; a test holds that none changes a row."""

    heads: bool = True
    token_local: bool = True
    early_pooling: bool = True


FUSED = Fusion()
