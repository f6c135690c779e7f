"""`quire doctor`: check a host, or the hosts of a cluster, before serving."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.engine.cluster.cluster_token import with_cluster_token
from quire.engine.cluster.network import address_towards, interface_of
from quire.engine.config.devices import count_gpus
from quire.engine.config.options import EngineOptions, flag
from quire.engine.config.resolve import MAX_TIMEOUT_SECONDS
from quire.engine.doctor import cluster, gpus, network, ranks, system, versions
from quire.engine.doctor.check import Check, Status, fault, run, worst
from quire.engine.doctor.network import Port
from quire.engine.process import current_process, log
from quire.engine.process.version import DISTRIBUTION
from quire.engine.protocol.errors import ConfigError
from quire.server.config import flags
from quire.server.config.server_options import ServerOptions


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The flags of the command. They mean the same as for `quire serve`."""

    json: bool = flag(False, "print one JSON object instead of lines")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "device to check (auto: CUDA if there is a GPU)")
    host: str = flag(ServerOptions.host, "address that the server is to listen on", metavar="ADDR")
    port: int = flag(ServerOptions.port, "port that the server is to listen on", metavar="PORT")
    download_dir: str | None = flag(None, "folder of downloaded models (default: Hugging Face's cache)", metavar="DIR")
    nnodes: int = flag(1, "number of hosts; the command is started on each", metavar="N")
    node_rank: int = flag(0, "number of this host; host 0 prints the results of all", metavar="R")
    master_addr: str = flag("127.0.0.1", "address of host 0 that the other hosts connect to", metavar="ADDR")
    master_port: int = flag(EngineOptions.master_port, "port of host 0 that they connect to", metavar="PORT")
    data_parallel_rpc_port: int = flag(
        EngineOptions.data_parallel_rpc_port, "port that replicas on other hosts are to connect to", metavar="PORT"
    )
    distributed_timeout_seconds: float = flag(
        60.0, "time in which all hosts must join, and of communication between ranks, in seconds", metavar="S"
    )
    cluster_token: str | None = flag(
        None,
        "secret that all hosts share, as of quire serve (default: QUIRE_CLUSTER_TOKEN; without any, host 0 makes one "
        "and prints the others' command)",
        metavar="TOKEN",
        is_secret=True,
    )
    cluster_token_file: str | None = flag(None, "file with the --cluster-token", metavar="FILE")


class HostResult(msgspec.Struct):
    """The checks of a host."""

    name: str
    checks: list[Check]


class DoctorReport(msgspec.Struct):
    """The output of `--json`."""

    status: Status = "ok"
    """The most serious status of all checks."""
    hosts: list[HostResult] = []
    cluster: list[Check] = []
    """The checks between the hosts."""


class Output:
    """Prints the results as they come, or at the end as JSON."""

    def __init__(self, is_json: bool) -> None:
        self._is_json, self._result = is_json, DoctorReport()

    def host(self, name: str, checks: Iterable[Check]) -> list[Check]:
        """Add a host, and its checks while they are made; returns them."""
        own = HostResult(name, [])
        self._result.hosts.append(own)
        self._print(f"{name}:")
        for check in checks:
            own.checks.append(check)
            self._print(f"  {check.line}")
        return own.checks

    def between(self, check: Check) -> None:
        """Add a check between the hosts."""
        if not self._result.cluster:
            self._print("between the hosts:")
        self._result.cluster.append(check)
        self._print(f"  {check.line}")

    def finish(self) -> int:
        """Print the rest; returns the exit code."""
        checks = [*self._result.cluster, *(check for host in self._result.hosts for check in host.checks)]
        self._result.status = worst(checks)
        counts = Counter(check.status for check in checks)
        self._print(", ".join(f"{counts[status]} {status}" for status in ("ok", "warning", "fault", "not applicable")))
        if self._is_json:
            print(msgspec.json.format(msgspec.json.encode(self._result)).decode())
        return int(self._result.status == "fault")

    def _print(self, text: str) -> None:
        if not self._is_json:
            print(text, flush=True)


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    flags.add_flags(parser, DoctorOptions)
    parser.set_defaults(run=run_command, parser=parser)


def run_command(parsed: argparse.Namespace) -> int:
    """Check, and print each result; returns 1 if there is a fault."""
    options = flags.collect(parsed, DoctorOptions)
    log.setup("warning" if options.nnodes == 1 else "info", "doctor")
    if current_process.hide_arguments([options.cluster_token or ""]):
        print("warning: ps has shown the --cluster-token to all users; use --cluster-token-file", file=sys.stderr)
    if not 0 <= options.node_rank < options.nnodes:
        raise ConfigError(f"--node-rank {options.node_rank} is out of range: --nnodes is {options.nnodes}")
    if not 0 < options.distributed_timeout_seconds <= MAX_TIMEOUT_SECONDS:
        raise ConfigError(
            f"--distributed-timeout-seconds must be above 0 and at most {MAX_TIMEOUT_SECONDS:g}, "
            f"got {options.distributed_timeout_seconds:g}"
        )
    for name in ("port", "master_port", "data_parallel_rpc_port"):
        if not 0 <= (number := getattr(options, name)) < 65536:
            raise ConfigError(f"--{name.replace('_', '-')} {number}: must be from 0 to 65535")
    if not os.environ.get("QUIRE_HOST_IP") and (own := os.environ.get("VLLM_HOST_IP")):
        os.environ["QUIRE_HOST_IP"] = own  # as `quire serve` does
    output = Output(options.json)
    if options.nnodes == 1:
        output.host("this host", check_host(options))
    elif options.node_rank == 0:
        _coordinate(options, _cluster(options), output)
    else:
        _follow(options, _cluster(options), output)
    return output.finish()


