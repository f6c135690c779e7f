"""Processes for ranks: forks of one that has imported torch and the worker, as in a real server."""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["quire.engine.worker.worker"])
