"""Benchmarks: ``python -m benchmarks`` in the root of a checkout. Correctness first, then time, then memory."""
