"""The columns that folders name, as Hive, Spark and pyarrow write them: `label=cat/part-0.parquet`."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from cachestream.listing.file_list import FileList

logger = logging.getLogger("cachestream")

_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_WHOLE: Final = re.compile(r"-?\d{1,18}", re.ASCII)


class FolderColumns:
    """The columns that the folders of `files` name. Where a file has a column of that name, the file wins.

    As in pyarrow, the folders below a folder or wildcard that is given count, and of a list of files all
    folders in their paths. A column is int64 if all its values are whole numbers, else str. `chosen` are the
    columns to keep (None: all); `missing` has the values for files whose folders do not name a column, or
    name it null. A column that not all files have is left out unless `missing` has a value for it.
    """

    def __init__(self, files: FileList, chosen: Sequence[str] | None, missing: Mapping[str, Any]) -> None:
        path = files.key if files.is_searched or len(files) == 1 else files.where
        found = [dict(_named_in(path(index), files.remote.is_web)) for index in range(len(files))]
        counts = Counter(name for one in found for name in one)
        names = [name for name in counts if counts[name] == len(found) or name in missing]
        partial = [name for name in counts if name not in names and (chosen is None or name in chosen)]
        if partial:
            logger.warning(
                "%s: the folders of some files name a column '%s' and those of others do not, so it is left out; to "
                "have it, give its value for the others, fields={'%s': …}, or open the folders that name it",
                files.shown,
                "', '".join(partial),
                partial[0],
            )
        texts = {name: [one.get(name) for one in found] for name in names if chosen is None or name in chosen}
        self._values = {name: _as_numbers(values) for name, values in texts.items()}
        self._missing = missing
        self.names = tuple(names)
        self.identity = [f"folders={','.join(names)}"] if names else []

    def of(self, index: int) -> dict[str, Any]:
        """Return the value of each column for file `index`; None where there is none."""
        found = ((name, values[index]) for name, values in self._values.items())
        return {name: self._missing.get(name) if value is None else value for name, value in found}


def _named_in(path: str, is_web: bool) -> Iterator[tuple[str, str | None]]:
    for folder in path.split("/")[:-1]:  # the pages of web servers name them escaped: "label%3Dcat/"
        name, equals, text = (unquote(folder) if is_web else folder).partition("=")
        if name and equals:
            yield unquote(name), None if text == _NULL else unquote(text)


def _as_numbers(texts: list[str | None]) -> Sequence[Any]:
    if all(text is None or _WHOLE.fullmatch(text) for text in texts):
        return [None if text is None else int(text) for text in texts]
    return texts
