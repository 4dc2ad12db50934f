"""Which directories become drives, which are refused and what the user is told; who is recognised, missing, or new."""

import contextlib
import errno
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.kit import MIB, close_good, get, lookup, namespace, open_store, segment_files, store_pages
from tutti_sglang.errors import CapacityError, ForeignStoreError, StoreError
from tutti_sglang.store import directory, probe, superblock

ROOT = Path(__file__).parents[2]


def run(script: str, *prefix: str) -> subprocess.CompletedProcess[str]:
    """A Python process with the kit, maybe in another environment."""
    command = [*prefix, sys.executable, "-c", "from pathlib import Path\nfrom tests.store.kit import *\n" + script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_new_store_is_private_and_makes_its_parents(disk: Path) -> None:
    home = disk / "a" / "b" / "c"
    old = os.umask(0)
    try:
        store = open_store(home)
        store_pages(store, store.attach(namespace()), *range(10))
        close_good(store)
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(home).st_mode) == 0o700
    for path in home.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_directory_that_others_can_read_is_made_private(disk: Path) -> None:
    disk.chmod(0o755)
    close_good(open_store(disk))
    assert stat.S_IMODE(os.stat(disk).st_mode) == 0o700


def test_a_directory_with_other_things_in_it_is_refused(disk: Path) -> None:
    (disk / "thesis.tex").write_text("years of work")
    with pytest.raises(ForeignStoreError, match=re.escape("thesis.tex")) as caught:
        open_store(disk)
    assert str(disk / "tutti") in caught.value.hint
    assert os.listdir(disk) == ["thesis.tex"]


def test_a_mount_point_with_only_lost_and_found_is_empty(disk: Path) -> None:
    (disk / "lost+found").mkdir()
    close_good(open_store(disk))


def test_an_index_directory_with_other_things_in_it_is_refused(disk: Path) -> None:
    (disk / "etc").mkdir()
    (disk / "etc" / "passwd").write_text("")
    with pytest.raises(ForeignStoreError, match="passwd"):
        open_store(disk / "drive", index_dir=str(disk / "etc"))


def test_another_format_is_refused_by_name(disk: Path) -> None:
    close_good(open_store(disk))
    text = (disk / "TUTTI").read_text().replace(f'"format": {superblock.FORMAT}', '"format": 1')
    (disk / "TUTTI").write_text(text)
    with pytest.raises(ForeignStoreError, match=r"format 1.*reads format 3"):
        open_store(disk)


def test_a_drive_of_another_store_is_refused(disk: Path) -> None:
    close_good(open_store(disk / "a"))
    close_good(open_store(disk / "b"))
    with pytest.raises(ForeignStoreError, match="another store"):
        open_store(disk / "a", disk / "b")
    close_good(open_store(disk / "c", index_dir=str(disk / "index")))
    with pytest.raises(ForeignStoreError, match="another store than the index"):
        open_store(disk / "a", index_dir=str(disk / "index"))


def test_a_copy_of_a_drive_beside_it_is_refused(disk: Path) -> None:
    close_good(open_store(disk / "a", index_dir=str(disk / "index")))
    shutil.copytree(disk / "a", disk / "b")
    with pytest.raises(ForeignStoreError, match="copy"):
        open_store(disk / "a", disk / "b", index_dir=str(disk / "index"))


def test_links_are_not_followed(disk: Path) -> None:
    (disk / "real").mkdir()
    (disk / "link").symlink_to(disk / "real")
    with pytest.raises(StoreError, match="symbolic link") as caught:
        open_store(disk / "link")
    assert str(disk / "real") in caught.value.hint
    close_good(open_store(disk / "real"))
    shutil.move(disk / "real" / "segments", disk / "elsewhere")
    (disk / "real" / "segments").symlink_to(disk / "elsewhere")
    with pytest.raises(StoreError):
        open_store(disk / "real")
    (disk / "real" / "segments").unlink()
    (disk / "real" / "TUTTI").unlink()
    (disk / "real" / "TUTTI").symlink_to("/etc/passwd")
    with pytest.raises(StoreError):
        open_store(disk / "real")


def test_a_file_is_not_a_directory(disk: Path) -> None:
    (disk / "file").write_text("")
    with pytest.raises(StoreError, match="not a directory"):
        open_store(disk / "file")


@pytest.mark.parametrize(("mode", "message"), [(0o700, "ls -ld"), (0o755, "chmod 700")])
def test_a_directory_of_somebody_else_is_refused_with_the_command_that_helps(
    disk: Path, mode: int, message: str
) -> None:
    home = disk / "tutti"
    home.mkdir(mode=mode)
    os.chown(home, 65534, 65534)
    drop = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner,-chown", "--inh-caps=-all")
    done = run(f"open_store(Path({str(home)!r}))", *drop)  # root may do all of this, unless it gives it up
    assert "StoreError" in done.stderr, done.stderr
    assert message in done.stderr.splitlines()[-1]


