"""sensitivity: planted faults rank first and make up the proposal, which meets its tolerance against float64."""

import contextlib
import dataclasses
import json
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hand_tools import relative_error

import jmp_train as jmp
from jmp_train import DEFAULT_RULES, StaticLossScale
from jmp_train._diagnostics.formats._sensitivity import Sensitivity, _candidates
from jmp_train._diagnostics.formats._sensitivity_search import (
    Candidate,
    Measured,
    Search,
    _relative_error,
    at_most,
    divide_outermost,
    rounding_operations,
    shares_of,
)
from jmp_train.diagnostics import sensitivity

RNG = np.random.default_rng(0)
W = RNG.normal(size=(8, 8)).astype(np.float32)
X = RNG.normal(size=(16, 8)).astype(np.float32)
SCALE = StaticLossScale(1024.0)


def in_float64(loss, *args):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), args)
        return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(*wide))


def holds(report, loss, *args, policy="mixed_float16", loss_scale: jmp.LossScale | None = SCALE):
    """Asserts that errors are those of value_and_grad against float64, and that the proposal meets the tolerance."""
    truth = in_float64(loss, *args)
    both = [jmp.value_and_grad(loss, policy, rules=rules) for rules in (report.base, report.proposal)]
    found = jax.jit(lambda *args, **scale: [fn(*args, **scale)[1] for fn in both])(*args, loss_scale=loss_scale)
    for grads, error in zip(found, (report.error, report.proposal_error), strict=True):
        assert relative_error(grads, truth) == pytest.approx(error, rel=0.2, abs=3e-4)
    assert report.met and report.proposal_error <= report.tolerance < report.error


# Scopes


def offset_loss(w, x):
    with jax.named_scope("Net"):
        with jax.named_scope("First"):
            h = jnp.tanh(x @ w)
        with jax.named_scope("Offset"):
            far = h + 500
            h = far - jnp.mean(far, axis=-1, keepdims=True)
        with jax.named_scope("Second"):
            h = jnp.tanh(h @ w)
    return jnp.mean(h**2)


CARELESS = DEFAULT_RULES.with_scopes({"Offset": "float16"})


@pytest.fixture(scope="module")
def offset():
    return sensitivity(offset_loss, "mixed_float16", rules=CARELESS)(W, X, loss_scale=SCALE)


def test_a_scope_forced_into_16_bits_is_the_whole_proposal(offset):
    first, *others = offset.rows
    assert first.scope == "Net/Offset" and first.share > 0.95 and first.alone > 20 * offset.tolerance
    assert {row.scope for row in others} >= {"Net/First", "Net/Second"}
    assert all(row.share < 0.5 and row.alone < offset.tolerance < row.without for row in others)
    assert offset.kept == ("Net/Offset",) and offset.by == "scope"
    assert offset.proposal == CARELESS.with_scopes({"Net/Offset": "float32"})
    assert offset.floor < 1e-5
    holds(offset, offset_loss, W, X)


def test_it_is_a_value(offset):
    assert hash(offset) == hash(dataclasses.replace(offset))
    values = offset.as_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["kept"] == ["Net/Offset"] and values["met"] and values["error"] == offset.error
    assert values["rows"] == [dataclasses.asdict(row) for row in offset.rows]
    first, header, *rows, advice, line = str(offset).splitlines()
    assert re.match(r"The gradient's relative error is 0\.\d+, the tolerance 0\.00781 \(params=float32,", first)
    assert header.split() == ["scope", "operations", "alone", "without", "it", "share"]
    assert [row.split()[0] for row in rows] == [row.scope for row in offset.rows]
    assert advice == f"Keep 1 scope in float32 for an error of {offset.proposal_error:.3g}:"
    assert line == '  rules=rules.with_scopes({"Net/Offset": "float32"})' == "  " + offset.line
    assert eval(offset.line.removeprefix("rules="), {"rules": CARELESS}) == offset.proposal


@pytest.mark.slow
def test_it_is_deterministic(offset):
    assert sensitivity(offset_loss, "mixed_float16", rules=CARELESS)(W, X, loss_scale=SCALE) == offset


def cancelling_loss(params, x):
    with jax.named_scope("Easy"):
        easy = jnp.tanh(x @ params["w"])
    with jax.named_scope("Cancelling"):
        hard = jnp.tanh((x + 1000) @ params["v"] - 1000 * jnp.sum(params["v"], axis=0))
    return jnp.mean(easy**2) + jnp.mean(hard)


