"""Windows of tokens, all of one length, packed from the documents of a unit: `pack_tokens`."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from cachestream.config import check_count, require
from cachestream.errors import ConfigError, SampleError
from cachestream.listing.names import Names, Page
from cachestream.sources import base
from cachestream.sources.mix import MixSource
from cachestream.sources.user_code import CallLock, digest_of, fingerprint_of, guard_user_code
from cachestream.transport import metering

_MOST_OPEN: Final = 64  # windows that wait for a document that fits
_LARGEST: Final = 2**31 - 1
Tokens = npt.NDArray[np.int32]
Document = tuple[str, Tokens]  # with its key


@dataclass(frozen=True, slots=True)
class PackTokens:
    """The packing that `pack_tokens` returns, to be given as `transform=`. Picklable."""

    block_size: int
    field: str
    tokenizer: Any
    eos: int | None
    split: bool
    pad: int | None

    @property
    def fingerprint(self) -> str:
        """A digest of the options and of the tokenizer: of its vocabulary and rules, or of its code."""
        tokenizer = self.tokenizer.to_str() if self.is_library else fingerprint_of(self.tokenizer)
        return digest_of([repr((self.block_size, self.field, self.eos, self.split, self.pad)), tokenizer])

    @property
    def is_library(self) -> bool:
        """True if the tokenizer is one of the library `tokenizers`, which threads may share."""
        return hasattr(self.tokenizer, "to_str")

    def __call__(self, sample: Any) -> Any:
        """Raise ConfigError: a packing is applied to all documents of a unit, not to a sample."""
        raise ConfigError("pack_tokens() packs whole units: give it as transform= to start_worker or stream")

    def encode(self, text: str) -> Any:
        return self.tokenizer.encode(text).ids if self.is_library else self.tokenizer(text)


def pack_tokens(
    block_size: int = 2048,
    field: str = "tokens",
    *,
    tokenizer: Any = None,
    eos: int | None = None,
    split: bool = True,
    pad: int | None = None,
) -> PackTokens:
    """Return a transform that packs the documents of each unit, in order, into windows of one length.

    Give it as `transform=`. A sample is then a window: `tokens`, `document_ids` and `positions`, each int32
    `[block_size + 1]`. No token comes twice. Ids number the documents of a window from 0; positions count
    from 0 where a document, or its rest, begins; padding has the id -1. Keys: "FIRST DOCUMENT'S KEY/NUMBER".

    Args:
        block_size: tokens that the model sees at once.
        field: the field with the tokens, integers `[n]`, or with the text if there is a tokenizer.
        tokenizer: a `tokenizers.Tokenizer`, the path of its JSON, or a function `str -> list[int]`.
        eos: a token to be put after each document.
        split: cut a document where a window ends. False: only if longer than a window; each goes into the
            fullest of 64 open windows with room for it (bounded best fit: Csirik and Johnson, "Bounded Space
            On-Line Bin Packing", 2001; Ding et al., "Fewer Truncations Improve …", arXiv:2404.10830).
        pad: the token to fill windows up with. None: the last window of a unit, unless full, is left out
            and counted as dropped; a unit without any full window is skipped, with its reason.

    Documents that cannot be used are skipped and counted. Raises ConfigError for options that cannot work.
    """
    block_size = check_count("block_size", block_size, 1, _LARGEST - 1)
    for name, token in (("eos", eos), ("pad", pad)):
        check_count(name, 0 if token is None else token, 0, _LARGEST)
    if not split and pad is None:
        raise ConfigError("split=False leaves room at the end of windows: give pad=, the token to put there")
    if isinstance(tokenizer, str | os.PathLike):
        path, library = os.fspath(tokenizer), require("tokenizers", "text", "a path as tokenizer=")
        try:
            tokenizer = library.Tokenizer.from_file(path)
        except Exception as error:  # the library raises nothing more special
            raise ConfigError(f"tokenizer={path!r}: no usable tokenizer.json: {error}") from error
    packing = PackTokens(block_size, field, tokenizer, eos, split, pad)
    if not (tokenizer is None or packing.is_library or callable(tokenizer)):
        raise ConfigError(f"tokenizer={tokenizer!r}: give a tokenizers.Tokenizer, its path, or a function")
    return packing


@dataclass(slots=True, eq=False)
class _Window:
    """A window that is being packed: the key of its first document, and the `room` for tokens left."""

    key: str
    room: int
    pieces: list[Tokens] = field(default_factory=list)

    def sample(self, pad: int | None) -> dict[str, Tokens]:
        lengths = [len(piece) for piece in self.pieces]
        padding = np.zeros(self.room, np.int32)
        ids = np.repeat(np.arange(len(lengths)), lengths)
        return {
            "tokens": np.concatenate([*self.pieces, padding + np.int32(pad or 0)]),
            "document_ids": np.concatenate([ids, padding - 1], dtype=np.int32),
            "positions": np.concatenate([*map(np.arange, lengths), padding], dtype=np.int32),
        }


def packed_windows(documents: Iterator[Document], size: int, *, split: bool) -> Iterator[_Window]:
    """Yield windows of `size` tokens with all of `documents`; if `split`, all but the last one are full."""
    open_windows, by_room = list[_Window](), attrgetter("room")
    for key, document in documents:
        done = 0
        while done < len(document):
            room = open_windows[0].room if split and open_windows else size
            piece = document[done : done + room]
            done += len(piece)
            fitting = [window for window in open_windows if window.room >= len(piece)]
            if not fitting:
                if len(open_windows) == _MOST_OPEN:
                    yield open_windows.pop(open_windows.index(min(open_windows, key=by_room)))
                fitting.append(_Window(key, size))
                open_windows += fitting
            window = min(fitting, key=by_room)
            window.pieces.append(piece)
            window.room -= len(piece)
            if not window.room:
                open_windows.remove(window)
                yield window
    yield from open_windows


class PackedSource:
    """The windows that `packing` makes of the documents of `inner`, unit by unit."""

    def __init__(self, inner: base.Source, packing: PackTokens) -> None:
        self.packing, self.inner = packing, cast(Any, inner)
        self.fingerprint = f"{inner.fingerprint}, packed:{packing.block_size}:{packing.fingerprint}"
        self._lock = CallLock(packing.tokenizer is None or packing.is_library)

    @property
    def num_units(self) -> int | None:
        return cast("int | None", self.inner.num_units)

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        """Yield the windows of a unit; None for one that is left out, which counts as dropped."""
        packing, size = self.packing, self.packing.block_size + 1
        problems = base.Problems(f"unit {unit}")
        documents = self._documents(self.inner.read(unit, rng), problems)
        for number, window in enumerate(packed_windows(documents, size, split=packing.split)):
            is_left_over = window.room and packing.pad is None
            if is_left_over and not number:
                problems.add(
                    f"fewer tokens than one window of {size:,}: give pad=, the token to fill it up with"
                )
            else:
                yield f"{window.key}/{number}", None if is_left_over else window.sample(packing.pad)
        problems.raise_any()

    def _documents(self, samples: Iterator[tuple[str, Any]], problems: base.Problems) -> Iterator[Document]:
        """Yield the keys and tokens of all usable `samples`, and add the others to `problems`."""
        ends = np.array([] if self.packing.eos is None else [self.packing.eos], np.int32)
        try:
            for key, sample in samples:
                metering.fetched(0)
                try:
                    if len(tokens := self._tokens(sample)):
                        yield key, np.append(tokens, ends)
                except SampleError as error:  # without the key: one mistake is to be one reason
                    problems.add(str(error))
        except SampleError as error:  # at the end of the unit
            problems.add(str(error), error.lost)

    def _tokens(self, sample: Any) -> Tokens:
        """The tokens of a document. Raises SampleError for a sample that has none."""
        packing, name = self.packing, self.packing.field
        if not isinstance(sample, Mapping) or name not in sample:
            fields = ", ".join(map(repr, sample)) if isinstance(sample, Mapping) else type(sample).__name__
            raise SampleError(f"has no field {name!r} to pack, but {fields}: give pack_tokens(field=)")
        value = sample[name]
        if isinstance(value, str) == (packing.tokenizer is None):
            raise SampleError(
                f"field {name!r} is {type(value).__name__}: with tokenizer= pack text, else tokens"
            )
        with self._lock.held(), guard_user_code(f"pack_tokens() of field {name!r}"):
            tokens = np.asarray(value if packing.tokenizer is None else packing.encode(value))
        if tokens.ndim != 1 or (len(tokens) and (tokens.dtype.kind not in "iu" or (tokens >> 31).any())):
            what = f"{tokens.dtype} {list(tokens.shape)}: tokens are integers [n] from 0 to 2**31 - 1"
            raise SampleError(f"field {name!r} is {what}")
        return tokens.astype(np.int32)

    @property
    def listing_digest(self) -> str:
        return base.listing_digest_of(self.inner)

    @property
    def round_ends(self) -> tuple[int, ...]:
        return self.inner.round_ends if isinstance(self.inner, base.DivisibleSource) else ()

    def parts_for(self, limit_bytes: int) -> int:
        return self.inner.parts_for(limit_bytes) if isinstance(self.inner, base.DivisibleSource) else 1

    def divided(self, parts: int) -> PackedSource:
        return type(self)(self.inner.divided(parts), self.packing)

    def remote_of(self, unit: int) -> Hashable:
        return self.inner.remote_of(unit) if isinstance(self.inner, MixSource) else None


class NamedPackedSource(PackedSource):
    """The same of a source whose units have names; its listing may go on growing."""

    @property
    def first_names(self) -> Names:
        return cast(Names, self.inner.first_names)

    @property
    def is_listing(self) -> bool:
        return isinstance(self.inner, base.IncrementalSource) and self.inner.is_listing

    def more_names(self, last: str) -> Iterator[Page]:
        yield from self.inner.more_names(last)

    def complete(self) -> None:
        self.inner.complete()

    def over(self, names: Names) -> base.Source:
        return type(self)(self.inner.over(names), self.packing)


def apply_packing(source: base.Source, transform: Any) -> tuple[base.Source, Callable[..., Any] | None]:
    """Return `source` and `transform`; for a packing, the source of its windows and no transform."""
    if not isinstance(transform, PackTokens):
        return source, transform
    kind = NamedPackedSource if isinstance(source, base.NamedSource) else PackedSource
    return kind(source, transform), None
