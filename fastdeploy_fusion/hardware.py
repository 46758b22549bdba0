"""GPUs by name, for planning where there is none."""

COMPUTE_CAPABILITIES = {
    "a100": 80,
    "h20": 90,
    "h100": 90,
    "h200": 90,
    "gh200": 90,
    "b200": 100,
    "gb200": 100,
    "b300": 103,
    "gb300": 103,
}
"""Name -> SM, as NVIDIA lists it."""
