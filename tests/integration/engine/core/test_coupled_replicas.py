"""Replicas that share experts, as processes: the tokens of one rank, and one end for all."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from quire.engine.config.engine_config import EngineConfig, ExpertParallelConfig
from quire.engine.core.launch import CoreArgs, Endpoints, start_core
from quire.engine.protocol.engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Probe,
    ToServer,
)
from quire.engine.protocol.media import MediaItem
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.stats import ExpertLoad
from quire.engine.protocol.supervision import Failed, FromProcess, Ready, Shutdown
from tests.fakes import media_prompts
from tests.fakes.checkpoints import generate
from tests.fakes.families import CASES, SIZES, write_model
from tests.fakes.media_prompts import Picture, media_prompt, write_media_model
from tests.fakes.model_logits import configure
from tests.fakes.outputs import each

pytestmark = pytest.mark.slow

_decode: Any = msgspec.msgpack.Decoder(ToServer).decode
LENGTHS = (1, 33, 70, 7, 50)
COUNT = 12
WAIT = 120.0
EIGHT = {"num_local_experts": 8}
MODELS = {"Mixtral": EIGHT, "Granite MoE": EIGHT, "DeepSeek V3": {}}


@dataclass(frozen=True)
class Case:
    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Models whose experts can be divided over four ranks, and transformers' answers to the prompts."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 130) for _ in range(length)] for length in LENGTHS]
    found = {}
    for name, changes in MODELS.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        architecture, others = CASES[name]
        write_model(architecture, SIZES | others | changes, folder)
        found[name] = Case(folder, prompts, generate(folder, prompts, COUNT))
    return found


@dataclass
class Replicas:
    """The cores as processes, and this process in the place of the API."""

    cores: list[Any]
    """As `quire.engine.process.supervisor.start_process` returns them."""
    sockets: list[zmq.Socket[bytes]]
    responses: zmq.Socket[bytes]
    outputs: dict[str, list[EngineCoreOutput]] = field(default_factory=dict)

    def receive(self, seconds: float = WAIT) -> ToServer:
        assert self.responses.poll(int(seconds * 1000)), "nothing comes"
        message: ToServer = _decode(self.responses.recv())
        return message

    def send(self, replica: int, message: EngineCoreRequest | Probe) -> None:
        self.sockets[replica].send(msgspec.msgpack.encode(message))

    def shut_down(self, replica: int) -> None:
        self.cores[replica].connection.send_bytes(msgspec.msgpack.encode(Shutdown()))

    def reported(self, replica: int, kind: type[Ready | Failed], seconds: float = WAIT) -> Any:
        """The core's next message of this kind to its supervisor; None if it ends without one."""
        connection, deadline = self.cores[replica].connection, time.monotonic() + seconds
        while True:
            assert connection.poll(max(0.0, deadline - time.monotonic())), "nothing comes"
            try:
                message = msgspec.msgpack.decode(connection.recv_bytes(), type=FromProcess)
            except (EOFError, OSError):
                return None
            if isinstance(message, kind):
                return message

    def ready(self) -> None:
        for replica in range(len(self.cores)):
            assert self.reported(replica, Ready) is not None

    def tokens(
        self,
        replica_of: list[int],
        prompts: list[list[int]],
        count: int = COUNT,
        media: list[list[MediaItem]] | None = None,
    ) -> list[list[int]]:
        """The answers to the prompts, each by its replica."""
        self.submit(replica_of, prompts, count, media)
        tokens: list[list[int]] = [[] for _ in prompts]
        open_ = len(prompts)
        while open_:
            message = self.receive()
            assert isinstance(message, EngineCoreOutputs), message
            for output in each(message):
                assert output.error is None
                tokens[int(output.request_id)] += output.token_ids
                open_ -= output.finish_reason is not None
        return tokens

    def submit(
        self, replica_of: list[int], prompts: list[list[int]], count: int, media: list[list[MediaItem]] | None = None
    ) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        for number, (replica, prompt) in enumerate(zip(replica_of, prompts, strict=True)):
            items = [] if media is None else media[number]
            self.send(replica, EngineCoreRequest(0, str(number), prompt, params, media=items))

    def deaths(self) -> dict[int, str]:
        """The reasons that cores have reported for their end."""
        reports = {replica: self.reported(replica, Failed, 20.0) for replica in range(len(self.cores))}
        return {replica: report.reason for replica, report in reports.items() if report is not None}


