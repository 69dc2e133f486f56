"""Reading the text of compiled modules: a loop of ten steps, and single instructions, written by hand.

Needs no compiler.
"""

import pytest

from jmp_train._diagnostics.gpu._compiled_products import products
from jmp_train._diagnostics.gpu._findings import (
    Collective,
    NarrowSum,
    collectives,
    copies,
    sixteen_bit_sums,
    unused_donors,
)
from jmp_train._diagnostics.gpu._hlo import parse
from jmp_train._diagnostics.gpu._kernels import kernels, traffic, unknown_loops

MODULE = """HloModule jit_step, input_output_alias={ {0}: (1, {}, may-alias), {2}: (0, {}, must-alias) }

FileNames
1 "/a/model.py"

FunctionNames
1 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%fused_slice (p0: f16[10,8,8], p1: s32[]) -> f16[8,8] {
  %p0 = f16[10,8,8]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f16[1,8,8]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,8}
  ROOT %bitcast = f16[8,8]{1,0} bitcast(%slice)
}

%fused_update (p2: f16[10,8,8], p3: f16[1,8,8], p4: s32[]) -> f16[10,8,8] {
  %p2 = f16[10,8,8]{2,1,0} parameter(0)
  %p3 = f16[1,8,8]{2,1,0} parameter(1)
  %p4 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %update = f16[10,8,8]{2,1,0} dynamic-update-slice(%p2, %p3, %p4, %zero.1, %zero.1)
}

%body (state: (s32[], f16[8,8], f16[10,8,8], f16[10,8,8])) -> (s32[], f16[8,8], f16[10,8,8], f16[10,8,8]) {
  %state = (s32[], f16[8,8]{1,0}, f16[10,8,8]{2,1,0}, f16[10,8,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %h = f16[8,8]{1,0} get-tuple-element(%state), index=1
  %ws = f16[10,8,8]{2,1,0} get-tuple-element(%state), index=2
  %ys = f16[10,8,8]{2,1,0} get-tuple-element(%state), index=3
  %w = f16[8,8]{1,0} fusion(%ws, %i), kind=kLoop, calls=%fused_slice
  %gemm = (f16[8,8]{1,0}, s8[64]{0}) custom-call(%h, %w), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/Net/dot_general" stack_frame_id=1}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %next = f16[8,8]{1,0} get-tuple-element(%gemm), index=0
  %stacked = f16[1,8,8]{2,1,0} bitcast(%next)
  %kept = f16[10,8,8]{2,1,0} fusion(%ys, %stacked, %i), kind=kLoop, calls=%fused_update
  ROOT %out = (s32[], f16[8,8]{1,0}, f16[10,8,8]{2,1,0}, f16[10,8,8]{2,1,0}) tuple(%i, %next, %ws, %kept)
}

%condition (state.1: (s32[], f16[8,8], f16[10,8,8], f16[10,8,8])) -> pred[] {
  %state.1 = (s32[], f16[8,8]{1,0}, f16[10,8,8]{2,1,0}, f16[10,8,8]{2,1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (start: (s32[], f16[8,8], f16[10,8,8], f16[10,8,8])) -> f16[8,8] {
  %start = (s32[], f16[8,8]{1,0}, f16[10,8,8]{2,1,0}, f16[10,8,8]{2,1,0}) parameter(0)
  %loop = (s32[], f16[8,8]{1,0}, f16[10,8,8]{2,1,0}, f16[10,8,8]{2,1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  ROOT %result = f16[8,8]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_a_module_is_read():
    module = parse(MODULE)
    assert module.entry == "main" and module.aliases == {0: 1, 2: 0}
    (gemm,) = products(MODULE)
    assert (gemm.kind, gemm.operands, gemm.result, gemm.unit) == ("dot", ("f16", "f16"), "f16", "16 bits")
    assert (gemm.flops, gemm.times) == (2 * 8 * 8 * 8, 10)
    assert (gemm.scope, gemm.source) == ("jit(step)/Net/dot_general", "model.py:12 (loss)")


def test_loops_run_over_slices_of_what_they_stack():
    moved = {kernel.name: (kernel.read, kernel.written, kernel.times) for kernel in kernels(MODULE)}
    layer = 8 * 8 * 2
    assert moved == {
        "w": (layer + 4, layer, 10),  # one layer's weights and the counter, not all ten
        "gemm": (2 * layer, layer, 10),  # without the workspace of cuBLAS
        "kept": (layer + 4, layer, 10),
    }
    assert unknown_loops(MODULE) == 0
    unknown = MODULE.replace('{"known_trip_count":{"n":"10"}}', "{}")
    assert unknown_loops(unknown) == 1 and traffic(unknown) == traffic(MODULE) / 10


def entry(*instructions, header=""):
    """A module whose entry computation has these instructions."""
    return "\n".join([f"HloModule step{header}", "", "ENTRY %main () -> f32[] {", *instructions, "}"])


def test_only_the_workspace_of_a_library_is_left_out():
    """The workspace is the last of several results, in 8 bits."""
    gemm = 'custom-call(%x), custom_call_target="__cublas$gemm"'
    for result, instruction, written in (
        ("(f16[8], s8[64])", gemm, 16),
        ("(f16[8], f32[64])", gemm, 16 + 256),
        ("s8[64]", gemm, 64),
        ("(f16[8], s8[64])", "fusion(%x), kind=kLoop, calls=%fused", 16 + 64),
    ):
        (kernel,) = kernels(entry("%x = f16[8] parameter(0)", f"ROOT %out = {result} {instruction}"))
        assert (kernel.read, kernel.written) == (16, written)


BRANCHES = """HloModule step

