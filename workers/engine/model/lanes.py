"""Sixteen float32 values as one value inside numba kernels, with every operation and its order written down.

Compilers may not reorder float operations, so a kernel written in these gives the same bits for a row whatever thread, tail or
batch the row is in. LLVM maps the sixteen lanes to what the machine has: one register, two or four. Arrays are one-dimensional
and contiguous, of float32 or of uint16 holding bfloat16 bits; `at` is the index of the first of sixteen neighbours.
"""

# numba calls an intrinsic's function at compile time, with types in place of values: nothing here can be checked before that.
# mypy: ignore-errors

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from workers.engine.model import kernel_cache  # noqa: F401 - sets where the kernels that use this are kept

WIDTH = 16

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, WIDTH)
_INTS = ir.VectorType(_INT, WIDTH)
_SHORTS = ir.VectorType(ir.IntType(16), WIDTH)


class LanesType(types.Type):
    """numba's type of sixteen float32 values."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


# Pieces of code: each takes LLVM values and returns one.


def constant(value: float) -> Any:
    """Sixteen times the same float32."""
    return ir.Constant(_VECTOR, [ir.Constant(_FLOAT, value)] * WIDTH)


def _ints(value: int) -> Any:
    return ir.Constant(_INTS, [value] * WIDTH)


def _lane_numbers() -> Any:
    return ir.Constant(_INTS, list(range(WIDTH)))


def fused(builder: Any, first: Any, second: Any, addend: Any) -> Any:
    """first * second + addend, rounded once."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{WIDTH}f32")
    return builder.call(function, (first, second, addend))


def spread(builder: Any, scalar: Any) -> Any:
    """The scalar in every lane."""
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), _ints(0))


def address(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    """The address of array[at], without a check."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [at])


def read(builder: Any, element_type: Any, pointer: Any) -> Any:
    """Sixteen neighbours from an address, as float32."""
    if element_type == types.uint16:
        halves = builder.load(builder.bitcast(pointer, _SHORTS.as_pointer()), align=2)
        bits = builder.shl(builder.zext(halves, _INTS), _ints(16))
        return builder.bitcast(bits, _VECTOR)
    return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)


def fetch(builder: Any, pointer: Any) -> None:
    """Asks for the cache line of an address, which will be read soon; the address need not be valid."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read_access, keep, data = (ir.Constant(number, value) for value in (0, 3, 1))
    builder.call(function, (builder.bitcast(pointer, byte), read_access, keep, data))


def write(builder: Any, element_type: Any, pointer: Any, lanes: Any) -> None:
    """Sixteen neighbours to an address; to bfloat16 by rounding to nearest, ties to even."""
    if element_type == types.uint16:
        bits = builder.bitcast(lanes, _INTS)
        odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _ints(0x7FFF))), _ints(16))
        builder.store(builder.trunc(rounded, _SHORTS), builder.bitcast(pointer, _SHORTS.as_pointer()), align=2)
    else:
        builder.store(lanes, builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)


_EXP_TERMS = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_FIRST = 1.9875691500e-4
_EXP_LOW, _EXP_HIGH = -87.0, 88.0
_ROUNDER = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits


def exponential(builder: Any, value: Any) -> Any:
    """exp in each lane, exact at 0; 0 below -87, held at exp(88) above; within 2 units in the last place (Cephes, expf)."""
    clamped = builder.select(builder.fcmp_ordered("<", value, constant(_EXP_LOW)), constant(_EXP_LOW), value)
    clamped = builder.select(builder.fcmp_ordered(">", clamped, constant(_EXP_HIGH)), constant(_EXP_HIGH), clamped)
    shifted = fused(builder, clamped, constant(1.4426950408889634), constant(_ROUNDER))
    whole = builder.fsub(shifted, constant(_ROUNDER))
    rest = fused(builder, whole, constant(-0.693359375), clamped)
    rest = fused(builder, whole, constant(2.12194440e-4), rest)
    series = constant(_EXP_FIRST)
    for term in _EXP_TERMS:
        series = fused(builder, series, rest, constant(term))
    series = fused(builder, builder.fmul(series, rest), rest, rest)
    series = builder.fadd(series, constant(1.0))
    exponent = builder.shl(builder.add(builder.bitcast(shifted, _INTS), _ints(127)), _ints(23))
    result = builder.fmul(series, builder.bitcast(exponent, _VECTOR))
    return builder.select(builder.fcmp_ordered("<", value, constant(_EXP_LOW)), constant(0.0), result)


def hyperbolic_tangent(builder: Any, value: Any) -> Any:
    """tanh in each lane as 1 - 2 / (exp(2 x) + 1): within 1.2e-7 of it, absolutely."""
    grown = exponential(builder, builder.fadd(value, value))
    return builder.fsub(constant(1.0), builder.fdiv(constant(2.0), builder.fadd(grown, constant(1.0))))


