"""The demo model's pictures: drawings of shapes, numbers and bar charts, with questions about them and their answers.

`Pictures(seed).sample()` draws one for training. `held_out()` draws those that are scored, whose questions have
wordings that `sample()` never uses. A drawing has any proportions, a light background and sometimes the noise of JPEG,
as those that somebody makes with a paint program or a plotting library.

    python scripts/demo_pictures.py docs/pictures/shapes.png      # draw the picture of the README
"""

import io
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

SIDE = 112
"""Width and height of a picture after the model's processor, in pixels."""
COLORS = {
    "red": (222, 38, 38),
    "orange": (250, 145, 20),
    "yellow": (250, 220, 40),
    "green": (40, 160, 60),
    "blue": (35, 85, 215),
    "purple": (130, 50, 170),
    "pink": (250, 140, 190),
    "black": (25, 25, 25),
}
SHAPES = ["circle", "square", "triangle", "star", "heart", "cross"]
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six"]
SEE = [
    "What is in this picture?",
    "What is in the picture?",
    "What's in this image?",
    "What do you see?",
    "What can you see in this picture?",
    "Describe this picture.",
    "Describe the image.",
    "What does this picture show?",
    "What is this?",
    "Tell me what you see.",
]
QUESTIONS = {
    "color": ["What color is it?", "What colour is it?", "Which color is the {}?", "What is the color of the {}?"],
    "shape": ["What shape is this?", "Which shape is it?", "What shape do you see?", "Name the shape."],
    "count": ["How many {} are there?", "How many {} do you see?", "Count the {}.", "How many {} are in the picture?"],
    "left": [
        "What is on the left?",
        "Which shape is on the left?",
        "What do you see on the left side?",
        "On the left?",
    ],
    "right": [
        "What is on the right?",
        "Which shape is on the right?",
        "What do you see on the right side?",
        "On the right?",
    ],
    "number": [
        "What number is this?",
        "Which number do you see?",
        "Read the number.",
        "What number is in the picture?",
    ],
    "tallest": [
        "Which bar is the tallest?",
        "Which bar is tallest?",
        "Which bar is the highest?",
        "What is the tallest bar?",
    ],
    "shortest": [
        "Which bar is the shortest?",
        "Which bar is shortest?",
        "Which bar is the lowest?",
        "What is the shortest bar?",
    ],
    "bars": ["How many bars are there?", "How many bars does the chart have?", "Count the bars.", "How many bars?"],
}
HELD = {
    "see": ["What does the image show?", "What do you see in this image?"],
    "color": ["Which color is it?", "What color is the {}?"],
    "shape": ["Which shape do you see?", "What shape is it?"],
    "count": ["How many {} can you see?", "How many {} does the picture have?"],
    "left": ["What can you see on the left?", "What shape is on the left?"],
    "right": ["What can you see on the right?", "What shape is on the right?"],
    "number": ["Which number is this?", "What number do you see?"],
    "tallest": ["Which is the tallest bar?", "Which bar is highest?"],
    "shortest": ["Which is the shortest bar?", "Which bar is lowest?"],
    "bars": ["How many bars do you see?", "How many bars are in the picture?"],
}
"""Wordings for scoring only."""
Color = tuple[int, int, int]
Label = tuple[int, int, int]
"""The name of a thing's color; what it is; and how many there are, the place of a digit, or the rank of a bar."""
THINGS = ["", *SHAPES, "bar", *"0123456789"]
LABELS = (1 + len(COLORS), len(THINGS), 24)
"""How many values each part of a label has."""


@dataclass(frozen=True)
class Picture:
    """A drawing, and questions about it with their answers; `kind` groups the score."""

    image: Image.Image
    labels: Image.Image
    """What is drawn where: instead of its color, each thing has its `Label`; the background is 0."""
    turns: list[tuple[str, str]]
    kind: str


def an(color: str, thing: str) -> str:
    """The thing with its article."""
    return f"{'an' if color[0] in 'aeiou' else 'a'} {color} {thing}"


def outline(shape: str) -> list[tuple[float, float]]:
    """The corners of a shape within -1..1, y downwards."""
    circle = [(math.cos(turn), math.sin(turn)) for turn in (math.tau * step / 48 for step in range(48))]
    match shape:
        case "circle":
            return circle
        case "square":
            return [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]
        case "triangle":
            return [(0, -0.95), (1, 0.8), (-1, 0.8)]
        case "star":
            turns = [(math.pi * step / 5, 1.0 if step % 2 == 0 else 0.42) for step in range(10)]
            return [(far * math.sin(turn), -far * math.cos(turn)) for turn, far in turns]
        case "heart":
            turns = [(math.tau * step / 48, 0.0) for step in range(48)]
            return [
                (
                    math.sin(turn) ** 3,
                    -(13 * math.cos(turn) - 5 * math.cos(2 * turn) - 2 * math.cos(3 * turn) - math.cos(4 * turn)) / 16,
                )
                for turn, _ in turns
            ]
        case _:
            arm = 0.33
            quarter = [(arm, -1.0), (arm, -arm), (1.0, -arm)]
            turned = quarter
            corners: list[tuple[float, float]] = []
            for _ in range(4):
                corners += turned
                turned = [(-y, x) for x, y in turned]
            return corners