%double (a: f32[64]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  ROOT %twice = f32[64]{0} multiply(%a, %a)
}

%zeros (b: f32[64]) -> f32[64] {
  %b = f32[64]{0} parameter(0)
  ROOT %none = f32[64]{0} negate(%b)
}

ENTRY %main (which: pred[], x: f32[64]) -> f32[64] {
  %which = pred[] parameter(0)
  %x = f32[64]{0} parameter(1)
  %called = f32[64]{0} call(%x), to_apply=%double
  ROOT %out = f32[64]{0} conditional(%which, %called, %called), branch_computations={%double, %zeros}
}
"""


def test_calls_and_all_branches_count_once():
    assert [(kernel.name, kernel.times) for kernel in kernels(BRANCHES)] == [("twice", 1), ("twice", 1), ("none", 1)]


SCATTER = """HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (table: f32[100,8], rows: s32[2,1], new: f32[2,8]) -> f32[100,8] {
  %table = f32[100,8]{1,0} parameter(0)
  %rows = s32[2,1]{1,0} parameter(1)
  %new = f32[2,8]{1,0} parameter(2)
  ROOT %scatter = f32[100,8]{1,0} scatter(%table, %rows, %new), to_apply=%add
}

ENTRY %main (t: f32[100,8], r: s32[2,1], n: f32[2,8]) -> f32[100,8] {
  %t = f32[100,8]{1,0} parameter(0)
  %r = s32[2,1]{1,0} parameter(1)
  %n = f32[2,8]{1,0} parameter(2)
  ROOT %out = f32[100,8]{1,0} fusion(%t, %r, %n), kind=kInput, calls=%fused
}
"""


def test_a_scatter_reads_and_writes_the_rows_that_it_adds_to():
    (kernel,) = kernels(SCATTER)
    assert (kernel.read, kernel.written) == (2 * 4 + 2 * (2 * 8 * 4), 2 * 8 * 4)


def test_what_is_made_in_the_kernel_is_written_as_a_whole():
    fresh = SCATTER.replace("%table = f32[100,8]{1,0} parameter(0)", "%table = f32[100,8]{1,0} broadcast(%rows)")
    (kernel,) = kernels(fresh)
    assert kernel.written == 100 * 8 * 4


def test_an_array_that_is_updated_with_itself_is_read_as_a_whole():
    x, i = "%x = f32[8] parameter(0)", "%i = s32[] parameter(1)"
    (kernel,) = kernels(entry(x, i, "ROOT %out = f32[8] dynamic-update-slice(%x, %x, %i)"))
    assert kernel.read == 8 * 4 + 4


# Products


def test_a_dot_that_contracts_nothing():
    operands = ("%a = f32[4] parameter(0)", "%b = f32[6] parameter(1)")
    (found,) = products(entry(*operands, "ROOT %out = f32[4,6] dot(%a, %b), lhs_contracting_dims={}"))
    assert found.flops == 2 * 4 * 6


def calls(target, left, right, result, rest=""):
    return entry(
        f"%left = {left} parameter(0)",
        f"%right = {right} parameter(1)",
        f"ROOT %out = ({result}, u8[64]{{0}}) custom-call(%left, %right), "
        f'custom_call_target="__cudnn${target}", {rest}',
    )


@pytest.mark.parametrize(
    ("target", "left", "right", "result"),
    [
        ("convForward", "f16[8,32,32,16]", "f16[24,3,3,16]", "f16[8,16,16,24]"),
        ("convBackwardInput", "f16[8,16,16,24]", "f16[24,3,3,16]", "f16[8,32,32,16]"),
        ("convBackwardFilter", "f16[8,32,32,16]", "f16[8,16,16,24]", "f16[24,3,3,16]"),
    ],
)
def test_a_convolution_and_its_gradients_have_the_same_flops(target, left, right, result):
    (found,) = products(calls(target, left, right, result, "window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f"))
    assert (found.kind, found.operands, found.result) == ("convolution", ("f16", "f16"), "f16")
    assert found.flops == 2 * (8 * 16 * 16 * 24) * (3 * 3 * 16)


@pytest.mark.parametrize(("groups", "channels"), [("", 24), (", feature_group_count=2", 12)])
def test_the_zeros_of_a_dilated_convolution_are_not_counted(groups, channels):
    (found,) = products(
        entry(
            "%x = f32[8,16,16,16] parameter(0)",
            "%kernel = f32[3,3,16,24] parameter(1)",
            "ROOT %y = f32[8,32,32,24] convolution(%x, %kernel), window={size=3x3 lhs_dilate=2x2}, "
            f"dim_labels=b01f_01io->b01f{groups}",
        )
    )
    assert (found.kind, found.flops, found.unit) == ("convolution", 2 * (8 * 16 * 16 * 16) * (3 * 3 * channels), "tf32")


SCORES = 'backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["2","4","64","96"]}}}'


@pytest.mark.parametrize(
    ("target", "config", "products_of_its_size"),
    [
        ("fmhaSoftmax", SCORES, 2),
        ("fmhaSoftmaxBackward", SCORES, 5),
        ("fmhaSoftmaxBackwardF8", SCORES, 5),
        ("fmhaSoftmax", "", 0),
    ],
)
def test_attention(target, config, products_of_its_size):
    (found,) = products(calls(target, "bf16[2,64,4,32]", "bf16[2,96,4,32]", "bf16[2,64,4,32]", config))
    assert (found.kind, found.flops) == ("attention", products_of_its_size * 2 * (2 * 4 * 64 * 96) * 32)


@pytest.mark.parametrize(
    ("instruction", "unit"),
    [
        ("dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "tf32"),
        ("dot(%a, %b), lhs_contracting_dims={1}, operand_precision={highest,highest}", "float32"),
        ("dot(%a, %b), lhs_contracting_dims={1}, algorithm=dot_f32_f32_f32", "float32"),
        ("dot(%a, %b), lhs_contracting_dims={1}, algorithm=dot_tf32_tf32_f32", "tf32"),
        ("custom-call(%a, %b, %c), custom_call_target=\"__cublas$gemm\", backend_config={"
         '"lhs_contracting_dimensions":["1"],"operand_precision":["HIGHEST","HIGHEST"]}', "float32"),
    ],
)  # fmt: skip
def test_how_products_of_float32_multiply(instruction, unit):
    """The third operand, in float64, is what a call of cuBLAS adds: it does not multiply."""
    operands = ("%a = f32[4,16] parameter(0)", "%b = f32[16,32] parameter(1)", "%c = f64[4,32] parameter(2)")
    (found,) = products(entry(*operands, f"ROOT %out = f32[4,32] {instruction}"))
    assert (found.kind, found.flops, found.unit) == ("dot", 2 * 4 * 32 * 16, unit)


# Copies


ARGUMENTS = (
    "%w = f32[8,8]{1,0} parameter(0), metadata={op_name=\"params[\\'w\\']\"}",
    '%x = f32[8,8]{1,0} parameter(1), metadata={op_name="batch"}',
    "%made = f32[8,8]{1,0} fusion(%w, %x), kind=kLoop, calls=%fused",
)
SWAPPED = "donated buffers go to results of their shape in order. Return each new value where the old one stood."


@pytest.mark.parametrize(
    ("donated", "instructions", "cause"),
    [
        ({}, ["%copy = f32[8,8]{0,1} copy(%made)", "ROOT %out = f32[8,8]{0,1} negate(%copy)"],
         "another memory layout, for what reads it (fusion of made)"),
        ({}, ["%copy = f32[8,8]{0,1} copy(%x)", "ROOT %out = f32[8,8]{0,1} negate(%copy)"],
         "another memory layout, for what reads it (parameter of batch)"),
        ({1: 0}, ["%copy = f32[8,8]{1,0} copy(%made)", "ROOT %out = (f32[8,8], f32[8,8]) tuple(%made, %copy)"],
         "result loss is written over the donated argument params['w'], which is still read when it is computed: "
         + SWAPPED),
        ({}, ["%copy = f32[8,8]{1,0} copy(%x)", "%flat = f32[64]{0} bitcast(%copy)",
              "ROOT %out = (f32[64], f32[8,8]) tuple(%flat, %made)"],
         "result grads is the argument batch as it came in, not donated. Donate it, or leave it out."),
        ({}, ["%copy = f32[8,8]{1,0} copy(%made)", "ROOT %out = (f32[8,8], f32[8,8]) tuple(%made, %copy)"],
         "result loss is computed into another buffer first"),
        ({}, ["%copy = f32[8,8]{1,0} copy(%made)", "ROOT %out = (f32[8,8], f32[8,8], f32[8,8]) tuple(%w, %x, %copy)"],
         "result 2 is computed into another buffer first"),
        ({}, ["%flat = f32[8,8]{1,0} bitcast(%made)", "ROOT %copy = f32[8,8]{1,0} copy(%flat)"],
         "result grads is computed into another buffer first"),
        ({1: 0}, ["%copy = f32[8,8]{1,0} copy(%w)", "ROOT %out = (f32[8,8], f32[8,8]) tuple(%made, %made)"],
         f"the donated argument params['w'] is overwritten by result loss before it has been read by all: {SWAPPED}"),
        ({0: 1}, ["%copy = f32[8,8]{1,0} copy(%w)", "ROOT %out = f32[8,8]{1,0} negate(%copy)"],
         "the argument params['w'] is not donated, and a loop or an update in place changes its copy. Donate it."),
        ({}, ["%copy = f32[8,8]{1,0} copy(%made)", "ROOT %out = f32[8,8]{1,0} negate(%copy)"],
         "the compiler keeps a second copy of an intermediate value"),
    ],
)  # fmt: skip
def test_why_a_buffer_is_copied(donated, instructions, cause):
    pairs = ", ".join(f"{{{result}}}: ({argument}, {{}}, may-alias)" for result, argument in donated.items())
    text = entry(*ARGUMENTS, *instructions, header=f", input_output_alias={{ {pairs} }}")
    (copy,) = copies(text, {"grads": 0, "loss": 0})
    assert (copy.bytes, copy.times, copy.shape, copy.cause) == (2 * 4 * 64, 1, "f32[8,8]", cause)


def test_a_copy_in_a_loop_counts_each_time_and_one_of_a_few_numbers_does_not():
    copied = MODULE.replace("%gemm = (f16[8,8]{1,0}", "%again = f16[8,8]{1,0} copy(%h)\n  %gemm = (f16[8,8]{1,0}")
    (copy,) = copies(copied, 0)
    assert (copy.bytes, copy.times) == (10 * 2 * 2 * 64, 10)
    assert copy.cause == "inside a loop or a branch: a carried value is changed while its old one is still read"
    small = entry("%x = f32[16] parameter(0)", "ROOT %copy = f32[16] copy(%x)")
    assert copies(small, 0) == () and kernels(small)


def test_results_and_arguments_without_a_name():
    """A single result has no path, and XLA may drop the names of arguments."""
    argument, copy = "%x = f32[8,8]{1,0} parameter(0)", "ROOT %copy = f32[8,8]{1,0} copy(%x)"
    (found,) = copies(entry(argument, copy), 0)
    assert found.cause == "the result is the argument x as it came in, not donated. Donate it, or leave it out."


@pytest.mark.parametrize(
    ("root", "cause"),
    [
        ("ROOT %out = (f32[8,8]) tuple(%copy)", "result 0 is computed into another buffer first"),
        ("ROOT %out = f32[8,8] negate(%copy)", "the compiler keeps a second copy of an intermediate value"),
    ],
)
def test_a_copy_of_what_could_not_be_read(root, cause):
    """The text has no specification: lines that do not parse are skipped."""
    lines = ("%x = of another form", "%flat = f32[8,8]{1,0} bitcast(%x)", "%copy = f32[8,8]{1,0} copy(%flat)", root)
    (found,) = copies(entry(*lines))
    assert found.cause == cause


def test_donated_arguments_that_nothing_is_written_over():
    header = ", input_output_alias={ {0}: (0, {}, may-alias) }, buffer_donor={ (0, {}), (1, {}) }"
    assert unused_donors(entry(*ARGUMENTS, header=header)) == ("batch f32[8,8]",)


# Sums in 16 bits and collectives


REDUCED = """HloModule step

