"""Values that are not arrays become part of a tree's structure, in which JAX compares them."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train._static import hide_static, is_argument, of_hidden, reveal_static


@pytest.mark.parametrize(("one", "other"), [(True, 1), (1, 1.0), (0.0, -0.0), ("1", 1), ([], None)], ids=repr)
def test_values_that_differ_are_different_structures(one, other):
    structures = [jax.tree.structure(hide_static({"x": value})) for value in (one, other)]
    assert structures[0] != structures[1]
    assert structures[0] == jax.tree.structure(hide_static({"x": one}))


@pytest.mark.parametrize("text", ["0.5", "nan"])
def test_equal_numbers_are_one_structure(text):
    one, other = (hide_static(float(text)) for _ in range(2))
    assert one == other and hash(one) == hash(other)


def test_what_is_hidden_is_not_its_value():
    assert hide_static("train") != "train" and hide_static("train") == hide_static("train")


@pytest.mark.parametrize(
    "leaf",
    ["train", print, np.float32, np.str_("a"), np.datetime64(0, "s"), types.SimpleNamespace(dtype=np.dtype("float32"))],
    ids=repr,
)
def test_what_is_no_array_is_hidden(leaf):
    hidden = hide_static({"x": leaf})
    assert not jax.tree.leaves(hidden) and reveal_static(hidden) == {"x": leaf}


@pytest.mark.parametrize("leaf", [np.float32(1), np.ones(2), jnp.ones(2), jax.random.key(0)], ids=repr)
def test_arrays_are_not_hidden(leaf):
    assert hide_static(leaf) is leaf and is_argument(leaf)


def test_numbers_are_arguments_but_no_arrays():
    for number in (1, 1.5, 1j):
        assert is_argument(number) and not jax.tree.leaves(hide_static(number))


def test_a_function_of_what_is_hidden():
    run = of_hidden(lambda x, *, train: (x, train))
    assert run(hide_static("x"), train=hide_static(True)) == ("x", True)
