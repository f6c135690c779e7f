"""The implementation of scripts/gpu_check: parts that measure and check a machine, one per file, and their runner."""
