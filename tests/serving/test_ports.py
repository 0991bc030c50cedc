"""Ports that nobody has, and that nobody else here gets."""

import socket

import pytest

import serving.ports
from serving.ports import free_ports


def test_ports_are_free_and_not_given_twice() -> None:
    taken: set[int] = set()
    for count in (1, 2, 4, 1, 8):
        first = free_ports(count)
        ports = set(range(first, first + count))
        assert not taken & ports
        taken |= ports
    for port in taken:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_a_port_with_a_listener_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports(2)
    monkeypatch.setattr(serving.ports, "_handed_out", set())
    monkeypatch.setattr(serving.ports, "_FIRST", first)
    monkeypatch.setattr(serving.ports, "_LAST", first + 2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", first))
        listener.listen()
        assert free_ports() == first + 1
        with pytest.raises(OSError, match="no 1 consecutive free ports"):
            free_ports()
