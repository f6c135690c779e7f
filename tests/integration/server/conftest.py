"""A server with a fake core behind it."""

from tests.fakes.api_server import config, core_mode, model_folder, server

__all__ = ["config", "core_mode", "model_folder", "server"]
