"""Pools: maximum and mean over sliding windows, and over windows that divide an axis into equal parts."""
