"""Tensors in an object store, such as S3, through fsspec: any URL whose scheme fsspec knows."""

from __future__ import annotations

import io
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

from lockstep.errors import UserError


class FsspecStore:
    """Keeps each file of tensors as one object."""

    def write(self, url: str, chunks: Iterable[memoryview]) -> None:
        file_system, path = _locate(url)
        with suppress(PermissionError):
            file_system.makedirs(file_system._parent(path), exist_ok=True)

        # Closing completes the object, even after an error: then it is deleted with its folder.
        with file_system.open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def open(self, url: str) -> io.BufferedIOBase:
        file_system, path = _locate(url)
        # No read-ahead: tensors are read one by one, each in full.
        return cast(io.BufferedIOBase, file_system.open(path, "rb", cache_type="none"))

    def delete(self, url: str) -> None:
        file_system, path = _locate(url)
        file_system.rm_file(path)


def check_scheme(url: str, example: str) -> None:
    """Raise a UserError if fsspec does not know the scheme of this URL, or a package for it is missing."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        raise UserError(f"checkpoint.storage={url}: there is no kind of store {scheme}://", "", example) from None
    except ImportError as error:
        fix = f"pip install the package, such as 'lockstep-train[s3]' or 'lockstep-train[gcs]'; or {example}"
        raise UserError(f"checkpoint.storage={url} needs a package that is not installed", str(error), fix) from None


def _locate(url: str) -> tuple[Any, str]:
    """Return the file system of fsspec for this URL, and the path in it."""
    import fsspec.core

    return fsspec.core.url_to_fs(url)
