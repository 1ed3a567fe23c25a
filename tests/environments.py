"""Environments of their own for packages beside ktforge, as a third party would have them."""

import os
import subprocess
import sysconfig
import venv
from pathlib import Path


def create(folder: Path) -> Path:
    """A fresh environment in ``folder`` that sees this one's packages, ktforge among them."""
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    # addsitedir reads this environment's own .pth files too, such as that of an editable ktforge.
    (packages / "beside.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return folder


def install(environment: Path, *sources: Path) -> None:
    call(environment, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", *sources)


def call(environment: Path, *arguments, check: bool = True, **variables: str) -> subprocess.CompletedProcess:
    """What the environment's Python does with these arguments."""
    done = subprocess.run(
        [environment / "bin" / "python", *map(str, arguments)], capture_output=True, text=True,
        env={**os.environ, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1", **variables}, cwd=environment,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done
