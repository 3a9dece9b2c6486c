"""What the launcher puts on ``PYTHONPATH``: in processes that a script starts, `import llm_datadist` is served, too.

Each module here has the name of one that is imported at top level, puts the real thing in its own place, and is gone.
The folder ``aiodatadist_cpu`` is there with ``--cpu`` alone.
"""