def _cluster(options: DoctorOptions) -> cluster.Cluster:
    engine = EngineOptions(
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        cluster_token=options.cluster_token,
        cluster_token_file=options.cluster_token_file,
    )
    with contextlib.redirect_stdout(sys.stderr):  # it may print a token
        token = with_cluster_token(engine, is_headless=options.node_rank > 0).cluster_token or ""
    return cluster.Cluster(
        nnodes=options.nnodes,
        node=options.node_rank,
        address=options.master_addr,
        port=options.master_port,
        token=token,
        seconds=options.distributed_timeout_seconds,
        fixed_ports=(options.port, options.data_parallel_rpc_port),
    )


def _coordinate(options: DoctorOptions, where: cluster.Cluster, output: Output) -> None:
    """Run node 0."""
    try:
        coordinator = cluster.Coordinator(where)
    except ConfigError as error:
        output.host("node 0", check_host(options))
        remedy = (
            "give every host one of node 0's addresses as --master-addr (ip address lists them), and a port that is "
            "free there as --master-port (ss -ltn lists those in use)"
        )
        return output.between(fault("hosts", str(error), remedy))
    with contextlib.closing(coordinator):
        checks = output.host(coordinator.names[0], check_host(options))
        for found in coordinator.check(cluster.report(checks, *_devices(options), where)):
            if isinstance(found, Check):
                output.between(found)
            else:
                name, report = found
                output.host(name, report.checks)


def _follow(options: DoctorOptions, where: cluster.Cluster, output: Output) -> None:
    """Run another node."""
    name = f"node {options.node_rank}"

    def check() -> cluster.Report:
        return cluster.report(output.host(name, check_host(options)), *_devices(options), where)

    try:
        if reason := cluster.follow(where, check):
            output.between(fault("hosts", reason, "see the output of node 0"))
    except ConfigError as error:
        output.host(name, check_host(options))
        output.between(fault("hosts", str(error), "start quire doctor there, and open its port in the firewall"))


def check_host(options: DoctorOptions) -> Iterator[Check]:
    """Check this host, and then its devices, which takes longer."""
    from huggingface_hub.constants import HF_HUB_CACHE

    metadata: Any = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        metadata = importlib.metadata.metadata(DISTRIBUTION)
    used = None
    with contextlib.suppress(ConfigError):
        used = interface_of(address_towards(options.master_addr)) if options.nnodes > 1 else None
    device, count, hcas = *_devices(options), network.devices()
    checks: list[tuple[str, Callable[[], Check | Iterable[Check]]]] = [
        ("python", lambda: versions.python(platform.python_version(), metadata and metadata["Requires-Python"])),
        ("packages", lambda: versions.packages(metadata and metadata.get_all("Requires-Dist"))),
        ("processor", system.processor),
        ("memory", system.memory),
        ("limits", lambda: system.limits(bool(hcas))),
        ("shared memory", lambda: system.shared_memory(count if device == "cuda" else 0)),
        ("model cache", lambda: system.model_cache(Path(options.download_dir or HF_HUB_CACHE))),
        ("temporary folder", system.temporary_folder),
        ("network interfaces", lambda: network.links(used=used)),
        ("host name", lambda: network.names(options.nnodes, options.master_addr, options.node_rank)),
        ("NCCL", lambda: network.communication_variables(os.environ, network.interfaces(), hcas)),
        ("ports", lambda: network.ports(_ports(options))),
        ("GPUs", gpus.check_gpus),
    ]
    yield from run(checks)
    if options.device == "cuda" and device == "cpu":
        yield fault("--device cuda", "no NVIDIA GPU is visible", "check the driver and CUDA_VISIBLE_DEVICES")
    else:
        yield from ranks.check_devices(device, count)


def _devices(options: DoctorOptions) -> tuple[ranks.Device, int]:
    """The kind and the number of this host's devices."""
    count = 0
    with contextlib.suppress(ConfigError):  # the check of the GPUs reports it
        count = 0 if options.device == "cpu" else count_gpus()
    return ("cuda", count) if count else ("cpu", 1)


def _ports(options: DoctorOptions) -> list[Port]:
    """The addresses that `quire serve` listens on at this host. Node 0 of several listens on --master-port during this
    check."""
    if options.node_rank:
        return []
    where, replicas = options.master_addr, "choose another with --data-parallel-rpc-port if there are some"
    wanted = [Port("hosts with other replicas", where, options.data_parallel_rpc_port, replicas, False)]
    if options.nnodes == 1:
        wanted.insert(0, Port("other hosts", where, options.master_port, "choose another with --master-port", False))
    if options.port:  # 0 is any free one
        wanted.insert(0, Port("the API", options.host, options.port, "choose another with --port"))
    return wanted
