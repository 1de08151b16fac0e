"""New interpreters that search for garbage as seldom as the tests do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["QUICK"]

# The PYTHONPATH of processes that load torch anew. A third of the time that takes goes into the search for garbage after
# every 700 objects, and into the last one, at the end.
QUICK: Final = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent / "quick")])
