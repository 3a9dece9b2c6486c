"""Build of the extension module; everything declarative stands in pyproject.toml.

``aiodatadist._core`` is made of ``_core.pyx`` and the C++ files of ``aiodatadist/_native``. ``aiodatadist._limits`` is
for ``aiodatadist bench`` alone: the raw operations that it holds the library against. ``aiodatadist._hixl_shim`` is no
module of Python's but a shared object beside them, which is opened only where HIXL is.
Objects are kept in ``build/objects``, one folder for each flavour; an object is compiled again only when its
command, its source or a header it includes has changed.

Environment:

``AIODATADIST_DEBUG=1``
    ``-O1 -g``, assertions and live-object counters.
``AIODATADIST_SANITIZE=address|thread|undefined``
    Instrument with these sanitizers (a comma separated list).
``AIODATADIST_WERROR=1``
    Warnings in the hand-written C++ are errors.
``AIODATADIST_VERBS=0``
    Leave the transport verbs out although the headers of rdma-core are there. They are needed to build it; the
    library itself is opened at run time.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

NATIVE = "aiodatadist/_native"
LIMITS = f"{NATIVE}/limits.cpp"
HIXL_SHIM = f"{NATIVE}/hixl_shim.cpp"
BUILT_APART = {HIXL_SHIM, LIMITS}
HEADERS = sorted(
    glob.glob("include/**/*.h", recursive=True) + glob.glob(f"{NATIVE}/*.hpp") + glob.glob(f"{NATIVE}/*.h")
)
DECLARATIONS = sorted(glob.glob("aiodatadist/*.pxd") + glob.glob("aiodatadist/*.pxi"))
STRICT = ["-Wall", "-Wextra", "-Wconversion"]
# Cython's output is not ours to correct; what it gets wrong in our own lines still shows under -Wall.
GENERATED = [
    "-Wall",
    "-Wno-unused-function",
    "-Wno-unused-but-set-variable",
    "-Wno-deprecated-declarations",
    "-Wno-cpp",
]


def is_set(name: str) -> bool:
    """Say whether a switch in the environment is on."""
    return os.environ.get(name, "") not in ("", "0")


def has_verbs() -> bool:
    """Say whether the compiler will find infiniband/verbs.h, and verbs is not to be left out."""
    if os.environ.get("AIODATADIST_VERBS") == "0":
        return False
    named = [os.environ.get(name, "").split(":") for name in ("CPATH", "CPLUS_INCLUDE_PATH")]
    folders = [folder for names in named for folder in names if folder]
    folders += [f"{sys.prefix}/include", "/usr/local/include", "/usr/include"]
    return any(os.path.exists(f"{folder}/infiniband/verbs.h") for folder in folders)


class Flavour:
    """What the environment asks for: flags, macros and a name for the object directory."""

    def __init__(self) -> None:
        self.debug = is_set("AIODATADIST_DEBUG")
        sanitizers = sorted({s.strip() for s in os.environ.get("AIODATADIST_SANITIZE", "").split(",")} - {""})
        if unknown := set(sanitizers) - {"address", "thread", "undefined"}:
            raise SystemExit(f"AIODATADIST_SANITIZE: unknown sanitizer {', '.join(sorted(unknown))}")
        if {"address", "thread"} <= set(sanitizers):
            raise SystemExit("AIODATADIST_SANITIZE: address and thread cannot be combined")
        self.name = "-".join((["debug"] if self.debug else []) + sanitizers) or "release"
        self.compile_flags = ["-std=c++17", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-pthread"]
        self.link_flags = ["-pthread"]
        self.macros: list[tuple[str, str | None]] = [("AIODATADIST_VERBS", "1")] if has_verbs() else []
        if self.debug or sanitizers:
            self.compile_flags += ["-O1", "-g", "-fno-omit-frame-pointer"]
        else:
            self.compile_flags += ["-O3", "-g0"]
        if self.debug:
            # The interpreter's own flags define NDEBUG.
            self.compile_flags += ["-UNDEBUG"]
            self.macros += [("AIODATADIST_DEBUG", "1"), ("_GLIBCXX_ASSERTIONS", "1")]
        if sanitizers:
            self.macros += [("AIODATADIST_SANITIZED", "1")]
            self.compile_flags += [f"-fsanitize={','.join(sanitizers)}"]
            self.link_flags += [f"-fsanitize={','.join(sanitizers)}"]
        if "undefined" in sanitizers:
            self.compile_flags += ["-fno-sanitize-recover=undefined"]
        if "thread" in sanitizers:
            # gcc warns of every stand-alone fence, which the sanitizer does not model.
            self.compile_flags += ["-Wno-tsan"]


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold an advisory lock, so that two builds of one flavour take turns."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def headers_of(depfile: str) -> list[str] | None:
    """Return the files that a compiler's dependency file names, or None without one."""
    try:
        with open(depfile) as f:
            text = f.read()
    except OSError:
        return None
    _, _, names = text.replace("\\\n", " ").partition(": ")
    # A backslash escapes a blank within a name.
    return [name.replace("\0", " ") for name in names.replace("\\ ", "\0").split()]


