"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys

from benchmarks import (
    gpu_check,
    gpu_curves,
    gpu_decode,
    gpu_prefill,
    gpu_prepare,
    gpu_stack,
    gpu_vllm_ops,
    hf_decode_cpu,
    hf_layer_cpu,
    hf_layer_gpu,
    report,
    sweep,
)


def main(words: list[str] | None = None) -> int:
    """Run one benchmark or the tests of a GPU, or write the tables of the documentation from the result files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = (
        hf_layer_cpu, hf_decode_cpu, hf_layer_gpu, gpu_decode, gpu_prepare, gpu_prefill, gpu_curves, gpu_stack, sweep,
        gpu_vllm_ops,
    )  # fmt: skip
    modules = {module.NAME: module for module in measured} | {"report": report, gpu_check.NAME: gpu_check}
    for name, module in modules.items():
        about = (module.__doc__ or "").split(":", 1)[-1].strip()
        command = commands.add_parser(name, help=about, description=about)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(words)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
