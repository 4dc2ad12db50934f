"""What the drives give is measured through a store of its own, which is as it was afterwards."""

import http.server
import threading
from pathlib import Path

import pytest

from tests.store.kit import config
from tutti_sglang.errors import StoreError
from tutti_sglang.schedule.profiling import DRIVES, Drives, _save, measure_drives, profile, save_sms, saved_drives
from tutti_sglang.store import ObjectStore
from tutti_sglang.store.directory import PROFILES

MIB = 1 << 20


def test_what_was_measured_of_sms_stays_beside_what_is_measured_of_drives(tmp_path: Path) -> None:
    settings = config(tmp_path)
    folder = settings.index_path / PROFILES
    folder.parent.mkdir(exist_ok=True)
    save_sms(folder, [(8, 4e9)])
    assert saved_drives(folder) == Drives([], 0.0, 0.0, 0.0, [(8, 4e9)])
    _save(settings, Drives([(1, 1.0)], 2e9, 1e9, 1e9))
    assert saved_drives(folder) == Drives([(1, 1.0)], 2e9, 1e9, 1e9, [(8, 4e9)])


def test_the_drives_are_measured_and_the_store_is_empty_afterwards(disk: Path) -> None:
    settings = config(disk, max_size=64 * MIB, segment_size=4 * MIB, staging_size=32 * MIB)
    drives = measure_drives(settings)
    assert [nbytes for nbytes, _ in drives.loads] == [MIB, 4 * MIB]
    assert all(seconds > 0 for _, seconds in drives.loads)
    assert min(drives.read, drives.write, drives.mixed) > 0
    store = ObjectStore(settings)
    assert store.stats().objects == 0
    assert store.verify().good
    store.close()


def test_mixing_is_the_share_that_is_lost() -> None:
    assert Drives([], read=2e9, write=1e9, mixed=1e9).mixing == 0.5


@pytest.mark.parametrize("content", [b"", b"[]", b'{"loads": 3}'])
def test_figures_of_drives_that_cannot_be_read_are_none(tmp_path: Path, content: bytes) -> None:
    assert saved_drives(tmp_path) is None
    (tmp_path / DRIVES).write_bytes(content)
    assert saved_drives(tmp_path) is None


def test_a_server_that_is_not_there_is_an_error_that_says_so(disk: Path) -> None:
    settings = config(disk, max_size=64 * MIB, segment_size=4 * MIB, staging_size=32 * MIB)
    with pytest.raises(StoreError, match="does not answer"):
        profile("http://127.0.0.1:9", settings, new=(64,), prefix=(0,), rounds=1)


def test_a_server_that_saves_no_table_here_is_an_error_that_says_so(disk: Path) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        """Some server, not one with the tier on this store."""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    settings = config(disk, max_size=64 * MIB, segment_size=4 * MIB, staging_size=32 * MIB)
    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(StoreError, match="saved no table"):
            profile(f"http://127.0.0.1:{server.server_port}", settings, new=(64,), prefix=(0,), rounds=1)
        server.shutdown()
