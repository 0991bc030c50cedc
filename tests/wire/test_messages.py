"""What a structure holds when a field was not given."""

import pytest

from rd2h.wire import LayerMetadata, ReadFailed, ReadReadyBatch, ReadRequest


def test_without_indexer_ids_the_main_list_serves_both() -> None:
    request = ReadRequest("a", [3, 1, 2])
    assert request.indexer_block_ids == [3, 1, 2]
    # A copy: nobody changes one list through the other.
    assert request.indexer_block_ids is not request.main_block_ids


def test_no_indexer_ids_are_not_the_same_as_ids_not_given() -> None:
    assert ReadRequest("a", [3, 1, 2], []).indexer_block_ids == []


@pytest.mark.parametrize(
    ("tensors", "count", "groups", "has_indexer"),
    [
        (1, 1, [0], False),
        (2, 2, [0, 0], False),
        (2, 1, [0, 1], True),
        (3, 2, [0, 0, 1], True),
        (4, 2, [0, 0, 1, 1], True),
    ],
)
def test_layer_metadata_works_out_what_it_was_not_given(
    tensors: int, count: int, groups: list[int], has_indexer: bool
) -> None:
    layer = LayerMetadata([0] * tensors, [8] * tensors, main_tensor_count=count)
    assert layer.block_size_scale == [1] * tensors
    assert layer.tensor_group_idx == groups
    assert layer.has_indexer is has_indexer


def test_main_tensors_are_two_unless_said() -> None:
    assert LayerMetadata([0, 1, 2], [1, 1, 1]).main_tensor_count == 2


def test_a_batch_comes_from_one_contributor_unless_said() -> None:
    batch = ReadReadyBatch(0, "l", [])
    assert (batch.done_ext_ids, batch.group_member_idx, batch.tp_ratio) == ([], 0, 1)
    assert batch.done_ext_ids is not ReadReadyBatch(0, "l", []).done_ext_ids


def test_a_failure_has_no_text_unless_said() -> None:
    assert ReadFailed(1).error == ""


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        ReadFailed(1).layer_idx = 2  # type: ignore[misc]


def test_messages_can_be_taken_apart_by_pattern() -> None:
    match ReadReadyBatch(4, "l", [ReadRequest("a", [1])]):
        case ReadReadyBatch(4, name, [ReadRequest("a", blocks)]):
            assert (name, blocks) == ("l", [1])
        case _:
            pytest.fail("it did not match")
