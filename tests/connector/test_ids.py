import pytest

from rd2h.connector.ids import external_id


@pytest.mark.parametrize(
    ("internal", "external"),
    [
        ("cmpl-x-0-0123abcd", "cmpl-x-0"),
        ("a-00000000", "a"),
        ("a-00000000-ffffffff", "a-00000000"),  # exactly one
        ("a", "a"),
        ("a-0123abc", "a-0123abc"),
        ("a-0123abcde", "a-0123abcde"),
        ("a-0123ABCD", "a-0123ABCD"),
        ("a-0123abcg", "a-0123abcg"),
        ("a-0123abcd\n", "a-0123abcd\n"),
        ("a0123abcd", "a0123abcd"),
        ("-0123abcd", ""),
        ("", ""),
    ],
)
def test_vllms_own_suffix_is_taken_off_and_nothing_else(internal: str, external: str) -> None:
    assert external_id(internal) == external


def test_what_vllm_makes_of_an_id() -> None:
    from vllm.utils import random_uuid

    suffix = random_uuid()[:8]
    assert external_id(f"cmpl-a-0-{suffix}") == "cmpl-a-0"
