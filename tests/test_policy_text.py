"""The text form of policies: parsing, printing, and the message of each error."""

import re
import string

import jmp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmp_train import Policy, get_policy

WIDE = ("float16", "bfloat16", "float32", "float64")


SPECS = ["c=f16", "p=f16,c=f16", "p=f16,c=bf16", "p=bf16", "o=f16", "params=full,compute=bfloat16,output=f32", "o=f32"]


@pytest.mark.parametrize("spec", SPECS)
def test_specs_are_read_as_in_jmp(spec):
    ours, theirs = get_policy(spec), jmp.get_policy(spec)
    for field in ("param_dtype", "compute_dtype", "output_dtype"):
        assert getattr(ours, field) == np.dtype(getattr(theirs, field)), field


def test_spaces_and_long_and_short_keys():
    spec = " params = float32 , c=half, output =full, r= bf16 , matmul_precision=float32, @ Dense_0/kernel = f32 "
    assert get_policy(spec) == Policy(
        "float32",
        "float16",
        "float32",
        reduce_dtype="bfloat16",
        matmul_precision="highest",
        overrides=[("Dense_0/kernel", "float32")],
    )


wide = st.sampled_from(WIDE)
segment = st.text(string.ascii_letters + string.digits + "_*?[]!.-:@'\"# ~µ", min_size=1, max_size=8)
globs = st.lists(segment.filter(lambda s: s.strip()), min_size=1, max_size=3).map("/".join)
policies = st.builds(
    Policy,
    wide,
    wide,
    wide,
    reduce_dtype=wide,
    matmul_precision=st.sampled_from([None, "default", "highest", "tensorfloat32", "BF16_BF16_F32_X3"]),
    overrides=st.lists(st.tuples(globs, wide), max_size=3),
)


@given(policies)
def test_text_reads_back(policy):
    assert get_policy(str(policy)) == policy
    assert str(get_policy(str(policy))) == str(policy)
    assert hash(get_policy(str(policy))) == hash(policy)


KEYS = {"p": "param_dtype", "params": "param_dtype", "c": "compute_dtype", "compute": "compute_dtype"}
KEYS |= {"o": "output_dtype", "output": "output_dtype", "r": "reduce_dtype", "reduce": "reduce_dtype"}


@given(st.dictionaries(st.sampled_from(sorted(KEYS)), wide, min_size=1), st.randoms(use_true_random=False))
def test_specs_against_a_plain_reading(parts, random):
    items = list(parts.items())
    random.shuffle(items)
    spec = ",".join(f"{' ' * random.randint(0, 2)}{key} = {value}" for key, value in items)
    fields = [KEYS[key] for key in parts]
    if len(set(fields)) < len(fields):
        with pytest.raises(ValueError, match="a second time"):
            get_policy(spec)
        return
    given_dtypes = {KEYS[key]: value for key, value in parts.items()}
    policy = get_policy(spec)
    params = given_dtypes.get("param_dtype", "float32")
    compute = given_dtypes.get("compute_dtype", params)
    assert policy.param_dtype == params
    assert policy.compute_dtype.name == compute
    assert policy.output_dtype.name == given_dtypes.get("output_dtype", compute)
    assert policy.reduce_dtype.name == given_dtypes.get("reduce_dtype", "float32")


FORM = "is not of the form key=dtype, such as 'compute=float16'."


@pytest.mark.parametrize(
    "spec, message",
    [
        ("c=f16=3", f"policy 'c=f16=3': the part 'c=f16=3' {FORM}"),
        ("p=f32,c=", f"policy 'p=f32,c=': the part 'c=' {FORM}"),
        ("=f16", f"policy '=f16': the part '=f16' {FORM}"),
        ("c=f16,", f"policy 'c=f16,': the part '' {FORM}"),
        ("c=f16,,o=f32", f"policy 'c=f16,,o=f32': the part '' {FORM}"),
        ("c=f16,float32", f"policy 'c=f16,float32': the part 'float32' {FORM}"),
        (
            "c=f16,c=bf16",
            "policy 'c=f16,c=bf16': 'c' sets compute_dtype a second time; give every key once.",
        ),
        (
            "p=f16,c=f16,params=f32",
            "policy 'p=f16,c=f16,params=f32': 'params' sets param_dtype a second time; give every key once.",
        ),
        (
            "comptue=f16",
            "policy 'comptue=f16': unknown key 'comptue' (did you mean 'compute'?); the keys are params (p), "
            "compute (c), output (o), reduce (r), matmul_precision, and @glob for an override.",
        ),
        (
            "c=f17",
            "policy 'c=f17': `compute_dtype`: unknown dtype 'f17' (did you mean 'f16'?); the floating dtypes are",
        ),
        ("c=int8", "policy 'c=int8': `compute_dtype` must be a floating dtype such as 'float16', 'bfloat16'"),
        (
            "c=float8_e4m3fn",
            "policy 'c=float8_e4m3fn': `compute_dtype` must have 16 bits or more, got float8_e4m3fn: numbers of 8 bits "
            "need a scale for every tensor, which a cast does not have; quantise inside the model and choose "
            "'float16' or 'bfloat16' here.",
        ),
        ("c=f16,matmul_precision=hi", "policy 'c=f16,matmul_precision=hi': `matmul_precision` must be one of"),
        ("c=f16,@a/=f32", "policy 'c=f16,@a/=f32': `overrides`: the glob 'a/' has an empty segment;"),
        (
            "mixed_flaot16",
            "unknown policy 'mixed_flaot16' (did you mean 'mixed_float16'?); the names are float32, tensorfloat32, "
            "mixed_float16,",
        ),
        ("o1", "unknown policy 'o1' (did you mean 'O1'?); the names are"),
        ("", "unknown policy ''; the names are"),
    ],
)
def test_malformed_specs(spec, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        get_policy(spec)


def test_a_function_has_no_text_form():
    def keep_biases(path, leaf):
        return "float32" if path.endswith("bias") else None

    policy = get_policy("mixed_float16").replace(overrides=keep_biases)
    assert str(policy).endswith(",@<keep_biases>")
    message = (
        f"policy {str(policy)!r}: '@<keep_biases>' stands for a function, which text cannot carry; add it with "
        f"policy.replace(overrides=...)."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        get_policy(str(policy))


@pytest.mark.parametrize("wrong", [None, 0, 1.5, np.float16, jmp.get_policy("f16")])
def test_what_is_no_policy(wrong):
    message = (
        f"`policy` must be a Policy or a name such as 'mixed_float16', got {wrong!r} of type {type(wrong).__name__}."
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        get_policy(wrong)


def test_peers_a_second_equals_sign_is_an_unpacking_error_in_jmp():
    with pytest.raises(ValueError, match="too many values to unpack"):
        jmp.get_policy("c=f16=3")
