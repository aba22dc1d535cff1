"""Fixtures for all tests: the form of errors, GPU tests, and reproducible property tests."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from flashqsa.errors import FlashQSAError

if importlib.util.find_spec("hypothesis"):  # environments that run GPU or engine tests alone may lack it
    from hypothesis import settings

    settings.register_profile("reproducible", derandomize=True, deadline=None, max_examples=60)
    settings.load_profile("reproducible")

ERROR_FORM = re.compile(r"[\w.]+: .* must .*, got .*\. \S.*[.)]", re.DOTALL)

Refuses = Callable[..., AbstractContextManager[None]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def refuses() -> Refuses:
    """A context that expects a typed error of the library's form: `where: argument must rule, got value. Remedy.`

    Called with the class, the name of the function or argument group that the message starts with, and what else the
    message must contain: the argument, the offending value.
    """

    @contextmanager
    def expecting(error: type[FlashQSAError], where: str, *parts: str) -> Iterator[None]:
        with pytest.raises(error) as caught:
            yield
        message = str(caught.value)
        assert message.startswith(f"{where}: "), message
        assert ERROR_FORM.fullmatch(message), f"not 'where: argument must rule, got value. Remedy.': {message}"
        for part in parts:
            assert part in message, f"{part!r} is missing in: {message}"

    return expecting


@pytest.fixture
def no_synchronisation() -> Callable[[], AbstractContextManager[None]]:
    """`with no_synchronisation():` a wait of the host for a CUDA device raises inside the block."""

    @contextmanager
    def forbidding() -> Iterator[None]:
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch says that the mode does not see everything
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return forbidding
