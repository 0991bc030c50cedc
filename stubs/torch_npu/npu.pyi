"""`torch_npu.npu`, as in `torch_npu/npu/{__init__,streams,utils}.py` of torch-npu 2.14.0."""

class Stream:
    """A queue of work on a device."""

    def __init__(self, device: int | None = None, priority: int = 0) -> None: ...
    def wait_event(self, event: Event) -> None:
        """Let later work on this stream wait for the event; returns at once."""

    def synchronize(self) -> None:
        """Block the calling thread until the stream is empty."""

class Event:
    """A point in a stream's work."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None: ...
    def record(self, stream: Stream | None = None) -> None:
        """Mark the work so far of a stream: the calling thread's current one by default."""

def device_count() -> int:
    """Return how many devices this process may use."""

def set_device(device: int) -> None:
    """Choose the device of the calling thread."""
