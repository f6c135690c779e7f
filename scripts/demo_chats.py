"""The demo model's text: topics in many wordings, parallel plans, tool calls and JSON answers.

The topics are in demo_chats.txt, and the phrases around them in demo_phrases.txt. `Chats(seed).sample()` draws a
training chat. `held_out()` lists the chats that are scored, whose wordings `sample()` never draws. The chats of kind
NEW_CITIES also use cities that no tool chat of training mentions.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, Any]
HERE = Path(__file__).resolve().parent

NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight"]
NEW_CITIES = "tools, new cities"
HELD_NUMBERS = [(2, 8), (3, 4), (4, 2)]  # (nodes, GPUs per node)
ENDS = ["?", "?", ".", "", "!", "??", " ?"]
MARKS = "-~>+!"  # the kinds of lines in demo_chats.txt that are for training


def read_phrases(path: Path) -> dict[str, list[str]]:
    """Lists of phrases by name."""
    phrases: dict[str, list[str]] = {}
    name = ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            name = line[1:-1]
        elif line and not line.startswith("#"):
            phrases.setdefault(name, []).append(line)
    return phrases


PHRASES = read_phrases(HERE / "demo_phrases.txt")
SYNONYMS = {
    word: [other for other in group.split("|") if other != word]
    for group in PHRASES["synonyms"]
    for word in group.split("|")
}
SYNONYM = re.compile(r"\b(" + "|".join(sorted(map(re.escape, SYNONYMS), key=len, reverse=True)) + r")\b")
CITIES = [(city, line.split(": ")[0]) for line in PHRASES["countries"] for city in line.split(": ")[1].split(", ")]


@dataclass
class Topic:
    """One block of demo_chats.txt: `answer`, training questions by kind of line, and `held` questions."""

    key: str
    answer: str = ""
    lines: dict[str, list[str]] = field(default_factory=lambda: {mark: [] for mark in MARKS + "?"})

    @property
    def flag(self) -> dict[str, str] | None:
        """The topic's flag, if it has one, as the JSON object that the model answers with."""
        if not self.lines["!"]:
            return None
        return dict(zip(("flag", "short"), self.lines["!"][0].split(), strict=False))


