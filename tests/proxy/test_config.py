"""Options and addresses: everything that is refused has a reason, in one line."""

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rd2h.proxy.addresses import AddressError, Metaserver, engine_url, is_wildcard
from rd2h.proxy.config import ConfigError, Options, load

ENGINES: dict[str, object] = {"prefill": ["http://p:1"], "decode": ["http://d:2"]}


def refused(given: dict[str, object], *words: str, path: Path | None = None) -> None:
    with pytest.raises(ConfigError) as caught:
        load(path, given)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_defaults() -> None:
    options = load(None, ENGINES)
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    assert options.prefill == ["http://p:1"]


def test_a_value_that_was_not_given_is_no_value() -> None:
    assert load(None, ENGINES | {"port": None}).port == 8000


TOML = """
prefill = ["http://10.0.0.1:8100", "http://10.0.0.2:8100/"]
decode = ["http://[fd00::3]:8200"]
port = 9000
batch_wait = 0.25
"""
YAML = """
prefill: [http://10.0.0.1:8100, http://10.0.0.2:8100/]
decode:
  - http://[fd00::3]:8200
port: 9000
batch_wait: 0.25
"""


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML)])
def test_files(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    options = load(path, {})
    assert options.prefill == ["http://10.0.0.1:8100", "http://10.0.0.2:8100"]
    assert options.decode == ["http://[fd00::3]:8200"]
    assert (options.port, options.batch_wait) == (9000, 0.25)
    # The command line wins.
    assert load(path, {"port": 1, "decode": ["http://x"]}).decode == ["http://x"]
    assert load(path, {"port": 1}).port == 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "prefil = []", ["no prefill engine"]),
        ("a.toml", TOML + "prot = 1", ["unknown field `prot`"]),
        ("a.toml", TOML + "host = 7", ["Expected `str`, got `int`", "$.host"]),
        ("a.toml", "= 1", ["no valid TOML"]),
        ("a.yaml", "a: [", ["no valid YAML"]),
        ("a.yaml", "- a", ["options by name", "list"]),
        ("a.yaml", "7", ["single value"]),
        ("a.yaml", "", ["no prefill engine"]),
        ("a.json", "{}", [".toml, .yaml or .yml"]),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, text: str, words: list[str]) -> None:
    path = tmp_path / name
    path.write_text(text)
    refused({}, *words, path=path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    refused({}, "cannot be read", "No such file", path=tmp_path / "a.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff")
    refused({}, "cannot be read", path=tmp_path / "b.toml")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prefill": []}, ["no prefill engine", "--prefill URL"]),
        ({"decode": None}, ["no decode engine"]),
        ({"decode": ["http://d", "http://d/"]}, ["--decode http://d is given twice"]),
        ({"decode": ["d:1"]}, ["--decode 'd:1'", "http:// or https://"]),
        ({"decode": ["http://"]}, ["no host name"]),
        ({"decode": ["http://a b"]}, ["no host name"]),
        ({"decode": ["http://a..b"]}, ["no host name"]),
        ({"decode": ["http://" + "a" * 64]}, ["no host name"]),
        ({"decode": ["http://d:99999"]}, ["Port out of range"]),
        ({"decode": ["http://d:0"]}, ["port 0"]),
        ({"decode": ["http://d?x"]}, ["query"]),
        ({"decode": ["http://[::"]}, ["Invalid IPv6"]),
        ({"decode": ["http://u:secret@d"]}, ["user name or password"]),
        ({"decode": ["http://0.0.0.0:1"]}, ["where a server listens", "own address"]),
        ({"port": 70000}, ["$.port"]),
        ({"batch_wait": 0}, ["$.batch_wait"]),
        ({"attempts": 0}, ["$.attempts"]),
        ({"log_level": "loud"}, ["$.log_level"]),
        ({"backoff": 10.0, "backoff_max": 5.0}, ["backoff 10 s", "backoff_max 5 s"]),
        ({"advertise": "0.0.0.0"}, ["0.0.0.0", "by which the Decode engines reach this one"]),
        ({"advertise": "0.0.0.0:80"}, ["0.0.0.0"]),
        ({"advertise": "http://0.0.0.0:80/x"}, ["0.0.0.0"]),
        ({"advertise": "::"}, ["::"]),
        ({"advertise": "http://[::]:80"}, ["::"]),
        ({"advertise": "::ffff:0.0.0.0"}, ["every address of this machine"]),
        ({"advertise": "http://u:p@h"}, ["password"]),
        ({"advertise": "a b"}, ["no host name"]),
    ],
)
def test_values_that_are_refused(given: dict[str, object], words: list[str]) -> None:
    refused(ENGINES | given, *words)
    assert "secret" not in str(given.get("x"))


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, ENGINES | {"decode": ["http://u:secret@d"]})
    assert "secret" not in str(caught.value)


