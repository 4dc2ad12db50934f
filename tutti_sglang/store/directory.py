"""Opening a directory of a store: made 0700 if absent, never through a symlink, never one that holds other things."""

import contextlib
import errno
import os
import stat

from tutti_sglang.errors import ForeignStoreError, StoreError
from tutti_sglang.store import probe, superblock

INDEX, SEGMENTS, SUMS, OWNERS, CLOCK, LOCK = "index.db", "segments", "sums", "owners", "clock", "lock"
PROFILES, RAW = "profiles", "raw"
"""What lies in a store's directories beside the superblock."""

_OWN = frozenset([superblock.NAME, SEGMENTS, SUMS, OWNERS, CLOCK, LOCK, PROFILES, RAW])
_IGNORED = frozenset(["lost+found"])
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

GONE = frozenset(
    [errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ETIMEDOUT, errno.EROFS, errno.EUCLEAN, errno.EREMOTEIO]
)
"""What a drive that is dead, unplugged or half dead answers: the store starts without it."""


def open_directory(path: str) -> int:
    """A file descriptor of the directory at `path`, created with its parents where absent. StoreError; OSError of
    GONE."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not os.path.lexists(path):
            with contextlib.suppress(FileExistsError):  # another rank was faster
                os.mkdir(path, 0o700)
        fd = os.open(path, _FLAGS)
    except OSError as error:
        raise _explain(error, path) from error
    try:
        _make_private(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_subdirectory(parent: int, name: str) -> int:
    """A file descriptor of the directory `name` in the open directory `parent`, created 0700 where absent. OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    return os.open(name, _FLAGS, dir_fd=parent)


def refuse_foreign(directory: int, path: str) -> None:
    """ForeignStoreError when the directory holds anything that is not ours."""
    foreign = [name for name in os.listdir(directory) if not _ours(name)]
    if foreign:
        raise ForeignStoreError(
            f"{path} is not a store and not empty (it holds {', '.join(sorted(foreign)[:3])!s})",
            "Name an empty or new directory, as in " + os.path.join(path, "tutti"),
        )


def identity(path: str, name: str) -> tuple[int, int] | None:
    """Device and inode of a file in a directory; None when it is not there or cannot be seen."""
    try:
        found = os.stat(os.path.join(path, name), follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _ours(name: str) -> bool:
    return name in _OWN or name in _IGNORED or name.startswith((INDEX, probe.PREFIX, f".{superblock.NAME}-"))


def _make_private(fd: int, path: str) -> None:
    found = os.fstat(fd)
    if stat.S_IMODE(found.st_mode) & 0o077:
        try:
            os.fchmod(fd, 0o700)
        except OSError as error:
            raise StoreError(
                f"{path} can be read by others, and its mode cannot be changed ({error.strerror})",
                f"The KV cache is as private as the prompts. Run: chown $USER {path} && chmod 700 {path}",
            ) from error


def _explain(error: OSError, path: str) -> OSError:
    if error.errno in GONE:
        return error
    if os.path.islink(path):
        return StoreError(
            f"{path} is a symbolic link; links are not followed",
            f"Write the real path, {os.path.realpath(path)}",
        )
    if isinstance(error, NotADirectoryError | FileExistsError):
        return StoreError(f"{path} is not a directory", "Name a directory")
    return StoreError(
        f"{path} cannot be opened ({error.strerror})",
        f"Check that user {os.geteuid()} may write there: ls -ld {path}",
    )
