"""The pictures of docs/pictures, as SVG text; `scripts/docs` writes them.

Each is drawn on white, so that it also reads on a dark page, and is 800 pixels wide.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

WIDTH = 800
INK, QUIET = "#1f2933", "#5b6672"
# Fill and outline of shapes.
BLUE, ORANGE = ("#d6e6fa", "#2b6cb0"), ("#fde3c8", "#c05f12")
GREEN, PURPLE = ("#d8f0da", "#2f7d36"), ("#e7dcf6", "#6b46a8")
GREY, WHITE = ("#e9ecf0", "#9aa5b1"), ("#ffffff", "#9aa5b1")
Colours = tuple[str, str]


class Drawing:
    """SVG elements, in the order in which they are drawn."""

    def __init__(self, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="14">',
            f"<title>{escape(title)}</title>",
            "<defs>"
            + "".join(
                f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
                f'orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{colour}"/></marker>'
                for name, colour in (("ink", INK), *((colours[1][1:], colours[1]) for colours in (BLUE, GREEN, ORANGE)))
            )
            + "</defs>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, colours: Colours, text: str = "", *, dashed: bool = False
    ) -> None:
        """A rectangle with a text in its middle; the lines after the first are smaller."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{colours[0]}" '
            f'stroke="{colours[1]}" stroke-width="1.5"{dashes}/>'
        )
        lines = text.splitlines()
        for number, line in enumerate(lines):
            size, colour = (14, INK) if number == 0 else (12, QUIET)
            middle = y + height / 2 + 17 * (number - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle + 5, line, size=size, colour=colour)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "middle",
        size: int = 14,
        colour: str = INK,
        bold: bool = False,
    ) -> None:
        """A line of text; `y` is its base line."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{weight}>'
            f"{escape(text)}</text>"
        )

    def arrow(
        self,
        *points: tuple[float, float],
        colour: str = INK,
        dashed: bool = False,
        both: bool = False,
        width: float = 1.5,
    ) -> None:
        """A line through the points with a head at its end, or at both."""
        name = "ink" if colour == INK else colour[1:]
        ends = f' marker-end="url(#{name})"' + (f' marker-start="url(#{name})"' if both else "")
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashes}{ends}/>'
        )

    def svg(self) -> str:
        """The picture."""
        text = "\n".join([*self._parts, "</svg>"]) + "\n"
        return text.replace('orient="auto"', 'orient="auto-start-reverse"')


def processes() -> str:
    """API process, engine core and workers, and what passes between them."""
    drawing = Drawing(480, "The processes of a server: API process, engine core and workers")
    left, width, height = (190, 390, 590), 170, 64
    rows = (40, 200, 370)
    for top, colours, title in zip(
        rows,
        (BLUE, ORANGE, GREEN),
        ("API process: text", "engine core: token ids", "workers: one process per device"),
        strict=True,
    ):
        drawing.box(170, top - 24, 610, height + 40, ("#f7f9fb", colours[1]))
        drawing.text(182, top - 7, title, anchor="start", size=13, colour=colours[1], bold=True)
    for top, colours, texts in (
        (
            rows[0],
            BLUE,
            (
                "server/openai\nroutes and their shapes",
                "server/text\ntemplate, tokenizer,\ndetokenizer, stop strings",
                "server/client\nreplicas, router",
            ),
        ),
        (
            rows[1],
            ORANGE,
            (
                "engine/scheduler\nrequests and KV blocks",
                "engine/core\nthe loop",
                "engine/executor\nstarts workers,\ncarries plans",
            ),
        ),
    ):
        for x, text in zip(left, texts, strict=True):
            drawing.box(x, top, width, height, colours, text)
        for x in left[1:]:
            drawing.arrow((x - 27, top + height / 2), (x - 3, top + height / 2), both=True)
    for stage, x in enumerate((left[0], left[2])):
        drawing.box(x, rows[2], width, height, GREEN, f"stage {stage}\nrank {2 * stage} ⇄ rank {2 * stage + 1}")
    middle = rows[2] + height / 2
    drawing.arrow((left[0] + width + 3, middle), (left[2] - 3, middle))
    drawing.text(left[1] + width / 2, middle - 8, "hidden states", size=13, colour=QUIET)
    drawing.box(20, rows[0] + 12, 70, 40, GREY, "client")
    drawing.arrow((93, rows[0] + height / 2), (left[0] - 3, rows[0] + height / 2), both=True)
    drawing.text(130, rows[0] + 22, "HTTP, SSE", size=13, colour=QUIET)
    right, y = left[2] + width / 2, rows[0] + height + 34
    drawing.arrow((right, y - 31), (right, y), (left[1] + width / 2, y), (left[1] + width / 2, rows[1] - 3), both=True)
    drawing.text(right + 8, y + 4, "ZMQ", anchor="start", size=13, colour=QUIET)
    top, bottom = rows[1] + height + 3, rows[2] - 3
    drawing.arrow((left[2] + 20, top), (left[2] + 20, bottom - 24))
    drawing.text(left[2] + 12, top + 37, "SchedulerOutput", anchor="end", size=13, colour=QUIET)
    drawing.arrow((left[2] + 40, bottom), (left[2] + 40, top))
    drawing.text(left[2] + 48, top + 37, "ModelRunnerOutput", anchor="start", size=13, colour=QUIET)
    return drawing.svg()


def request() -> str:
    """The functions of the API process on the way to the engine core, and back."""
    drawing = Drawing(250, "A chat from its route to the engine core, and back to the client")
    left, width, height, rows = (20, 162, 304, 446), 124, 74, (26, 150)
    middles = [top + height / 2 for top in rows]
    for row, texts in enumerate(
        (
            (
                "route\nchat_completions",
                "InputProcessor\ntemplate,\ntokenizer,\nvalidation",
                "Frontend\ngenerate",
                "EngineClient\nsubmit, router",
            ),
            (
                "formatter\nserver-sent events",
                "Generation",
                "OutputProcessor\ndetokenizer,\nstop strings,\nparsers",
                "EngineClient\nOutputStream",
            ),
        )
    ):
        for x, text in zip(left, texts, strict=True):
            drawing.box(x, rows[row], width, height, BLUE, text)
        for x in left[1:]:
            points = ((x - 16, middles[row]), (x - 3, middles[row]))
            drawing.arrow(*(points if row == 0 else reversed(points)))
    drawing.box(710, rows[0], 70, rows[1] - rows[0] + height, ORANGE)
    for number, text in enumerate(("engine", "core")):
        drawing.text(745, 122 + 18 * number, text)
    edge = left[-1] + width + 3
    drawing.arrow((edge, middles[0]), (707, middles[0]))
    drawing.text((edge + 707) / 2, middles[0] - 8, "EngineCoreRequest", size=13, colour=QUIET)
    drawing.arrow((707, middles[1]), (edge, middles[1]))
    drawing.text((edge + 707) / 2, middles[1] - 8, "EngineCoreOutputs", size=13, colour=QUIET)
    return drawing.svg()


def tensor_parallel() -> str:
    """A feed-forward on two ranks: column-parallel, row-parallel, all-reduce."""
    drawing = Drawing(370, "Column- and row-parallel linear layers on two ranks, and their all-reduce")
    drawing.text(262, 30, "column-parallel", bold=True)
    drawing.text(480, 30, "row-parallel", bold=True)
    drawing.text(655, 30, "all-reduce", bold=True)
    for rank, (top, colours) in enumerate(((60, BLUE), (190, ORANGE))):
        middle = top + 50
        drawing.text(20, middle + 5, f"rank {rank}", anchor="start", bold=True, colour=colours[1])
        drawing.box(88, middle - 20, 58, 40, GREY, "x")
        drawing.arrow((148, middle), (196, middle))
        for half in (0, 1):  # the columns of A, the rows of B
            mine = half == rank
            drawing.box(
                200 + 62 * half,
                top + 5,
                62,
                90,
                colours if mine else WHITE,
                f"A{half}" if mine else "",
                dashed=not mine,
            )
        drawing.arrow((326, middle), (352, middle))
        drawing.box(356, middle - 20, 48, 40, colours, f"h{rank}")
        drawing.arrow((406, middle), (436, middle))
        for half in (0, 1):
            mine = half == rank
            drawing.box(
                440, top + 50 * half, 80, 50, colours if mine else WHITE, f"B{half}" if mine else "", dashed=not mine
            )
        drawing.arrow((522, middle), (552, middle))
        drawing.box(556, middle - 20, 48, 40, colours, f"y{rank}")
        drawing.arrow((606, middle), (632, middle))
        drawing.arrow((678, middle), (706, middle))
        drawing.box(710, middle - 20, 58, 40, GREY, "y")
    drawing.box(636, 60, 40, 230, GREEN, "+")
    for x, texts in (
        (117, ("the same", "on both ranks")),
        (262, ("A rank has half of the", "output features.", "No communication.")),
        (480, ("A rank has half of the", "input features. Its output", "is a partial sum.")),
        (656, ("y = y0 + y1,", "on both ranks")),
    ):
        for number, text in enumerate(texts):
            drawing.text(x, 320 + 18 * number, text, size=13, colour=QUIET)
    return drawing.svg()


def pipeline() -> str:
    """Three stages over time, with one plan in flight and with three."""
    drawing = Drawing(440, "Three pipeline stages over time, with one plan in flight and with three")
    left, width, height, gap = 96, 62, 34, 14
    plans = {"A": BLUE, "B": ORANGE, "C": GREEN}
    for top, title, count in (
        (56, "One plan in flight: two of three stages are idle", 1),
        (246, "Three plans in flight: every stage is busy after two steps", 3),
    ):
        drawing.text(20, top - 18, title, anchor="start", bold=True)
        for stage in range(3):
            y = top + stage * (height + 10)
            drawing.text(20, y + 22, f"stage {stage}", anchor="start", colour=QUIET)
            for time in range(9):
                x = left + time * (width + gap)
                begun = time - stage
                if begun < 0 or begun % 3 >= count:
                    drawing.box(x, y, width, height, WHITE, dashed=True)
                else:
                    name = "ABC"[begun % 3]
                    drawing.box(x, y, width, height, plans[name], f"{name}{begun // 3 + 1}")
        bottom = top + 2 * (height + 10) + height / 2
        for turn in (1, 2):  # the tokens of a plan go into the next one of the same requests
            middle = left + 3 * turn * (width + gap) - gap / 2
            above = top + height / 2
            drawing.arrow((middle - gap / 2, bottom), (middle, bottom), (middle, above), (middle + gap / 2 + 2, above))
    drawing.text(left + 3 * (width + gap) - gap / 2, 388, "sampled tokens", size=13, colour=QUIET)
    drawing.text(left + 6 * (width + gap) - gap / 2, 388, "sampled tokens", size=13, colour=QUIET)
    drawing.arrow((left, 408), (770, 408), colour=INK)
    drawing.text(20, 413, "time", anchor="start", colour=QUIET)
    drawing.text(left, 430, "A1, A2, A3: steps of the requests of plan A", anchor="start", size=13, colour=QUIET)
    return drawing.svg()


def kv_cache() -> str:
    """Two requests, the block pool, and the blocks of their common prefix."""
    drawing = Drawing(410, "The KV cache: the block tables of two requests that share a prefix")
    pool_top, size, step, left = 178, 50, 55, 122
    common = ("You are a helpful", "assistant. Answer")
    middles = [left + step * number + size / 2 for number in range(12)]
    for name, top, colours, own, block in (
        ("request 1", 40, BLUE, "What is a rank?", 7),
        ("request 2", 318, ORANGE, "Name two ports.", 9),
    ):
        drawing.text(20, top + 30, name, anchor="start", bold=True, colour=colours[1])
        for place, (text, target) in enumerate(((common[0], 1), (common[1], 4), (own, block))):
            x = left + 190 * place
            fill = PURPLE if place < 2 else colours
            drawing.box(x, top, 180, 50, fill)
            drawing.text(x + 90, top + 21, text)
            drawing.text(x + 90, top + 41, f"block {target}", size=13, colour=QUIET)
            if top < pool_top:
                drawing.arrow((x + 90, top + 52), (middles[target], pool_top - 3))
            else:
                drawing.arrow((x + 90, top - 2), (middles[target], pool_top + size + 3))
    drawing.text(20, pool_top + 22, "block pool", anchor="start", bold=True)
    drawing.text(20, pool_top + 40, "on each rank", anchor="start", size=13, colour=QUIET)
    kinds = {1: PURPLE, 4: PURPLE, 7: BLUE, 9: ORANGE, 3: GREY, 10: GREY}
    for number in range(12):
        drawing.box(left + step * number, pool_top, size, size, kinds.get(number, WHITE), str(number))
    x = left
    for fill, text, width in (
        (PURPLE, "shared, 2 references", 175),
        (BLUE, "request 1", 100),
        (ORANGE, "request 2", 100),
        (GREY, "free, still cached", 150),
        (WHITE, "free", 50),
    ):
        drawing.box(x, 384, 14, 14, fill)
        drawing.text(x + 20, 396, text, anchor="start", size=13, colour=QUIET)
        x += width
    return drawing.svg()


def rank_grid() -> str:
    """The ranks of two replicas with two stages of four ranks each."""
    drawing = Drawing(400, "The grid of ranks: data parallel 2, pipeline parallel 2, tensor parallel 4")
    for replica, left in enumerate((20, 420)):
        drawing.box(left, 50, 360, 280, ("#f7f9fb", "#9aa5b1"))
        drawing.text(left + 14, 38, f"replica {replica}", anchor="start", bold=True)
        for stage, (top, layers) in enumerate(((64, "layers 0 to 15"), (224, "layers 16 to 31"))):
            drawing.box(left + 12, top, 336, 92, BLUE)
            drawing.text(left + 22, top + 20, f"stage {stage}: {layers}", anchor="start")
            for place in range(4):
                drawing.box(left + 22 + 82 * place, top + 30, 70, 34, ("#ffffff", BLUE[1]), f"rank {stage * 4 + place}")
            drawing.text(left + 180, top + 82, "all-reduce, in every layer", size=13, colour=BLUE[1])
        for place in (0, 3):
            x = left + 57 + 82 * place
            drawing.arrow((x, 158), (x, 221), colour=ORANGE[1])
        drawing.text(left + 180, 194, "hidden states, once a step", size=13, colour=ORANGE[1])
    for top in (110, 270):
        drawing.arrow((372, top), (428, top), colour=GREEN[1], dashed=True, both=True)
    for line, (colour, text) in enumerate(
        (
            (BLUE[1], "tensor parallel (-tp 4): the ranks of a stage"),
            (ORANGE[1], "pipeline parallel (-pp 2): the stages of a replica"),
            (
                GREEN[1],
                "data parallel (-dp 2): the replicas; with --enable-expert-parallel all-to-all between same stages",
            ),
        )
    ):
        drawing.text(20, 354 + 19 * line, text, anchor="start", size=13, colour=colour)
    return drawing.svg()


def adapters() -> str:
    """The way of adapters from their files to the rows of a step."""
    drawing = Drawing(370, "Adapters: from files to host memory, to slots of the device, to the rows of a step")
    columns = (
        (20, "files", "known by digest"),
        (215, "host memory", "this rank's slices"),
        (410, "device slots", "in the pools of layers"),
        (625, "rows of a step", "slot, or none"),
    )
    for x, title, note in columns:
        drawing.text(x, 32, title, anchor="start", bold=True)
        drawing.text(x, 50, note, anchor="start", size=13, colour=QUIET)
    kinds = (("sql", "d165…", BLUE), ("pirate", "aaee…", ORANGE), ("legal", "453c…", GREEN), ("poems", "9b01…", PURPLE))
    for number, (name, digest, colours) in enumerate(kinds):
        top = 66 + 58 * number
        drawing.box(20, top, 130, 44, colours, f"{name}\n{digest}")
        if number < 3:
            drawing.arrow((152, top + 22), (212, top + 22))
            drawing.box(215, top, 130, 44, colours, "A, B")
    for slot, (number, colours) in enumerate(((0, BLUE), (2, GREEN))):
        top = 66 + 116 * slot
        drawing.arrow((347, 88 + 58 * number), (407, top + 22))
        drawing.box(410, top, 150, 44, colours, f"slot {slot}")
    drawing.box(410, 124, 150, 44, WHITE, "free rank rows", dashed=True)
    for place, (text, target, row_colours) in enumerate(
        (
            ("request 1: slot 0", 0, BLUE),
            ("request 2: none", None, WHITE),
            ("request 3: slot 1", 1, GREEN),
            ("request 4: slot 0", 0, BLUE),
            ("request 5: slot 1", 1, GREEN),
        )
    ):
        top = 66 + 36 * place
        drawing.box(625, top, 150, 30, row_colours, text)
        if target is not None:
            drawing.arrow((562, 88 + 116 * target), (622, top + 15), colour=row_colours[1])
    for line, text in enumerate(
        (
            "Every row: the base's product W x. A row with an adapter: + B (A x), of its own slot's matrices.",
            "The scheduler decides what is read, dropped, placed and freed; a plan tells the ranks.",
        )
    ):
        drawing.text(20, 326 + 22 * line, text, anchor="start", size=13, colour=QUIET)
    return drawing.svg()


def kv_tiers() -> str:
    """The devices of two replicas, the KV store of their host, and its disk."""
    drawing = Drawing(420, "KV tiers: the devices of two replicas, the memory of their host, and its disk")
    for replica, left in enumerate((20, 220)):
        drawing.box(left, 50, 180, 130, ("#f7f9fb", "#9aa5b1"))
        drawing.text(left, 38, f"replica {replica}", anchor="start", bold=True)
        drawing.box(left + 14, 64, 152, 44, WHITE, "scheduler\nload or compute?")
        drawing.box(left + 14, 122, 152, 44, BLUE, "KV cache\nof its devices")
        drawing.arrow((left + 60, 182), (left + 60, 257), colour=ORANGE[1])
        drawing.arrow((left + 120, 257), (left + 120, 182), colour=GREEN[1])
    drawing.text(440, 212, "full blocks, once computed", anchor="start", size=13, colour=ORANGE[1])
    drawing.text(440, 236, "prefixes that load faster than they compute", anchor="start", size=13, colour=GREEN[1])
    drawing.box(
        20, 260, 380, 56, PURPLE, "KV store: memory of the host\n--kv-offloading-size; entries by hash, with checksums"
    )
    drawing.arrow((110, 318), (110, 357), colour=ORANGE[1])
    drawing.arrow((310, 357), (310, 318), colour=GREEN[1])
    drawing.text(440, 336, "everything, within seconds", anchor="start", size=13, colour=ORANGE[1])
    drawing.text(
        440, 354, "entries that are needed, if their checksum is right", anchor="start", size=13, colour=GREEN[1]
    )
    drawing.box(20, 360, 380, 44, GREY, "disk\n--kv-disk; survives restarts")
    drawing.box(560, 366, 210, 32, WHITE, "other servers on the folder", dashed=True)
    drawing.arrow((402, 382), (557, 382), both=True, dashed=True)
    for line, text in enumerate(
        (
            "No request fails because of a tier: KV that is",
            "missing, late or damaged is computed again.",
        )
    ):
        drawing.text(440, 96 + 20 * line, text, anchor="start", size=13, colour=QUIET)
    return drawing.svg()


def prefill_decode() -> str:
    """A request that is computed at a prefill replica and continued at a decode replica."""
    drawing = Drawing(380, "Prefill apart from decode: one request, two replicas, one KV store")
    drawing.box(20, 150, 150, 64, BLUE, "API\nrouter: is it worth it?")
    drawing.text(104, 132, "tokens", anchor="start", size=13, colour=QUIET)
    drawing.arrow((95, 147), (95, 106))
    drawing.box(45, 74, 100, 32, WHITE, "client")
    for top, title, text, what, colours in (
        (56, "prefill replica, -tp 4", "the prompt, chunk by chunk,", "and the first token", ORANGE),
        (224, "decode replicas, -tp 1", "all other tokens; short", "prompts from the beginning", GREEN),
    ):
        drawing.box(300, top, 220, 96, ("#f7f9fb", colours[1]))
        drawing.text(312, top + 22, title, anchor="start", colour=colours[1], bold=True)
        drawing.text(312, top + 50, text, anchor="start", size=13)
        drawing.text(312, top + 70, what, anchor="start", size=13)
    drawing.arrow((172, 164), (297, 96), colour=ORANGE[1])
    drawing.text(180, 96, "1  the prompt", anchor="start", size=13, colour=ORANGE[1])
    drawing.arrow((297, 130), (172, 178), colour=ORANGE[1])
    drawing.text(212, 180, "2  first token", anchor="start", size=13, colour=ORANGE[1])
    drawing.arrow((172, 200), (297, 262), colour=GREEN[1])
    drawing.text(228, 216, "3  go on", anchor="start", size=13, colour=GREEN[1])
    drawing.arrow((297, 290), (120, 290), (120, 217), colour=GREEN[1])
    drawing.text(132, 310, "4  the other tokens", anchor="start", size=13, colour=GREEN[1])
    drawing.box(640, 56, 130, 264, PURPLE, "KV store\nhost's memory,\nentries by hash")
    drawing.arrow((522, 104), (637, 104), colour=ORANGE[1])
    drawing.text(580, 88, "each full block", size=12, colour=ORANGE[1])
    drawing.arrow((637, 272), (522, 272), colour=GREEN[1])
    drawing.text(580, 256, "the prompt's KV", size=12, colour=GREEN[1])
    drawing.text(
        20,
        356,
        "If a replica dies or hangs, another continues with the same tokens. KV that is missing is computed again.",
        anchor="start",
        size=13,
        colour=QUIET,
    )
    return drawing.svg()


def kv_events() -> str:
    """How a router that starts late gets the whole view from a snapshot and the batches after it."""
    drawing = Drawing(300, "KV events: a router that starts late joins a snapshot and the batches after it")
    drawing.text(20, 36, "replica", anchor="start", bold=True)
    drawing.text(20, 54, "publishes batches", anchor="start", size=13, colour=QUIET)
    for place, number in enumerate(range(409, 417)):
        colours = GREY if number < 411 else BLUE if number < 413 else GREEN
        drawing.box(190 + 74 * place, 26, 62, 34, colours, f"{number}")
    drawing.arrow((182, 76), (782, 76))
    drawing.text(782, 94, "time", anchor="end", size=12, colour=QUIET)
    drawing.text(20, 130, "router", anchor="start", bold=True)
    drawing.text(20, 148, "starts late", anchor="start", size=13, colour=QUIET)
    drawing.box(338, 108, 432, 38, BLUE, "1  subscribe, and keep what arrives")
    drawing.box(190, 158, 284, 46, PURPLE, "2  read a snapshot: sequence 412\nit includes 411 and 412: drop these")
    drawing.box(486, 216, 284, 38, GREEN, "3  apply 413, 414, …")
    drawing.text(
        20,
        286,
        "A gap in the numbers: ask the replay endpoint for the missing batches, or begin again with a snapshot.",
        anchor="start",
        size=13,
        colour=QUIET,
    )
    return drawing.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "processes": processes,
    "request": request,
    "tensor-parallel": tensor_parallel,
    "pipeline": pipeline,
    "kv-cache": kv_cache,
    "rank-grid": rank_grid,
    "adapters": adapters,
    "kv-tiers": kv_tiers,
    "prefill-decode": prefill_decode,
    "kv-events": kv_events,
}
"""The pictures by the names of their files."""
