"""The hash that stochastic rounding draws its bits from, by its formula and by statistics.

Statistical tests are of fixed seeds and together have a significance of 1e-6: were the bits truly
random, one choice of seeds in a million would fail any of them. By Bonferroni's correction each
p-value is held against 1e-6 / TESTS, and `assert_plausible` counts that there are no more of them.
All are two-sided: bits that are too regular fail as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from mprun.precision.random_bits import BLOCK, hash_bits, key, random_bits, signed
from tests.each import each

TESTS = 1024
SIGNIFICANCE = 1e-6 / TESTS
SAMPLE = 2**21

KEYS = [(0, 0, 0, 0), (1, 2, 3, 0), (7, 100, 5, 1), (2**40 + 1, 10**6, 300, 2)]
"""Seed, step, tensor and site."""
LAGS = [1, 2, 3, 7, 16, 64, 768, 1024, 3072, 4096, 50257, 2**16]
"""Neighbours in a row, and below each other in matrices with rows as long as those of models."""
WORDS = ["seed", "step", "tensor", "site"]

held: list[float] = []


def assert_plausible(p_values: Mapping[str, float]) -> None:
    """That none of them is smaller than chance allows at the significance of the whole file."""
    held.extend(p_values.values())
    assert len(held) <= TESTS
    assert {name: p for name, p in p_values.items() if not p >= SIGNIFICANCE} == {}


def unsigned(bits: Tensor) -> Tensor:
    return bits.long() & 0xFFFFFFFF


def from_normal(z: float) -> float:
    return float(2 * stats.norm.sf(abs(z)))


def from_counts(counts: Tensor) -> float:
    """Chi-square of counts that are expected to be equal, at least 16 each."""
    expected = counts.sum().item() / len(counts)
    assert expected >= 16
    statistic = ((counts.double() - expected) ** 2 / expected).sum().item()
    freedom = len(counts) - 1
    tails = stats.chi2.sf(statistic, freedom), stats.chi2.cdf(statistic, freedom)
    return float(min(1.0, 2 * min(tails)))


def mean_and_bits(word: Tensor) -> dict[str, float]:
    count = len(word)
    deviation = math.sqrt((2**64 - 1) / 12 / count)  # of the mean of uniform 32-bit integers
    found = {"mean": from_normal((word.double().mean().item() - (2**32 - 1) / 2) / deviation)}
    for bit in range(32):
        ones = int((word >> bit & 1).sum())
        found[f"bit {bit}"] = from_normal((ones - count / 2) / math.sqrt(count / 4))
    return found


def uppers(word: Tensor, *widths: int) -> dict[str, float]:
    """Chi-square of the values of the upper bits."""
    return {
        f"upper {width}": from_counts(torch.bincount(word >> (32 - width), minlength=2**width))
        for width in widths
    }


def pairs(a: Tensor, b: Tensor) -> dict[str, float]:
    """Correlation, and chi-square of the joint values of the upper bits, of disjoint pairs."""
    r = torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()
    found = {"correlation": from_normal(r * math.sqrt(len(a)))}
    for width in (1, 5):
        joint = (a >> (32 - width) << width) | (b >> (32 - width))
        found[f"joint upper {width}"] = from_counts(torch.bincount(joint, minlength=4**width))
    return found


def lagged(word: Tensor, lag: int) -> tuple[Tensor, Tensor]:
    """Pairs of elements `lag` apart, none in two pairs: overlapping ones are no chi-square."""
    first = torch.arange(len(word) - lag)
    first = first[first // lag % 2 == 0]
    return word[first], word[first + lag]


# ---- statistics of one sequence ----


@lru_cache(maxsize=1)
def sample(words: tuple[int, ...]) -> Tensor:
    return unsigned(random_bits(key(*words), SAMPLE))


@each("words", KEYS, ids=str)
def test_words_are_uniform(words: tuple[int, ...]) -> None:
    word = sample(words)
    assert_plausible(mean_and_bits(word) | uppers(word, 8, 13, 16))


@each("lag", LAGS)
@each("words", KEYS[1:3], ids=str)  # the outer loop
def test_elements_at_a_distance_are_independent(words: tuple[int, ...], lag: int) -> None:
    assert_plausible(pairs(*lagged(sample(words), lag)))


# ---- statistics across sequences ----


def sequences(varied: str, numbers: range, count: int) -> Tensor:
    """[number, index]: the first `count` elements' words while one input of the key varies."""
    base = dict(zip(WORDS, (11, 12, 13, 2), strict=True))
    keys = [key(*(base | {varied: number}).values()) for number in numbers]
    low, high = (torch.tensor([signed(word) for word in half]) for half in zip(*keys, strict=True))
    index = torch.arange(count, dtype=torch.int32)
    return unsigned(hash_bits(index, low.int()[:, None], high.int()[:, None]))


