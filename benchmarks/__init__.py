"""What cachestream reaches on this machine: `python -m benchmarks` (or `make bench`)."""
