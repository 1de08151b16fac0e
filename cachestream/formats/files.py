"""Files with one sample each: images, arrays, JSON, text or bytes, on any remote of fsspec."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np

from cachestream.formats.together import (
    Metadata,
    Partner,
    Together,
    chosen_kind,
    names_to_compare,
    partners_in,
    tables_in,
)
from cachestream.sources.api import (
    Buffer,
    ConfigError,
    File,
    FileList,
    FilesSource,
    FirstNames,
    Format,
    ImageOptions,
    Item,
    Labels,
    Names,
    Page,
    Part,
    SampleError,
    Size,
    SourceError,
    SourceUnavailableError,
    Url,
    check_encoding,
    check_mapping,
    decode_fields,
    decode_json_value,
    decode_with,
    extension_of,
    fingerprint_of,
    guard_user_code,
    is_image,
    kind_of,
    loss_of,
    named_decoder,
)

logger = logging.getLogger("cachestream")

_KIND_NAMES: Final = {
    "image": "images",
    "text": "texts",
    "array": ".npy files",
    "arrays": ".npz files",
    "json": ".json files",
    "data": "files as bytes",
}
_INDEX_HEAD_BYTES: Final = 512
_IMAGE_HEAD_BYTES: Final = 64 << 10
_EXACT: Final = (".png", ".tif", ".tiff")  # the endings of masks and depth, which may be more than RGB
_INDEX_TITLES: Final = (b"<title>index of /", b"<title>directory listing for /")


class FilesFormat(Format):
    """Files decoded by their extension, with a label: see `FileSource` for the options.

    `label_index` are the labels of folders, by name, and `labels` those of a manifest, by file.
    """

    name = "files"
    holds_many = False

    def __init__(
        self,
        label: str | Callable[[str], Any] | None,
        images: ImageOptions,
        encoding: str,
        decoders: Mapping[str, str] | None = None,
    ) -> None:
        if not (label is None or label == "folder" or callable(label)):
            raise ConfigError(f"label={label!r}: give 'folder', a function of the path, or None")
        self._encoding, self.images, self.label = check_encoding(encoding), images, label
        self.label_index: Mapping[str, int] = {}
        self.partners: tuple[Partner, ...] = ()
        self.paired: frozenset[str] = frozenset()  # the folders that tell what belongs together: no labels
        self.metadata: Metadata | None = None
        self.optional: frozenset[str] = frozenset()  # fields that have a default
        self.labels: Labels | None = None
        labelled = fingerprint_of(label) if callable(label) else label
        self.identity = (f"label={labelled}",)
        self.encoded: tuple[str, ...] = () if self._encoding == "utf-8-sig" else (f"encoding={encoding}",)
        check_mapping("decoders", decoders, "{'image': 'index'}")
        self._decoders = {
            name: named_decoder(name, wanted, images) for name, wanted in (decoders or {}).items()
        }
        if self._decoders:
            self.encoded += (f"decoders={sorted((decoders or {}).items())}",)

    def take_together(self, together: Together, metadata: Metadata | None) -> None:
        """Set what belongs to each file. Raises ConfigError for a decoder of a field that there is not."""
        self.partners, self.metadata = together.partners, metadata
        self.paired = frozenset(name for one in self.partners for name in one.folder or ())
        known = (*_KIND_NAMES, *(partner.field for partner in self.partners))
        if unknown := sorted(self._decoders.keys() - {*known}):
            raise ConfigError(
                f"decoders= names the field {unknown[0]!r}: files have the fields {', '.join(known)}"
            )

    def keeps_values(self, field: str) -> bool:
        """Return whether images of a field are not decoded to RGB."""
        return field in self._decoders

    def prefix(self, file: File, part: Part) -> str:
        return file.key

    def read(self, file: File, part: Part, rng: np.random.Generator) -> Iterator[Item]:
        """Yield the sample of a file, or those of a JSON array."""
        label, kind = self._folder_label(file), kind_of(extension_of(file.key))
        found = self._decoded(file, kind, file.whole())
        if callable(self.label):
            with guard_user_code(f"label({file.key!r})"):
                label = {"label": self.label(file.key)}
        if isinstance(found, list):
            yield from ((f"#{number}", record | label) for number, record in enumerate(found))
        else:
            beside = self._beside(file)
            yield "", found | (beside | label if callable(self.label) else label | beside)

    def _decoded(
        self, file: File, field: str, data: Buffer, *, as_one: bool = False
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the fields of a file, `data`: its value is `field`, unless it has fields of its own.

        Those of each object of an array in JSON; `as_one`: the array's text.
        """
        extension = extension_of(file.key)
        if file.is_web and not extension and _is_index_page(data):
            raise SampleError(
                f"{file.where}: is the server's page about a folder: end its URL with '/' to read its files"
            )
        kind = kind_of(extension)
        if (decoder := self._decoders.get(field)) is not None:
            return {field: decode_with(decoder, data, f"{extension} file ({kind})", file.where)}
        found = decode_fields(data, extension, file.where, self.images, self._encoding)
        if as_one and isinstance(found, list):
            return {field: decode_json_value(data)}
        return {field: found[kind]} if isinstance(found, dict) and found.keys() == {kind} else found

    def _beside(self, file: File) -> dict[str, Any]:
        """Return the fields of what belongs to a file. Raises SampleError if it is not there."""
        fields: dict[str, Any] = {}
        for partner in self.partners:
            name, is_optional = partner.name_for(file.name), partner.field in self.optional
            if name is None and not is_optional:
                raise SampleError(
                    f"{file.where}: has no {partner.field!r}, as it does not lie where the others do; to "
                    f"keep it, give a default, fields={{{partner.field!r}: …}}"
                )
            if name is None:
                continue
            beside = file.beside(name)
            data = beside.whole_or_none() if is_optional else beside.whole()
            if data is not None:
                fields |= cast(dict[str, Any], self._decoded(beside, partner.field, data, as_one=True))
        if self.metadata is not None:
            fields |= self.metadata.of(file.name)
        return fields

    def _folder_label(self, file: File) -> dict[str, Any]:
        """Return the label by the folder of a file, or by the manifest."""
        if self.labels is not None:
            return {"label": self.labels[file.index]}
        if not self.label_index or not _takes_label(file.key):
            return {}
        folder = file.name.rpartition("/")[0].rpartition("/")[2]
        label = self.label_index.get(folder)
        if label is None and folder in self.paired:
            raise SampleError(
                f"{file.where}: has no label: its folder is one of files that belong together, and most "
                "others are in folders of classes; give label= a function of the path, or label=None"
            )
        if label is None:
            raise SampleError(
                f"{file.where}: has no label: while a listing grows, only folders beside those of the first "
                "files have one; clear the cache, and give first_names=None to list all before, label= a "
                "function of the path, or label=None"
            )
        return {"label": label}


