"""A drive leaves after repeated failures or a hang, and is tried again, later and later."""

from tutti_sglang.store import health
from tutti_sglang.store.health import Health


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_batches_without_any_success_put_a_drive_out_of_service_once() -> None:
    drive = Health(Clock())
    for _ in range(health.STRIKES - 1):
        assert not drive.record(1, 1, "EIO")
    assert drive.in_service
    assert drive.record(1, 1, "EIO")
    assert not drive.in_service
    assert drive.reason == "EIO"
    assert not drive.record(1, 1, "EIO"), "it leaves once"


def test_a_success_in_between_forgives() -> None:
    drive = Health(Clock())
    for _ in range(5 * health.STRIKES):
        drive.record(1, 1)
        drive.record(0, 4)
    assert drive.in_service


def test_a_high_rate_of_errors_puts_it_out_of_service_too() -> None:
    drive = Health(Clock())
    for _ in range(100):
        drive.record(1, 2)
    assert not drive.in_service


def test_rare_errors_do_not_however_many_there_are() -> None:
    drive = Health(Clock())
    for _ in range(10_000):
        drive.record(1, 10)
    assert drive.in_service


def test_it_is_tried_later_and_later_and_comes_back() -> None:
    clock = Clock()
    drive = Health(clock)
    assert drive.hang("no answer")
    pauses = []
    for _ in range(8):
        start = clock.now
        while not drive.due():
            clock.now += 0.5
        pauses.append(clock.now - start)
        drive.tried(False)
    assert pauses == sorted(pauses)
    assert pauses[-1] == health.LONGEST_PAUSE
    while not drive.due():
        clock.now += 0.5
    drive.tried(True)
    assert drive.in_service
    assert not drive.due()
    assert drive.hang("again")
    clock.now += health.FIRST_PAUSE
    assert drive.due(), "after a recovery the pauses begin anew"
