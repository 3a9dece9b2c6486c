"""What the documents say is true: their code runs, their links lead somewhere, and every public name explains itself.

Rules for fenced blocks in `DOCUMENTS`:

* ``python``: runs, in order, in one session for each document, in which ``await`` works at top level.
* ``python NAME.py``: is a file. ``test_*.py`` is given to pytest, any other to the interpreter.
* ``text`` right after one of them: what it prints. ``...`` stands for anything, and white space is not compared.
* ``sh``: is not run here; each command must be one that the project has.

Any other kind of block is an error, so that nothing is left out unnoticed.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import codeop
import contextlib
import doctest
import functools
import importlib
import inspect
import io
import logging
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

import aiodatadist as adt
from aiodatadist.commands import COMMANDS, main

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "docs/guide.md", "docs/embedding.md", "docs/migrating.md")
PROSE = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SECONDS = 100.0


# Blocks. ------------------------------------------------------------------------------------------------------


@dataclass
class Block:
    """A fenced block of a document."""

    document: str
    line: int  # of its first line of content
    language: str
    name: str
    text: str
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks_of(document: str, text: str) -> list[Block]:
    """Return the fenced blocks; a ``text`` block becomes the output of the code right before it."""
    found: list[Block] = []
    open_block: Block | None = None
    between = True
    for number, line in enumerate(text.splitlines(), 1):
        if open_block is None:
            fence = re.match(r"\s*(```+|~~~+)(.*)", line)
            if fence is None:
                between = between and not line.strip()
                continue
            if fence[0] != line or fence[1] != "```" or line[0].isspace():
                raise ValueError(f"{document}:{number}: fences are three backquotes at the beginning of a line")
            language, _, name = fence[2].partition(" ")
            open_block = Block(document, number + 1, language, name, "")
        elif line == "```":
            if open_block.language == "text" and found and between and found[-1].output is None:
                found[-1].output = open_block.text
            else:
                found.append(open_block)
            open_block, between = None, True
        else:
            open_block.text += line + "\n"
    if open_block is not None:
        raise ValueError(f"{open_block}: a block without an end")
    for block in found:
        if block.language not in ("python", "sh") or (block.language == "sh" and block.output is not None):
            raise ValueError(f"{block}: a block of {block.language!r} that nobody checks")
    return found


def check_output(block: Block, printed: str) -> None:
    wanted = block.output or ""
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not doctest.OutputChecker().check_output(wanted, printed, options):
        pytest.fail(f"{block} printed\n{printed}\nand not\n{wanted}", pytrace=False)


def compiled(block: Block) -> CodeType:
    """Compile so that ``await`` works at top level and tracebacks name the line of the document."""
    padded = "\n" * (block.line - 1) + block.text
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code: CodeType = compile(padded, str(ROOT / block.document), "exec", flags, dont_inherit=True)
    return code


class Session:
    """Runs the blocks of one document, each on the names that those before it have left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
        self.ran: list[Block] = []

    def run(self, blocks: list[Block]) -> None:
        with asyncio.Runner() as runner:
            for block in blocks:
                if block.language != "python":
                    continue
                if block.name:
                    printed = self.run_file(block)
                else:
                    with contextlib.redirect_stdout(io.StringIO()) as out:
                        self.run_here(block, runner)
                    printed = out.getvalue()
                check_output(block, printed)
                self.ran.append(block)

    def run_here(self, block: Block, runner: asyncio.Runner) -> None:
        code = compiled(block)
        if "asyncio.run(" in block.text:
            exec(code, self.names)  # makes a loop of its own
            return

        async def call() -> None:
            # In the running loop, awaiting or not, as in `python -m asyncio`.
            result = FunctionType(code, self.names)()
            if inspect.iscoroutine(result):
                await asyncio.wait_for(result, SECONDS)

        runner.run(call())

    def run_file(self, block: Block) -> str:
        path = self.folder / block.name
        path.write_text(block.text)
        if block.name.startswith("test_"):
            return run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path.name], self.folder)
        return run([sys.executable, path.name], self.folder)


