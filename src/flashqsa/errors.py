"""Typed errors. Each derives from `FlashQSAError` and from the builtin that fits it.

Every message has one form: ``where: argument must obey rule, got value. What to do.``
"""


class FlashQSAError(Exception):
    """Base of every error that the library raises on purpose."""


class ShapeError(FlashQSAError, ValueError):
    """A tensor has another shape, rank or stride than the call asks for."""


class DTypeError(FlashQSAError, TypeError):
    """A tensor has a dtype that the call does not take."""


class DeviceError(FlashQSAError, ValueError):
    """Tensors of one call live on different devices, or on one that the call does not serve."""


class ArgumentError(FlashQSAError, ValueError):
    """A value (a length, an id, an option) breaks a rule of the call."""


class ConfigError(FlashQSAError, ValueError):
    """A model configuration is incomplete, contradictory or not a `qwen4_exp` one."""


class SelectionError(FlashQSAError, ValueError):
    """A selection does not belong to the layer, the rows or the step it is used with."""


class UnsupportedError(FlashQSAError, NotImplementedError):
    """The request is valid, but nothing in this installation serves it."""
