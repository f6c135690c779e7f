"""Models as transformers builds them, with our attention and linear layers."""
