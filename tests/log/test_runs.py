"""OpenRuns: which outermost run a run belongs to, and what is left when runs end or never do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rag_explain.log.runs import OpenRuns, OutermostRun


@pytest.fixture
def given_up() -> list[OutermostRun[str, list[str]]]:
    return []


@pytest.fixture
def runs(given_up) -> OpenRuns[str, list[str]]:
    return OpenRuns(given_up.append)


def test_a_run_belongs_to_the_outermost_run_around_it(runs):
    assert not runs.join("chain", None)
    runs.open("chain", [])
    assert runs.join("step", "chain")
    assert runs.join("retriever", "step")
    runs.open("retriever", ["ignored: it is inside another one"])
    with runs.outermost("retriever") as outermost:
        assert outermost.key == "chain"
        assert list(outermost.around("retriever")) == ["step", "chain"]
        outermost.state.append("found")
    assert runs.close("retriever") is None
    assert runs.close("chain") == ["found"]
    assert len(runs) == 0


def test_a_run_whose_parent_is_not_known_joins_nothing(runs):
    assert not runs.join("part", "a chain without the callback")
    with runs.outermost("part") as outermost:
        assert outermost is None


def test_a_run_that_ended_takes_its_inner_runs_with_it(runs):
    runs.open("chain", [])
    runs.join("step", "chain")
    runs.close("chain")
    assert not runs.join("late", "step")
    assert runs.close("chain") is None


def test_beyond_the_limit_the_oldest_is_given_up(runs, given_up, monkeypatch):
    monkeypatch.setattr("rag_explain.log.runs.MAX_OPEN", 2)
    for number in range(4):
        runs.open(f"chain {number}", [f"{number}"])
        runs.join(f"step {number}", f"chain {number}")
    assert [(run.key, run.state) for run in given_up] == [("chain 0", ["0"]), ("chain 1", ["1"])]
    assert len(runs) == 4
    assert runs.close_all() == [["2"], ["3"]]
    assert len(runs) == 0


def test_runs_of_many_threads_are_kept_apart(runs):
    def one(number: int) -> list[str] | None:
        runs.open(f"chain {number}", [])
        for step in range(20):
            runs.join(f"step {number}.{step}", f"chain {number}")
            with runs.outermost(f"step {number}.{step}") as outermost:
                outermost.state.append(f"{number}.{step}")
        return runs.close(f"chain {number}")

    with ThreadPoolExecutor(16) as pool:
        states = list(pool.map(one, range(100)))
    assert states == [[f"{number}.{step}" for step in range(20)] for number in range(100)]
    assert len(runs) == 0
