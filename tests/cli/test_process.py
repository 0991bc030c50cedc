"""What a command asks of the machine."""

from pathlib import Path

from rd2h.cli.process import available_memory


def test_the_container_limits_memory_too(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert available_memory(tmp_path) == 4 << 20
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("1000\n")
    assert available_memory(tmp_path) == 4 << 20
    (cgroup / "memory.max").write_text("5000\n")
    assert available_memory(tmp_path) == 4000