@each("varied", WORDS)
@each(("numbers", "count"), [(2**14, 64), (2**5, 2**16)])
def test_an_element_is_independent_of_itself_at_the_next_seed_step_tensor_or_site(
    varied: str, numbers: int, count: int
) -> None:
    word = sequences(varied, range(numbers), count)
    assert_plausible(pairs(word[0::2].reshape(-1), word[1::2].reshape(-1)))


def shifted_copies(word: Tensor) -> int:
    """How often two words that follow each other occur, so following, in two places of `word`."""
    sequence_count, length = word.shape
    place = torch.arange(sequence_count * length).view(word.shape)[:, :-1].reshape(-1)
    first, following = word[:, :-1].reshape(-1), word[:, 1:].reshape(-1)
    order = torch.argsort(first, stable=True)
    first, following, place = first[order], following[order], place[order]
    same = (first[1:] == first[:-1]) & (following[1:] == following[:-1])
    return int((same & (place[1:] != place[:-1])).sum())


def test_no_two_sequences_are_shifted_copies_of_each_other() -> None:
    """Of 64 steps and 16 tensors, 512 elements each: all pairs of sequences, all shifts.

    Among 2^19 words some 2^5 pairs are equal by chance; that the words after them are equal too
    has a chance of 2^-27 in all.
    """
    word = torch.cat(
        [
            unsigned(random_bits(key(3, step, tensor, 0), 512))[None]
            for step in range(64)
            for tensor in range(16)
        ]
    )
    assert len(word.unique()) < word.numel()  # equal words there are
    assert shifted_copies(word) == 0


# ---- the formula ----


def reference_key(*words: int) -> tuple[int, int]:
    """splitmix64's finalizer over the words, in Python's integers."""
    state = 0
    for word in words:
        state = ((state ^ word % 2**64) + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state // 2**30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state // 2**27) * 0x94D049BB133111EB % 2**64
        state ^= state // 2**31
    return state % 2**32, state // 2**32


def reference(words: tuple[int, int], index: int) -> int:
    """The formula of the module's text, in Python's integers."""
    if index >= 2**31:
        words, index = reference_key(*words, index // 2**31), index % 2**31
    low, high = words
    h = (index ^ low) * 0xED5AD4BB % 2**32
    h ^= h // 2**11
    h = (h ^ high) * 0xAC4C1B51 % 2**32
    h ^= h // 2**15
    h = h * 0x31848BAB % 2**32
    return h ^ h // 2**14


WORD = st.integers(min_value=-(2**63), max_value=2**64 - 1)
INDEX = st.one_of(
    st.integers(min_value=0, max_value=2**31 - 1), st.integers(min_value=0, max_value=2**40)
)


@given(words=st.lists(WORD, min_size=1, max_size=5), index=INDEX)
@example(words=[0, 0, 0, 0], index=0)
@example(words=[2**64 - 1] * 4, index=2**31 - 1)
@example(words=[1, 2, 3, 0], index=2**31 - 2)
@example(words=[1, 2, 3, 0], index=2**31)
@example(words=[1, 2, 3, 0], index=2**33 - 1)
def test_words_are_those_of_the_documented_formula(words: list[int], index: int) -> None:
    found = key(*words)
    assert found == reference_key(*words)
    assert 0 <= found.low < 2**32
    assert 0 <= found.high < 2**32
    bits = random_bits(found, 3, start=index)
    assert bits.dtype == torch.int32
    assert unsigned(bits).tolist() == [reference(found, index + n) for n in range(3)]
    at = found.at(index // BLOCK * BLOCK)
    assert at == (found if index < 2**31 else reference_key(*found, index // 2**31))


def test_splitmix_is_the_published_one() -> None:
    """The first outputs of the published generator from the state 0 (Vigna's splitmix64.c)."""
    assert key(0) == (0x7B1DCDAF, 0xE220A839)
    assert key(0x9E3779B97F4A7C15) == (0xA1B965F4, 0x6E789E6A)
