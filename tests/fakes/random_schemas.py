"""Random JSON Schemas of the keywords that are rewritten into others, and random values to match them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

NAMES = ("a", "b", "ab", "c")
STRINGS = ("", "a", "b", "ab", "ba", "abc", "2024-02-29", "a@b")
PATTERNS = ("^a", "b$", "^[ab]*$", "a|c", "^(?!a)", "^.b?$", "^c$")
TYPES = ("null", "boolean", "integer", "string", "array", "object")
ANNOTATIONS: tuple[dict[str, Any], ...] = (
    *({"title": "t"}, {"description": "d"}, {"default": 1}, {"examples": ["a"]}, {"$comment": "c"}, {"x-order": 1}),
    *({"deprecated": True}, {"format": "int32"}, {"readOnly": True}),
)

Schema = dict[str, Any]


class Keywords:
    """Makes schemas and values from few names, strings and numbers, so that they often have to do with each other."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._definitions = 0

    def root(self) -> Schema:
        """A schema with definitions, which may refer to each other and to themselves."""
        random = self._random
        self._definitions = random.choice((0, 0, 1, 2))
        schema = self._object_schema(2) if random.random() < 0.4 else self._schema(2)
        result = {**schema} if isinstance(schema, dict) else {"allOf": [schema]}
        if self._definitions:
            result["$defs"] = {f"d{at}": self._schema(1) for at in range(self._definitions)}
        return result

    def value(self, depth: int = 2) -> Any:
        """A value without numbers that are not integral."""
        random = self._random
        kind = random.choice(TYPES if depth else TYPES[:4])
        match kind:
            case "null":
                return None
            case "boolean":
                return random.random() < 0.5
            case "integer":
                return random.randint(-1, 4)
            case "string":
                return random.choice(STRINGS)
            case "array":
                return [self.value(depth - 1) for _ in range(random.choice((0, 1, 1, 2, 3)))]
        names = random.sample(NAMES, random.choice((0, 1, 1, 2, 3)))
        return {name: self.value(depth - 1) for name in names}

    def changed(self, value: Any) -> Any:
        """A value with something added, removed or replaced."""
        random = self._random
        if isinstance(value, list | dict) and random.random() < 0.8:
            keys: list[Any] = [*value] if isinstance(value, dict) else [*range(len(value))]
            what = random.choice(("add", "remove", "change", "change") if keys else ("add",))
            result = value.copy()
            if what == "add" and isinstance(result, dict):
                result[random.choice(NAMES)] = self.value(1)
            elif what == "add" and isinstance(result, list):
                result.insert(random.randint(0, len(result)), self.value(1))
            elif what == "remove":
                del result[random.choice(keys)]
            else:
                key = random.choice(keys)
                result[key] = self.changed(result[key])
            return result
        return self.value(1)

    def _schema(self, depth: int) -> Any:
        random = self._random
        if random.random() < 0.08:
            return random.choice((True, True, {}, False))
        if depth <= 0 or random.random() < 0.3:
            schema = self._simple()
        else:
            schema = {}
            for _ in range(random.choice((1, 1, 2, 3))):
                schema |= random.choice(self._keywords())(depth - 1)
            if random.random() < 0.35:
                schema["type"] = random.choice(("object", "object", "array", ["array", "object", "null"]))
        if random.random() < 0.15:
            schema |= random.choice(ANNOTATIONS)
        return schema

    def _keywords(self) -> list[Callable[[int], Schema]]:
        return [
            *(self._alternatives, self._alternatives, self._not, self._if, self._all),
            *(self._contains, self._unique, self._items, self._items),
            *(self._properties, self._properties, self._dependent, self._names, self._counts),
            *(self._unevaluated, self._reference),
        ]

    def _simple(self) -> Schema:
        random = self._random
        low, high = sorted(random.choices(range(4), k=2))
        return random.choice(
            (
                lambda: {"type": random.choice(TYPES)},
                lambda: {"type": random.sample(TYPES, 2)},
                lambda: {"const": self.value(1)},
                lambda: {"enum": [self.value(1) for _ in range(3)]},
                lambda: {"type": "integer", "minimum": low, "maximum": high},
                lambda: {"type": "integer", "exclusiveMinimum": low},
                lambda: {"type": "string", "minLength": low, "maxLength": high},
                lambda: {"type": "string", "pattern": random.choice(PATTERNS)},
                lambda: {"pattern": random.choice(PATTERNS)},
                lambda: {"required": [random.choice(NAMES)]},
                lambda: {"properties": {random.choice(NAMES): {"const": self.value(0)}}},
                lambda: {"type": "array", "maxItems": high},
                lambda: {"minItems": low},
            )
        )()

    def _object_schema(self, depth: int) -> Schema:
        """A schema as people write them."""
        schema = {"type": "object", **self._properties(depth - 1)}
        for _ in range(self._random.choice((0, 1, 1, 2))):
            schema |= self._random.choice(self._keywords())(depth - 1)
        return schema

    def _alternatives(self, depth: int) -> Schema:
        random = self._random
        keyword = random.choice(("oneOf", "oneOf", "anyOf"))
        number = random.choice((1, 2, 2, 3))
        if random.random() < 0.3:
            name, values = random.choice(NAMES), random.sample(STRINGS, number)
            return {
                keyword: [
                    {
                        "type": "object",
                        "properties": {name: {"const": each}, random.choice(NAMES[1:]): self._schema(depth - 1)},
                        "required": [name],
                    }
                    for each in values
                ]
            }
        return {keyword: [self._schema(depth) for _ in range(number)]}

    def _all(self, depth: int) -> Schema:
        return {"allOf": [self._schema(depth) for _ in range(self._random.choice((1, 2)))]}

    def _not(self, depth: int) -> Schema:
        return {"not": self._schema(depth)}

    def _if(self, depth: int) -> Schema:
        parts = {"if": self._schema(depth), "then": self._schema(depth), "else": self._schema(depth)}
        return {key: value for key, value in parts.items() if key == "if" or self._random.random() < 0.7}

    def _contains(self, depth: int) -> Schema:
        random = self._random
        least, most = sorted(random.choices(range(3), k=2))
        limits = random.choice(({}, {}, {"minContains": least}, {"maxContains": most or 1}))
        if random.random() < 0.2:
            limits = {"minContains": least, "maxContains": most}
        return {"contains": self._schema(depth - 1), **limits}

    def _unique(self, depth: int) -> Schema:
        values = [self.value(0) for _ in range(3)]
        items = self._random.choice(({"enum": values}, {"type": ["boolean", "null"]}, {"const": 1}))
        limits = self._random.choice(({}, {"minItems": 1}, {"maxItems": 2}))
        return {"items": items, "uniqueItems": True, **limits}

    def _items(self, depth: int) -> Schema:
        random = self._random
        schema: Schema = {}
        if random.random() < 0.6:
            schema["prefixItems"] = [self._schema(depth) for _ in range(random.choice((1, 2)))]
        if random.random() < 0.6 or not schema:
            schema["items"] = random.choice((self._schema(depth), False, self._schema(0)))
        return {**schema, **random.choice(({}, {}, {"minItems": 1}, {"maxItems": 3}, {"minItems": 2.0}))}

    def _properties(self, depth: int) -> Schema:
        random = self._random
        names = random.sample(NAMES, random.choice((1, 2, 2, 3)))
        schema: Schema = {"properties": {name: self._schema(depth) for name in names}}
        if random.random() < 0.5:
            schema["required"] = random.sample(names, random.randint(1, len(names)))
        if random.random() < 0.4:
            schema["additionalProperties"] = random.choice((False, False, {}, self._schema(0)))
        if random.random() < 0.2:
            patterns = random.sample(PATTERNS, random.choice((1, 1, 2)))
            schema["patternProperties"] = {each: self._schema(depth - 1) for each in patterns}
        return schema

    def _dependent(self, depth: int) -> Schema:
        random = self._random
        if random.random() < 0.5:
            one, other = random.sample(NAMES, 2)
            return {"dependentRequired": {one: [other], **random.choice(({}, {other: [random.choice(NAMES)]}))}}
        return {"dependentSchemas": {random.choice(NAMES): self._schema(depth)}}

    def _names(self, depth: int) -> Schema:
        random = self._random

        def names(depth: int) -> Any:
            choices: list[Callable[[], Any]] = [
                lambda: {"enum": random.sample(NAMES, 2)},
                lambda: {"const": random.choice(NAMES)},
                lambda: {"pattern": random.choice(PATTERNS)},
                lambda: {"maxLength": random.choice((1, 2))},
                lambda: {"type": "string"},
            ]
            if depth:
                choices += [
                    lambda: {random.choice(("anyOf", "oneOf", "allOf")): [names(depth - 1), names(0)]},
                    lambda: {"not": names(depth - 1)},
                    lambda: {"if": names(0), "then": names(0), "else": random.choice((True, False, names(0)))},
                ]
            return random.choice(choices)()

        return {"propertyNames": names(2)}

    def _counts(self, depth: int) -> Schema:
        least, most = sorted(self._random.choices(range(4), k=2))
        schema = self._random.choice(
            ({"minProperties": least}, {"maxProperties": most}, {"minProperties": least, "maxProperties": most})
        )
        return {**schema, **({} if self._random.random() < 0.4 else self._properties(depth))}

    def _unevaluated(self, depth: int) -> Schema:
        keyword, part = self._random.choice(
            (
                ("unevaluatedProperties", self._properties(depth)),
                ("unevaluatedItems", {"prefixItems": [self._schema(depth)]}),
            )
        )
        part.pop("additionalProperties", None)
        branch = self._random.choice((self._alternatives, self._if, self._all, self._dependent))(depth)
        return {**part, **branch, keyword: self._random.choice((False, False, self._schema(0)))}

    def _reference(self, depth: int) -> Schema:
        random = self._random
        if not self._definitions:
            return {"properties": {random.choice(NAMES): {"$ref": "#"}}}
        target = {"$ref": f"#/$defs/d{random.randrange(self._definitions)}"}
        return random.choice(
            (target, {"properties": {random.choice(NAMES): target}}, {"items": target}, {"anyOf": [target, True]})
        )
