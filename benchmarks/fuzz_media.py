"""Fuzz what reads the files and addresses of clients, guided by coverage (atheris), in a process for each target.

python benchmarks/fuzz_media.py [--seconds N] [--folder FOLDER] [TARGET …]

Needs atheris besides Quire's extras heif, pdf and video. Each target begins with files that this script makes, and gets
an equal part of the time. Its findings are errors that are no refusals, and inputs that need too much time or memory or
crash a library; such files are then given to a confined decoder, which must outlive them. Fails if an error is no
refusal, if the decoder died, or if what is not a picture, a video or a document needs more than a few seconds of
processor time. `--folder` keeps the inputs; a second run continues with them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

try:
    import atheris
except ImportError:
    sys.exit("fuzz_media.py needs atheris: pip install atheris")

sys.path.append(str(Path(__file__).resolve().parent.parent))
INSTRUMENTED = [
    "PIL",
    "av",
    "pillow_heif",
    "pypdfium2",
    "numpy.lib",
    "email",
    "quire.server.media",
    "quire.server.http.forms",
]
with atheris.instrument_imports(include=INSTRUMENTED):
    import numpy as np
    from PIL import Image

    from quire.engine.protocol.errors import InvalidParameter
    from quire.server.http.forms import form_boundary, form_parts
    from quire.server.media import decoder, documents, images
    from quire.server.media.addresses import AddressRules, parse_url
    from quire.server.media.data_urls import data_url
    from quire.server.media.decoders import Decoders
    from quire.server.media.decoding import DecodeOrder
    from quire.server.media.processor import Processor
    from quire.server.media.types import MediaSettings, MediaUnavailable
    from tests.fakes.arrays import npy, safetensors
    from tests.fakes.processors import write_processor
    from tests.integration.server.media.test_hostile_files import ATTACKS, MAX_BYTES, MAX_PIXELS, TOO_MUCH, at

MAX_FILE_BYTES = 100_000
MEMORY = 2**31
SECONDS = 60
"""For an input, of wall-clock time: the machine may be busy."""
ORDERS = {
    "image": DecodeOrder("image", {}, 20, MAX_PIXELS, MAX_BYTES),
    "video": DecodeOrder("video", {}, 20, MAX_PIXELS, MAX_BYTES),
    "document": DecodeOrder("image", {}, 20, MAX_PIXELS, MAX_BYTES, 0),
    "embeds": DecodeOrder("image", {}, 20, MAX_PIXELS, MAX_BYTES, is_array=True),
    "frames": DecodeOrder("video", {}, 20, MAX_PIXELS, MAX_BYTES, is_array=True),
}
TARGETS = (*ORDERS, "options", "address", "form")
QUICK = {"embeds", "frames", "options", "address", "form"}
"""Those whose inputs need little time, whatever they are."""
QUICK_SECONDS = 5.0
"""Of processor time, for each of them; much of it is for measuring coverage."""
URLS = (
    *("https://example.com/a.png?b=c#d", "http://[::ffff:127.0.0.1]:8080/", "http://0x7f.1/", "https://пример.рф/"),
    *("data:image/png;base64,iVBORw0K%3D", "data:,a%20b", "http://user@host:99999/\\", "http://①②⑦.0.0.1/"),
)
FORM = (
    b'b\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n--b \r\n'
    b"Content-Disposition: form-data; name=\"file\"; filename*=utf-8''a%20b\r\nContent-Type: a/b\r\n\r\n"
    b"abc\r\n--b--\r\n"
)
OPTIONS: Sequence[dict[str, Any]] = (
    {"max_pixels": 401408, "min_pixels": 3136},
    {"size": {"shortest_edge": 3136, "longest_edge": 401408}},
    {"detail": "high", "max_pixels": None, "fps": 1.5, "num_frames": 3, "do_resize": False},
)


def seeds(target: str) -> list[bytes]:
    """Inputs to begin with."""
    if target == "address":
        return [url.encode() for url in URLS]
    if target == "options":
        return [json.dumps(options).encode() for options in OPTIONS]
    if target == "embeds":
        values, grid = np.ones((4, 2), np.float32), np.array([[1, 4, 4]])
        files = [npy(values) + npy(grid), npy(np.asfortranarray(values.astype(np.float16))) + npy(grid)]
        kinds = ("F32", "F16", "BF16")
        return files + [safetensors(image_embeds=(kind, values), image_grid_thw=("I64", grid)) for kind in kinds]
    if target == "form":
        return [FORM, FORM.replace(b"\"file\"; filename*=utf-8''", b"file; filename*0=x; filename*1=")]
    if target == "frames":
        frames, facts = np.zeros((2, 28, 56, 3), np.uint8), np.array((2.0, 9.0))
        return [npy(each) + npy(np.array((0, 8))) + npy(facts) for each in (frames, np.asfortranarray(frames))]
    order = ORDERS[target]
    return [
        attack.data
        for attack in ATTACKS.values()
        if (attack.kind, attack.page is None) == (order.kind, order.page is None)
        and 8 < len(attack.data) < MAX_FILE_BYTES
        and attack.message != TOO_MUCH
    ]


def address(data: bytes) -> None:
    """Read a URL, and decide about its host."""
    text, rules = data.decode("utf-8", "surrogateescape"), AddressRules.parse(["*.example", "a.b"], ["10.0.0.0/8"])
    with contextlib.suppress(InvalidParameter):
        target = parse_url(text)
        assert parse_url(target.url) == target
        if target.address is not None:
            rules.allows(target, target.address)
        rules.check_host(target)
    with contextlib.suppress(InvalidParameter):
        data_url(text, 2**20)


def form(data: bytes) -> None:
    """Read a form, whose boundary is in the first line."""
    boundary, _, body = data.partition(b"\n")

    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), 100):
            yield body[begin : begin + 100]

    async def read() -> None:
        parts = form_parts(pieces(), form_boundary(f"multipart/form-data; boundary={boundary.decode('latin-1')}"))
        async for part in parts:
            if part.filename is None:
                await part.text(1000)
            else:
                async for _ in part.content:
                    pass

    with contextlib.suppress(InvalidParameter, StopIteration):
        read().send(None)  # it waits for nothing


def target_function(target: str, folder: Path) -> Callable[[bytes], None]:
    """What libFuzzer calls, which raises an error for a finding."""
    if target == "address":
        return address
    if target == "form":
        return form
    with atheris.instrument_imports(include=INSTRUMENTED):
        formats, pdfium = images.register(), documents.register()
        processor = Processor(MediaSettings(model=str(folder)))
    file = images_of_options() if target == "options" else b""

    def decode(data: bytes) -> None:
        order = ORDERS.get(target)
        if order is None:
            try:
                options = json.loads(data)
                assert isinstance(options, dict)
            except (ValueError, RecursionError, AssertionError):
                return
            order, data = DecodeOrder("image", options, 20, MAX_PIXELS, MAX_BYTES), file
        source = os.memfd_create("media")
        os.write(source, data)
        os.lseek(source, 0, os.SEEK_SET)
        decoder._answer(order, source, formats, pdfium, processor)

    return decode


def images_of_options() -> bytes:
    """A small picture."""
    with tempfile.TemporaryFile() as file:
        Image.new("RGB", (64, 48), "red").save(file, "PNG")
        file.seek(0)
        return file.read()


def fuzz(target: str, model: Path, folder: Path, seconds: int) -> None:
    """Main function of a target's process."""
    function = target_function(target, model)

    def timed(data: bytes) -> None:
        begun = time.process_time()
        function(data)
        seconds = time.process_time() - begun
        assert target not in QUICK or seconds < QUICK_SECONDS, f"it needs {seconds:.1f} s of processor time"

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))  # as in a confined decoder
    arguments = [f"-max_total_time={seconds}", f"-timeout={SECONDS}", "-rss_limit_mb=0", f"-max_len={MAX_FILE_BYTES}"]
    arguments += [f"-artifact_prefix={folder}/found/{target}-", "-print_final_stats=1", f"{folder}/{target}"]
    atheris.Setup([sys.argv[0], *arguments], timed)
    atheris.Fuzz()


