"""The live page of one or more caches, and their metrics for Prometheus."""
