"""Entries of the page table that changed, compiled."""

from hemiola.plugins.cpu.code import Operand, code_of
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import get_long, put_int


def change(changes: Operand, table: Operand) -> None:
    """See reference.py."""
    code_of(changes).call(_change, 1, 0, changes.shape[0], changes, table)


@Kernel
def _change(item, scratch, num, changes, table):
    """One item: all entries."""
    for n in range(num):
        put_int(table, get_long(changes, 2 * n), get_long(changes, 2 * n + 1))
