"""How paths are written, which leaves a glob picks, and which override wins."""

import dataclasses
import fnmatch
import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmp_train import Policy
from jmp_train._dtypes import FLOAT16, FLOAT32, to_dtype
from jmp_train._paths import glob_matches, leaf_paths, pick, to_overrides

PARAMS = {
    "params": {
        "Block_1": {"BatchNorm_0": {"scale": np.ones(2), "bias": np.ones(2)}, "Dense_0": {"kernel": np.ones(2)}},
        "BatchNorm_1": {"scale": np.ones(2)},
        "head": [np.ones(2), None, (np.ones(2),)],
    }
}
PATHS = [
    "params/BatchNorm_1/scale",
    "params/Block_1/BatchNorm_0/bias",
    "params/Block_1/BatchNorm_0/scale",
    "params/Block_1/Dense_0/kernel",
    "params/head/0",
    "params/head/2/0",
]


def picked(glob: str, tree: Any = PARAMS) -> list[str]:
    found = pick(to_overrides({glob: "float32"}, to_dtype), tree, to_dtype)
    return [path for path, dtype in zip(leaf_paths(tree), found, strict=True) if dtype is not None]


def test_paths_in_the_order_of_the_leaves():
    assert leaf_paths(PARAMS) == PATHS
    assert len(jax.tree.leaves(PARAMS)) == len(PATHS)


@pytest.mark.parametrize(
    "glob, expected",
    [
        ("BatchNorm*", PATHS[:3]),
        ("BatchNorm_?/scale", [PATHS[0], PATHS[2]]),
        ("Block_1", PATHS[1:4]),
        ("Block_1/*/scale", [PATHS[2]]),
        ("params/*/scale", [PATHS[0]]),
        ("[bh]*", [PATHS[1], PATHS[4], PATHS[5]]),
        ("head/2", [PATHS[5]]),
        ("*", PATHS),
        (" kernel ", [PATHS[3]]),
    ],
)
def test_which_leaves_a_glob_picks(glob, expected):
    assert picked(glob) == expected


@pytest.mark.parametrize("glob", ["Norm", "batchnorm*", "Block_1/scale", "params/scale", "a/b/c/d/e/f", "BatchNorm"])
def test_segments_match_whole_in_sequence_and_case(glob):
    assert not any(glob_matches(glob, path) for path in PATHS)


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        (".", [""]),
        ("Net/.", ["Net"]),
        ("Block_*/.", ["Net/Block_1"]),
        ("Net/Block_1/.", ["Net/Block_1"]),
        ("*/.", ["", "Net", "Net/Block_1", "Net/Block_1/Dense_0"]),
        ("Net/Block_1/Dense_0/Deeper/.", []),
    ],
)
def test_a_dot_at_the_end_leaves_out_what_is_below(glob, expected):
    paths = ["", "Net", "Net/Block_1", "Net/Block_1/Dense_0"]
    assert [path for path in paths if glob_matches(glob, path)] == expected


segments = st.text("ab*?_", min_size=1, max_size=3)


@given(st.lists(segments, min_size=1, max_size=3), st.lists(st.text("ab_", min_size=1, max_size=3), max_size=5))
def test_globs_against_a_recursive_oracle(glob, path):
    def starts_with(wanted, found):
        return not wanted or (
            bool(found) and fnmatch.fnmatchcase(found[0], wanted[0]) and starts_with(wanted[1:], found[1:])
        )

    def occurs(wanted, found):
        return starts_with(wanted, found) or (bool(found) and occurs(wanted, found[1:]))

    path = path or [""]
    assert glob_matches("/".join(glob), "/".join(path)) == occurs(glob, path)


