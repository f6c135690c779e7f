"""What scripts/gpu_check runs: parts that measure and check a machine, a file for each, and who runs them."""
