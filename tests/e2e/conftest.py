"""These tests run with the compiled kernels."""

from tests.fakes.cpu_kernels import cpu_kernels

__all__ = ["cpu_kernels"]
