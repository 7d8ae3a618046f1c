"""Tests on the device of `tests.support.device`, which torch knows for the rest of a process.

`tests/test_device.py` runs each file here in a process of its own, so that no other test meets it.
"""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("RAG_EXPLAIN_TEST_DEVICE") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def toy() -> str:
    """The name of the device."""
    from tests.support import device

    return device.install()