class Canvas:
    """A picture of any proportions. Coordinates are parts of its width and height."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        long = rng.randint(160, 400)
        short = round(long * rng.choice([1.0, 1.0, rng.uniform(0.6, 1.0)]))
        self.size = (long, short) if rng.random() < 0.6 else (short, long)
        tint: Color = (rng.randint(215, 255), rng.randint(215, 255), rng.randint(215, 255))
        self.image = Image.new("RGB", self.size, (255, 255, 255) if rng.random() < 0.5 else tint)
        self.labels = Image.new("RGB", self.size)
        self.pens = [ImageDraw.Draw(self.image), ImageDraw.Draw(self.labels)]
        self.pens[1].fontmode = "1"

    def fills(self, color: str, thing: str, fact: int) -> list[Color]:
        """What a thing is filled with: a shade of its color, and its label."""
        red, green, blue = (min(255, max(0, each + self.rng.randint(-18, 18))) for each in COLORS[color])
        return [(red, green, blue), (1 + [*COLORS].index(color), THINGS.index(thing), fact)]

    def shape(self, color: str, shape: str, fact: int, x: float, y: float, radius: float) -> None:
        """Draw a shape around a point; `radius` is a part of the shorter side."""
        width, height = self.size
        far, turn = radius * min(width, height), self.rng.uniform(-0.2, 0.2)
        cos, sin = far * math.cos(turn), far * math.sin(turn)
        corners = [(x * width + a * cos - b * sin, y * height + a * sin + b * cos) for a, b in outline(shape)]
        for pen, fill in zip(self.pens, self.fills(color, shape, fact), strict=True):
            pen.polygon(corners, fill=fill)
        if self.rng.random() < 0.15:
            self.pens[0].polygon(corners, outline=(60, 60, 60), width=self.rng.randint(1, 3))

    def finish(self) -> Image.Image:
        """The picture as a file would have it: sometimes compressed."""
        if self.rng.random() >= 0.3:
            return self.image
        file = io.BytesIO()
        self.image.save(file, "JPEG", quality=self.rng.randint(40, 95))
        return Image.open(file).convert("RGB")


class Pictures:
    """A stream of pictures; `held` asks in the wordings that are for scoring."""

    def __init__(self, seed: int | str, *, held: bool = False) -> None:
        self.rng = random.Random(seed)
        self.held = held
        self.kinds: list[Callable[[], Picture]] = [self.shape, self.several, self.pair, self.number, self.chart]

    def sample(self) -> Picture:
        """Draw a picture of any kind."""
        return self.rng.choice(self.kinds)()

    def ask(self, about: str, answer: str, *names: str) -> tuple[str, str]:
        """A question with its answer, in one of its wordings."""
        training = SEE if about == "see" else QUESTIONS[about]
        question = self.rng.choice(HELD[about] if self.held else training).format(*names)
        if not self.held and self.rng.random() < 0.2:
            question = self.rng.choice([question.lower(), question[:-1], question.lower()[:-1]])
        return question, answer[0].upper() + answer[1:] + "."

    def picture(self, canvas: Canvas, kind: str, turns: list[tuple[str, str]]) -> Picture:
        """The picture with its questions in any order."""
        self.rng.shuffle(turns)
        return Picture(canvas.finish(), canvas.labels, turns, kind)

    def shape(self) -> Picture:
        """One shape."""
        rng, canvas = self.rng, Canvas(self.rng)
        color, shape, radius = rng.choice([*COLORS]), rng.choice(SHAPES), rng.uniform(0.15, 0.47)
        edge = min(0.5, radius * 1.05)
        canvas.shape(color, shape, 1, rng.uniform(edge, 1 - edge), rng.uniform(edge, 1 - edge), radius)
        turns = [
            self.ask("see", an(color, shape)),
            self.ask("color", color, shape),
            self.ask("shape", f"a {shape}"),
        ]
        return self.picture(canvas, "shape", turns)

    def several(self) -> Picture:
        """Several shapes of a kind, apart from each other."""
        rng, canvas = self.rng, Canvas(self.rng)
        color, shape, count = rng.choice([*COLORS]), rng.choice(SHAPES), rng.randint(2, 6)
        columns, rows = rng.choice([(3, 2), (2, 3), (3, 3), (4, 2), (6, 1)])
        cell = min(canvas.size[0] / columns, canvas.size[1] / rows) / min(canvas.size)
        radius = cell * rng.uniform(0.32, 0.42)
        shift = max(0.0, 0.9 * (cell / 2 - radius)) * min(canvas.size)
        for column, row in rng.sample([(column, row) for column in range(columns) for row in range(rows)], count):
            x = (column + 0.5) / columns + rng.uniform(-shift, shift) / canvas.size[0]
            y = (row + 0.5) / rows + rng.uniform(-shift, shift) / canvas.size[1]
            canvas.shape(color, shape, count, x, y, radius)
        shapes = f"{shape}es" if shape == "cross" else f"{shape}s"
        turns = [
            self.ask("see", f"{NUMBERS[count]} {color} {shapes}"),
            self.ask("count", NUMBERS[count], shapes),
        ]
        return self.picture(canvas, "count", turns)

    def pair(self) -> Picture:
        """Two shapes side by side."""
        rng, canvas = self.rng, Canvas(self.rng)
        pair = [(rng.choice([*COLORS]), rng.choice(SHAPES)) for _ in range(2)]
        for at, (color, shape) in enumerate(pair):
            radius = rng.uniform(0.15, 0.24) * min(1.0, canvas.size[0] / canvas.size[1])
            canvas.shape(color, shape, 1, 0.25 + 0.5 * at + rng.uniform(-0.03, 0.03), rng.uniform(0.3, 0.7), radius)
        left, right = (an(*each) for each in pair)
        turns = [self.ask("see", f"{left} and {right}"), self.ask("left", left), self.ask("right", right)]
        return self.picture(canvas, "pair", turns)

    def number(self) -> Picture:
        """A number of one or two digits."""
        rng, canvas = self.rng, Canvas(self.rng)
        number = str(rng.randrange(100))
        width, height = canvas.size
        size = rng.uniform(0.55, 0.95) * min(height, width * 1.5 / len(number))
        font = ImageFont.load_default(size)
        bold = rng.choice([0, 0, round(size * 0.02), round(size * 0.04)])
        color = rng.choice(["black", "black", "red", "blue", "purple", "green"])
        left, top, right, bottom = canvas.pens[0].textbbox((0, 0), number, font, stroke_width=bold)
        x = rng.uniform(0.1, 0.9) * max(0, width - (right - left)) - left
        y = rng.uniform(0.1, 0.9) * max(0, height - (bottom - top)) - top
        shade = canvas.fills(color, "0", 0)[0]
        for at, digit in enumerate(number):
            place = (x + font.getlength(number[:at]), y)
            for pen, fill in zip(
                canvas.pens, (shade, canvas.fills(color, digit, 7 + len(number) - at)[1]), strict=True
            ):
                pen.text(place, digit, fill, font, stroke_width=bold)
        turns = [self.ask("see", f"the number {number}"), self.ask("number", f"the number {number}")]
        return self.picture(canvas, "number", turns)

    def chart(self) -> Picture:
        """A bar chart of two to five bars, each of another color."""
        rng, canvas = self.rng, Canvas(self.rng)
        width, height = canvas.size
        colors = rng.sample([*COLORS], rng.randint(2, 5))
        heights = [step / 10 + rng.uniform(-0.025, 0.025) for step in rng.sample(range(2, 11), len(colors))]
        left, right, bottom, high = 0.1 * width, 0.95 * width, 0.9 * height, 0.8 * height
        slot = (right - left) / len(colors)
        gap = rng.uniform(0.05, 0.25) * slot
        for at, (color, tall) in enumerate(zip(colors, heights, strict=True)):
            rank = 0 if tall == max(heights) else 1 if tall == min(heights) else 2
            box = (left + at * slot + gap, bottom - tall * high, left + (at + 1) * slot - gap, bottom)
            for pen, fill in zip(canvas.pens, canvas.fills(color, "bar", 3 * len(colors) + 4 + rank), strict=True):
                pen.rectangle(box, fill)
        corner, line = rng.choice([None, (right, bottom), (left, bottom - high)]), rng.choice([1, 2, 3])
        if corner is not None:
            canvas.pens[0].line((right, bottom, left, bottom, *corner), (40, 40, 40), line)
        by_height = [color for _, color in sorted(zip(heights, colors, strict=True))]
        turns = [
            self.ask("see", "a bar chart"),
            self.ask("tallest", f"the {by_height[-1]} bar"),
            self.ask("shortest", f"the {by_height[0]} bar"),
            self.ask("bars", NUMBERS[len(colors)]),
        ]
        return self.picture(canvas, "bar chart", turns)


def shapes() -> Image.Image:
    """A red circle and a blue star."""
    image = Image.new("RGB", (320, 200), "white")
    pen = ImageDraw.Draw(image)
    pen.ellipse((35, 50, 135, 150), "red")
    pen.polygon([(235 + 60 * x, 102 + 60 * y) for x, y in outline("star")], "blue")
    return image


def held_out(count: int = 300) -> list[Picture]:
    """Pictures for scoring, of each kind in turn; the first question of each counts."""
    pictures = Pictures(10**6, held=True)
    return [pictures.kinds[at % len(pictures.kinds)]() for at in range(count)]


if __name__ == "__main__":
    shapes().save(sys.argv[1], optimize=True)