%add_f16 (a: f16[], b: f16[]) -> f16[] {
  %a = f16[] parameter(0)
  %b = f16[] parameter(1)
  ROOT %sum = f16[] add(%a, %b)
}

%max_f16 (c: f16[], d: f16[]) -> f16[] {
  %c = f16[] parameter(0)
  %d = f16[] parameter(1)
  ROOT %largest = f16[] maximum(%c, %d)
}

%add_f32 (e: f32[], f: f32[]) -> f32[] {
  %e = f32[] parameter(0)
  %f = f32[] parameter(1)
  ROOT %wide = f32[] add(%e, %f)
}

ENTRY %main (x: f16[64,8]) -> f16[8] {
  %x = f16[64,8]{1,0} parameter(0)
  %zero = f16[] constant(0)
  %total = f16[8]{0} reduce(%x, %zero), dimensions={0}, to_apply=%add_f16, metadata={op_name="jit(step)/Norm/reduce_sum"}
  %top = f16[8]{0} reduce(%x, %zero), dimensions={0}, to_apply=%max_f16
  %running = f32[64,8]{1,0} reduce-window(%x, %zero), window={size=64x1}, to_apply=%add_f16
  %fine = f32[8]{0} reduce(%x, %zero), dimensions={0}, to_apply=%add_f32
  %mapped = f16[8]{0} map(%total, %top), to_apply=%add_f16
  %start = f16[8]{0} all-reduce-start(%total), to_apply=%add_f16, metadata={op_name="jit(step)/psum"}
  %done = f16[8]{0} all-reduce-done(%start)
  ROOT %gathered = f16[4,8]{1,0} all-gather(%done), dimensions={0}
}
"""  # noqa: E501


def test_sums_in_16_bits_are_those_whose_addition_is():
    assert sixteen_bit_sums(REDUCED) == (
        NarrowSum("reduce", "f16[8]", "jit(step)/Norm/reduce_sum", ""),
        NarrowSum("reduce-window", "f16[64,8]", "", ""),
        NarrowSum("all-reduce", "f16[8]", "jit(step)/psum", ""),
    )


def test_collectives_have_the_bytes_of_their_results():
    assert collectives(REDUCED) == (
        Collective("all-reduce", ("f16",), 16, 1, "jit(step)/psum", ""),
        Collective("all-gather", ("f16",), 64, 1, "", ""),
    )