@pytest.mark.slow
def test_a_product_that_cancels():
    args = {"w": W, "v": np.round(W * 8) / 8}, np.round(X * 8) / 8
    report = sensitivity(cancelling_loss, "mixed_float16")(*args, loss_scale=SCALE)
    assert report.kept == ("Cancelling",) and report.rows[0].share > 0.95
    assert report.line == 'rules=jmp.DEFAULT_RULES.with_scopes({"Cancelling": "float32"})'
    assert eval(report.line.removeprefix("rules="), {"jmp": jmp}) == report.proposal
    holds(report, cancelling_loss, *args)


class Block(nn.Module):
    offset: float

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(8)(x)
        with jax.named_scope("Offset"):
            far = h + self.offset
            h = far - jnp.mean(far, axis=-1, keepdims=True)
        return jnp.tanh(h)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for offset in (0.0, 2000.0):
            x = Block(offset)(x)
        return x


def linen_loss(params, x):
    return jnp.mean((Net().apply(params, x) - x) ** 2)  # pyright: ignore[reportOperatorIssue]


@pytest.mark.slow
def test_linen_opens_the_worst_block_only():
    params = jax.jit(Net().init)(jax.random.key(0), X)
    report = sensitivity(linen_loss, "mixed_float16", rules=CARELESS)(params, X, loss_scale=SCALE)
    assert report.kept == ("Net/Block_1/Offset",)
    finer = {row.scope: row.finer for row in report.rows}
    assert finer["Net/Block_0"] > 1 and finer["Net/Block_1/Offset"] == 0 and "Net/Block_1" not in finer
    holds(report, linen_loss, params, X)


@pytest.mark.slow
def test_what_stands_in_a_module_itself_is_a_part():
    def loss(w, x):
        with jax.named_scope("Net"):
            with jax.named_scope("Dense"):
                h = x @ w
            far = h + 500
            h = far - jnp.mean(far, axis=-1, keepdims=True)
            with jax.named_scope("Dense_1"):
                return jnp.mean(jnp.tanh(h @ w))

    careless = DEFAULT_RULES.with_scopes({"Net/.": "float16"})
    report = sensitivity(loss, "mixed_float16", rules=careless)(W, X, loss_scale=SCALE)
    assert report.kept == ("Net/.",)
    holds(report, loss, W, X)


@pytest.mark.slow
def test_two_scopes_that_each_ruin_the_gradient_are_both_found():
    def loss(w, x):
        for name in ("A", "B", "Fine"):
            with jax.named_scope(name):
                x = jnp.tanh(x @ w)
                if name != "Fine":
                    far = x + 500
                    x = far - jnp.mean(far, axis=-1, keepdims=True)
        return jnp.mean(x)

    careless = DEFAULT_RULES.with_scopes({"[AB]": "float16"})
    report = sensitivity(loss, "mixed_float16", rules=careless)(W, X, loss_scale=SCALE)
    assert set(report.kept) == {"A", "B"} and report.rows[2].scope == "Fine"
    holds(report, loss, W, X)


def numbered(w, x):
    for number in range(5):
        with jax.named_scope(f"Layer_{number}"):
            x = jnp.tanh(x @ w)
    with jax.named_scope("Head"):
        return jnp.mean(x @ w)


@pytest.mark.slow
def test_numbered_scopes_are_one_where_they_are_too_many():
    report = sensitivity(numbered, "mixed_bfloat16", max_scopes=2, tolerance=1e-7)(W, X)
    assert {row.scope: row.finer for row in report.rows} == {"Layer_[0-9]*": 5, "Head": 0}
    assert report.met and set(report.kept) == {"Layer_[0-9]*", "Head"}
    holds(report, numbered, W, X, policy="mixed_bfloat16", loss_scale=None)


# Primitives


def scores_loss(w, x):
    scores = jnp.tanh(x @ w) - 14
    return jnp.mean(jnp.log(jnp.sum(jnp.exp(scores), axis=-1)))


