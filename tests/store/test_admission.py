"""A page is written at its second sight; nothing is written beyond the daily budget."""

import datetime
import secrets

import numpy as np

from tutti_sglang.store import admission
from tutti_sglang.store.admission import Seen
from tutti_sglang.store.index import KEY_SIZE


def test_a_key_is_known_the_second_time_and_new_the_third() -> None:
    seen, keys = Seen(), secrets.token_bytes(100 * KEY_SIZE)
    assert not seen.again(keys).any()
    assert seen.again(keys).all()
    assert not seen.again(keys).any()


def test_other_keys_are_not_taken_for_known() -> None:
    seen = Seen(1 << 10)
    for _ in range(200):
        assert not seen.again(secrets.token_bytes(100 * KEY_SIZE)).any()


def test_most_recent_keys_are_remembered_and_old_ones_make_room() -> None:
    seen = Seen(1 << 12)
    old, new = secrets.token_bytes(20_000 * KEY_SIZE), secrets.token_bytes(400 * KEY_SIZE)
    seen.again(old)
    seen.again(new)
    assert seen.again(new).mean() > 0.9
    assert seen.again(old).mean() < 0.3


def test_a_key_twice_in_a_batch_and_no_keys() -> None:
    seen, key = Seen(), secrets.token_bytes(KEY_SIZE)
    seen.again(key * 2)
    assert seen.again(key).all()
    assert seen.again(b"").tolist() == []
    assert np.array_equal(seen.again(b""), np.empty(0, np.bool_))


def test_days_follow_each_other_in_utc() -> None:
    late = datetime.datetime(2026, 1, 31, 23, 59, tzinfo=datetime.UTC)
    assert admission.day(late + datetime.timedelta(minutes=1)) == admission.day(late) + 1
    west = late.astimezone(datetime.timezone(datetime.timedelta(hours=-8)))
    assert admission.day(west.astimezone(datetime.UTC)) == admission.day(late)
