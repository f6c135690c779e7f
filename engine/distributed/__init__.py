"""The ranks of the DP × PP × TP grid, their process groups, and their communication."""
