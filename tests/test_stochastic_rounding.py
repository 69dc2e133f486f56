"""Stochastic rounding and its random bits, against Threefry written in NumPy and against exact probabilities."""

import itertools
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train._stochastic_rounding import check_key, noise_at, round_stochastically, start_key

DRAWS = 10**6


def threefry(key, counter):
    """Threefry-2x32 with 20 rounds, of two uint32 arrays each, after the paper (figure 4 and table 2)."""
    rotations = (13, 15, 26, 6), (17, 29, 16, 24)
    keys = [np.uint32(k) for k in key]
    keys.append(keys[0] ^ keys[1] ^ np.uint32(0x1BD11BDA))
    with np.errstate(over="ignore"):
        a, b = counter[0] + keys[0], counter[1] + keys[1]
        for four in range(5):
            for rotation in rotations[four % 2]:
                a = a + b
                b = ((b << np.uint32(rotation)) | (b >> np.uint32(32 - rotation))) ^ a
            a = a + keys[(four + 1) % 3]
            b = b + keys[(four + 2) % 3] + np.uint32(four + 1)
    return a, b


@pytest.mark.parametrize("lane", range(6))
def test_the_bits_are_those_of_threefry(lane):
    shape, step, name = (3, 5, 2), 9, "parameter/w"
    of_step = threefry((0, 42), (np.uint32(0), np.uint32(step)))
    call, within = divmod(lane, 4)
    counter = np.uint32(zlib.crc32(f"{name}#{call}".encode()))
    words = threefry(of_step, (np.full(30, counter), np.arange(30, dtype=np.uint32)))
    expected = (words[within // 2] >> np.uint32(16 * (within % 2))) & np.uint32(0xFFFF)
    for run in (noise_at, jax.jit(lambda *args: noise_at(*args)(name, shape, lane))):
        found = run(start_key(42), jnp.uint32(step))
        found = found(name, shape, lane) if callable(found) else found
        np.testing.assert_array_equal(found, expected.reshape(shape))


def test_no_two_draws_are_correlated():
    """Lanes, steps, names, keys and neighbouring positions: correlations of 10^5 draws, none beyond 4.5 sigma."""
    shape = (100_001,)
    drawn = [noise_at(start_key(0), jnp.uint32(0))("a", shape, lane) for lane in range(5)]
    drawn += [
        noise_at(start_key(0), jnp.uint32(1))("a", shape, 0),
        noise_at(start_key(0), jnp.uint32(0))("b", shape, 0),
    ]
    drawn += [noise_at(start_key(1), jnp.uint32(0))("a", shape, 0)]
    drawn = [np.asarray(x, np.float64)[:-1] for x in drawn] + [np.asarray(drawn[0], np.float64)[1:]]
    for x, y in itertools.combinations(drawn, 2):
        assert abs(np.corrcoef(x, y)[0, 1]) < 4.5 / np.sqrt(len(x))


@pytest.mark.parametrize("value", [1.001, -1.001, 1e-39, -3e-3, 65_000.3, 2.0**-126 * 1.3, 0.0, -0.0, 1.5])
def test_it_is_unbiased_and_picks_a_neighbour(value):
    exact = np.float32(value)
    noise = noise_at(start_key(7), jnp.uint32(0))("", (DRAWS,), 1)
    got = np.asarray(jax.jit(round_stochastically)(np.full(DRAWS, exact), noise))
    below = (np.array(exact).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    above = (np.array(below).view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    assert set(np.unique(got.view(np.uint32)).tolist()) <= {int(x.view(np.uint32)) for x in (below, above)}
    share = (np.float64(exact) - below) / (np.float64(above) - below)
    observed = np.mean(got.view(np.uint32) == above.view(np.uint32))
    assert abs(observed - share) <= 4 * np.sqrt(share * (1 - share) / DRAWS)


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_infinities_and_every_nan_stay(bits):
    values = np.full(100, bits, np.uint32).view(np.float32)
    noise = noise_at(start_key(0), jnp.uint32(0))("", (100,), 0)
    np.testing.assert_array_equal(jax.jit(round_stochastically)(values, noise), values)


def test_what_is_a_bfloat16_number_stays():
    values = np.arange(2**16, dtype=np.uint32)[:: 2**3] << 16
    values = jnp.asarray(values.view(np.float32)[np.isfinite(values.view(np.float32))])
    noise = jnp.full(values.shape, 2**16 - 1, jnp.uint32)
    assert np.asarray(round_stochastically(values, noise)).tobytes() == np.asarray(values).tobytes()


def test_a_seed_and_every_kind_of_key():
    expected = start_key(5)
    assert expected.shape == (2,) and expected.dtype == jnp.uint32
    seeds = np.int64(5), np.uint32(5), jnp.int32(5), jnp.uint32(5)
    keys = (*seeds, jax.random.key(5, impl="threefry2x32"), np.array([0, 5], np.uint32))
    for key in keys:
        np.testing.assert_array_equal(start_key(check_key(key)), expected)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(start_key(5), expected)
        noise_at(expected, jnp.uint32(0))
        for make in (jax.random.key, jax.random.PRNGKey):
            others = [start_key(check_key(make(seed))) for seed in range(2)]
            assert others[0].shape == (2,) and not np.array_equal(others[0], others[1])


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("0", "str"),
        (True, "bool"),
        (None, "NoneType"),
        (np.zeros(2), "float64[2]"),
        (np.float32(0), "float32[]"),
        (jnp.uint32, "uint32[]"),
        (np.zeros((3, 2), np.uint32), "uint32[3, 2]"),
    ],
    ids=str,
)
def test_what_is_no_key(key, found):
    message = f"`key` must be an integer or one PRNG key, got {found}. Pass a seed such as 0, or jax.random.key(0)."
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        check_key(key)


def test_several_keys_are_not_one():
    with pytest.raises(TypeError, match=r"got key<fry>\[3\]"):
        check_key(jax.random.split(jax.random.key(0), 3))


def test_a_key_is_one_key_in_a_buffer_of_its_own():
    with pytest.raises(TypeError, match=r"^`key` must be an integer or one PRNG key, got int32\[2\]\."):
        check_key(jnp.array([0, 1]))
    key = jax.random.PRNGKey(0)
    assert start_key(key).unsafe_buffer_pointer() != key.unsafe_buffer_pointer()


def test_positions_in_an_array_of_more_than_2_to_the_32_elements():
    shape = (2, 2**17, 2**17)
    draw = jax.eval_shape(lambda: noise_at(start_key(0), jnp.uint32(1))("w", shape, 0))
    assert (draw.shape, draw.dtype) == (shape, jnp.uint32)
