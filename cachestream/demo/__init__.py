"""Demo without a network: two ranks train on a growing, limited cache of a slow remote."""

from cachestream.demo.run import Size, run

__all__ = ["Size", "run"]