def run(command: list[str], folder: Path) -> str:
    """Run a command to its end and return what it printed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "AIODATADIST_"))}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(adt.__file__).parent.parent), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def no_loop_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if a loop that asyncio.run made had something to complain about."""
    with caplog.at_level(logging.WARNING):
        yield
    bad = [record.getMessage() for record in caplog.get_records("call") if record.name == "asyncio"]
    assert not bad


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.usefixtures("no_loop_errors")
def test_the_code_of_documents_runs(document: str, tmp_path: Path) -> None:
    blocks = blocks_of(document, (ROOT / document).read_text())
    session = Session(tmp_path)
    session.run(blocks)
    # By another way of counting, so that a fence that is not understood is not just gone.
    fences = re.findall(r"^[ \t]*[`~]{3,}[ \t]*(?:py|python|python3|pycon)\b", (ROOT / document).read_text(), re.M)
    assert len(session.ran) == len(fences) > 0


def test_the_guide_can_be_followed_at_a_prompt() -> None:
    """Line by line, as it says: a prompt takes an empty line for the end of a compound statement, and needs it."""
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    blocks = blocks_of("docs/guide.md", (ROOT / "docs/guide.md").read_text())
    session = [block for block in blocks if block.language == "python" and not block.name]
    assert len(session) > 20
    for block in session:
        typed: list[str] = []
        for number, line in enumerate([*block.text.splitlines(), ""], block.line):
            typed.append(line)
            try:
                whole = compiler("\n".join(typed), "<prompt>")
            except SyntaxError as error:
                pytest.fail(f"{block.document}:{number}: {error}", pytrace=False)
            if whole is not None:
                typed = []
        assert not typed, block


