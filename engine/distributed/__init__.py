"""The ranks of the DP × PP × TP grid, their groups, and what they exchange."""
