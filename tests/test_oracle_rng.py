"""Philox, uniforms and the mapping of draws to counters, against known answers and a reference in Python integers."""

import math

import numpy as np
import pytest
import torch

from python_ref import coin, philox4x32, race_noise, rng, uniform

MASK = 0xFFFFFFFF
MIN64, MAX64 = -(2**63), 2**63 - 1
SEEDS = [0, 1, -1, 0x123456789ABCDEF, -0x123456789ABCDEF, 2**32, MAX64, MIN64]
POSITIONS = [0, 1, 2**32 - 1, 2**32, 2**40 + 5, -1, -(2**32) - 7, MAX64]
IDS = [0, 1, 255, 256, 2**24 - 1]
IDENTITIES = [(s, p, st, i) for s in SEEDS for p in POSITIONS[:3] for st in (0, 1, 2) for i in IDS[:2]] + [
    (7, p, st, i) for p in POSITIONS for st in (0, 2) for i in IDS
]


def philox_ints(counter, key) -> list[int]:
    """Philox4x32-10 as in the paper, on Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK, (a >> 32) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def words_ints(seed: int, position: int, stream: int, id: int, index: int) -> list[int]:
    """key = (seed low, seed high), counter = (index, pos low, pos high, stream | id << 8); two's complement 64 bits."""
    seed, position = seed % 2**64, position % 2**64
    return philox_ints((index, position & MASK, position >> 32, stream | id << 8), (seed & MASK, seed >> 32))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        pytest.param("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8", id="zeros"),
        pytest.param("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd", id="ones"),
        pytest.param("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1", id="pi"),
    ],
)  # fmt: skip
def test_philox_known_answers(counter, key, expected):
    counter, key, expected = ([int(w, 16) for w in text.split()] for text in (counter, key, expected))
    assert philox4x32(torch.tensor(counter), torch.tensor(key)).tolist() == expected
    assert philox_ints(counter, key) == expected


def test_philox_broadcasts_like_single_calls():
    counters = torch.randint(0, 2**32, (50, 4), generator=torch.Generator().manual_seed(0))
    key = torch.tensor([0xDEADBEEF, 5])
    assert philox4x32(counters, key).tolist() == [philox_ints(c, key.tolist()) for c in counters.tolist()]
    keys = counters[:, 1:3]
    expected = [philox_ints(c, k) for c, k in zip(counters.tolist(), keys.tolist(), strict=True)]
    assert philox4x32(counters, keys).tolist() == expected


def test_key_and_counter_layout():
    """64-bit seeds and positions, negative ones too, and ids of 24 bits all reach the counter."""
    seen = set()
    for identity in dict.fromkeys(IDENTITIES):
        got = rng.words(*identity, torch.tensor([0, 1, 2**32 - 1])).tolist()
        assert got == [words_ints(*identity, i) for i in (0, 1, 2**32 - 1)], identity
        seen.update(map(tuple, got))
    assert len(seen) == 3 * len(set(IDENTITIES))  # no two identities share a block


@pytest.mark.parametrize(
    "word", [0, 1, 2, 2**23, 2**24 - 1, 2**24, 2**24 + 1, 2**31, 2**32 - 257, 2**32 - 129, 2**32 - 1]
)
def test_uniform_is_the_float32_formula(word):
    expected = min((np.float32(word) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    assert isinstance(expected, np.float32)
    assert float(uniform(torch.tensor(word))) == float(expected)


def test_uniform_range_and_dtype():
    """tail_lost, coin_extremes: the smallest uniform is 2^-33, the largest 1 - 2^-24, never 0 or 1, in float64."""
    u = uniform(torch.tensor([0, 2**32 - 1]))
    assert u.dtype == torch.float64
    assert u.tolist() == [2.0**-33, 1 - 2.0**-24]
    words = np.random.default_rng(1).integers(0, 2**32, 20_000)
    expected = np.minimum((words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    assert np.array_equal(uniform(torch.tensor(words)).numpy(), expected.astype(np.float64))


@pytest.mark.parametrize("vocab", [1, 3, 4, 5, 17])
def test_race_noise_lane_and_block(vocab):
    identity = (-11, 2**33 + 1, 0, 3)
    noise = race_noise(*identity, vocab)
    assert noise.shape == (vocab,)
    assert noise.dtype == torch.float64
    for v in range(vocab):
        u = float(uniform(torch.tensor(words_ints(*identity, v >> 2)[v & 3])))
        assert float(noise[v]) == pytest.approx(-math.log1p(-u), rel=1e-14)
    assert torch.equal(noise, race_noise(*identity, 20)[:vocab])  # a token's noise does not depend on the vocabulary


@pytest.mark.parametrize("offset", [0, 1, 300])
def test_coin_is_lane_0_of_block_0_on_stream_1(offset):
    for seed in SEEDS:
        word = words_ints(seed, 2**35 + 2, 1, offset, 0)[0]
        assert coin(seed, 2**35 + 2, offset) == float(uniform(torch.tensor(word)))
