"""Becomes what `aiodatadist.llm_datadist.host_npu` has under this name."""

import sys

del sys.modules[__name__]

import llm_datadist  # noqa: E402, F401  # it finds aiodatadist

from aiodatadist.llm_datadist import host_npu  # noqa: E402

host_npu.install()
