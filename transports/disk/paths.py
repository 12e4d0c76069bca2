"""Opening files that a request named: links resolved, under the allowed roots, regular files only."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from updater.core.errors import Failure, Rejected, refuse

_NOT_A_FILE = "name a folder, or a file of weights that lies there as one: no pipe, device or folder in its place"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a file looks like from outside: equal before and after means that no process wrote to it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Fingerprint:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class OpenFile:
    """`path` as named (links not resolved), `name` as shown to people, `fd` owned by the holder."""

    path: str
    name: str
    fd: int
    fingerprint: Fingerprint

    def recheck(self) -> Failure | None:
        """What became of the path since it was opened, or None."""
        try:
            now = Fingerprint.of(os.stat(self.path))
        except OSError as error:
            return Failure("source_missing", f"gone since it was opened: {error.strerror}", file=self.name)
        if now != self.fingerprint:
            return Failure("source_changed", "is not the file that was opened", file=self.name)
        return None


def resolve(path: str, roots: Sequence[str], name: str = "") -> str:
    """The real path. Raises Rejected: `source_outside_roots`, or `source_missing`. No roots allow nothing."""
    shown = name or path
    if not path or "\0" in path:
        raise refuse("source_outside_roots", "not a path", file=shown.replace("\0", "\\0"))
    try:
        real = os.path.realpath(path)
    except OSError as error:
        raise refuse("source_missing", str(error.strerror), file=shown) from None
    if not _inside(real, roots):
        raise refuse("source_outside_roots", "lies under none of the allowed roots, links resolved", file=shown)
    if not os.path.exists(real):
        raise refuse("source_missing", "no such file or directory", file=shown)
    return real


def open_file(path: str, roots: Sequence[str], name: str = "") -> OpenFile:
    """Open for reading. Raises Rejected as `resolve`, or `source_missing` for what is not a readable file."""
    shown = name or path
    real = resolve(path, roots, shown)
    try:
        # not to follow a link that was put there since, not to wait for a writer of a pipe
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise refuse("source_missing", f"cannot be opened: {error.strerror}", file=shown) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise refuse("source_missing", "is not a regular file", file=shown, hint=_NOT_A_FILE)
        _check_opened(fd, roots, shown)
    except Rejected:
        os.close(fd)
        raise
    return OpenFile(path, shown, fd, Fingerprint.of(status))


def read_bytes(path: str, roots: Sequence[str], limit: int, name: str = "") -> tuple[bytes, OpenFile]:
    """A whole file of at most `limit` bytes. The caller closes the file. Raises Rejected."""
    opened = open_file(path, roots, name)
    try:
        if opened.fingerprint.size > limit:
            raise refuse("body_too_large", f"larger than {limit} bytes", file=opened.name)
        with os.fdopen(os.dup(opened.fd), "rb") as stream:
            return stream.read(limit), opened
    except OSError as error:
        os.close(opened.fd)
        raise refuse("read_failed", str(error.strerror), file=opened.name) from None
    except Rejected:
        os.close(opened.fd)
        raise


def read_text(path: str, roots: Sequence[str], limit: int, name: str = "") -> tuple[str, OpenFile]:
    """The same as UTF-8. Raises Rejected `file_header` where it is not."""
    data, opened = read_bytes(path, roots, limit, name)
    try:
        return data.decode(), opened
    except UnicodeDecodeError:
        os.close(opened.fd)
        raise refuse("file_header", "is not UTF-8 text", file=opened.name) from None


def _inside(real: str, roots: Sequence[str]) -> bool:
    """Whether `real`, or a folder above it, is one of the roots."""
    for root in roots:
        top = os.path.realpath(root)
        if real == top or real.startswith(top.rstrip("/") + "/"):
            return True
    return False


def _check_opened(fd: int, roots: Sequence[str], shown: str) -> None:
    """Where the open descriptor really is: a folder on the way may have become a link in between."""
    try:
        real = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return  # no such facility here
    if not _inside(real.removesuffix(" (deleted)"), roots):
        raise refuse("source_outside_roots", "moved out of the allowed roots while it was opened", file=shown)