def test_engine_urls() -> None:
    assert engine_url("http://d:8000/", "x") == "http://d:8000"
    assert engine_url("https://D.example/base/", "x") == "https://d.example/base"
    assert engine_url("http://[FD00::1]:80", "x") == "http://[fd00::1]:80"
    assert engine_url("http://10.0.0.1", "x") == "http://10.0.0.1"


def test_wildcards() -> None:
    assert all(map(is_wildcard, ["0.0.0.0", "::", "0:0::0", "::ffff:0.0.0.0"]))
    assert not any(map(is_wildcard, ["127.0.0.1", "::1", "localhost", "", "10.0.0.0"]))


@pytest.mark.parametrize(
    ("advertise", "url"),
    [
        ("10.0.0.9", "http://10.0.0.9:8000/v1/metaserver"),
        ("10.0.0.9:81", "http://10.0.0.9:81/v1/metaserver"),
        ("proxy.example", "http://proxy.example:8000/v1/metaserver"),
        ("proxy.example:81", "http://proxy.example:81/v1/metaserver"),
        ("fd00::9", "http://[fd00::9]:8000/v1/metaserver"),
        ("[fd00::9]:81", "http://[fd00::9]:81/v1/metaserver"),
        ("https://proxy.example", "https://proxy.example/v1/metaserver"),
        ("http://proxy.example:81/in/v1/metaserver", "http://proxy.example:81/in/v1/metaserver"),
    ],
)
def test_an_advertised_address(advertise: str, url: str) -> None:
    assert Metaserver("0.0.0.0", 8000, advertise).for_engine("http://d:1") == url


@pytest.mark.parametrize(
    ("host", "engine", "url"),
    [
        ("10.0.0.9", "http://10.0.0.1:1", "http://10.0.0.9:80/v1/metaserver"),
        ("fd00::9", "http://[fd00::1]", "http://[fd00::9]:80/v1/metaserver"),
        ("proxy.example", "http://10.0.0.1", "http://proxy.example:80/v1/metaserver"),
        ("127.0.0.1", "http://localhost:1", "http://127.0.0.1:80/v1/metaserver"),
        ("0.0.0.0", "http://127.0.0.1:1", "http://127.0.0.1:80/v1/metaserver"),
        ("::", "http://[::1]:1", "http://[::1]:80/v1/metaserver"),
        ("::", "http://127.0.0.1:1", "http://127.0.0.1:80/v1/metaserver"),
    ],
)
def test_a_derived_address(host: str, engine: str, url: str) -> None:
    assert Metaserver(host, 80).for_engine(engine) == url


@pytest.mark.parametrize(
    ("host", "engine", "words"),
    [
        ("127.0.0.1", "http://10.0.0.1", ["this machine alone", "--host", "--advertise"]),
        ("localhost", "http://10.0.0.1", ["this machine alone"]),
        ("0.0.0.0", "http://does-not-exist.invalid", ["--advertise"]),
        ("0.0.0.0", "http://[::1]", ["--advertise"]),
    ],
)
def test_an_address_that_cannot_be_derived(host: str, engine: str, words: list[str]) -> None:
    with pytest.raises(AddressError) as caught:
        Metaserver(host, 80).for_engine(engine)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_decode_engine_with_a_name_and_a_loopback_address(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        "here": ["10.0.0.7", "127.0.1.1"],
        "six": ["fe80::1%eth0", "::1"],
        "there": ["10.0.0.1"],
    }

    def look_up(name: str, *_: object, **__: object) -> list[Any]:
        if name not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, 1, 6, "", (address, 0)) for address in names[name]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    metaserver = Metaserver(host, 80)
    assert metaserver.for_engine("http://here:1") == metaserver.for_engine("http://six:1")
    with pytest.raises(AddressError, match="this machine alone"):
        metaserver.for_engine("http://there:1")
    with pytest.raises(AddressError, match=r"nowhere .* not known\): give --advertise"):
        metaserver.for_engine("http://nowhere:1")
    assert "//me/" in Metaserver(host, 80, "http://me").for_engine("http://nowhere:1")


def test_every_option_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "proxy.md").read_text()
    for field in msgspec.structs.fields(Options):
        row = f"| `--{field.name.replace('_', '-')}` | `{field.name}` |"
        assert row in page, row
        if isinstance(field.default, float | int):
            line = next(line for line in page.splitlines() if line.startswith(row))
            assert f"| {field.default:g} |" in line
