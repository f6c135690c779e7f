"""Adapters by name: loaded, replaced and unloaded while requests run, by every API, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import openai
import pytest

from quire.engine.config.engine_config import EngineConfig, LoraConfig
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.adapter_folder import open_adapter
from quire.server.config.server_options import ServerOptions
from quire.server.serving.adapter_files import MAX_TEMPLATE_CHARACTERS
from tests.fakes import fake_core
from tests.fakes.adapters import SETTINGS, Q, write_adapter
from tests.fakes.api_server import Server, run_server

pytestmark = pytest.mark.usefixtures("core_mode")

SHAPES: Mapping[str, tuple[int, ...]] = {f"{Q}.lora_A.weight": (4, 32), f"{Q}.lora_B.weight": (32, 4)}


@pytest.fixture
def lora(config: EngineConfig) -> EngineConfig:
    return replace(config, lora=LoraConfig(num_slots=2, device_bytes=1, host_bytes=1))


def write(folder: Path, seed: int = 0, **settings: Any) -> Path:
    return write_adapter(folder, SHAPES, SETTINGS | settings, seed=seed)


def write_gguf(file: Path) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((4, 32), np.float32))
    writer.add_tensor("blk.0.attn_q.weight.lora_b", np.ones((32, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def mark(server: Server, folder: Path) -> str:
    """The text with which answers by an adapter begin."""
    digest = open_adapter(folder).digest
    return server.tokenizer.decode([fake_core.adapter_token(AdapterRef(digest, ()))], skip_special_tokens=True)


async def answer(server: Server, model: str, prompt: str = "hello") -> str:
    found = await server.openai.completions.create(model=model, prompt=prompt, max_tokens=9)
    assert found.model == model
    return found.choices[0].text


async def load(server: Server, name: str, path: str, **fields: Any) -> tuple[int, str]:
    body = {"lora_name": name, "lora_path": path, **fields}
    reply = await server.http.post("/v1/load_lora_adapter", json=body)
    return reply.status_code, reply.text if reply.status_code == 200 else reply.json()["error"]["message"]


async def test_names_choose_adapters_in_every_api(lora: EngineConfig, tmp_path: Path) -> None:
    pirate = write(tmp_path / "pirate", 1)
    fields = {"name": "p2", "path": str(pirate), "base_model_name": "alias", "is_3d_lora_weight": True, "pinned": True}
    modules = (f"pirate={pirate}", json.dumps(fields))
    async with run_server(lora, lora_modules=modules, lora_root=str(tmp_path)) as server:
        await server.frontend.adapters.check()
        own = mark(server, pirate)
        assert await answer(server, "echo") == "hello"
        assert await answer(server, "pirate") == f"{own}hello"
        chat: Any = {"messages": [{"role": "user", "content": "hi"}], "model": "p2", "max_tokens": 3}
        found = await server.openai.chat.completions.create(**chat)
        assert (found.choices[0].message.content or "").startswith(own)
        assert found.model == "p2"
        response = await server.openai.responses.create(model="pirate", input="hi", max_output_tokens=3)
        assert response.output_text.startswith(own)
        message = await server.http.post("/v1/messages", json=chat)
        assert message.json()["content"][0]["text"].startswith(own)
        beams = {"model": "pirate", "prompt": "hello", "max_tokens": 1, "n": 2, "use_beam_search": True}
        assert (await server.http.post("/v1/completions", json=beams)).json()["choices"][0]["text"] == own
        headers = {"X-Amzn-SageMaker-Adapter-Identifier": "pirate"}
        sent = await server.http.post(
            "/invocations", json={"prompt": "hello", "model": "echo", "max_tokens": 9}, headers=headers
        )
        assert sent.json()["choices"][0]["text"] == f"{own}hello"
        listed = {each.id: each.model_dump() for each in (await server.openai.models.list()).data}
        assert listed["pirate"]["parent"] == "echo"
        assert listed["p2"]["parent"] == "alias"
        assert {each.name: each.is_pinned for each in server.frontend.adapters.named.values()} == {
            "pirate": False,
            "p2": True,
        }
        assert server.frontend.adapters._pinned == [open_adapter(pirate).digest]
        assert listed["pirate"]["root"] == str(pirate)
        assert listed["pirate"]["digest"] == open_adapter(pirate).digest.hex()
        with pytest.raises(openai.NotFoundError, match="'none' does not exist; available: echo or alias or pirate"):
            await answer(server, "none")
        text = server.frontend.metrics.exposition().decode()
        assert 'adapter_requests_total{adapter="pirate",model_name="echo"} 4.0' in text
        assert 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""}' in text


async def test_adapters_are_loaded_replaced_and_unloaded(lora: EngineConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "a", 1)
    async with run_server(lora, lora_root=str(tmp_path)) as server:
        first = mark(server, path)
        assert await load(server, "a", "a") == (200, "Success: LoRA adapter 'a' added successfully.")
        assert (await load(server, "b", "a"))[0] == 200
        assert (await load(server, "b,c", "a"))[0] == 400
        assert await answer(server, "a") == f"{first}hello"
        status, text = await load(server, "a", "a")
        assert (status, "has already been loaded" in text) == (400, True)
        assert (await load(server, "echo", "a"))[0] == 400
        # The path gets other weights: nobody notices until it is loaded again, also not in place.
        write(path, 2)
        second = mark(server, path)
        assert first != second
        assert await answer(server, "a") == f"{first}hello"
        stream = await server.openai.completions.create(
            model="a", prompt="hello", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = aiter(stream)
        assert (await anext(chunks)).choices[0].text.startswith(first)
        assert (await load(server, "a", str(path), load_inplace=True))[0] == 200
        assert await answer(server, "a") == f"{second}hello"
        assert [each.id for each in (await server.openai.models.list()).data] == ["echo", "alias", "a", "b"]
        assert (await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "b"})).status_code == 200
        unloading = asyncio.create_task(server.http.post("/v1/unload_lora_adapter", json={"lora_name": "a"}))
        while "a" in server.frontend.adapters.named:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.NotFoundError):
            await answer(server, "a")
        assert [chunk.choices[0].finish_reason async for chunk in chunks][-1] == "length"
        assert (await unloading).status_code == 200
        gone = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        copies = Path(server.frontend.adapters._copies.path)
        while [each for each in copies.iterdir() if each.is_dir()]:  # removed in a thread
            await asyncio.sleep(0.01)


async def test_unload_waits_for_requests(lora: EngineConfig, tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    async with run_server(lora, lora_root=str(tmp_path)) as server:
        assert (await load(server, "a", "a"))[0] == 200
        stream = await server.openai.completions.create(
            model="a", prompt="<hang>", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        unloading = asyncio.create_task(server.http.delete("/adapters/a"))
        while "a" in server.frontend.adapters.named:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert not unloading.done()
        await stream.close()
        assert (await unloading).text == "Adapter a unregistered"


async def test_other_servers_routes(lora: EngineConfig, tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    async with run_server(lora, lora_root=str(tmp_path)) as server:
        post = server.http.post
        loaded = await post("/load_lora_adapter", json={"lora_name": "a", "lora_path": "a"})
        assert loaded.json() == {"success": True, "loaded_adapters": {"a": "a"}}
        assert (await post("/unload_lora_adapter", json={"lora_name": "a"})).json()["loaded_adapters"] == {}
        assert (await post("/adapters", json={"name": "b", "src": "a"})).status_code == 200
        assert (await load(server, "c", "a", is_3d_lora_weight=True))[0] == 200
        listed = (await server.http.get("/adapters")).json()
        assert listed == {"adapters": [{"name": name, "src": "a", "pin": False} for name in "bc"]}
        assert await answer(server, "echo:b") == await answer(server, "b")
        with pytest.raises(openai.NotFoundError):
            await answer(server, "echo:none")
        refused = await post("/adapters", json={"name": "d", "src": "a", "preload": False})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "preload")


async def test_pinned_adapters_stay_in_memory_until_they_have_no_name(lora: EngineConfig, tmp_path: Path) -> None:
    """Replicas pin as many as there is room for; a refused one leaves no pin behind."""
    for name in "abc":
        write(tmp_path / name, ord(name))
    async with run_server(lora, lora_root=str(tmp_path)) as server:
        post = server.http.post
        assert (await load(server, "a", "a", pinned=True))[0] == 200
        assert (await post("/load_lora_adapter", json={"lora_name": "a2", "lora_path": "a", "pinned": True})).is_success
        assert (await post("/adapters", json={"name": "b", "src": "b", "pin": True})).is_success
        for _ in range(2):
            status, text = await load(server, "c", "c", pinned=True)
            assert (status, "too many are pinned" in text) == (400, True)
        assert (await load(server, "c", "c"))[0] == 200
        assert (await post("/unload_lora_adapter", json={"lora_name": "a"})).is_success
        listed = (await server.http.get("/adapters")).json()["adapters"]
        assert {each["name"]: each["pin"] for each in listed} == {"a2": True, "b": True, "c": False}
        assert (await load(server, "c", "c", pinned=True, load_inplace=True))[0] == 400  # a2 has the weights of a
        assert (await load(server, "a2", "a", load_inplace=True))[0] == 200
        assert (await load(server, "c", "c", pinned=True, load_inplace=True))[0] == 200


async def test_a_replica_that_cannot_read_now_is_no_fault_of_the_adapter(lora: EngineConfig, tmp_path: Path) -> None:
    write(tmp_path / "unlucky")
    async with run_server(lora, lora_root=str(tmp_path), lora_resolver="root") as server:
        for _ in range(2):
            assert await load(server, "a", "unlucky") == (503, "no memory left")
            with pytest.raises(openai.InternalServerError, match="no memory left"):
                await server.openai.with_options(max_retries=0).completions.create(model="unlucky", prompt="hello")
        assert not server.frontend.adapters.named
        assert 'adapter_load_errors_total{model_name="echo"} 4.0' in server.frontend.metrics.exposition().decode()


@pytest.mark.parametrize("padding", [0, 70_000], ids=["small", "large"])
async def test_an_adapter_may_have_its_own_chat_template(lora: EngineConfig, tmp_path: Path, padding: int) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "user": "x" * padding}
    (write(tmp_path / "own") / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    shutil.copy(lora.model.path / "chat_template.jinja", write(tmp_path / "same", 1))
    (write(tmp_path / "bad", 2) / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    (write(tmp_path / "long", 2) / "chat_template.jinja").write_text("x" * (MAX_TEMPLATE_CHARACTERS + 1))
    modules = (f"own={tmp_path / 'own'}",)  # read when the first request names it
    async with run_server(lora, lora_root=str(tmp_path), lora_modules=modules) as server:
        assert (await load(server, "same", "same"))[0] == 200
        text = (await load(server, "bad", "bad"))[1]
        assert "the chat template is invalid: line 1" in text
        assert "has more than 131072 characters" in (await load(server, "long", "long"))[1]
        shutil.copy(lora.model.tokenizer / "tokenizer.json", tmp_path / "same")
        assert (await load(server, "again", "same"))[0] == 200
        (tmp_path / "same" / "added_tokens.json").write_text(json.dumps({"<new>": 200}))
        text = (await load(server, "new", "same"))[1]
        assert "its tokenizer has the token '<new>' with the id 200, which the base's does not have" in text
        found = {}
        for name in ("own", "same", "echo"):
            answer = (await server.http.post("/v1/chat/completions", json=body | {"model": name})).json()
            found[name] = answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]
            counted = await server.http.post("/tokenize", json={"messages": body["messages"], "model": name})
            assert counted.json()["count"] == found[name][1]
        assert found["own"][0] == f"{mark(server, tmp_path / 'own')}hi!"
        assert found["same"][1] == found["echo"][1] > found["own"][1]


async def test_uploaded_gguf_files(lora: EngineConfig, tmp_path: Path) -> None:
    (tmp_path / "uploads").mkdir()
    write_gguf(tmp_path / "a.gguf")
    digest = open_adapter(tmp_path / "a.gguf").digest
    async with run_server(lora, file_storage_path=str(tmp_path / "uploads"), lora_root=str(tmp_path)) as server:
        file = await server.openai.files.create(
            file=("a.gguf", (tmp_path / "a.gguf").read_bytes()), purpose="user_data"
        )
        assert await load(server, "a", file.id) == (200, "Success: LoRA adapter 'a' added successfully.")
        assert (await load(server, "b", "a.gguf"))[0] == 200
        await server.openai.files.delete(file.id)
        listed = {each.id: each.model_dump() for each in (await server.openai.models.list()).data}
        assert [listed[name]["digest"] for name in "ab"] == [digest.hex()] * 2
        assert (await answer(server, "a")).endswith("hello")
        assert (await load(server, "c", file.id))[0] == 400
        not_one = await server.openai.files.create(file=("x.gguf", b"GGUF"), purpose="user_data")
        status, text = await load(server, "c", not_one.id)
        assert (status, not_one.id in text, str(tmp_path) in text) == (400, True, False)


async def test_unknown_names_are_resolved(lora: EngineConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "root" / "team" / "a", 1)
    write(tmp_path / "outside", 2)
    options: Any = {"lora_root": str(tmp_path / "root"), "lora_resolver": "root"}
    async with run_server(lora, **options) as server:
        own = f"{mark(server, path)}hello"
        assert await asyncio.gather(*(answer(server, "team/a") for _ in range(3))) == [own] * 3
        assert [each.id for each in (await server.openai.models.list()).data] == ["echo", "alias", "team/a"]
        for name in ("team/b", "../outside", "/", " team/a", "a" * 500, "😀" * 100):
            with pytest.raises(openai.NotFoundError):
                await answer(server, name)


async def test_invocations_of_alora(lora: EngineConfig, tmp_path: Path) -> None:
    async with run_server(lora, lora_root=str(tmp_path)) as server:
        tokens = server.tokenizer.encode(" world", add_special_tokens=False)
        path = write(tmp_path / "a", 1, alora_invocation_tokens=tokens)
        assert (await load(server, "a", "a"))[0] == 200
        own = mark(server, path)
        assert await answer(server, "a", "x world y world z") == f"{own} world z"
        assert await answer(server, "a", "hello") == "hello"  # the base's
        beams = {"model": "a", "prompt": "x world", "max_tokens": 1, "use_beam_search": True}
        assert (await server.http.post("/v1/completions", json=beams)).json()["choices"][0]["text"] == own


def _outside(folder: Path) -> None:
    shutil.move(write(folder) / "adapter_model.safetensors", folder.parent.parent / "weights")
    (folder / "adapter_model.safetensors").symlink_to(folder.parent.parent / "weights")


def _pickled(folder: Path) -> None:
    (write(folder) / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _huge(folder: Path) -> None:
    (write(folder) / "adapter_config.json").write_bytes(b" " * 2**21)


def _pipe(folder: Path) -> None:
    (write(folder) / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


BAD: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "weights elsewhere": (_outside, "not below --lora-root"),
    "pickled": (_pickled, "is a pickle"),
    "huge config": (_huge, "adapter_config.json: larger than 1 MiB"),
    "a pipe": (_pipe, "adapter_model.safetensors"),
    "half": (
        lambda folder: write_adapter(folder, dict([*SHAPES.items()][:1])),
        f"{Q}.lora_A.weight",
    ),
    "another base": (
        lambda folder: write_adapter(folder, dict.fromkeys(SHAPES, (16, 16))),
        f"{Q}.lora_",
    ),
    "nothing": (lambda folder: folder.mkdir(), "no adapter_model.safetensors found"),
    "bad for the replica": (write, "the adapter is bad"),
}


async def test_bad_adapters_are_refused_by_name(lora: EngineConfig, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "elsewhere" / "a")
    (root / "link").symlink_to(tmp_path / "elsewhere" / "a")
    async with run_server(lora, lora_root=str(root)) as server:
        for name, (make, reason) in BAD.items():
            make(root / name)
            status, text = await load(server, name, name)
            assert status == 400, (name, text)
            assert reason in text, (name, text)
            assert server.frontend.adapters._copies.path.name not in text, text
        for path in ("../elsewhere/a", str(tmp_path / "elsewhere" / "a"), "link", "a\0b", "missing"):
            status, text = await load(server, "x", path)
            assert status == 400, (path, text)
        assert not server.frontend.adapters.named
        text = server.frontend.metrics.exposition().decode()
        assert f'adapter_load_errors_total{{model_name="echo"}} {len(BAD) + 4}.0' in text
        copies = server.frontend.adapters._copies.path
        assert [each for each in copies.iterdir() if each.is_dir()] == []


async def test_copies_keep_to_the_disk_budget(lora: EngineConfig, tmp_path: Path) -> None:
    for seed in range(3):
        write(tmp_path / f"a{seed}", seed)
    size = sum(each.stat().st_size for each in (tmp_path / "a0").iterdir())
    async with run_server(lora, lora_root=str(tmp_path), lora_disk_gb=2.5 * size / 2**30) as server:
        copies = server.frontend.adapters._copies.path
        for seed in range(3):
            assert (await load(server, f"a{seed}", f"a{seed}"))[0] == 200
        kept = {each.name for each in copies.iterdir() if each.is_dir()}
        assert kept == {open_adapter(tmp_path / f"a{seed}").digest.hex() for seed in (1, 2)}
        assert await answer(server, "a0") == f"{mark(server, tmp_path / 'a0')}hello"


async def test_roles(lora: EngineConfig, tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    async with run_server(lora, api_key="api", admin_key=("admin",), lora_root=str(tmp_path)) as server:
        body = {"lora_name": "a", "lora_path": "a"}
        statuses = [
            (await server.http.post("/v1/load_lora_adapter", json=body, headers={"Authorization": f"Bearer {key}"}))
            for key in ("no", "api", "admin")
        ]
        assert [each.status_code for each in statuses] == [401, 403, 200]


async def test_without_enable_lora(config: EngineConfig, tmp_path: Path) -> None:
    async with run_server(config) as server:
        status, text = await load(server, "a", "a")
        assert (status, "--enable-lora" in text) == (400, True)
        with pytest.raises(ConfigError, match="--enable-lora"):
            await server.frontend.adapters.open(str(tmp_path))
    for options in ({"lora_modules": ("a=b",)}, {"lora_root": "."}, {"lora_resolver": "hub"}):
        asked = ServerOptions(**options)
        with pytest.raises(ConfigError, match="requires --enable-lora"):
            asked.check_adapters(("echo",), is_enabled=False)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        (("a",), "expected NAME=PATH"),
        (("=x",), "expected NAME=PATH"),
        (("a,b=x",), "a name must have no comma"),
        (("a=x", "a=y"), "a is given twice"),
        (("echo=x",), "a name of the base"),
        (('{"name": "a"}',), "expected NAME=PATH"),
        (('{"name": "a", "path": "x", "rank": 8}',), "rank is not supported"),
        (('{"name": "a", "path": "x", "base_model_name": "b"}',), "base_model_name: b is not echo"),
        (('{"name": "a", "path": "x", "pinned": 1}',), "pinned: expected true or false"),
    ],
)
def test_modules_that_are_refused(modules: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ServerOptions(lora_modules=modules).check_adapters(("echo",), is_enabled=True)
