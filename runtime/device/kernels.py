"""An engine's compiled kernels, loaded: nothing is compiled when it opens or runs."""

import re
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from hemiola.plugins import OPS
from hemiola.plugins.gpu.launch import Kernel
from hemiola.runtime.arch import arch_here
from hemiola.runtime.device.graphs import wait_for
from hemiola.runtime.errors import Refused, one_line, shown
from hemiola.runtime.extra import install
from hemiola.runtime.manifest import Manifest

KERNEL = re.compile(r"([a-z][a-z0-9_]*\.){1,2}[A-Za-z0-9_]+")


def load_kernels(engine_dir: Path, manifest: Manifest, device: torch.device) -> ExitStack:
    """Every kernel that the engine can come to launch, on this GPU; to be closed when it launches no more."""
    try:
        from hemiola.plugins.gpu import driver  # cuda-python is not needed elsewhere
    except ImportError as error:
        message = f"{engine_dir} runs on a GPU through cuda-bindings, which is not here ({error})"
        raise Refused("not_found", message=message, way_out=f"run {install('cuda')}") from None
    ours = next((kernels for kernels in manifest.kernels if kernels.arch == arch_here()), None)
    if ours is None:
        message = f"{engine_dir} has no kernels for {arch_here()}"
        raise Refused("unsupported", message=message, way_out="run build-engine again")
    known = driver.version()
    if known[0] < int(ours.cuda.split(".")[0]):
        message = f"{engine_dir} has kernels of CUDA {ours.cuda}, the driver here knows {known[0]}.{known[1]}"
        way_out = "install a newer driver, or run build-engine with an older Triton"
        raise Refused("unsupported", message=message, way_out=way_out)
    with ExitStack() as loaded:
        for file, binary in ((entry.file, entry.binary) for entry in ours.binaries):
            kernel = _kernel(engine_dir, binary.call.kernel)
            cubin = (engine_dir / file).read_bytes()
            try:
                kernel.take(binary.call, partial(driver.load, binary, cubin, device))
            except driver.DriverError as error:
                message = f"{engine_dir / file} cannot be loaded ({one_line(error)})"
                raise Refused("damaged", message=message, way_out="run build-engine again") from None
            loaded.callback(kernel.leave, binary.call)
        loaded.callback(wait_for, device)  # first of all: a step may be under way
        return loaded.pop_all()


def _kernel(engine_dir: Path, name: str) -> Kernel:
    """What launches kernels of this name, such as delta._scan."""
    kernel = None
    if KERNEL.fullmatch(name):
        op, _, entry = name.rpartition(".")
        forms = (form.name for form in OPS[op].forms if form.device == "cuda") if op in OPS else ()
        for form in ("cuda", *forms):
            with suppress(ImportError):
                kernel = kernel or getattr(import_module(f"hemiola.plugins.{op}.{form}"), entry, None)
    if not isinstance(kernel, Kernel):
        message = f"{engine_dir} has a binary of {shown(name)}, which is no kernel"
        raise Refused("damaged", message=message, way_out="run build-engine again")
    return kernel
