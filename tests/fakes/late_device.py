"""A device that must not be waited for: its numbers reach the host only after a wait for an event.

Its tensors refuse all operations that would wait for a GPU: reading a number, shapes that depend on numbers, copies
that are not asynchronous or come from memory that is not pinned. Mixing host and device is refused, too. Operations
there are computed at once in plain torch, kernels included; numbers that are copied to the host stay unknown there
until the device `may_go`, and somebody waits for an event that was recorded after the copy.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from quire.engine.architecture import media_spec
from quire.engine.models.tower import Tower, send_arrays
from quire.engine.protocol.media import MediaItem
from quire.kernels import OneAdapter, dispatch, packed, reference

GPU = torch.device("meta")
"""Any type but the CPU that every build of torch knows."""
_WAITING = {"item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "bincount"}


class Waited(AssertionError):
    """Something would have waited for the device."""


class DeviceTensor(Tensor):
    """`held` as if it were on a GPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=GPU,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} outside of the device's mode")


class LateDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes on `DeviceTensor`s, and keeps copies to the host until they are waited for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.may_go = threading.Event()
        self.copying: list[tuple[Tensor, Tensor]] = []
        self.pinned: set[int] = set()
        self._kept: list[Tensor] = []  # so that no id is used twice

    def pin(self, host: Tensor) -> Tensor:
        copy = host.clone()
        self._kept.append(copy)
        self.pinned.add(id(copy))
        return copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        on_device = [each for each in tensors if isinstance(each, DeviceTensor)]
        target = kwargs.get("device")
        if name in ("to", "_to_copy") and target is not None:
            return self._copy(func, args, kwargs, target)
        if not on_device and (target is None or target.type != GPU.type):
            return func(*args, **kwargs)
        if target is not None:
            assert target.type == GPU.type, f"{name} makes a tensor of the host from those of the device"
            kwargs["device"] = torch.device("cpu")
        if name in _WAITING:
            raise Waited(name)
        if name.startswith("index") and any(each.dtype == torch.bool for each in tensors[1:]):
            raise Waited(f"{name} with a mask")
        foreign = [each for each in tensors if not isinstance(each, DeviceTensor) and each.dim()]
        assert not foreign or not on_device, f"{name} mixes host and device"
        changed = {id(each.held): each for each in on_device}

        def wrap(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return changed[id(x)] if id(x) in changed else DeviceTensor(x)

        return tree_map(wrap, func(*unwrap(args), **unwrap(kwargs)))

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any], target: torch.device) -> Tensor:
        source = args[0]
        to_device, from_device = target.type == GPU.type, isinstance(source, DeviceTensor)
        kwargs["device"] = torch.device("cpu")
        if to_device == from_device:
            copy: Tensor = func(source.held if from_device else source, **kwargs)
            return DeviceTensor(copy) if from_device else copy
        if not kwargs.get("non_blocking"):
            raise Waited("a copy that is not asynchronous")
        if to_device:
            if id(source) not in self.pinned:
                raise Waited("a copy from memory that is not pinned")
            return DeviceTensor(func(source, **kwargs))
        kwargs.pop("pin_memory", None)
        known = func(source.held, **kwargs).clone()
        host = torch.full_like(known, 0x55)
        self.copying.append((host, known))
        return host


class LateEvent:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._before: list[tuple[Tensor, Tensor]] = []

    def record(self, stream: object) -> None:
        self._before, self._device.copying = self._device.copying, []

    def synchronize(self) -> None:
        assert self._device.may_go.wait(60)
        for host, known in self._before:
            host.copy_(known)


class _SequenceKV:
    """Stands for `kernels.SequenceKV`, which reads where sequences begin on the host."""

    def __init__(self, kernel: Callable[..., Any], like: Tensor, starts: Tensor, *sizes: int) -> None:
        if isinstance(starts, DeviceTensor):
            raise Waited("where sequences begin")
        kv = reference.PlainSequenceKV(unwrap(like), starts, *sizes)
        self.write, self.attend = kernel(kv.write), kernel(kv.attend)


def unwrap(tree: Any) -> Any:
    return tree_map(lambda x: x.held if isinstance(x, DeviceTensor) else x, tree)


def move(module: nn.Module) -> None:
    """Move the tensors of a module to the device."""
    move_parameters(module)
    for each in module.modules():
        values = [value for table in vars(each).values() if isinstance(table, dict) for value in table.values()]
        plain = [value for value in values if hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module)]
        for owner in (each, *plain):
            for name, value in vars(owner).items():
                if isinstance(value, Tensor):
                    vars(owner)[name] = DeviceTensor(value)


def move_parameters(module: nn.Module) -> None:
    """Leave all other tensors on the host."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                moved: Any = DeviceTensor(parameter.data)
                moved.input_dtype = getattr(parameter, "input_dtype", parameter.dtype)  # of a `Weight`
                each._parameters[name] = moved


def encode(
    tower: Tower,
    arrays: Mapping[str, Tensor],
    item: MediaItem,
    monkeypatch: pytest.MonkeyPatch,
    adapter: OneAdapter | None = None,
) -> Tensor:
    """The features of an item by a tower there, whose weights are not packed."""
    with monkeypatch.context() as context, late_device(context), torch.inference_mode():
        move_parameters(tower)
        found = tower(send_arrays(arrays, GPU), item, adapter)
    assert isinstance(found, DeviceTensor)
    return found.held


@contextmanager
def late_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    """As long as this lasts, there is such a device."""
    device = LateDevice()

    def kernel(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if operation is reference.sequence_kv:
                return _SequenceKV(kernel, *args)
            with torch.utils._python_dispatch._disable_current_modes():
                out = operation(*unwrap(args), **unwrap(kwargs))
            return tree_map(lambda x: DeviceTensor(x) if isinstance(x, Tensor) else x, out)

        return run

    operations = {**vars(reference), **vars(packed)}
    kernels = types.SimpleNamespace(**{name: kernel(each) for name, each in operations.items() if callable(each)})
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: LateEvent(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda host: device.pin(host))
    monkeypatch.setattr(dispatch, "PLATFORMS", {GPU.type: kernels})
    for limits in (media_spec._SLICE_ROWS, media_spec._SLICE_KEYS):
        monkeypatch.setitem(limits, GPU.type, limits["cpu"])
    with device:
        yield device