@functools.cache
def help_of(*words: str) -> str:
    """Return what a command prints for --help."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert end.value.code == 0
    return said.getvalue()


def test_the_shell_commands_of_documents_exist() -> None:
    commands = {command.NAME for command in COMMANDS}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for document in (*DOCUMENTS, "docs/serving.md"):  # whose python needs a server: tests/test_serve_docs.py
        for block in blocks_of(document, (ROOT / document).read_text()):
            if block.language != "sh":
                continue
            for command in re.split(r"\s*&&\s*|\n", block.text.strip().replace("\\\n", "")):
                words = command.split()
                match words:
                    case ["pip", "install", "-e", what]:
                        named = re.fullmatch(r"'?\.(?:\[([a-z,]+)\])?'?", what)
                        assert named, command
                        assert set(filter(None, (named[1] or "").split(","))) <= set(extras), command
                    case ["pip", "install", what]:
                        named = re.fullmatch(r"'aiodatadist\[([a-z,]+)\]'", what)
                        assert named, command
                        assert set(named[1].split(",")) <= set(extras), command
                    case ["pytest"]:
                        pass
                    case ["aiodatadist", "serve", role, *options]:
                        said = help_of("serve", role)
                        assert all(option in said for option in options if option.startswith("--")), command
                    case ["curl", *_]:
                        assert document == "docs/serving.md", command  # tests/test_serve_docs.py has them run
                    case ["aiodatadist", name, *options]:
                        assert name in commands, command
                        said = help_of(name)
                        assert all(option in said for option in options if option.startswith("--")), command
                    case ["python", "-m", "aiodatadist.llm_datadist", "--cpu", script, *_]:
                        assert (ROOT / script).is_file(), command
                    case ["python", script, *_]:
                        assert (ROOT / script).is_file(), command
                    case _:
                        pytest.fail(f"{block}: {command!r} is a command that nobody checks")


# The runner itself: a checker that finds nothing must not be one that looks at nothing. ------------------------


def test_a_wrong_block_is_found(tmp_path: Path) -> None:
    def run_text(text: str) -> list[Block]:
        session = Session(tmp_path)
        session.run(blocks_of("x.md", text))
        return session.ran

    assert len(run_text("```python\nx = 1\n```\nwords\n```python\nprint(x)\n```\n\n```text\n1\n```\n")) == 2
    assert (
        len(run_text("```python\nimport asyncio\nawait asyncio.sleep(0)\nprint('a b')\n```\n```text\na...\n```\n")) == 1
    )
    with pytest.raises(ZeroDivisionError):
        run_text("```python\n1 / 0\n```\n")
    with pytest.raises(pytest.fail.Exception, match="printed"):
        run_text("```python\nprint(1)\n```\n```text\n2\n```\n")
    with pytest.raises(pytest.fail.Exception, match="printed"):
        run_text("```python\nprint(1)\n```\n")
    with pytest.raises(pytest.fail.Exception, match="printed"):
        run_text("```python\nx = 1\n```\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match="ended with"):
        run_text("```python a.py\nraise SystemExit(3)\n```\n")
    with pytest.raises(AssertionError, match="1 failed"):
        run_text("```python test_a.py\ndef test_it():\n    assert False\n```\n")
    for wrong in (
        "```py\n1\n```\n",
        "```\n1\n```\n",
        "```text\n1\n```\n",
        "```python\n1\n```\nwords\n```text\n1\n```\n",
        "  ```python\n1\n```\n",
        "~~~python\n1\n~~~\n",
        "```python\n1\n",
    ):
        with pytest.raises(ValueError, match=r"^(x\.md:\d+)"):
            run_text(wrong)


# Examples. ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transports", ["shm,tcp", "tcp"])
def test_k5_pull_blocks(transports: str) -> None:
    said = run([sys.executable, "examples/pull_blocks.py", "--transports", transports], ROOT)
    assert f"linked over {transports.split(',')[0]}" in said
    assert "every block is right" in said
    assert "cluster 2 says 'request 1'" in said


def test_layerwise() -> None:
    said = run([sys.executable, "examples/layerwise.py"], ROOT)
    assert len(re.findall(r"linked cluster \d over shm", said)) == 2
    for stage, layers in ((0, range(4)), (1, range(4, 8))):
        assert sorted(re.findall(rf"layer (\d) is at stage {stage}", said)) == [str(layer) for layer in layers]
        assert f"stage {stage} was sent 4 layers, 1048576 bytes: all right" in said
        assert f"stage {stage} has 'request 1'" in said
        assert f"stage {stage}: every block is right" in said


def test_serve_in_a_framework() -> None:
    said = run([sys.executable, "examples/serve_in_a_framework.py", "--check"], ROOT)
    assert "WRONG" not in said
    for what in ("20 requests", "is a 504", "cancelled with its request", "next request is answered", "is a 503"):
        assert what in said


@pytest.mark.parametrize("transports", ["shm,tcp", "tcp"])
def test_custom_scheduler(transports: str) -> None:
    said = run([sys.executable, "examples/custom_scheduler.py", "--transports", transports], ROOT)
    assert f"linked over {transports.split(',')[0]}" in said
    found = re.search(
        r"(\d+) requests finished, every block right; (\d+) hung up, (\d+) of them during their pull", said
    )
    assert found
    finished, hung_up, aborted = map(int, found.groups())
    assert finished + hung_up == 60
    assert finished > 30
    assert aborted > 0


# Names and docstrings. ----------------------------------------------------------------------------------------


def test_all_is_sorted_complete_and_importable() -> None:
    names = adt.__all__
    order = sorted(names, key=lambda name: (not name.isupper(), name.startswith("_") or name[0].islower(), name))
    assert list(names) == order
    assert len(set(names)) == len(names)
    for name in names:
        value = getattr(adt, name)
        if isinstance(value, type | FunctionType):
            assert value.__module__ == "aiodatadist" or value.__module__.startswith("aiodatadist."), name
            home = importlib.import_module(value.__module__)
            assert getattr(home, value.__name__) is value, name
            assert name == value.__name__
            # The compiled module has no __all__; the module that presents its class does.
            listed = getattr(home, "__all__", None) or importlib.import_module("aiodatadist.layers").__all__
            assert value.__module__ == "aiodatadist" or name in listed, f"{name} is not in __all__ of its module"
    public = {name for name, value in vars(adt).items() if not name.startswith("_") and not inspect.ismodule(value)}
    public -= {"annotations"}
    assert public == set(names) - {"__version__"}


def test_the_whole_error_tree_is_public() -> None:
    errors = importlib.import_module("aiodatadist.errors")
    tree = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert tree <= set(adt.__all__)
    assert {name for name in tree if f" {name} " in (errors.__doc__ or "") + " "} == tree - {"DataDistError"}


def function(value: Any) -> Any:
    """Return the Python function behind a class's attribute, if there is one: native code may stand in front of it."""
    return inspect.unwrap(getattr(value, "__func__", value))


