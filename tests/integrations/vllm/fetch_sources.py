"""Fetches the source of vLLM's qwen4_exp model from its wheels, as text: `fetch_sources.py FOLDER VERSION ...`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WANTED = ("vllm/models/qwen4_exp/", "vllm/v1/attention/ops/metadata.py")


def fetch(folder: Path, version: str) -> None:
    target = folder / version
    if target.is_dir():
        return
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([*pip, "--dest", scratch, f"vllm=={version}"], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(WANTED) and name.endswith(".py")]
            archive.extractall(Path(scratch) / "source", names)
        shutil.copytree(Path(scratch) / "source", target)


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        fetch(Path(sys.argv[1]), wanted)
