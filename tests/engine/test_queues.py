"""What waits for a drive starts in the right order, ends once, and leaves room for what is more urgent."""

import errno
import time

import numpy as np
import pytest

from tutti_sglang.engine.batch import IN_PROGRESS, IOCTX_DTYPE, IoClass
from tutti_sglang.engine.queues import DriveQueue, Job, Task
from tutti_sglang.engine.transfers import Transfer
from tutti_sglang.errors import EngineError

FD = 77


def make_job(transfers: int, deadline: float = float("inf")) -> tuple[Job, list[Transfer]]:
    """Transfers of one IOCTX each, in segment 0."""
    job = Job(np.zeros(transfers, IOCTX_DTYPE), np.zeros(transfers, np.bool_), deadline, None)
    return job, [Transfer(i, i + 1, 0, 0) for i in range(transfers)]


def make_queue(depth: int) -> DriveQueue:
    queue = DriveQueue(depth)
    queue.attach(0, FD)
    return queue


def take_all(queue: DriveQueue, at_once: int = 1) -> list[tuple[Job, int]]:
    """Serve the queue with `at_once` in flight; (job, IOCTX) in the order of their start."""
    queue.stop()
    order, running = [], []
    while task := queue.take():
        order.append((task.job, task.transfer.first))
        running.append(task)
        if len(running) == at_once:
            queue.finish(running.pop(0), 0)
    return order


def take(queue: DriveQueue, count: int) -> list[Task]:
    tasks = [queue.take() for _ in range(count)]
    assert all(tasks)
    return [task for task in tasks if task]


def idle(queue: DriveQueue) -> bool:
    """Whether nothing may start now."""
    return queue._next() is None


def test_demand_starts_before_preload_before_write() -> None:
    queue = make_queue(1)
    jobs = {klass: make_job(2) for klass in IoClass}
    for klass in (IoClass.WRITE, IoClass.PRELOAD, IoClass.DEMAND):
        queue.push(jobs[klass][0], klass, jobs[klass][1])
    order = [job for job, _ in take_all(queue)]
    assert order == [jobs[klass][0] for klass in IoClass for _ in range(2)]


def test_jobs_of_one_class_take_turns() -> None:
    queue = make_queue(1)
    (long, many), (short, few) = make_job(5), make_job(2)
    queue.push(long, IoClass.DEMAND, many)
    queue.push(short, IoClass.DEMAND, few)
    assert [job is short for job, _ in take_all(queue)] == [False, True, False, True, False, False, False]


@pytest.mark.parametrize(
    ("depth", "writes", "with_preload"), [(1, 1, 1), (2, 1, 1), (4, 2, 3), (8, 6, 7), (16, 12, 14)]
)
def test_lower_classes_leave_room_for_higher_ones(depth: int, writes: int, with_preload: int) -> None:
    queue = make_queue(depth)
    for klass, expected in ((IoClass.WRITE, writes), (IoClass.PRELOAD, with_preload), (IoClass.DEMAND, depth)):
        queue.push(*_swap(make_job(50), klass))
        started = sum(queue._running)
        take(queue, expected - started)
        assert sum(queue._running) == expected
        if klass is not IoClass.DEMAND:
            assert idle(queue)


def _swap(made: tuple[Job, list[Transfer]], klass: IoClass) -> tuple[Job, IoClass, list[Transfer]]:
    return made[0], klass, made[1]


def test_demand_in_flight_does_not_stop_writes() -> None:
    queue = make_queue(4)
    queue.push(*_swap(make_job(2), IoClass.DEMAND))
    take(queue, 2)
    queue.push(*_swap(make_job(9), IoClass.WRITE))
    take(queue, 2)


def test_what_is_late_comes_without_a_file() -> None:
    queue = make_queue(4)
    for deadline, fd in ((time.monotonic() - 1, None), (float("inf"), FD)):
        job, transfers = make_job(1, deadline)
        queue.push(job, IoClass.DEMAND, transfers)
        (task,) = take(queue, 1)
        assert (task.file.fd if task.file else None) == fd


def test_what_has_no_file_ends_at_once() -> None:
    queue = make_queue(4)
    job, transfers = make_job(3)
    queue.push(job, IoClass.DEMAND, [transfers[0], transfers[1]._replace(segment=9), transfers[2]])
    assert job.results().tolist() == [IN_PROGRESS, -errno.EBADF, IN_PROGRESS]


def test_drop_ends_what_waits_of_one_job_or_segment() -> None:
    queue = make_queue(4)
    queue.attach(5, FD + 1)
    (one, of_one), (other, of_other) = make_job(3), make_job(2)
    queue.push(one, IoClass.DEMAND, of_one)
    queue.push(other, IoClass.DEMAND, [of_other[0], of_other[1]._replace(segment=5)])
    take(queue, 1)
    queue.drop(one, errno.ECANCELED)
    assert one.results().tolist() == [IN_PROGRESS, -errno.ECANCELED, -errno.ECANCELED]
    assert queue.detach(5, 0)
    assert other.results().tolist() == [IN_PROGRESS, -errno.EBADF]
    queue.drop(None, errno.EIO)
    assert other.results().tolist() == [-errno.EIO, -errno.EBADF]
    assert other.done.is_set()
    assert not one.done.is_set()


def test_drain_and_detach_wait_for_the_last_task() -> None:
    queue = make_queue(4)
    queue.push(*_swap(make_job(1), IoClass.DEMAND))
    assert not queue.drain(0)
    (task,) = take(queue, 1)
    assert not queue.drain(0.01)
    assert not queue.detach(0, 0.01)
    assert not queue.detach(0, 0)
    queue.finish(task, 0)
    assert queue.drain(0)
    assert queue.detach(0, 0)


def test_what_comes_after_stop_is_cancelled() -> None:
    queue = make_queue(4)
    queue.stop()
    job, transfers = make_job(2)
    queue.push(job, IoClass.DEMAND, transfers)
    assert job.results().tolist() == [-errno.ECANCELED] * 2
    assert queue.take() is None


def test_a_segment_has_one_file() -> None:
    with pytest.raises(EngineError, match="has a file"):
        make_queue(4).attach(0, 3)


def test_a_job_of_bad_ioctx_is_done_at_once_and_holds_nothing() -> None:
    job = Job(np.zeros(2, IOCTX_DTYPE), np.ones(2, np.bool_), 0.0, object())
    assert job.done.is_set()
    assert job.hold is None
    assert job.results().tolist() == [-errno.EINVAL] * 2
