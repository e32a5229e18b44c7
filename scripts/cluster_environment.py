"""Makes .venv/cluster: Dynamo, its frontend too, beside .venv's packages.

    python scripts/cluster_environment.py

An environment of its own, since Dynamo's pydantic is older than ours. Without it
tests/runtime/dynamo/test_cluster.py skips.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from kit.cluster import ENVIRONMENT  # noqa: E402

VERSION = "1.6.1"
NEEDS = [f"ai-dynamo-runtime=={VERSION}", "msgspec", "pyyaml", "packaging"]
ALONE = f"ai-dynamo=={VERSION}"  # one of its dependencies is not to be had


def environment() -> Path:
    """A Python with Dynamo, that sees this one's packages behind its own: pydantic differs."""
    needs = [*NEEDS, ALONE]
    stamp, python = ENVIRONMENT / "needs", ENVIRONMENT / "bin/python"
    if stamp.is_file() and stamp.read_text().split() == needs:
        return python
    print(f"installing {', '.join(needs)} into {ENVIRONMENT.relative_to(ROOT)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *NEEDS], check=True)
    subprocess.run([*pip, "--no-deps", ALONE], check=True)
    folder = next(ENVIRONMENT.glob("lib/python*/site-packages"))
    seen = dict.fromkeys([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])
    (folder / "zz_others.pth").write_text("\n".join([*seen, sysconfig.get_path("purelib")]) + "\n")
    stamp.write_text(" ".join(needs))
    return python


if __name__ == "__main__":
    environment()