def documented(name: str, value: object) -> list[str]:
    """Return the public names in and under a class or function that have no docstring of their own."""
    doc = getattr(value, "__doc__", None)
    # Those that Enum, NamedTuple and dataclass make up say nothing.
    made_up = doc is not None and re.match(rf"{name}\(|Alias for field|An enumeration|Create new instance", doc)
    missing = [] if doc and doc.strip() and not made_up else [name]
    if not isinstance(value, type):
        return missing
    for member, found in vars(value).items():
        found = function(found)
        explained = member.startswith("_") or not isinstance(found, FunctionType | property)
        if not explained and not inspect.getdoc(getattr(value, member)):
            missing.append(f"{name}.{member}")
    return missing


@pytest.mark.parametrize("name", [name for name in adt.__all__ if name not in ("__version__", "DEFAULT_TIMEOUT")])
def test_public_names_have_docstrings(name: str) -> None:
    assert documented(name, getattr(adt, name)) == []


def test_a_missing_docstring_is_found() -> None:
    class Bare:
        def method(self) -> None: ...

        @property
        def field(self) -> int:
            return 1

    assert documented("Bare", Bare) == ["Bare", "Bare.method", "Bare.field"]


def signatures() -> Iterator[tuple[str, Any]]:
    """All public functions and methods of the classes that users call."""
    called: list[type] = [adt.DataDist, adt.CacheManager, adt.Cache, adt.Config, adt.Transfer]
    for cls in called:
        yield cls.__name__, cls
        for name, value in vars(cls).items():
            value = function(value)
            if isinstance(value, FunctionType) and not name.startswith("_"):
                yield f"{cls.__name__}.{name}", value
    values: list[type] = [adt.CacheDesc, adt.ClusterInfo, adt.BlocksCacheKey, adt.CacheKeyByIdAndIndex, adt.Geometry]
    for cls in values:
        yield cls.__name__, cls


def test_all_that_cache_managers_do_is_looked_at() -> None:
    names = {name for name, _ in signatures()}
    assert {f"CacheManager.{name}" for name in vars(adt.CacheManager) if not name.startswith("_")} <= names


def test_every_parameter_is_described() -> None:
    """A docstring with a section of parameters names all of them, and no others."""
    checked = 0
    for name, value in signatures():
        section = re.search(r"Parameters\n-+\n(.*?)(?:\n\n[A-Z][a-z() ]+\n-+\n|\Z)", inspect.getdoc(value) or "", re.S)
        if section is None:
            continue
        named = [
            one.strip(" *") for line in re.findall(r"^(\S.*?)(?: : .*)?$", section[1], re.M) for one in line.split(",")
        ]
        parameters = [
            one for one in inspect.signature(value).parameters if one not in ("self", "cls") and not one.startswith("_")
        ]
        assert named == parameters, name
        checked += 1
    assert checked >= 10


# Words. -------------------------------------------------------------------------------------------------------


def test_the_changelog_has_an_entry_for_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert adt.__version__ == version
    entry = re.search(
        rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## |\Z)", (ROOT / "CHANGELOG.md").read_text(), re.S | re.M
    )
    assert entry, f"no entry for {version}"
    assert len(entry[1].split()) > 30


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of headings."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", PROSE)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.resolve().is_relative_to(ROOT), target
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target
    # Files that are named in code quotes: those of this repository exist.
    for named in re.findall(r"`((?:docs|examples|tests|include|aiodatadist|\.ci)/[\w./-]+)`", text):
        assert (ROOT / named).exists(), named


def test_the_readme_leads_to_all_documents() -> None:
    readme = (ROOT / "README.md").read_text()
    for wanted in (
        "docs/guide.md",
        "docs/embedding.md",
        "docs/serving.md",
        "docs/design.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "examples/pull_blocks.py",
    ):
        assert f"({wanted})" in readme
