"""Machines laid out as trees of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

GIB = 1024**3


def lay_out(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def meminfo(total: int, available: int | None = None) -> str:
    lines = [f"MemTotal:       {total // 1024} kB", "MemFree:  1 kB"]
    if available is not None:
        lines.append(f"MemAvailable:   {available // 1024} kB")
    return "\n".join(lines)
