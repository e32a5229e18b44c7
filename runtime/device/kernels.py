"""An engine's compiled kernels, loaded: nothing is compiled when it opens or runs."""

from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from hemiola.plugins.gpu.launch import Kernel
from hemiola.runtime.arch import arch_here
from hemiola.runtime.device.graphs import wait_for
from hemiola.runtime.errors import Refused
from hemiola.runtime.extra import install
from hemiola.runtime.manifest import Manifest


def load_kernels(engine_dir: Path, manifest: Manifest, device: torch.device) -> ExitStack:
    """Every kernel that the engine can come to launch, on this GPU; to be closed when it launches no more."""
    try:
        from hemiola.plugins.gpu import driver  # cuda-python is not needed elsewhere
    except ImportError as error:
        raise Refused(
            f"{engine_dir} runs on a GPU through cuda-bindings, which is not here ({error});"
            f" run {install('cuda')}"
        ) from None
    found = next(kernels for kernels in manifest.kernels if kernels.arch == arch_here())
    known = driver.version()
    if known[0] < int(found.cuda.split(".")[0]):
        raise Refused(
            f"{engine_dir} has kernels of CUDA {found.cuda}, the driver here knows {known[0]}.{known[1]};"
            f" install a newer driver, or run build-engine with an older Triton"
        )
    with ExitStack() as loaded:
        for file, binary in ((entry.file, entry.binary) for entry in found.binaries):
            op, _, entry = binary.call.kernel.rpartition(".")
            kernel = getattr(import_module(f"hemiola.plugins.{op}.cuda"), entry)
            assert isinstance(kernel, Kernel)
            cubin = (engine_dir / file).read_bytes()
            try:
                kernel.take(binary.call, partial(driver.load, binary, cubin, device))
            except driver.DriverError as error:
                raise Refused(
                    f"{engine_dir / file} cannot be loaded ({error}); run build-engine again"
                ) from None
            loaded.callback(kernel.leave, binary.call)
        loaded.callback(wait_for, device)  # first of all: a step may be under way
        return loaded.pop_all()