@contextlib.contextmanager
def replicas(config: EngineConfig, folder: Path, dp: int, experts: ExpertParallelConfig) -> Iterator[Replicas]:
    """All replicas, loaded; processes that are left at the end are killed."""
    endpoints = Endpoints(
        requests={replica: f"ipc://{folder}/requests-{replica}" for replica in range(dp)},
        responses=(f"ipc://{folder}/responses",),
    )
    context = zmq.Context()
    responses = context.socket(zmq.PULL)
    responses.bind(endpoints.responses[0])
    sockets: list[zmq.Socket[bytes]] = []
    cores: list[Any] = []
    try:
        for replica in range(dp):
            parallel = replace(
                config.parallel,
                replicas=dp,
                replica=replica,
                local_replicas=range(dp),
                experts=experts,
                init_method=f"file://{folder}/rendezvous",
            )
            args = CoreArgs(replace(config, parallel=parallel), endpoints, "warning", incarnation=1)
            cores.append(start_core(args, str(folder)))
            sockets.append(context.socket(zmq.PUSH))
            sockets[-1].setsockopt(zmq.LINGER, 0)
            sockets[-1].connect(endpoints.requests[replica])
        them = Replicas(cores, sockets, responses)
        them.ready()
        yield them
    finally:
        family = [child for core in cores for child in _family(core.pid)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for core in cores:
            core.wait(10)
            core.connection.close()
        context.destroy(0)


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def config_of(case: Case, tp: int, pp: int, **options: Any) -> EngineConfig:
    return configure(
        case.folder,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        block_size=4,
        spec_method="none",  # as it is resolved for replicas that share experts
        **options,
    )


def layouts() -> list[Any]:
    """With two ranks a replica every pair of model, placement and all-to-all; stages and single ranks once."""
    ways = tuple(itertools.product(("linear", "round_robin"), ("allgather_reducescatter", "all_to_all")))
    pairs = {"Mixtral": (ways[0], ways[3]), "Granite MoE": (ways[1], ways[2]), "DeepSeek V3": (ways[0], ways[3])}
    found: list[Any] = [(model, 2, 1, *way) for model in MODELS for way in pairs[model]]
    found += [("DeepSeek V3", 1, 2, "linear", "all_to_all"), ("Mixtral", 2, 2, "round_robin", "all_to_all")]
    found += [("Granite MoE", 1, 1, "linear", "allgather_reducescatter")]
    return found


@pytest.mark.parametrize(("model", "tp", "pp", "placement", "all2all"), layouts())
def test_tokens_are_those_of_one_rank(
    model: str,
    tp: int,
    pp: int,
    placement: Any,
    all2all: Any,
    cases: dict[str, Case],
    tmp_path: Path,
) -> None:
    """Uneven loads, a replica without any, and a sleep before each."""
    case = cases[model]
    experts = ExpertParallelConfig(placement=placement, all2all_backend=all2all)
    with replicas(config_of(case, tp, pp), tmp_path, 2, experts) as them:
        for replica_of in ([0] * 5, [1] * 5, [0, 1, 0, 0, 1]):
            assert them.tokens(replica_of, case.prompts) == case.expected
        for replica in range(2):
            them.shut_down(replica)
        assert [core.wait(20) for core in them.cores] == [0, 0]


@pytest.mark.parametrize(
    ("family", "tp", "all2all"),
    [("Qwen3-VL MoE", 1, "all_to_all"), ("ERNIE 4.5 VL", 2, "allgather_reducescatter")],
)
def test_answers_about_pictures_are_those_of_transformers(family: str, tp: int, all2all: Any, tmp_path: Path) -> None:
    """Steps end inside pictures, while the other replica has text, another picture or nothing."""
    (folder := tmp_path / "model").mkdir()
    model = write_media_model(family, folder)
    layouts: list[list[int | Picture]] = [[5, Picture((1, 8, 6)), 30], [9], [2, Picture((1, 8, 6), seed=1), 4]]
    prompts = [media_prompt(model, parts, folder, seed) for seed, parts in enumerate(layouts)]
    tokens, media = [each.token_ids for each in prompts], [each.items for each in prompts]
    case = Case(folder, tokens, [media_prompts.generate(model, each, COUNT) for each in prompts])
    with replicas(config_of(case, tp, 1), tmp_path, 2, ExpertParallelConfig(all2all_backend=all2all)) as them:
        for replica_of in ([0] * 3, [0, 0, 1], [1, 0, 0]):
            assert them.tokens(replica_of, tokens, COUNT, media) == case.expected


@pytest.mark.parametrize(
    ("model", "all2all"),
    [("Mixtral", "allgather_reducescatter"), ("Granite MoE", "all_to_all"), ("DeepSeek V3", "all_to_all")],
)
def test_tokens_stay_while_experts_move(
    model: str, all2all: Any, cases: dict[str, Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every replica reports the loads, all the same; the last known loads if nothing was to be sent meanwhile."""
    loads: dict[int, list[ExpertLoad]] = {0: [], 1: []}

    def noted(message: bytes) -> ToServer:
        outputs: ToServer = decode(message)
        if isinstance(outputs, EngineCoreOutputs) and outputs.expert_load is not None:
            loads[outputs.replica].append(outputs.expert_load)
        return outputs

    decode = _decode
    monkeypatch.setattr(sys.modules[__name__], "_decode", noted)
    case = cases[model]
    experts = ExpertParallelConfig(all2all_backend=all2all, enable_eplb=True, num_redundant_experts=4, step_interval=3)
    with replicas(config_of(case, 2, 1), tmp_path, 2, experts) as them:
        begun = time.monotonic()
        while not any(load in loads[1] for load in loads[0]) and time.monotonic() - begun < 60.0:
            for replica_of in ([0] * 5, [1] * 5, [0, 1, 0, 0, 1]):
                assert them.tokens(replica_of, case.prompts) == case.expected
        for replica in range(2):
            them.shut_down(replica)
        assert [core.wait(20) for core in them.cores] == [0, 0]
    assert loads[0][-1].moved >= 4
    assert any(load in loads[1] for load in loads[0])


@pytest.mark.parametrize(("whom", "tp"), [("core", 1), ("rank", 2)])
def test_when_one_is_killed_all_end_and_name_it(whom: str, tp: int, cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["Mixtral"]
    with replicas(config_of(case, tp, 1), tmp_path, 2, ExpertParallelConfig()) as them:
        them.submit([0, 1], case.prompts[:2], 200)
        while not isinstance(them.receive(), EngineCoreOutputs):
            pass
        family = {process.name(): process for process in _family(them.cores[1].pid)}
        everyone = [process for core in them.cores for process in _family(core.pid)]
        family["quire-core-1" if whom == "core" else "quire-rank-1"].send_signal(signal.SIGKILL)
        reasons = them.deaths()
        _, left = psutil.wait_procs([each for each in everyone if each.pid not in {c.pid for c in them.cores}], 10)
        codes = [core.wait(10) for core in them.cores]
    assert not left
    if whom == "core":
        assert list(reasons) == [0]
        assert reasons[0].startswith("replica 1 ended or hung: ")
        assert codes == [1, -signal.SIGKILL]
    else:
        assert reasons == dict.fromkeys(range(2), "replica 1: rank 1 was killed by SIGKILL")
        assert codes == [1, 1]


def test_a_replica_that_hangs_is_named(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["Mixtral"]
    config = config_of(case, 1, 1, distributed_timeout_seconds=4.0)
    with replicas(config, tmp_path, 2, ExpertParallelConfig()) as them:
        assert them.tokens([0], case.prompts[:1]) == case.expected[:1]
        them.cores[1].send_signal(signal.SIGSTOP)
        them.send(0, Probe(0, 1))
        assert them.reported(0, Failed, 20.0).reason.startswith("replica 1 ended or hung: ")
