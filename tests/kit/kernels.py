"""Engines for GPUs whose kernels nobody compiles: what tests look at is all else."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hemiola.plugins.gpu.binaries import Binary
from hemiola.plugins.gpu.device import Gpu, built_for
from hemiola.plugins.gpu.launch import Call, Kernel, Values, launches
from hemiola.runtime import manifest
from hemiola.runtime.abi import INPUTS
from hemiola.runtime.device.program import load_program
from hemiola.runtime.device.session import bind_forms


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, a kernel is compiled into its name. Triton still says what an int or an address is told."""
    compile = pytest.importorskip("hemiola.plugins.gpu.compile", reason="needs Triton")

    def named(call: Call, capability: int) -> object:
        binary = Binary(call, call.kernel, 0, 128, (), capability >= 90)
        return compile.Compiled(binary, f"{call} {capability}".encode(), "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "compile_call", named)
        yield


class Replay:
    """An engine's programs on tensors without memory: what a step of any size would launch."""

    def __init__(self, engine_dir: Path, gpu: Gpu) -> None:
        self.gpu, self.manifest = gpu, manifest.load(engine_dir)
        self.binaries = [entry.binary.call for entry in self.manifest.kernels[0].binaries]
        with safe_open(engine_dir / self.manifest.weights_file, framework="pt") as file:
            known = {name: file.get_tensor(name).to("meta") for name in file.keys()}  # noqa: SIM118
        kinds = {state.name: getattr(torch, state.dtype) for state in self.manifest.states}
        self._kinds = {"hidden": kinds["mtp.hidden"]}
        known |= {s.name: _meta(kinds[s.name], 9, *s.shape) for s in self.manifest.states}
        self._programs = {}
        for segment in self.manifest.segments:
            program = load_program(engine_dir / segment.file)
            bind_forms(program, segment)
            bound = [known[name] for name in (*segment.weights, *segment.states)]
            self._programs[segment.name] = program, segment.inputs, bound

    def missing(self, tokens: int, rows: int, logits: int) -> set[str]:
        """Launches of a step for which the engine has no binary."""
        found: set[str] = set()

        def look(kernel: Kernel, grid: tuple[int, ...], values: Values, constants: Mapping[str, Any]) -> None:
            mine = (call for call in self.binaries if call.kernel == kernel.name)
            if not any(call.fits(values, constants) for call in mine):
                found.add(f"{kernel.name} {[v for v in values if isinstance(v, int)]} {constants}")

        letters = {"T": tokens, "N": rows, "W": 4, "L": logits, "8": 8}
        for name, (program, inputs, bound) in self._programs.items():
            given = [
                _meta(self._kinds.get(part, torch.int32), *(letters[c] for c in INPUTS[name][part]))
                for part in inputs
            ]
            with built_for(self.gpu), launches(look), torch.inference_mode():
                _, hidden, *_ = program(*bound, *given)
            letters["F"] = hidden.shape[1]
        return found


def _meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
