"""The checks of `quire doctor`. No torch, except in `device_checks`, which runs in processes of its own.

Each check is a function that returns results (`Check`); `root` is the folder in which it looks for /proc and /sys.
"""
