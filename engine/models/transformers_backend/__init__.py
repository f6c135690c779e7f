"""Models as transformers builds them, with our attention and linear layers."""

# Models are built from tensors without data, whose kernels `quire.engine.worker` does not import.
import torch._meta_registrations
import torch.distributed._meta_registrations  # noqa: F401