def test_the_value_of_nnx_variables_is_left_out():
    nnx = importlib.import_module("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.value = nnx.Linear(2, 2, rngs=rngs)
            self.bn = nnx.BatchNorm(2, rngs=rngs)

    module = Block(nnx.Rngs(0))
    expected = ["bn/bias", "bn/mean", "bn/scale", "bn/var", "value/bias", "value/kernel"]
    for tree in (module, nnx.state(module), nnx.to_pure_dict(nnx.state(module))):
        assert leaf_paths(tree) == expected
        assert picked("value", tree) == expected[-2:]
    assert leaf_paths(nnx.Param({"a": 1.0, "b": 2.0})) == ["a", "b"]


def test_a_value_that_is_a_name_stays():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Attention:
        query: Any
        value: Any

    assert leaf_paths({"attn": Attention(1.0, 2.0), "value": 3.0}) == ["attn/query", "attn/value", "value"]


def test_linen_boxes_are_left_out():
    nn = importlib.import_module("flax.linen")
    assert leaf_paths({"kernel": nn.Partitioned(jnp.ones(2), ("x",))}) == ["kernel"]


def test_later_overrides_win_and_functions_may_pass():
    def biases(path, leaf):
        assert leaf.shape == (2,)
        return "bfloat16" if path.endswith("bias") else None

    overrides = to_overrides([("*", "float16"), ("BatchNorm*", np.float32), biases, ("head/2", "f32")], to_dtype)
    names = [dtype and dtype.name for dtype in pick(overrides, PARAMS, to_dtype)]
    assert names == ["float32", "bfloat16", "float32", "float16", "float16", "float32"]
    assert pick(to_overrides(biases, to_dtype), PARAMS, to_dtype)[1] == jnp.bfloat16


def test_a_glob_that_matches_nothing_is_an_error_with_near_misses():
    message = (
        "`overrides`: the glob 'BatchNrm*' matches none of the tree's leaves (near: 'BatchNorm_1', 'BatchNorm_0'); "
        "their paths are 'params/BatchNorm_1/scale', 'params/Block_1/BatchNorm_0/bias', "
        "'params/Block_1/BatchNorm_0/scale', .... A glob matches whole segments, at any depth."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        picked("BatchNrm*")
    with pytest.raises(ValueError, match=re.escape("'zzz' matches none of the tree's leaves; their paths are '1'.")):
        picked("zzz", {"1": 0.0})
    with pytest.raises(ValueError, match=re.escape("(near: 'w2'); their paths are 'a/w2', 'b', 'c'. A glob")):
        picked("zzz/w1", {"a": {"w2": 0.0}, "b": 0.0, "c": 0.0})


@pytest.mark.parametrize("glob", ["w[0]", "a/w[0]"])
def test_a_glob_that_is_a_path_with_brackets(glob):
    escaped = glob.replace("[", "[[]")
    message = (
        f"matches none of the tree's leaves (write {escaped!r}: brackets in a glob hold characters of which one is"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        picked(glob, {"a": {"w[0]": 0.0}, "b": 0.0})
    assert picked(escaped, {"a": {"w[0]": 0.0}, "b": 0.0}) == ["a/w[0]"]


@pytest.mark.parametrize("empty", [None, {}, {"a": None}])
def test_a_tree_without_leaves_needs_no_match(empty):
    assert picked("BatchNorm*", empty) == []


def test_overrides_have_one_form():
    expected = (("a", FLOAT32), ("b/c*", FLOAT16))
    for spelling in (
        {"a": "f32", " b/c*": np.float16},
        [["a", "float32"], ("b/c*", "half")],
        (pair for pair in expected),
    ):
        assert to_overrides(spelling, to_dtype) == expected  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "wrong", [("BatchNorm*", "float32"), "BatchNorm*", "", 3, [("a",)], [(1, "float32")], None, [None]]
)
def test_what_is_no_override_is_refused(wrong):
    message = (
        f"`overrides` must be (glob, dtype) pairs such as (('BatchNorm*', 'float32'),), or functions "
        f"(path, leaf) -> dtype | None; got {wrong!r}."
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        Policy("float32", "float16", "float32", overrides=wrong)


@pytest.mark.parametrize("glob", ["", " ", "/a", "a/", "a//b"])
def test_globs_with_empty_segments_are_refused(glob):
    message = (
        f"`overrides`: the glob {glob.strip()!r} has an empty segment; write whole segments such as 'BatchNorm*' or "
        f"'Block_1/Dense_0', without a slash at either end."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        Policy("float32", "float16", "float32", overrides={glob: "float32"})


@pytest.mark.parametrize("glob", ["a,b", "a=b", "<lambda>"])
def test_globs_that_text_cannot_carry_are_refused(glob):
    message = (
        f"`overrides`: the glob {glob!r} has a ',', a '=' or a '<' in front, which the text form of a policy uses; "
        f"write '?' in its place."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        Policy("float32", "float16", "float32", overrides={glob: "float32"})


def test_the_dtype_of_an_override_is_checked():
    with pytest.raises(ValueError, match=re.escape("`overrides`: unknown dtype 'flot32' (did you mean 'float32'?)")):
        Policy("float32", "float16", "float32", overrides={"a": "flot32"})
    policy = Policy("float32", "float16", "float32", overrides=lambda path, leaf: "int8")
    with pytest.raises(ValueError, match=re.escape("`overrides` must be a floating dtype")):
        policy.cast_to_compute({"a": jnp.ones(2)})
