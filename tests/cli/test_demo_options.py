"""What the demo refuses, in one line, before anything starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from rd2h.cli.demo import run
from rd2h.cli.demo.options import (
    DemoOptions,
    Fault,
    OptionError,
    Sabotage,
    check_options,
)
from rd2h.cli.demo.plan import check_memory
from rd2h.cli.demo.shape import CacheShape, Tensor
from rd2h.cli.main import app


def test_the_defaults_make_sense() -> None:
    check_options(DemoOptions())


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (DemoOptions(prefill_tp=3), "3 is not a multiple of decode tensor-parallel size 2"),
        (DemoOptions(decode_tp=0), "must be at least 1"),
        (DemoOptions(layers=0), "--layers is 0; it is at least 1"),
        (DemoOptions(layers=5000), "--layers is 5000; the demo goes up to 4096"),
        (DemoOptions(latent=0), "--latent is 0"),
        (DemoOptions(rope=-1), "--rope is -1"),
        (DemoOptions(indexer_dim=-1), "--indexer-dim is -1"),
        (DemoOptions(no_indexer_every=-1), "--no-indexer-every is -1"),
        (DemoOptions(block_size=0), "--block-size is 0"),
        (DemoOptions(requests=0), "--requests is 0"),
        (DemoOptions(requests=1 << 17), "--requests is 131072"),
        (DemoOptions(tokens=0), "--tokens is 0"),
        (DemoOptions(tokens=1 << 40), "--tokens is 1099511627776; it is at most"),
        (DemoOptions(tokens=1 << 30, block_size=1), "--tokens / --block-size is"),
        (DemoOptions(no_indexer_every=10**30), "--no-indexer-every is"),
        (DemoOptions(chunk=0), "--chunk is 0; it is at least 1"),
        (DemoOptions(chunk=-512), "--chunk is -512"),
        (DemoOptions(buffers=0), "--buffers is 0; it is at least 1"),
        (DemoOptions(seed=-1), "--seed is -1"),
        (DemoOptions(seed=1 << 64), "--seed"),
        (DemoOptions(timeout=0), "--timeout is 0"),
        (DemoOptions(timeout=float("nan")), "--timeout is nan"),
        (DemoOptions(timeout=float("inf")), "--timeout is inf; it is at least 5 and at most 86400"),
        (DemoOptions(timeout=1e300), "--timeout is 1e+300; it is at least 5 and at most 86400"),
        (DemoOptions(lic8=True, indexer_dim=0), "--lic8 quantises the indexer"),
        (DemoOptions(requests=1, fault=Fault.ABORT), "--fault abort needs --requests 2"),
        (DemoOptions(requests=1, fault=Fault.KILL_DECODE), "--fault kill-decode needs"),
        (DemoOptions(requests=1, fault=Fault.KILL_PREFILL), "--fault kill-prefill needs"),
        (DemoOptions(layers=1, fault=Fault.KILL_PREFILL), "--fault kill-prefill needs --layers 2"),
        (DemoOptions(layers=3, fault=Fault.SLOW_DECODE), "needs more --layers than --buffers 3"),
        (DemoOptions(chunk=128, sabotage=Sabotage.SWAP), "two blocks in the first chunk"),
    ],
)
def test_what_makes_no_sense_is_refused(changed: DemoOptions, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_options(changed)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_block_that_is_not_whole_words_is_refused() -> None:
    with pytest.raises(OptionError, match="a block of the rope tensor has 6 bytes"):
        CacheShape.from_options(DemoOptions(rope=3, block_size=1, latent=4))


def test_a_run_that_does_not_fit_is_refused_with_both_values() -> None:
    options = DemoOptions()
    check_memory(options, 6 << 30)
    with pytest.raises(OptionError, match=r"about 2\.\d GiB .* and 1\.0 GiB are available; lower"):
        check_memory(options, 1 << 30)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prefill-tp", "3"], "not a multiple"),
        (["--chunk", "0"], "--chunk is 0"),
        (["--requests", "60000", "--tokens", "1000000"], "GiB are available"),
        (["--rope", "3", "--block-size", "1"], "6 bytes"),
    ],
)
def test_the_command_refuses_with_one_line_and_status_2(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "run_demo", lambda *_: pytest.fail("it started"))
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert text in result.stderr
    assert result.stderr.startswith("rd2h demo: ")
    assert result.stderr.count("\n") == 1


def test_an_engine_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import rd2h.engines

    def create_engine(name: str) -> None:
        raise rd2h.engines.EngineUnavailableError(f"{name} is not installed")

    monkeypatch.setattr(rd2h.engines, "create_engine", create_engine)
    result = CliRunner().invoke(app, ["demo", "--engine", "nixl"])
    assert result.exit_code == 2
    assert result.stderr == "rd2h demo: --engine nixl: nixl is not installed\n"


def test_the_shape_follows_the_options() -> None:
    shape = CacheShape.from_options(DemoOptions())
    assert [(s.tensor, s.block_bytes) for s in shape.main] == [
        (Tensor.LATENT, 512 * 2 * 128),
        (Tensor.ROPE, 64 * 2 * 128),
    ]
    assert [(s.tensor, s.block_bytes) for s in shape.indexed] == [(Tensor.INDEXER, 128 * 2 * 128)]
    assert shape.indexed_layers == 61 - 6
    assert shape.indexed_of(9) == ()
    assert shape.indexed_of(10) == shape.indexed


def test_lic8_makes_the_indexer_smaller_and_adds_scales() -> None:
    shape = CacheShape.from_options(DemoOptions(lic8=True))
    assert [(s.tensor, s.block_bytes) for s in shape.indexed] == [
        (Tensor.INDEXER, 128 * 128),
        (Tensor.SCALE, 2 * 128),
    ]


def test_tensors_of_width_0_are_left_out() -> None:
    options = replace(DemoOptions(), rope=0, indexer_dim=0, no_indexer_every=0)
    shape = CacheShape.from_options(options)
    assert [s.tensor for s in shape.main] == [Tensor.LATENT]
    assert shape.indexed_layers == 0
