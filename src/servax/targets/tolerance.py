"""How far two computations of one function may differ, by what rounding explains; `difference.py` applies it.

Rounding errors of a sum of K terms behave like a random walk: they grow as `u * sqrt(K)`, `u` the unit roundoff, not
as `u * K` (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5),
2019). `rounding.py` adds these along the longest path to an output; the sum is the `error` e below. It leaves out fast
approximations of `exp` and `tanh`, and other orders of summation (1e-4 in float32 at K = 1024 when the batch size
changes, jax#34080, jax#26795), so every gate has a least value in units too, for functions that are shallow.

The factors were chosen from what honest programs do: XLA on a CPU against op by op, 402 arrays in float32, bfloat16 and
float16, of MiniLM, of transformers of 1, 4 and 12 layers with logits, softmax, one dominant logit and scalar heads, of
convolutions, a recurrent net, softmax, statistics, FFT and linear algebra up to 64 x 64. How far the worst of them
stayed below each gate:

- one element, relative to its local scale: 12 times in logits, 4.7 times in a pseudo-inverse, 2.6 times in a softmax of
  tripled logits of 4 bfloat16 layers, of which every step amplifies what came before;
- the whole, relative L2: 0.2 e in logits, 0.6 e in a bfloat16 softmax, 1.0 e in a pseudo-inverse; 4 times;
- a common factor: 0.08 e in logits, 1.1 units in a bfloat16 softmax; 4 times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from servax.targets.samples import Rounding

UNIT = {
    "float64": 2.0**-53,
    "complex128": 2.0**-53,
    "float32": 2.0**-24,
    "complex64": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
"""Unit roundoff by dtype: half the distance from 1 to the next number."""

_NARROWEST_WIDE = 2.0**-20
_LARGEST = 0.25


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding explains of an output. All 0: nothing, its values are exact.

    Attributes:
      element: largest difference of one element, relative to its local scale.
      whole: relative L2 error of the whole.
      factor: by how much all may be scaled together.
      ties: share of integers that may be unequal.
    """

    element: float
    whole: float
    factor: float
    ties: float = 0.0

    @classmethod
    def of(cls, rounding: Rounding) -> Tolerance:
        """The tolerance of a rounding, between fixed ends.

        An element: 2^11 to 2^13 units for float32 and float64, so that no shallow function is judged by its last bit
        and no deep one hides an error: 1.2e-4 to 4.9e-4 in float32. 5 to 64 units for narrower types, where fusion
        leaves out whole roundings: 0.02 to 0.25 in bfloat16; there the other gates are the sharp ones.
        """
        unit, error = rounding.unit, rounding.error
        if unit == 0:
            return EXACT
        wide = unit < _NARROWEST_WIDE
        gates = _WIDE if wide else _NARROW
        element, whole, factor = (min(max(g.times * error, g.least * unit), g.most * unit, _LARGEST) for g in gates)
        return cls(element, whole, factor, min(max(_TIES_TIMES * error, _TIES_LEAST), _TIES_MOST))


@dataclass(frozen=True, slots=True)
class _Gate:
    """`times` the estimated error, but at least and at most so many units."""

    times: float
    least: float
    most: float


_WIDE = (_Gate(4, 2**11, 2**13), _Gate(4, 2**9, 2**13), _Gate(1 / 3, 2**9, 2**12))
_NARROW = (_Gate(5, 5, 64), _Gate(2.5, 6, 40), _Gate(1 / 3, 5, 16))

_TIES_TIMES, _TIES_LEAST, _TIES_MOST = 4.0, 0.02, 0.125
"""The best two of a hundred logits are closer than d with a probability of about 3 d (d relative to their spread), and
then the wrong one wins every second time. d is at most e; in bfloat16 exact ties add to it. Measured: 3 % of the tokens
of transformers whose e was 0.026 and 0.083, none in float32.
"""

EXACT = Tolerance(0.0, 0.0, 0.0)


def rounding_of(
    name: str, dtype: np.dtype[Any], platform: str, known: Mapping[str, Mapping[str, Rounding]]
) -> Rounding:
    """The rounding of an output on a platform; where none was estimated, one operation in the output's own dtype."""
    platforms = known.get(name, {})
    unit = UNIT.get(dtype.name, 0.0)
    return platforms.get(platform) or platforms.get("cpu") or Rounding(unit, unit)