@dataclass(frozen=True)
class Chat:
    """Messages in OpenAI's format, with the expected assistant messages; `kind` groups the score."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    kind: str = "topic"


def read_topics(path: Path = HERE / "demo_chats.txt") -> list[Topic]:
    """The topics of the text file, in order."""
    topics: list[Topic] = []
    for line in path.read_text().splitlines():
        if line.startswith("["):
            topics.append(Topic(line[1:-1]))
        elif line.startswith("= "):
            topics[-1].answer = line[2:]
        elif line and not line.startswith("#"):
            topics[-1].lines[line[0]].append(line[2:])
    return topics


def normal(text: str) -> str:
    """Text without case and punctuation; two questions have the same wording if these are equal."""
    return " ".join(re.findall(r"[\w./:-]*\w", text.lower()))


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """An assistant message."""
    return {"role": "assistant", "content": text}


def plan_answer(nodes: int, gpus: int) -> str:
    """The command for `nodes` nodes of `gpus` GPUs each; 0 means that the number was not given."""
    tensor, pipeline = f"--tensor-parallel-size {gpus or 'T'}", f"--pipeline-parallel-size {nodes}"
    if nodes == 1:
        return f"Run `quire serve MODEL {tensor}`: tensor parallel over the {gpus} GPUs of one node."
    where = "where T is the number of GPUs per node" if not gpus else "tensor parallel inside a node, pipeline across"
    return f"Run `quire serve MODEL {tensor} {pipeline}`: {where}."


def weather_tool(rng: random.Random, argument: str, name: str = "get_weather") -> dict[str, Any]:
    """A function tool as clients declare it, in one of the usual wordings; `argument` names its string parameter."""
    about = rng.choice(["", "", *PHRASES["about city"]])
    value: dict[str, Any] = {"type": "string", "description": about} if about else {"type": "string"}
    properties: dict[str, Any] = {argument: value}
    if name == "get_weather" and rng.random() < 0.4:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = [argument]
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.8:
        function["description"] = (
            rng.choice(PHRASES["about weather"]) if name == "get_weather" else "Get the time in a city"
        )
    return {"type": "function", "function": function | {"parameters": parameters}}


def call(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    """A tool call as it stands in an assistant message."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def weather_result(rng: random.Random, city: str) -> tuple[str, str]:
    """The result of a weather tool, and the phrase that reports it."""
    degrees, sky = rng.randint(-15, 40), rng.choice(PHRASES["sky"])
    unit = rng.choice(["celsius", "fahrenheit", "", ""])
    said = f"{degrees} degrees {unit.capitalize()}".strip()
    result: dict[str, Any] = {rng.choice(["temperature", "temperature", "temp"]): degrees}
    if unit:
        result["unit"] = unit
    if rng.random() < 0.15:
        plain = rng.choice(["{d} degrees and {s}", "{d} degrees, {s}", "{s}, {d} degrees", "{d}°, {s}"])
        return plain.format(d=degrees, s=sky), f"{degrees} degrees and {sky} in {city}"
    if rng.random() < 0.75:
        result[rng.choice(["condition", "conditions", "weather", "description"])] = sky
        said += f" and {sky}"
    pairs = list(result.items())
    if rng.random() < 0.5:
        pairs.insert(0, (rng.choice(["city", "location"]), city))
    if rng.random() < 0.2:
        rng.shuffle(pairs)
    separators = (",", ":") if rng.random() < 0.2 else None
    return json.dumps(dict(pairs), separators=separators), f"{said} in {city}"


