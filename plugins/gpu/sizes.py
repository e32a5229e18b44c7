"""Sizes of steps that reach every choice of plans and tiles; what launchers' `variants` are made of."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Size(NamedTuple):
    """What a step has of tokens, rows and pages per row; as a limit, the most of each."""

    tokens: int
    rows: int
    pages: int


class Variant(NamedTuple):
    """One way to call a launcher."""

    size: Size
    options: dict[str, Any] = {}  # noqa: RUF012


def ends(largest: Size, *arguments: Any) -> Iterator[Variant]:
    """One token, and the largest step."""
    yield Variant(Size(1, 1, 1))
    yield Variant(largest)


def every_number_of_rows(largest: Size, *arguments: Any) -> Iterator[Variant]:
    """With a token each, and with as many tokens as there can be."""
    for rows in range(1, largest.rows + 1):
        yield Variant(Size(rows, rows, largest.pages))
        yield Variant(Size(largest.tokens, rows, largest.pages))


def around(borders: Iterable[float], limit: int) -> list[int]:
    """The numbers up to `limit` on both sides of each border, and the ends."""
    near = {int(border) + step for border in borders for step in (0, 1)}
    return sorted({1, limit} | {number for number in near if 1 <= number <= limit})


def powers(limit: int) -> list[int]:
    """Powers of two up to the first that is not below `limit`."""
    return [1 << i for i in range(max(limit - 1, 0).bit_length() + 1)]
