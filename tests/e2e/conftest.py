"""The compiled kernels serve here."""

from tests.fakes.cpu_kernels import cpu_kernels

__all__ = ["cpu_kernels"]
