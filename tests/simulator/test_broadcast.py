"""Weight broadcasts between processes on simulated NPUs."""

import pytest
from ranks import run_ranks

from cookbook_npu.weights.transport import open_store

pytestmark = pytest.mark.lane("devices")


def test_a_receiver_that_dies_and_one_that_hangs():
    """The third process dies before the second update; the other two continue in a new group

    Later one of them hangs in a broadcast: the other reports the timeout, not a closed connection."""
    store = open_store("127.0.0.1")
    ends = run_ranks("broadcast_jobs:take_part", 3, {"port": store.port}, timeout=240)
    expected = ends[2][1]
    assert [seen[0] for seen, _ in ends] == [expected] * 3
    for seen, block in ends[:2]:
        given_up = "a weight broadcast was given up: rollout2 died"
        assert seen[1:] == [given_up, True]
        assert block == [1] * 8
