"""Parses a model's text into reasoning, content and tool calls, incrementally.

Parsers do no I/O: `feed` takes text split anywhere, `finish` ends it. The results do not depend on the splits.
"""
