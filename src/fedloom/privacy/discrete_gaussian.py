"""Normal noise in whole numbers, drawn exactly, and many at once.

Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020, algorithms 1 to 3. Every coin
is one comparison of random bits with a probability. Almost always the first 64 bits decide it against the probability
in double precision, whose error is bounded; where they do not, further bits and exact fractions do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Vector = npt.NDArray[np.float64]
WordSource = Callable[[int], npt.NDArray[np.uint64]]  # so many fresh random words
Exactly = Callable[[int], Fraction]  # an element's exponent, as it is

UNDECIDED = 2.0**-40  # around a probability: far more than what double precision misses it by
FARTHEST = 13.0  # standard deviations: noise beyond, which comes once in 10^37 draws, is drawn anew
AT_ONCE = 2**17  # numbers, which stay in the cache
LARGEST = 2.0**40  # standard deviation for which all numbers here are exact


def discrete_gaussian(sigma: float, count: int, words: WordSource) -> Integers:
    """So many independent numbers k with probability proportional to exp(-k^2 / 2 sigma^2)."""
    if not 0 < sigma <= LARGEST:
        raise ValueError(f"sigma is {sigma}; it must be greater than 0 and at most {LARGEST:g}")
    parts = [_drawn(sigma, min(AT_ONCE, count - start), words) for start in range(0, count, AT_ONCE)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _drawn(sigma: float, count: int, words: WordSource) -> Integers:
    found = np.empty(count, np.int64)
    scale, variance = math.floor(sigma) + 1, Fraction(sigma) ** 2
    filled = 0
    while filled < count:
        drawn = _discrete_laplace(scale, math.ceil(1.5 * (count - filled)) + 16, words)
        away = np.abs(drawn) - float(variance / scale)

        def exactly(index: int, drawn: Integers = drawn) -> Fraction:
            return (abs(int(drawn[index])) - variance / scale) ** 2 / (2 * variance)

        kept = drawn[_heads(away * away / (2 * sigma * sigma), exactly, words)]
        kept = kept[np.abs(kept) <= FARTHEST * sigma][: count - filled]
        found[filled : filled + len(kept)] = kept
        filled += len(kept)
    return found


def _discrete_laplace(scale: int, tries: int, words: WordSource) -> Integers:
    """Numbers with probability proportional to exp(-|k| / scale): as many as that number of tries gives."""
    remainder = _below(scale, tries, words)
    remainder = remainder[_heads(remainder / scale, lambda i: Fraction(int(remainder[i]), scale), words)]
    whole = np.zeros(len(remainder), np.int64)
    going = np.arange(len(remainder))
    while len(going):  # a geometric number of times
        going = going[_heads(np.ones(len(going)), lambda _: Fraction(1), words)]
        whole[going] += 1
    size = remainder + scale * whole
    negative = (words(len(size)) & np.uint64(1)).astype(bool)
    signed: Integers = np.where(negative, -size, size)
    found: Integers = signed[~(negative & (size == 0))]  # or zero would come twice as often as it should
    return found


def _below(limit: int, count: int, words: WordSource) -> Integers:
    """Uniform whole numbers from 0, all equally likely: words that would favour small ones are left out."""
    drawn, modulus = words(count), np.uint64(limit)
    fair = drawn <= np.uint64(2**64 - 1 - 2**64 % limit)
    found: Integers = (drawn[fair] % modulus).astype(np.int64)
    return found


def _heads(exponent: Vector, exactly: Exactly, words: WordSource) -> npt.NDArray[np.bool_]:
    """For each element a coin that is heads with probability exp(-exponent)."""
    probability, drawn = np.exp(-exponent), words(len(exponent))
    uniform = drawn.astype(np.float64) * 2.0**-64
    heads: npt.NDArray[np.bool_] = uniform < probability
    for index in np.flatnonzero(np.abs(uniform - probability) <= UNDECIDED):
        heads[index] = _compared(int(drawn[index]), exactly(int(index)), words)
    return heads


def _compared(drawn: int, exponent: Fraction, words: WordSource) -> bool:
    """Whether a uniform number, which begins with these 64 bits, is below exp(-exponent)."""
    bits = 64
    while True:
        low, high = _exponential(exponent, bits + 8)
        if Fraction(drawn + 1, 2**bits) <= low:
            return True
        if Fraction(drawn, 2**bits) >= high:
            return False
        drawn, bits = drawn << 64 | int(words(1)[0]), bits + 64


def _exponential(exponent: Fraction, bits: int) -> tuple[Fraction, Fraction]:
    """Bounds on exp(-exponent), less than 2^-bits apart: of its 2^k-th root by the series, to that power."""
    halvings = max(0, math.ceil(exponent).bit_length())
    part = exponent / 2**halvings  # at most 1
    term, total, number = Fraction(1), Fraction(0), 0
    while term > Fraction(1, 2 ** (bits + halvings + 4)):
        total += term if number % 2 == 0 else -term
        number += 1
        term = term * part / number
    low, high = (total - term, total) if number % 2 else (total, total + term)
    return max(low, Fraction(0)) ** (2**halvings), high ** (2**halvings)
