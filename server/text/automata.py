"""Regular expressions without look-arounds for those with them, by automata.

Input is the notation that `quire.server.text.patterns` writes, with look-arounds and anchors everywhere. A look-ahead
is an obligation: what follows must match it (or must not), whatever else it matches. A look-behind is known when its
place is reached, from an automaton that reads the text from its beginning. So the states of a deterministic automaton
are found by reading each letter: a nondeterministic automaton's states, each with its obligations, which consist of
such states again. Letters are the sets of characters that no class tells apart. The automaton is minimized, and its
states are eliminated one by one until a regular expression is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from quire.server.text.characters import CharacterSet, Ranges, joined, written
from quire.server.text.expressions import (
    ALL,
    ExpressionReader,
    Part,
    Step,
    are_plain,
    conditions_of,
    is_plain,
    looks_ahead,
    narrowed,
    text_of,
)

_MAX_STATES = 4096
"""States of a nondeterministic automaton, and of a deterministic one."""
MAX_EXPRESSION_LENGTH = 16 * 1024
"""Characters of an expression that is made from an automaton: no more than those of a pattern, since tools' schemas are
read twice."""
_TOO_COMPLEX = "has look-arounds, or excludes patterns, that are too complex"


def conjunction(expression: str, step: Step) -> list[str]:
    """Return expressions without look-arounds, all of which a text must match. Look-arounds with a known place from the
    beginning or the end become expressions of their own.

    Raises ValueError if the expression is too complex.
    """
    conditions, rest = conditions_of(ExpressionReader(expression).result(), step)
    parts = conditions if conditions and rest in ("^", "$") else [rest, *conditions]
    return [part if is_plain(part) else plain(part, step) for part in dict.fromkeys(parts)]


def plain(expression: str, step: Step) -> str:
    """Return an expression without look-arounds; raises ValueError if it is too complex."""
    options = narrowed(ExpressionReader(expression).result())
    if are_plain(options, is_first=True, is_last=True):
        result = text_of(options)
    else:
        automaton = _Automaton(options, step)
        result = f"^{_expression(_minimal(automaton.table(), step), automaton.letters, step)}$"
    if len(result) > MAX_EXPRESSION_LENGTH:
        raise ValueError(_TOO_COMPLEX)
    return result


def matches_any(expression: str, step: Step) -> bool:
    """Return whether any text matches; raises ValueError if the expression is too complex."""
    return any(accepts for accepts, _ in _Automaton(ExpressionReader(expression).result(), step).states())


def texts(expression: str, most: int, step: Step) -> list[str] | None:
    """Return all texts that match; None if they may be more than `most`, or longer."""
    automaton = _Automaton(ExpressionReader(expression).result(), step)
    table: list[tuple[bool, list[int]]] = []
    for each in automaton.states():
        table.append(each)
        if len(table) > most * most:
            return None
    alive = {at for at, (accepts, _) in enumerate(table) if accepts}
    while more := {at for at, (_, targets) in enumerate(table) if at not in alive and not alive.isdisjoint(targets)}:
        alive |= more
    found: list[str] = []
    level = [("", 0)] if 0 in alive else []
    while level:
        found += [text for text, state in level if table[state][0]]
        longer: list[tuple[str, int]] = []
        for text, state in level:
            for letter, target in zip(automaton.letters, table[state][1], strict=True):
                if target in alive:
                    size = sum(last - first + 1 for first, last in letter)
                    if size > most or len(longer) + size > most or len(text) >= most * most:
                        return None
                    longer += [(text + chr(code), target) for first, last in letter for code in range(first, last + 1)]
        level = longer
        if len(found) + len(level) > most:
            return None
    return found


class _Place(NamedTuple):
    """A state of the nondeterministic automaton, with obligations."""

    state: int
    obligations: frozenset[_Obligation]


class _Obligation(NamedTuple):
    """What follows must, or must not, be accepted from one of these places."""

    is_negative: bool
    places: _Places


_Places = frozenset[_Place]
_Edge = tuple[int, int]
"""The letters as bits, and the next state."""
_Known = tuple[bool, ...]
"""For each automaton that looks behind, whether it accepts what was read."""
_State = tuple[_Known, tuple[_Places, ...], _Places]
_NONE: frozenset[_Obligation] = frozenset()
_TOP = 0
"""The state that accepts whatever follows."""
_SATISFIED: _Places = frozenset((_Place(_TOP, _NONE),))


@dataclass
class _Table:
    """A deterministic automaton whose first state is 0."""

    next: list[list[int]]
    """By state and letter."""
    accepts: list[bool]


class _Automaton:
    """The states of an expression's automaton, found while they are read."""

    def __init__(self, options: list[list[Part]], step: Step) -> None:
        self._step = step
        self.letters = _letters(options, step)
        self._every = (1 << len(self.letters)) - 1
        self._bits: dict[int, int] = {}
        self._edges: list[list[_Edge]] = [[]]
        self._moves: list[list[tuple[int, str, int]]] = [[]]
        """By state, moves without a letter: the next state, and a condition with its number."""
        self._aheads: list[tuple[int, bool]] = []
        self._behinds: list[int] = []
        """First states of automata that read the text from its beginning. An inner one comes before its outer one."""
        self._ends: list[int] = []
        self._edges[_TOP].append((self._every, _TOP))
        self._memory: dict[tuple[_Places, int, _Known], _Places] = {}
        self._not_at_the_end = self._new([(self._every, _TOP)])
        self._first = self._anything_before(self._alternatives(options, _TOP))

    def table(self) -> _Table:
        """Return the deterministic automaton."""
        numbers: dict[_State, int] = {}
        accepts: list[bool] = []
        table: list[list[int]] = []
        for accepted, following in self._explored(numbers):
            accepts.append(accepted)
            table.append(following)
        return _Table(table, accepts)

    def states(self) -> Iterator[tuple[bool, list[int]]]:
        """Yield for each state whether it accepts, and the numbers of the states that follow it."""
        return self._explored({})

    def _explored(self, numbers: dict[_State, int]) -> Iterator[tuple[bool, list[int]]]:
        pending = [self._start()]
        numbers[pending[0]] = 0
        for state in pending:
            following = []
            for letter in range(len(self.letters)):
                after = self._after(state, letter)
                if after not in numbers:
                    if len(numbers) == _MAX_STATES:
                        raise ValueError(_TOO_COMPLEX)
                    numbers[after] = len(numbers)
                    pending.append(after)
                following.append(numbers[after])
            yield self._accepts(state[2]), following

    def _new(self, edges: list[_Edge] | None = None, moves: list[tuple[int, str, int]] | None = None) -> int:
        if len(self._edges) >= _MAX_STATES:
            raise ValueError(_TOO_COMPLEX)
        self._step(1)
        self._edges.append(edges or [])
        self._moves.append(moves or [])
        return len(self._edges) - 1

    def _anything_before(self, state: int) -> int:
        loop = self._new(moves=[(state, "", 0)])
        self._edges[loop].append((self._every, loop))
        return loop

    def _alternatives(self, options: list[list[Part]], after: int) -> int:
        starts = [self._sequence(option, after) for option in options]
        return starts[0] if len(starts) == 1 else self._new(moves=[(start, "", 0) for start in starts])

    def _sequence(self, nodes: list[Part], after: int) -> int:
        for node in reversed(nodes):
            after = self._repeated(node, after)
        return after

    def _repeated(self, node: Part, after: int) -> int:
        """Return the first state of a node, whose last one is `after`."""
        if node.most is None:
            loop = self._new(moves=[(after, "", 0)])
            self._moves[loop].append((self._once(node, loop), "", 0))
            after = loop
        else:
            end = after
            for _ in range(node.most - node.least):
                after = self._new(moves=[(end, "", 0), (self._once(node, after), "", 0)])
        for _ in range(node.least):
            after = self._once(node, after)
        return after

    def _once(self, node: Part, after: int) -> int:
        match node.kind:
            case "set":
                assert node.ranges is not None
                return self._new([(self._letters_in(node.ranges), after)])
            case "group":
                return self._alternatives(node.options, after)
            case "end":
                return self._new(moves=[(after, "end", 0)])
            case "begin":
                return self._new(moves=[(after, "begin", 0)])
        if node.is_ahead:
            self._aheads.append((self._alternatives(node.options, _TOP), node.is_negative))
            return self._new(moves=[(after, "ahead", len(self._aheads) - 1)])
        if looks_ahead(node.options):
            raise ValueError("contains a look-ahead, \\b or $ inside of a look-behind, which is not supported")
        end = self._new()
        first = self._anything_before(self._alternatives(node.options, end))
        self._behinds.append(first)
        self._ends.append(end)
        return self._new(moves=[(after, "not behind" if node.is_negative else "behind", len(self._behinds))])

    def _letters_in(self, ranges: Ranges) -> int:
        if id(ranges) not in self._bits:
            self._bits[id(ranges)] = sum(
                1 << at
                for at, letter in enumerate(self.letters)
                if any(first <= letter[0][0] <= last for first, last in ranges)
            )
        return self._bits[id(ranges)]

    def _start(self) -> _State:
        known: _Known = (True,)
        behinds = []
        for first, end in zip(self._behinds, self._ends, strict=True):
            behinds.append(self._closed([_Place(first, _NONE)], known))
            known = (*known, _Place(end, _NONE) in behinds[-1])
        return known, tuple(behinds), self._closed([_Place(self._first, _NONE)], known)

    def _after(self, state: _State, letter: int) -> _State:
        """Return the state after another letter."""
        known: _Known = (False,)
        behinds = []
        for places, end in zip(state[1], self._ends, strict=True):
            behinds.append(self._moved(places, letter, known))
            known = (*known, _Place(end, _NONE) in behinds[-1])
        return known, tuple(behinds), self._moved(state[2], letter, known)

    def _moved(self, places: _Places, letter: int, known: _Known) -> _Places:
        """Return the places after another letter, where these things are known."""
        key = places, letter, known
        if key not in self._memory:
            self._memory[key] = self._closed(self._next(places, letter, known), known)
        return self._memory[key]

    def _next(self, places: _Places, letter: int, known: _Known) -> Iterator[_Place]:
        for state, obligations in places:
            targets = [target for letters, target in self._edges[state] if letters >> letter & 1]
            if not targets:
                continue
            left = _NONE
            for is_negative, each in obligations:
                still = _with(left, is_negative, self._moved(each, letter, known))
                if still is None:
                    break
                left = still
            else:
                yield from (_Place(target, left) for target in targets)

    def _closed(self, places: Iterable[_Place], known: _Known) -> _Places:
        """Return the places that are reached without a letter, without those that others make needless."""
        seen: set[_Place] = set()
        pending = list(places)
        aheads: dict[int, _Places] = {}
        while pending:
            if (place := pending.pop()) in seen:
                continue
            seen.add(place)
            for target, condition, number in self._moves[place.state]:
                obligations: frozenset[_Obligation] | None = place.obligations
                match condition:
                    case "begin" if not known[0]:
                        continue
                    case "behind" | "not behind" if known[number] != (condition == "behind"):
                        continue
                    case "end":
                        obligations = _with(obligations, True, frozenset((_Place(self._not_at_the_end, _NONE),)))
                    case "ahead":
                        first, is_negative = self._aheads[number]
                        if number not in aheads:
                            aheads[number] = self._closed([_Place(first, _NONE)], known)
                        obligations = _with(obligations, is_negative, aheads[number])
                if obligations is not None:
                    pending.append(_Place(target, obligations))
        self._step(1 + len(seen) // 2)
        if _Place(_TOP, _NONE) in seen:
            return _SATISFIED
        by_state: dict[int, list[frozenset[_Obligation]]] = {}
        for state, obligations in seen:
            if self._edges[state] or not self._moves[state]:
                by_state.setdefault(state, []).append(obligations)
        return frozenset(
            _Place(state, each)
            for state, several in by_state.items()
            for each in several
            if len(several) == 1 or not any(other < each for other in several)
        )

    def _accepts(self, places: _Places) -> bool:
        """Return whether the text may end here."""
        return any(
            state == _TOP and all(self._accepts(each) != is_negative for is_negative, each in obligations)
            for state, obligations in places
        )


def _with(
    obligations: frozenset[_Obligation] | None, is_negative: bool, places: _Places
) -> frozenset[_Obligation] | None:
    """Return the obligations with another one; None if it cannot be met."""
    if obligations is None or places in (_SATISFIED, frozenset()):
        return obligations if (places == _SATISFIED) != is_negative else None
    return obligations | {_Obligation(is_negative, places)}


def _letters(options: list[list[Part]], step: Step) -> list[Ranges]:
    """Return disjoint sets of characters, each of which is inside or outside of every class of the expression."""
    classes: dict[Ranges, None] = {}
    pending = [node for option in options for node in option]
    while pending:
        node = pending.pop()
        if node.kind == "set":
            if node.ranges is None:
                raise ValueError("has a look-around together with a Unicode property, which is not supported here")
            classes[tuple(node.ranges)] = None
        pending += (each for option in node.options for each in option)
    changes: dict[int, int] = {}
    for number, ranges in enumerate((ALL, *classes)):
        for first, last in joined(ranges):
            changes[first] = changes.get(first, 0) ^ (1 << number)
            changes[last + 1] = changes.get(last + 1, 0) ^ (1 << number)
    step(len(changes) // 10)
    letters: dict[int, list[tuple[int, int]]] = {}
    inside, before = 0, 0
    for place in sorted(changes):
        if inside & 1:
            letters.setdefault(inside, []).append((before, place - 1))
        inside ^= changes[place]
        before = place
    return list(letters.values())


def _minimal(table: _Table, step: Step) -> _Table:
    """Return the smallest deterministic automaton for the same texts (Hopcroft's algorithm)."""
    size, letters = len(table.next), range(len(table.next[0]))
    before: list[list[list[int]]] = [[[] for _ in range(size)] for _ in letters]
    for state, following in enumerate(table.next):
        for letter, target in enumerate(following):
            before[letter][target].append(state)
    blocks = [{at for at in range(size) if table.accepts[at] == side} for side in (False, True)]
    block_of = [int(accepts) for accepts in table.accepts]
    waiting = {0, 1}
    while waiting:
        splitter = tuple(blocks[waiting.pop()])
        step(1 + len(splitter) * len(letters) // 20)
        for letter in letters:
            parts: dict[int, set[int]] = {}
            for target in splitter:
                for state in before[letter][target]:
                    parts.setdefault(block_of[state], set()).add(state)
            for block, inside in parts.items():
                if len(inside) == len(blocks[block]):
                    continue
                blocks[block] = blocks[block] - inside
                blocks.append(inside)
                for state in inside:
                    block_of[state] = len(blocks) - 1
                is_smaller = len(inside) <= len(blocks[block])
                waiting.add(len(blocks) - 1 if block in waiting or is_smaller else block)
    order = list(dict.fromkeys(block_of))  # the first state is the first one's
    numbers = {block: number for number, block in enumerate(order)}
    ones = [next(iter(blocks[block])) for block in order]
    return _Table(
        [[numbers[block_of[target]] for target in table.next[one]] for one in ones],
        [table.accepts[one] for one in ones],
    )


class _Text(NamedTuple):
    """An expression, and whether it can be repeated (2), joined with others (1) or neither (0) without parentheses."""

    text: str
    rank: int

    def at_least(self, rank: int) -> str:
        return self.text if self.rank >= rank else f"(?:{self.text})"


_EMPTY = _Text("", 1)


def _either(one: _Text | None, other: _Text) -> _Text:
    if one is None or one == other:
        return other
    if _EMPTY in (one, other):
        return _Text(f"{(other if one == _EMPTY else one).at_least(2)}?", 1)
    return _Text(f"{one.text}|{other.text}", 0)


def _joined(parts: Iterable[_Text]) -> _Text:
    several = [part for part in parts if part != _EMPTY]
    return several[0] if len(several) == 1 else _Text("".join(part.at_least(1) for part in several), 1)


def _expression(table: _Table, letters: list[Ranges], step: Step) -> str:
    """Return a regular expression of all that the automaton accepts, by eliminating its states one by one."""
    begin, end = -1, -2
    after: dict[int, dict[int, _Text]] = {begin: {0: _EMPTY}, end: {}}
    before: dict[int, set[int]] = {end: set(), **{state: set() for state in range(len(table.next))}}
    for state, following in enumerate(table.next):
        by_target: dict[int, list[tuple[int, int]]] = {}
        for letter, target in enumerate(following):
            by_target.setdefault(target, []).extend(letters[letter])
        after[state] = {target: _Text(written(CharacterSet(ranges)), 2) for target, ranges in by_target.items()}
        if table.accepts[state]:
            after[state][end] = _EMPTY
    for state, targets in after.items():
        for target in targets:
            before[target].add(state)

    def weight(state: int) -> int:
        """About how many characters its elimination adds."""
        step(1)
        others = [len(text.text) + 4 for target, text in after[state].items() if target != state]
        sources = [len(after[source][state].text) + 4 for source in before[state] if source != state]
        loop = len(after[state][state].text) + 4 if state in after[state] else 0
        added = sum(others) * len(sources) + (sum(sources) + loop * len(sources)) * len(others)
        return added - sum(others) - sum(sources) - loop

    weights = {state: weight(state) for state in range(len(table.next))}
    while weights:
        state = min(weights, key=lambda each: weights[each])
        step(1 + len(weights) // 100)
        del weights[state]
        targets = after.pop(state)
        loop = targets.pop(state, None)
        repeated = _EMPTY if loop is None else _Text(f"{loop.at_least(2)}*", 1)
        sources = before.pop(state) - {state}
        for source in sources:
            first = after[source].pop(state)
            for target, last in targets.items():
                through = _either(after[source].get(target), _joined((first, repeated, last)))
                if len(through.text) > MAX_EXPRESSION_LENGTH:
                    raise ValueError(_TOO_COMPLEX)
                after[source][target] = through
                before[target].add(source)
        for target in targets:
            before[target].discard(state)
        for neighbour in {*sources, *targets} & weights.keys():
            weights[neighbour] = weight(neighbour)
    found = after[begin].get(end)
    return written(CharacterSet()) if found is None else found.at_least(1)