@pytest.mark.slow
def test_an_exponential_in_16_bits():
    # exp(-14) is 8e-7, where float16 has steps of 6e-8.
    careless = DEFAULT_RULES.replace({"exp": "low"})
    report = sensitivity(scores_loss, "mixed_float16", rules=careless, tolerance=0.01)(W, X, loss_scale=SCALE)
    assert report.by == "primitive" and report.kept == ("exp",) and report.rows[0].scope == "exp"
    assert report.line == 'rules=rules.replace({"exp": "recorded"})'
    assert eval(report.line.removeprefix("rules="), {"rules": careless}) == report.proposal
    holds(report, scores_loss, W, X)


def test_operations_that_only_follow_are_found():
    # Alone, `exp` follows an operand in float32 and is harmless; its error shows only where it is kept wide.
    def loss(w, x):
        scores = jnp.tanh(x @ w) - 14
        return jnp.mean(jnp.log(jnp.sum(jnp.exp(scores) + jnp.exp2(scores - 6), axis=-1)))

    careless = DEFAULT_RULES.replace({"exp": "follow", "exp2": "follow"})
    report = sensitivity(loss, "mixed_float16", rules=careless, tolerance=0.002)(W, X, loss_scale=SCALE)
    first = report.rows[0]
    assert first.scope == "exp, exp2" and first.alone < 1e-5 and first.share > 0.9 and report.kept == ("exp", "exp2")
    assert report.line == 'rules=rules.replace({"exp": "recorded", "exp2": "recorded"})'
    holds(report, loss, W, X)


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        far = self.second(jnp.tanh(self.first(x)) + 1000) - self.second(jnp.full_like(x, 1000))
        return jnp.tanh(far)


def test_nnx_by_primitives():
    graph, params = nnx.split(Plain(nnx.Rngs(0)), nnx.Param)

    def loss(params, x):
        return jnp.mean(nnx.merge(graph, params)(x) ** 2)

    report = sensitivity(loss, "mixed_float16")(params, X, loss_scale=SCALE)
    assert report.by == "primitive" and report.kept == ("dot_general",) and report.rows[0].share > 0.9
    assert {row.scope for row in report.rows} >= {"dot_general", "tanh"}
    assert str(report).splitlines()[1].split()[:2] == ["primitives", "operations"]
    holds(report, loss, params, X)


# Which operations round


def chained(w, x):
    h = jax.jit(lambda h: jnp.tanh(h) * 2)(x @ w)
    h = -h.T
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h.T, length=2)
    return jnp.sum(jnp.exp(h)) + jnp.sum(h > 0), x.astype(jnp.float16) + 1


@pytest.mark.parametrize(
    ("policy", "rules", "found"),
    [
        ("mixed_float16", DEFAULT_RULES, ["dot_general", "tanh", "mul"]),
        ("mixed_float16", DEFAULT_RULES.replace({"neg": "low"}), ["dot_general", "tanh", "mul", "neg"]),
        ("mixed_float16", DEFAULT_RULES.replace({"transpose": "low"}), ["dot_general", "tanh", "mul", "transpose"]),
        ("float32", DEFAULT_RULES, []),
        ("params=float32,compute=float64,output=float32", DEFAULT_RULES, []),
    ],
)
def test_which_operations_round(policy, rules, found):
    plan = jmp.explain(lambda w, x: chained(w, x)[0] + jnp.sum(chained(w, x)[1]), policy, rules=rules)(W, X)
    assert list(dict.fromkeys(op.primitive for op in rounding_operations(plan))) == found


def test_sums_across_devices_round_in_the_reduce_dtype():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    gradient = jax.grad(lambda w, x: jax.lax.pmean(jnp.mean(jnp.sin(x * w)), "d"))
    step = jax.shard_map(gradient, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec())
    policy = jmp.get_policy("mixed_float16").replace(reduce_dtype="bfloat16")
    narrow = rounding_operations(jmp.explain(step, policy)(W[0], X))
    assert ("psum_invariant", "bfloat16") in [(op.primitive, op.dtype) for op in narrow]


@pytest.mark.parametrize(
    ("scoped", "by", "parts"),
    [
        (0, None, "primitive"),
        (1, None, "primitive"),
        (2, None, "scope"),
        (3, None, "scope"),
        (1, "scope", "scope"),
        (3, "primitive", "primitive"),
    ],
)
def test_parts_are_scopes_where_half_of_the_operations_have_one(scoped, by, parts):
    def fn(w, x):
        for number in range(4):
            with jax.named_scope("A") if number < scoped else contextlib.nullcontext():
                x = x @ w
        return x

    how, candidates = _candidates(jmp.explain(fn, "mixed_float16")(W, X), by, 24)
    assert how == parts and sum(each.operations for each in candidates) == 4


