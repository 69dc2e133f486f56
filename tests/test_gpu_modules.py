"""The text of a compiled module is read right: a loop of ten steps, written by hand. Needs no compiler."""

from jmp_train._diagnostics.gpu._compiled_products import products
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
    assert (gemm.operands, gemm.result, gemm.unit) == (("f16", "f16"), "f16", "16 bits")
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
