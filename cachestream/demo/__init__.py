"""The whole thing on this machine: two ranks train on a growing, limited cache of a slow remote, no network needed."""

from cachestream.demo.run import Size, run

__all__ = ["Size", "run"]
