"""New interpreters that search for garbage as seldom as the tests do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["QUICK"]

# The PYTHONPATH of processes that load torch anew: much of that time goes into a search after every 700 objects.
QUICK: Final = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent / "quick")])
