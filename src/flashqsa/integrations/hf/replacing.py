"""Putting another forward in the place of a module's or a class's own, and taking it out again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

BEFORE = "flashqsa_before"  # on a module with another forward: what is put back
HOOKED = "_old_forward"  # where accelerate's hooks keep the forward that they wrap
OF_CLASS = "flashqsa_of_class"  # on a function that serves as the forward of an enabled class

class_attributes: dict[tuple[type, str], Any] = {}
"""What classes had in their own namespace where FlashQSA has something now; None where they had nothing."""


@dataclass(frozen=True)
class Before:
    """A module before it was enabled.

    Attributes:
        forward: The forward of the instance, or None where its class's served.
        ours: The function that serves now.
        implementation: `_attn_implementation` of its config, for an attention.
    """

    forward: Any
    ours: Callable[..., Any]
    implementation: str | None = None


def replace_forward(module: Any, ours: Callable[..., Any], implementation: str | None = None) -> bool:
    """Replace the forward of one module, inside the hooks that it may have.

    Args:
        module: The module.
        ours: Called with the module and its arguments.
        implementation: What to remember with it.

    Returns:
        Whether it had another forward before.
    """
    if BEFORE in module.__dict__:
        return False
    name = HOOKED if HOOKED in module.__dict__ else "forward"
    found = module.__dict__.get(name)
    of_class = hasattr(getattr(found, "__func__", None), OF_CLASS)  # hooks came while the classes were enabled
    module.__dict__[BEFORE] = Before(None if of_class else found, ours, implementation)
    setattr(module, name, partial(ours, module))
    return True


def restore_forward(module: Any) -> Before | None:
    """Undo `replace_forward`, also where hooks came or went in the meantime; None where there is nothing to undo."""
    before: Before | None = module.__dict__.pop(BEFORE, None)
    if before is None:
        return None
    for name in (HOOKED, "forward"):
        if getattr(module.__dict__.get(name), "func", None) is not before.ours:
            continue
        if before.forward is None and name == "forward":
            del module.forward
        else:
            setattr(module, name, before.forward or MethodType(type(module).forward, module))
    return before


def own_forward(module: Any) -> Callable[..., Any]:
    """The forward that a module has without FlashQSA, whether it or its class has another one now."""
    before: Before | None = module.__dict__.get(BEFORE)
    if before is not None and before.forward is not None:
        return before.forward  # type: ignore[no-any-return]
    return MethodType(own_attribute(type(module), "forward"), module)


def own_attribute(owner: type, name: str) -> Any:
    """What a class has under a name without FlashQSA."""
    for base in owner.__mro__:
        if name in vars(base):
            theirs = class_attributes.get((base, name), vars(base)[name])
            if theirs is not None:
                return theirs
    raise AttributeError(name)


def replace_class_attribute(owner: type, name: str, value: Any) -> None:
    """Put something in a class's own namespace, remembering what was there."""
    class_attributes[owner, name] = vars(owner).get(name)
    setattr(owner, name, value)


def restore_class_attributes() -> None:
    """Undo every `replace_class_attribute`."""
    for (owner, name), value in class_attributes.items():
        if value is None:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    class_attributes.clear()
