"""Parameters for inference: their dtypes, the check, and a 16-bit function that is exported and called again."""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_models import CNN, NNXCNN, digits

import jmp_train as jmp
from jmp_train import export_params

PARAMS = {"dense": {"kernel": np.ones((4, 2), np.float32)}, "norm": {"scale": np.ones(2, np.float32)}, "n": np.int32(3)}


def test_dtypes_follow_the_policy_and_its_overrides():
    policy = jmp.get_policy("c=f16,o=f32,@norm=f32")
    weights = export_params(PARAMS, policy)
    assert weights["dense"]["kernel"].dtype == np.float16
    assert weights["norm"]["scale"].dtype == np.float32 and weights["n"].dtype == np.int32
    shapes = jax.eval_shape(lambda p: export_params(p, policy), PARAMS)
    assert export_params(jax.eval_shape(lambda: PARAMS), policy) == shapes
    assert shapes == jax.eval_shape(lambda: jax.tree.map(jnp.asarray, weights))


def test_values_are_rounded_once():
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    np.testing.assert_array_equal(export_params({"w": jnp.asarray(values)}, "float16")["w"], values.astype(np.float16))


def test_nnx_parameters():
    model = NNXCNN(nnx.Rngs(0))
    weights = export_params(nnx.state(model, nnx.Param), "mixed_bfloat16")
    nnx.update(model, weights)
    assert model.dense.kernel.dtype == jnp.bfloat16 and model.norm.mean.dtype == jnp.float32


@jax.tree_util.register_pytree_node_class
class Seeded:
    """Stores the data of a key and makes a key of it whenever it is flattened."""

    def __init__(self, data):
        self.data = data

    def tree_flatten(self):
        return (jax.random.wrap_key_data(self.data),), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(jax.random.key_data(children[0]))


def test_a_key_that_is_another_object_every_time():
    params = {"w": jnp.ones(2), "dropout": Seeded(jax.random.key_data(jax.random.key(3)))}
    exported = export_params(params, "mixed_float16")
    assert exported["dropout"].data.tolist() == [0, 3] and exported["w"].dtype == jnp.float16


LARGE = {"a": {"w": np.array([1.0, -70000.0, np.inf], np.float32)}}


class TestOutOfRange:
    def test_float16_refuses(self):
        message = (
            "`params`: 'a/w' holds 70000, beyond the 65504 of float16; keep it wide with overrides={'a/w': 'float32'}, "
            "or choose bfloat16."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            export_params(LARGE, "mixed_float16")

    @pytest.mark.parametrize(
        ("policy", "limit"), [("mixed_float16", "65504 of float16"), ("mixed_bfloat16", "3.38953e+38 of bfloat16")]
    )
    def test_what_float32_cannot_hold_either(self, policy, limit):
        message = f"`params`: 'w' holds 1e+39, beyond the {limit}; keep it wide with overrides={{'w': 'float64'}}."
        params = {"w": np.array([1e39, 1])}
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            export_params(params, policy)
        wide = jmp.get_policy(policy).replace(overrides={"w": "float64"})
        assert export_params(params, wide)["w"][0] == 1e39

    @pytest.mark.parametrize(
        ("path", "glob"),
        [
            ("w[0]", "w[[]0]"),
            ("e,f", "e?f"),
            ("a=b", "a?b"),
            ("<w>", "?w>"),
            ("", "."),
            ("w", "w"),
            (" w", "?w"),
            ("w ", "w?"),
        ],
    )
    def test_the_ways_out(self, path, glob):
        policy, weight = jmp.get_policy("mixed_float16"), LARGE["a"]["w"]
        params = {path: weight} if path else weight
        with pytest.raises(ValueError, match=re.escape(f"wide with overrides={{{glob!r}: 'float32'}}, or choose")):
            export_params(params, policy)
        for cure in (policy.replace(overrides={glob: "float32"}), "mixed_bfloat16"):
            (found,) = jax.tree.leaves(export_params(params, cure))
            assert np.isclose(float(found[1]), -70000, rtol=2**-8)

    def test_what_is_infinite_already_stays_so(self):
        assert np.isinf(export_params({"w": np.array([np.inf, 1], np.float32)}, "float16")["w"][0])
        assert np.isinf(export_params({"w": np.float32(np.inf)}, "float16")["w"])

    def test_a_parameter_without_numbers(self):
        assert export_params({"w": np.zeros((0, 2), np.float32)}, "float16")["w"].shape == (0, 2)

    def test_65504_and_what_rounds_to_it_are_kept(self):
        weights = export_params({"w": np.array([65504, 65519], np.float32)}, "float16")["w"]
        np.testing.assert_array_equal(weights, np.array([65504, 65504], np.float16))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_an_exported_function(policy):
    """Any batch size, half the parameters' bytes, the classes of float32, dots and convolutions on 16-bit operands."""
    ((images, _),) = digits(1)
    model = CNN()
    variables = jax.jit(model.init, static_argnames="train")(jax.random.key(0), images, train=False)
    weights = export_params(variables["params"], policy)

    def predict(params, batch_stats, x):
        return model.apply({"params": params, "batch_stats": batch_stats}, x, train=False)

    run = jax.jit(jmp.autocast(predict, policy))
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, 8, 8, 1"), jnp.float32)
    shapes = jax.eval_shape(lambda: (weights, variables["batch_stats"]))
    artifact = jax.export.export(run)(*shapes, x).serialize()
    logits = jax.export.deserialize(artifact).call(weights, variables["batch_stats"], images)
    exact = jax.jit(predict)(variables["params"], variables["batch_stats"], images)
    assert logits.shape == (32, 10)
    np.testing.assert_allclose(logits, exact, atol=0.03 * np.abs(exact).max())
    assert np.mean(logits.argmax(-1) == exact.argmax(-1)) > 0.9
    assert 2 * nbytes(weights) == nbytes(variables["params"])
    jmp.assert_policy(predict, policy)(weights, variables["batch_stats"], images)


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))
