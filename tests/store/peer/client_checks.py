"""Mooncake's client itself, in the process of the test. Run by test_mooncake.py in a process of its own: threads of the
client may end the process once its master is gone."""

import pytest

from tests.store.peer.fleet_kit import Fleet
from tutti_sglang.memory import Region
from tutti_sglang.store.peer.base import Place, State
from tutti_sglang.store.peer.mooncake import MooncakePeer

SIZE = 40_000


@pytest.fixture(scope="module")
def client(mooncake: Fleet) -> MooncakePeer:
    """The engine itself, in this process, with memory for 16 objects."""
    region = Region(16 * SIZE)
    client = MooncakePeer(mooncake.peer(), Place(region.address, region.size))
    client.region = region  # type: ignore[attr-defined]
    return client


def _places(client: MooncakePeer, *numbers: int, size: int = SIZE) -> list[Place]:
    return [Place(client.region.address + number * SIZE, size) for number in numbers]  # type: ignore[attr-defined]


def test_objects_come_back_whole_or_not_at_all(client: MooncakePeer) -> None:
    view = client.region.view[: 16 * SIZE].reshape(16, SIZE)  # type: ignore[attr-defined]
    for number in range(4):
        view[number] = number + 1
    names = [f"whole-{number}" for number in range(4)]
    assert client.put(names, _places(client, 0, 1, 2, 3)) == [State.DONE] * 4
    assert client.exists([*names, "nobody"]) == [State.DONE] * 4 + [State.ABSENT]
    states = client.get([*names, "nobody"], _places(client, 8, 9, 10, 11, 12))
    assert states == [State.DONE] * 4 + [State.ABSENT]
    assert (view[8:12] == view[:4]).all()
    assert client.get(names[:1], _places(client, 8, size=SIZE - 8)) == [State.FAILED], "it has another size"
    client.health()


def test_putting_again_changes_nothing(client: MooncakePeer) -> None:
    view = client.region.view[: 16 * SIZE].reshape(16, SIZE)  # type: ignore[attr-defined]
    view[0], view[1] = 1, 2
    assert client.put(["again"], _places(client, 0)) == [State.DONE]
    assert client.put(["again"], _places(client, 1))[0] in (State.DONE, State.EXISTS)
    assert client.get(["again"], _places(client, 2)) == [State.DONE]
    assert (view[2] == 1).all()


def test_a_prefix_is_taken_as_it_is_written(client: MooncakePeer) -> None:
    names = ["a.b-1", "a.b-2", "axb-3", "za.b-4"]
    client.put(names, _places(client, 0, 1, 2, 3))
    assert client.remove("a.b-") == 2
    assert client.exists(names) == [State.ABSENT, State.ABSENT, State.DONE, State.DONE]
