"""The demo, whole: two starts of the real server."""

import pytest

from tests.cli.kit import parsed


@pytest.mark.server
def test_a_conversation_outlives_its_server() -> None:
    turns = {turn["what"]: turn for turn in parsed("demo", "--words", "300")["data"]}
    restored = turns["after the restart"]
    assert restored["storage"] > restored["prompt"] // 2
    assert turns["the same length, never seen"]["storage"] < restored["storage"]
    assert all(turn["seconds"] > 0 for turn in turns.values())
