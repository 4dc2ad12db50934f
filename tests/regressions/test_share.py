"""SHARE: what another program, or a bad disk, put into the files of a store is data to be checked, never trusted."""

import contextlib
import random
import sqlite3
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.store.kit import eventually, get, lookup, namespace, open_store, put, store_pages, value
from tutti_sglang.errors import ForeignStoreError
from tutti_sglang.store import superblock
from tutti_sglang.store.keys import marks
from tutti_sglang.store.superblock import Superblock

BLOCK = Superblock(format=superblock.FORMAT, store="0" * 32, drive=0, segment_size=1 << 20).sealed()
GOOD = (
    b'{"format":3,"store":"00000000000000000000000000000000","drive":0,"segment_size":1048576,"check":"'
    + BLOCK.check.encode()
    + b'"}'
)


def test_the_good_superblock_is_read() -> None:
    assert superblock.parse(GOOD, "here") == BLOCK


@given(at=st.integers(0, len(GOOD) - 1), put_in=st.binary(max_size=9), cut=st.integers(0, 9))
@example(at=0, put_in=b"[" * 9, cut=0)
@example(at=62, put_in=b"9" * 9, cut=1)
def test_a_superblock_that_was_touched_is_refused_or_says_the_same(at: int, put_in: bytes, cut: int) -> None:
    """B106, B67: elsewhere lengths and offsets were taken from files without a check."""
    data = GOOD[:at] + put_in + GOOD[at + cut :]
    with contextlib.suppress(ForeignStoreError):
        assert superblock.parse(data, "here") == BLOCK


_SPOILERS = {
    "a record of another length": "update objects set record = substr(record, 1, 7) where rowid_ in ({0})",
    "an empty record": "update objects set record = x'' where rowid_ in ({0})",
    "a record of random bytes": "update objects set record = randomblob(32) where rowid_ in ({0})",
    "a record that is a text": "update objects set record = 'text' where rowid_ in ({0})",
    "a slot beyond its segment": "update objects set slot = slot + 100000 where rowid_ in ({0})",
    "a slot of no segment": "update objects set slot = slot + (77 << 24) where rowid_ in ({0})",
    "a slot that is enormous": "update objects set slot = 9223372036854775806 - slot where rowid_ in ({0})",
    "a negative slot": "update objects set slot = -slot where rowid_ in ({0})",
    "free bits cut short": "update free set bits = substr(bits, 1, 1)",
    "a count that is wrong": "update free set count = 1000000",
    "a segment of no slots": "update segments set slots = 0",
    "a segment of many slots": "update segments set slots = 16777215",
    "a cycle of unknown drives": "update segments set cycle = '[7, 9]'",
    "an epoch from long ago": "update epoch set value = -5",
}


@pytest.mark.parametrize("spoiler", _SPOILERS)
def test_an_index_with_nonsense_in_it_costs_what_it_concerns(disk: Path, spoiler: str) -> None:
    """B106: never wrong bytes, never an exception, never an access outside; a store that goes on."""
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(40))
    assert store.close()
    statement = _SPOILERS[spoiler].replace("rowid_ in ({0})", "slot % 3 = 0")
    with contextlib.closing(sqlite3.connect(disk / "index.db", isolation_level=None)) as connection:
        connection.execute("drop trigger deleted")
        assert connection.execute(statement).rowcount
    store = open_store(disk)
    ns = store.attach(namespace())
    for _ in range(3):
        get(store, ns, *range(40))
        lookup(store, ns, *range(40))
        put(store, ns, *range(40, 60))
        store.drain(8)
    get(store, ns, *range(60))
    store.close()


def test_a_bit_of_a_namespaces_number_does_not_give_one_models_pages_to_another(disk: Path) -> None:
    """B106: equal prompts have equal keys in every namespace, and the bytes have the checksum that the record says."""
    store = open_store(disk)
    spaces = [store.attach(namespace(model)) for model in "abc"]
    store_pages(store, spaces[0], *range(20))
    assert spaces[2] == spaces[0] | 2
    assert store.close()  # the table in memory does not know of it: in use, all would be absent
    with contextlib.closing(sqlite3.connect(disk / "index.db", isolation_level=None)) as connection:
        mark = lambda key: int.from_bytes(marks(spaces[2], key).tobytes(), "little", signed=True)  # noqa: E731
        connection.create_function("mark_of", 1, mark)
        connection.execute(
            "update objects set id = cast(x'00000003' || substr(id, 5) as blob), mark = mark_of(substr(id, 5))"
        )
    store = open_store(disk)
    assert [store.attach(namespace(model)) for model in "abc"] == spaces
    assert not any(get(store, spaces[2], *range(20)))
    assert value(store, "tutti_missed_objects", reason="checksum") == 20
    assert eventually(lambda: store.verify().good), "what could not be delivered is gone"
    store.close()


def test_random_bytes_anywhere_in_the_index_never_give_wrong_bytes(disk: Path) -> None:
    """B106: a disk that forgets bits, in the file that says where everything is."""
    store = open_store(disk / "good")
    store_pages(store, store.attach(namespace()), *range(60))
    assert store.close()
    whole = (disk / "good" / "index.db").read_bytes()
    rng = random.Random(5)
    for _ in range(25):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 4, 60])):
            data[rng.randrange(100, len(data))] = rng.randrange(256)
        (disk / "good" / "index.db").write_bytes(data)
        with contextlib.suppress(OSError):
            store = open_store(disk / "good")
            with contextlib.suppress(OSError):
                ns = store.attach(namespace())
                get(store, ns, *range(60))
                put(store, ns, *range(60, 80))
                get(store, ns, *range(80))
            store.close()
        for file in disk.glob("good/index.db-*"):
            file.unlink()
    assert value(store, "tutti_hit_objects") >= 0
