from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.support.postgres import stopped_postgres as stopped_postgres

# Set before torch or transformers are imported: no test may reach for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # tests side by side: each on a core of its own
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")

# Hypothesis fails an example that takes 200 ms, and examples that are made slowly: a busy machine does both.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draws", type=int, default=50, help="how many models and changes tests/test_changes.py draws")


@pytest.fixture
def draws(request: pytest.FixtureRequest) -> int:
    """How many models and changes are drawn."""
    number: int = request.config.getoption("--draws")
    return number
