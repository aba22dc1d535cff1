"""Cross-compiling Triton kernels without a GPU: record what a launcher launches, compile it for any architecture.

Importing this module needs triton.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

ARCHS = (80, 86, 89, 90, 100, 120)
"""Compute capabilities, times ten, that every kernel variant compiles for."""

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Shared memory that one program can have."""

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


Variant = tuple[str, frozenset[tuple[str, Hashable]]]
"""Name of a kernel, and what is fixed of each argument and option, by name."""


@dataclass(frozen=True)
class Launch:
    """One recorded launch: the kernel, its arguments by name, and its options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a variant.

    Attributes:
        registers: Registers a thread.
        spill_bytes: Bytes of local memory a thread.
        shared_bytes: Shared memory a program.
        ptx: Its PTX.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx: str


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Collect the launches inside the block instead of running them."""
    launches: list[Launch] = []
    with _told_of_launches(launches.append):
        yield launches


@contextmanager
def recorded_variants(arch: int = 90) -> Iterator[set[Variant]]:
    """Collect the variants that the launches inside the block would need, instead of running them.

    Args:
        arch: Compute capability, times ten, whose rules of specialisation hold.
    """
    variants: set[Variant] = set()
    with _told_of_launches(lambda launch: variants.add(launch_variant(launch, arch))):
        yield variants


@contextmanager
def _told_of_launches(tell: Callable[[Launch], object]) -> Iterator[None]:
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = dict(zip(self.arg_names, args, strict=False))
        named |= {name: value for name, value in kwargs.items() if name in self.arg_names}
        tell(Launch(self, named, {k: v for k, v in kwargs.items() if k not in self.arg_names}))

    JITFunction.run = record
    try:
        yield
    finally:
        JITFunction.run = run


def launch_variant(launch: Launch, arch: int = 90) -> Variant:
    """What Triton looks up before it compiles: launches that agree in it share a compiled kernel.

    That is the kernel, the types of its arguments, its constants, what it assumes of addresses (multiples of 16 bytes)
    and of whole numbers (1, or multiples of 16), and its options.
    """
    _, specialization, options = _binder(launch.kernel, arch)(**launch.arguments, **launch.options)
    arguments = zip(launch.kernel.arg_names, specialization, strict=True)
    return launch.kernel.__name__, frozenset([*arguments, *options.items()])


@functools.cache
def _binder(kernel: Any, arch: int) -> Any:
    return create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", arch, 32)))


def launch_source(launch: Launch, kind: Any = ASTSource) -> Any:
    """What Triton's compiler compiles of a recorded launch on a GPU, where tensors begin at multiples of 16 bytes.

    Args:
        launch: The launch.
        kind: Class of the source: Gluon kernels have one of their own.
    """
    kernel = launch.kernel
    constants = {kernel.params[i].name for i in kernel.constexprs}
    signature, constexprs, attrs = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = launch.arguments[name]
        specialised = not kernel.params[index].do_not_specialize
        if name in constants or (specialised and type(value) is int and value == 1):
            signature[name], constexprs[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            if specialised:
                attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if specialised and value % 16 == 0:
                attrs[(index,)] = [["tt.divisibility", 16]]
    return kind(kernel, signature, constexprs, attrs)


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compile a recorded launch for one architecture."""
    compiled = triton.compile(launch_source(launch), target=GPUTarget("cuda", arch, 32), options=launch.options)
    registers, spill_bytes = _resources(compiled.asm["cubin"])
    return Compiled(registers, spill_bytes, compiled.metadata.shared, compiled.asm["ptx"])


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and local bytes a thread, read with the cuobjdump that triton carries."""
    import subprocess
    import tempfile

    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert match, printed
    return int(match[1]), int(match[2])