class FileSource(FilesSource):
    """The files of a folder, a wildcard, a `{000..127}` range, or a list of these; a unit is a file.

    A sample is a dict. Images (Pillow) have the field "image", uint8 `[3, H, W]` RGB; `.npy` "array"; `.npz`
    and objects in `.json` their own fields; text "text" (str); anything else "data" (bytes). The key is the
    path below the common root of all files. An array of objects in `.json` is a sample for each of them, with
    keys "path#number".

    label: "folder" gives images an int "label", the rank of their parent folder's name among the names of all
    folders with images (`label_names`), as torchvision's ImageFolder does; images that all lie in the root
    have none. While a listing grows, the names are those of the folders beside the folder of the first files;
    images in other folders are skipped and counted. A function of the key labels every file. None: no labels.
    With a `Manifest` that has labels, every file has its own.

    storage_options are passed to fsspec's driver and may hold secrets, which are shown nowhere. extensions
    keeps the files with these endings (".jpg", "png"); recursive=False keeps those in the folder itself.
    Hidden files in folders are left out. Without extensions, one kind of files is kept of folders and
    wildcards: images, if they are a tenth as many as any other kind, else the most frequent kind. The number
    of files left out is logged. extensions="*" keeps all, for a transform that makes their samples alike.

    Of folders and wildcards, files that belong together are one sample, if they do for half of the samples at
    least, which is logged: files of one name (`1.png`, `1.txt`, `1.json`, `1.npy`, `1_mask.png`), those in
    parallel folders (`images/1.png`, `masks/1.png`), and the columns of a `metadata.jsonl` or `.csv` whose
    "file_name" names them. The fields are "text", "array", "mask", …, and those of the object and the table.
    A sample is skipped and counted if one of its files is missing and `fields` has no default for it.
    extensions="*" keeps files apart.

    fields: a default for each optional field, `{"caption": ""}`, for samples that lack it. encoding: that of
    text and JSON. resize and crop are for images: the shorter side or (height, width), and the centre; see
    `ImageOptions`. decoders: `{"image": "index"}` keeps the values of images as they are stored, `[H, W]`:
    the numbers of a mask with a palette, depth of 16 bits; `{"image": "raw"}` the bytes of the file. Any
    field of files that belong together may be named, such as "mask".

    first_names: a tree of folders, or on S3 any folder or wildcard, with more files than this number is not
    listed to its end here: a worker with the order "shuffle" or "sequential" begins with the first files
    while the rest is listed. "auto": 1,000 (a page of S3), or 1,000,000 on a local disk. Until `complete`
    lists the rest, `num_units` is None. None: list all at once.

    Other files are listed once, here; the source is picklable and small. Raises ConfigError for invalid URLs
    or options, SourceError for files that are missing, empty or forbidden, and SourceUnavailableError for a
    remote that does not answer.
    """

    reads = FilesFormat
    format: FilesFormat

    def __init__(
        self,
        urls: Url | Iterable[Url] | FileList,
        *,
        storage_options: Mapping[str, Any] | None = None,
        label: str | Callable[[str], Any] | None = "folder",
        extensions: str | Iterable[str] | None = None,
        recursive: bool = True,
        resize: Size | None = None,
        crop: Size | None = None,
        first_names: FirstNames = "auto",
        fields: Mapping[str, Any] | None = None,
        encoding: str = "utf-8",
        decoders: Mapping[str, str] | None = None,
    ) -> None:
        format = FilesFormat(label, ImageOptions(resize, crop), encoding, decoders)  # noqa: A001
        format.optional = frozenset(fields or ())
        if isinstance(urls, FileList):  # `open_source` has listed them
            files = copy.copy(urls)
        else:
            files = FileList(
                urls,
                storage_options,
                owner="FileSource",
                extensions=extensions,
                recursive=recursive,
                labelled=True,
                first_names=first_names,
            )
        together, metadata = Together(""), None
        if files.in_folders and extensions != "*":
            together, metadata = _find_together(files, fields)
        format.take_together(together, metadata)
        self._left_out = _keep_samples(files, together)
        format.encoded += together.identity
        super().__init__(format, files, fields=fields)
        if label == "folder":
            format.labels = self._files.labels
        self._label_names = () if format.labels is None else format.labels.names
        if label == "folder" and format.labels is None:
            self._label_by(self._labelled_folders())
        self._warn_of_loss()

    def _identity(self) -> tuple[str, ...]:
        where, *filters = self._files.identity
        form, images = self.format, self.format.images.identity
        return (where, *form.identity, *filters, *images, *self._defaults.identity, *form.encoded)

    def _warn_of_loss(self) -> None:
        """Log a warning if the first file is an image whose values are not kept whole, as depth and masks,
        or one that belongs to it.

        Of remotes, whose files are not read here, nothing is said.
        """
        first = File(self._files, 0, self._kept)
        named = {kind_of(extension_of(first.key)): first}
        for partner in self.format.partners:
            if (name := partner.name_for(first.name)) is not None:
                named[partner.field] = first.beside(name)
        for field, file in named.items():
            if self.format.keeps_values(field) or not file.is_local or extension_of(file.key) not in _EXACT:
                continue
            try:
                with file.stream() as stream:
                    loss = loss_of(stream.read(_IMAGE_HEAD_BYTES))
            except SourceError:  # the read will report it
                continue
            if loss:
                logger.warning(
                    "%s %s; to keep the values of depth images and masks, give decoders={%r: 'index'}",
                    file.where,
                    loss,
                    field,
                )

    def _labelled_folders(self) -> set[str]:
        """Return the names of the folders that hold files with a label; "" for the root.

        Of an open list, which stays open, these are the folders of the known files, and those beside the
        folder of the uppermost known file that have not been listed yet, whatever they hold. Others, such as
        deeper ones, are not found.
        """
        files, found = self._files, set[str]()
        for name in files.names:
            if (folder := name.rpartition("/")[0]) not in found and _takes_label(files.key_of(name)):
                found.add(folder)
        if files.is_open:
            uppermost = min(found, key=lambda one: (one.count("/"), one), default="")
            found |= files.folders_ahead(uppermost[: uppermost.rfind("/") + 1])
        return {folder.rpartition("/")[2] for folder in found}

    def _label_by(self, folders: set[str]) -> None:
        """Take the labels from `folders`, but for those that tell what belongs together.

        There are none if most samples lie in such folders.
        """
        paired = self.format.paired
        if not folders.isdisjoint(paired):
            lie_in = Counter(name.rpartition("/")[0] for name in self._files.names)
            in_pairs = sum(n for folder, n in lie_in.items() if folder.rpartition("/")[2] in paired)
            folders = set() if 2 * in_pairs >= len(self._files) else folders - paired
        self._label_names = tuple(sorted(folders)) if folders - {""} else ()
        self.format.label_index = {name: index for index, name in enumerate(self._label_names)}

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the folders by label; () without labels, or with labels of another kind."""
        return self._label_names

    @property
    def num_units(self) -> int | None:  # type: ignore[override]  # of this source alone it may be unknown
        """The number of files; None while only the first of them are listed: `complete` lists the rest."""
        return None if self.is_listing else len(self._files)

    # --- a listing that goes on (see `IncrementalSource`)

    @property
    def is_listing(self) -> bool:
        """True while only the first names are listed."""
        return self._files.is_open

    def more_names(self, last: str) -> Iterator[Page]:
        """Yield the pages of names after `last`."""
        return self._files.more(last)

    def complete(self) -> None:
        """List the rest, here and now. Labels change only if an image lies in a folder without one."""
        if self.is_listing:
            self._files.complete()
            self._set_units(None, self._files.names)
            if self.format.label == "folder" and not (folders := self._labelled_folders()) <= set(
                self._label_names
            ):
                self._label_by(folders)

    def over(self, names: Names) -> FileSource:
        """Return the same source over the listing `names`, as far as that has come."""
        made = copy.copy(self)
        made._files = self._files.over(names)
        made._set_units(None, names)
        return made

    def key(self, unit: int) -> str:
        """Return the path of `unit` below the common root, without a query."""
        return self._locate(unit)[0].key

    def _locate(self, unit: int) -> tuple[File, Part]:
        if not 0 <= unit < len(self._files):
            self.complete()
        return super()._locate(unit)

    def __repr__(self) -> str:
        more = " and more" if self.is_listing else ""
        left_out = f", {self._left_out:,} of other kinds left out" if self._left_out else ""
        return f"<FileSource {self._files.shown}, {len(self._files):,} files{more}{left_out}>"


def _find_together(files: FileList, fields: Mapping[str, Any] | None) -> tuple[Together, Metadata | None]:
    """Return what belongs to the files of a folder, by their names, which is logged; and its metadata."""
    tables = tables_in(files)
    kind, partners, mains = partners_in([name for name in names_to_compare(files) if name not in tables])
    metadata = _metadata(files, tables, fields, mains)
    tables = tables if metadata is not None else ()
    if not partners and not tables:
        return Together(""), None
    together = Together(kind, partners, tables)
    having = (name for name in mains if all(one.name_for(name) is not None for one in partners))
    example = next(having, mains[0])
    beside = [f"{one.name_for(example)} as {one.field!r}" for one in partners]
    logger.warning(
        "%s: files that belong together are one sample: %s and %s; to read each file as a sample of its own, "
        "give extensions='*'",
        files.shown,
        example,
        ", ".join([*beside, *tables]),
    )
    return together, metadata


def _metadata(
    files: FileList, tables: Sequence[str], fields: Mapping[str, Any] | None, samples: Collection[str]
) -> Metadata | None:
    """Return what `tables` tell of files, if they name half of `samples`."""
    if not tables:
        return None
    try:
        metadata = Metadata(files, tables, fields)
        return metadata if metadata.names_half(samples) else None
    except SourceUnavailableError:
        raise
    except (ConfigError, SourceError):  # tables of something else
        return None


def _keep_samples(files: FileList, together: Together) -> int:
    """Leave out the files of other kinds than the one to read, and those that belong to others.

    Return the number of the former, which is logged.
    """
    if together.partners or together.tables:
        keep, kind = together.is_sample, together.kind
        if files.is_open and not any(map(keep, files.names)):
            files.complete()
    else:
        counts = files.kinds() if files.is_searched else Counter[str]()
        if len(counts) < 2:
            return 0
        kind = chosen_kind(counts)
        keep = Together(kind).is_sample
    left_out = [key for key in files.keep_only(keep) if not together.belongs(key)]
    if left_out:
        listed = "the first " if files.is_open else ""
        logger.warning(
            "%s: %s are read, and %d of %s%d files, of other kinds (such as %s), left out; to read several "
            "kinds, name them with extensions=; to give each sample what another file says of it, such as a "
            "text, give label= a function of its path",
            files.shown,
            _KIND_NAMES[kind],
            len(left_out),
            listed,
            len(left_out) + len(files),
            left_out[0],
        )
    return len(left_out)


def _takes_label(key: str) -> bool:
    """Return whether the file `key` gets the label of its folder."""
    return is_image(extension_of(key))


def _is_index_page(data: Buffer) -> bool:
    """Return whether `data` is a folder's index page as made by a usual server (Apache, nginx, Python's)."""
    head = bytes(memoryview(data)[:_INDEX_HEAD_BYTES]).lower()
    return any(title in head for title in _INDEX_TITLES)
