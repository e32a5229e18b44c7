"""Tiles of a matrix product: sums of a few rows and outputs that stay in registers while weights stream by.

Every sum is one chain of fused multiply-adds in the order of the inner dimension. A chain may be put down in
memory and taken up again, which changes no bit, so tiles are cut as the CPU's registers want them.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types

from hemiola.plugins.cpu.registers import REGISTERS
from hemiola.plugins.cpu.simd import F32, HALF, I32, INTS, LANES, LONG, VECTOR, intrinsic

STRIP = 2 * LANES  # outputs whose weights lie together
DEPTH = 256  # numbers from one row of x to the next, and the most that a tile takes of them
CHAINS = 8  # registers of sums that hide how long a multiply-add takes: two begin at a time, each takes four
VECTORS = 2 if REGISTERS.vectors >= 2 * CHAINS else 1  # outputs of a tile, in vectors
# most rows of a tile: sums have three quarters of the registers
HEIGHT = REGISTERS.vectors * 3 // 4 // VECTORS


def _abreast() -> tuple[int, ...]:
    """Strips side by side in a tile of 1, 2, .. rows: enough chains, while a tile of VECTORS has too few."""
    strip, found = 2 * REGISTERS.parts, [-(-CHAINS // (2 * REGISTERS.parts))]
    for rows in range(2, HEIGHT):
        if rows * VECTORS * REGISTERS.parts >= CHAINS or (rows + 1) * strip >= REGISTERS.number:
            break
        found.append(-(-CHAINS // (rows * strip)))
    return tuple(found)


ABREAST = _abreast()
FEW = HEIGHT if VECTORS == 2 else len(ABREAST)  # rows for which bfloat16 is widened on its way
SHAPES = [(rows, 2 * n) for rows, most in enumerate(ABREAST, 1) for n in {1, most}]
SHAPES += [(rows, VECTORS) for rows in range(len(ABREAST) + 1, HEIGHT + 1)]
LINE = 64  # bytes of a cache line
PAUSE = 16  # inner numbers between two fetches of a row's sums, and at most between two of weights
AHEAD = 1536  # bytes of a strip that are on their way while a tile of few rows multiplies
READ, WRITE, SECOND, NEAREST = 0, 1, 2, 3  # what LLVM's prefetch is told: why, and to which cache


class _Code(NamedTuple):
    """What a tile's code is made from; see _tile."""

    builder: Any
    x: Any
    weight: Any
    strip_len: Any
    count: Any
    y: Any
    y_len: Any
    going_on: Any
    soon: Any
    soon_step: Any
    pause: Any
    y_soon: Any

    def emit(self, rows: int, vectors: int, halves: bool) -> None:
        """sums = y if going_on else 0; for k in range(count): sums += x[:, k] * weight[k]; y = sums"""
        b = self.builder
        fma = self.function("llvm.fma.v16f32", VECTOR, VECTOR, VECTOR, VECTOR)
        places = [self.output(self.y, row, v) for row in range(rows) for v in range(vectors)]
        sums = [cgutils.alloca_once(b, VECTOR) for _ in places]  # LLVM makes them registers
        with b.if_else(b.icmp_signed("!=", self.going_on, LONG(0))) as (taken_up, begun):
            with taken_up:
                for place, sum_ in zip(places, sums, strict=True):
                    b.store(b.load(place, align=4), sum_)
            with begun:
                for sum_ in sums:
                    b.store(ir.Constant(VECTOR, [0.0] * LANES), sum_)
        with cgutils.for_range(b, self.count) as loop:
            self.fetch(loop.index, rows, vectors, halves)
            weights = self.weights(loop.index, vectors, halves)
            for row in range(rows):
                x = self.splat(b.add(loop.index, LONG(row * DEPTH)))
                for weight, sum_ in zip(weights, sums[row * vectors : (row + 1) * vectors], strict=True):
                    b.store(b.call(fma, [x, weight, b.load(sum_)]), sum_)
        for place, sum_ in zip(places, sums, strict=True):
            b.store(b.load(sum_), place, align=4)

    def place(self, base: Any, offset: Any, kind: Any, element: Any = F32) -> Any:
        start = self.builder.gep(self.builder.inttoptr(base, element.as_pointer()), [offset])
        return self.builder.bitcast(start, kind.as_pointer())

    def output(self, y: Any, row: int, v: int) -> Any:
        b = self.builder
        return self.place(y, b.add(b.mul(self.y_len, LONG(row)), LONG(LANES * v)), VECTOR)

    def splat(self, offset: Any) -> Any:
        b, nothing = self.builder, ir.Constant(VECTOR, ir.Undefined)
        number = b.load(self.place(self.x, offset, F32), align=4)
        return b.shuffle_vector(b.insert_element(nothing, number, I32(0)), nothing, INTS([0] * LANES))

    def weights(self, k: Any, vectors: int, halves: bool) -> list[Any]:
        """The k-th weights of a tile's outputs, widened."""
        b, found = self.builder, []
        for strip in range(-(-vectors // 2)):
            at = b.add(b.mul(self.strip_len, LONG(strip)), b.mul(k, LONG(STRIP)))
            if halves:
                found += self.halves(self.weight, at)
            else:
                places = [b.add(at, LONG(LANES * v)) for v in range(min(vectors, 2))]
                found += [b.load(self.place(self.weight, place, VECTOR), align=4) for place in places]
        return found

    def halves(self, base: Any, at: Any) -> list[Any]:
        """32 bfloat16 weights, widened; two of them lie in 32 bits."""
        b = self.builder
        pairs = b.load(self.place(base, at, INTS, HALF), align=2)
        low, high = b.shl(pairs, INTS([16] * LANES)), b.and_(pairs, INTS([0xFFFF0000] * LANES))
        return [b.bitcast(low, VECTOR), b.bitcast(high, VECTOR)]

    def fetch(self, k: Any, rows: int, vectors: int, halves: bool) -> None:
        """Bring nearer what is wanted soon, bit by bit: what is on its way keeps other loads waiting."""
        b, strips = self.builder, -(-vectors // 2)
        if rows <= len(ABREAST):  # the same strips' weights, behind their last ones those of the next strips
            size = (2 if halves else 4) * STRIP
            later = b.add(k, LONG(AHEAD // size))
            beyond = b.sub(self.soon, b.mul(self.count, LONG(size)))
            start = b.select(b.icmp_signed("<", later, self.count), self.weight, beyond)
            self.fetch_weights(start, b.mul(later, LONG(size)), strips, halves, NEAREST)
            return
        with b.if_then(self.each(k, self.pause)):
            self.fetch_weights(self.soon, b.mul(k, self.soon_step), strips, halves, SECOND)
        with b.if_then(self.each(k, LONG(PAUSE))):
            row = b.mul(b.sdiv(k, LONG(PAUSE)), b.mul(self.y_len, LONG(4)))
            for byte in (*range(0, 4 * LANES * vectors, LINE), 4 * LANES * vectors - 1):
                self.prefetch(b.add(b.add(self.y_soon, row), LONG(byte)), WRITE, NEAREST)

    def each(self, k: Any, pause: Any) -> Any:
        """Whether this is one of every `pause` inner numbers."""
        b = self.builder
        return b.icmp_signed("==", b.and_(k, b.sub(pause, LONG(1))), LONG(0))

    def fetch_weights(self, start: Any, offset: Any, strips: int, halves: bool, cache: int) -> None:
        b, size = self.builder, 2 if halves else 4
        for strip in range(strips):
            at = b.add(b.add(start, b.mul(self.strip_len, LONG(size * strip))), offset)
            for byte in range(0, size * STRIP, LINE):
                self.prefetch(b.add(at, LONG(byte)), READ, cache)

    def prefetch(self, address: Any, purpose: int, cache: int) -> None:
        pointer = ir.IntType(8).as_pointer()
        function = self.function("llvm.prefetch.p0", ir.VoidType(), pointer, I32, I32, I32)
        self.builder.call(
            function, [self.builder.inttoptr(address, pointer), I32(purpose), I32(cache), I32(1)]
        )

    def function(self, name: str, result: Any, *args: Any) -> Any:
        return cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(result, args), name)


def _tile(halves: bool) -> Any:
    def tile(
        typing: Any,
        rows: Any,
        vectors: Any,
        x: Any,  # address of the first row's first number; rows lie DEPTH numbers apart
        weight: Any,  # address of the first strip's first weights
        strip_len: Any,  # numbers from strip to strip
        count: Any,  # how many inner numbers
        y: Any,  # address of the first row's first sum
        y_len: Any,  # numbers from row to row
        going_on: Any,  # whether y has sums already
        soon: Any,  # address of the weights that are wanted next
        soon_step: Any,  # bytes from one inner number's to the next one's
        pause: Any,  # inner numbers from one fetch to the next, a power of two; few rows go by AHEAD
        y_soon: Any,  # address of the first sum of the next tile
    ) -> Any:
        """y[rows, 16 * vectors] = or += x times weight, for one of SHAPES; nothing for others."""

        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            rows, vectors, *rest = args
            code = _Code(builder, *rest)
            shape = builder.add(builder.shl(vectors, LONG(8)), rows)
            end = builder.append_basic_block("end")
            switch = builder.switch(shape, end)
            for num_rows, num_vectors in SHAPES:
                if halves and num_rows > FEW:
                    continue
                case = builder.append_basic_block(f"tile.{num_rows}.{num_vectors}")
                switch.add_case(LONG((num_vectors << 8) + num_rows), case)
                builder.position_at_end(case)
                code.emit(num_rows, num_vectors, halves)
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 13), build

    return intrinsic(tile)


tile_of_floats = _tile(halves=False)
tile_of_halves = _tile(halves=True)


@intrinsic
def widen(typing: Any, source: Any, offset: Any, target: Any) -> Any:
    """The 32 bfloat16 weights of a strip from `offset` on become fp32 at the same offset of `target`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, offset, target = args
        code = _Code(builder, *[None] * 11)
        for n, value in enumerate(code.halves(source, offset)):
            builder.store(value, code.place(target, builder.add(offset, LONG(LANES * n)), VECTOR), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build