def test_too_small_a_disk_is_refused_with_what_would_help(disk: Path) -> None:
    with pytest.raises(CapacityError, match="No room for even one segment") as caught:
        open_store(disk, min_free_space=1 << 60)
    assert "min_free_space" in caught.value.hint


def test_drives_are_known_by_their_superblock_not_by_their_order(disk: Path) -> None:
    drives = [disk / "a", disk / "b", disk / "c"]
    index = str(disk / "index")
    store = open_store(*drives, index_dir=index)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(60))
    close_good(store)
    for order in ((2, 0, 1), (1, 2, 0)):
        store = open_store(*(drives[each] for each in order), index_dir=index)
        assert all(get(store, store.attach(namespace()), *range(60)))
        close_good(store)


def test_a_drive_moved_to_another_mount_point_is_recognised(disk: Path) -> None:
    index = str(disk / "index")
    store = open_store(disk / "a", disk / "b", index_dir=index)
    store_pages(store, store.attach(namespace()), *range(60))
    close_good(store)
    shutil.move(disk / "a", disk / "moved")
    store = open_store(disk / "b", disk / "moved", index_dir=index)
    assert all(get(store, store.attach(namespace()), *range(60)))
    close_good(store)


def test_a_missing_drive_makes_misses_and_new_segments_use_the_others(disk: Path) -> None:
    index = str(disk / "index")
    store = open_store(disk / "a", disk / "b", index_dir=index)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(60))
    close_good(store)
    store = open_store(disk / "a", index_dir=index)
    ns = store.attach(namespace())
    assert not any(lookup(store, ns, *range(60)))
    store_pages(store, ns, *range(100, 160))
    assert all(get(store, ns, *range(100, 160)))
    assert store.close()
    store = open_store(disk / "a", disk / "b", index_dir=index)
    ns = store.attach(namespace())
    assert all(get(store, ns, *range(60))), "the drive came back with all it had"
    assert all(get(store, ns, *range(100, 160)))
    close_good(store)


def test_pages_of_a_missing_drive_that_are_put_again_move_to_the_others(disk: Path) -> None:
    index = str(disk / "index")
    store = open_store(disk / "a", disk / "b", index_dir=index)
    store_pages(store, store.attach(namespace()), *range(60))
    close_good(store)
    store = open_store(disk / "b", index_dir=index)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(60))
    assert all(get(store, ns, *range(60)))
    assert store.close()
    store = open_store(disk / "b", disk / "a", index_dir=index)
    assert all(get(store, store.attach(namespace()), *range(60)))
    close_good(store)


def test_an_empty_drive_joins_and_is_used(disk: Path) -> None:
    index = str(disk / "index")
    store = open_store(disk / "a", index_dir=index)
    store_pages(store, store.attach(namespace()), *range(40))
    close_good(store)
    store = open_store(disk / "a", disk / "b", index_dir=index)
    ns = store.attach(namespace())
    assert all(get(store, ns, *range(40)))
    store_pages(store, ns, *range(100, 200))
    assert all(get(store, ns, *range(100, 200)))
    assert segment_files(disk / "b")
    assert superblock.parse((disk / "b" / "TUTTI").read_bytes(), "b").drive == 1
    close_good(store)


def test_a_swapped_drive_gets_a_new_ordinal_and_the_old_ones_objects_are_misses(disk: Path) -> None:
    index = str(disk / "index")
    store = open_store(disk / "a", disk / "b", index_dir=index)
    store_pages(store, store.attach(namespace()), *range(40))
    close_good(store)
    shutil.rmtree(disk / "b")
    store = open_store(disk / "a", disk / "b", index_dir=index)
    ns = store.attach(namespace())
    assert superblock.parse((disk / "b" / "TUTTI").read_bytes(), "b").drive == 2
    assert not any(lookup(store, ns, *range(40)))
    store_pages(store, ns, *range(40))
    assert all(get(store, ns, *range(40)))
    assert store.verify().unreadable == 0
    close_good(store)