# The search, on made-up errors


class MadeUp:
    """A gradient whose error is a function of the scopes that are kept wide."""

    compiled = 0

    def __init__(self, error_of):
        self.error_of = error_of

    def error(self, rules):
        return self.error_of("".join(sorted(glob for glob, _ in rules.scopes)))


def proposed(error_of, names, tolerance):
    candidates = tuple(Candidate(name, 1) for name in names)
    search: Any = Search(MadeUp(error_of), DEFAULT_RULES, candidates, error_of(""))  # pyright: ignore[reportArgumentType]
    return "".join(each.name for each in search.propose(tolerance)), [row.candidate.name for row in search.ranking()]


def test_errors_that_add_up_in_quadrature():
    sizes = {"A": 0.1, "B": 0.5, "C": 0.01, "D": 0.3, "E": 0.02}
    error_of = lambda wide: np.sqrt(sum(size**2 for name, size in sizes.items() if name not in wide))  # noqa: E731
    for tolerance, kept in ((1.0, ""), (0.4, "B"), (0.2, "BD"), (0.05, "ABD"), (0.015, "ABDE"), (1e-9, "ABCDE")):
        assert proposed(error_of, sizes, tolerance) == (kept, ["B", "D", "A", "E", "C"])


def test_a_part_that_turns_out_not_to_be_needed_is_left_out():
    errors = {"": 1.0, "A": 0.2, "B": 0.9, "C": 0.95, "AB": 0.25, "AC": 0.25, "BC": 0.001, "ABC": 0.0}
    assert proposed(errors.__getitem__, "ABC", 0.01) == ("BC", ["A", "B", "C"])


def test_near_the_least_error_is_enough_where_the_tolerance_is_out_of_reach():
    errors = {"": 1.0, "A": 0.9, "B": 0.105, "AB": 0.1}
    assert proposed(errors.__getitem__, "AB", 0.01) == ("B", ["B", "A"])
    assert proposed({**errors, "B": 0.12}.__getitem__, "AB", 0.01) == ("AB", ["B", "A"])


def test_what_only_alone_shows_has_a_share():
    errors = {"": 1.0, "A": 1.0, "B": 1.0, "C": 1.0, "AB": 0.001, "AC": 0.9, "BC": 0.9, "ABC": 0.0}
    candidates = tuple(Candidate(name, 1) for name in "CAB")
    search: Any = Search(MadeUp(errors.__getitem__), DEFAULT_RULES, candidates, 1.0)  # pyright: ignore[reportArgumentType]
    shares = {row.candidate.name: row.share for row in search.ranking()}
    assert shares == pytest.approx({"A": 0.81, "B": 0.81, "C": 1e-6})
    assert {part.name for part in search.propose(0.01)} == {"A", "B"}


def test_parts_without_a_share_are_ranked_by_their_error_alone():
    sizes = {"B": 0.1, "C": 0.2}
    error_of = lambda wide: np.linalg.norm([x * (y not in wide) for y, x in sizes.items()]) if "A" in wide else np.inf  # noqa: E731
    assert proposed(error_of, "BCA", 0.05) == ("BCA", ["A", "C", "B"])


def test_to_remove_less_than_another_part_adds_is_chance():
    errors = {"": 1.0, "A": 1.05, "B": 0.98, "C": 0.5, "BC": 0.01, "AC": 0.01, "AB": 0.9, "ABC": 0.0}
    candidates = tuple(Candidate(name, 1) for name in "ABC")
    search: Any = Search(MadeUp(errors.__getitem__), DEFAULT_RULES, candidates, 1.0)  # pyright: ignore[reportArgumentType]
    assert {row.candidate.name: row.share for row in search.ranking()} == pytest.approx(
        {"A": 1e-4, "B": 1e-4, "C": 0.81}
    )


