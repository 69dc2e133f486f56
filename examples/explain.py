"""Prints in which dtype every operation of a small Flax Transformer runs in mixed precision, without running it.

    python examples/explain.py                              totals, and how many operations run in which dtype
    python examples/explain.py --scope "Block_0/*"          every operation of one block, with its rule and the reason
    python examples/explain.py --policy mixed_bfloat16

Then prints what would change if `exp`, as in a softmax, ran in its operand's dtype instead of float32, and asserts what
a test of the model would.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jmp_train as jmp

VOCABULARY, WIDTH, LENGTH, BATCH = 512, 64, 32, 8


class Block(nn.Module):
    """A pre-norm Transformer block on `[batch, length, width]`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h)


class Transformer(nn.Module):
    """Predicts the next token: `[batch, length]` integers to `[batch, length, vocabulary]` logits."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        x = x + self.param("position", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        for number in range(2):
            x = Block(name=f"Block_{number}")(x)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def loss_fn(params, tokens):
    """The mean cross-entropy of the next token, a scalar."""
    logits = jnp.asarray(Transformer().apply(params, tokens))
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def main(argv: list[str] | None = None) -> jmp.Explanation:
    """Reads the arguments and prints the plan; returns it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="mixed_float16", help="a name or a spec (default: %(default)s)")
    parser.add_argument("--scope", help="a glob over scopes, whose operations are listed")
    args = parser.parse_args(argv)

    # Tracing needs shapes and dtypes only; nothing is computed.
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    params = jax.eval_shape(Transformer().init, jax.random.key(0), tokens)
    gradient = jax.grad(loss_fn)

    report = jmp.explain(gradient, args.policy)(params, tokens)
    print(report)
    if args.scope:
        print(f"\n{report.table(args.scope)}")

    # "follow" is the rule for an operation that runs in its operand's dtype; by default exp is float32 ("high").
    edited = jmp.DEFAULT_RULES.replace({"exp": "follow"})
    print(f"\nIf exp followed its operand:\n{report.diff(jmp.explain(gradient, args.policy, edited)(params, tokens))}")

    # Raises an error if the plan breaks what mixed precision promises, so that a test can guard a model's precision.
    jmp.assert_policy(gradient, args.policy)(params, tokens)
    print("\nassert_policy: no wide dot, no narrow sum, no float64.")
    return report


if __name__ == "__main__":
    main()
