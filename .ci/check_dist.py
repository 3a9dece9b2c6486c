"""Check what an sdist and a wheel carry, and what the wheel's shared objects need.

Usage: check_dist.py CHECKOUT DIST
"""

from __future__ import annotations

import io
import re
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

# All that a machine with a C++ runtime has; anything else must be opened at run time.
ALLOWED = re.compile(r"(lib(c|m|stdc\+\+|gcc_s|dl|rt|pthread)|ld-linux(-[a-z0-9_-]+)?)\.so(\.\d+)*")
EXTENSIONS = ("_core", "_limits")
SHIM = "_hixl_shim"  # a shared object that is no module
# pytest's plug-in is a module of its own, which imports the package only when it is used.
PLUGIN = "pytest_aiodatadist"
SOURCES = {".py", ".pyi", ".pyx", ".pxd", ".pxi", ".cpp", ".hpp", ".h", ".npz"}


def needed(data: bytes) -> list[str]:
    """Return the libraries that a shared object names."""
    elf = ELFFile(io.BytesIO(data))
    return [
        tag.needed
        for section in elf.iter_sections()
        if isinstance(section, DynamicSection)
        for tag in section.iter_tags()
        if tag.entry.d_tag == "DT_NEEDED"
    ]


def check_sdist(checkout: Path, sdist: Path) -> list[str]:
    """Return what is wrong with a source distribution."""
    with tarfile.open(sdist) as tar:
        held = {PurePosixPath(*PurePosixPath(name).parts[1:]) for name in tar.getnames()}
    wanted = {
        PurePosixPath(path.relative_to(checkout))
        for folder in ("aiodatadist", "include", "tests", "examples")
        for path in (checkout / folder).rglob("*")
        if path.suffix in SOURCES
    }
    others = ("setup.py", "pyproject.toml", "LICENSE", "README.md", "aiodatadist/py.typed", f"{PLUGIN}.py")
    wanted |= {PurePosixPath(name) for name in others}
    # The checkout may have been built in, by its editable install.
    wanted -= {path for path in wanted if "build" in path.parts}
    faults = [f"the sdist lacks {path}" for path in sorted(wanted - held)]
    faults += [
        f"the sdist carries {path}"
        for path in sorted(held)
        if path in {PurePosixPath(f"aiodatadist/{name}.cpp") for name in EXTENSIONS}
        or path.suffix in {".so", ".o", ".pyc"}
        or path.parts[:1] == ("build",)
    ]
    return faults


def check_wheel(checkout: Path, wheel: Path) -> list[str]:
    """Return what is wrong with a wheel."""
    faults = []
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        objects = {name: archive.read(name) for name in names if ".so" in PurePosixPath(name).suffixes}
        entry_points = "".join(archive.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
    faults += [
        f"the wheel has no extension module {extension}"
        for extension in (*EXTENSIONS, SHIM)
        if not any(name.startswith(f"aiodatadist/{extension}.") for name in objects)
    ]
    for name, data in sorted(objects.items()):
        libraries = needed(data)
        print(f"{name}: {len(data) >> 10} KiB, needs {', '.join(libraries)}")
        faults += [f"{name} needs {library}" for library in libraries if not ALLOWED.fullmatch(library)]
    wanted = {"aiodatadist/py.typed", f"{PLUGIN}.py", *(f"aiodatadist/{extension}.pyi" for extension in EXTENSIONS)}
    for path in (checkout / "include").rglob("*.h"):
        wanted.add(f"aiodatadist/{path.relative_to(checkout)}")
    for path in (checkout / "aiodatadist").rglob("*.py"):
        wanted.add(str(path.relative_to(checkout)))
    faults += [f"the wheel lacks {name}" for name in sorted(wanted - names)]
    faults += [
        f"the wheel carries {name}"
        for name in sorted(names)
        if name.endswith((".cpp", ".hpp", ".pyx", ".pxd", ".o"))
        or not name.startswith(("aiodatadist/", "aiodatadist-", f"{PLUGIN}.py"))
    ]
    if not re.search(rf"^\[pytest11\]\n{PLUGIN} = {PLUGIN}$", entry_points, re.M):
        faults.append("the wheel has no entry point for pytest")
    return faults


def main() -> int:
    """Check both; print the faults."""
    checkout, dist = Path(sys.argv[1]), Path(sys.argv[2])
    (sdist,) = dist.glob("*.tar.gz")
    (wheel,) = dist.glob("*.whl")
    faults = check_sdist(checkout, sdist) + check_wheel(checkout, wheel)
    print("\n".join(faults) if faults else f"{sdist.name} and {wheel.name} are as they should be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