@pytest.mark.parametrize("limit, divided", [(3, "AB"), (4, "abB"), (24, "abB")])
def test_the_worst_part_is_divided_and_no_small_one(limit, divided):
    """Of the squared error a has 80 %, b 17 %, c 2 % and d 1 %. A part that is kept whole is named by its own scope."""
    squares = {"a": 0.8, "b": 0.17, "c": 0.02, "d": 0.01}
    inside = {"a": "Aa", "b": "Ab", "c": "Bc", "d": "Bd"}
    error_of = lambda wide: np.sqrt(sum(x for name, x in squares.items() if not {*inside[name]} & {*wide}))  # noqa: E731
    whole = tuple(Candidate(x, 2, children=tuple(map(Candidate, y, (1, 1)))) for x, y in (("A", "ab"), ("B", "cd")))
    search: Any = Search(MadeUp(error_of), DEFAULT_RULES, whole, error_of(""))  # pyright: ignore[reportArgumentType]
    search.refine(limit)
    assert "".join(sorted(each.name for each in search.candidates)) == "".join(sorted(divided))
    assert [each.name for each in search.propose(0.2)] == ["A"]
    assert [each.name for each in search.propose(0.5)] == (["a"] if "a" in divided else ["A"])


def test_scopes_of_one_kind_are_one_where_they_are_too_many():
    parts = tuple(map(Candidate, ("L_0", "Head", "L_10", "Out_1"), (1, 2, 3, 4)))
    assert at_most(4, parts) == parts and at_most(2, parts) is None
    merged = at_most(3, parts)
    assert merged is not None
    assert [(each.name, each.operations) for each in merged] == [("L_[0-9]*", 4), ("Head", 2), ("Out_1", 4)]
    assert merged[0].children == (parts[0], parts[2])


def test_the_only_scope_with_others_inside_is_divided_beside_those_that_stand_alone():
    inside = tuple(map(Candidate, "ab", (1, 2)))
    assert divide_outermost((Candidate("Net", 3, children=inside), Candidate("Loss", 1))) == (
        *inside,
        Candidate("Loss", 1),
    )


# Limits


@pytest.mark.parametrize("by", [None, "scope", "primitive"])
def test_float32_has_no_error(by):
    report = sensitivity(offset_loss, "float32", by=by)(W, X)
    assert (report.error, report.floor, report.proposal_error, report.rows, report.kept) == (0.0, 0.0, 0.0, (), ())
    assert report.met and report.proposal == DEFAULT_RULES and report.gradients == 2
    assert str(report).splitlines()[1:] == ["Nothing has to be kept in float32."]


def test_a_tolerance_out_of_reach():
    @jmp.low_precision
    def stubborn(x):
        far = x + 500
        return far - jnp.mean(far, axis=-1, keepdims=True)

    def loss(w, x):
        with jax.named_scope("Stubborn"):
            x = stubborn(x @ w)
        with jax.named_scope("Dense"):
            return jnp.mean(jnp.tanh(x @ w))

    report = sensitivity(loss, "mixed_float16")(W, X, loss_scale=SCALE)
    assert not report.met and report.floor > report.tolerance and report.proposal_error <= 1.1 * report.floor
    assert (
        "Rules cannot reach the tolerance. What remains comes from low_precision regions, from code that casts by hand "
        f"or from the loss scale. The least is {report.floor:.3g}."
    ) in str(report)


def test_overflow():
    def loss(w, x):
        with jax.named_scope("Large"):
            h = (x * 3e4) @ w
        with jax.named_scope("Small"):
            return jnp.mean(jnp.tanh(h * 1e-5) @ w)

    report = sensitivity(loss, "mixed_float16")(W, X, loss_scale=SCALE)
    assert report.error == np.inf and report.rows[0].scope == "Large" and report.kept == ("Large",) and report.met
    assert report.rows[0].share == 1 and report.rows[1].share == 0
    values = report.as_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values and values["error"] is None
    assert str(report).splitlines()[:2] == [
        f"The gradient's relative error is infinite, the tolerance 0.00781 ({report.policy}).",
        "The gradient overflows under the policy: it holds infinities or NaN. Lower the loss scale; if that does not "
        "help, find_overflow(fn)(*args), with the step's gradient function and its arguments, finds the operation.",
    ]


def test_arguments_are_those_of_value_and_grad():
    def loss(name, params, *, x, activate):
        h = x @ params["w"]
        return jnp.mean((jnp.tanh(h) if activate else h) * params["b"]), name

    params = {"w": W, "b": np.ones(8, np.float32)}
    report = sensitivity(loss, "mixed_bfloat16", argnums=1, has_aux=True)("name", params, x=X, activate=True)
    gradient = jmp.grad(loss, "mixed_bfloat16", argnums=1, has_aux=True)
    grads = jax.jit(lambda params: gradient("name", params, x=X, activate=True)[0])(params)
    truth = in_float64(lambda p, x: loss("", p, x=x, activate=True)[0], params, X)
    assert relative_error(grads, truth) == pytest.approx(report.error, rel=0.2)


