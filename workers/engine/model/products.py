"""The two inner loops that attention and the output head spend their time in, as numba intrinsics.

Both hold all sums in registers and write them once. The number of vectors and their length are compile-time constants, so that
LLVM unrolls them; neither changes the order in which any one result is summed.
"""

# numba calls an intrinsic's function at compile time, with types in place of values: nothing here can be checked before that.
# mypy: ignore-errors

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from workers.engine.model import lanes
from workers.engine.model.lanes import WIDTH

_INTP = ir.IntType(64)


def _number(value: int) -> Any:
    return ir.Constant(_INTP, value)


@intrinsic(prefer_literal=True)
def dot_products(typing, queries, queries_at, keys, keys_at, keys_stride, out, count, size, chains, ahead):
    """Products of `count` vectors with sixteen columns: out[i * 16 + lane] = sum over d of queries[i][d] * keys[d][lane].

    queries: float32, vector i at queries_at + i * size. keys: float32 or bfloat16, row d at keys_at + d * keys_stride.
    count, size and chains are constants. Each result is summed in `chains` interleaved parts (part j takes d = j, j + chains,
    ...), added in order at the end: long enough to hide the latency of one sum, and the same whatever count is. Keys `ahead`
    rows further on are fetched meanwhile (a constant; 0: none).
    """
    vectors, length, parts = count.literal_value, size.literal_value, chains.literal_value
    distance = ahead.literal_value
    assert length % parts == 0, f"{length} values cannot be summed in {parts} equal parts"
    element_type = keys.dtype

    def code(context, builder, signature, arguments):
        query = lanes.address(context, builder, signature.args[0], arguments[0], arguments[1])
        key = lanes.address(context, builder, signature.args[2], arguments[2], arguments[3])
        result = lanes.address(context, builder, signature.args[5], arguments[5], _number(0))
        sums = lanes.variables(builder, vectors * parts)
        for variable in sums:
            builder.store(lanes.constant(0.0), variable)
        with lanes.loop(builder, _number(length // parts)) as turn:
            for part in range(parts):
                row = builder.add(builder.mul(turn.index, _number(parts)), _number(part))
                at = builder.mul(row, arguments[4])
                if distance:
                    later = builder.add(at, builder.mul(arguments[4], _number(distance)))
                    lanes.fetch(builder, builder.gep(key, [later]))
                column = lanes.read(builder, element_type, builder.gep(key, [at]))
                for vector in range(vectors):
                    at = builder.add(row, _number(vector * length))
                    factor = lanes.spread(builder, builder.load(builder.gep(query, [at])))
                    variable = sums[vector * parts + part]
                    builder.store(lanes.fused(builder, factor, column, builder.load(variable)), variable)
        for vector in range(vectors):
            value = builder.load(sums[vector * parts])
            for part in range(1, parts):
                value = builder.fadd(value, builder.load(sums[vector * parts + part]))
            lanes.write(builder, types.float32, builder.gep(result, [_number(vector * WIDTH)]), value)
        return context.get_dummy_value()

    integer = types.intp
    return types.none(queries, integer, keys, integer, integer, out, count, size, chains, ahead), code


@intrinsic(prefer_literal=True)
def add_weighted(typing, weights, scales, values, values_at, keys_count, sums, count, size):
    """sums[i] = sums[i] * scales[i * 16] + sum over j < keys_count of weights[i * 16 + j] * values[j], for `count` vectors.

    values: float32 or bfloat16, row j at values_at + j * size; sums: float32, vector i at i * size. count and size are
    constants, size a multiple of 16. Rows are added in order of j.
    """
    vectors, length = count.literal_value, size.literal_value
    assert length % WIDTH == 0, f"vectors of {length} values are not whole lanes"
    pieces = length // WIDTH
    element_type = values.dtype

    def code(context, builder, signature, arguments):
        weight = lanes.address(context, builder, signature.args[0], arguments[0], _number(0))
        scale = lanes.address(context, builder, signature.args[1], arguments[1], _number(0))
        value = lanes.address(context, builder, signature.args[2], arguments[2], arguments[3])
        target = lanes.address(context, builder, signature.args[5], arguments[5], _number(0))
        held = lanes.variables(builder, vectors * pieces)
        for index, variable in enumerate(held):
            old = lanes.read(builder, types.float32, builder.gep(target, [_number(index * WIDTH)]))
            factor = lanes.spread(builder, builder.load(builder.gep(scale, [_number(index // pieces * WIDTH)])))
            builder.store(builder.fmul(old, factor), variable)
        with lanes.loop(builder, arguments[4]) as turn:
            start = builder.mul(turn.index, _number(length))
            row = [
                lanes.read(builder, element_type, builder.gep(value, [builder.add(start, _number(piece * WIDTH))]))
                for piece in range(pieces)
            ]
            for vector in range(vectors):
                at = builder.add(turn.index, _number(vector * WIDTH))
                factor = lanes.spread(builder, builder.load(builder.gep(weight, [at])))
                for piece in range(pieces):
                    variable = held[vector * pieces + piece]
                    builder.store(lanes.fused(builder, factor, row[piece], builder.load(variable)), variable)
        for index, variable in enumerate(held):
            lanes.write(builder, types.float32, builder.gep(target, [_number(index * WIDTH)]), builder.load(variable))
        return context.get_dummy_value()

    integer = types.intp
    return types.none(weights, scales, values, integer, integer, sums, count, size), code


@intrinsic(prefer_literal=True)
def fetch_rows(typing, array, at, stride, rows, width):
    """Asks for `rows` rows of `width` values, `stride` apart, all of which will be read soon. All are constants."""
    bits = array.dtype.bitwidth
    starts = range(0, rows.literal_value * stride.literal_value, stride.literal_value)
    lines = sorted({(start + offset) * bits // 512 for start in starts for offset in range(width.literal_value)})

    def code(context, builder, signature, arguments):
        for line in lines:
            at = builder.add(arguments[1], _number(line * 512 // bits))
            lanes.fetch(builder, lanes.address(context, builder, signature.args[0], arguments[0], at))
        return context.get_dummy_value()

    return types.none(array, types.intp, stride, rows, width), code