def halved(builder: Any, lanes: Any, combine: Any) -> Any:
    """One value from sixteen by a fixed tree: lane i with lane i + 8, then 4, 2, 1."""
    distance = WIDTH // 2
    while distance:
        order = [(lane + distance) % WIDTH for lane in range(WIDTH)]
        other = builder.shuffle_vector(lanes, lanes, ir.Constant(_INTS, order))
        lanes = combine(lanes, other)
        distance //= 2
    return builder.extract_element(lanes, ir.Constant(_INT, 0))


def larger(builder: Any, first: Any, second: Any) -> Any:
    """The larger of two in each lane; second where first is not a number."""
    return builder.select(builder.fcmp_ordered(">", first, second), first, second)


# The same as functions to call in kernels.


def _element_type(array_type: Any) -> Any:
    assert array_type.ndim == 1, f"lanes are read from flat arrays, not {array_type}"
    assert array_type.dtype in (types.float32, types.uint16), f"lanes are float32 or bfloat16 bits, not {array_type}"
    return array_type.dtype


@intrinsic
def load(typing, array, at):
    """Sixteen neighbours of array from index at."""
    element_type = _element_type(array)

    def code(context, builder, signature, arguments):
        return read(builder, element_type, address(context, builder, signature.args[0], *arguments))

    return LANES(array, types.intp), code


@intrinsic
def store(typing, array, at, lanes):
    """Writes sixteen neighbours of array from index at."""
    element_type = _element_type(array)

    def code(context, builder, signature, arguments):
        pointer = address(context, builder, signature.args[0], arguments[0], arguments[1])
        write(builder, element_type, pointer, arguments[2])
        return context.get_dummy_value()

    return types.none(array, types.intp, LANES), code


@intrinsic
def splat(typing, scalar):
    """A float32 in every lane."""
    return LANES(types.float32), lambda context, builder, signature, arguments: spread(builder, arguments[0])


@intrinsic
def add(typing, first, second):
    """first + second in each lane."""
    return LANES(LANES, LANES), lambda context, builder, signature, arguments: builder.fadd(*arguments)


@intrinsic
def sub(typing, first, second):
    """first - second in each lane."""
    return LANES(LANES, LANES), lambda context, builder, signature, arguments: builder.fsub(*arguments)


@intrinsic
def mul(typing, first, second):
    """first * second in each lane."""
    return LANES(LANES, LANES), lambda context, builder, signature, arguments: builder.fmul(*arguments)


@intrinsic
def div(typing, first, second):
    """first / second in each lane."""
    return LANES(LANES, LANES), lambda context, builder, signature, arguments: builder.fdiv(*arguments)


@intrinsic
def fma(typing, first, second, addend):
    """first * second + addend in each lane, rounded once."""
    return LANES(LANES, LANES, LANES), lambda context, builder, signature, arguments: fused(builder, *arguments)


@intrinsic
def exp(typing, value):
    """exp in each lane."""
    return LANES(LANES), lambda context, builder, signature, arguments: exponential(builder, arguments[0])


@intrinsic
def tanh(typing, value):
    """tanh in each lane."""
    return LANES(LANES), lambda context, builder, signature, arguments: hyperbolic_tangent(builder, arguments[0])


@intrinsic
def total(typing, lanes):
    """The sum of the sixteen, by a fixed tree."""

    def code(context, builder, signature, arguments):
        return halved(builder, arguments[0], builder.fadd)

    return types.float32(LANES), code


@intrinsic
def greatest(typing, lanes):
    """The largest of the sixteen."""

    def code(context, builder, signature, arguments):
        return halved(builder, arguments[0], lambda first, second: larger(builder, first, second))

    return types.float32(LANES), code


@intrinsic
def between(typing, lanes, begin, end):
    """The lanes in [begin, end); minus infinity in the others."""

    def code(context, builder, signature, arguments):
        begin_lanes, end_lanes = (spread_int(builder, builder.trunc(bound, _INT)) for bound in arguments[1:])
        below = builder.icmp_signed("<", _lane_numbers(), end_lanes)
        keep = builder.and_(below, builder.icmp_signed(">=", _lane_numbers(), begin_lanes))
        return builder.select(keep, arguments[0], constant(float("-inf")))

    return LANES(LANES, types.intp, types.intp), code


def spread_int(builder: Any, scalar: Any) -> Any:
    """The 32-bit integer in every lane."""
    one = builder.insert_element(ir.Constant(_INTS, ir.Undefined), scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, ir.Constant(_INTS, ir.Undefined), _ints(0))


def loop(builder: Any, count: Any) -> Any:
    """A counted loop around what is built inside it; gives the index."""
    return cgutils.for_range(builder, count, intp=count.type)


def variables(builder: Any, count: int) -> list[Any]:
    """Lanes that live across a loop; LLVM keeps them in registers."""
    return [cgutils.alloca_once(builder, _VECTOR) for _ in range(count)]