def made_up(**changes):
    """A report; as it is, keeping `exp` in float32 meets the tolerance exactly."""
    fields = dict(policy="p", by="primitive", tolerance=0.1, error=0.5, floor=0.01, rows=(), base=DEFAULT_RULES)
    fields |= dict(kept=("exp",), proposal=DEFAULT_RULES, proposal_error=0.1, gradients=1)
    return Sensitivity(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def test_what_the_text_says_of_the_proposal():
    assert made_up().met and "Keep 1 primitive in float32" in str(made_up())
    assert "Nothing has" not in str(made_up(kept=(), floor=0.5, proposal_error=0.5))
    assert "Rules cannot" not in str(made_up(proposal_error=0.2))
    assert made_up(kept=()).line == "rules=jmp.DEFAULT_RULES"


def test_a_tolerance_may_be_an_integer():
    assert sensitivity(offset_loss, "float32", tolerance=1)(W, X).met


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sensitivity(offset_loss, "mixed_float16")(W, X), TypeError,
         "`loss_scale` is required because float16 gradients vanish without it (the policy is 'params=float32,"
         "compute=float16,output=float32'); pass loss_scale=get_loss_scale(opt_state) with an optimizer from "
         "with_loss_scale, a StaticLossScale, or NoOpLossScale() to go without."),
        (lambda: sensitivity(offset_loss, 0), TypeError,  # pyright: ignore[reportArgumentType]
         "`policy` must be a Policy or a name such as 'mixed_float16', got 0; the argument that comes second in "
         "jax.value_and_grad and jax.grad is a keyword here: argnums=0."),
        (lambda: sensitivity(offset_loss, "float32", argnums="a"), TypeError,  # pyright: ignore[reportArgumentType]
         "`argnums` must be an integer or a sequence of integers, got 'a'."),
        (lambda: sensitivity(3, "float32"), TypeError,  # pyright: ignore[reportArgumentType]
         "`loss_fn` must be callable, got 3; pass the function that is given to value_and_grad."),
        (lambda: sensitivity(offset_loss, "float32", rules={"exp": "low"}), TypeError,  # pyright: ignore[reportArgumentType]
         "`rules` must be a Rules, got {'exp': 'low'}; edit the default: DEFAULT_RULES.replace({...}). "
         "Arguments of the function belong to the one that is returned: explain(fn, policy)(*args)."),
        (lambda: sensitivity(offset_loss, "float32", by="layer"), ValueError,
         "`by` must be 'scope', 'primitive' or None, got 'layer'."),
        (lambda: sensitivity(offset_loss, "float32", tolerance=0), ValueError,
         "`tolerance` must be a positive number, a relative error such as 0.01, got 0."),
        (lambda: sensitivity(offset_loss, "float32", tolerance=float("nan")), ValueError,
         "`tolerance` must be a positive number, a relative error such as 0.01, got nan."),
        (lambda: sensitivity(offset_loss, "float32", tolerance=float("inf")), ValueError,
         "`tolerance` must be a positive number, a relative error such as 0.01, got inf."),
        (lambda: sensitivity(offset_loss, "float32", tolerance="1%"), ValueError,  # pyright: ignore[reportArgumentType]
         "`tolerance` must be a positive number, a relative error such as 0.01, got '1%'."),
        (lambda: sensitivity(offset_loss, "float32", tolerance=True), ValueError,
         "`tolerance` must be a positive number, a relative error such as 0.01, got True."),
        (lambda: sensitivity(offset_loss, "float32", max_scopes=0), ValueError,
         "`max_scopes` must be an integer from 1 to 2**31 - 1, got 0."),
        (lambda: sensitivity(offset_loss, "float32", max_scopes=2.5), ValueError,  # pyright: ignore[reportArgumentType]
         "`max_scopes` must be an integer, got 2.5. Pass an integer such as 1."),
        (lambda: sensitivity(offset_loss, "float32", max_scopes="3"), ValueError,  # pyright: ignore[reportArgumentType]
         "`max_scopes` must be an integer, got '3'. Pass an integer such as 1."),
        (lambda: sensitivity(scores_loss, "bfloat16", by="scope")(W, X), ValueError,
         "`by` is 'scope', but no operation that the policy rounds is in a named scope; use by='primitive', or name "
         "the parts of the model with jax.named_scope."),
        (lambda: sensitivity(numbered, "bfloat16", max_scopes=1)(W, X), ValueError,
         "`max_scopes` is 1, but the outermost level has 6 scopes; raise it, or use by='primitive'."),
        (lambda: sensitivity(lambda w: jnp.sum(0 * w), "bfloat16")(W), ValueError,
         "the gradient is zero everywhere in float32, so that no error is relative to it; take another batch."),
        (lambda: sensitivity(lambda tree: 1.0, "bfloat16")({}), ValueError,
         "the gradient is zero everywhere in float32, so that no error is relative to it; take another batch."),
        (lambda: sensitivity(lambda w: jnp.sum(jnp.sqrt(w)), "bfloat16")(jnp.zeros(2)), ValueError,
         "the gradient holds infinities or NaN in float32 already, whatever the policy; find_overflow(fn)(*args) finds "
         "the operation that makes the first one."),
        (lambda: sensitivity(lambda w: jnp.sum(jnp.log(0 * w)), "bfloat16")(W), ValueError,
         "the gradient holds infinities or NaN in float32 already, whatever the policy; find_overflow(fn)(*args) finds "
         "the operation that makes the first one."),
    ],
)  # fmt: skip
def test_bad_input(call, error, message):
    with pytest.raises(error, match="^" + re.escape(message) + "$"):
        call()


