"""Regular expressions of schemas mean what ECMA-262 says, or are refused."""

from __future__ import annotations

import re

import pytest

from quire.server.text import patterns

CONTROLS = r"\u{0}-\u{7}\u{b}\u{e}-\u{1f}"
UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
GROUPS = patterns.MAX_GROUP_DEPTH


def searches(pattern: str, text: str) -> bool:
    """Whether a rewritten pattern, which Python writes with other escapes, is found in a text."""
    python = re.sub(r"\\u\{(\w+)\}", lambda found: f"\\U{int(found[1], 16):08x}", pattern)
    anchored = re.sub(r"\\.|\[(?:\\.|[^]\\])*\]|\$", lambda found: r"\Z" if found[0] == "$" else found[0], python)
    return re.search(anchored, text) is not None


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r'^[^"\\]+$', ["ab", "\n"], ['"', "\\", "\x01", "\x7f"]),
        (r"[\x00-\x1fa]", ["\n", "a"], ['"', "\x1f"]),
        (r"^\d\D$", ["3a"], ["٣a", "33"]),
        (r"^\w\W$", ["_é", "Z-"], ["é_", "aa"]),
        (r"^[\w-.]$", ["-", ".", "a"], ["+"]),
        (r"^[\d-z]$", ["-", "z", "1"], ["a"]),
        (r"^\s\S$", ["\u00a0a", "\ufeff\u200b", "\u2028x"], ["\x85a", "  "]),
        ("^.$", ["a", "\x85", "\ufffe", "\U0001f600"], ["\n", "\r", "\u2028", "\u2029", ""]),
        ("(?s)^.$", ["\n", "\u2028"], [""]),
        (r"^[^]$", ["\n", '"'], [""]),
        ("^([]|a)$", ["a"], [""]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^\t\n\f\r\cJ\x41\u0042\u{1f600}\ud83d\ude00$", ["\t\n\f\r\nAB😀😀"], []),
        (r"^[\ud83d\ude00-\ud83d\ude02]$", ["😁"], ["😃"]),
        (r"^a\v|^b\0|^c$", ["c"], ["a\v", "b\0"]),
        (r"^\/\-\"\_/$", ['/-"_/'], []),
        (r"^[a&&b][a-c[][!--]~{a}$", ["&[-~{a}"], ["a", "ab"]),
        ("^a]{$", ["a]{"], []),
        ("^(|a)(b|)$", ["", "a", "ab"], ["ba"]),
        ("^(?<stop>a)(?P<b>b)(?:c)$", ["abc"], ["a"]),
        ("^a{2}b{1,}?c{0,2}?d??e*?$", ["aab", "aabbccde"], ["ab", "aabccc"]),
        ("(?i)^straße$", ["STRAẞE", "\u017ftraße"], ["strasse"]),
        ("^a(?i:b(?-i:c)[^k])d$", ["aBcxd", "abcXd"], ["abCxd", "Abcxd", "abcKd", "abc\u212ad", "abcxD"]),
        (r"(?i)^\w\W$", ["\u017f-"], ["aS", "a\u212a"]),
        (r"a\$$|\\$", ["a$", "a\\"], ["a$b"]),
        ("^(?=.*[a-z])(?=.*[A-Z]).{3,5}$", ["aBc", "Zzzzz"], ["abc", "aB", "aBcdef"]),
        ("^(?!\\.)(?!.*\\.\\.)[a-z.]+@[a-z]+$", ["a.b@c", "a.@c"], [".a@c", "a..b@c", "a@"]),
        ("^user_(?!admin$|root$)[a-z]{4,6}$", ["user_admins", "user_roots"], ["user_admin", "user_root"]),
        (r"^P(?:\d+W|(?=\d|T\d)(?:\d+D)?(?:T(?=\d)(?:\d+H)?(?:\d+M)?)?)$", ["P1W", "P1DT2H", "PT5M"], ["P", "P1DT"]),
        ("a^|(^b*)*c|(d|$)+e?", ["c", "bbc", "d", "xd", "xyz", "a"], []),
        ("^(a$|b)c?$|(x^)?y(z|$){2}", ["a", "bc", "y", "xy", "xyz"], ["ac", "yy!"]),
        ("^(?:(?!--).)*$", ["", "-a-"], ["a--b"]),
        ("^(?:a(?=b|$)|b(?!b))+$", ["a", "abab", "ba"], ["aa", "bb", "abba"]),
        ("^[a-z-]{1,3}(?<!-)$", ["a", "a-b"], ["-", "ab-", "abcd"]),
        ("(?<!\\d)\\d{2}(?!\\d)", ["12", "a34b"], ["1", "123"]),
        ("(?<=^|,)a", ["a", "b,a"], ["ba", ""]),
        ("^(?<=(?<!x)b*)a|c(?<=bc)", ["a", "bc"], ["c", "xa"]),
        (
            r"^(?!-)[a-z-]{1,5}(?<!-)(\.(?!-)[a-z-]{1,5}(?<!-))*$",
            ["a", "ab", "a-b.c", "aaaaa", "a---b"],
            ["-a", "a-", "a-.b", "a.-b", "a.", "-", "aaaaaa", "a----b"],
        ),
        ("^(x(?=[ab])[a-c]+(?<=[bc])y)*$", ["xby", "xacy", "xbbyxabcy"], ["xay", "xcby", "xcy", "xbay"]),
        ("^(?:(?!b)[ab]?(?<!a)|c[a-c]*(?<!c))d$", ["d", "cad", "ccbd"], ["ad", "bd", "cd", "cacd"]),
        (r"\bfoo\b", ["foo", "a foo-b", "éfoo"], ["food", "_foo"]),
        (r"^a\Bb|\B-\B", ["ab", "--", "-"], ["a-b", "-b"]),
        (r"^(?!(?!a)|ab)..$", ["ac"], ["ab", "bb"]),
        (r"^[\s\S](?!b)..?$", ["aac", "\n--"], ["aba", "a"]),
        (r"\(?=[(?=!]$|^(?!a)\(?!b$", ["=(", "(!b"], ["=b", "a"]),
        ("(?i)^(?!admin$)[a-z]{5}$", ["admis"], ["aDmIn"]),
        ("^(?!)$|^(?!a|)|^b(?=)$", ["b"], ["", "a"]),
    ],
)
def test_the_meaning_is_kept(pattern: str, good: list[str], bad: list[str]) -> None:
    result, several = patterns.rewritten(pattern), patterns.conjunction(pattern)
    opposite = patterns.rewritten(patterns.joint((), [pattern]))
    for text in good:
        assert searches(result, text), (result, text)
        assert all(searches(each, text) for each in several), (several, text)
        assert not searches(opposite, text), (opposite, text)
    for text in bad:
        assert not searches(result, text), (result, text)
        assert not all(searches(each, text) for each in several), (several, text)
        assert searches(opposite, text) == (UNWRITABLE.search(text) is None), (opposite, text)
    assert patterns.rewritten(result) == result


