"""profile: what is printed of a table; the measurement itself is tested beside the server (tests/integration)."""

from pathlib import Path

from tests.cli.kit import parsed
from tutti_sglang.cli.profile import figures
from tutti_sglang.schedule.profiling import Drives, Profile
from tutti_sglang.schedule.slack import Cell, Saved


def test_medians_by_shape_and_the_cost_of_mixing() -> None:
    cells = [
        Cell(new=64, prefix=1024, seconds=[0.3, 0.1, 0.2], beside=[0.5]),
        Cell(new=256, prefix=0, seconds=[], beside=[]),
    ]
    table = Saved(version=1, identity={"model": "m"}, cells=cells)
    found = figures(Profile(Path("/x/t.json"), table, Drives([(1 << 20, 0.1)], 2e9, 1e9, 1e9)))
    assert found["prefills"] == [{"new": 64, "prefix": 1024, "alone": 0.2, "beside": 0.5}]
    assert found["mixing"] == 0.5


def test_a_server_that_does_not_answer_is_an_error_with_a_hint(disk: Path) -> None:
    settings = '{"segment_size": "4MiB", "min_free_space": 0, "staging_size": "32MiB"}'
    found = parsed("profile", "--url", "http://127.0.0.1:9", "--dir", disk, "--config", settings)
    assert found["exit_code"] == 2
    assert "does not answer" in found["error"]["message"]