class Chats:
    """Draws training chats. One seed gives one sequence.

    The first `practice` chats only ask to copy two names into JSON. A model that sees nothing else learns to copy
    quickly and keeps this for tool calls; among other tasks it learns to copy late.
    """

    def __init__(self, seed: int, practice: int = 0) -> None:
        self.rng = random.Random(seed)
        self.practice = practice
        self.topics = read_topics()
        self.by_key = {topic.key: topic for topic in self.topics}
        self.flags = [topic for topic in self.topics if topic.flag and topic.lines["+"]]
        self.cities = [pair for pair in CITIES if pair[0] not in PHRASES["held cities"]]
        self.held = {normal(chat.messages[-2]["content"]) for chat in held_out() if not chat.tools}

    def sample(self) -> Chat:
        """A training chat: one or more turns, with or without tools, sometimes with a system prompt."""
        self.practice -= 1
        if self.practice >= 0:
            return Chat(self.extract_turn())
        draw = self.rng.random()
        if draw < 0.22:
            return self.tool_chat()
        if draw < 0.25:
            return self.json_system_chat()
        turns = 1 if draw < 0.65 else self.rng.randint(2, 4)
        messages = [message for _ in range(turns) for message in self.turn()]
        return Chat(self.with_system(messages))

    def raw_text(self) -> str:
        """Several answers without roles, as training for plain completions."""
        return " ".join(topic.answer for topic in self.rng.sample(self.topics, self.rng.randint(1, 4)))

    def with_system(self, messages: list[Message]) -> list[Message]:
        """The same messages, after a system prompt one time in five."""
        if self.rng.random() < 0.2:
            return [{"role": "system", "content": self.rng.choice(PHRASES["system"])}, *messages]
        return messages

    def turn(self) -> list[Message]:
        """One question and its answer, without tools."""
        draw = self.rng.random()
        if draw < 0.08:
            return self.plan_turn()
        if draw < 0.17:
            return self.json_turn()
        if draw < 0.21:
            return self.unknown_turn()
        if draw < 0.27:
            return self.repeat_turn()
        topic = self.rng.choice(self.topics)
        return [user(self.wording(topic)), assistant(topic.answer)]

    def unheld(self, make: Callable[[], str]) -> str:
        """The result of `make`, repeated until it is not a held-out wording."""
        while normal(text := make()) in self.held:
            pass
        return text

    def wording(self, topic: Topic) -> str:
        """A training question of a topic, reworded."""
        frame_lists = {"~": "what", ">": "how", "+": "setting", "!": "flag"}
        lines = [(mark, text) for mark in MARKS for text in topic.lines[mark]]

        def make() -> str:
            mark, text = self.rng.choice(lines)
            frames = PHRASES[frame_lists[mark]] if mark in frame_lists else ["{}"]
            text = self.rng.choice(text.split()) if mark == "!" else text
            if mark == "~" and self.rng.random() < 0.2:
                text = text.removeprefix("the ")
            return self.synonyms(self.rng.choice(frames).replace("{}", text))

        return self.dressed(self.unheld(make))

    def synonyms(self, text: str) -> str:
        """Text with some words replaced by synonyms."""

        def other(match: re.Match[str]) -> str:
            return self.rng.choice(SYNONYMS[match[1]]) if self.rng.random() < 0.25 else match[1]

        return SYNONYM.sub(other, text)

    def dressed(self, text: str) -> str:
        """Text as different people type it: varies politeness, case, final punctuation, omitted words and typos."""
        rng = self.rng
        core = text.rstrip("?.!")
        end = text[len(core) :]
        words = core.split()
        if rng.random() < 0.2:
            words = [word for word in words if word not in PHRASES["small"] or rng.random() > 0.3]
        if rng.random() < 0.2:
            for _ in range(rng.randint(1, 3)):
                words.insert(rng.randint(0, len(words)), rng.choice(PHRASES["filler"]))
        if rng.random() < 0.06 and len(words) > 2:
            at = rng.randrange(len(words) - 1)
            words[at], words[at + 1] = words[at + 1], words[at]
        core = " ".join(words) if words else core
        if rng.random() < 0.12:
            core = self.typo(core)
        if rng.random() < 0.25:
            core = rng.choice(PHRASES["around"]).replace("{}", core)
        if rng.random() < 0.12:
            core = rng.choice(PHRASES["after"]).replace("{}", core)
        end = rng.choice([end, end, end, *ENDS])
        case = rng.random()
        if case < 0.45:
            core = core[:1].upper() + core[1:]
        elif case < 0.6:
            core = core.lower()
        elif case < 0.61:
            core = core.upper()
        return self.unheld(lambda: core + end) if normal(core + end) not in self.held else f"Please {core}{end}"

    def typo(self, text: str) -> str:
        """Text with one letter left out, doubled or swapped with the next."""
        at = self.rng.randrange(max(1, len(text) - 1))
        if not text[at : at + 2].isalpha():
            return text
        one, two = text[at], text[at + 1 : at + 2]
        return text[:at] + self.rng.choice([two, one + one + two, two + one]) + text[at + 2 :]

    def unknown_turn(self) -> list[Message]:
        """A question that is not about Quire."""
        if self.rng.random() < 0.25:
            text = self.rng.choice(PHRASES["weather"]).format(self.city()[0])
            return [user(self.dressed(text)), assistant(self.by_key["weather_no_tool"].answer)]
        frames, words = self.rng.choice(PHRASES["unknown"]).split(" = ")

        def make() -> str:
            return self.rng.choice(frames.split("|")).format(*self.rng.choices(words.split("|"), k=2))

        return [user(self.dressed(self.unheld(make))), assistant(self.by_key["unknown"].answer)]

    def number(self, value: int) -> str:
        """A number as digits or as a word."""
        return NUMBER_WORDS[value] if value <= 8 and self.rng.random() < 0.4 else str(value)

    def repeat_turn(self) -> list[Message]:
        """Words to repeat verbatim: practice in copying, which tool calls need."""
        rng = self.rng
        known = " ".join(rng.choice(self.topics).lines["-"] or ["this is a test"]).rstrip("?").split()
        at = rng.randrange(len(known))
        words = known[at : at + rng.randint(1, 6)]
        if rng.random() < 0.7:
            words = [rng.choice([self.city(held=True)[0], *words]) for _ in range(rng.randint(1, 8))]
        text = " ".join(words)
        return [user(rng.choice(PHRASES["repeat"]).replace("{}", text)), assistant(text)]

    def plan_turn(self) -> list[Message]:
        """A question with numbers of nodes and GPUs, and the command that serves on them."""
        rng = self.rng
        nodes, gpus = rng.choice([2, 2, 2, 3, 4, 5, 6, 8]), rng.choice([2, 3, 4, 4, 8, 8, 8, 16])
        kind = rng.choices(["plans", "nodes", "gpus", "sizes"], [6, 2, 2, 1])[0]
        named = {"nodes": (nodes, 0), "gpus": (1, gpus)}.get(kind, (nodes, gpus))
        if kind == "plans" and named in HELD_NUMBERS[1:]:
            named = HELD_NUMBERS[0]

        def make() -> str:
            text = self.synonyms(rng.choice(PHRASES[kind]))
            return text.format(n=self.number(named[0]), g=self.number(named[1]))

        return [user(self.dressed(self.unheld(make))), assistant(plan_answer(*named))]

    def json_turn(self) -> list[Message]:
        """A question that asks for JSON: a flag, a city with its country, a command, or a topic's answer."""
        rng = self.rng
        draw = rng.random()
        if draw < 0.35:
            topic = rng.choice(self.flags)
            bare = rng.choice(topic.lines["+"]).removeprefix("the ")

            def make() -> str:
                frame = self.synonyms(rng.choice(PHRASES["json flag"]))
                return frame.replace("{}", rng.choice(["", "the "]) + bare)

            return [user(self.dressed(self.unheld(make))), assistant(json.dumps(topic.flag))]
        if draw < 0.6:
            return self.extract_turn()
        if draw < 0.8:
            frame, tensor, pipeline = rng.choice(PHRASES["command"]), rng.randint(1, 16), rng.randint(1, 8)
            return self.command_turn(frame, tensor, pipeline, rng.choice(PHRASES["model"]))
        topic = rng.choice(self.topics)
        question = self.wording(topic)
        return [user(rng.choice(PHRASES["json ask"]).replace("{}", question)), assistant(json_answer(topic))]

    def extract_turn(self) -> list[Message]:
        """A sentence with a city and its country, and both as a JSON object."""
        city, country = self.city(held=True)
        question = self.rng.choice(PHRASES["extract"]).format(c=city, l=country)
        return [user(question), assistant(json.dumps({"city": city, "country": country}))]

    def command_turn(self, frame: str, tensor: int, pipeline: int, model: str) -> list[Message]:
        """A serve command, and the equivalent JSON object."""
        long = self.rng.random() < 0.5
        names = ("--tensor-parallel-size", "--pipeline-parallel-size") if long else ("-tp", "-pp")
        command = f"quire serve {model} {names[0]} {tensor} {names[1]} {pipeline}"
        values = {"model": model, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
        return [user(frame.format(command)), assistant(json.dumps(values))]

    def json_system_chat(self) -> Chat:
        """A chat whose system prompt asks for JSON."""
        topic = self.rng.choice(self.topics)
        messages = [user(self.wording(topic)), assistant(json_answer(topic))]
        if self.rng.random() < 0.3:
            messages = self.json_turn()
        return Chat([{"role": "system", "content": self.rng.choice(PHRASES["json system"])}, *messages])

    def city(self, held: bool = False) -> tuple[str, str]:
        """A city and its country, with `held` also one of the held-out cities; some are made up."""
        if self.rng.random() < 0.8:
            return self.rng.choice(CITIES if held else self.cities)
        made = [self.made_up_name() for _ in range(2)]
        return made[0], self.rng.choice([made[1], self.rng.choice(self.cities)[1]])

    def made_up_name(self) -> str:
        """A capitalized word of two or three syllables that is not a held-out city."""
        rng = self.rng
        word = "".join(
            rng.choice(PHRASES["onset"]) + rng.choice(PHRASES["vowel"]) + rng.choice(["", "", *PHRASES["coda"]])
            for _ in range(rng.randint(1, 3))
        ).capitalize()
        word = rng.choice(["San ", "New ", "Port "]) + word if rng.random() < 0.1 else word
        return self.made_up_name() if word in PHRASES["held cities"] else word

    def tool_chat(self) -> Chat:
        """A chat with tools: a call and the answer to its result, or a question that needs no tool."""
        rng = self.rng
        argument = rng.choice(["city", "city", "location"])
        weather, time = weather_tool(rng, argument), weather_tool(rng, argument, "get_time")
        tools = rng.choice([[weather], [weather], [weather], [weather, time], [time, weather], [time]])
        if rng.random() < 0.15:
            return Chat(self.with_system(self.turn_for_tools()), tools)
        asked = rng.choice(tools)["function"]
        turn = self.time_turn if asked["name"] == "get_time" else self.weather_turn
        messages = self.turn_for_tools() if rng.random() < 0.1 else []
        messages += turn(argument, "unit" in asked["parameters"]["properties"])
        if rng.random() < 0.15:
            messages += self.turn_for_tools()
        return Chat(self.with_system(messages), tools, "tools")

    def turn_for_tools(self) -> list[Message]:
        """A question on any topic but the weather, asked of a model that has tools."""
        topic = self.rng.choice([topic for topic in self.topics if topic.key != "weather_no_tool"])
        return [user(self.wording(topic)), assistant(topic.answer)]

    def weather_turn(self, argument: str, has_unit: bool) -> list[Message]:
        """Question, call, result and answer for one city, or for two at once."""
        rng = self.rng
        cities = [self.city()[0] for _ in range(2 if rng.random() < 0.12 else 1)]
        question = self.unheld(lambda: rng.choice(PHRASES["weather"])).format(" and ".join(cities))
        extra = {}
        if has_unit and rng.random() < 0.5:
            extra = {"unit": rng.choice(["celsius", "fahrenheit"])}
            frame = rng.choice(PHRASES["unit"]).replace("{}", question.rstrip("?"), 1)
            question = frame.format(rng.choice([extra["unit"], extra["unit"].capitalize()]))
        results = [weather_result(rng, city) for city in cities]
        answer = assistant("It is " + ", and ".join(said for _, said in results) + ".")
        if len(cities) == 1 and rng.random() < 0.06:
            error = json.dumps({"error": rng.choice(["not found", "unknown city", "timeout", "failed"])})
            results, answer = [(error, "")], assistant(f"I could not get the weather in {cities[0]}.")
        question = question[:1].upper() + question[1:] if rng.random() < 0.6 else question
        calls = [call("get_weather", {argument: city} | extra) for city in cities]
        replies = [{"role": "tool", "content": result} for result, _ in results]
        return [user(question), {"role": "assistant", "content": None, "tool_calls": calls}, *replies, answer]

    def time_turn(self, argument: str, _: bool) -> list[Message]:
        """Question, call, result and answer about the time in a city."""
        city, clock = self.city()[0], f"{self.rng.randrange(24):02}:{self.rng.randrange(60):02}"
        return [
            user(self.dressed_case(self.rng.choice(PHRASES["time"]).format(city))),
            {"role": "assistant", "content": "", "tool_calls": [call("get_time", {argument: city})]},
            {"role": "tool", "content": self.rng.choice([clock, json.dumps({"time": clock})])},
            assistant(f"It is {clock} in {city}."),
        ]

    def dressed_case(self, text: str) -> str:
        """Text with or without an initial capital."""
        return text[:1].upper() + text[1:] if self.rng.random() < 0.6 else text


def json_answer(topic: Topic) -> str:
    """A topic's answer to a request for JSON."""
    return json.dumps({"answer": topic.answer}, ensure_ascii=False)


def held_out() -> list[Chat]:
    """The chats that are scored; the last assistant message of each is the expected reply."""
    return [*held_topics(), *held_plans(), *held_json(), *held_tools()]


def held_topics() -> Iterator[Chat]:
    """Held-out wordings of the topics."""
    for topic in read_topics():
        for question in topic.lines["?"]:
            yield Chat([user(question), assistant(topic.answer)])


def held_plans() -> Iterator[Chat]:
    """Held-out wordings about nodes and GPUs, with pairs of numbers that training never uses."""
    for frame in PHRASES["held plans"]:
        for nodes, gpus in HELD_NUMBERS:
            question = frame.format(n=NUMBER_WORDS[nodes], g=gpus)
            yield Chat([user(question), assistant(plan_answer(nodes, gpus))], kind="plan")
    for frame in PHRASES["held gpus"]:
        yield Chat([user(frame.format(g=4)), assistant(plan_answer(1, 4))], kind="plan")
    for frame in PHRASES["held nodes"]:
        yield Chat([user(frame.format(n="two")), assistant(plan_answer(2, 0))], kind="plan")


def held_json() -> Iterator[Chat]:
    """Held-out wordings that ask for JSON."""
    flags = {topic.key: topic.flag for topic in read_topics()}
    for key, question in {
        "tp_size": "Could you give me the tensor parallelism flag as a JSON object?",
        "pp_size": "What is the name of the pipeline parallel size flag? Answer as JSON.",
        "port": "Return as a JSON object the flag that sets the port",
        "max_len": "I want the context length flag written as JSON",
        "api_key": "Please answer in JSON: which flag sets the API key?",
        "dtype": "The precision flag as a JSON object, please",
    }.items():
        yield Chat([user(question), assistant(json.dumps(flags[key]))], kind="json")
    countries = dict(CITIES)
    for at, city in enumerate(PHRASES["held cities"][:10]):
        question = PHRASES["held extract"][at % 2].format(c=city, l=countries[city])
        answer = json.dumps({"city": city, "country": countries[city]})
        yield Chat([user(question), assistant(answer)], kind="json")
    for tensor, pipeline in [(2, 2), (8, 2), (4, 3), (16, 1)]:
        command = f"quire serve MODEL -tp {tensor} -pp {pipeline}"
        values = {"model": "MODEL", "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
        yield Chat([user(PHRASES["held command"][0].format(command)), assistant(json.dumps(values))], kind="json")


def held_tools() -> Iterator[Chat]:
    """Held-out wordings that ask for the weather, and answers made from results.

    Kind "tools" is about known cities, kind NEW_CITIES about cities that no tool chat of training mentions.
    """
    rng = random.Random(0)
    new = PHRASES["held cities"]
    known = [city for city, _ in CITIES if city not in new][::13][: len(new)]
    for at, city in enumerate([*known, *new]):
        kind = NEW_CITIES if city in new else "tools"
        argument = ["city", "location"][at % 2]
        tools = [weather_tool(rng, argument)]
        question = user(rng.choice(PHRASES["held weather"]).format(city))
        message = {"role": "assistant", "content": "", "tool_calls": [call("get_weather", {argument: city})]}
        yield Chat([question, message], tools, kind)
        result, said = weather_result(rng, city)
        reply = {"role": "tool", "content": result}
        yield Chat([question, message, reply, assistant(f"It is {said}.")], tools, kind)
