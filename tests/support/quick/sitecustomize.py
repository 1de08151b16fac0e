"""Python runs this at its start where the folder is in PYTHONPATH: see `tests.support.interpreters`."""

import gc

gc.set_threshold(50_000)
