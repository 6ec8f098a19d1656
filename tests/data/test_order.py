"""Orders are bijections, spread well, and depend on every part of their key."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data import order
from lightning_fms.data.order import Permutation, derive_key

keys = st.integers(0, 2**64 - 1)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.integers(1, 3000), keys)
def test_every_value_comes_once(n: int, key: int) -> None:
    values = Permutation(n, key)(np.arange(n))
    assert values.dtype == np.int64
    assert np.array_equal(np.sort(values), np.arange(n))


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.integers(1, 2**40), keys, st.data())
def test_any_place_can_be_asked_alone(n: int, key: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    permutation = Permutation(n, key)
    together = permutation(np.resize(places, 40))[: len(places)]  # as an array: few are taken one by one
    assert permutation(places).tolist() == together.tolist()
    assert np.all((together >= 0) & (together < n))
    assert [permutation.at(int(place)) for place in places] == together.tolist()
    assert len(np.unique(together)) == len(np.unique(places))


@pytest.mark.parametrize("n", [2, 4, 5, 7, 10])
def test_each_value_is_equally_likely_at_each_place(n: int) -> None:
    runs = 1500
    counts = np.zeros((n, n))
    for key in range(runs):
        counts[np.arange(n), Permutation(n, derive_key("uniform", key))(np.arange(n))] += 1
    expected = runs / n
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = (n - 1) ** 2
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5 + 5


def test_all_orders_of_three_occur_equally_often() -> None:
    seen: dict[tuple, int] = {}
    for key in range(2400):
        values = tuple(Permutation(3, derive_key(key))(np.arange(3)).tolist())
        seen[values] = seen.get(values, 0) + 1
    assert len(seen) == 6
    assert max(abs(count - 400) for count in seen.values()) < 90


def test_neighbours_are_torn_apart() -> None:
    n = 10_000
    values = Permutation(n, 7)(np.arange(n))
    assert abs(np.corrcoef(np.arange(n), values)[0, 1]) < 0.04
    assert (np.abs(np.diff(values)) == 1).sum() < 12  # two are expected of a random order
    halves = (values[: n // 2] < n // 2).mean()
    assert abs(halves - 0.5) < 0.03


def test_another_key_gives_another_order() -> None:
    n = 1000
    orders = [Permutation(n, key)(np.arange(n)) for key in (0, 1, 2, 1 << 40, 1 << 63)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).sum() < 12  # one is expected of two random orders


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.lists(st.one_of(st.integers(0, 99), st.sampled_from(["", "a", "code", "ä"])), min_size=1, max_size=4), st.data()
)
def test_a_key_depends_on_every_part_and_its_place(parts: list, data: st.DataObject) -> None:
    key = derive_key(*parts)
    assert 0 <= key < 2**64
    assert key == derive_key(*parts)
    place = data.draw(st.integers(0, len(parts) - 1))
    assert derive_key(*parts[:place], f"{parts[place]}+", *parts[place + 1 :]) != key
    assert derive_key(*parts, "") != key
    swapped = [*parts[place:], *parts[:place]]
    if [str(part) for part in swapped] != [str(part) for part in parts]:
        assert derive_key(*swapped) != key


def test_parts_do_not_run_into_each_other() -> None:
    assert derive_key("ab", "c") != derive_key("a", "bc")
    assert derive_key(1, 23) != derive_key(12, 3)


def test_keys_do_not_depend_on_python_hash() -> None:
    program = (
        f"import runpy, numpy as np; order = runpy.run_path({order.__file__!r});"
        "print(order['Permutation'](50, order['derive_key'](3, 'code', 1, 'documents'))(np.arange(50)).tolist())"
    )
    here = Permutation(50, derive_key(3, "code", 1, "documents"))(np.arange(50)).tolist()
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert run.stdout == f"{here}\n"
