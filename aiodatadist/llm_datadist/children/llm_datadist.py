"""Becomes `aiodatadist.llm_datadist`."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

try:
    import aiodatadist
except ModuleNotFoundError:
    # A checkout that the parent had as its current folder.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(HERE))))
    import aiodatadist

del sys.modules[__name__]
aiodatadist.install_as_llm_datadist()
if os.path.join(HERE, "aiodatadist_cpu") in sys.path:
    from aiodatadist.llm_datadist import host_npu

    host_npu.install()
