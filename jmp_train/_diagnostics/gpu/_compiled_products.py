"""The dots, convolutions and attentions of a compiled module: their dtypes, FLOPs, and the arithmetic they run in.

Decides which instructions multiply matrices: dots in fusions, and calls of cuBLAS and cuDNN. Does not decide bytes
(`_kernels.py`), nor FLOPs of a traced program (`jmp_train/_flops.py`): XLA rewrites products, so these are counted
from the module's shapes.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from ._gpus import GPU, get_gpu
from ._hlo import Instruction, Module, parse, shapes_of
from ._kernels import launches

_H200 = get_gpu("H200")

_GEMM_CALL = re.compile(r'custom_call_target="[^"]*(?:cublas|gemm|matmul)')
_ATTENTION_CALL = re.compile(r'custom_call_target="__cudnn\$fmha')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]')
_CUBLAS_CONTRACTION = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledProduct:
    """A dot, a convolution or a fused attention as it was compiled.

    Attributes:
      kind: `dot`, `convolution` or `attention`.
      operands: the dtypes of its operands, as XLA names them.
      result: the dtype of its result.
      unit: which of `UNITS` multiplies.
      flops: of one run.
      times: how often it runs.
      kernel: the name of the kernel it is in.
      scope, source: where it comes from, as for a kernel.
      line: its line of the module.
    """

    kind: str
    operands: tuple[str, ...]
    result: str
    unit: str
    flops: int
    times: int
    kernel: str
    scope: str
    source: str
    line: str


def products(text: str, gpu: GPU = _H200) -> list[CompiledProduct]:
    """Every dot, convolution and attention of one call.

    A row times a matrix is none of them: XLA makes it an elementwise product and a sum.
    """
    module = parse(text)
    found = []
    for launch in launches(module):
        outer = launch.instruction
        for each, shapes in _with_fusion_body(module, outer, launch.shapes):
            if kind := _kind(each):
                found.append(_product(module, each, kind, shapes, launch.times, outer.name, gpu))
    return found


def _with_fusion_body(
    module: Module, instruction: Instruction, shapes: Mapping[str, str]
) -> Iterator[tuple[Instruction, Mapping[str, str]]]:
    """An instruction and, if it is a fusion, those of its body, each with the shapes of its computation."""
    yield instruction, shapes
    body = module.called(instruction)
    inner = {each.name: each.shape for each in body}
    for each in body:
        yield from _with_fusion_body(module, each, inner)


def _kind(instruction: Instruction) -> str | None:
    if instruction.opcode == "convolution" or "__cudnn$conv" in instruction.line:
        return "convolution"
    if _ATTENTION_CALL.search(instruction.line):
        return "attention"
    if instruction.opcode == "dot" or _GEMM_CALL.search(instruction.line):
        return "dot"
    return None


def _product(
    module: Module, each: Instruction, kind: str, shapes: Mapping[str, str], times: int, kernel: str, gpu: GPU
) -> CompiledProduct:
    operands = [shape for name in each.operands if name in shapes for shape in shapes_of(shapes[name])]
    dtypes = tuple(dtype for dtype, _ in operands)
    left, right = operands[0][1], operands[1][1]
    result = shapes_of(each.shape)[0]
    if kind == "attention":
        flops = _attention_flops(each, left)
    else:
        flops = _dot_flops(each, left, result[1]) if kind == "dot" else _convolution_flops(each, left, right, result[1])
    # XLA writes a precision as `operand_precision={highest,highest}`, as `algorithm=dot_f32_f32_f32`, or in the JSON of
    # a cuBLAS call.
    algorithm = each.attribute("algorithm")
    is_strict = "highest" in each.attribute("operand_precision").lower() or "f32_f32_f32" in algorithm
    is_strict = is_strict or '"HIGHEST"' in each.line
    return CompiledProduct(
        kind=kind,
        operands=dtypes,
        result=result[0],
        unit=gpu.unit(dtypes[:2], is_strict, by_triton=each.opcode == "dot"),
        flops=flops,
        times=times,
        kernel=kernel,
        scope=each.scope,
        source=module.source_of(each),
        line=each.line,
    )


def _dot_flops(dot: Instruction, left: tuple[int, ...], result: tuple[int, ...]) -> int:
    dimensions = dot.attribute("lhs_contracting_dims")
    # A cuBLAS call has its dimension numbers in the JSON of its `backend_config`.
    if not dimensions and (found := _CUBLAS_CONTRACTION.search(dot.line)):
        dimensions = found.group(1).replace('"', "")
    return 2 * math.prod(result) * math.prod(left[int(d)] for d in dimensions.split(",") if d)


def _attention_flops(attention: Instruction, query: tuple[int, ...]) -> int:
    """FLOPs of two products of the size of `query @ key`, and of five backward; causal ones are not credited."""
    scores = _SCORES.search(attention.line)
    if scores is None:
        return 0
    sizes = (int(size.strip(' "')) for size in scores[1].split(","))
    number = 5 if "Backward" in attention.attribute("custom_call_target") else 2
    return number * 2 * math.prod(sizes) * query[-1]


def _convolution_flops(
    convolution: Instruction, left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]
) -> int:
    """FLOPs of the forward convolution: its two gradients have as many, and cuDNN's calls for them keep its labels."""
    # `dim_labels=b01f_01io->b01f`: of the input, the kernel and the result.
    kernel = re.split(r"_|->", convolution.attribute("dim_labels"))[1]
    if "convBackwardInput" in convolution.line:
        left, result = result, left
    elif "convBackwardFilter" in convolution.line:
        right, result = result, right
    window = math.prod(size for size, label in zip(right, kernel, strict=False) if label not in "o")
    if "lhs_dilate" not in convolution.line:
        return 2 * math.prod(result) * window
    # A dilated input: GPU kernels skip the zeros between its elements, so these are not counted.
    channels = right[kernel.index("o")]
    taps = math.prod(size for size, label in zip(right, kernel, strict=False) if label not in "io")
    return 2 * math.prod(left) * taps * channels // int(convolution.attribute("feature_group_count") or 1)
