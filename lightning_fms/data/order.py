"""The order in which documents are read, computed and never built.

A classic shuffle stores a list of indices: gigabytes for a large corpus, rebuilt when anything changes, and impossible to
enter in the middle. Here every order is a *function*: a keyed bijection of `range(n)` that costs nothing to build and
answers 'what stands at place i?' for any i at once. Resume is then a seek, whatever the position.

The bijection is a Feistel network over a grid `a x b >= n` (Black & Rogaway, *Ciphers with Arbitrary Finite Domains*,
2002): each round shifts one coordinate by a hash of the other, which can always be undone, so no two inputs meet. Values
that fall outside `n` walk on along their cycle until they come back in; with `a = ceil(sqrt(n))` the grid is at most
`a` places too large, so this is rare. Keys come from blake2b over (seed, name, epoch, purpose): they depend neither on
the order of the configuration nor on Python's salted `hash`.
"""

import math
from hashlib import blake2b
from typing import Any

import numpy as np

_ROUNDS = 6
_MASK = (1 << 64) - 1
_FEW = 16  # places that are faster as Python's integers, one by one


def derive_key(*parts: str | int) -> int:
    """Return a 64-bit key that depends on every part and on its place."""
    digest = blake2b(digest_size=8)
    for part in parts:
        data = str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def _mix(x: Any) -> Any:
    """splitmix64's finaliser (Steele et al., 2014), of an integer or an array: every input bit reaches every output bit."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


class Permutation:
    """A keyed bijection of `range(n)`.

    Args:
        n: Size of the domain, at least 1.
        key: Any integer; equal keys give equal permutations on every machine.
    """

    def __init__(self, n: int, key: int) -> None:
        assert n >= 1, n
        self.n = n
        self._a = math.isqrt(n - 1) + 1
        self._b = -(-n // self._a)
        self._keys = [(key + (r + 1) * 0x9E3779B97F4A7C15) & _MASK for r in range(_ROUNDS)]

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Map an int64 array of places in `[0, n)` to int64 values in `[0, n)`."""
        if places.ndim == 1 and len(places) <= _FEW:
            return np.array([self.at(place) for place in places.tolist()], dtype=np.int64)
        values = self._rounds(places.astype(np.uint64))
        outside = values >= self.n
        while outside.any():
            values[outside] = self._rounds(values[outside])
            outside = values >= self.n
        return values.astype(np.int64)

    def at(self, place: int) -> int:
        """Return the value at one place."""
        value = self._rounds(place)
        while value >= self.n:
            value = self._rounds(value)
        return int(value)

    def _rounds(self, values: Any) -> Any:
        """Of an integer, or of an array of uint64."""
        a, b = self._a, self._b
        left, right = values // b, values % b
        for i in range(0, _ROUNDS, 2):
            left = (left + _mix(right ^ self._keys[i]) % a) % a
            right = (right + _mix(left ^ self._keys[i + 1]) % b) % b
        return left * b + right
