"""Archives that came as bytes: which kind they are, and how they are unpacked without leaving their folder."""

from __future__ import annotations

import io
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

_ENDS = {
    **dict.fromkeys((".zip", ".whl"), "zip"),
    **dict.fromkeys((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz"), "tar"),
}
_NAMES = {
    **dict.fromkeys(("zip", "whl", "wheel"), "zip"),
    **dict.fromkeys(("tar", "gztar", "bztar", "xztar", "tgz", "tar.gz"), "tar"),
}


def archive_reader(format_or_path: str) -> Callable[[bytes, Path], None]:
    """What unpacks an archive's bytes into a folder. It raises shutil.ReadError or tarfile.TarError for other bytes.

    Args:
        format_or_path: a format, a file name's end, or a path that has one.

    Raises:
        ValueError: it says nothing of the format.
    """
    kind = _NAMES.get(format_or_path)
    kind = kind or next((kind for end, kind in _ENDS.items() if format_or_path.lower().endswith(end)), None)
    if kind is None:
        raise ValueError(
            f"{format_or_path!r} is no known format of archives; give format= one of {', '.join(sorted(_NAMES))}"
        )
    return _unzip if kind == "zip" else _untar


def _unzip(data: bytes, folder: Path) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(folder)  # which leaves out drives, ".." and leading slashes
    except zipfile.BadZipFile as error:
        raise shutil.ReadError(f"the body is no zip archive: {error}") from error


def _untar(data: bytes, folder: Path) -> None:
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(folder, filter="data")
    except tarfile.ReadError as error:
        raise shutil.ReadError(f"the body is no tar archive: {error}") from error
