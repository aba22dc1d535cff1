"""Warming up: every kernel that serving can reach, compiled before the first request."""

from flashqsa.warming.api import WarmupReport, warmup

__all__ = ["WarmupReport", "warmup"]