async def contained(order: DecodeOrder, data: bytes, model: Path) -> str:
    """Return what a confined decoder makes of a file; empty: it died."""
    decoders = Decoders(MediaSettings(model=str(model)))
    await decoders.ready()
    process, target = decoders._popen, os.memfd_create("result")
    try:
        answer = str(await decoders.decode(data, order, at(target)))[:100]
        return answer if decoders._popen is process else ""
    except MediaUnavailable:
        return ""
    finally:
        os.close(target)
        decoders.close()


def run(target: str, model: Path, folder: Path, seconds: float) -> bool:
    """Fuzz a target; returns whether all was well."""
    corpus, found = folder / target, folder / "found"
    for each in (corpus, found):
        each.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(target)):
        (corpus / f"seed{number}").write_bytes(data)
    end, is_well, executed, num_starts = time.monotonic() + seconds, True, 0, 0
    while (left := int(end - time.monotonic())) > 0:
        before, num_starts = {*found.iterdir()}, num_starts + 1
        command = [sys.executable, __file__, "--seconds", str(left), "--folder", str(folder)]
        done = subprocess.run(
            [*command, "--model", str(model), target], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output = done.stdout.decode(errors="replace")
        lines = output.splitlines()
        stats = [line for line in lines if line.startswith("stat::number_of_executed_units")]
        executed += int(stats[-1].split()[-1]) if stats else 0
        if not done.returncode:
            break
        name = next(iter({*found.iterdir()} - before), None)
        if name is None:  # it did not begin
            print(output[-4000:])
            return False
        is_error = "Uncaught Python exception" in output
        print(f"{target}: {name}: {'an error' if is_error else 'a crash, or too much time'}", flush=True)
        if is_error:
            first = next(at for at, line in enumerate(lines) if "Uncaught Python exception" in line)
            print(*lines[first : first + 30], sep="\n")
        is_well &= not is_error and target not in QUICK
        if (order := ORDERS.get(target)) is not None:
            answer = asyncio.run(contained(order, name.read_bytes(), model))
            print(f"{target}: the confined decoder: {answer or 'DIED'}", flush=True)
            is_well &= bool(answer)
    print(f"{target}: {executed:,} inputs, {len([*corpus.iterdir()]):,} kept, {num_starts} starts", flush=True)
    return is_well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", metavar="TARGET", nargs="*", help=f"default: {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    targets = arguments.targets or TARGETS
    if arguments.model is not None:
        return fuzz(targets[0], arguments.model, arguments.folder, int(arguments.seconds))
    with tempfile.TemporaryDirectory() as temporary:
        model = write_processor("qwen2_vl", Path(temporary))
        folder = arguments.folder or Path(temporary)
        results = [run(target, model, folder, arguments.seconds / len(targets)) for target in targets]
    if not all(results):
        sys.exit(1)


if __name__ == "__main__":
    main()
