"""How one version of an object is named, in requests and in what the drivers tell of it."""

from __future__ import annotations

from typing import Any

__all__ = ["s3_target", "version_of"]


def s3_target(filesystem: Any, path: str) -> dict[str, str]:
    """The arguments that name an object in requests to S3."""
    bucket, key, version = filesystem.split_path(path)
    return {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}


def version_of(info: dict[str, Any]) -> tuple[str, ...]:
    """What names one version of an object, under the names that the drivers have for it."""
    names = ("ETag", "etag", "generation", "md5Hash", "content_md5", "size", "mtime", "LastModified")
    return tuple(str(info[name]) for name in names if name in info)
