"""The table of JAX primitives: the rule by which each may run, the reason, and the traits that passes ask about.

Decides one rule and a set of traits per primitive, by name. Does not apply any; see `passes`. A primitive that is not
in the table runs exactly as recorded: a missing one costs speed, but never changes a result. The rules follow
Micikevicius et al., "Mixed precision training" (ICLR 2018), section 3.3: dot products in 16 bits, accumulation and
large reductions in float32.
"""

import dataclasses
import enum
import functools


class Rule(enum.Enum):
    """How an operation that was recorded in float32 may run."""

    LOW = "low"  # operands narrowed to the compute dtype: Tensor Cores
    HIGH = "high"  # operands widened to float32
    FOLLOW = "follow"  # in the dtype of its operand
    SHAPE = "shape"  # moves values without computing: in the dtype of its operand, and casts look through it
    WIDEST = "widest"  # one dtype for all operands: float32 as soon as one of them needs it
    COLLECTIVE = "collective"  # sends gradients in the policy's reduce_dtype; forward, statistics in float32
    ENTER = "enter"  # has a program inside, which is planned too
    RECORDED = "recorded"  # exactly as written

    __hash__ = object.__hash__  # `Enum`'s own is a function in Python, and tables of rules are read at every equation


class Trait(enum.Flag):
    """Facts about what a primitive does to numbers, for passes to ask. A primitive has any number of traits."""

    MOVES = enum.auto()  # the result is the first operand's elements, all of them, rearranged or repeated
    PICKS = enum.auto()  # the result is some of the first operand's elements
    JOINS = enum.auto()  # every element of the result is an element of one of several operands
    BOUNDS = enum.auto()  # elementwise, and the result is one of the operands
    TRANSFERS = enum.auto()  # an operand's elements, sent to other devices or to another memory by a kernel of its own
    PLACES = enum.auto()  # says on which devices its operand has to be: a transfer, if it is elsewhere
    FLIPS = enum.auto()  # the operand's magnitudes, exactly
    EXTREMES = enum.auto()  # largest or smallest elements
    ADDS = enum.auto()  # a pairwise sum or difference
    ACCUMULATES = enum.auto()  # adds terms to its first operand
    LINEAR = enum.auto()  # linear in each operand
    ROUNDS = enum.auto()  # follows its operands and rounds: worth float32 wherever that costs no bytes
    ELEMENTWISE = enum.auto()  # of real numbers: an element of the result comes from one of each operand
    FUSES = enum.auto()  # elementwise, or moves values, and cheap: XLA computes it again in every fusion that reads it
    EXPENSIVE = enum.auto()  # elementwise, and XLA stores the result rather than compute it twice
    COMPARES = enum.auto()  # an order of two numbers, which few roundings change (any changes `eq`); or joins these
    EXPONENTIAL = enum.auto()  # an absolute error of the operand is a relative one of the result
    PERIODIC = enum.auto()  # an absolute error of the operand counts, however large the operand: an angle, a fraction
    POOL = enum.auto()  # an extreme of each window, in a kernel of its own
    DOT = enum.auto()  # a matrix product or convolution
    ATTENTION = enum.auto()  # two matrix products or more, with a softmax between
    OPAQUE_DOT = enum.auto()  # has, or may have, matrix products in code that JAX does not show
    SYSTEM = enum.auto()  # solves or factorizes: roundings are multiplied by the condition number
    CONSTANT = enum.auto()  # not arithmetic, and the same result for the same operands on every device


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of the table.

    Attributes:
      rule: how the primitive may run.
      reason: why, as `explain` prints it.
      never_low: whether it would accumulate in 16 bits, or has no 16-bit form.
    """

    rule: Rule
    reason: str
    never_low: bool = False

    @functools.cached_property
    def has_own_kernel(self) -> bool:
        """Whether it is a sum or a factorization, whose kernel reads its operands from memory."""
        return self.never_low and self.rule is Rule.HIGH


_LOW = {
    "dot_general ragged_dot_general": "Tensor Cores multiply 16-bit operands and accumulate in float32",
    "conv_general_dilated": "Tensor Cores; never asked for a wider output, which would leave them",
    "jmp_attention jmp_attention_backward": "Tensor Cores; softmax and every sum in float32",
}
_HIGH = {
    "exp exp2 expm1": "float16 overflows above 11.09",
    "log log1p log2": "loses all digits near one, and float16 rounds inputs below 3e-8 to zero",
    "pow integer_pow square": "float16 overflows at 256 squared",
    "sqrt rsqrt cbrt reciprocal": "small arguments are where these matter and what float16 lacks",
    "sin cos tan asin acos atan sinh cosh asinh acosh atanh": "a 16-bit angle of 1000 is off by half a radian",
    "one_minus_square": "cancels near one",
    "floor ceil round": "exact, and the fraction of a large 16-bit number is nothing",
    "erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a random_gamma zeta": "wide range, steep slopes",
    "regularized_incomplete_beta bessel_i0e bessel_i1e polynomial": "series whose terms cancel",
    "select_and_gather_add": "pairs a selection with a sum",
    "scatter-max scatter-min scatter-mul": "combines duplicates in one buffer",
    "jmp_attention_tangent": "forward-mode derivatives have no fused kernel",
}
_SUMS = {
    "reduce_sum reduce_prod": "a 16-bit running sum stops growing after 2,048 equal terms",
    "cumsum cumprod cumlogsumexp": "a running sum",
    "reduce_window_sum": "a sum a window",
    "scatter-add scatter-sub": "duplicate indices accumulate: an embedding's gradient is such a sum",
    "select_and_scatter_add": "overlapping windows accumulate; small windows are written as selections",
    "fft": "no 16-bit form, and a sum of as many terms as points",
}
_FACTORIZATIONS = {
    "cholesky cholesky_update lu qr geqrf geqp3 ormqr svd eigh eig hessenberg schur": "LAPACK has no 16-bit form",
    "householder_product triangular_solve tridiagonal tridiagonal_solve symmetric_product": "ill-conditioned",
}
_FOLLOW = {
    "neg sign abs is_finite": "exact",
    "tanh logistic erf erfc": "bounded by one or two",
    "reduce_max reduce_min argmax argmin reduce_window_max reduce_window_min cummax cummin": "compares, exactly",
    "sort top_k approx_top_k": "compares; a value is never narrowed before it is compared",
    "real imag": "exact",
}
_SHAPE = {
    "reshape broadcast_in_dim broadcast_to transpose squeeze rev tile": "moves values",
    "slice dynamic_slice gather split unstack": "picks values; an embedding is cast after its gather",
    "copy name optimization_barrier stop_gradient tie": "identity",
    "device_put": "moves values to other devices or another memory",
    "sharding_constraint reshard relayout layout_constraint with_memory_space_constraint": "moves values",
    "pvary pbroadcast reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p": "a type",
    "all_gather all_gather_invariant all_gather_reduced ppermute all_to_all": "as they come",
}
_WIDEST = {
    "add sub add_any": "rounds once, as in hand-written mixed precision",
    "mul div rem": "one dtype; wide where only a float32 operation consumes it",
    "max min atan2 nextafter clamp": "one dtype",
    "eq ne lt le gt ge eq_to le_to lt_to": "a value is never narrowed to be compared with a wider one",
    "concatenate pad stack dynamic_update_slice scatter select_n": "one dtype for the joined buffer",
    "ragged_all_to_all": "one dtype for what is sent and the buffer that receives it",
}
_COLLECTIVE = {
    "psum psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter preduced": "a sum across devices",
    "pmax pmin unreduced_pmax unreduced_pmin": "exact, on the same wire",
}
_ENTER = {
    "jit remat2": "the body is planned with what is known of its arguments",
    "closed_call call eval_jaxpr": "inlined",
    "scan while cond": "the carry has one dtype; a gradient that accumulates in it stays in float32",
    "custom_jvp_call custom_vjp_call": "the user's derivative rule is kept",
    "custom_vmap_call linear_call composite": "the body is planned behind float32 boundaries",
    "shard_map": "the body is planned; collectives keep their meaning",
}
OPAQUE_DOTS = {
    "pallas_call mpmd_map core_map run_state run_scoped": "a kernel written for the dtypes it was given",
    "ffi_call call_exported custom_partitioning cudnn_fusion": "compiled elsewhere",
    "pure_callback io_callback buffer_callback": "calls the host",
    "dot_product_attention_fwd dot_product_attention_fwd_wrapper": "takes 16-bit operands only, so it has them",
    "dot_product_attention_bwd dot_product_attention_bwd_wrapper": "takes 16-bit operands only, so it has them",
    "dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper": "fp8",
    "dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper": "fp8",
    "scaled_dot scaled_matmul scaled_matmul_wrapper": "block-scaled narrow formats",
    "bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general bcsr_dot_general": "sparse formats",
    "coo_matmat coo_matvec coo_spmm coo_spmv csr_matmat csr_matvec csr_spmm csr_spmv spsolve": "sparse formats",
}
OPAQUE = {
    "convert_element_type bitcast_convert_type reduce_precision to_edtype from_edtype": "the user asked for this dtype",
    "reduce reduce_window select_and_scatter": "carries a user's function compiled for float32",
    "and or not xor reduce_and reduce_or reduce_xor shift_left shift_right_arithmetic shift_right_logical": "integers",
    "population_count clz mulhi multiple_of": "integers",
    "random_bits random_seed random_split random_fold_in random_wrap random_unwrap random_clone": "random bits",
    "threefry2x32 threefry4x32 philox2x32 philox4x32 rng_bit_generator rng_uniform iota_2x32_shape": "random bits",
    "iota empty empty2 create_token after_all create_linear": "makes values from none",
    "complex conj": "complex numbers have no 16-bit form",
    "custom_linear_solve": "a solver run in 16 bits does not end",
    "global_array_to_host_local_array host_local_array_to_global_array": "moves arrays between processes",
    "axis_index platform_index dimension_size dim_as_value shape_assertion": "not arithmetic",
    "custom_lin dce_sink": "compiled elsewhere",
    "debug_callback debug_print check inspect_sharding": "calls the host",
    "lu_pivots_to_permutation": "integers",
    "bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_sum_duplicates bcoo_todense bcoo_transpose": "sparse formats",
    "bcsr_extract bcsr_fromdense bcsr_todense coo_fromdense coo_todense todense": "sparse formats",
    "csr_fromdense csr_todense": "sparse formats",
    "all_gather_start all_gather_done all_gather_reduced_start all_to_all_start all_to_all_done": "asynchronous halves",
    "pbroadcast_start pbroadcast_done pbroadcast_dynamic ppermute_start ppermute_done": "asynchronous halves",
    "psum_start psum_done psum_invariant_start reduce_scatter_start reduce_scatter_done": "asynchronous halves",
    "unreduced_psum_start unreduced_reduce_scatter_start psend precv": "asynchronous halves",
    "get swap": "memory that is read and written in place has one dtype",
    "program_order": "orders effects",
    "pin unpin stage unreachable remat_opt": "internal to JAX's own passes",
    "xla_metadata_call xla_metadata_value": "annotations of the compiler",
}


TRAITS = {
    Trait.MOVES: "reshape broadcast_in_dim broadcast_to transpose squeeze rev tile copy name optimization_barrier "
    "stop_gradient sharding_constraint reshard layout_constraint pvary pbroadcast device_put",
    Trait.PICKS: "slice dynamic_slice gather split unstack",
    Trait.JOINS: "select_n concatenate pad stack dynamic_update_slice scatter ragged_all_to_all",
    Trait.BOUNDS: "max min clamp",
    Trait.TRANSFERS: "device_put all_gather all_gather_invariant all_gather_reduced ppermute all_to_all "
    "ragged_all_to_all",
    Trait.PLACES: "sharding_constraint reshard",
    Trait.FLIPS: "neg abs",
    Trait.EXTREMES: "reduce_max reduce_min",
    Trait.ADDS: "add sub add_any",
    Trait.ACCUMULATES: "add sub add_any scatter-add scatter-sub",
    Trait.LINEAR: "mul div neg reduce_sum dot_general",
    Trait.ROUNDS: "add sub add_any mul div rem atan2 tanh logistic erf erfc",
    Trait.FUSES: "add sub add_any mul div max min neg abs sign select_n clamp integer_pow square one_minus_square "
    "polynomial reduce_precision broadcast_in_dim reshape squeeze slice split concatenate "
    "convert_element_type bitcast_convert_type copy pvary",
    Trait.ELEMENTWISE: "abs acos acosh add add_any asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type "
    "copy cos cosh digamma div erf erf_inv erfc exp exp2 expm1 floor integer_pow lgamma log log1p log2 logistic max "
    "min mul neg nextafter one_minus_square pow reduce_precision rem round rsqrt sign sin sinh sqrt square sub tan "
    "tanh",
    Trait.EXPENSIVE: "exp exp2 expm1 log log1p log2 logistic tanh erf erfc erf_inv pow sin cos tan sqrt rsqrt cbrt",
    Trait.COMPARES: "lt le gt ge and or not",
    Trait.EXPONENTIAL: "exp exp2 expm1 sinh cosh",
    Trait.PERIODIC: "sin cos tan floor ceil round rem",
    Trait.POOL: "reduce_window_max reduce_window_min",
    Trait.DOT: "dot_general ragged_dot_general conv_general_dilated",
    Trait.ATTENTION: "jmp_attention jmp_attention_backward",
    Trait.OPAQUE_DOT: " ".join(OPAQUE_DOTS),
    Trait.SYSTEM: " ".join(_FACTORIZATIONS) + " custom_linear_solve",
    Trait.CONSTANT: "iota convert_element_type bitcast_convert_type reduce_precision and or not xor shift_left "
    "shift_right_arithmetic shift_right_logical random_bits random_seed random_split random_fold_in random_wrap "
    "random_unwrap threefry2x32 reduce_and reduce_or complex",
}
# The position of the operand for which a rounding to zero, to one or to infinity is no small change: a divisor, a value
# that is bounded, a value near a pole or a branch point, a log-sum-exp. Of `clamp(low, x, high)` that is `x`, and of
# `pow` the base. Negative positions count from the last operand, because an attention may have extra ones (bias, mask).
DELICATE_OPERAND = {
    **dict.fromkeys("log log2 log1p sqrt rsqrt cbrt reciprocal pow digamma lgamma".split(), 0),
    **dict.fromkeys("erf_inv asin acos atanh acosh".split(), 0),
    **dict.fromkeys("div rem clamp".split(), 1),
    "jmp_attention_backward": -2,  # before the cotangent
}
# The largest magnitude of a result, whatever the operand; for activation functions, which multiply by such results.
LARGEST_RESULT = {"tanh": 1.0, "logistic": 1.0, "erf": 1.0, "erfc": 2.0}
# The operands from which a result takes its numbers, where others are indices or predicates.
DATA_OPERANDS = {
    "gather": slice(0, 1),
    "dynamic_slice": slice(0, 1),
    "dynamic_update_slice": slice(0, 2),
    **dict.fromkeys("scatter scatter-add scatter-sub scatter-mul scatter-max scatter-min".split(), slice(0, 3, 2)),
    "select_n": slice(1, None),
}


def _entries(rule: Rule, lines: dict[str, str], never_low: bool = False) -> dict[str, Entry]:
    return {name: Entry(rule, reason, never_low) for names, reason in lines.items() for name in names.split()}


TABLE: dict[str, Entry] = {
    **_entries(Rule.LOW, _LOW),
    **_entries(Rule.HIGH, _HIGH),
    **_entries(Rule.HIGH, _SUMS, never_low=True),
    **_entries(Rule.HIGH, _FACTORIZATIONS, never_low=True),
    **_entries(Rule.FOLLOW, _FOLLOW),
    **_entries(Rule.SHAPE, _SHAPE),
    **_entries(Rule.WIDEST, _WIDEST),
    **_entries(Rule.COLLECTIVE, _COLLECTIVE, never_low=True),
    **_entries(Rule.ENTER, _ENTER),
    **_entries(Rule.RECORDED, OPAQUE_DOTS | OPAQUE),
}
# Entries without a row in the table: of equations that passes add, and of a weight that is sent to other devices.
ADDED = Entry(Rule.RECORDED, "added by autocast")
CAST_FIRST = Entry(Rule.SHAPE, "only dots read what arrives, so it is cast before it is sent")
UNKNOWN = Entry(Rule.RECORDED, "not in the table: a primitive of another library, or of a newer JAX")


# Calls, loops and branches, and primitives that run as recorded although JAX shows the user's programs inside them.
# (A Pallas kernel and a scatter's function have a jaxpr too, but in another language, or one of JAX's own.)
WITH_PROGRAMS = frozenset(name for name, entry in TABLE.items() if entry.rule is Rule.ENTER) | {
    "custom_linear_solve",
    "xla_metadata_call",
}


def having(traits: Trait) -> frozenset[str]:
    """The primitives that have any of the traits.

    >>> sorted(having(Trait.POOL | Trait.BOUNDS))
    ['clamp', 'max', 'min', 'reduce_window_max', 'reduce_window_min']
    """
    return frozenset(name for trait, names in TRAITS.items() if trait in traits for name in names.split())


# Sets of primitives that several passes ask for.
PLAIN_DOTS = having(Trait.DOT)  # without attention
DOTS = PLAIN_DOTS | having(Trait.ATTENTION)
ADDS = having(Trait.ADDS)
ARITHMETIC = ADDS | {"mul", "div"}
COMBINES = having(Trait.ACCUMULATES | Trait.JOINS)  # the result has numbers of several operands, or their sums
# An activation function is mostly a `custom_jvp`.
ELEMENT_BY_ELEMENT = having(Trait.ELEMENTWISE | Trait.MOVES | Trait.PICKS) | COMBINES | {"custom_jvp_call"}
BOUNDS = having(Trait.BOUNDS)
ROUNDS = having(Trait.ROUNDS)
EXPENSIVE = having(Trait.EXPENSIVE)
FUSED = having(Trait.FUSES | Trait.EXPENSIVE)
SYSTEMS = having(Trait.SYSTEM)
EXPONENTIALS = having(Trait.EXPONENTIAL)
COMPARISONS = having(Trait.COMPARES) | {"eq", "ne", "is_finite", "argmax", "argmin"}  # keep no value in 16 bits
