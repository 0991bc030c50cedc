"""A process that imports vLLM once and forks servers from it.

Importing vLLM takes 16 seconds of processor time here, and a server is three processes that each do
it: nearly all of a minute's start-up. A fork has it done already, and serves after six seconds.
Forking is how vLLM starts its processes on other platforms; on CPU it insists on new ones, because
those pin OpenMP threads before the library loads. Here nothing is pinned.

The program (``python -m serving.nursery``) has one thread. It reads one `Order` a line from its
standard input and writes one `Born` or `Gone` a line to its standard output. When its input ends,
for whatever reason, it kills what it forked: no server outlives the program that wanted it. It
adopts orphans, so that the dead of a killed server are buried too.

Nothing of rd2h is imported before the fork: a server has the code that is on disk when it starts.
"""

import contextlib
import ctypes
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from typing import BinaryIO

import msgspec

__all__ = ["Born", "Gone", "Notice", "Order", "Ready"]

_PR_SET_CHILD_SUBREAPER = 36
# What the three processes of a server import; most of the rest follows from these.
_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.serve.instrumentator.metrics",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.attention.backends.mla.cpu_mla",
    "vllm.model_executor.layers.quantization.online.base",
)


class Order(msgspec.Struct, frozen=True):
    """Fork a server.

    Attributes:
        program: ``vllm`` for vLLM's API server, else a module to run afresh, as ``python -m`` does.
        arguments: Of the program.
        environment: Variables to set beside those of the nursery.
        log: File that gets what the server prints; it is appended to.
    """

    program: str
    arguments: list[str]
    environment: Mapping[str, str]
    log: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """vLLM is imported."""


class Born(msgspec.Struct, frozen=True, tag=True):
    """The answer to an order: the server's process id, which is its group's too."""

    pid: int


class Gone(msgspec.Struct, frozen=True, tag=True):
    """A server's first process ended.

    Attributes:
        pid: Its process id.
        code: Its exit status, or minus the signal that ended it.
    """

    pid: int
    code: int


Notice = Ready | Born | Gone


def _import_vllm() -> None:
    """Import what a server, its engine core and its workers need."""
    for module in _MODULES:
        importlib.import_module(module)
    import vllm.envs
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM
    from vllm.model_executor.models.llama import LlamaForCausalLM

    # vLLM looks at a model that is not registered in a process of its own, for another 16 s.
    for model in (DeepseekV2ForCausalLM, LlamaForCausalLM):
        ModelRegistry.register_model(model.__name__, model)
    # The CPU platform sets the variable itself, so that the environment cannot say it.
    vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"


def _become_server(order: Order) -> None:
    """Be the server until it ends."""
    if order.program != "vllm":
        os.execv(sys.executable, [sys.executable, "-m", order.program, *order.arguments])
    from vllm.entrypoints.launchers.api_server import entry

    sys.argv = ["vllm", *order.arguments]
    # Its own signature says nothing.
    serve: Callable[[], None] = entry.main
    serve()


def _take(log: str, environment: Mapping[str, str]) -> None:
    """Make the forked process one of its own: group, output, environment, signals."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)
    os.environ.update(environment)


def _reap(servers: set[int]) -> list[Gone]:
    """Bury whoever died; say which of them were servers."""
    gone: list[Gone] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return gone
        if pid == 0:
            return gone
        if pid in servers:
            gone.append(Gone(pid, os.waitstatus_to_exitcode(status)))


def _serve(orders: BinaryIO, notices: int) -> Order | None:
    """Fork for each order; return in the child with its order, in the nursery with None."""
    servers: set[int] = set()
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def say(notice: Notice) -> None:
        os.write(notices, msgspec.json.encode(notice) + b"\n")

    say(Ready())
    while True:
        ready, _, _ = select.select([orders.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            for gone in _reap(servers):
                say(gone)
        if orders.fileno() in ready:
            # Unbuffered: a line that is here in full is all that there is to read.
            line = orders.readline()
            if not line:
                _end(servers)
                return None
            order = msgspec.json.decode(line, type=Order)
            pid = os.fork()
            if pid == 0:
                for number in (woken, wake, notices):
                    os.close(number)
                _take(order.log, order.environment)
                return order
            # Here as well: from now on the group can be killed, however far the child is. It
            # cannot be done any more if the child is another program by now.
            with contextlib.suppress(PermissionError):
                os.setpgid(pid, pid)
            servers.add(pid)
            say(Born(pid))


def _end(servers: set[int]) -> None:
    """Kill every server with all that it started, and wait until they are dead."""
    for pid in servers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def main() -> None:
    """The program."""
    # What imports print must not come between the notices.
    notices = os.dup(1)
    os.dup2(2, 1)
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    os.set_inheritable(notices, False)
    # Ours alone to end: a Ctrl-C is for the program that started us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _import_vllm()
    order = _serve(orders, notices)
    if order is None:
        # Taking all of vLLM down module by module would last seconds.
        os._exit(0)
    orders.close()
    _become_server(order)


if __name__ == "__main__":
    main()
