from __future__ import annotations

import random

import pytest

from rag_explain.ski_rental import SkiRental

BUILD, COLD = 0.002, 0.003  # seconds per pass: any two numbers


def replay(policy: SkiRental, looks: list[int], query: int, document: int) -> float:
    """What a sequence of looks at documents costs under the policy, in seconds."""
    build, cold = BUILD * (document + 1) * document, COLD * (query + 1) * document
    kept: set[int] = set()
    cost = 0.0
    for look in looks:
        if look in kept:
            continue
        if policy.should_build(bytes([look]), query, document):
            policy.observe_build(build, [document])
            cost += build
            kept.add(look)
        else:
            policy.observe_cold(cold, query, [document])
            cost += cold
    return cost


@pytest.mark.parametrize("looks", [1, 2, 3, 5, 8, 30, 200])
@pytest.mark.parametrize(("query", "document"), [(5, 200), (13, 105), (40, 60), (80, 20)])
def test_never_more_than_twice_the_cost_of_knowing_the_future(looks: int, query: int, document: int) -> None:
    policy = SkiRental()
    policy.observe_build(BUILD * (document + 1) * document, [document])
    policy.observe_cold(COLD * (query + 1) * document, query, [document])
    build, cold = BUILD * (document + 1) * document, COLD * (query + 1) * document
    assert replay(policy, [0] * looks, query, document) <= 2 * min(build, looks * cold) + 1e-9


def test_a_zipf_stream_costs_less_than_twice_the_better_of_never_and_always() -> None:
    draw = random.Random(5)
    weights = [1 / rank for rank in range(1, 201)]
    looks = draw.choices(range(200), weights, k=600)
    build, cold = BUILD * 106 * 105, COLD * 14 * 105
    never, always = len(looks) * cold, len(set(looks)) * build
    assert replay(SkiRental(), looks, 13, 105) <= 2 * min(never, always)


def test_a_look_that_costs_as_much_as_the_factors_builds_them() -> None:
    assert SkiRental().should_build(b"k", 50, 20)
    assert not SkiRental().should_build(b"k", 5, 200)


def test_it_remembers_a_bounded_number_of_documents() -> None:
    policy = SkiRental(capacity=10)
    for look in range(100):
        policy.should_build(bytes([look]), 1, 1000)
    assert len(policy._spent) == 10


def test_the_first_measurement_rescales_what_was_spent_before() -> None:
    policy = SkiRental()
    policy.should_build(b"k", 9, 100)
    before = policy._spent[b"k"] / policy.estimate_build(100)
    policy.observe_cold(1.0, 9, [100])
    assert policy._spent[b"k"] / policy.estimate_build(100) == pytest.approx(before)
    assert policy.estimate_cold(9, 100) == pytest.approx(1.0)
    policy.observe_build(50.0, [100])
    assert policy.estimate_build(100) == pytest.approx(50.0)
    assert policy.estimate_cold(9, 100) == pytest.approx(1.0)


def test_it_learns_from_later_measurements() -> None:
    policy = SkiRental()
    for _ in range(50):
        policy.observe_build(3.0, [10])
    for _ in range(50):
        policy.observe_build(1.0, [10])
    assert policy.estimate_build(10) == pytest.approx(1.0, rel=0.01)
