"""Loops of compiled kernels that keep vectors on the stack, as the assembly shows them.

    python -m tests.kit.assembly MODULES [NUMBERxLANES [TRIPLE [KERNEL]]]

prints a line for each such loop, with how many vectors it writes there (none: it reads what was put there
before it), and how many loops with arithmetic were seen. numba's environment says which CPU the code is for;
the registers may be said to be others, and LLVM may write for another architecture.
"""

import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm
import networkx as nx
from numba.core.registry import cpu_target

from hemiola.plugins.cpu import registers

FUNCTION = re.compile(r"^([A-Za-z_][\w.$]*):")
LABEL = re.compile(r"^(\.L\w+):")
JUMP = re.compile(r"^\s+(j\w+|b|b\.\w+|cbn?z|tbn?z)\s+(?:.*,\s*)?(\.L\w+)$")
ENDS = re.compile(r"^\s+(jmp|ret\w*|b|br|ud2)\b")
ARITHMETIC = re.compile(r"^\s+(vfn?m(add|sub)|vadd|vmul|vsub|vdiv|fml[as]|fmul|fadd|fsub|fdiv)")
STACK = re.compile(r"\(%rsp|\[sp")
# the last operand on x86, the instruction on AArch64
WRITES = re.compile(r"^\s+(st\w+\b|\S.*,\s*-?\d*\(%rsp[^)]*\)$)")
VECTOR = re.compile(
    r"^\s+(?!v\w+s[sd]\b|vmov[dq]\b)\S+.*(%[xyz]mm|\b[qv]\d+\b)"
)  # or a number for all of one


def functions(assembly: str) -> Iterator[tuple[str, list[str]]]:
    """Their names and instructions; comments and directives are gone."""
    name, lines = "", []
    for line in assembly.splitlines():
        line = line.split("#")[0].split("//")[0].rstrip()
        if found := FUNCTION.match(line):
            yield name, lines
            name, lines = found[1], []
        elif LABEL.match(line) or (line.startswith("\t") and not line.startswith("\t.")):
            lines.append(line)
    yield name, lines


def flow(lines: list[str]) -> nx.DiGraph:
    """Instructions by their line, and which may follow which."""
    places = {found[1]: n for n, line in enumerate(lines) if (found := LABEL.match(line))}
    graph = nx.DiGraph()
    for n, line in enumerate(lines):
        jump = JUMP.match(line)
        if jump and jump[2] in places:
            graph.add_edge(n, places[jump[2]])
        if not ENDS.match(line) and n + 1 < len(lines):
            graph.add_edge(n, n + 1)
    return graph


def innermost(graph: nx.DiGraph) -> Iterator[set[int]]:
    """Loops without loops in them: what stays connected, without where it is entered, falls apart."""
    for loop in nx.strongly_connected_components(graph):
        if len(loop) > 1:
            entries = {n for n in loop if any(before not in loop for before in graph.predecessors(n))}
            inner = list(innermost(graph.subgraph(loop - (entries or {min(loop)}))))
            yield from inner or [loop]


def spilled(assembly: str) -> tuple[list[str], int]:
    """The loops with vectors on the stack, by their first such instruction, and how many have arithmetic."""
    found, num_loops = [], 0
    for name, lines in functions(assembly):
        for loop in innermost(flow(lines)):
            body = [lines[n] for n in sorted(loop)]
            if any(ARITHMETIC.match(line) for line in body):
                num_loops += 1
                moves = [line for line in body if STACK.search(line) and VECTOR.search(line)]
                if moves:
                    written, first = sum(map(bool, map(WRITES.match, moves))), moves[0].strip()
                    found.append(
                        f"{name}: {len(moves)} of {len(body)}, {written} of them written, first {first!r}"
                    )
    return found, num_loops


def machine(triple: str) -> llvm.TargetMachine:
    if not triple:
        host: Any = cpu_target.target_context
        return host.codegen()._tm
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(triple).create_target_machine(opt=3)


def main(modules: str, claimed: str = "", triple: str = "", only: str = "") -> None:
    if claimed:
        registers.REGISTERS = registers.Registers(*map(int, claimed.split("x")))
    from hemiola.plugins.cpu import jit

    for module in modules.split(","):
        importlib.import_module(f"hemiola.plugins.{module}")
    target, seen = machine(triple), 0
    for kernel in jit.KERNELS:
        if kernel._function.__module__.removeprefix("hemiola.plugins.") not in modules.split(","):
            continue
        if only and kernel.name != only:
            continue
        module = kernel.compile()._library._get_module_for_linking()
        if triple:
            text = re.sub(r'target (triple|datalayout) = ".*"', "", str(module))
            module = llvm.parse_assembly(f'target triple = "{triple}"\n{text}')
        found, num_loops = spilled(target.emit_assembly(module))
        seen += num_loops
        for loop in found:
            print(f"{kernel._function.__module__}.{kernel.name}: {loop}")
    print(seen)


if __name__ == "__main__":
    main(*sys.argv[1:])
