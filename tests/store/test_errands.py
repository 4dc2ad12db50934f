"""System calls made beside the caller: who asks waits for so long and no longer, and nothing is overtaken or lost."""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.kit import eventually
from tutti_sglang.store.errands import Errands

LONG = 20.0


class Hang:
    """A call that comes back when it is told to."""

    def __init__(self, result: int = 7) -> None:
        self.gate = threading.Event()
        self.result = result

    def __call__(self) -> int:
        assert self.gate.wait(LONG)
        return self.result


def test_results_and_errors_are_those_of_the_call() -> None:
    errands = Errands()
    assert errands.call(lambda: 5, LONG) == 5
    with pytest.raises(FileNotFoundError):
        errands.call(lambda: os.stat("/nowhere"), LONG)
    errands.close(lambda: None)


def test_a_call_that_hangs_is_waited_for_once_and_the_next_ones_are_not_made() -> None:
    errands, hang, made = Errands(), Hang(), list[int]()
    with pytest.raises(TimeoutError):
        errands.call(hang, 0.01)
    assert errands.stuck
    with pytest.raises(TimeoutError):
        errands.call(lambda: made.append(1), LONG)
    hang.gate.set()
    assert eventually(lambda: not errands.stuck)
    assert errands.call(lambda: 3, LONG) == 3
    assert made == []
    errands.close(lambda: None)


def test_what_comes_too_late_is_undone_and_what_is_asked_for_later_comes_after_it() -> None:
    errands, hang, order = Errands(), Hang(), list[str]()
    with pytest.raises(TimeoutError):
        errands.call(hang, 0.01, undo=lambda result: order.append(f"undone {result}"))
    errands.later(lambda: order.append("later"))
    errands.later(lambda: os.stat("/nowhere"))
    hang.gate.set()
    assert eventually(lambda: order == ["undone 7", "later"])
    assert errands.call(lambda: len(order), LONG) == 2
    errands.close(lambda: None)


@pytest.mark.parametrize("act", [lambda: os.stat("/nowhere"), lambda: 5])
def test_what_comes_in_time_is_not_undone(act: Callable[[], object]) -> None:
    errands, undone = Errands(), list[object]()
    with contextlib.suppress(FileNotFoundError):
        errands.call(act, LONG, undone.append)
    errands.close(lambda: None)
    assert undone == []


def test_a_call_waits_for_its_turn_beside_one_that_takes_long() -> None:
    """Its own time begins with its turn: a slow neighbour is no hang."""
    errands, slow = Errands(), Hang()
    threads = [threading.Thread(target=errands.call, args=(slow, LONG))]
    threads[0].start()
    answers: list[int] = []
    threads.append(threading.Thread(target=lambda: answers.append(errands.call(lambda: 1, 0.5))))
    threads[1].start()
    threads[1].join(0.8)
    slow.gate.set()
    for thread in threads:
        thread.join(LONG)
    assert answers == [1]
    assert not errands.stuck
    errands.close(lambda: None)


def test_close_waits_for_nothing_and_gives_back_when_all_is_done(tmp_path: Path) -> None:
    """A descriptor must not be somebody else's while a call that names it is still to come."""
    errands, hang = Errands(), Hang()
    fd = os.open(tmp_path, os.O_RDONLY)
    (tmp_path / "file").write_text("")
    with pytest.raises(TimeoutError):
        errands.call(hang, 0.01)
    errands.later(lambda: os.unlink("file", dir_fd=fd))
    errands.close(lambda: os.close(fd))
    os.fstat(fd)
    with pytest.raises(TimeoutError):
        errands.call(lambda: None, LONG)
    hang.gate.set()
    assert eventually(lambda: not os.path.exists(f"/proc/self/fd/{fd}"))
    assert not (tmp_path / "file").exists()
    errands.close(lambda: None)
