"""Fetches TensorRT's Python bindings, which tests look into without TensorRT: 50 MB into .cache/tensorrt.

    python scripts/tensorrt_wheels.py

A binding wants libraries that are not in its wheel. Of the newest, the lean runtime has the real plugin
registry and runtime; builder and parser, and everything of older ones, are stubs that return nothing.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / ".cache" / "tensorrt"
NEWEST = "11.4.0.106"
WHEELS = {
    "10.9.0.34": ["tensorrt-cu12-bindings"],
    "10.13.3.9": ["tensorrt-cu13-bindings"],
    "10.16.1.11": ["tensorrt-cu13-bindings"],
    "11.0.0.114": ["tensorrt-cu13-bindings"],
    NEWEST: ["tensorrt-cu13-bindings", "tensorrt-lean-cu13-libs"],
}
LIBRARIES = {  # and the functions that bindings take of each
    "nvinfer": ["createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "getBuilderPluginRegistry"],
    "nvonnxparser": [
        "createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getNvOnnxParserVersion",
    ],
    "nvinfer_plugin": ["initLibNvInferPlugins"],
}  # fmt: skip
RUNTIME = ["createInferRuntime_INTERNAL", "getPluginRegistry", "getLogger"]  # which the lean library has


def main() -> None:
    for version, names in WHEELS.items():
        folder = ROOT / version
        if not (folder / "done").is_file():
            fetch(folder, [f"{name}=={version}" for name in names])
            for name, functions in LIBRARIES.items():
                make(folder, f"lib{name}.so.{version.split('.')[0]}", functions, lean=version == NEWEST)
            (folder / "done").touch()
    print(ROOT)


def fetch(folder: Path, wheels: list[str]) -> None:
    """Unpacked, not installed: they would take the place of a real TensorRT."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "-d", folder / "wheels", *wheels], check=True)
    for wheel in (folder / "wheels").iterdir():
        zipfile.ZipFile(wheel).extractall(folder)
        wheel.unlink()


def make(folder: Path, library: str, functions: list[str], lean: bool) -> None:
    """A library of functions that return nothing; that of the newest version leans on the real runtime."""
    options = []
    if library.startswith("libnvinfer.") and lean:
        real = next((folder / "tensorrt_lean_libs").glob("libnvinfer_lean.so.*"))
        options = ["-Wl,--no-as-needed", str(real), f"-Wl,-rpath,{real.parent}"]
    elif library.startswith("libnvinfer."):
        functions = functions + RUNTIME
    source = "".join(f"void *{name}() {{ return 0; }}\n" for name in functions)
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", folder / library, "-x", "c", "-"]
    subprocess.run([*command, "-x", "none", *options], input=source.encode(), check=True)


if __name__ == "__main__":
    main()
