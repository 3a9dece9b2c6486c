"""The guards of conftest.py must be able to fail: each is shown a test that breaks its rule."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.hang_limit(300)

OPTIONS = """
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
addopts = -p no:cacheprovider -p no:hypothesispytest
markers =
    hang_limit: seconds
    keeps_native: leaks
    seeds: count
    torch: needs it
    unprivileged: needs it
    verbs: needs it
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """Return a fresh suite with our conftest.py."""
    pytester.makeini(OPTIONS)
    # No test there is one of hypothesis, whose import would take most of the time.
    (pytester.path / "hypothesis.py").write_text("from unittest.mock import Mock\n\nsettings = HealthCheck = Mock()\n")
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    return pytester


def run(suite: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    suite.makepyfile(source)
    return suite.runpytest_subprocess(*options)


def test_loop_error_fails_the_test(suite: pytest.Pytester) -> None:
    source = """
        import asyncio

        async def test_bad():
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)
            await asyncio.sleep(0.01)

        async def test_never_retrieved():
            asyncio.get_running_loop().create_future().set_exception(ValueError("lost"))

        async def test_on_purpose(loop_errors):
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)
            await asyncio.sleep(0.01)
            assert "ZeroDivisionError" in loop_errors[0]["exception"]
            loop_errors.clear()
    """
    result = run(suite, source)
    result.assert_outcomes(passed=3, errors=2)
    result.stdout.fnmatch_lines(["*exception handler was called*"])


@pytest.mark.parametrize("kind", ["asyncio", "debug", pytest.param("uvloop", marks=pytest.mark.uvloop)])
def test_loop_option_chooses_the_loop(suite: pytest.Pytester, kind: str) -> None:
    source = f"""
        import asyncio

        async def test_kind():
            loop = asyncio.get_running_loop()
            assert loop.get_debug() is {kind == "debug"}
            assert type(loop).__module__.startswith("uvloop") is {kind == "uvloop"}
    """
    run(suite, source, "--loop", kind).assert_outcomes(passed=1)


def test_hang_fails_with_stacks_and_the_run_goes_on(suite: pytest.Pytester) -> None:
    source = """
        import asyncio, pytest

        @pytest.mark.hang_limit(1.5)
        async def test_hang():
            await asyncio.Event().wait()

        def test_next():
            pass
    """
    result = run(suite, source)
    result.assert_outcomes(passed=1, failed=1)
    result.stderr.fnmatch_lines(["*reached its hang limit*", '*File "*'])


def test_hang_that_swallows_the_failure_ends_the_run(suite: pytest.Pytester) -> None:
    conftest = suite.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("HARD_LIMIT_AFTER = 30.0", "HARD_LIMIT_AFTER = 0.5"))
    source = """
        import pytest, time

        @pytest.mark.hang_limit(0.5)
        def test_hang():
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    pass
    """
    result = run(suite, source)
    assert result.ret != 0
    result.stderr.fnmatch_lines(["*Timeout*", '*File "*'])


def test_required_skip_is_a_failure(suite: pytest.Pytester) -> None:
    source = """
        import pytest

        @pytest.mark.torch
        def test_marked():
            import torch

        def test_needs(need):
            need("torch")

        def test_import():
            pytest.importorskip("torch")
    """
    hide = "import sys; sys.modules['torch'] = None\n"
    conftest = suite.path / "conftest.py"
    text = conftest.read_text().replace("import asyncio\n", f"import asyncio\n{hide}", 1)
    conftest.write_text(text.replace("importlib.util.find_spec(name)", 'name != "torch"'))
    run(suite, source).assert_outcomes(skipped=3)
    result = run(suite, source, "--require", "uvloop,torch")
    outcome = result.parseoutcomes()
    assert outcome.get("skipped", 0) == 0
    assert outcome.get("failed", 0) + outcome.get("errors", 0) == 3
    assert run(suite, source, "--require", "toch").ret == pytest.ExitCode.USAGE_ERROR


def test_required_module_level_skip_is_a_failure(suite: pytest.Pytester) -> None:
    source = "import pytest\npytest.importorskip('torch')\ndef test_it(): pass\n"
    conftest = suite.path / "conftest.py"
    conftest.write_text(
        conftest.read_text().replace("import asyncio\n", "import asyncio, sys\nsys.modules['torch'] = None\n", 1)
    )
    assert run(suite, source).ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert run(suite, source, "--require", "torch").ret not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)


def test_too_few_passed_is_a_failure(suite: pytest.Pytester) -> None:
    source = "import pytest\ndef test_it(): pytest.skip('no')\n"
    assert run(suite, source).ret == 0
    assert run(suite, source, "--min-passed", "1").ret == pytest.ExitCode.TESTS_FAILED


def test_native_leak_fails_the_test(suite: pytest.Pytester) -> None:
    source = """
        import sys, types, pytest

        core = types.ModuleType("aiodatadist._core")
        core.live_objects = lambda: {"op": alive, "cache": 0}
        alive = 0

        @pytest.fixture(autouse=True)
        def counted(monkeypatch):
            sys.modules["aiodatadist._core"] = core

        def leak():
            global alive
            alive += 1

        def test_clean():
            pass

        @pytest.mark.keeps_native
        def test_may_leak():
            leak()

        def test_leaks():
            leak()

        def test_is_not_blamed_for_the_leak_before():
            pass

        def test_fails():
            leak()
            assert False

        def test_is_not_blamed_for_what_a_failure_keeps():
            pass

        def test_leaks_more():
            leak()
    """
    conftest = suite.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("SETTLE_SECONDS = 30.0", "SETTLE_SECONDS = 0.1"))
    result = run(suite, source)
    result.assert_outcomes(passed=6, failed=1, errors=2)
    result.stdout.fnmatch_lines(["*test_leaks*", "*still alive after the test: {'op': 2}*"])
    result.stdout.fnmatch_lines(["*test_leaks_more*", "*still alive after the test: {'op': 4}*"])


def test_scale_and_seeds(suite: pytest.Pytester) -> None:
    source = """
        import pytest

        @pytest.mark.seeds(10)
        def test_seed(seed, scale):
            assert 0 <= seed < 3
            assert scale(1000) == 300
            assert scale(1) == 1
    """
    run(suite, source, "--scale", "0.3").assert_outcomes(passed=3)


VERBS = """
    import pytest

    @pytest.mark.verbs
    def test_over_verbs():
        pass
"""


def test_a_run_that_requires_verbs_and_finds_no_device_fails(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here there is not even a library: what the loader finds first is none."""
    (suite.path / "libibverbs.so.1").write_text("not a library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(suite.path))
    run(suite, VERBS).assert_outcomes(skipped=1)
    result = run(suite, VERBS, "-m", "verbs", "--require", "verbs")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*requires verbs, which --require demands*"])


def test_for_verbs_alone_only_modules_that_name_it_are_imported(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_other="raise RuntimeError('imported')", test_named=VERBS)
    result = suite.runpytest_subprocess("-m", "verbs")
    assert sum(result.parseoutcomes().get(end, 0) for end in ("passed", "skipped")) == 1
    assert result.ret == pytest.ExitCode.OK
    assert suite.runpytest_subprocess().ret == pytest.ExitCode.INTERRUPTED


def test_a_module_with_tests_of_verbs_names_it(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        shared="import pytest\nMARK = getattr(pytest.mark, 'ver' + 'bs')",
        test_hidden="from shared import MARK\n\n@MARK\ndef test_it():\n    pass",
    )
    result = suite.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*must name it*test_hidden.py*"])
