"""The accelerator path, on a device of torch's own kind that has memory of its own, counts transfers and fills up.

torch knows a device for the rest of a process, so that each file of `tests/device` runs in one of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import device

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "tests" / "device").glob("test_*.py"))


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    try:
        device.build()
    except device.NoDevice as reason:
        pytest.skip(str(reason))


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_it_holds_on_the_device(file: Path, request: pytest.FixtureRequest) -> None:
    chosen = ("-m", "not slow") if "not slow" in str(request.config.getoption("markexpr")) else ()
    seen = run("-m", "pytest", "-q", "-p", "no:xdist", *chosen, str(file), RAG_EXPLAIN_TEST_DEVICE="1")
    assert " passed" in seen


def test_the_transfers_are_printed() -> None:
    lines = run("-m", "tests.support.device").splitlines()
    counts = next(line.split()[3:] for line in lines if line.startswith("warm top ten  "))
    assert counts == ["1", "1", "0", "0", "0", "2"]
