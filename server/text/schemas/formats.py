"""The values of `format`; others constrain nothing."""

from __future__ import annotations

from typing import Any

REJECTED_FORMATS = {
    *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"),
    *("uri-reference", "uri-template"),
}
"""Formats that cannot be enforced."""
_COMMON_YEAR = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = rf"(?:{_YEAR}-{_COMMON_YEAR}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "hostname": {"format": "hostname", "maxLength": 253},
    **{name: {"format": name} for name in ("duration", "email", "ipv4", "ipv6", "uri", "uuid")},
}
"""RFC 3339's dates and times, without the forms that many parsers reject: year 0, leap seconds, lower-case t and z. The
other formats are llguidance's own.
"""
_PART = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_HOURS = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
PATTERNS: dict[str, str] = {
    **{name: FORMATS[name]["pattern"] for name in ("date", "time", "date-time")},
    "duration": f"^P(?:[0-9]+W|{_DAYS}(?:{_HOURS})?|{_HOURS})$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@(?:{_PART}(?:\.{_PART})*|\[{_IPV4}\])$",
    "ipv4": f"^{_IPV4}$",
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
}
"""The formats that are regular expressions of moderate size."""
_SUPERSETS: dict[str, str] = {
    "hostname": rf"^{_PART}(?:\.{_PART})*$",
    "ipv6": r"^[0-9a-fA-F:]*:[0-9a-fA-F:.]*$",
    "uri": r"^[a-zA-Z][a-zA-Z0-9+.-]*:[!-~]*$",
}


def is_known(format: Any) -> bool:
    """Return whether a format constrains anything, or is none at all."""
    return not isinstance(format, str) or format in FORMATS or format in REJECTED_FORMATS


def superset(format: Any) -> str | None:
    """Return a pattern that all strings of a format match, and few others; None for a format that has none."""
    return PATTERNS.get(format, _SUPERSETS.get(format)) if isinstance(format, str) else None
