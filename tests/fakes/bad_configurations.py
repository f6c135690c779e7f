"""Wrong configurations and broken checkpoints, each with the one line that `quire serve` ends with."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.engine.config.options import DEMO_MODEL

Edit = Callable[[Path], object]
"""A change of a model folder, whose files may be replaced but not written to: they are links."""


@dataclass(frozen=True)
class BadConfiguration:
    """A command line, usually for a copy of the demo model with one mistake."""

    name: str
    message: str
    """The text of the error, as a regular expression."""
    arguments: tuple[str, ...] = ()
    edit: Edit = lambda folder: None
    model: str | None = ""
    """MODEL, relative to the folder; None: the option is not given."""
    environment: Mapping[str, str] = field(default_factory=dict)
    code: int = 2
    is_early: bool = True
    """The first process finds it by itself."""

    def command(self, folder: Path) -> list[str]:
        """Write the model into the empty `folder`; returns the arguments of `quire`."""
        for file in DEMO_MODEL.iterdir():
            (folder / file.name).symlink_to(file)
        self.edit(folder)
        model = [] if self.model is None else [str(folder / self.model)]
        has_port = {"--port", "--uds", "AIP_HTTP_PORT"} & {*self.arguments, *self.environment}
        port = [] if has_port else ["--port", "0"]
        return ["serve", *model, *(text.replace("{folder}", str(folder)) for text in self.arguments), *port]


def flags(message: str, *arguments: str, **more: Any) -> BadConfiguration:
    """The demo model with these flags."""
    return BadConfiguration(" ".join(arguments)[:60], message, arguments, **more)


def text(file: str, content: str | bytes) -> Edit:
    """Replace the content of a file."""

    def edit(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    return edit


def without(file: str) -> Edit:
    return lambda folder: (folder / file).unlink()


def all_of(*edits: Edit) -> Edit:
    return lambda folder: [edit(folder) for edit in edits]


def directory(file: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return edit


def fifo(file: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return edit


def settings(file: str, **changes: Any) -> Edit:
    """Change settings in a JSON file of the demo model, or in its text part where that has them."""
    found = json.loads((DEMO_MODEL / file).read_text())
    of_text = found.get("text_config", {})
    if changes.keys() <= of_text.keys() - found.keys():
        changes = {"text_config": of_text | changes}
    return lambda folder: text(file, json.dumps(found | changes))(folder)


def config(message: str, **changes: Any) -> BadConfiguration:
    return BadConfiguration(f"config.json: {changes}"[:60], message, edit=settings("config.json", **changes))


def unsupported(message: str, **changes: Any) -> BadConfiguration:
    """Settings in config.json that transformers might support."""
    return replace(config(message, **changes), is_early=False)


def generation(message: str, **changes: Any) -> BadConfiguration:
    edit = settings("generation_config.json", **changes)
    return BadConfiguration(f"generation_config.json: {changes}"[:60], message, edit=edit)


def file(message: str, name: str, content: str | bytes, what: str = "") -> BadConfiguration:
    return BadConfiguration(f"{name}: {what or content!r}"[:60], message, edit=text(name, content))


def yaml(message: str, content: str) -> BadConfiguration:
    arguments = ("--config", "{folder}/flags.yaml")
    return BadConfiguration(f"--config: {content!r}"[:60], message, arguments, text("flags.yaml", content))


def environment(message: str, name: str, value: str, *arguments: str) -> BadConfiguration:
    return BadConfiguration(f"{name}={value}"[:60], message, arguments, environment={name: value})


Header = dict[str, Any]
WEIGHTS = "model.safetensors"
NORM = "language_model.model.layers.3.input_layernorm.weight"


def weights(
    message: str, what: str, change: Callable[[Header, bytearray], object], *arguments: str, is_late: bool = False
) -> BadConfiguration:
    """Change the header and the data of the weights; a length that `change` returns is written in place of the
    header's."""

    def edit(folder: Path) -> None:
        content = (DEMO_MODEL / WEIGHTS).read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
        changed = change(header, data)
        written = json.dumps(header).encode()
        claimed = changed if isinstance(changed, int) else len(written)
        text(WEIGHTS, struct.pack("<Q", claimed) + written + data)(folder)

    return BadConfiguration(f"weights: {what}", message, arguments, edit, is_early=not is_late)


