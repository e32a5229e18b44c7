"""Register tiles of attention: scores of several queries and keys, and their shares of several values.

A score is 16 chains of fused multiply-adds, chain i over numbers i, i + 16, .. of the head, and a tree of
sums of neighbours; an output is one chain over the keys. A tile computes many of them at once, and puts sums
down and takes them up where registers end; neither changes a bit.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from hemiola.plugins.cpu.registers import LANES, REGISTERS
from hemiola.plugins.cpu.simd import CROWDED, F32, I32, INTS, LONG, VECTOR, intrinsic, place

KEYS = 4  # of a tile of scores
CHAINS = 1 if CROWDED else 2  # of each score that a tile has in registers
PANEL = 1 if CROWDED else 2  # vectors of queries that a tile of scores has at most
PARTIALS = LANES // CHAINS * KEYS * PANEL * LANES  # numbers that a tile of scores puts down
ROWS = 4  # queries of a tile of outputs


def _widest(rows: int) -> int:
    """Vectors of a tile of outputs: for its sums, and for values that are not read once."""
    values = 0 if rows == 1 and REGISTERS.lanes > 4 else 1  # AVX multiplies what lies in memory
    return next(n for n in (4, 2, 1) if n == 1 or n * (rows + values) < REGISTERS.vectors)


WIDEST = (0, *(_widest(rows) for rows in range(1, ROWS + 1)))


def _load(b: Any, address: Any, offset: Any) -> Any:
    return b.load(place(b, address, offset, VECTOR), align=4)


def _store(b: Any, value: Any, address: Any, offset: Any) -> None:
    b.store(value, place(b, address, offset, VECTOR), align=4)


def _splat(b: Any, address: Any, offset: Any) -> Any:
    """The number there in every lane."""
    nothing = ir.Constant(VECTOR, ir.Undefined)
    number = b.load(place(b, address, offset, F32), align=4)
    return b.shuffle_vector(b.insert_element(nothing, number, I32(0)), nothing, INTS([0] * LANES))


def _fma(b: Any, x: Any, y: Any, sum_: Any) -> None:
    """sum_ += x * y, for a sum in an alloca, which LLVM makes a register."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.fma.v16f32")
    b.store(b.call(function, [x, y, b.load(sum_)]), sum_)


def _tree(b: Any, values: list[Any]) -> Any:
    while len(values) > 1:
        values = [b.fadd(values[n], values[n + 1]) for n in range(0, len(values), 2)]
    return values[0]


def _scores(b: Any, vectors: int, queries: Any, keys: Any, key_len: Any, depth: Any, partials: Any, to: Any):
    width = LANES * vectors
    outputs = [(key, v) for key in range(KEYS) for v in range(vectors)]
    sums = [{output: cgutils.alloca_once(b, VECTOR) for output in outputs} for _ in range(CHAINS)]
    lines = [b.mul(key_len, LONG(key)) for key in range(KEYS)]
    with cgutils.for_range(b, LONG(LANES // CHAINS)) as group:
        for chain in sums:
            for sum_ in chain.values():
                b.store(ir.Constant(VECTOR, [-0.0] * LANES), sum_)  # with it the first sum is the product
        with cgutils.for_range(b, b.lshr(depth, LONG(4))) as block:
            first = b.add(b.mul(block.index, LONG(LANES)), b.mul(group.index, LONG(CHAINS)))
            for n, chain in enumerate(sums):
                d = b.add(first, LONG(n))
                at = b.mul(d, LONG(width))
                query = [_load(b, queries, b.add(at, LONG(LANES * v))) for v in range(vectors)]
                for key in range(KEYS):
                    number = _splat(b, keys, b.add(lines[key], d))
                    for v in range(vectors):
                        _fma(b, number, query[v], chain[key, v])
        for n, output in enumerate(outputs):
            value = _tree(b, [b.load(chain[output]) for chain in sums])
            _store(b, value, partials, b.add(b.mul(group.index, LONG(KEYS * width)), LONG(LANES * n)))
    with cgutils.for_range(b, LONG(len(outputs))) as output:
        at = b.mul(output.index, LONG(LANES))
        parts = [_load(b, partials, b.add(at, LONG(KEYS * width * n))) for n in range(LANES // CHAINS)]
        _store(b, _tree(b, parts), to, at)


@intrinsic
def score_tile(
    typing: Any,
    vectors: Any,  # of queries, at most PANEL
    queries: Any,  # address of numbers [depth, 16 * vectors]
    keys: Any,  # address of the first key's first number
    key_len: Any,  # numbers from key to key
    depth: Any,
    partials: Any,  # address of room for PARTIALS numbers
    scores: Any,  # address of numbers [KEYS, 16 * vectors]
) -> Any:
    """scores = keys times queries."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _switch(builder, args[0], {n: lambda n=n: _scores(builder, n, *args[1:]) for n in {1, PANEL}})
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), build


def _outputs(
    b: Any, num_rows: int, vectors: int, shares: Any, key_step: Any, row_step: Any, values: Any, places: Any,
    num_keys: Any, kept: Any, sums: Any, sum_len: Any,
) -> None:  # fmt: skip
    outputs = [(row, v) for row in range(num_rows) for v in range(vectors)]
    rows = [b.mul(row_step, LONG(row)) for row in range(num_rows)]
    at = {(row, v): b.add(b.mul(sum_len, LONG(row)), LONG(LANES * v)) for row, v in outputs}
    chains = {output: cgutils.alloca_once(b, VECTOR) for output in outputs}
    for row, v in outputs:
        b.store(b.fmul(_load(b, sums, at[row, v]), _splat(b, kept, LONG(row))), chains[row, v])
    with cgutils.for_range(b, num_keys) as key:
        value_at = b.load(place(b, places, key.index, LONG), align=8)
        value = [_load(b, values, b.add(value_at, LONG(LANES * v))) for v in range(vectors)]
        step = b.mul(key.index, key_step)
        for row in range(num_rows):
            share = _splat(b, shares, b.add(step, rows[row]))
            for v in range(vectors):
                _fma(b, share, value[v], chains[row, v])
    for output in outputs:
        _store(b, b.load(chains[output]), sums, at[output])


@intrinsic
def output_tile(
    typing: Any,
    rows: Any,  # queries, at most ROWS
    vectors: Any,  # of each, WIDEST[rows] or 1
    shares: Any,  # address of the first key's share in the first query
    key_step: Any,  # numbers from one key's share to the next one's
    row_step: Any,  # and from one query's
    values: Any,  # address from which places count
    places: Any,  # address of the first key's place, an int64
    num_keys: Any,
    kept: Any,  # address of a number for each query
    sums: Any,  # address of the first query's outputs so far
    sum_len: Any,  # numbers from query to query
) -> Any:
    """sums = kept * sums + shares times values."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, vectors, *rest = args
        shapes = sorted({(n, width) for n in range(1, ROWS + 1) for width in (1, WIDEST[n])})
        shape = builder.add(builder.shl(vectors, LONG(8)), rows)
        cases = {
            (width << 8) + n: lambda n=n, width=width: _outputs(builder, n, width, *rest)
            for n, width in shapes
        }
        _switch(builder, shape, cases)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), build


def _switch(b: Any, value: Any, cases: Any) -> None:
    """The code of one case; nothing for other values."""
    end = b.append_basic_block("end")
    switch = b.switch(value, end)
    for number, emit in cases.items():
        block = b.append_basic_block("tile")
        switch.add_case(LONG(number), block)
        b.position_at_end(block)
        emit()
        b.branch(end)
    b.position_at_end(end)
