"""Rewrites JSON Schemas: keywords that no grammar has become ones that it has, one file for each mechanism."""
