"""The native kernels on 64-bit ARM: compiled for it and, under an emulator, run.

They need a cross compiler and QEMU (Debian: g++-aarch64-linux-gnu, qemu-user). On an ARM machine
its own compiler builds them, and they run as they are.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IS_ARM = platform.machine() in ("aarch64", "arm64")
COMPILER = "g++" if IS_ARM else "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
# A cross compiler and an emulator come from the system's packages, not from the project's.
pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed: nothing built for ARM"
)


def built() -> tuple[list[str], list[Path]]:
    """Flags, and the sources that every machine compiles, as CMakeLists.txt has them."""
    text = (ROOT / "CMakeLists.txt").read_text()
    options = re.findall(r"^target_compile_options\(_native PRIVATE (.*)\)$", text, re.M)
    standard = re.search(r"cxx_std_(\d+)", text)
    module = re.search(r"nanobind_add_module\((.*?)\)", text, re.S)
    assert options and standard and module
    sources = [ROOT / name for name in re.findall(r"native/\w+\.cpp", module[1])]
    assert ROOT / "native" / "module.cpp" in sources and len(sources) > 5
    return [f"-std=c++{standard[1]}", *" ".join(options).split()], sources


def compile_for_arm(*args: str | Path) -> None:
    flags, _ = built()
    command = [COMPILER, *flags, "-Werror", f"-I{ROOT / 'native'}", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`kernel_check.cpp` with all kernels; the Python module itself is left out."""
    path = tmp_path_factory.mktemp("arm") / "kernel_check"
    _, sources = built()
    kernels = [source for source in sources if not source.name.startswith("module")]
    compile_for_arm("-static", "-o", path, Path(__file__).parent / "kernel_check.cpp", *kernels)
    return path


def run(program: Path, *args: str) -> subprocess.CompletedProcess[str]:
    if not IS_ARM and shutil.which(EMULATOR) is None:
        pytest.skip(f"{EMULATOR} is not installed: built for ARM, not run")
    command = [] if IS_ARM else [EMULATOR]
    return subprocess.run(
        [*command, str(program), *args], capture_output=True, text=True, timeout=600
    )


def test_the_kernels_compile_and_are_right(program: Path) -> None:
    done = run(program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 14  # of the one path that ARM has


def test_control_a_wrong_weight_is_found(program: Path) -> None:
    done = run(program, "broken")
    assert done.returncode == 1
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert failed == ["linear", "linear"]


def test_multiplications_and_additions_are_fused(tmp_path: Path) -> None:
    """NEON has one instruction for both; the compiler may not make it of two operations."""
    assembly = tmp_path / "kernels.s"
    compile_for_arm("-S", "-o", assembly, ROOT / "native" / "kernels_scalar.cpp")
    assert len(re.findall(r"\tfmla\tv", assembly.read_text())) > 100
