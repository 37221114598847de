"""Nine digits of a number, which is what a search or a simulation is given.

The last bits of an exponential, a logarithm or a matrix product differ from one kind of processor to the next. Nobody
would see it in an estimate, but a search among fleets that cost the same, and a simulation in which each request
follows from the one before, would end elsewhere: one file, and two answers.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

_BITS = 2.0**30


def nine_digits(values: ArrayLike) -> NDArray[np.float64]:
    share, power = np.frexp(np.asarray(values, np.float64))
    return np.ldexp(np.rint(share * _BITS) / _BITS, power)
