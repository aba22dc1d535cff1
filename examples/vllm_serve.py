"""A chat completion, streamed by `vllm serve` on FlashQSA: starts the server, asks it, stops it.

In an environment with vLLM and FlashQSA (on a CPU: `make test-vllm` makes one in .venv-vllm):

    python examples/vllm_serve.py CHECKPOINT "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from openai import OpenAI

ON_A_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--wait-s", type=float, default=240, help="how long the server may take to start")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The plugin is found by vLLM itself; FLASHQSA_VLLM says what it replaces.
    environment = ON_A_CPU | {"FLASHQSA_VLLM": "full"} | os.environ
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options.checkpoint, "--port", str(port),
         "--host", "127.0.0.1", "--served-model-name", "qsa", "--max-model-len", "1024", "--enforce-eager",
         "--dtype", "bfloat16"],
        env=environment, stdout=sys.stderr,
    )  # fmt: skip
    try:
        wait_until_ready(server, port, options.wait_s)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        stream = client.chat.completions.create(
            model="qsa", messages=[{"role": "user", "content": options.prompt}], max_tokens=options.max_tokens,
            temperature=0, stream=True,
        )  # fmt: skip
        chunks = 0
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                chunks += 1
                print(chunk.choices[0].delta.content, end="", flush=True)
        print(f"\n{chunks} chunks")
    finally:
        server.terminate()
        server.wait()


def wait_until_ready(server: subprocess.Popen[bytes], port: int, wait_s: float) -> None:
    """Returns once the server answers; raises when it has ended or takes too long."""
    ends = time.monotonic() + wait_s
    while time.monotonic() < ends:
        if server.poll() is not None:
            raise SystemExit(f"vllm serve ended with exit code {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise SystemExit(f"vllm serve did not answer within {wait_s:.0f} s")


if __name__ == "__main__":
    main()
