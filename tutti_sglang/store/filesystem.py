"""Which file system a path is on: a WAL shared between machines would be corrupted."""

import ctypes
import os
from pathlib import Path

from tutti_sglang.errors import StoreError

_NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x01021997: "9P",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x65735546: "FUSE",
    0x6A656A63: "virtiofs",
    0x61756673: "aufs",
}
"""statfs(2) f_type. FUSE is what S3, JuiceFS, GlusterFS and sshfs mount as: whether it is local cannot be told."""


def look_at(path: Path | str) -> str:
    """What to do about a file system that does not answer: what touches it, `ls` and `df` too, would hang as well."""
    return f"Is its mount alive? See: grep {path} /proc/self/mounts; dmesg | tail"


def refuse_network(directory: Path) -> None:
    """StoreError where `directory` is on a network file system."""
    if name := network_name(directory):
        raise StoreError(
            f"The index directory {directory} is on a network file system ({name}), where an index that several "
            "processes share gets corrupted",
            "Set index_dir to a directory on a local disk; storage_dirs may stay where they are",
        )


def network_name(directory: Path) -> str:
    """The network file system that `directory` is on; empty where it is on none. StoreError where it is not there."""
    return _NETWORK.get(_magic(directory), "")


def _magic(directory: Path) -> int:
    buffer = ctypes.create_string_buffer(256)  # struct statfs starts with f_type, a word, on 64-bit Linux
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(directory), buffer):
        error = ctypes.get_errno()
        raise StoreError(f"The index directory {directory} cannot be used ({os.strerror(error)})", "Check index_dir")
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF
