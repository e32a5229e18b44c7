"""hemiola-client on a machine that has its declared dependencies and nothing else."""

import subprocess
import sys
import zipfile
from importlib import metadata, util
from pathlib import Path

from kit.fake_triton import Triton, final
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
OFFLINE = ("--no-index", "--no-build-isolation") if util.find_spec("setuptools") else ()
CODE = """
import asyncio, sys
from hemiola import AsyncClient, Busy, Client, Failed, Lost, Refused, SamplingParams
url = sys.argv[1]
with Client(url) as client:
    assert client.generate(["a"], SamplingParams(max_tokens=3))[0].text == "said"
async def run():
    async with AsyncClient(url) as client:
        assert (await client.chat([{"role": "user", "content": "a"}])).text == "said"
asyncio.run(run())
heavy = {"torch", "numba", "safetensors", "tokenizers", "jinja2", "typer", "rich"}
assert not heavy & set(sys.modules)
for name in heavy:
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} can be imported: this machine proves nothing")
print("works alone")
"""


def needed(requirement: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """Distributions that pip would install for it, as they are here."""
    parsed = Requirement(requirement)
    found = {parsed.name}
    for line in metadata.requires(parsed.name) or []:
        below = Requirement(line)
        wanted = [{"extra": extra} for extra in (parsed.extras or {""})] + [{"extra": ""}]
        if below.marker is None or any(below.marker.evaluate(one) for one in wanted):
            bare = f"{below.name}[{','.join(below.extras)}]" if below.extras else below.name
            found |= needed(bare) if below.name not in found else set()
    return found


def test_the_clients_wheel_needs_no_engine(triton: Triton, url: str, tmp_path: Path) -> None:
    build = [sys.executable, ROOT / "scripts/build_client.py", tmp_path / "wheel", *OFFLINE]
    subprocess.run(build, check=True)
    (wheel,) = (tmp_path / "wheel").glob("hemiola_client-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        lines = archive.read(name).decode().splitlines()
    required = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist")]
    assert not any(line.startswith(("torch", "numba")) for line in required)
    for distribution in set().union(*map(needed, required)):
        for file in metadata.files(distribution) or []:
            source, top = Path(file.locate()), file.parts[0]
            if ".." not in file.parts and not (site / top).exists():
                (site / top).symlink_to(
                    source.parents[len(file.parts) - 2] if len(file.parts) > 1 else source
                )
    triton.answers = [final(text_output="said", output_ids=[1], input_ids=[2])]
    bare = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(site)!r})\n{CODE}", url]
    ran = subprocess.run(bare, capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout == "works alone\n", ran.stderr