def rename(old: str, new: str) -> Callable[[Header, bytearray], None]:
    def change(header: Header, data: bytearray) -> None:
        header[new] = header.pop(old)

    return change


def reshape(name: str, shape: list[int], dtype: str = "BF16") -> Callable[[Header, bytearray], None]:
    def change(header: Header, data: bytearray) -> None:
        header[name] |= {"shape": shape, "dtype": dtype}

    return change


def put(name: str, value: float, at: int = 5) -> Callable[[Header, bytearray], None]:
    """Overwrite one element, in bfloat16."""

    def change(header: Header, data: bytearray) -> None:
        start = header[name]["data_offsets"][0] + 2 * at
        data[start : start + 2] = np.float32(value).tobytes()[2:]

    return change


def index(weight_map: Any) -> Edit:
    return text("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


CASES = [
    # Flags: sizes and ranges
    flags("does not divide", "-tp", "3"),
    flags("--tensor-parallel-size must be at least 1, got 0", "-tp", "0"),
    flags("--tensor-parallel-size must be at least 1, got -1", "-tp", "-1"),
    flags("--tensor-parallel-size 100000 does not divide", "-tp", "100000"),
    flags("--pipeline-parallel-size 7 is more than", "-pp", "7"),
    flags("--pipeline-parallel-size must be at least 1", "-pp", "0"),
    flags("--pipeline-layer-partition 1,2: expected 2", "-pp", "2", "--pipeline-layer-partition", "1,2"),
    flags("--pipeline-layer-partition a,b: expected", "-pp", "2", "--pipeline-layer-partition", "a,b"),
    flags("--data-parallel-size must be at least 1", "-dp", "0"),
    flags("at most 1024 replicas", "-dp", "5000"),
    flags("use fewer replicas", "-dp", "1000"),
    flags("--max-model-len 99999 is more than", "--max-model-len", "99999"),
    flags("--max-model-len 1 has no room", "--max-model-len", "1"),
    flags("--max-model-len must be at least 1", "--max-model-len", "0"),
    flags("--max-num-seqs must be at least 1", "--max-num-seqs", "0"),
    flags("--max-num-seqs 10000000", "--max-num-seqs", "10000000"),
    flags("--max-num-batched-tokens must be", "--max-num-batched-tokens", "0"),
    flags("--max-num-batched-tokens", "--max-num-batched-tokens", "100000000000"),
    flags("--block-size must be at least 1", "--block-size", "0"),
    flags("holds 0 tokens", "--block-size", "1000000000"),
    flags("holds 0 tokens", "--kv-cache-memory-bytes", "1000"),
    flags("does not fit", "--kv-cache-memory-bytes", str(10**15)),
    flags("--gpu-memory-utilization must be", "--gpu-memory-utilization", "0"),
    flags("--gpu-memory-utilization must be", "--gpu-memory-utilization", "1.5"),
    flags("--gpu-memory-utilization must be", "--gpu-memory-utilization", "nan"),
    flags("--itl-target-ms must be", "--itl-target-ms", "-1"),
    flags("--itl-target-ms needs", "--itl-target-ms", "5", "--max-num-batched-tokens", "512"),
    flags("--itl-target-ms must be", "--itl-target-ms", "inf"),
    flags("--distributed-timeout-seconds must be", "--distributed-timeout-seconds", "0"),
    flags("--distributed-timeout-seconds must be", "--distributed-timeout-seconds", "inf", "-tp", "2"),
    flags("--max-logprobs must be", "--max-logprobs", "-2"),
    flags("--seed", "--seed", str(1 << 70)),
    flags("--cuda-graph-sizes must be", "--cuda-graph-sizes", "a"),
    flags("invalid choice: 'float8'", "--dtype", "float8"),
    flags("int3 .* use int8, int4, fp8 or mxfp4", "--quantization", "int3"),
    flags("invalid int value: 'many'", "--max-num-seqs", "many"),
    flags("--device cuda: no NVIDIA GPU is visible", "--device", "cuda", environment={"CUDA_VISIBLE_DEVICES": ""}),
    flags("needs a GPU", "--attention-backend", "triton", "--device", "cpu"),
    # Flags that contradict each other or the model
    flags("--enable-eplb needs --enable-expert-parallel", "--enable-eplb"),
    flags("has no experts; omit the flag", "--enable-expert-parallel"),
    flags("cannot be divided evenly among hosts", "--nnodes", "2"),
    flags("--node-rank 3 is out of range", "--nnodes", "2", "-tp", "2", "--node-rank", "3", "--headless"),
    flags("--node-rank 3 is out of range", "--node-rank", "3"),
    flags("--headless: say which replicas", "--headless"),
    flags("there are 1 replicas", "--data-parallel-start-rank", "5"),
    flags("uni supports one rank, not 2", "--distributed-executor-backend", "uni", "-tp", "2"),
    flags(r"no pytorch_model\*\.bin found", "--load-format", "pt"),
    # Flags of the server
    flags("--api-server-count 0: must be at least 1", "--api-server-count", "0"),
    flags("--api-server-count 5000", "--api-server-count", "5000"),
    flags("--port 70000: must be from 0 to 65535", "--port", "70000"),
    flags("--port -1: must be from 0 to 65535", "--port", "-1"),
    flags("invalid int value: 'http'", "--port", "http"),
    flags("--host no.such.host.invalid", "--host", "no.such.host.invalid"),
    flags("cannot listen on 203.0.113.7", "--host", "203.0.113.7"),
    flags("--host", "--host", "a" * 300),
    flags("cannot listen on this path", "--uds", "/no/such/folder/socket"),
    flags("--root-path llm: expected", "--root-path", "llm"),
    flags("--api-key is empty", "--api-key", ""),
    flags("--api-key-file /no/such/file", "--api-key-file", "/no/such/file"),
    flags("--max-queue -1: must be", "--max-queue", "-1"),
    flags("--request-timeout 0: must be", "--request-timeout", "0"),
    flags("--request-timeout nan: must be", "--request-timeout", "nan"),
    flags("--max-body-mib 0: must be", "--max-body-mib", "0"),
    flags("--max-body-mib inf", "--max-body-mib", "inf"),
    flags("requires --allowed-origins", "--allowed-methods", "GET"),
    flags("expected a JSON list", "--allowed-origins", "[x"),
    flags("with --no-media-fetch: omit one", "--no-media-fetch", "--allowed-media-domains", "a.example"),
    flags("expected a domain such as", "--allowed-media-domains", "https://a.example/"),
    flags("10.1.0.1/16 has host bits set; expected one such as", "--allowed-media-networks", "10.1.0.1/16"),
    flags("--allowed-local-media-path /no/such/folder: not a folder", "--allowed-local-media-path", "/no/such/folder"),
    flags("--media-fetch-timeout 0: must be", "--media-fetch-timeout", "0"),
    flags("--max-media-bytes 0: must be", "--max-media-bytes", "0"),
    flags("--mm-processor-cache-gb -1: must be", "--mm-processor-cache-gb", "-1"),
    flags("--media-io-kwargs: audio: expected image or video", "--media-io-kwargs", '{"audio": {}}'),
    flags("--ssl-keyfile requires --ssl-certfile", "--ssl-keyfile", "key.pem"),
    flags("No such file", "--ssl-certfile", "/no/cert.pem", "--ssl-keyfile", "/no/key.pem"),
    flags("--served-model-name", "--served-model-name", ""),
    flags("--served-model-name", "--served-model-name", "one", "one"),
    flags("--chat-template /no/such/template", "--chat-template", "/no/such/template"),
    flags("the chat template is invalid: line 1", "--chat-template", "{% for %}"),
    flags("--chat-template /: not a readable file", "--chat-template", "/"),
    flags("nonsense: this format of tool calls is not supported", "--tool-call-parser", "nonsense"),
    flags("invalid choice: 'loud'", "--log-level", "loud"),
    flags("unrecognized arguments: --no-such-flag", "--no-such-flag"),
    flags("--tensor-paralel-size: did you mean --tensor-parallel-size\\?", "--tensor-paralel-size", "2"),
    flags("--max-num-seq: did you mean --max-num-seqs\\?", "--max_num_seq=4"),
    flags("--node-rank 3 is out of range: with --nnodes 2 ", *("--nnodes", "2", "--node-rank", "3", "-tp", "2")),
    flags("/no/such/folder: no such model folder", "--tokenizer", "/no/such/folder"),
    flags("--config /no/such/file: cannot read the file: No such file or directory$", "--config", "/no/such/file"),
    yaml("flags.yaml: cannot read the file", "tensor-parallel-size: [2"),
    yaml("flags.yaml: expected a mapping of flags", "- a\n- b"),
    yaml("flags.yaml: unknown flag tensor-size$", "tensor-size: 2"),
    yaml("unknown flag tensor_paralel_size; did you mean tensor-parallel-size\\?", "tensor_paralel_size: 2"),
    yaml("invalid int value: 'two'", "tensor-parallel-size: two"),
    yaml("tensor-parallel-size", "tensor-parallel-size: {a: 1}"),
    yaml("tensor-parallel-size", "tensor-parallel-size: true"),
    yaml("flags.yaml: cannot read the file", "port: \0"),
    yaml("flags.yaml", "[" * 5000),
    # Environment variables
    environment("AIP_HTTP_PORT=http: expected a port number", "AIP_HTTP_PORT", "http"),
    environment("QUIRE_SHARE_GPU=yes is invalid", "QUIRE_SHARE_GPU", "yes"),
    environment("OMP_NUM_THREADS=many", "OMP_NUM_THREADS", "many"),
    environment("OMP_NUM_THREADS=-3", "OMP_NUM_THREADS", "-3", "-tp", "2"),
    environment("QUIRE_CPU_ISA=sse", "QUIRE_CPU_ISA", "sse"),
    environment("QUIRE_API_KEY", "QUIRE_API_KEY", " , "),
    replace(environment("QUIRE_HOST_IP=junk", "QUIRE_HOST_IP", "junk", "--nnodes", "2", "-tp", "2"), is_early=False),
    # The model folder
    BadConfiguration("MODEL is a file", "no such model folder", model="config.json"),
    BadConfiguration("MODEL does not exist", "no such model folder", model="nowhere"),
    BadConfiguration("MODEL is empty", "no config.json found", edit=lambda folder: (folder / "x").mkdir(), model="x"),
    flags("no such model folder", "no/such/repository", model=None),
    flags("not-a-model: cannot be downloaded", "not-a-model", model=None, environment={"HF_HUB_OFFLINE": "1"}),
    flags("Repo id|cannot be downloaded", "a b/c d", model=None, environment={"HF_HUB_OFFLINE": "1"}),
    # config.json
    BadConfiguration("config.json: missing", "no config.json found", edit=without("config.json")),
    BadConfiguration("config.json: a FIFO", "config.json: a FIFO, not a regular file", edit=fifo("config.json")),
    BadConfiguration("weights: a FIFO", "model-2.safetensors: a FIFO", edit=fifo("model-2.safetensors")),
    BadConfiguration(
        "tokenizer_config.json: a FIFO", "tokenizer_config.json: a FIFO", edit=fifo("tokenizer_config.json")
    ),
    BadConfiguration("config.json: a directory", "config.json: cannot be read", edit=directory("config.json")),
    file("config.json: not valid JSON", "config.json", ""),
    file("config.json: not valid JSON", "config.json", "{'a': 1}"),
    file("config.json: expected a JSON object", "config.json", "[1]"),
    file("config.json: cannot be read", "config.json", b"\xff\xfe{\x00"),
    file("config.json: .*nested too deeply", "config.json", "[" * 200_000, "200,000 brackets"),
    file("config.json: not valid JSON", "config.json", '{"hidden_size": ' + "9" * 5000 + "}", "5,000 digits"),
    config("architectures", architectures="LlamaForCausalLM"),
    config("architectures", architectures=[5]),
    config(r"config\.json: no architectures, and no model_type", architectures=[], model_type="no_such"),
    config("config.json: .*transformers does not know it", architectures=["NoSuchForCausalLM"], model_type="no_such"),
    config("is not a causal language model of text", architectures=["T5ForConditionalGeneration"], model_type="t5"),
    config("num_hidden_layers must be a whole number of at least 1", num_hidden_layers=0),
    config("num_hidden_layers must be a whole number of at least 1, got -1", num_hidden_layers=-1),
    config("num_hidden_layers", num_hidden_layers=10**9),
    config("num_hidden_layers", num_hidden_layers="six"),
    config("num_hidden_layers", num_hidden_layers=2.5),
    config("num_hidden_layers", num_hidden_layers=None),
    config("hidden_size", hidden_size="big"),
    config("hidden_size", hidden_size="256"),
    config("hidden_size must be a whole number of at least 1, got -256", hidden_size=-256),
    config("hidden_size must be a whole number of at least 1, got 0", hidden_size=0),
    config("Not enough memory", hidden_size=10**12),
    config("hidden_size", hidden_size=[256]),
    config("num_attention_heads", num_attention_heads=0),
    config("num_attention_heads", num_attention_heads=-8),
    config("num_key_value_heads", num_key_value_heads=3),
    config("num_key_value_heads", num_key_value_heads=-4),
    config("num_attention_heads", num_attention_heads={}),
    config("intermediate_size", intermediate_size=-1),
    config("intermediate_size", intermediate_size="x"),
    config("Not enough memory", intermediate_size=10**15),
    config("vocab_size", vocab_size=0),
    config("vocab_size", vocab_size=-1),
    config("vocab_size", vocab_size="x"),
    config("Not enough memory", vocab_size=10**12),
    unsupported("rotary positions need an even number", head_dim=31),
    config("head_dim", head_dim=-32),
    config("max_position_embeddings", max_position_embeddings=-1),
    config("max_position_embeddings", max_position_embeddings=0),
    config("max_position_embeddings", max_position_embeddings="long"),
    flags(
        "holds .* tokens|Not enough memory",
        *("--max-model-len", str(10**12)),
        edit=settings("config.json", max_position_embeddings=10**12),
    ),
    config("rms_norm_eps", rms_norm_eps="tiny"),
    config("rms_norm_eps", rms_norm_eps=float("nan")),
    unsupported("rope scaling 'spiral' is not supported", rope_parameters={"rope_type": "spiral"}),
    config("rope_theta|could not convert", rope_parameters={"rope_type": "default", "rope_theta": "x"}),
    config("rope_theta", rope_parameters={"rope_type": "default", "rope_theta": -1.0}),
    unsupported("config.json lacks 'factor'", rope_parameters={"rope_type": "linear"}),
    config("rope_parameters", rope_parameters=[1]),
    config("the activation 'wiggle' is not supported", hidden_act="wiggle"),
    config(r'hidden_act must be a name, got \["silu"\]', hidden_act=["silu"]),
    config("quant_method 'hqq' is not supported", quantization_config={"quant_method": "hqq", "nbits": 4}),
    config("group_size is missing", quantization_config={"quant_method": "gptq", "bits": 4}),
    config("quantization_config", quantization_config="gptq"),
    BadConfiguration(
        "config.json: eos_token_id 'x'",
        "config.json: eos_token_id must be",
        edit=lambda folder: (
            without("generation_config.json")(folder),
            settings("config.json", eos_token_id="x")(folder),
        ),
    ),
    # generation_config.json
    file("generation_config.json: not valid JSON", "generation_config.json", "{"),
    file("generation_config.json: expected a JSON object", "generation_config.json", "[]"),
    generation("generation_config.json: temperature must be", temperature="hot"),
    generation("generation_config.json: temperature must be", temperature=-1.0),
    generation("generation_config.json: top_p must be", top_p=2.0),
    generation("generation_config.json: top_k must be", top_k="many"),
    generation("generation_config.json: repetition_penalty must be", repetition_penalty=0.0),
    generation("generation_config.json: eos_token_id must be", eos_token_id="x"),
    generation("generation_config.json: eos_token_id must be", eos_token_id=[2, None]),
    generation("generation_config.json: eos_token_id must be", eos_token_id=999_999),
    generation("generation_config.json: eos_token_id must be", eos_token_id=-1),
    # Tokenizer and chat template
    BadConfiguration("tokenizer.json: missing", "no tokenizer.json and no other", edit=without("tokenizer.json")),
    BadConfiguration(
        "no tokenizer files",
        "no tokenizer.json and no other vocabulary",
        edit=all_of(without("tokenizer.json"), without("tokenizer_config.json")),
    ),
    file("tokenizer.json: not a valid tokenizer", "tokenizer.json", "{}"),
    file("tokenizer.json: not valid JSON", "tokenizer.json", "{" * 100),
    file("tokenizer_config.json: not valid JSON", "tokenizer_config.json", "{"),
    file("tokenizer_config.json", "tokenizer_config.json", '{"added_tokens_decoder": {"x": 5}}'),
    file("tokenizer_config.json", "tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
    BadConfiguration(
        "vocab.json: broken",
        "no usable tokenizer",
        edit=all_of(without("tokenizer.json"), text("vocab.json", "{}")),
    ),
    file(
        "conflicts with the vocabulary", "tokenizer_config.json", '{"added_tokens_decoder": {"7": {"content": "<z>"}}}'
    ),
    file("tokenizer_config.json", "tokenizer_config.json", '{"extra_special_tokens": 5}'),
    file("the chat template is invalid: line 1", "chat_template.jinja", "{{ messages"),
    file("chat_template.jinja: cannot be read", "chat_template.jinja", b"\xff\xff"),
    BadConfiguration("chat_template.jinja: a directory", "chat_template.jinja", edit=directory("chat_template.jinja")),
    BadConfiguration(
        "tokenizer_config.json: chat_template 5",
        "tokenizer_config.json: chat_template",
        edit=all_of(without("chat_template.jinja"), settings("tokenizer_config.json", chat_template=[5])),
    ),
    # Weights
    BadConfiguration("weights: missing", r"no \*.safetensors found", edit=without(WEIGHTS)),
    BadConfiguration("weights: a directory", "model.safetensors", edit=directory(WEIGHTS)),
    file("not a safetensors file|truncated", WEIGHTS, b"", "empty"),
    file("not a safetensors file", WEIGHTS, struct.pack("<Q", 8) + b"nonsense", "nonsense"),
    file("not a safetensors file", WEIGHTS, struct.pack("<Q", 100_000) + b"[" * 100_000, "nested"),
    weights("truncated", "header longer than the file", lambda header, data: 1 << 40),
    weights("truncated: ", "without their end", lambda header, data: data.__delitem__(slice(-100, None))),
    weights("longer than its header says", "with 100 bytes more", lambda header, data: data.extend(bytes(100))),
    weights(f"{NORM} is missing", "a tensor is missing", rename(NORM, "other")),
    weights(f"{NORM} is missing", "a tensor is missing, two ranks", rename(NORM, "other"), "-tp", "2"),
    weights(rf"{NORM} has the shape \[128, 2\], expected \[256\]", "another shape", reshape(NORM, [128, 2])),
    weights("not a safetensors file|bytes", "a shape with other bytes", reshape(NORM, [512])),
    weights(f"{NORM} is of type I16", "integers", reshape(NORM, [256], "I16")),
    weights("not a safetensors file|shape", "a negative shape", reshape(NORM, [-256])),
    weights("not a safetensors file|shape", "no shape", lambda header, data: header[NORM].pop("shape")),
    weights(f"{NORM} has values that are NaN or infinite", "NaN", put(NORM, float("nan")), is_late=True),
    weights(
        "embed_tokens.weight has values that are NaN or infinite",
        "infinity, two ranks",
        put("language_model.model.embed_tokens.weight", float("inf"), 700_000),
        *("-tp", "2"),
        is_late=True,
    ),
    BadConfiguration(
        "index: missing shards", "model-2.safetensors: cannot be read", edit=index({"x": "model-2.safetensors"})
    ),
    BadConfiguration("index: a list", "model.safetensors.index.json", edit=index([1])),
    BadConfiguration("index: a number", "/5: cannot be read", edit=index({NORM: 5})),
    BadConfiguration("index: another folder", "model.safetensors.index.json", edit=index({NORM: "../etc/passwd"})),
    # Other kinds of models
    BadConfiguration(
        "modules.json: not valid JSON",
        "modules.json: not valid JSON",
        ("--runner", "pooling"),
        text("modules.json", "{"),
    ),
    BadConfiguration(
        "modules.json: no pooling", "without a Pooling module", ("--runner", "pooling"), text("modules.json", "[]")
    ),
]
