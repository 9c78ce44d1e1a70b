"""Arrays arrive at their reserved places, and the stage grows for larger arrays."""

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.runner.staging import Stage


def test_arrays_keep_their_places_until_the_stage_grows() -> None:
    stage = Stage(64, torch.device("cpu"))
    parts = [np.arange(n, dtype=np.int32) for n in (3, 0, 30)]
    places = stage.places([3, 0, 30])
    stage.make_room([3, 0, 30])
    stage.send(parts)
    assert [place.tolist() for place in places] == [part.tolist() for part in parts]
    assert places[2].data_ptr() - places[0].data_ptr() == 32 * 4
    more = [np.arange(n, dtype=np.int32) for n in (33, 70)]
    stage.make_room([33, 70])
    assert [place.tolist() for place in stage.send(more)] == [part.tolist() for part in more]
    assert places[2].tolist() == parts[2].tolist()
