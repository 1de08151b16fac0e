"""`python -m cachestream`: the command line where the command itself is not on the path."""

from __future__ import annotations

from cachestream.cli.main import main

if __name__ == "__main__":
    main()
