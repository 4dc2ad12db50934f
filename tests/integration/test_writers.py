"""Of ranks that hold the same bytes, one writes to each store."""

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

from types import SimpleNamespace

from tests.integration.host_pools import storage
from tutti_sglang.config import Config
from tutti_sglang.integration.writers import Place, let_write, must_write, place

HERE, THERE = "a" * 32, "b" * 32


@pytest.mark.parametrize(
    ("stores", "writers"),
    [
        ([HERE, HERE, HERE, HERE], [0]),
        ([HERE, HERE, THERE, THERE], [0, 2]),
        ([HERE, THERE, HERE, THERE], [0, 1]),
        (["", "", HERE, HERE], [0, 2]),
    ],
)
def test_the_first_rank_of_each_store_writes(stores: list[str], writers: list[int]) -> None:
    places = [Place(store, (0, 0, 0, 0), rank) for rank, store in enumerate(stores)]
    assert [rank for rank, each in enumerate(places) if must_write(each, places)] == writers


def test_ranks_with_other_bytes_do_not_count() -> None:
    stages = [Place(HERE, (stage, 0, 0, 0), rank) for stage in range(2) for rank in range(2)]
    assert [must_write(each, stages) for each in stages] == [True, False, True, False]


def test_a_place_is_told_as_text_and_a_directory_without_a_store_has_no_name(tmp_path: Path) -> None:
    mine = place(storage(tp_rank=1, tp_size=2, pp_rank=1, pp_size=2), Config(storage_dirs=(str(tmp_path), "/nowhere")))
    assert mine == Place("", (1, 0, 0, 0), 1)
    assert msgspec.json.decode(msgspec.json.encode(mine), type=Place) == mine


def test_sglang_is_told_to_back_up_on_a_rank_that_it_would_have_read_only() -> None:
    controller = SimpleNamespace(storage_config=storage(tp_rank=1, tp_size=2, is_mla_model=True))
    assert not controller.storage_config.is_storage_writer
    let_write(controller)
    assert controller.storage_config.is_storage_writer
    assert controller.storage_config.tp_rank == 1
