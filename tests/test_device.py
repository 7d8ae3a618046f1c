"""The accelerator path, on a device of torch's own kind that has memory of its own, counts transfers and fills up.

torch knows a device for the rest of a process, so that each file of `tests/device` runs in one of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import device

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "tests" / "device").glob("test_*.py"))


@pytest.fixture(scope="module")
def built() -> None:
    try:
        device.build()
    except device.NoDevice as reason:
        pytest.skip(str(reason))


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(3600)  # a whole file of tests, on a machine that does other things too
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
@pytest.mark.usefixtures("built")
def test_it_holds_on_the_device(file: Path, request: pytest.FixtureRequest) -> None:
    chosen = ("-m", "not slow") if "not slow" in str(request.config.getoption("markexpr")) else ()
    seen = run("-m", "pytest", "-q", "-p", "no:xdist", *chosen, str(file), RAG_EXPLAIN_TEST_DEVICE="1")
    assert " passed" in seen


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("built")
def test_the_transfers_are_printed() -> None:
    lines = run("-m", "tests.support.device").splitlines()
    counts = next(line.split()[3:] for line in lines if line.startswith("warm top ten  "))
    assert counts == ["1", "1", "0", "0", "0", "2"]


def test_without_a_compiler_it_is_skipped_with_a_reason(tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path), "CXX": "", "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    seen = run("-m", "tests.support.device", **nowhere)
    assert seen.startswith("SKIPPED")
    assert "there is no C++ compiler on this machine" in seen


def test_one_builds_while_the_others_wait_and_a_folder_that_cannot_be_written_is_passed_over(tmp_path: Path) -> None:
    compiler, calls, closed = tmp_path / "compiler", tmp_path / "calls", tmp_path / "a file, no folder"
    # Stands for the compiler: half a minute of it would show nothing more.
    compiler.write_text(
        f'#!/bin/sh\necho call >> "{calls}"\nsleep 1\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\n'
    )
    compiler.chmod(0o755)
    closed.touch()
    folders = {"CXX": str(compiler), "XDG_CACHE_HOME": str(closed), "TMPDIR": str(tmp_path)}
    code = "from tests.support import device; device.build(); print(device._library())"
    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(lambda _: run("-c", code, **folders).strip(), range(3)))
    assert len(found) == 1
    assert found.pop().startswith(str(tmp_path / "rag_explain_test_device"))
    assert calls.read_text().split() == ["call"]