def test_a_drive_that_is_dead_at_start_is_left_out(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = str(disk / "index")
    store = open_store(disk / "a", disk / "b", index_dir=index)
    store_pages(store, store.attach(namespace()), *range(40))
    close_good(store)
    opened = directory.open_directory

    def dead(path: str) -> int:
        if path.endswith("/b"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "open_directory", dead)
        store = open_store(disk / "a", disk / "b", index_dir=index)
        ns = store.attach(namespace())
        assert not any(lookup(store, ns, *range(40)))
        store_pages(store, ns, *range(100, 140))
        assert all(get(store, ns, *range(100, 140)))
        assert store.close()
        patch.setattr(directory, "open_directory", lambda path: dead("/b") if path != index else opened(path))
        with pytest.raises(StoreError, match=r"None of storage_dirs.*Input/output error.*tutti doctor"):
            open_store(disk / "a", disk / "b", index_dir=index)
    store = open_store(disk / "a", disk / "b", index_dir=index)
    assert all(get(store, store.attach(namespace()), *range(40)))
    close_good(store)


def test_a_drive_whose_file_system_is_not_mounted_is_left_out_not_filled_anew(disk: Path) -> None:
    """An empty mount point lies on the root file system: a store there would fill the system disk."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("unshare is not allowed here")
    if os.stat(disk).st_dev != os.stat("/").st_dev:
        pytest.skip("/var/tmp is not on the root file system")
    script = f"""
import logging, subprocess
logging.basicConfig()
a, b, index = (Path({str(disk)!r}) / name for name in ("a/tutti", "b", "index"))
a.parent.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", a.parent], check=True)
store = open_store(a, b, index_dir=str(index))
store_pages(store, store.attach(namespace()), *range(40))
close_good(store)
subprocess.run(["mount", "--move", a.parent, "/mnt"], check=True)
store = open_store(a, b, index_dir=str(index))
ns = store.attach(namespace())
assert not any(lookup(store, ns, *range(40)))
store_pages(store, ns, *range(100, 120))
assert store.close()
assert not segment_files(a)
a.rmdir()
subprocess.run(["mount", "--move", "/mnt", a.parent], check=True)
store = open_store(a, b, index_dir=str(index))
assert all(get(store, store.attach(namespace()), *range(40)))
close_good(store)
"""
    done = run(script, "unshare", "-rm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is it mounted?" in done.stderr


def test_the_segment_size_of_a_store_is_fixed_when_it_is_made(disk: Path) -> None:
    store = open_store(disk, segment_size=2 * MIB)
    store_pages(store, store.attach(namespace()), *range(60))
    close_good(store)
    assert superblock.parse((disk / "TUTTI").read_bytes(), "here").segment_size == 2 * MIB


@pytest.mark.parametrize("setting", ["auto", "off", "required"])
def test_direct_io_is_what_the_kernel_says_it_is(disk: Path, setting: str) -> None:
    """What `describe` claims is what the descriptors of the segments have (B92)."""
    store = open_store(disk, direct_io=setting)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(4))
    flags = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # other threads close theirs meanwhile
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.endswith(".seg") and str(disk) in name:
                flags.append(int(re.search(r"flags:\s*(\d+)", Path(f"/proc/self/fdinfo/{fd}").read_text())[1], 8))
    assert flags
    assert all(bool(each & os.O_DIRECT) == ("O_DIRECT" in store.describe()) == (setting != "off") for each in flags)
    assert all(get(store, ns, *range(4)))
    close_good(store)


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM])
def test_a_file_system_without_direct_io_is_used_through_the_page_cache_or_refused(
    disk: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """open(O_DIRECT) succeeds, the first write is refused (B89)."""

    def refusing(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refusing)
        with pytest.raises(StoreError, match="does not take direct I/O"):
            open_store(disk / "required", direct_io="required")
        store = open_store(disk / "auto")
    assert f"page cache (write with O_DIRECT: {os.strerror(error)})" in store.describe()
    ns = store.attach(namespace())
    store_pages(store, ns, *range(4))
    assert all(get(store, ns, *range(4)))
    close_good(store)


def test_a_probe_that_reads_something_else_means_no_direct_io(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open(disk, os.O_RDONLY)
    assert probe.direct_io(fd) == ""
    monkeypatch.setattr(os, "preadv", lambda *_: 4096)
    assert "did not come back" in probe.direct_io(fd)
    assert os.listdir(disk) == []
    os.close(fd)


@pytest.mark.parametrize("where", ["tmpfs", "overlay"])
def test_other_file_systems_work_or_say_why_not(disk: Path, where: str) -> None:
    """In a mount namespace of our own."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("unshare is not allowed here")
    (disk / "m").mkdir()
    mount = {
        "tmpfs": f"mount -t tmpfs -o size=64m none {disk}/m",
        "overlay": f"mkdir {disk}/l {disk}/u {disk}/w && mount -t overlay overlay "
        f"-o lowerdir={disk}/l,upperdir={disk}/u,workdir={disk}/w {disk}/m",
    }[where]
    script = f"""
store = open_store(Path({str(disk / "m" / "tutti")!r}))
ns = store.attach(namespace())
store_pages(store, ns, *range(100))
assert all(get(store, ns, *range(100)))
close_good(store)
print(store.describe())
"""
    program = "from pathlib import Path\nfrom tests.store.kit import *\n" + script
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-ec", f'{mount}; exec "$0" -c "$1"', sys.executable, program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "O_DIRECT" in done.stdout
