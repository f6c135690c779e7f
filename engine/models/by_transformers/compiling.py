"""What `compiled` runs in a process of its own: a model that transformers builds becomes a package on disk.

Nothing here holds weights: those of the modules that stay ours are left out, the others' place is zeros.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from quire.engine.architecture import BuiltArchitecture
from quire.engine.config import ModelConfig
from quire.engine.models.by_transformers import attention, build
from quire.engine.models.by_transformers.sharding import PlannedLinear
from quire.engine.parallel import Parallel
from quire.kernels import disk

_INDUCTOR = {
    "aot_inductor.package_constants_in_so": False,
    "compile_threads": 1,
    "always_keep_tensor_constants": True,  # parameters are zeros here, but not in the rank
    "joint_graph_constant_folding": False,
    "emulate_precision_casts": True,  # what the model rounds between two operations is rounded
}
_MOST_TOKENS = 1 << 20

_library: Any = torch.library.Library
OPERATIONS = _library("quire", "FRAGMENT")
"""By which a package calls what stays ours, each with its number."""
OPERATIONS.define("module(Tensor[] inputs, int number, int features) -> Tensor")
OPERATIONS.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, int number, float scale, int window, float softcap)"
    " -> Tensor"
)


@dataclass(frozen=True)
class Request:
    """What is compiled."""

    model: ModelConfig
    device: str
    threads: int

    def package(self) -> Path:
        """Where it lies: beside the CPU kernels (`quire.kernels.disk`), named by all that it depends on."""
        model, folder = self.model, self.model.path
        arch = model.architecture
        assert isinstance(arch, BuiltArchitecture)
        digest = hashlib.sha256()
        for source in [
            *sorted(Path(__file__).parent.glob("*.py")),
            folder / "config.json",
            *sorted(folder.glob("*.py")),
        ]:
            digest.update(source.read_bytes())
        gpu = torch.cuda.get_device_capability() if self.device == "cuda" else ()
        versions = torch.__version__, transformers.__version__
        code = model.trust_remote_code, sorted(arch.read_directly)
        chosen = model.dtype, model.max_model_len, self.device, gpu, self.threads
        digest.update(repr((versions, code, chosen, disk.processor())).encode())
        return disk.folder() / "models" / f"{digest.hexdigest()[:16]}.pt2"


def apart(base: nn.Module) -> list[nn.Module]:
    """The modules that stay ours, in the order of their numbers: linear layers that are packed, and experts."""
    found: dict[str, nn.Module] = {}
    for path, module in base.named_modules():
        is_packed = isinstance(module, PlannedLinear) and not module.is_read_directly
        is_stack = any(each.ndim > 2 for each in module.parameters(recurse=False))
        if (is_packed or is_stack) and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return list(found.values())


class _Flat(nn.Module):
    """A base model over a flat batch: `[tokens]` twice → `[tokens, hidden_size]`."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.calls = base, 0
        for number, module in enumerate(apart(base)):
            _call_by_number(module, number)
        attention.attach(base, self._attend)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        self.calls = 0
        output = self.base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, asked: attention.Asked, sinks: Tensor | None
    ) -> Tensor:
        number, self.calls = self.calls, self.calls + 1
        out: Tensor = torch.ops.quire.attend(query, key, value, sinks, number, asked.scale, asked.window, asked.softcap)
        return out


def _call_by_number(module: Any, number: int) -> None:
    """An experts' output has the features of its first input."""
    for name in [name for name, each in module.named_parameters(recurse=False)]:
        module._parameters[name] = nn.Parameter(torch.empty(0), requires_grad=False)
    module.forward = lambda *inputs: torch.ops.quire.module(
        list(inputs), number, getattr(module, "out_features", inputs[0].shape[-1])
    )


def export(request: Request) -> torch.export.ExportedProgram:
    """The base model, for any number of tokens."""
    model, device = request.model, torch.device(request.device)
    arch = model.architecture
    assert isinstance(arch, BuiltArchitecture)
    from quire.engine.models.by_transformers.decoder import TransformersDecoder

    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, model.dtype))
    decoder = TransformersDecoder.of(model, arch, range(arch.num_layers), Parallel(), torch.device("meta"))
    torch.set_default_dtype(usual)
    flat = _Flat(build.base_of(decoder.shell))
    for module in flat.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                module._parameters[name] = nn.Parameter(torch.zeros_like(parameter, device=device), requires_grad=False)
    flat.to(device)
    torch.library.register_fake("quire::module", _module_like, lib=OPERATIONS)
    torch.library.register_fake("quire::attend", _attended_like, lib=OPERATIONS)
    examples = torch.zeros(8, dtype=torch.int64, device=device), torch.arange(8, device=device)
    tokens = {0: torch.export.Dim("tokens", min=1, max=_MOST_TOKENS)}
    with torch.no_grad():
        return torch.export.export(flat, examples, dynamic_shapes=(tokens, tokens), strict=False)


def _module_like(inputs: list[Tensor], number: int, features: int) -> Tensor:
    return inputs[0].new_empty(*inputs[0].shape[:-1], features)


def _attended_like(query: Tensor, key: Tensor, value: Tensor, *asked: object) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


def main() -> None:
    """Read a `Request` and the path of its package from standard input, and make it; end with the input."""
    request, package = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_input, daemon=True).start()
    with suppress(OSError):  # where memory runs out, the kernel ends this process rather than the one that serves
        Path("/proc/self/oom_score_adj").write_text("1000")
    made = package.with_name(f"{package.stem}.made.pt2")
    torch.set_num_threads(request.threads)
    try:
        package.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(package.parent / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time, which the others may find made
            if not package.exists():
                torch._inductor.aoti_compile_and_package(
                    export(request), package_path=str(made), inductor_configs=dict(_INDUCTOR)
                )
                made.chmod(0o644)
                made.replace(package)
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        sys.exit(1)
    finally:
        made.unlink(missing_ok=True)


def _end_with_input() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)  # and with it the C++ compiler
