"""Tools that stand on top of the library: benchmarks of a cache, plots, diagnosis, refetching."""
