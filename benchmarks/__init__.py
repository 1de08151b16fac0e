"""Benchmarks of cachestream on this machine: `python -m benchmarks` (or `make bench`)."""
