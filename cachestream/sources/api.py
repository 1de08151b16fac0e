"""All that a format of files may use, built in or of another package: public, as the names of `cachestream`
are.

| for | names |
|-|-|
| a format of files | `Format`, `FilesSource`, `File`, `Files`, `Part` |
| what `Format.read` yields | `Item`, `Rows`, `Skipped`; made by `decoded` |
| an array read in windows | `ArrayFile`, `ArrayLayout`, `read_window`, `parse_npy_header` |
| a source of another kind | `Problems`, `check_unit`, `one_by_one`, `Names`, `Remote` |
| messages | `map_errors`, `redact`, `redact_text`, `absolute` |
| bytes | `Stream`, `StreamFile`, `SeekableFile`, `RemoteObject`, `fetch`, `decompressed`, `check_object` |
| values in files | `decode_value`, `decode_fields`, `decode_with`, `named_decoder`, `call_decoder` |
| images | `decode_image`, `ImageOptions` |
| tables and objects | `ColumnOptions`, `Columns`, `table_rows`, `usable_rows`, `plain_fields`, `Defaults` |
| options | `check_count`, `check_columns`, `check_encoding`, `check_mapping`, `whole_number` |
| others | `require`, `fingerprint_of`, `json_field` |
"""

from __future__ import annotations

# ruff: noqa: F401  all of it is for others
from cachestream.config import check_count, check_mapping, format_size, require, whole_number
from cachestream.errors import (
    CacheStreamError,
    ConfigError,
    SampleError,
    SourceError,
    SourceUnavailableError,
)
from cachestream.listing.file_list import FileList, FirstNames, Url
from cachestream.listing.manifest import NUMBER_TYPES, Labels, is_sound_csv, parse_float, parse_int
from cachestream.listing.names import Names, Page
from cachestream.listing.patterns import COMPRESSED_ENDINGS, absolute, extension_of, is_image, kind_of
from cachestream.listing.table_formats import refuse_tables
from cachestream.sources.array_windows import BATCH_BYTES, ArrayFile, read_window
from cachestream.sources.base import (
    Item,
    Problems,
    Rows,
    Skipped,
    check_unit,
    decoded,
    one_by_one,
)
from cachestream.sources.decode.arrow_columns import Batch, Columns, expanded_bytes, load_arrow
from cachestream.sources.decode.compression import DecompressedStream, decompressed, require_decompressor
from cachestream.sources.decode.images import (
    Buffer,
    ImageOptions,
    Pixels,
    Size,
    decode_image,
    decode_raw_image,
    loss_of,
    stack_images,
)
from cachestream.sources.decode.table_columns import ColumnOptions, same_columns, table_rows, usable_rows
from cachestream.sources.decode.values import (
    ArrayLayout,
    decode_fields,
    decode_integer,
    decode_json_value,
    decode_value,
    decode_with,
    json_field,
    looks_like_image,
    named_decoder,
    parse_npy_header,
)
from cachestream.sources.fields import Defaults, check_columns, check_encoding, plain_fields
from cachestream.sources.files_source import FilesSource
from cachestream.sources.format import File, Files, Format, Kept, Part, malformed
from cachestream.sources.user_code import CallLock, call_decoder, fingerprint_of, guard_user_code
from cachestream.transport.backends import Span
from cachestream.transport.file_objects import SeekableFile
from cachestream.transport.metering import PIECE_BYTES, fetched
from cachestream.transport.object_limit import TooLargeError
from cachestream.transport.object_limit import check as check_object
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import (
    ChangedError,
    classify,
    map_errors,
    patiently,
    redact,
    redact_text,
)
from cachestream.transport.remote_object import RemoteObject, fetch, open_stream, size_of
from cachestream.transport.stream import Stream, StreamFile