def read_text(path: str) -> str | None:
    """Return a small file's content, or None when there is none."""
    try:
        with open(path) as f:
            return f.read()
    except OSError:
        return None


class BuildExt(build_ext):
    """Compile what changed, several objects at once, with flags that depend on where a source comes from."""

    def build_extension(self, ext: Any) -> None:
        """Build one extension into the build directory."""
        if sys.platform != "linux":
            raise SystemExit(
                "aiodatadist runs on Linux only: its transports use process_vm_readv, memfd, pidfd and epoll"
            )
        flavour = Flavour()
        objects_dir = f"build/objects/{sys.implementation.cache_tag}-{os.uname().machine}-{flavour.name}"
        os.makedirs(objects_dir, exist_ok=True)
        with locked(f"{objects_dir}/.lock"):
            sources = [(self.translate(ext, s, objects_dir) if s.endswith(".pyx") else s) for s in ext.sources]
            # The generated file takes longest: it goes first.
            jobs = int(self.parallel or min(os.cpu_count() or 1, 4))
            with ThreadPoolExecutor(jobs) as pool:
                results = list(pool.map(lambda source: self.compile(ext, source, objects_dir, flavour), sources))
            self.link(ext, results, objects_dir, flavour)

    def translate(self, ext: Any, source: str, objects_dir: str) -> str:
        """Run Cython when its inputs changed; return the path of the C++ file."""
        from Cython import __version__ as version
        from Cython.Build import cythonize

        build_dir = f"{objects_dir}/cython-{version}"
        generated = f"{build_dir}/{os.path.splitext(source)[0]}.cpp"
        outdated = not os.path.exists(generated) or os.path.getmtime("setup.py") > os.path.getmtime(generated)
        module = Extension(ext.name, [source], language="c++", include_dirs=ext.include_dirs)
        (made,) = cythonize(
            [module],
            build_dir=build_dir,
            force=bool(self.force) or outdated,
            quiet=True,
            compiler_directives={"language_level": "3"},
        )
        return str(made.sources[0])

    def compile(self, ext: Any, source: str, objects_dir: str, flavour: Flavour) -> tuple[str, bool]:
        """Compile one source if needed; return its object and whether it is new."""
        strict = source.startswith(NATIVE)
        flags = flavour.compile_flags + (STRICT if strict else GENERATED)
        macros = [*ext.define_macros, *flavour.macros]
        (obj,) = self.compiler.object_filenames([source], output_dir=objects_dir)
        depfile, keyfile = f"{obj}.d", f"{obj}.key"
        command = [
            getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so),
            flags,
            macros,
            ext.include_dirs,
            sys.version,
        ]
        key = hashlib.sha256(repr(command).encode()).hexdigest()
        # An object that passed with warnings as errors serves without, but not the other way round.
        keys = [f"{key} -Werror", key]
        if strict and is_set("AIODATADIST_WERROR"):
            flags = [*flags, "-Werror"]
            keys.pop()
        if not self.force and self.is_current(obj, depfile) and read_text(keyfile) in keys:
            return obj, False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(keyfile)
        start = time.time()
        print(f"compiling {source} ({flavour.name})", flush=True)
        self.compiler.compile(
            [source],
            output_dir=objects_dir,
            macros=macros,
            include_dirs=ext.include_dirs,
            extra_postargs=[*flags, "-MMD", "-MF", depfile],
            depends=ext.depends,
        )
        # An edit made while the compiler ran must count as newer than the object.
        os.utime(obj, (start, start))
        with open(keyfile, "w") as f:
            f.write(keys[-1])
        return obj, True

    @staticmethod
    def is_current(obj: str, depfile: str) -> bool:
        """Say whether an object is newer than all that it was made of."""
        names = headers_of(depfile)
        try:
            made = os.stat(obj).st_mtime_ns
            return bool(names) and all(os.stat(name).st_mtime_ns < made for name in names or ())
        except OSError:
            return False

    def link(self, ext: Any, results: list[tuple[str, bool]], objects_dir: str, flavour: Flavour) -> None:
        """Link if an object is new or the list changed, then put the library where setuptools expects it."""
        target = self.get_ext_fullpath(ext.name)
        kept = f"{objects_dir}/{os.path.basename(target)}"
        objects = [obj for obj, _ in results]
        flags = [*flavour.link_flags, *ext.extra_link_args]
        key = hashlib.sha256(repr([objects, flags, ext.libraries]).encode()).hexdigest()
        # By their times: an object that both libraries hold may be new by the build of the other.
        linked = os.path.getmtime(kept) if os.path.exists(kept) else 0.0
        outdated = any(new or os.path.getmtime(obj) >= linked for obj, new in results)
        if self.force or outdated or read_text(f"{kept}.key") != key:
            for path in (kept, f"{kept}.key"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            self.compiler.link_shared_object(
                objects,
                kept,
                libraries=self.get_libraries(ext),
                extra_postargs=flags,
                build_temp=objects_dir,
                target_lang="c++",
            )
            with open(f"{kept}.key", "w") as f:
                f.write(key)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        replace(kept, target)

    def copy_extensions_to_source(self) -> None:
        """Put the library beside its source in one step: another process may be importing it."""
        for ext in self.extensions:
            built = os.path.join(self.build_lib, self.get_ext_filename(ext.name))
            replace(built, self.get_ext_filename(ext.name))


def replace(source: str, target: str) -> None:
    """Copy a file over another atomically."""
    partial = f"{target}.{os.getpid()}.new"
    shutil.copy2(source, partial)
    os.replace(partial, target)


def extension(name: str, sources: list[str]) -> Extension:
    """Describe an extension of the package."""
    return Extension(
        f"aiodatadist.{name}",
        sources=[f"aiodatadist/{name}.pyx", *sources],
        depends=[*HEADERS, *DECLARATIONS],
        include_dirs=["include", NATIVE],
        # Separate libraries up to glibc 2.33; without effect later.
        libraries=["dl", "rt", "pthread"],
        language="c++",
    )


def hixl_shim() -> Extension:
    """Describe the shim: it names symbols of CANN and links nothing of it; a missing one matters when it is called."""
    return Extension(
        "aiodatadist._hixl_shim",
        sources=[HIXL_SHIM],
        depends=HEADERS,
        include_dirs=[NATIVE],
        extra_link_args=["-Wl,-z,lazy"],
        language="c++",
    )


setup(
    packages=[*find_packages(include=["aiodatadist", "aiodatadist.*"]), "aiodatadist.include"],
    package_dir={"aiodatadist.include": "include"},
    py_modules=["pytest_aiodatadist"],
    ext_modules=[
        extension("_core", sorted(set(glob.glob(f"{NATIVE}/*.cpp")) - BUILT_APART)),
        extension("_limits", [f"{NATIVE}/copy.cpp", LIMITS]),
        hixl_shim(),
    ],
    cmdclass={"build_ext": BuildExt},
)
