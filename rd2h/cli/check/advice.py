"""What to look at when a step fails: one place, and the machine's own figures beside each hint.

docs/check.md has the same as a table. Pure; the facts are gathered by the caller.
"""

from __future__ import annotations

from rd2h.cli.check.facts import Facts
from rd2h.cli.check.failures import Side, Step
from rd2h.cli.check.messages import ControlError
from rd2h.cli.check.options import EngineName
from rd2h.engines import EnginePermissionError, PeerGoneError, ReadTimeoutError

__all__ = ["advise"]


def advise(
    side: Side, step: Step, engine: EngineName, error: BaseException | None, facts: Facts
) -> list[str]:
    """Say what to look at, likeliest first.

    Args:
        side: The end where the step failed, which is this one.
        step: The step.
        engine: The engine; ``auto`` as long as none is agreed on.
        error: What was raised there, if anything.
        facts: Of this machine.
    """
    match step:
        case Step.BIND:
            return [
                "address: is --bind one of this machine's (ip addr)?",
                "port: does another process hold it (ss -ltnp)? --port takes another one",
            ]
        case Step.WAIT:
            return ["decode: was `rd2h check decode` started? --wait gives it longer"]
        case Step.CONNECT:
            return _connect(error)
        case Step.HANDSHAKE | Step.PREPARE | Step.RESULT:
            return _other_end(side)
        case Step.KV_PORT:
            return ["port: another process holds it (ss -ltnp), a running engine perhaps"]
        case Step.CONNECT_BACK:
            return [
                "firewall: on the Decode machine, TCP from Prefill to kv_port and one port for "
                "each further rank must be open (iptables -S, nft list ruleset, security groups)",
                "address: can Prefill reach the one that Decode advertises (ip route get)? "
                "--advertise gives another; --kv-port the port that will be used",
            ]
        case Step.ENGINE_START:
            return _engine_start(engine, facts)
        case Step.ALLOCATE:
            return ["memory: smaller --sizes on Decode; --limit on Prefill; other processes"]
        case Step.REGISTER:
            return _register(engine, facts)
        case Step.FIRST_READ | Step.READ:
            if isinstance(error, ControlError):  # the control connection, not the engine's
                return _other_end(side)
            return _read(engine, error, facts)
        case Step.COMPARE_BYTES | Step.COMPARE_REST | Step.COMPARE_DIGEST:
            return [
                "the data plane delivers wrong bytes: do not serve with it",
                "driver and firmware: the same on both ends (npu-smi info; ibstat)?",
                "memory: errors in dmesg, or of ECC?",
                "engine: does another --engine pass between these two machines?",
            ]
        case Step.CLOSE:
            return ["engine: its lines on standard error; an engine that serves must end, too"]


def _connect(error: BaseException | None) -> list[str]:
    if isinstance(error, ConnectionRefusedError):
        return [
            "prefill: is `rd2h check prefill` running there, with this --port, and bound to this "
            "address or to 0.0.0.0?",
            "firewall: one that rejects looks the same",
        ]
    return [
        "firewall: TCP from Decode to this port on the Prefill machine must be open (iptables -S, "
        "nft list ruleset, security groups)",
        "address: is it Prefill's, and does a route lead there (ip route get)?",
    ]


def _other_end(side: Side) -> list[str]:
    other = Side.DECODE if side is Side.PREFILL else Side.PREFILL
    return [
        f"{other}: what does its own terminal say? Was it killed (dmesg: out of memory)?",
        "port: is it `rd2h check` of the same release at both ends?",
        "time: does it need longer (large --sizes)? --timeout gives it more",
    ]


def _engine_start(engine: EngineName, facts: Facts) -> list[str]:
    match engine:
        case EngineName.NIXL:
            return [
                "package: pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1",
                f"UCX: its variables ({facts.ucx}), and its lines on standard error",
            ]
        case EngineName.MEMFABRIC:
            return [
                f"driver: {facts.driver} (npu-smi info); is CANN's set_env.sh sourced, and are the "
                "devices passed into the container?",
                f"huge pages: {facts.huge_pages}",
                "device: is --device-id free, and the address one of this machine's?",
                "firewall: the engine opens TCP ports of its own between both ends",
            ]
        case _:
            return ["system: the engine needs Linux with /proc mounted and process_vm_readv"]


def _register(engine: EngineName, facts: Facts) -> list[str]:
    hints = [f"locked memory: the limit is {facts.memlock} (ulimit -l; containers: --ulimit)"]
    if engine is EngineName.MEMFABRIC:
        hints = [f"huge pages: {facts.huge_pages}", f"driver: {facts.driver}", *hints]
    elif engine is EngineName.NIXL:
        hints += [
            f"huge pages: {facts.huge_pages}; UCX may want some for its own buffers",
            f"UCX: its variables ({facts.ucx})",
        ]
    return hints


def _read(engine: EngineName, error: BaseException | None, facts: Facts) -> list[str]:
    gone = "prefill: does it still run? What does its terminal say?"
    match engine:
        case EngineName.NIXL:
            return [
                *([gone] if isinstance(error, PeerGoneError) else []),
                "firewall: UCX listens on TCP ports that it chooses; between the two machines all "
                "of them must be open, in both directions",
                f"network: which interfaces UCX may use ({facts.ucx}); UCX_NET_DEVICES chooses",
                f"locked memory: the limit is {facts.memlock} (ulimit -l)",
                *(
                    ["time: a slow link needs a longer --timeout"]
                    if isinstance(error, ReadTimeoutError)
                    else []
                ),
            ]
        case EngineName.MEMFABRIC:
            return [
                "firewall: TCP between both ends, to the port in the session above",
                f"driver: {facts.driver}; the same version on both ends?",
                "device network: hccn_tool -i DEVICE -ping -g address ADDRESS",
                gone,
            ]
        case _:
            ptrace = (
                f"ptrace rights: kernel.yama.ptrace_scope is {facts.ptrace_scope}, this end runs "
                f"as user {facts.user}, CAP_SYS_PTRACE: {facts.ptrace_right}; both ends need the "
                "same user, and containers --cap-add=SYS_PTRACE"
            )
            place = "place: the host engine works within one machine and one PID namespace"
            if isinstance(error, EnginePermissionError):
                return [ptrace]
            return [gone, place, ptrace] if isinstance(error, PeerGoneError) else [ptrace, place]
