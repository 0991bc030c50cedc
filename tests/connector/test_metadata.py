"""vLLM carries a step's metadata to workers in other processes."""

import pickle

from rd2h.connector.metadata import DecodeEndpoint, DecodeStep, PrefillStep
from tests.connector.hosts import announced, load


def test_steps_survive_pickling() -> None:
    step = PrefillStep(
        frozenset([1, 2]), (announced("a", DecodeEndpoint("h", 1, 2), [1, 2]),), ("b",)
    )
    assert pickle.loads(pickle.dumps(step)) == step
    decode = DecodeStep((load("a", [3, 4], cached=1),), ("c",))
    assert pickle.loads(pickle.dumps(decode)) == decode