@pytest.mark.parametrize(
    "alone, without, shares",
    [
        (0.3, 0.5, (0.0, 0.0)),  # alone it errs no more than nothing in 16 bits does
        (0.5, 0.3, (0.64, 0.64)),  # all but what is there anyway
        (0.3, 0.4, (0.0, 0.36)),  # it matters together with others only
        (9.0, 0.5, (1.0, 1.0)),  # others cancel it
    ],
)
def test_a_parts_share_leaves_out_the_error_that_is_there_anyway(alone, without, shares):
    row = Measured(Candidate("part", 1), alone, without)
    assert shares_of(row, error=0.5, floor=0.3, noise=0.0) == pytest.approx(shares)


def test_the_error_of_numbers_whose_squares_are_zero():
    true, found = jnp.float32([3e-25, 4e-25]), jnp.float32([3e-25, 4.05e-25])
    np.testing.assert_allclose(_relative_error({"w": found}, {"w": true}), 0.01, rtol=1e-4)


def test_brackets_in_the_name_of_a_scope_are_no_glob():
    def loss(w, x):
        with jax.named_scope("layers[0]"):
            y = jnp.tanh(x @ w)
        with jax.named_scope("layers[1]"):
            return jnp.mean(jnp.tanh(y @ w))

    report = sensitivity(loss, "mixed_bfloat16")(
        np.eye(8, dtype=np.float32), np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
    )
    assert {row.scope for row in report.rows} == {"layers[[]0]", "layers[[]1]"}
    assert report.floor < report.error


def test_several_arguments_are_differentiated():
    def loss(w, v, x):
        return jnp.mean(jnp.tanh(x @ w) @ v)

    both = sensitivity(loss, "mixed_bfloat16", argnums=(0, 1))(W, W, X)
    gradients = [jmp.grad(loss, policy, argnums=(0, 1)) for policy in ("mixed_bfloat16", "float32")]
    grads, truth = jax.jit(lambda *args: [gradient(*args) for gradient in gradients])(W, W, X)
    assert relative_error(grads, truth) == pytest.approx(both.error, rel=0.2)


def test_arguments_that_are_missing_are_left_to_jax():
    with pytest.raises(TypeError, match=r"argnums=2 requires at least 3 positional arguments"):
        sensitivity(offset_loss, "bfloat16", argnums=2)(W, X)


def test_an_argument_counted_from_the_end():
    loss = lambda w: jnp.mean(jnp.tanh(w @ w))  # noqa: E731
    first, last = (sensitivity(loss, "mixed_bfloat16", argnums=argnums)(W) for argnums in (0, -1))
    assert first == last and first.rows
