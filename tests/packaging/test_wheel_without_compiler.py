"""Without a working compiler the package installs and says what it lacks, unless told not to."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
REQUIRE_NATIVE = "PAGEDKV_REQUIRE_NATIVE"
pytestmark = pytest.mark.deep


def pip(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != REQUIRE_NATIVE}
    return subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def build_wheel(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Builds this source tree with compilers that always fail; the wheel goes to folder/dist."""
    backend_is_here = all(map(importlib.util.find_spec, ("scikit_build_core", "nanobind")))
    return pip(
        "wheel",
        ROOT,
        "--no-deps",
        *(["--no-build-isolation"] if backend_is_here else []),
        "--wheel-dir",
        folder / "dist",
        f"--config-settings=build-dir={folder / 'build'}",
        CC="/bin/false",
        CXX="/bin/false",
        **environment,
    )


def run_installed(target: Path, code: str) -> list[str]:
    """Lines that `code` prints where only `target` has pagedkv; no .pth file is read."""
    paths = [str(target), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {paths}\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_failed_build_gives_a_pure_wheel_that_says_what_it_lacks(tmp_path: Path) -> None:
    built = build_wheel(tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    [wheel] = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith("-none-any.whl")
    names = ZipFile(wheel).namelist()
    assert "pagedkv/cache/manager.py" in names
    assert "pagedkv/server/dashboard/static/page.html" in names
    assert not [name for name in names if name.endswith((".so", ".pyd", ".dylib"))]

    target = tmp_path / "site"
    installed = pip("install", "--no-deps", "--no-index", "--target", target, wheel)
    assert installed.returncode == 0, installed.stderr
    [where, torch_loaded] = run_installed(
        target,
        "import pagedkv.cache\n"
        "print(pagedkv.cache.BlockManager(4, 4) and pagedkv.cache.__file__)\n"
        "print('torch' in sys.modules)",
    )
    assert Path(where).is_relative_to(target) and torch_loaded == "False"
    [name, reason] = run_installed(
        target,
        "from pagedkv.attention.backends import choose_backend\n"
        "print(*choose_backend(), sep='\\n')",
    )
    assert name == "gather"
    assert reason.startswith("attention backend gather: the native kernels are missing (")
    assert "_native" in reason


def test_a_failed_build_is_an_error_where_the_kernels_are_required(tmp_path: Path) -> None:
    built = build_wheel(tmp_path, **{REQUIRE_NATIVE: "1"})
    assert built.returncode != 0
    assert "/bin/false" in built.stdout + built.stderr
    assert not list(tmp_path.glob("dist/*"))


def test_setup_requires_the_kernels() -> None:
    """What `make setup` runs is an install that fails when the build does."""
    recipe = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    [install] = [line for line in recipe.splitlines() if "--editable" in line]
    assert install.startswith(f"{REQUIRE_NATIVE}=1 ")