@pytest.mark.parametrize(
    ("pattern", "result"),
    [
        (r"\p{L}\P{Script=Greek}", rf"[^{CONTROLS}\u{{7f}}\P{{L}}][^{CONTROLS}\u{{7f}}\p{{Script=Greek}}]"),
        (r"[^\p{Lu}a]", rf"[^{CONTROLS}a\u{{7f}}\p{{Lu}}]"),
        (r"[\pN_]", rf"(?:[^{CONTROLS}\u{{7f}}\P{{N}}]|_)"),
    ],
)  # fmt: skip
def test_unicode_properties_are_left_to_the_engine(pattern: str, result: str) -> None:
    assert patterns.rewritten(pattern) == result
    assert patterns.rewritten(result) == result


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(?=a)*", "repeats a look-around"),
        *((text, "inside of a look-behind") for text in (r"(?<=a\b)", "(?<!a$)", "(?<=a(?=b))c", "(?<=(?:a|(?!b)))c")),
        *((text, "Unicode property") for text in (r"(?=\p{L}*b)|c", r"^(?![^\p{L}\]]b)")),
        *((text, "too complex") for text in ("^(a|b(?=a)){5000}", "(?=.*a.{13}$).*b.{13}|c", "(?<=a.{20})b")),
        *((text, f"contains {text[:3]}") for text in ("(?>a)", "(?#a)", "(?P=a)", "(?(1)a)")),
        *((f"(a){text}", f"contains {text[:2]}") for text in (r"\1", r"\k<a>", r"\A", r"\Z", r"\z")),
        *((text, f"contains {text[:2]}") for text in (r"\a", r"\01", r"\u12", r"\x1", r"\cé", r"\p{a-b}", r"\U0001")),
        (r"\u{110000}", "not a character"),
        (r"[\ud800-\udbff]", "surrogate"),
        (r"\udc00", "surrogate"),
        ("a\ud83d", "surrogate"),
        ("(?m)^a", "flag m"),
        ("(?x:a)", "flag x"),
        ("a(?i)b", "sets flags after"),
        (r"(?i)\p{L}", "together with"),
        ("*a", "repeats nothing"),
        ("a|+", "repeats nothing"),
        ("^*", "repeats ^"),
        ("a*+", "repeats a repetition"),
        ("a{2}{3}", "repeats a repetition"),
        ("a{3,2}", "at least 3 and at most 2"),
        ("a{9999999999}", "9 digits"),
        ("a{,3}", "unclear {"),
        ("{3}", "unclear {"),
        ("[]a]", "unclear ]"),
        ("x[[a]y]", "unclear ]"),
        ("[a-z&&[b]]", "unclear ]"),
        ("[[:alpha:]]", "[: in a class"),
        ("[b-a]", "wrong order"),
        ("[a", "ends inside"),
        ("a\\", "ends inside"),
        ("(a", "unmatched ("),
        ("a)", "unmatched )"),
        ("(" * (GROUPS + 1) + ")" * (GROUPS + 1), "nested groups"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(pattern: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^[a-z]") as error:
        patterns.rewritten(pattern)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("^(a|b?c)$", ["a", "c", "bc"]),
        ("^(?!b)[a-c]{0,1}$", ["", "a", "c"]),
        ("^[]$", []),
        ("(?!)", []),
        ("^a*$", None),
        ("a", None),
        ("^[a-z]$", None),
        ("^a{300}$", None),
    ],
)
def test_texts_are_listed(pattern: str, found: list[str] | None) -> None:
    texts = patterns.texts(pattern, 16, lambda number: None)
    assert (texts if texts is None else sorted(texts)) == (found if found is None else sorted(found))
