"""Optional fields: a default for what a sample lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cachestream.config import check_mapping
from cachestream.sources.base import Rows


class Defaults:
    """The values for fields that are missing, or None, by name: `{"caption": "", "score": 0.0}`.

    Where the default is a float, integers become floats. Samples that are no dict stay as they are.
    """

    def __init__(self, fields: Mapping[str, Any] | None) -> None:
        check_mapping("fields", fields, "{'caption': ''}")
        self.values = dict(fields or {})
        self.identity = [f"fields={self.values}"] if self.values else []

    def fill(self, sample: Any) -> Any:
        """`sample` with all fields that have a default."""
        if not self.values or not isinstance(sample, Mapping):
            return sample
        filled = dict(sample)
        for name, default in self.values.items():
            value = filled.get(name)
            if value is None:
                filled[name] = default
            elif type(default) is float and isinstance(value, int | np.integer):
                filled[name] = float(value)
        return filled

    def fill_all(self, items: Iterator[Rows | tuple[str, Any]]) -> Iterator[Rows | tuple[str, Any]]:
        """The same of what `RowsSource.read_rows` yields."""
        if not self.values:
            yield from items
            return
        for item in items:
            yield self._rows(item) if isinstance(item, Rows) else (item[0], self.fill(item[1]))

    def _rows(self, rows: Rows) -> Rows:
        fields, count = dict(rows.fields), len(rows.keys)
        for name, default in self.values.items():
            column = fields.get(name)
            if column is None:
                alike = [default] * count
                fields[name] = alike if isinstance(default, str | bytes) else np.array(alike)
            elif type(default) is float and isinstance(column, np.ndarray) and column.dtype.kind in "iu":
                fields[name] = column.astype(np.float64)
        return Rows(rows.keys, fields)
