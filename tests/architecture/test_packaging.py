"""What the wheel holds, that it works where the tree is not, and that the tree names no author's machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import updater
from updater.core.release import RELEASE

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"updater", "transports", "engine_adapter", "trainer_side"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXT = {".py", ".md", ".toml", ".txt", ".sh", ".json", ".cfg", ".yml", ".yaml", ""}


def tracked() -> Iterator[Path]:
    """Files that are, or are about to be, part of the project."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout
    for name in listed.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file() and path.suffix in TEXT:
            yield path


def test_every_package_folder_is_listed() -> None:
    """A folder that pyproject forgets is missing from the wheel and from nowhere else."""
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_the_release_is_the_same_wherever_it_is_said() -> None:
    """What a front and its coordinator compare is what pip installed."""
    assert PROJECT["project"]["version"] == updater.__version__ == RELEASE


def test_every_package_is_typed() -> None:
    assert {package for package in PACKAGES if (ROOT / package / "py.typed").is_file()} == PACKAGES
    assert set(PROJECT["tool"]["setuptools"]["package-data"]) == PACKAGES


def test_constraints_pin_every_direct_dependency() -> None:
    pinned = {
        re.split(r"==", line)[0]: line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", line) for line in pinned.values())
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["transformers"], *extras["dev"]]
    names = {re.match(r"[A-Za-z0-9_-]+", entry)[0].replace("_", "-") for entry in wanted}  # type: ignore[index]
    assert names - set(pinned) == set()


#: Absolute folders of somebody's machine, and addresses other than examples, this machine and the licence's own.
MACHINE = re.compile(r"(?<![\w.])/(?:work|home|root|Users)/\w")
HOST = re.compile(r"https?://([A-Za-z0-9.-]+\.[A-Za-z]{2,})")
HOSTS = {"www.apache.org", "json-schema.org"}


def test_the_tree_names_no_machine_and_no_registry() -> None:
    found = []
    for path in tracked():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if path == Path(__file__):
                continue
            hosts = {host for host in HOST.findall(line) if not host.endswith((".example", ".invalid", ".test"))}
            if MACHINE.search(line) or hosts - HOSTS:
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert found == []


def test_links_between_documents_lead_somewhere() -> None:
    dead = []
    for path in tracked():
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
                if not (path.parent / target).exists():
                    dead.append(f"{path.relative_to(ROOT)}: {target}")
    assert dead == []


@pytest.mark.slow
def test_wheel_holds_the_four_packages_and_works_elsewhere(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    python = clean_environment(tmp_path / "venv", wheel)
    where = run([python, "-c", "import updater, engine_adapter.placement; print(updater.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    command = python.parent / "liveweights"
    for arguments in (["--help"], ["serve", "--help"], ["engine", "--help"], ["push", "--help"], ["inspect", "--help"]):
        assert run([command, *arguments], tmp_path)


def build_wheel(folder: Path) -> Path:
    """Built from a copy of what is tracked, so that no build folder appears in the tree."""
    copy = folder / "source"
    for path in [*tracked(), *(ROOT / package / "py.typed" for package in PACKAGES)]:
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(copy)], copy)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def clean_environment(folder: Path, wheel: Path) -> Path:
    """A new environment that has the wheel itself; its dependencies are read from this one, ours shadowed by it."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], folder)
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    # addsitedir is not used: this environment's own .pth files would bring the tree back.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(command: list[str | Path], folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
